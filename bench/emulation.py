"""Compares the simulator with a real run on emulated devices, with the same scenario and the same split.

    python bench/emulation.py --json emulation.json            the five of bench/emulation.yaml, 8 to 64 slots
    python bench/emulation.py --mode dynamic                   the same, with moving blocks
    python bench/emulation.py my_scenario.yaml --policy-slots 12

- *emulation*: a real run under Ray. Controllers, pools, RPC, judges, dynamic sampling (free mode), layout, trainer and
  checkpoints are the code of any run; engines and trainer sleep instead of computing (engine: emulated,
  training.backend: emulated), `--speed` emulated seconds per second. Every replica has its own process.
- *simulator*: `gcore simulate` with independent draws from the same distributions; 100 steps.
- *same draws*: the simulator with the same lengths, verdicts and acceptances as the emulation, prompt by prompt.

Both have the same placement: a static split (`--policy-slots`, or the simulator's best), or the rule of
`placement.mode: dynamic`, which in the emulation uses only measured values. Reported: seconds of the rollout phase,
mean over the steps (emulation: `timing_s/rollout` x speed), and the share of slot-seconds of the rollout phases in
which a slot had no request (emulation: from `busy_s` of the engines). Lengths do not drift here.

Scenarios need one judge, and explicit `speed:` sections for it and for the policy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import step_rows, write_json  # noqa: E402
from gcore.config.tree import Config  # noqa: E402
from gcore.content.tokens import Tokens  # noqa: E402
from gcore.emulate.engine import Lengths, log_normal  # noqa: E402
from gcore.generation.noise import noise_key  # noqa: E402
from gcore.placement.grid import POLICY, Split, all_splits, shares, split_by  # noqa: E402
from gcore.simulate.cluster import SimulatedRollout, Simulation, expected_view, first_state  # noqa: E402
from gcore.simulate.run import rule_of, simulate  # noqa: E402
from gcore.simulate.scenario import GroupDraw, Scenario, load_scenario  # noqa: E402
from gcore.types import Request, SamplingParams  # noqa: E402

SCENARIOS = Path(__file__).with_suffix(".yaml")
DIGITS = "0123456789"
FIRST = 4  # token of the digit 0, after the special tokens
BOS = 1
OWN_STEPS = 100  # of the simulator with its own draws: steps differ much, and simulated steps are cheap


# ---- the work of both sides ------------------------------------------------------------------------------------------


@dataclass
class Load:
    """The prompts of a run: the lengths of responses and verdicts, and whether the group is accepted."""

    scenario: Scenario
    rows: int
    digits: np.ndarray = field(init=False)
    good: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        scenario, rng = self.scenario, np.random.default_rng(self.scenario.seed + 1)
        self.digits = rng.integers(0, 10, (self.rows, scenario.prompt_length - 1))
        self.good = rng.random(self.rows) < scenario.acceptance.start
        judge = scenario.judges[0]
        self.lengths = _of(scenario.lengths)
        self.verdicts = _of(judge.verdict)

    def write(self, file: Path) -> None:
        with file.open("w") as out:
            for digits, good in zip(self.digits, self.good, strict=True):
                out.write(json.dumps({"prompt": "".join(map(str, digits)), "answer": "0", "good": bool(good)}) + "\n")

    def draw(self, cursor: int) -> GroupDraw:
        """The same noise keys as in a run: see workflows/context.py and rewarding/judge.py."""
        scenario, row = self.scenario, cursor % self.rows
        judge, seed = scenario.judges[0], scenario.seed
        prompt = np.array([BOS, *(FIRST + self.digits[row])], np.int32)
        tokens = [self._tokens(prompt, noise_key(seed, cursor, s)) for s in range(scenario.samples)]
        verdicts = [
            [
                min(judge.verdict.longest, self.verdicts(_request(prompt, noise_key(seed, "judge", *key, repeat, 0))))
                for repeat in range(judge.repeats)
            ]
            for key in ((judge.name, cursor, s) for s in range(scenario.samples))
        ]
        return GroupDraw(tokens, {judge.name: verdicts}, bool(self.good[row]))

    def _tokens(self, prompt: np.ndarray, key: int) -> int:
        return min(self.scenario.lengths.longest, self.lengths(_request(prompt, key)))


def _of(spec: Any) -> Lengths:
    return log_normal(spec.start * float(np.exp(-(spec.sigma**2) / 2)), spec.sigma, spec.shared)


def _request(prompt: np.ndarray, key: int) -> Request:
    return Request(Tokens(prompt), SamplingParams(1), key)


def keep(group: Sequence[Any]) -> tuple[bool, str]:
    """sampling.filter of the emulation: the value in the row of the dataset."""
    return bool(group[0].rollout.prompt.columns["good"]), "not_good"


def verdict(text: str) -> float:
    """The text is random digits; the value does not matter."""
    return 0.5


# ---- the simulator ---------------------------------------------------------------------------------------------------


@dataclass
class SameWork:
    """Replaces StepWork: draws by the prompt's number in the run."""

    scenario: Scenario
    step: int
    load: Load

    def __getitem__(self, cursor: int) -> GroupDraw:
        return self.load.draw(cursor)


