"""Does dynamic or asynchronous sampling prefer short responses? Compares trained lengths with the lengths drawn.

    python bench/bias.py --json bias.json
    python bench/bias.py --controllers 4 --modes "first come, abort" --filters spread --oversampling 1.5

Response lengths are log-normal and do not depend on the prompt, so an unbiased sampler trains on the same distribution
that the engines draw from. Every combination of sampling mode, filter, number of controllers and engine seeds is run:
- `fixed`: no filter, no staleness: a step is the next prompts (sampling.filter=none);
- `deterministic`: the first accepted groups in prompt order (sampling.deterministic=true);
- `first come, abort`: groups in order of arrival, the rest is aborted (deterministic=false, surplus=abort): BIASED;
- `keep`: the rest continues in the next step (surplus=keep); engines pause during training;
- `staleness K`: generation continues during training (max_staleness=K).
`filter: spread` accepts a prompt with probability `--accept`, by a hash of its number, independent of lengths.
`seeds: no` is an engine that uses new noise when a request is started again, as on GPUs (generation.seeds=false).

Columns, over all steps after `--skip` and all `--seeds`:
- `length`: mean trained length / population mean (1 is unbiased); `longest 5 %`: share of trained responses that are
  longer than 95 % of the population / 5 % (1 is unbiased);
- `step s`: seconds per training step, rollout and update, and the same relative to `first come, abort`;
- `redone`: groups that were started again after they had begun or finished, per trained group.

Collector, ledger, pools and engine queues are the production code, in virtual time.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import write_json  # noqa: E402
from bench.virtual_loop import VirtualLoop  # noqa: E402
from bench.workflow import HERE, cut_mean, emulated_engines, make_config, make_source, median_of  # noqa: E402
from gcore.controller import collect  # noqa: E402
from gcore.emulate.engine import log_normal, unseeded  # noqa: E402
from gcore.generation.noise import noise_key  # noqa: E402
from gcore.runtime.local import Hub, LocalGroup, LocalHandle  # noqa: E402

MODES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "deterministic": {"deterministic": True},
    "first come, abort": {"deterministic": False, "surplus": "abort"},
    "keep": {"surplus": "keep"},
    "staleness 1": {"max_staleness": 1},
    "staleness 2": {"max_staleness": 2},
}
BIASED = ("first come, abort",)
EXCHANGE_INTERVAL_S = (0.1, 0.5)  # ten times that of a run: exchanges are most of the bench's CPU time


def combinations(args: argparse.Namespace) -> list[tuple[str, str, int, bool]]:
    """Mode, filter, controllers, engine seeds. Without filter and staleness, every mode equals `fixed`."""
    dynamic = ("deterministic", "first come, abort")
    return [
        (mode, keep, controllers, seeded)
        for mode in args.modes
        for keep in args.filters
        if (mode == "fixed") <= (keep == "none") and not (mode in dynamic and keep == "none")
        for controllers in args.controllers
        for seeded in (True, False)
    ]


class Team:
    """The controllers and engines of one emulated run."""

    def __init__(self, mode: str, keep: str, controllers: int, seeded: bool, seed: int, args: argparse.Namespace):
        from gcore.clients import EngineClient
        from gcore.content.text import TextModality
        from gcore.controller.collect import Collector
        from gcore.generation.pool import EnginePool
        from gcore.prompts.tokenizer import load_tokenizer, stop_tokens
        from gcore.protocols import Rendezvous
        from gcore.rewarding.functions import FunctionSource
        from gcore.rewarding.rewarder import WeightedRewarder
        from gcore.workflows.context import SharedContext, generate_and_reward

        self.args = args
        sampling = {"prompts_per_step": args.groups, "filter": keep, "oversampling": args.oversampling, **MODES[mode]}
        config = make_config(seed, args.siblings, args.most_tokens, sampling=sampling)
        self.sampling = config.sampling
        lengths = log_normal(median_of(args.tokens, args.sigma), args.sigma)
        self.engines = emulated_engines(args.engines, lengths if seeded else unseeded(lengths), args)
        clients = [EngineClient(LocalHandle(f"engine-{i}", engine)) for i, engine in enumerate(self.engines)]
        hub, tokenizer = Hub(controllers), load_tokenizer(config.model)
        source, self.started, self.collectors, self.pools = make_source(config, tokenizer), 0, [], []
        self.version = 0  # of the engines' weights

        def accept(group: list[Any]) -> tuple[bool, str]:
            number = group[0].rollout.prompt.id
            return keep == "none" or noise_key(seed, "good", number) < args.accept * 2**64, "no_spread"

        async def workflow(ctx: Any, prompt: Any) -> list[Any]:
            self.started += 1
            return await generate_and_reward(ctx, prompt)

        for rank in range(controllers):
            group = LocalGroup(Rendezvous(rank, controllers, None, hub))
            pool = EnginePool.for_controller(clients, rank, controllers, args.slots)
            rewarder = WeightedRewarder([FunctionSource(config.rewards.functions[0], 1, HERE)])
            modality = TextModality(config.generation, tokenizer, stop_tokens(config.model, tokenizer))
            shared = SharedContext(config, pool, rewarder, modality)
            rest = config.sampling, accept, lambda _: None, source, lambda: self.version
            self.collectors.append(Collector(workflow, shared, group, *rest))
            self.pools.append(pool)

    async def step(self, number: int) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await asyncio.gather(*(collector.step(number) for collector in self.collectors))
        if not self.sampling.max_staleness:  # the trainer uses the devices
            await asyncio.gather(*(pool.pause() for pool in self.pools))
        await asyncio.sleep(self.args.train_s)
        for engine in self.engines:
            await engine.load_weights(number, {})
        self.version = number
        for pool in self.pools:
            pool.resume()
        scored = [s for part in found for group in part.groups for s in group]
        return {
            "step_s": loop.time() - began,
            "lengths": [s.rollout.content.num_steps for s in scored],
            "drawn": sum(part.drawn for part in found),
            "groups": sum(len(part.groups) for part in found),
            "eligible": self._eligible(found),
        }

    def _eligible(self, found: list[Any]) -> tuple[int, int]:
        """Tokens and samples that could have been trained on, as rollout/length_bias counts them."""
        aborted = [pool.take_aborted() for pool in self.pools]
        counts = [
            *((part.tokens_passed, part.samples_passed) for part in found),
            *(aborted if not self.sampling.strict else []),
        ]
        return sum(tokens for tokens, _ in counts), sum(samples for _, samples in counts)

    def close(self) -> None:
        for collector in self.collectors:
            collector.close()


async def run(combination: tuple[str, str, int, bool], seed: int, args: argparse.Namespace) -> dict[str, Any]:
    team = Team(*combination, seed, args)
    steps = [await team.step(number) for number in range(1, args.skip + args.steps + 1)]
    redone = team.started - sum(step["drawn"] for step in steps)
    groups = sum(step["groups"] for step in steps)
    team.close()
    counted = steps[args.skip :]
    return {
        "lengths": [length for step in counted for length in step["lengths"]],
        "step_s": statistics.mean(step["step_s"] for step in counted),
        "redone": max(0, redone) / groups,
    }


def summary(combination: tuple[str, str, int, bool], args: argparse.Namespace) -> dict[str, Any]:
    mode, keep, controllers, seeded = combination
    runs = []
    for seed in range(args.seeds):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runs.append(runner.run(run(combination, seed, args)))
    lengths = [length for one in runs for length in one["lengths"]]
    longest = median_of(args.tokens, args.sigma) * math.exp(args.sigma * statistics.NormalDist().inv_cdf(0.95))
    return {
        "mode": mode,
        "filter": keep,
        "controllers": controllers,
        "seeds": seeded,
        "length": statistics.mean(lengths) / cut_mean(args.tokens, args.sigma, args.most_tokens),
        "longest": sum(length > longest for length in lengths) / len(lengths) / 0.05,
        "step_s": statistics.mean(one["step_s"] for one in runs),
        "redone": statistics.mean(one["redone"] for one in runs),
        "biased": mode in BIASED,
    }


def main() -> None:
    from gcore.launch.build import quiet

    args = parse()
    quiet()
    collect.EXCHANGE_INTERVAL_S = EXCHANGE_INTERVAL_S
    print(
        f"{args.groups} groups x {args.siblings} per step, {args.accept:.0%} of the prompts pass `spread`, lengths "
        f"log-normal with sigma {args.sigma:g} around {args.tokens:g} tokens, cut at {args.most_tokens}; "
        f"{args.engines} engines x {args.slots} slots, update {args.train_s:g} s; "
        f"{args.steps} steps x {args.seeds} seeds"
    )
    columns = {"filter": 8, "controllers": 13, "seeds": 7, "length": 8, "longest 5 %": 13, "step s": 8, "redone": 8}
    head = f"{'mode':18}" + "".join(f"{name:>{width}}" for name, width in columns.items())
    print(head + "\n" + "-" * len(head))
    rows = []
    for combination in combinations(args):
        row = summary(combination, args)
        rows.append(row)
        seeds = "yes" if row["seeds"] else "no"
        print(
            f"{row['mode']:18}{row['filter']:>8}{row['controllers']:13}{seeds:>7}{row['length']:8.2f}"
            f"{row['longest']:13.2f}{row['step_s']:8.1f}{row['redone']:8.2f}{'  biased' if row['biased'] else ''}",
            flush=True,
        )
    write_json(args.json, {"settings": vars(args), "rows": rows})
    if off := [row for row in rows if not row["biased"] and not 0.95 <= row["length"] <= 1.05]:
        sys.exit(f"{len(off)} unbiased modes outside 0.95-1.05: {[(r['mode'], r['controllers']) for r in off]}")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="measured steps per seed")
    parser.add_argument("--skip", type=int, default=6, help="steps before the measured ones")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--filters", nargs="+", default=["none", "spread"])
    parser.add_argument("--controllers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--oversampling", type=lambda word: word if word == "auto" else float(word), default="auto")
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of the lengths")
    parser.add_argument("--tokens", type=float, default=256, help="mean length of a response, before the cut")
    parser.add_argument("--most-tokens", type=int, default=4096)
    parser.add_argument("--groups", type=int, default=64, help="groups per step, over all controllers")
    parser.add_argument("--siblings", type=int, default=4)
    parser.add_argument("--accept", type=float, default=0.5, help="fraction of prompts that `spread` accepts")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--slots", type=int, default=128, help="requests that an engine decodes at once")
    parser.add_argument("--base-s", type=float, default=0.010)
    parser.add_argument("--per-sequence-s", type=float, default=0.0001)
    parser.add_argument("--train-s", type=float, default=5.0)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
