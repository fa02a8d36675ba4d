"""Dynamic sampling with heavy-tailed lengths: how long a step takes once enough good groups exist, and what it wastes.

    python bench/tail.py --json tail.json

Four controllers share emulated engines and need `--groups` good groups a step; a prompt is good with probability
`--accept`, by a hash of its number. The same work in four ways:
- `free, abort`: one global target, groups taken as they come (sampling.deterministic=false), the rest is aborted and
  its prompts are drawn again (sampling.surplus=abort).
- `free, keep`: the same, the rest goes on and is first in line for the next step (sampling.surplus=keep).
- `strict`: sampling.deterministic=true. The first good groups in the order of the prompts, whatever the timing.
- `quotas`: what G-Core does not do: each controller must find its own quarter, and the step ends with the slowest.

Reported over all steps (after `--skip` of each run) and seeds, in emulated seconds:
- `step`: from start to end of the rollout phase;
- `wait`: from the moment in which so many good groups were finished, anywhere, to the end of the phase (`quotas`:
  nearly none by its nature, for whoever has its quarter stops);
- `idle`: from the end of a controller's own part to the end of the phase, mean over controllers;
- `request`: what one finished request took, from being sent to its answer; the median, for comparison;
- of all tokens generated: those trained on, those of groups that the filter dropped, and those `thrown away` otherwise:
  aborted, or finished but beyond what the step took, or too old (what is kept for a next step counts as trained on);
- `length`: mean length of the responses trained on, over that of all responses (1 is unbiased). Engines have no seeds,
  as on GPUs: a response that was aborted and is made again has another length. See also bench/bias.py.

Engines: a decoding step takes `--base-s` plus `--per-sequence-s` for each request running, at most `--slots` at once.
Controllers, filter, board, ticks, pools and aborts are the code of a run, in virtual time as in bench/streaming.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from workflow import HERE, make_collector, make_config, make_source  # noqa: E402

from gcore.generation.noise import noise_key  # noqa: E402
from gcore.placement.replica_speed import ReplicaSpeed  # noqa: E402
from gcore.runtime.local import Hub, LocalGroup, LocalHandle  # noqa: E402
from gcore.simulate import VirtualLoop  # noqa: E402
from gcore.simulate.engine import EmulatedEngine, log_normal, unseeded  # noqa: E402

CONTROLLERS = 4
WAYS: dict[str, dict[str, Any]] = {
    "free, abort": {"deterministic": False, "surplus": "abort"},
    "free, keep": {"deterministic": False, "surplus": "keep"},
    "strict": {"deterministic": True},
    "quotas": {"deterministic": False, "surplus": "abort"},
}


class Timed(LocalHandle):
    """Times every request by itself; the siblings of a call share its ticket, so an abort ends them all."""

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


class Judgement:
    """The filter, and what it saw: when good groups were finished, and how many tokens each group has."""

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
    """The controllers of a run: one group with a global target, or (`quotas`) each for itself."""

    def __init__(self, way: str, sigma: float, seed: int, args: argparse.Namespace) -> None:
        from gcore.controller.workflow import generate_and_reward
        from gcore.prompts.tokenizer import load_tokenizer
        from gcore.protocols import Rendezvous
        from gcore.rewarding.rewarder import WeightedRewarder
        from gcore.rewarding.threads import FunctionSource

        self.args, self.alone, self.times = args, way == "quotas", list[float]()
        self.strict, self.keeps = way == "strict", way == "free, keep"
        self.target = args.groups // CONTROLLERS if self.alone else args.groups
        median = args.tokens / math.exp(sigma**2 / 2)
        speed = ReplicaSpeed(args.base_s, args.per_sequence_s, 0.0, args.slots, sleep_s=0.0, wake_s=0.0, weights_s=0.0)
        lengths = unseeded(log_normal(median, sigma))  # as on GPUs: what is made again has fresh noise
        self.engines = [EmulatedEngine(speed, lengths=lengths, tokens=range(4, 14)) for _ in range(args.engines)]
        handles = [Timed(f"engine-{i}", engine, self.times) for i, engine in enumerate(self.engines)]
        sampling = {"prompts_per_step": self.target, "filter": "spread", **WAYS[way]}
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
            keep, source = Judgement(own, args.accept), make_source(config, tokenizer)
            roles = config, handles, rewarder, group, generate_and_reward, keep, source, tokenizer
            collector = make_collector(*roles, version=lambda: self.version)
            collector.rate = args.accept  # as after some steps
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
        await asyncio.sleep(0)  # all have begun: what was carried over and is too old has been withdrawn
        missing = self.args.groups - sum(len(collector.ready) for collector in self.collectors)
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
        """Strict: tokens of the groups that were decided in this step; what came later never was."""
        return sum(
            keep.tokens[prompt]
            for collector, keep in zip(self.collectors, self.filters, strict=True)
            for prompt in collector.step_ledger.dropped
            if prompt in keep.tokens and prompt < collector.prompts.step_start
        )

    async def close(self) -> dict[str, float]:
        """Let what is kept for the next step come to its end; then what was generated, dropped and is still of use."""
        while self.keeps and any(collector.prompts.num_running for collector in self.collectors):
            await asyncio.sleep(1.0)
        for collector in self.collectors:
            collector.close()
        return {
            "generated": sum([(await engine.stats()).generated_tokens for engine in self.engines]),
            "dropped": 0 if self.strict else sum(keep.bad_tokens for keep in self.filters),
            "ready": sum(tokens_of(list(collector.ready.values())) for collector in self.collectors),
        }


async def run(way: str, sigma: float, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    team = Team(way, sigma, seed, args)
    steps = [await team.step(number) for number in range(1, args.skip + args.steps + 1)]
    totals = await team.close()
    tokens = {
        "generated": totals["generated"],
        "trained": sum(step["trained"] for step in steps) + totals["ready"],
        "dropped": sum(step["dropped"] for step in steps) + totals["dropped"],
        "per_sample": sum(step["trained"] for step in steps) / (len(steps) * args.groups * args.siblings),
    }
    request_s = statistics.median(team.times)
    return {"way": way, "sigma": sigma, "seed": seed, "steps": steps[args.skip :], **tokens, "request_s": request_s}


def population_mean(sigma: float, args: argparse.Namespace) -> float:
    """Mean length of all responses there could be, cut at --most-tokens."""
    normal, median = statistics.NormalDist(), args.tokens / math.exp(sigma**2 / 2)
    if not sigma:
        return min(args.tokens, args.most_tokens)
    cut = math.log(args.most_tokens / median) / sigma
    return args.tokens * normal.cdf(cut - sigma) + args.most_tokens * (1 - normal.cdf(cut))


def main() -> None:
    from gcore.controller.build import quiet

    args = parse()
    quiet()
    runs = []
    for sigma in args.sigma:
        for seed in range(args.seeds):
            for way in WAYS:
                print(f"sigma {sigma}, seed {seed}: {way}", file=sys.stderr, flush=True)
                with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                    runs.append(runner.run(run(way, sigma, seed, args)))
    results = [summary(way, sigma, runs, args) for sigma in args.sigma for way in WAYS]
    show(results, args)
    if args.json:
        record = {"settings": vars(args), "results": results, "runs": runs}
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")


def summary(way: str, sigma: float, runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    mine = [run for run in runs if (run["way"], run["sigma"]) == (way, sigma)]
    steps = [step for run in mine for step in run["steps"]]
    total = {name: sum(run[name] for run in mine) for name in ("generated", "trained", "dropped")}
    times = ("step_s", "wait_s", "idle_s")
    return {
        "way": way,
        "sigma": sigma,
        **{f"{name}_median": statistics.median(step[name] for step in steps) for name in times},
        **{f"{name}_worst": max(step[name] for step in steps) for name in times},
        "request_s": statistics.median(run["request_s"] for run in mine),
        "trained": total["trained"] / total["generated"],
        "dropped": total["dropped"] / total["generated"],
        "thrown_away": 1 - (total["trained"] + total["dropped"]) / total["generated"],
        "length": statistics.mean(run["per_sample"] for run in mine) / population_mean(sigma, args),
    }


def show(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(
        f"{args.groups} good groups x {args.siblings} a step, {args.accept:.0%} of the prompts are good, "
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
            f"{row['sigma']:5.1f}  {row['way']:11}{row['step_s_median']:12.1f}{row['step_s_worst']:12.1f}"
            f"{row['wait_s_median']:12.2f}{row['wait_s_worst']:12.2f}{row['idle_s_median']:12.2f}"
            f"{row['idle_s_worst']:12.2f}{row['request_s']:12.2f}{row['trained']:12.0%}{row['dropped']:12.0%}"
            f"{row['thrown_away']:12.0%}{row['length']:12.2f}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", help="write the numbers there")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="counted, of each seed")
    parser.add_argument("--skip", type=int, default=3, help="steps before them")
    parser.add_argument("--sigma", type=float, nargs="+", default=[1.0, 1.5], help="spreads of the lengths")
    parser.add_argument("--tokens", type=float, default=256, help="mean of a response, before it is cut")
    parser.add_argument("--most-tokens", type=int, default=4096)
    parser.add_argument("--groups", type=int, default=64, help="good groups of a step, over all controllers")
    parser.add_argument("--siblings", type=int, default=4)
    parser.add_argument("--accept", type=float, default=0.5, help="share of good prompts")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--slots", type=int, default=128, help="requests an engine decodes at once")
    parser.add_argument("--base-s", type=float, default=0.010)
    parser.add_argument("--per-sequence-s", type=float, default=0.0001)
    return parser.parse_args()


if __name__ == "__main__":
    main()
