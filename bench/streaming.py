"""Rollout phase with a generative judge: samples stream from policy to judge, against stage by stage.

    python bench/streaming.py --json streaming.json

The same work in three variants, on `--devices` emulated devices:
- `streaming`: half of the devices (or `--policy-devices`) serve the policy, the others the judge; a group is judged as
  soon as it is generated. G-Core does this.
- `staged, split`: the same split, but judging starts when the last group of the step is generated.
- `staged, all`: all devices serve the policy; when the last group is generated they swap (`--swap-s`), and all serve
  the judge.

Engines are emulated (gcore/emulate/engine.py): a decoding step takes `--base-s` plus `--per-sequence-s` per running
request, at most `--slots` run at once, the others queue. Lengths of policy and judge are log-normal, with the same mean
for every spread (sigma). Everything else is production code: two controllers with Collector, SampleContext,
WeightedRewarder, JudgeSource (pointwise) and EnginePool. A barrier in the workflow separates the stages. The swap back
to the policy, at the end of `staged, all`, is not counted.

Time is virtual and skips sleeps, so the seconds are those of the emulated devices, the same on every machine. The
controllers' CPU time is not included (bench/workflow.py measures it), except with `--work-counts`. All three variants
must give the same rewards for the same samples, else the bench fails.

`x streaming`: the median over seeds of the ratio per seed. `policy s` and `judge s`: seconds in which the role had a
request; `both s`: in which both had; `devices busy`: share of the devices' time in which they decoded.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import write_json  # noqa: E402
from bench.virtual_loop import VirtualLoop  # noqa: E402
from bench.workflow import (  # noqa: E402
    ALPHABET,
    emulated_engines,
    make_collector,
    make_config,
    make_source,
    median_of,
)
from gcore.emulate.engine import log_normal  # noqa: E402
from gcore.runtime.local import Hub, LocalGroup, LocalHandle  # noqa: E402

VARIANTS = ("streaming", "staged, split", "staged, all")
CONTROLLERS = 2


class BusyIntervals:
    """Intervals in which a role had at least one request."""

    def __init__(self) -> None:
        self.inside, self.since = 0, 0.0
        self.intervals: list[tuple[float, float]] = []

    def __enter__(self) -> None:
        if not self.inside:
            self.since = asyncio.get_running_loop().time()
        self.inside += 1

    def __exit__(self, *_: Any) -> None:
        self.inside -= 1
        if not self.inside:
            self.intervals.append((self.since, asyncio.get_running_loop().time()))


class Watched(LocalHandle):
    def __init__(self, name: str, role: Any, busy: BusyIntervals) -> None:
        super().__init__(name, role)
        self.busy = busy

    async def call(self, method: str, *args: Any) -> Any:
        with self.busy:
            return await super().call(method, *args)


def overlap(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


def make_role(
    role: str, num: int, mean: float, sigma: float, args: argparse.Namespace
) -> tuple[list[Watched], BusyIntervals]:
    """They sample digits, so that a verdict can always be parsed."""
    busy, lengths = BusyIntervals(), log_normal(median_of(mean, sigma), sigma)
    engines = emulated_engines(num, lengths, args, args.prefill_s_per_token)
    return [Watched(f"{role}-{i}", engine, busy) for i, engine in enumerate(engines)], busy


def make_workflow(variant: str, args: argparse.Namespace) -> Any:
    """The default workflow; for stages, with a barrier over all prompts of the step."""
    from gcore.workflows.context import generate_and_reward

    if variant == "streaming":
        return generate_and_reward
    barrier = asyncio.Barrier(args.prompts)

    async def staged(ctx: Any, prompt: Any) -> Any:
        group = await ctx.generate(prompt)
        await barrier.wait()
        if variant == "staged, all":
            await asyncio.sleep(args.swap_s)
        return await ctx.reward(group)

    return staged


def config_of(seed: int, args: argparse.Namespace) -> Any:
    judge = {
        "name": "judge",
        "model": {"build": {"alphabet": ALPHABET, "max_length": 3 * args.most_tokens}},
        "template": "{{ prompt }}{{ response }}",
        "verdict": r"(\d)\D*$",
        "max_prompt_length": 2 * args.most_tokens,
        "max_response_length": args.most_tokens,
    }
    sampling = {"prompts_per_step": args.prompts}
    return make_config(seed, args.siblings, args.most_tokens, sampling=sampling, rewards={"judges": [judge]})


async def rollout(
    variant: str, sigma: float, judge_tokens: float, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One step of two controllers: seconds of the rollout phase, and busy times of the devices."""
    from gcore.clients import EngineClient
    from gcore.controller.collect import no_filter
    from gcore.launch.build import Roles
    from gcore.launch.build_rewarder import build_rewarder
    from gcore.launch.machines import Machine
    from gcore.launch.plan import make_plan
    from gcore.prompts.tokenizer import load_tokenizer
    from gcore.protocols import Rendezvous

    config, part = config_of(seed, args), args.policy_devices or args.devices // 2
    parts = (args.devices, args.devices) if variant == "staged, all" else (part, args.devices - part)
    policies, policy_busy = make_role("engine", parts[0], args.policy_tokens, sigma, args)
    judges, judge_busy = make_role("judge", parts[1], judge_tokens, sigma, args)
    tokenizer, hub, workflow = load_tokenizer(config.model), Hub(CONTROLLERS), make_workflow(variant, args)
    plan = replace(make_plan(config, Machine(2, 0)), controllers=CONTROLLERS, reward_workers=0, role_nodes={})
    collectors = []
    for rank in range(CONTROLLERS):
        rewarder = build_rewarder(
            config, plan, Roles(judges={"judge": [EngineClient(handle) for handle in judges]}), rank
        )
        group = LocalGroup(Rendezvous(rank, CONTROLLERS, None, hub))
        source = make_source(config, tokenizer)
        collectors.append(make_collector(config, policies, rewarder, group, workflow, no_filter, source, tokenizer))
    loop = asyncio.get_running_loop()
    started = loop.time()
    found = await asyncio.gather(*(collector.step(1) for collector in collectors))
    seconds = loop.time() - started
    stats = [await handle.role.stats() for handle in (*policies, *judges)]
    scored = [s for collected in found for group in collected.groups for s in group]
    assert len(scored) == args.prompts * args.siblings, f"{len(scored)} samples"
    return {
        "variant": variant,
        "sigma": sigma,
        "judge_tokens": judge_tokens,
        "seed": seed,
        "seconds": seconds,
        "overlap_s": overlap(policy_busy.intervals, judge_busy.intervals),
        "policy_s": sum(end - start for start, end in policy_busy.intervals),
        "judge_s": sum(end - start for start, end in judge_busy.intervals),
        "devices_busy": sum(s.busy_s for s in stats) / args.devices / seconds,
        "tokens": sum(s.generated_tokens for s in stats),
        "rewards": sorted((s.rollout.prompt.id, s.rollout.sibling, s.reward) for s in scored),
    }


