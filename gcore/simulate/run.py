"""A whole simulated training run under one placement policy, and several of them side by side.

    scenario + policy ──> step after step: split at the start, rollout (cluster.py), update ──> Run ──> JSON, tables

Between steps a policy knows what a run knows: how long the last step's responses were, and how many were accepted.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore.placement import baselines as rules
from gcore.placement.baselines import Utilisation
from gcore.placement.grid import POLICY, DeviceGrid, Move, Split, all_splits, shares, split_by
from gcore.placement.guard import Guarded, Memory
from gcore.placement.monitor import LEAST_RATE
from gcore.placement.rules import Costs, Decide, Dynamic, Load, View
from gcore.simulate.cluster import Place, Rollout, Simulation, State
from gcore.simulate.scenario import Scenario, StepWork
from gcore.types import UserError

Begin = Callable[[View, Costs, Rollout | None], Split]
NAMES = (
    *("dynamic", "unguarded", "colocated", "colocated-early", "early-swap", "static:N", "proportional", "paper"),
    "oracle",
)
ORACLE_SPLITS = 16  # static splits the oracle tries, besides the dynamic policy


TURNS: dict[str, Decide] = {
    "colocated": rules.colocated,
    "colocated-early": rules.colocated_early,
    "early-swap": rules.early_swap,
}


@dataclass(frozen=True, slots=True)
class Regime:
    """A way to place: how a step begins, and what moves within it."""

    name: str
    begin: Begin
    decide: Decide


@dataclass
class Run:
    """What a simulated run came to; `steps` are the rows of the report."""

    scenario: Scenario
    regime: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    moves: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rollout_s(self) -> float:
        return float(sum(step["rollout_s"] for step in self.steps))

    @property
    def idle(self) -> float:
        """Of the rollout phases' slot-seconds."""
        return float(sum(step["idle"] * step["rollout_s"] for step in self.steps) / self.rollout_s)

    def summary(self) -> dict[str, float]:
        total = self.rollout_s + sum(step["update_s"] for step in self.steps)
        trained = sum(step["tokens"] for step in self.steps)
        wasted = sum(step["wasted_tokens"] for step in self.steps)
        return {
            "rollout_s": self.rollout_s,
            "total_s": total,
            "idle": self.idle,
            "switching": sum(step["switching"] * step["rollout_s"] for step in self.steps) / self.rollout_s,
            "moves": sum(step["moves"] for step in self.steps),
            "tokens_per_s": trained / total,
            "wasted": wasted / max(1, wasted + trained),
        }

    def as_json(self, compare: Mapping[str, Run] | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "kind": "simulation",
            "name": self.scenario.name,
            "policy": self.regime,
            "slots": self.scenario.slots,
            "roles": self.scenario.grid.roles,
            "steps": self.steps,
            "timeline": self.timeline,
            "moves": self.moves,
            "summary": self.summary(),
        }
        if compare:
            found["compare"] = {name: run.summary() for name, run in compare.items()}
        return found

    def write(self, path: Path, compare: Mapping[str, Run] | None = None) -> None:
        path.write_text(json.dumps(self.as_json(compare)))


def regime_of(name: str, scenario: Scenario) -> Regime:
    """A policy by its name: one of NAMES."""
    grid = scenario.grid
    whole = Split((POLICY,) * grid.num_blocks)
    if name == "dynamic":
        guarded = _Guarded()
        return Regime(name, guarded.begin, guarded)
    if name == "unguarded":
        dynamic = Dynamic()
        return Regime(name, lambda view, costs, _: dynamic.begin(view, costs), dynamic)
    if name in TURNS:
        return Regime(name, lambda view, costs, _: whole, TURNS[name])
    if name == "proportional":
        return Regime(name, lambda view, costs, last: _in_proportion(costs, last), rules.static)
    if name == "paper":
        return Regime(name, lambda view, costs, last: last.split if last else _evenly(costs), Utilisation())
    if name.startswith("static:"):
        fixed = static_split(name, scenario)
        return Regime(name, lambda view, costs, _: fixed, rules.static)
    raise UserError(f"placement policy {name!r}; expected one of {', '.join(NAMES)}")