def simulate_same(scenario: Scenario, load: Load, policy: str, steps: int) -> list[SimulatedRollout]:
    rule, state, rollouts = rule_of(policy, scenario), first_state(scenario), list[SimulatedRollout]()
    split, took_s = shares(scenario.grid), None
    for step in range(1, steps + 1):
        work: Any = SameWork(scenario, step, load)
        begin = rule.begin(expected_view(scenario, state), scenario.costs(step), split, took_s)
        rollouts.append(Simulation(work, begin, rule, state).run())
        state, split, took_s = rollouts[-1].state, rollouts[-1].split, rollouts[-1].seconds
    return rollouts


def best_split(scenario: Scenario) -> Split:
    few = scenario.model_copy(update={"steps": 4})
    grid = scenario.grid
    return min(all_splits(grid), key=lambda split: simulate(few, f"static:{len(split.blocks(POLICY))}").rollout_s)


# ---- the emulation ---------------------------------------------------------------------------------------------------


def config_of(scenario: Scenario, split: Split | None, data: Path, folder: Path, steps: int, speed: float) -> Config:
    """`split` None: placement.mode is dynamic."""
    judge, grid = scenario.judges[0], scenario.grid
    here = Path(__file__).resolve()
    longest = scenario.prompt_length + scenario.lengths.longest
    build = {"alphabet": DIGITS, "max_length": longest + judge.verdict.longest}
    slots = {} if split is None else {role: len(split.blocks(role)) * grid.slots_per_block for role in grid.roles}
    return Config.model_validate(
        {
            "run": {"name": "emulation", "dir": str(folder), "steps": steps, "seed": scenario.seed},
            "model": {"build": build},
            "data": {
                "train": {"path": str(data)},
                "shuffle": False,
                "max_prompt_length": scenario.prompt_length,
            },
            "controllers": scenario.num_controllers,
            "generation": {
                "engine": "emulated",
                "max_response_length": scenario.lengths.longest,
                **_device(scenario.policy.speed, scenario.lengths, speed),
            },
            "rewards": {
                "judges": [
                    {
                        "name": judge.name,
                        "model": {"build": build},
                        "engine": "emulated",
                        "tensor_parallel": judge.tensor_parallel,
                        "repeats": judge.repeats,
                        "template": "{{ prompt }}{{ response }}",
                        "verdict": f"{here}:verdict",
                        "max_prompt_length": longest,
                        "max_response_length": judge.verdict.longest,
                        **_device(judge.speed, judge.verdict, speed),
                    }
                ]
            },
            "sampling": {
                "prompts_per_step": scenario.prompts,
                "samples_per_prompt": scenario.samples,
                "filter": f"{here}:keep",
                "deterministic": False,
                "surplus": "abort",
                "oversampling": scenario.oversampling,
                "max_oversampling": scenario.max_oversampling,
            },
            "training": {
                "backend": "emulated",
                "emulated": {"seconds_per_token": 1e-6 / speed},
                "max_tokens_per_gpu": max(16384, longest),
            },
            "placement": {
                "mode": "static" if slots else "dynamic",
                "slots": grid.slots,
                "split": slots,
                "trainer": {"ranks": min(2, scenario.num_controllers)},
            },
            "checkpoint": {"every": 0},
            "observe": {"progress": "none", "trace": False, "trackers": []},
        }
    )