def main() -> None:
    from gcore.launch.build import quiet

    args = parse()
    quiet()
    runs: list[dict[str, Any]] = []
    cases = [(judge, sigma) for judge in args.judge_tokens for sigma in args.sigma]
    for judge, sigma in cases:
        for seed in range(args.seeds):
            print(f"judge {judge:g} tokens, sigma {sigma}, seed {seed}", file=sys.stderr, flush=True)
            found = []
            for variant in VARIANTS:
                with asyncio.Runner(loop_factory=lambda: VirtualLoop(args.work_counts)) as runner:
                    found.append(runner.run(rollout(variant, sigma, judge, seed, args)))
            rewards = [run.pop("rewards") for run in found]
            assert all(r == rewards[0] for r in rewards), "the variants disagree about the rewards"
            runs += found
    results = [summary(variant, judge, sigma, runs) for judge, sigma in cases for variant in VARIANTS]
    show(results, args)
    write_json(args.json, {"settings": vars(args), "results": results, "runs": runs})


def summary(variant: str, judge: float, sigma: float, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the seeds; the gain is the median of the ratios per seed."""
    case = [run for run in runs if (run["judge_tokens"], run["sigma"]) == (judge, sigma)]
    own = [run for run in case if run["variant"] == variant]
    streaming = {run["seed"]: run["seconds"] for run in case if run["variant"] == "streaming"}
    numbers = ("seconds", "overlap_s", "policy_s", "judge_s", "devices_busy", "tokens")
    return {
        "variant": variant,
        "judge_tokens": judge,
        "sigma": sigma,
        **{name: statistics.median(run[name] for run in own) for name in numbers},
        "worst_s": max(run["seconds"] for run in own),
        "over_streaming": statistics.median(run["seconds"] / streaming[run["seed"]] for run in own),
    }


def show(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(
        f"{args.prompts} prompts x {args.siblings}, policy {args.policy_tokens:g} tokens on average; {args.devices} "
        f"devices, {args.slots} slots each, a step {args.base_s * 1e3:g} + {args.per_sequence_s * 1e3:g} n ms; swap "
        f"{args.swap_s:g} s; median of {args.seeds} seeds; emulated seconds"
    )
    columns = ("rollout s", "x streaming", "worst s", "policy s", "judge s", "both s", "devices busy")
    head = f"{'judge':>6}{'sigma':>7}  {'':14}" + "".join(f"{name:>13}" for name in columns)
    print(head + "\n" + "-" * len(head))
    for row in results:
        print(
            f"{row['judge_tokens']:6g}{row['sigma']:7.1f}  {row['variant']:14}{row['seconds']:13.1f}"
            f"{row['over_streaming']:13.2f}{row['worst_s']:13.1f}{row['policy_s']:13.1f}{row['judge_s']:13.1f}"
            f"{row['overlap_s']:13.1f}{row['devices_busy']:13.0%}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="spreads of the lengths")
    parser.add_argument("--policy-tokens", type=float, default=512, help="mean length of a response")
    parser.add_argument("--judge-tokens", type=float, nargs="+", default=[512, 256], help="mean lengths of a verdict")
    parser.add_argument("--most-tokens", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--policy-devices", type=int, help="devices of the policy in the split; default: half")
    parser.add_argument("--slots", type=int, default=64, help="requests that a device decodes at once")
    parser.add_argument("--base-s", type=float, default=0.010)
    parser.add_argument("--per-sequence-s", type=float, default=0.0001)
    parser.add_argument("--prefill-s-per-token", type=float, default=0.00005)
    parser.add_argument(
        "--swap-s", type=float, default=1.0, help="seconds to put the policy to sleep and wake the judge"
    )
    parser.add_argument("--work-counts", action="store_true", help="add the controllers' CPU time to the virtual time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