class _Guarded:
    """The rule of a run, and what it remembers from step to step."""

    def __init__(self) -> None:
        self.rule, self.memory = Guarded(), Memory()

    def begin(self, view: View, costs: Costs, last: Rollout | None) -> Split:
        self.memory = self.rule.plan(self.memory, view, costs, last.seconds if last else None)
        return self.memory.splits[self.memory.way]

    def __call__(self, split: Split, view: View, costs: Costs) -> list[Move]:
        return self.rule.decide(self.memory, split, view, costs)


def static_name(split: Split, grid: DeviceGrid) -> str:
    """static:5 for two roles, static:2-4-1-1 for more: blocks of the policy, then of each judge."""
    counts = [split.owners.count(role) for role in grid.roles]
    return f"static:{'-'.join(map(str, counts if len(counts) > 2 else counts[:1]))}"


def static_split(name: str, scenario: Scenario) -> Split:
    return split_by(scenario.grid, _blocks(name, scenario))


def _blocks(name: str, scenario: Scenario) -> dict[str, int]:
    """static:N: the judges share the rest evenly. static:N-M-...: for every role."""
    total, roles = scenario.grid.num_blocks, scenario.grid.roles
    most = total - len(scenario.judges)
    given = name.partition(":")[2].split("-")
    numbers = [int(part) for part in given if part.isdigit()]
    if len(numbers) == len(given) == 1 and 1 <= numbers[0] <= most:
        return {POLICY: numbers[0], **_rest(scenario, total - numbers[0])}
    if len(numbers) == len(given) == len(roles) and min(numbers) >= 1 and sum(numbers) == total:
        return dict(zip(roles, numbers, strict=True))
    raise UserError(
        f"placement policy {name!r}; expected static:N with N blocks for the policy, from 1 to {most}, or blocks for "
        f"each of {', '.join(roles)} with dashes between, {total} in all"
    )


