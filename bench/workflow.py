"""Cost of a sample in a controller: CPU and memory of thousands of concurrent sample programs in one process.

    python bench/workflow.py --json workflow.json
    python bench/workflow.py --only "fixed, rule in the loop" --rounds 1 --profile

One controller, one core (the process is pinned to it), one training step of `--programs` prompts with `--siblings`
responses each, all in progress at once. The engine is emulated: it sleeps. Everything else is production code: prompts
of the arithmetic task through chat template and tokenizer, SampleContext, EnginePool, a rewarder with a rule,
Collector, StepLedger and the local runtime.

The CPU time is that of the whole process (all its threads) from the start of `Collector.step` to its return: prompts
rendered and tokenised, requests created and routed, tokens decoded to text, rewards, weighted sums, filter, progress
exchanges, the event loop, and the emulated engine. Then the engine's part is measured separately: the same requests,
created before, from the same number of tasks that do nothing else. `controller` is the difference. Not included: RPC of
other runtimes. Of reward workers (`rule in workers`), which are other processes, only the controller's side counts.

Memory is the growth of the process's resident set from before the step to its peak, including the emulated engine.
Rows: `fixed`, every prompt counts; `strict` and `free`, dynamic sampling (with and without `sampling.deterministic`)
that drops about half of the groups and starts accordingly more; `seldom gc`: with gc.freeze() and
gc.set_threshold(50_000, 20, 100) before the step.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import cProfile
import gc
import math
import multiprocessing
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import write_json  # noqa: E402

ALPHABET = "0123456789+="
HERE = str(Path(__file__).resolve())
DYNAMIC = {"filter": "spread", "max_oversampling": 2.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "fixed, rule in the loop": {"rule": "in_the_loop"},
    "the same, seldom gc": {"rule": "in_the_loop", "gc": (50_000, 20, 100)},
    "fixed, rule in a thread": {"rule": "in_a_thread"},
    "fixed, rule in workers": {"rule": "in_a_thread", "workers": 1},
    "strict, rule in the loop": {"rule": "in_the_loop", "sampling": {**DYNAMIC, "deterministic": True}},
    "free, rule in the loop": {"rule": "in_the_loop", "sampling": {**DYNAMIC, "deterministic": False}},
}


def in_a_thread(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    """1 if the response begins with a 0 or a 1: all four siblings are equal in about half of the groups."""
    return [float(text[:1] in ("0", "1")) for text in completions]


async def in_the_loop(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    return in_a_thread(prompts, completions)


# ---- parts of a run, for this and other benches ----------------------------------------------------------------------


def make_config(seed: int, siblings: int, most_tokens: int, **sections: Any) -> Any:
    from gcore.config.tree import Config

    sampling = {"samples_per_prompt": siblings, **sections.pop("sampling", {})}
    tree = {
        "run": {"seed": seed},
        "model": {"build": {"alphabet": ALPHABET, "max_length": 64 + most_tokens}},
        "data": {"train": {"task": "arithmetic", "args": {"max": 999, "eval_size": 0}}, "max_prompt_length": 64},
        "algorithm": {"adv_estimator": "grpo" if siblings > 1 else "reinforce_pp"},
        "generation": {"max_response_length": most_tokens},
        "rewards": {"functions": [{"name": "rule", "path": f"{HERE}:in_the_loop"}]},
        "runtime": "local",
        "sampling": sampling,
    }
    return Config.model_validate({**tree, **sections})


def make_source(config: Any, tokenizer: Any) -> Any:
    from gcore.prompts.rows import load_rows
    from gcore.prompts.source import PromptSource, Templater

    rows = load_rows(config.data.train)
    return PromptSource(rows, range(len(rows)), Templater(tokenizer, config.data), config.run.seed)


def make_collector(
    config: Any,
    engines: Sequence[Any],
    rewarder: Any,
    group: Any,
    workflow: Any,
    keep: Any,
    source: Any,
    tokenizer: Any,
    version: Callable[[], int] = lambda: 0,
) -> Any:
    """The same construction as in controller/start_run.py. `engines`: handles."""
    from gcore.clients import EngineClient
    from gcore.content.text import TextModality
    from gcore.controller.collect import Collector
    from gcore.generation.pool import EnginePool
    from gcore.generation.routing import Router
    from gcore.prompts.tokenizer import stop_tokens
    from gcore.workflows.context import SharedContext

    pool = EnginePool([EngineClient(handle) for handle in engines], Router(len(engines), (group.rank, group.size)))
    modality = TextModality(config.generation, tokenizer, stop_tokens(config.model, tokenizer))
    shared = SharedContext(config, pool, rewarder, modality)
    return Collector(workflow, shared, group, config.sampling, keep, lambda _: None, source, version)


def median_of(mean: float, sigma: float) -> float:
    """Of log-normal lengths."""
    return mean / math.exp(sigma**2 / 2)


def cut_mean(mean: float, sigma: float, most: int) -> float:
    """Mean of log-normal lengths that are cut at `most`. `mean`: before the cut."""
    if not sigma:
        return min(mean, most)
    normal = statistics.NormalDist()
    cut = math.log(most / median_of(mean, sigma)) / sigma
    return mean * normal.cdf(cut - sigma) + most * (1 - normal.cdf(cut))


def emulated_engines(number: int, lengths: Any, args: argparse.Namespace, prefill_s: float = 0.0) -> list[Any]:
    """Emulated ones. A decoding step takes --base-s, and --per-sequence-s per running request, at most --slots. They
    sample digits."""
    from gcore.cost.replica_speed import ReplicaSpeed
    from gcore.emulate.engine import EmulatedEngine

    cost = args.base_s, args.per_sequence_s, prefill_s
    speed = ReplicaSpeed(*cost, args.slots, sleep_s=0.0, wake_s=0.0, weights_s=0.0)
    return [EmulatedEngine(speed, lengths=lengths, tokens=range(4, 14)) for _ in range(number)]


# ---- one row, in a separate process ----------------------------------------------------------------------------------


def make_engine(args: argparse.Namespace) -> Any:
    from gcore.cost.replica_speed import ReplicaSpeed
    from gcore.emulate.engine import EmulatedEngine, log_normal

    return EmulatedEngine(
        ReplicaSpeed(
            args.step_s, 0.0, 0.0, max_concurrent=10**9, sleep_s=0.0, wake_s=0.0, weights_s=0.0
        ),  # all at once
        lengths=log_normal(args.tokens, args.sigma),
        tokens=range(4, 4 + len(ALPHABET)),
    )


def measure(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    from gcore.launch.build import quiet

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    quiet()
    asyncio.run(rollout(variant, args, 64))  # imports, compiled templates
    profile, threshold = cProfile.Profile() if args.profile else None, gc.get_threshold()
    row = asyncio.run(rollout(variant, args, args.programs, profile))
    gc.set_threshold(*threshold)
    alone = asyncio.run(engine_alone(args))
    requests = row["programs"] * args.siblings
    engine_cpu_s = alone["cpu_s"] * requests / (args.programs * args.siblings)
    row |= {"engine_cpu_s": engine_cpu_s, "controller_cpu_s": row["cpu_s"] - engine_cpu_s}
    row |= {"device_wall_s": alone["wall_s"], "siblings": args.siblings}
    for name in ("cpu_s", "engine_cpu_s", "controller_cpu_s"):
        row[f"{name[:-2]}_us_per_program"] = row[name] / row["programs"] * 1e6
    row["controller_cpu_us_per_sibling"] = row["controller_cpu_s"] / requests * 1e6
    row["rss_kb_per_program"] = row["rss_growth_mb"] * 1024 / row["programs"]
    row["rss_kb_per_sibling"] = row["rss_kb_per_program"] / args.siblings
    if profile is not None:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(35)
        pstats.Stats(profile, stream=sys.stdout).sort_stats("cumulative").print_stats("gcore|tokeniz|asyncio", 45)
    return {"variant": variant, **row}


async def rollout(
    variant: str, args: argparse.Namespace, programs: int, profile: cProfile.Profile | None = None
) -> dict[str, Any]:
    """One step of one controller."""
    import psutil

    from gcore.launch.user_code import load_filter
    from gcore.prompts.tokenizer import load_tokenizer
    from gcore.protocols import Rendezvous
    from gcore.rewarding.functions import FunctionSource
    from gcore.rewarding.rewarder import WeightedRewarder
    from gcore.runtime.local import Hub, LocalGroup, LocalHandle
    from gcore.workflows.context import generate_and_reward

    spec, running = VARIANTS[variant], ConcurrencyCounter()
    sampling = {"prompts_per_step": programs, **spec.get("sampling", {})}
    functions = [{"name": "rule", "path": f"{HERE}:{spec['rule']}"}]
    config = make_config(0, args.siblings, args.most_tokens, sampling=sampling, rewards={"functions": functions})
    tokenizer = load_tokenizer(config.model)
    sources: list[Any] = [FunctionSource(config.rewards.functions[0], 2, "rewards.functions.0")]
    if workers := spec.get("workers"):
        from gcore.rewarding.workers import WorkerPool

        pool = WorkerPool(config.rewards, workers)
        sources = list(pool.sources)
        first = [{"prompts": [""], "completions": [""]}]  # the start of the workers is not measured
        await asyncio.gather(*(pool.call(pool.sources[0], first, 1) for _ in range(workers)))
    rewarder = WeightedRewarder(sources)

    async def workflow(ctx: Any, prompt: Any) -> Any:
        with running:
            return await generate_and_reward(ctx, prompt)

    engines = [LocalHandle("engine-0", make_engine(args))]
    group, keep = LocalGroup(Rendezvous(0, 1, None, Hub(1))), load_filter(config.sampling.filter)
    source = make_source(config, tokenizer)
    collector = make_collector(config, engines, rewarder, group, workflow, keep, source, tokenizer)
    collector.rate = 1.0 if config.sampling.fixed else 0.5  # the value after some steps
    gc.collect()
    if "gc" in spec:
        gc.freeze()
        gc.set_threshold(*spec["gc"])
    process = psutil.Process()
    before = peak = process.memory_info().rss

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, process.memory_info().rss)
            await asyncio.sleep(0.1)

    watcher = asyncio.ensure_future(watch())
    cpu, wall = time.process_time(), time.perf_counter()
    if profile is not None:
        profile.enable()
    collected = await collector.step(1)
    if profile is not None:
        profile.disable()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = max(peak, process.memory_info().rss)
    watcher.cancel()
    collector.close()
    rewarder.close()
    assert len(collected.groups) == programs, f"{len(collected.groups)} groups of {programs}"
    return {
        "cpu_s": cpu,
        "wall_s": wall,
        "programs": running.entered,
        "most_at_once": running.most,
        "rss_growth_mb": (peak - before) / 2**20,
        "tokens": sum(len(s.rollout.content.tokens_S) for g in collected.groups for s in g) / programs / args.siblings,
    }


class ConcurrencyCounter:
    """Counts entries into the context, and the maximum number at once."""

    def __init__(self) -> None:
        self.now = self.most = self.entered = 0

    def __enter__(self) -> None:
        self.now, self.entered = self.now + 1, self.entered + 1
        self.most = max(self.most, self.now)

    def __exit__(self, *_: Any) -> None:
        self.now -= 1


async def engine_alone(args: argparse.Namespace) -> dict[str, float]:
    """The same requests to a new engine, created before the measurement, from tasks without a workflow."""
    from gcore.content.tokens import Tokens
    from gcore.generation.noise import noise_key
    from gcore.prompts.tokenizer import load_tokenizer, stop_tokens
    from gcore.types import Request, SamplingParams

    config = make_config(0, args.siblings, args.most_tokens)
    tokenizer = load_tokenizer(config.model)
    source = make_source(config, tokenizer)
    params = SamplingParams(args.most_tokens, stop_tokens=stop_tokens(config.model, tokenizer))
    calls = []
    for i in range(args.programs):
        tokens_P = source.at(i).content.tokens_P
        calls.append([Request(Tokens(tokens_P), params, noise_key(0, i, s)) for s in range(args.siblings)])
    engine = make_engine(args)
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(engine.generate(call) for call in calls))
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


# ---- the experiment --------------------------------------------------------------------------------------------------


def main() -> None:
    args = parse()
    variants = [variant for variant in VARIANTS if args.only is None or args.only in variant]
    rounds: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for variant in variants:
            print(f"round {number + 1}/{args.rounds}: {variant}", file=sys.stderr, flush=True)
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as fresh:
                rounds.append(fresh.submit(measure, variant, args).result())
    results = []
    for variant in variants:
        own = [row for row in rounds if row["variant"] == variant]
        numbers = [name for name in own[0] if name != "variant"]
        results.append({"variant": variant, **{name: statistics.median(row[name] for row in own) for name in numbers}})
    show(results, args)
    write_json(args.json, {"settings": vars(args), "results": results, "rounds": rounds})


def show(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(
        f"{args.programs:,} groups required, {args.siblings} siblings, {results[0]['tokens']:.0f} tokens per response; "
        f"one controller on one core; median of {args.rounds} rounds; CPU in microseconds"
    )
    columns = (
        "programs",
        "at once",
        "total",
        "engine",
        "controller",
        "/sibling",
        "wall s",
        "device s",
        "KB",
        "/sibling",
    )
    head = f"{'':26}" + "".join(f"{name:>11}" for name in columns)
    print(f"{'':26}{'':22}{'CPU per program':>33}{'':33}{'memory per program':>22}\n{head}\n" + "-" * len(head))
    for row in results:
        print(
            f"{row['variant']:26}{row['programs']:11,.0f}{row['most_at_once']:11,.0f}{row['cpu_us_per_program']:11,.0f}"
            f"{row['engine_cpu_us_per_program']:11,.0f}{row['controller_cpu_us_per_program']:11,.0f}"
            f"{row['controller_cpu_us_per_sibling']:11,.0f}{row['wall_s']:11.1f}{row['device_wall_s']:11.1f}"
            f"{row['rss_kb_per_program']:11.1f}{row['rss_kb_per_sibling']:11.1f}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="rows whose name contains this")
    parser.add_argument("--programs", type=int, default=10_000, help="prompts per step")
    parser.add_argument("--siblings", type=int, default=4)
    parser.add_argument("--tokens", type=float, default=64, help="median length of a response")
    parser.add_argument("--sigma", type=float, default=0.5, help="sigma of the log-normal lengths")
    parser.add_argument("--most-tokens", type=int, default=256)
    parser.add_argument("--step-s", type=float, default=0.02, help="seconds per decoding step")
    parser.add_argument("--profile", action="store_true", help="print a profile (slows the bench down)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