def _device(speed: Any, lengths: Any, clock: float) -> dict[str, Any]:
    names = ("base_s", "per_sequence_s", "prefill_s_per_token", "sleep_s", "wake_s", "weights_s")
    device = {name: getattr(speed, name) / clock for name in names}
    device |= {"mean_tokens": lengths.start, "sigma": lengths.sigma, "shared": lengths.shared}
    return {"max_concurrent": speed.max_concurrent, "emulated": device}


async def start_roles(runtime: Any, config: Config, plan: Any) -> tuple[Sequence[Any], dict[str, Sequence[Any]]]:
    """The controllers of a run, and the replicas that serve them, by kind."""
    from gcore.driver.start import Processes

    roles, controllers = await Processes(runtime, config, plan).start()
    judges = {f"judge-{name}": clients for name, clients in roles.judges.items()}
    return controllers, {"engine": roles.engines, "trainer": roles.trainers, **judges}


def run_emulation(config: Config) -> dict[str, Any]:
    return asyncio.run(emulate(config))


async def emulate(config: Config) -> dict[str, Any]:
    """A whole run, and the counters of its engines, which are busy only in rollouts."""
    import psutil

    from gcore.driver.run_folder import open_folder
    from gcore.launch.build import build_runtime
    from gcore.launch.machines import detect_machine
    from gcore.launch.plan import make_plan

    plan = make_plan(config, detect_machine())
    open_folder(config)
    started = time.monotonic()
    runtime: Any = build_runtime(config, plan)
    try:
        controllers, groups = await start_roles(runtime, config, plan)
        ready_s = time.monotonic() - started
        pids = runtime.processes()
        await asyncio.gather(*(controller.run() for controller in controllers))
        memory = {name: psutil.Process(pid).memory_full_info().uss / 2**20 for name, pid in pids.items()}
        busy = {
            kind: [(await engine.stats()).busy_s for engine in engines]
            for kind, engines in groups.items()
            if kind.startswith(("engine", "judge"))
        }
    finally:
        runtime.stop()
    return {"rows": step_rows(config.run.folder), "busy_s": busy, "ready_s": ready_s, "memory_mb": memory}


# ---- comparison ------------------------------------------------------------------------------------------------------


def compare(scenario: Scenario, mode: str, policy_slots: int | None, steps: int, speed: float | None) -> dict[str, Any]:
    def report(text: str) -> None:
        print(f"{scenario.name}: {text}", file=sys.stderr, flush=True)

    scenario, grid = scenario.model_copy(update={"steps": steps}), scenario.grid
    speed = speed or (4.0 if grid.slots <= 32 else 0.5)
    split = None
    if mode == "static" and policy_slots is None:
        split = best_split(scenario)
    elif mode == "static" and policy_slots is not None:
        blocks = policy_slots // grid.slots_per_block
        split = split_by(grid, {POLICY: blocks, scenario.judges[0].name: grid.num_blocks - blocks})
    policy_slots = 0 if split is None else len(split.blocks(POLICY)) * grid.slots_per_block
    policy = f"static:{policy_slots // grid.slots_per_block}" if split else "dynamic"
    needed = steps * scenario.prompts / scenario.acceptance.start
    load = Load(scenario, min(4096, int(1.5 * needed) + 64))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        load.write(data)
        config = config_of(scenario, split, data, Path(folder), steps, speed)
        report(f"{policy_slots} of {grid.slots} slots for the policy" if split else f"{grid.slots} slots, dynamic")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:  # one Ray per process
            real = process.submit(run_emulation, config).result()
        report(f"{len(real['memory_mb'])} processes were ready in {real['ready_s']:.0f} s")
    emulated_s = [row["timing_s/rollout"] * speed for row in real["rows"]]
    busy_s = sum(grid.widths[POLICY] * seconds * speed for seconds in real["busy_s"]["engine"])
    for judge in scenario.judges:
        busy_s += sum(grid.widths[judge.name] * seconds * speed for seconds in real["busy_s"][f"judge-{judge.name}"])
    own = simulate(scenario.model_copy(update={"steps": OWN_STEPS}), policy)
    same = simulate_same(scenario, load, policy, steps)
    same_s = [rollout.seconds for rollout in same]
    sizes: dict[str, list[float]] = {}
    for name, size in real["memory_mb"].items():
        sizes.setdefault(name.rpartition("-")[0], []).append(size)
    return {
        "name": scenario.name,
        "slots": grid.slots,
        "policy_slots": policy_slots,
        "moves": {
            "emulation": statistics.mean(row.get("placement/moves", 0) for row in real["rows"]),
            "same": statistics.mean(len(rollout.timeline.moves) for rollout in same),
        },
        "controllers": scenario.num_controllers,
        "steps": steps,
        "speed": speed,
        "emulation_s": statistics.mean(emulated_s),
        "simulator_s": own.rollout_s / OWN_STEPS,
        "same_s": statistics.mean(same_s),
        "emulation_idle": 1 - busy_s / (grid.slots * sum(emulated_s)),
        "simulator_idle": own.idle,
        "same_idle": sum(r.timeline.idle * r.seconds for r in same) / sum(same_s),
        "ready_s": real["ready_s"],
        "processes": len(real["memory_mb"]),
        "memory_gb": sum(real["memory_mb"].values()) / 1024,
        "memory_mb": {kind: statistics.mean(found) for kind, found in sizes.items()},
        "steps_s": {"emulation": emulated_s, "same": same_s, "simulator": [r["rollout_s"] for r in own.steps]},
    }