def _rest(scenario: Scenario, blocks: int) -> dict[str, int]:
    """The judges' blocks, shared evenly."""
    names = [judge.name for judge in scenario.judges]
    return {name: blocks // len(names) + (i < blocks % len(names)) for i, name in enumerate(names)}


def _evenly(costs: Costs) -> Split:
    return shares(costs.grid, dict.fromkeys(costs.grid.roles, 1.0))


def _in_proportion(costs: Costs, last: Rollout | None) -> Split:
    """To the slot-seconds each role was busy in the last step."""
    return _evenly(costs) if last is None else shares(costs.grid, last.busy_s)


def simulate(
    scenario: Scenario,
    name: str = "dynamic",
    *,
    keep_timeline: Iterable[int] = (),
    report: Callable[[str], None] = lambda _: None,
) -> Run:
    """All steps under one policy. `keep_timeline`: steps whose slots are recorded in full."""
    regimes = _oracle(scenario) if name == "oracle" else [regime_of(name, scenario)]
    with _few_collections():
        return _steps(scenario, name, regimes, set(keep_timeline), report)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Thousands of small objects live through a rollout; to search them for circles again and again costs a quarter."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _steps(scenario: Scenario, name: str, regimes: list[Regime], kept: set[int], report: Callable[[str], None]) -> Run:
    run, at = Run(scenario, name), 0.0
    state, last = first_state(scenario), None
    for step in range(1, scenario.steps + 1):
        work, costs = StepWork(scenario, step), scenario.costs(step)
        view = expectation(scenario, state)
        tried = []
        for regime in regimes:
            tried.append(Simulation(work, regime.begin(view, costs, last), regime.decide, state).run())
        rollout = min(tried, key=lambda r: r.seconds)
        update_s = scenario.update(step, rollout.lengths)
        _record(run, step, at, rollout, update_s, work, step in kept)
        at += rollout.seconds + update_s
        state, last = rollout.state, rollout
        report(f"{name}: step {step}/{scenario.steps}")
    return run


def _oracle(scenario: Scenario) -> list[Regime]:
    """Knows every length before: of many ways it takes the one that turns out best, step by step."""
    grid = scenario.grid
    splits = all_splits(grid)
    stride = max(1, len(splits) // ORACLE_SPLITS)
    dynamic = Dynamic()

    def fixed(split: Split) -> Begin:
        return lambda view, costs, _: split

    ways = [regime_of("unguarded", scenario), regime_of("colocated", scenario)]
    for split in splits[::stride]:
        ways += [Regime("oracle", fixed(split), rules.static), Regime("oracle", fixed(split), dynamic)]
    return ways


def expectation(scenario: Scenario, state: State) -> View:
    """What is known before the first response: last step's lengths, and how many groups will be needed."""
    memory, needed = state.memory, scenario.prompts / max(state.rate, LEAST_RATE) * scenario.samples
    response = sum(memory[POLICY]) / len(memory[POLICY])
    loads = {
        POLICY: Load(
            waiting=round(needed * scenario.oversampling),
            needed=needed,
            lengths=memory[POLICY],
            longest=memory.get(f"{POLICY}/longest", ()),
            prompt=scenario.prompt_length / scenario.samples,
        )
    }
    for judge in scenario.judges:
        loads[judge.name] = Load(
            needed=needed * judge.repeats,
            lengths=memory[judge.name],
            prompt=(scenario.prompt_length + response) / judge.repeats,
        )
    return View(loads, groups=scenario.prompts, rate=state.rate, samples=scenario.samples)


def first_state(scenario: Scenario) -> State:
    """Before the first step: no prompt is drawn, and lengths are the scenario's own means, with a usual spread."""
    usual = (0.3, 0.5, 0.7, 0.9, 1.2, 2.4)
    memory = {POLICY: [scenario.lengths.start * f for f in usual]}
    for judge in scenario.judges:
        memory[judge.name] = [judge.verdict.start * f for f in (0.7, 0.9, 1.0, 1.4)]
    return State(tuple(Place(rank) for rank in range(scenario.num_controllers)), memory)


def _record(run: Run, step: int, at: float, rollout: Rollout, update_s: float, work: StepWork, in_full: bool) -> None:
    grid = run.scenario.grid
    lengths = rollout.lengths
    run.steps.append(
        {
            "step": step,
            "at_s": at,
            "rollout_s": rollout.seconds,
            "update_s": update_s,
            "idle": rollout.idle,
            "switching": rollout.switch_s / (rollout.seconds * grid.slots),
            "busy": {
                role: rollout.busy_s.get(role, 0.0) / owned for role, owned in rollout.owned_s.items() if owned > 0
            },
            "split": {role: owned / rollout.seconds for role, owned in rollout.owned_s.items()},
            "moves": len(rollout.moves),
            "tokens": sum(lengths),
            "wasted_tokens": rollout.wasted_tokens,
            "length": sum(lengths) / max(1, len(lengths)),
            "acceptance": work.acceptance,
            "drawn": rollout.drawn,
        }
    )
    if not in_full:
        return
    for moment, move in rollout.moves:
        run.moves.append(
            {
                "step": step,
                "at_s": at + moment,
                "slots": list(grid.slots_of(move.block)),
                "from": move.source,
                "to": move.target,
                "reason": move.reason,
            }
        )
    end = at + rollout.seconds
    for block, role, start, stop, busy in rollout.segments:
        for slot in grid.slots_of(block):
            piece = {"step": step, "slot": slot, "role": role, "start": at + start, "end": min(at + stop, end)}
            run.timeline.append(piece | ({} if role == "switch" else {"busy": busy}))
    for slot in range(grid.slots):
        run.timeline.append({"step": step, "slot": slot, "role": "trainer", "start": end, "end": end + update_s})
