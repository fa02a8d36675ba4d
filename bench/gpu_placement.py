"""Compares the simulator with a real run: policy and judge run alternately on one GPU, and on the simulator's device.

    python bench/gpu_placement.py [--policy 0.5B --judge 1.5B] [--json FILE]        on one GPU, about 5 minutes
    python bench/gpu_placement.py --device cpu --policy tiny --judge small          the same on a CPU, as a test

The run is `gcore train` with placement.mode=colocated on one slot: real engines (vLLM), a real trainer, random weights.
The length of every response is drawn in advance (log-normal); every verdict has the maximum length. The rollout phase
with the same lengths is simulated twice:

- *measured*: with the speeds of these engines, measured before the run on other requests: a linear fit of decoding at
  a few batch sizes; prefill; sleep, weights, wake.
- *planned*: with the values of the GPU in gcore/simulate/hardware.json, without measurements.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import SHAPES, step_rows, write_json  # noqa: E402
from bench.emulation import start_roles  # noqa: E402
from gcore.config.tree import Config  # noqa: E402
from gcore.content.tokens import Tokens  # noqa: E402
from gcore.generation.noise import noise_key  # noqa: E402
from gcore.placement.baselines import ColocatedRule  # noqa: E402
from gcore.placement.grid import POLICY, Split  # noqa: E402
from gcore.simulate.cluster import SimulatedRollout, Simulation, first_state  # noqa: E402
from gcore.simulate.scenario import GroupDraw, Scenario, Speed  # noqa: E402
from gcore.types import Request, SamplingParams  # noqa: E402

ALPHABET = "0123456789" + "".join(map(chr, range(0x4E00, 0x4E00 + 4000)))  # many: a random judge rarely samples the end
FIRST, BOS = 4, 1  # token of the digit 0, after the special tokens; token of the beginning
JUDGE = "grader"
STEPS_BEFORE, STEPS_MEASURED = 32, 96  # decoding steps of a calibration batch: during the prefill of others, and after


@dataclass(frozen=True)
class Work:
    """The lengths of a run, by prompt and sibling."""

    prompts: int
    samples: int
    prompt_length: int
    mean: float
    sigma: float
    longest: int
    verdict: int
    seed: int = 0

    def lengths(self, prompt: int) -> list[int]:
        rng = np.random.default_rng([self.seed, prompt])
        found = self.mean * np.exp(self.sigma * rng.standard_normal(self.samples) - self.sigma**2 / 2)
        return [int(n) for n in np.clip(np.round(found), 1, self.longest)]


async def workflow(ctx: Any, prompt: Any) -> list[Any]:
    """Responses with the lengths in the row of the dataset."""
    lengths = prompt.columns["lengths"]
    found = await asyncio.gather(*(ctx.generate(prompt, 1, max_tokens=n, stop_tokens=()) for n in lengths))
    return await ctx.reward([rollout for one in found for rollout in one])


def verdict(text: str) -> float:
    """The text of a random judge has no meaning; only its time is measured."""
    return float(len(text) % 7)


# ---- the run ---------------------------------------------------------------------------------------------------------


def config_of(args: argparse.Namespace, work: Work, data: Path, folder: Path) -> Config:
    here, longest = Path(__file__).resolve(), work.prompt_length + work.longest
    serving = {"engine": "vllm", "max_concurrent": args.concurrent, "gpu_memory_utilization": 0.3}

    def build(size: str, length: int) -> dict[str, Any]:
        shape = SHAPES[size]
        widths = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "layers": shape.layers}
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
        return {"build": {"architecture": "qwen2", **widths, **heads, "alphabet": ALPHABET, "max_length": length}}

    return Config.model_validate(
        {
            "run": {"name": "gpu-placement", "dir": str(folder), "steps": args.steps},
            "model": build(args.policy, longest),
            "data": {"train": {"path": str(data)}, "shuffle": False, "max_prompt_length": work.prompt_length},
            "controllers": 1,
            "workflow": f"{here}:workflow",
            "generation": {**serving, "max_response_length": work.longest},
            "rewards": {
                "judges": [
                    {
                        "name": JUDGE,
                        "model": build(args.judge, longest + work.verdict),
                        **serving,
                        "template": "{{ prompt }}{{ response }}",
                        "verdict": f"{here}:verdict",
                        "max_prompt_length": longest,
                        "max_response_length": work.verdict,
                    }
                ]
            },
            "sampling": {"prompts_per_step": work.prompts, "samples_per_prompt": work.samples, "deterministic": False},
            "training": {
                "device": args.device,
                "max_tokens_per_gpu": max(16384, longest),
                "activation_checkpointing": True,
            },
            "placement": {"mode": "colocated", "slots": 1, "trainer": {"ranks": 1}},
            "checkpoint": {"every": 0},
            "observe": {"progress": "plain", "trace": False, "trackers": []},
        }
    )


async def run(config: Config, work: Work) -> dict[str, Any]:
    """Start the roles, measure their speeds, then the whole run with the same roles."""
    from gcore.driver.run_folder import open_folder
    from gcore.launch.build import build_runtime
    from gcore.launch.machines import detect_machine
    from gcore.launch.plan import make_plan

    plan = make_plan(config, detect_machine())
    open_folder(config)
    began = time.perf_counter()
    runtime: Any = build_runtime(config, plan)
    try:
        controllers, groups = await start_roles(runtime, config, plan)
        print(f"{time.perf_counter() - began:.0f} s: all roles are ready", file=sys.stderr)
        engine, judge, trainer = groups["engine"][0], groups[f"judge-{JUDGE}"][0], groups["trainer"]
        most = config.generation.max_concurrent
        await judge.sleep(1)
        speeds = {POLICY: await speed_of(engine, most, work.prompt_length)}
        speeds[POLICY] |= await switch_seconds(engine, 2, trainer)
        await engine.sleep(1)
        await judge.wake()
        speeds[JUDGE] = await speed_of(judge, most, work.prompt_length + int(work.mean))
        speeds[JUDGE] |= await switch_seconds(judge, 1)
        await engine.wake()
        print(f"{time.perf_counter() - began:.0f} s: speeds are measured", file=sys.stderr)
        await asyncio.gather(*(controller.run() for controller in controllers))
    finally:
        runtime.stop()
    return {"rows": step_rows(config.run.folder), "speeds": speeds}


async def speed_of(engine: Any, most: int, prompt_length: int) -> dict[str, float]:
    """A linear fit of the seconds per decoding step over the batch size; and seconds per prompt token."""
    rng = np.random.default_rng(1)

    async def timed(batch: int, length: int, tokens: int) -> float:
        prompts = [np.array([BOS, *(FIRST + rng.integers(0, 10, length - 1))], np.int32) for _ in range(batch)]
        requests = [Request(Tokens(p), SamplingParams(tokens), noise_key(int(rng.integers(2**31)))) for p in prompts]
        started = time.perf_counter()
        await engine.generate(requests, "calibration")
        return time.perf_counter() - started

    await timed(most, prompt_length, 4)  # kernels are compiled at first use
    sizes = sorted({1, most // 8, most // 2, most})
    seconds = []
    for batch in sizes:
        await timed(batch, prompt_length, 4)
        before = await timed(batch, prompt_length, STEPS_BEFORE)
        seconds.append((await timed(batch, prompt_length, STEPS_BEFORE + STEPS_MEASURED) - before) / STEPS_MEASURED)
    per_sequence, base = np.polyfit(sizes, seconds, 1)
    steps = 4 * (base + per_sequence * most)
    prefill = (min([await timed(most, prompt_length, 4) for _ in range(2)]) - steps) / (most * prompt_length)
    print("seconds per decoding step:", {n: round(s, 5) for n, s in zip(sizes, seconds, strict=True)}, file=sys.stderr)
    return {
        "base_s": max(1e-6, float(base)),
        "per_sequence_s": max(0.0, float(per_sequence)),
        "prefill_s_per_token": max(0.0, float(prefill)),
        "max_concurrent": most,
    }


async def switch_seconds(engine: Any, level: int, trainers: Sequence[Any] = ()) -> dict[str, float]:
    """Seconds of sleep, wake and weights, as in a run. The second of two times is used: the first is slower."""
    from gcore.weights.transfer import WeightTransfer

    for _ in range(2):
        began = time.perf_counter()
        await engine.sleep(level)
        asleep = time.perf_counter()
        await engine.wake(*(("weights",) if trainers else ()))
        awake, weights_s = time.perf_counter(), 0.0
        if trainers:
            await WeightTransfer(trainers).send({0: engine}, 0)
            weights_s = time.perf_counter() - awake
            await engine.wake("kv_cache")
    ended = time.perf_counter()
    return {"sleep_s": asleep - began, "wake_s": ended - asleep - weights_s, "weights_s": weights_s}


# ---- the simulator ---------------------------------------------------------------------------------------------------


@dataclass
class SameWork:
    """Replaces StepWork: the lengths of the run."""

    scenario: Scenario
    step: int
    work: Work

    def __getitem__(self, number: int) -> GroupDraw:
        tokens = self.work.lengths(number)
        return GroupDraw(tokens, {JUDGE: [[self.work.verdict]] * len(tokens)}, True)


def scenario_of(work: Work, config: Config, gpu: str, speeds: dict[str, dict[str, float]] | None) -> Scenario:
    fixed = {"start": work.verdict, "sigma": 0.0, "shared": 0.0, "longest": work.verdict}
    policy: dict[str, Any] = {"model": _folder(config.model, config)}
    judge: dict[str, Any] = {
        "name": JUDGE,
        "model": _folder(config.rewards.engine_judges[0].model, config),
        "verdict": fixed,
    }
    if speeds:
        policy["speed"], judge["speed"] = Speed.model_validate(speeds[POLICY]), Speed.model_validate(speeds[JUDGE])
    return Scenario.model_validate(
        {
            "name": "one GPU",
            "slots": 1,
            "gpu": gpu,
            "steps": config.run.steps,
            "controllers": 1,
            "prompts": work.prompts,
            "samples": work.samples,
            "prompt_length": work.prompt_length,
            "policy": policy,
            "judges": [judge],
            "lengths": {"start": work.mean, "sigma": work.sigma, "shared": 0.0, "longest": work.longest},
            "update_s": 1.0,
        }
    )


def _folder(model: Any, config: Config) -> str:
    from gcore.models.networks import save_built
    from gcore.prompts.tokenizer import load_tokenizer

    return str(save_built(model, load_tokenizer(model), config.run.seed))


def simulated(scenario: Scenario, work: Work) -> list[SimulatedRollout]:
    state, found = first_state(scenario), list[SimulatedRollout]()
    for step in range(1, scenario.steps + 1):
        same: Any = SameWork(scenario, step, work)
        found.append(Simulation(same, Split((POLICY,)), ColocatedRule(), state).run())
        state = found[-1].state
    return found


# ---- comparison ------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]], found: dict[str, list[SimulatedRollout]]) -> dict[str, Any]:
    """The first step of the run is left out: it compiles kernels."""
    real = [row["timing_s/rollout"] for row in rows][1:]
    result: dict[str, Any] = {"run": {"rollout_s": statistics.fmean(real), "steps": real}}
    result["run"]["idle"] = statistics.fmean(row["placement/idle"] for row in rows[1:])
    result["run"]["update_s"] = statistics.fmean(row["timing_s/step"] - row["timing_s/rollout"] for row in rows[1:])
    for name, rollouts in found.items():
        seconds = [rollout.seconds for rollout in rollouts][1:]
        result[name] = {
            "rollout_s": statistics.fmean(seconds),
            "steps": seconds,
            "idle": statistics.fmean(r.timeline.idle for r in rollouts[1:]),
        }
    whole = result["run"]["rollout_s"]
    print(f"\n{'':<12}{'rollout s':>10}{'against run':>13}{'idle':>8}   each step")
    for name, row in result.items():
        off = "" if name == "run" else f"{row['rollout_s'] / whole - 1:+.1%}"
        steps = " ".join(f"{s:.2f}" for s in row["steps"])
        print(f"{name:<12}{row['rollout_s']:>10.2f}{off:>13}{row['idle']:>8.1%}   {steps}")
    print(f"preparation, training and weights took {result['run']['update_s']:.2f} s")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--policy", default="0.5B", choices=SHAPES)
    parser.add_argument("--judge", default="1.5B", choices=SHAPES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpu", default="h200", help="as in gcore plan")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--mean", type=float, default=512)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--verdict", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if min(args.longest, args.verdict) < 4 + STEPS_MEASURED:
        parser.error(
            f"--longest and --verdict: expected at least {4 + STEPS_MEASURED}, the tokens decoded to measure speeds"
        )
    work = Work(args.prompts, args.samples, 64, args.mean, 0.7, args.longest, args.verdict)
    with tempfile.TemporaryDirectory() as folder:
        data, rng = Path(folder) / "prompts.jsonl", np.random.default_rng(2)
        with data.open("w") as out:
            for number in range((args.steps + 1) * args.prompts):
                digits = "".join(map(str, rng.integers(0, 10, work.prompt_length - 1)))
                out.write(json.dumps({"prompt": digits, "answer": "0", "lengths": work.lengths(number)}) + "\n")
        config = config_of(args, work, data, Path(folder))
        real = asyncio.run(run(config, work))
        for role, speed in real["speeds"].items():
            print(f"{role:<8}", {key: round(value, 7) for key, value in speed.items()})
        found = {"measured": simulated(scenario_of(work, config, args.gpu, real["speeds"]), work)}
        if args.device == "cuda":
            found["planned"] = simulated(scenario_of(work, config, args.gpu, None), work)
        result = table(real["rows"], found)
    write_json(args.json, {**result, "speeds": real["speeds"], "arguments": vars(args)})


if __name__ == "__main__":
    main()