def show(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(f"rollout phase, mean of {args.steps} steps, emulated seconds; idle share of the slots")
    columns = (
        "emulation",
        "simulator",
        "",
        "same draws",
        "",
        "idle",
        "simulator",
        "same draws",
        "processes",
        "ready s",
    )
    head = f"{'scenario':14}{'slots':>6}{'policy':>7}" + "".join(f"{name:>11}" for name in (*columns, "GB"))
    print(head + "\n" + "-" * len(head))
    for row in results:
        cells = [f"{row['emulation_s']:.1f}"]
        for name in ("simulator", "same"):
            cells += [f"{row[f'{name}_s']:.1f}", f"{row[f'{name}_s'] / row['emulation_s'] - 1:+.1%}"]
        cells += [f"{row[f'{name}_idle']:.1%}" for name in ("emulation", "simulator", "same")]
        cells += [str(row["processes"]), f"{row['ready_s']:.0f}", f"{row['memory_gb']:.1f}"]
        print(f"{row['name']:14}{row['slots']:6}{row['policy_slots']:7}" + "".join(f"{cell:>11}" for cell in cells))


def built_in() -> list[Scenario]:
    return [Scenario.model_validate(document) for document in yaml.safe_load_all(SCENARIOS.read_text())]


def main() -> None:
    args = parse()
    scenarios = [load_scenario(path) for path in args.scenarios] or built_in()
    scenarios = [scenario for scenario in scenarios if args.only in scenario.name]
    if args.seed is not None:
        scenarios = [scenario.model_copy(update={"seed": args.seed}) for scenario in scenarios]
    results = []
    for scenario in scenarios:
        if len(scenario.judges) != 1 or None in (scenario.policy.speed, scenario.judges[0].speed):
            sys.exit(f"{scenario.name}: expected one judge, and `speed:` sections for policy and judge")
        results.append(compare(scenario, args.mode, args.policy_slots, args.steps, args.speed))
        show(results[-1:], args)
    show(results, args)
    write_json(args.json, {"settings": vars(args), "results": results})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("scenarios", nargs="*", help="YAML files; default: bench/emulation.yaml")
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, help="of lengths, acceptance and the run; default: the scenario's")
    parser.add_argument("--speed", type=float, help="emulated seconds per second; default: 4, above 32 slots 0.5")
    parser.add_argument("--mode", choices=("static", "dynamic"), default="static", help="placement.mode on both sides")
    parser.add_argument("--policy-slots", type=int, help="of the static split; default: the simulator's best")
    return parser.parse_args()


if __name__ == "__main__":
    main()
