"""Simulates a whole training run under one placement rule.

    scenario + rule ──> step after step: split at the start, rollout (cluster.py), update ──> SimulatedRun

Between steps, a rule has the same information as in a real run: the lengths and the acceptance rate of the last step.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore.placement.baselines import (
    ColocatedEarlyRule,
    ColocatedRule,
    EarlySwapRule,
    ProportionalRule,
    StartingAtRule,
    StaticRule,
    UtilisationRule,
)
from gcore.placement.grid import DeviceGrid, Split, all_splits, shares, split_by
from gcore.placement.guard import DynamicRule
from gcore.placement.lending import ElasticRule, LendingRule
from gcore.placement.rules import MovingRule, Rule
from gcore.simulate.cluster import SimulatedRollout, Simulation, expected_view, first_state, measured_costs
from gcore.simulate.pipeline import Pipeline
from gcore.simulate.scenario import Scenario, StepWork
from gcore.types import UserError

RULES: Mapping[str, Callable[[], Rule]] = {
    "dynamic": DynamicRule,
    "unguarded": MovingRule,
    "colocated": ColocatedRule,
    "colocated-early": ColocatedEarlyRule,
    "early-swap": EarlySwapRule,
    "proportional": ProportionalRule,
    "paper": UtilisationRule,
}
# with asynchronous rollout (Scenario.staleness); all others are simulated without staleness, for comparison
ASYNC_RULES: Mapping[str, Callable[[], Rule]] = {"dynamic": LendingRule, "elastic": ElasticRule}
LENT, SPLIT = "lent", "disaggregated"  # with the number of blocks, or the blocks of each role and the trainer
NAMES = (*RULES, "static:N", "oracle")
ASYNC_NAMES = (*ASYNC_RULES, f"{LENT}:N", f"{SPLIT}:N-M-T")
ORACLE_SPLITS = 16  # static splits that the oracle tries, in addition to the dynamic rule


@dataclass
class SimulatedRun:
    """The result of a simulated run; `steps` are the rows of the report."""

    scenario: Scenario
    rule: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    moves: list[dict[str, Any]] = field(default_factory=list)
    bias: float | None = None  # with asynchronous rollout: mean length of the trained groups / of all groups

    @property
    def rollout_s(self) -> float:
        return float(sum(step["rollout_s"] for step in self.steps))

    @property
    def total_s(self) -> float:
        return self.rollout_s + float(sum(step["update_s"] for step in self.steps))

    @property
    def idle(self) -> float:
        """Share of the slot-seconds of all rollout phases."""
        return float(sum(step["idle"] * step["rollout_s"] for step in self.steps) / self.rollout_s)

    def summary(self) -> dict[str, float]:
        total, versions = self.total_s, Counter[str]()
        for step in self.steps:
            versions.update(step.get("staleness", {}))
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
            **({"length_bias": self.bias} if self.bias is not None else {}),
            **{f"staleness_{behind}": groups for behind, groups in sorted(versions.items())},
        }

    def as_json(self, compare: Mapping[str, SimulatedRun] | None = None) -> dict[str, Any]:
        recording: dict[str, Any] = {
            "kind": "simulation",
            "name": self.scenario.name,
            "rule": self.rule,
            "slots": self.scenario.slots,
            "roles": self.scenario.grid.roles,
            "steps": self.steps,
            "timeline": self.timeline,
            "moves": self.moves,
            "summary": self.summary(),
        }
        if compare:
            recording["compare"] = {name: run.summary() for name, run in compare.items()}
        return recording

    def write(self, path: Path, compare: Mapping[str, SimulatedRun] | None = None) -> None:
        path.write_text(json.dumps(self.as_json(compare)))


def rule_of(name: str, scenario: Scenario) -> Rule:
    """A rule by its name: one of NAMES."""
    if name in RULES:
        return RULES[name]()
    if name.startswith("static:"):
        return StaticRule(static_split(name, scenario))
    expected = [*NAMES, *(ASYNC_NAMES if scenario.staleness else ())]
    raise UserError(f"--rule {name}: not a placement rule; expected one of {', '.join(dict.fromkeys(expected))}")


def async_rule_of(name: str, scenario: Scenario) -> Rule | None:
    """A rule for asynchronous rollout; None: a rule without."""
    kind, _, numbers = name.partition(":")
    if not scenario.staleness or (kind not in (LENT, SPLIT) and name not in ASYNC_RULES):
        return None
    if name in ASYNC_RULES:
        return ASYNC_RULES[name]()
    grid = scenario.grid.with_trainer()
    if kind == LENT and numbers.isdigit() and 0 < int(numbers) <= grid.num_blocks:
        return LendingRule(home=int(numbers))
    if kind == SPLIT and numbers.count("-") == len(grid.roles) - 1:
        return StaticRule(disaggregated_split(name, grid))
    raise UserError(
        f"--rule {name}: expected {LENT}:N with at most {grid.num_blocks} blocks, or {SPLIT}: and the blocks of each "
        f"of {', '.join(grid.roles)}, separated by dashes"
    )


def disaggregated_split(name: str, grid: DeviceGrid) -> Split:
    """`grid`: with the trainer."""
    blocks = [int(part) if part.isdigit() else -1 for part in name.partition(":")[2].split("-")]
    return split_by(grid, dict(zip(grid.roles, blocks, strict=True)))


def split_name(split: Split, grid: DeviceGrid) -> str:
    """disaggregated:4-10-2: the blocks of the policy, of each judge, of the trainer."""
    return f"{SPLIT}:{'-'.join(str(split.owners.count(role)) for role in grid.roles)}"


def static_name(split: Split, grid: DeviceGrid) -> str:
    """static:5 for two roles, static:2-4-1-1 for more: blocks of the policy, then blocks of each judge."""
    counts = [split.owners.count(role) for role in grid.roles]
    return f"static:{'-'.join(map(str, counts if len(counts) > 2 else counts[:1]))}"


def static_split(name: str, scenario: Scenario) -> Split:
    """static:N: N blocks for the policy, the judges share the rest evenly. static:N-M-...: the blocks of each role."""
    grid, judges = scenario.grid, len(scenario.judges)
    parts = name.partition(":")[2].split("-")
    blocks = [int(part) for part in parts] if all(part.isdigit() for part in parts) else []
    if len(blocks) == 1:
        rest = grid.num_blocks - blocks[0]
        blocks += [rest // judges + (i < rest % judges) for i in range(judges)]
    if len(blocks) != len(grid.roles) or min(blocks) < 1 or sum(blocks) != grid.num_blocks:
        raise UserError(
            f"--rule {name}: expected static:N with N blocks for the policy, from 1 to {grid.num_blocks - judges}, or "
            f"the blocks of each of {', '.join(grid.roles)}, separated by dashes, {grid.num_blocks} in all"
        )
    return split_by(grid, dict(zip(grid.roles, blocks, strict=True)))


def simulate(
    scenario: Scenario,
    name: str = "dynamic",
    *,
    keep_timeline: Iterable[int] = (),
    report: Callable[[str], None] = lambda _: None,
) -> SimulatedRun:
    """All steps under one rule; under several, each step continues from the fastest. `keep_timeline`: steps whose slots
    are recorded in full."""
    if (rule := async_rule_of(name, scenario)) is not None:
        with _rare_garbage_collection():
            return _simulate_pipeline(scenario, name, rule, set(keep_timeline), report)
    scenario = scenario.model_copy(update={"staleness": 0})
    rules = _oracle(scenario) if name == "oracle" else [rule_of(name, scenario)]
    run, at, in_full = SimulatedRun(scenario, name), 0.0, set(keep_timeline)
    state, split, took_s = first_state(scenario), shares(scenario.grid), None
    with _rare_garbage_collection():
        for step in range(1, scenario.steps + 1):
            work, costs = StepWork(scenario, step), measured_costs(scenario, step, state)
            view = expected_view(scenario, state)
            tried = [Simulation(work, rule.begin(view, costs, split, took_s), rule, state).run() for rule in rules]
            rollout = min(tried, key=lambda rollout: rollout.seconds)
            update_s = scenario.update(step, rollout.lengths)
            _record(run, at, rollout, update_s, work, step in in_full)
            at += rollout.seconds + update_s
            state, split, took_s = rollout.state, rollout.split, rollout.seconds
            report(f"{name}: step {step}/{scenario.steps}")
    return run


def _simulate_pipeline(
    scenario: Scenario, name: str, rule: Rule, in_full: set[int], report: Callable[[str], None]
) -> SimulatedRun:
    """The period from version to version is the time of a step: `rollout_s`. The update is a part of it."""
    pipeline, slots = (
        Pipeline(scenario, rule, lambda step: report(f"{name}: step {step}/{scenario.steps}")),
        scenario.slots,
    )
    run = SimulatedRun(scenario, name)
    for row in pipeline.run_all():
        owned = {role: seconds for role, seconds in row.owned.items() if seconds > 0}
        run.steps.append(
            {
                "step": row.step,
                "at_s": row.began,
                "rollout_s": row.seconds,
                "update_s": 0.0,
                "training_s": row.updating_s,
                "idle": 1 - sum(row.busy.values()) / (row.seconds * slots),
                "switching": 1 - sum(owned.values()) / (row.seconds * slots),
                "busy": {role: row.busy[role] / seconds for role, seconds in owned.items()},
                "split": {role: seconds / row.seconds for role, seconds in owned.items()},
                "moves": row.moves,
                "tokens": sum(row.lengths),
                "wasted_tokens": row.wasted_tokens,
                "length": sum(row.lengths) / max(1, len(row.lengths)),
                "staleness": {str(behind): groups for behind, groups in row.staleness.items()},
            }
        )
    timeline, run.bias = pipeline.result.timeline, pipeline.bias
    run.moves = [move for move in timeline.moves if move["step"] in in_full]
    run.timeline = [interval for interval in timeline.intervals if interval["step"] in in_full]
    return run


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """A rollout keeps thousands of small objects. With the default threshold, scanning them takes 25 % of the time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _oracle(scenario: Scenario) -> list[Rule]:
    """The rules that the oracle tries. In each step it uses the fastest, as if it knew all lengths in advance."""
    splits = list(all_splits(scenario.grid))
    rules: list[Rule] = [MovingRule(), ColocatedRule()]
    for split in splits[:: max(1, len(splits) // ORACLE_SPLITS)]:
        rules += [StaticRule(split), StartingAtRule(split, MovingRule())]
    return rules


def _record(
    run: SimulatedRun, at: float, rollout: SimulatedRollout, update_s: float, work: StepWork, in_full: bool
) -> None:
    timeline, slots, lengths, step = rollout.timeline, run.scenario.slots, rollout.lengths, work.step
    run.steps.append(
        {
            "step": step,
            "at_s": at,
            "rollout_s": timeline.seconds,
            "update_s": update_s,
            "idle": timeline.idle,
            "switching": timeline.switch_s / (timeline.seconds * slots),
            "busy": {role: timeline.busy_s[role] / owned for role, owned in timeline.owned_s.items() if owned > 0},
            "split": {role: owned / timeline.seconds for role, owned in timeline.owned_s.items()},
            "moves": len(timeline.moves),
            "tokens": sum(lengths),
            "wasted_tokens": rollout.wasted_tokens,
            "length": sum(lengths) / max(1, len(lengths)),
            "acceptance": work.acceptance,
            "drawn": rollout.drawn,
        }
    )
    if not in_full:
        return
    run.moves += [{**move, "at_s": at + move["at_s"]} for move in timeline.moves]
    run.timeline += [{**one, "start": at + one["start"], "end": at + one["end"]} for one in timeline.intervals]
    end = at + timeline.seconds
    for slot in range(slots):
        run.timeline.append({"step": step, "slot": slot, "role": "trainer", "start": end, "end": end + update_s})
