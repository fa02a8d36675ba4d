"""Dynamic sampling with heavy-tailed lengths: duration of a step after enough groups exist, and wasted tokens.

    python bench/tail.py --json tail.json

Four controllers share emulated engines and need `--groups` good groups per step; a prompt is good with probability
`--accept`, by a hash of its number. The same work in four variants:
- `free, abort`: one global target, groups in order of arrival (sampling.deterministic=false); the rest is aborted and
  its prompts are drawn again (sampling.surplus=abort).
- `free, keep`: the same, but the rest continues and is first in the queue of the next step (sampling.surplus=keep).
- `strict`: sampling.deterministic=true. The first good groups in the order of the prompts, independent of timing.
- `quotas`: not done by G-Core: each controller must find its own quarter, and the step ends with the slowest.

Reported over all steps (after `--skip` of each run) and seeds, in emulated seconds:
- `step`: from start to end of the rollout phase;
- `wait`: from the moment when `--groups` good groups were finished, over all controllers, to the end of the phase
  (`quotas`: nearly 0, because a controller stops when it has its quarter);
- `idle`: from the end of a controller's own part to the end of the phase, mean over controllers;
- `request`: median seconds of one finished request, for comparison;
- shares of all generated tokens: `trained`; `dropped`, of groups that the filter dropped; and `thrown away`: aborted,
  finished but not used by the step, or too old (groups kept for a next step count as trained);
- `length`: mean length of the trained responses / mean of all responses (1 is unbiased). Engines have no seeds, as on
  GPUs: a response that was aborted and started again has another length. See also bench/bias.py.

Engines: a decoding step takes `--base-s` plus `--per-sequence-s` per running request, at most `--slots` at once.
Controllers, filter, step ledger, progress exchanges, pools and aborts are production code, in virtual time as in
bench/streaming.py.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import write_json  # noqa: E402
from bench.virtual_loop import VirtualLoop  # noqa: E402
from bench.workflow import (  # noqa: E402
    HERE,
    cut_mean,
    emulated_engines,
    make_collector,
    make_config,
    make_source,
    median_of,
)
from gcore.emulate.engine import log_normal, unseeded  # noqa: E402
from gcore.generation.noise import noise_key  # noqa: E402
from gcore.runtime.local import Hub, LocalGroup, LocalHandle  # noqa: E402

CONTROLLERS = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "free, abort": {"deterministic": False, "surplus": "abort"},
    "free, keep": {"deterministic": False, "surplus": "keep"},
    "strict": {"deterministic": True},
    "quotas": {"deterministic": False, "surplus": "abort"},
}


class Timed(LocalHandle):
    """Times each request separately. The siblings of a call share its ticket, so an abort ends all of them."""

    def __init__(self, name: str, role: Any, times: list[float]) -> None:
        super().__init__(name, role)
        self.times = times

    async def call(self, method: str, *args: Any) -> Any:
        if method != "generate":
            return await super().call(method, *args)
        requests, ticket = args
        return await asyncio.gather(*(self._one(request, ticket) for request in requests))

    async def _one(self, request: Any, ticket: str) -> Any:
        loop = asyncio.get_running_loop()
        started = loop.time()
        completion = (await self.role.generate([request], ticket))[0]
        self.times.append(loop.time() - started)
        return completion


class RecordingFilter:
    """The filter. It records when good groups finished, and the number of tokens per group."""

    def __init__(self, seed: int, accept: float) -> None:
        self.seed, self.accept = seed, accept
        self.good: list[float] = []
        self.tokens: dict[int, int] = {}
        self.bad_tokens = 0

    def __call__(self, group: list[Any]) -> tuple[bool, str]:
        number = group[0].rollout.prompt.id
        self.tokens[number] = num = tokens_of([group])
        keep = noise_key(self.seed, "good", number) < self.accept * 2**64
        if keep:
            self.good.append(asyncio.get_running_loop().time())
        else:
            self.bad_tokens += num
        return keep, "no_spread"


def tokens_of(groups: Sequence[list[Any]]) -> int:
    return sum(len(s.rollout.content.tokens_S) for group in groups for s in group)


class Team:
    """The controllers of a run: one group with a global target, or (`quotas`) independent controllers."""

    def __init__(self, variant: str, sigma: float, seed: int, args: argparse.Namespace) -> None:
        from gcore.prompts.tokenizer import load_tokenizer
        from gcore.protocols import Rendezvous
        from gcore.rewarding.functions import FunctionSource
        from gcore.rewarding.rewarder import WeightedRewarder
        from gcore.workflows.context import generate_and_reward

        self.args, self.alone, self.times = args, variant == "quotas", list[float]()
        self.strict, self.keeps = variant == "strict", variant == "free, keep"
        self.target = args.groups // CONTROLLERS if self.alone else args.groups
        # as on GPUs: a repeated request has new noise
        lengths = unseeded(log_normal(median_of(args.tokens, sigma), sigma))
        self.engines = emulated_engines(args.engines, lengths, args)
        handles = [Timed(f"engine-{i}", engine, self.times) for i, engine in enumerate(self.engines)]
        sampling = {"prompts_per_step": self.target, "filter": "spread", **VARIANTS[variant]}
        hub = Hub(CONTROLLERS)
        self.collectors, self.filters = [], []
        self.version = 0  # of the engines' weights
        for rank in range(CONTROLLERS):
            own = (seed + 1) * 1000 + rank if self.alone else seed
            config = make_config(own, args.siblings, args.most_tokens, sampling=sampling)
            group = LocalGroup(
                Rendezvous(0, 1, None, Hub(1)) if self.alone else Rendezvous(rank, CONTROLLERS, None, hub)
            )
            tokenizer = load_tokenizer(config.model)
            rewarder = WeightedRewarder([FunctionSource(config.rewards.functions[0], 1, HERE)])
            keep, source = RecordingFilter(own, args.accept), make_source(config, tokenizer)
            roles = config, handles, rewarder, group, generate_and_reward, keep, source, tokenizer
            collector = make_collector(*roles, version=lambda: self.version)
            collector.rate = args.accept  # the value after some steps
            self.collectors.append(collector)
            self.filters.append(keep)

    async def step(self, number: int) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        for keep in self.filters:
            keep.good.clear()
        started, ends = loop.time(), list[float]()

        async def one(collector: Any) -> Any:
            collected = await collector.step(number)
            ends.append(loop.time())
            return collected

        tasks = [asyncio.ensure_future(one(collector)) for collector in self.collectors]
        await asyncio.sleep(0)  # all have started, and have withdrawn groups that are too old
        missing = self.args.groups - sum(len(collector.prompts.ready) for collector in self.collectors)
        groups = [group for task in tasks for group in (await task).groups]
        assert len(groups) == self.args.groups, f"step {number}: {len(groups)} groups"
        good, ended = sorted(time for keep in self.filters for time in keep.good), max(ends)
        met = started if missing <= 0 else good[missing - 1]
        for engine in self.engines:
            await engine.load_weights(number, {})
        self.version = number
        return {
            "step_s": ended - started,
            "wait_s": ended - met,
            "idle_s": ended - statistics.mean(ends),
            "trained": tokens_of(groups),
            "dropped": self._dropped() if self.strict else 0,
        }

    def _dropped(self) -> int:
        """Strict: tokens of the dropped groups among those decided in this step."""
        return sum(
            keep.tokens[prompt]
            for collector, keep in zip(self.collectors, self.filters, strict=True)
            for prompt in collector.step_ledger.dropped
            if prompt in keep.tokens and prompt < collector.prompts.step_start
        )

    async def close(self) -> dict[str, float]:
        """Waits for groups kept for the next step. Returns tokens generated, dropped and still usable."""
        while self.keeps and any(collector.prompts.num_running for collector in self.collectors):
            await asyncio.sleep(1.0)
        for collector in self.collectors:
            collector.close()
        return {
            "generated": sum([(await engine.stats()).generated_tokens for engine in self.engines]),
            "dropped": 0 if self.strict else sum(keep.bad_tokens for keep in self.filters),
            "ready": sum(tokens_of(list(collector.prompts.ready.values())) for collector in self.collectors),
        }


async def run(variant: str, sigma: float, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    team = Team(variant, sigma, seed, args)
    steps = [await team.step(number) for number in range(1, args.skip + args.steps + 1)]
    totals = await team.close()
    tokens = {
        "generated": totals["generated"],
        "trained": sum(step["trained"] for step in steps) + totals["ready"],
        "dropped": sum(step["dropped"] for step in steps) + totals["dropped"],
        "per_sample": sum(step["trained"] for step in steps) / (len(steps) * args.groups * args.siblings),
    }
    request_s = statistics.median(team.times)
    return {
        "variant": variant,
        "sigma": sigma,
        "seed": seed,
        "steps": steps[args.skip :],
        **tokens,
        "request_s": request_s,
    }


def main() -> None:
    from gcore.launch.build import quiet

    args = parse()
    quiet()
    runs = []
    for sigma in args.sigma:
        for seed in range(args.seeds):
            for variant in VARIANTS:
                print(f"sigma {sigma}, seed {seed}: {variant}", file=sys.stderr, flush=True)
                with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                    runs.append(runner.run(run(variant, sigma, seed, args)))
    results = [summary(variant, sigma, runs, args) for sigma in args.sigma for variant in VARIANTS]
    show(results, args)
    write_json(args.json, {"settings": vars(args), "results": results, "runs": runs})


def summary(variant: str, sigma: float, runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    own = [run for run in runs if (run["variant"], run["sigma"]) == (variant, sigma)]
    steps = [step for run in own for step in run["steps"]]
    total = {name: sum(run[name] for run in own) for name in ("generated", "trained", "dropped")}
    times = ("step_s", "wait_s", "idle_s")
    return {
        "variant": variant,
        "sigma": sigma,
        **{f"{name}_median": statistics.median(step[name] for step in steps) for name in times},
        **{f"{name}_worst": max(step[name] for step in steps) for name in times},
        "request_s": statistics.median(run["request_s"] for run in own),
        "trained": total["trained"] / total["generated"],
        "dropped": total["dropped"] / total["generated"],
        "thrown_away": 1 - (total["trained"] + total["dropped"]) / total["generated"],
        "length": statistics.mean(run["per_sample"] for run in own) / cut_mean(args.tokens, sigma, args.most_tokens),
    }


def show(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(
        f"{args.groups} good groups x {args.siblings} per step, {args.accept:.0%} of the prompts are good, "
        f"{args.tokens:g} tokens on average; {CONTROLLERS} controllers, {args.engines} engines, {args.slots} slots, a "
        f"step {args.base_s * 1e3:g} + {args.per_sequence_s * 1e3:g} n ms; {args.steps} steps x {args.seeds} seeds; "
        "emulated seconds"
    )
    columns = ["step median", "worst", "wait median", "worst", "idle median", "worst", "request"]
    columns += ["trained", "dropped", "thrown away", "length"]
    head = f"{'sigma':>5}  {'':11}" + "".join(f"{name:>12}" for name in columns)
    print(head + "\n" + "-" * len(head))
    for row in results:
        print(
            f"{row['sigma']:5.1f}  {row['variant']:11}{row['step_s_median']:12.1f}{row['step_s_worst']:12.1f}"
            f"{row['wait_s_median']:12.2f}{row['wait_s_worst']:12.2f}{row['idle_s_median']:12.2f}"
            f"{row['idle_s_worst']:12.2f}{row['request_s']:12.2f}{row['trained']:12.0%}{row['dropped']:12.0%}"
            f"{row['thrown_away']:12.0%}{row['length']:12.2f}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="measured steps per seed")
    parser.add_argument("--skip", type=int, default=3, help="steps before the measured ones")
    parser.add_argument("--sigma", type=float, nargs="+", default=[1.0, 1.5], help="spreads of the lengths")
    parser.add_argument("--tokens", type=float, default=256, help="mean length of a response, before the cut")
    parser.add_argument("--most-tokens", type=int, default=4096)
    parser.add_argument("--groups", type=int, default=64, help="good groups per step, over all controllers")
    parser.add_argument("--siblings", type=int, default=4)
    parser.add_argument("--accept", type=float, default=0.5, help="fraction of good prompts")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--slots", type=int, default=128, help="requests that an engine decodes at once")
    parser.add_argument("--base-s", type=float, default=0.010)
    parser.add_argument("--per-sequence-s", type=float, default=0.0001)
    return parser.parse_args()


if __name__ == "__main__":
    main()
