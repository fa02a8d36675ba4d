"""Compares placement rules: runs each, searches the best static split, prints the table.

scenario + names ──compare──> {"dynamic": SimulatedRun, "colocated": SimulatedRun, ...} ──show──> terminal or pipe
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from gcore.observe.tables import console, table
from gcore.observe.values import duration
from gcore.placement.grid import Split, all_splits, best_split, shares
from gcore.simulate.run import (
    SimulatedRun,
    async_rule_of,
    disaggregated_split,
    rule_of,
    simulate,
    split_name,
    static_name,
    static_split,
)
from gcore.simulate.scenario import Scenario

BEST_STATIC = "best-static"  # the fastest of all static splits, chosen in hindsight
BEST_SPLIT = "best-disaggregated"  # the same with blocks for the trainer, under asynchronous rollout
USUAL = ("dynamic", "colocated", BEST_STATIC)
ALL = 128  # up to this number of splits, all are tried
TIMELINES = 8  # steps whose timeline is kept, per slot
PROGRESS_S = 5.0  # between two lines of progress that are not on a terminal
COLUMNS = ("rollout", "run", "against dynamic", "idle", "switching", "moves", "wasted")

Report = Callable[[str], None]


def compare(scenario: Scenario, names: Sequence[str], report: Report = lambda _: None) -> dict[str, SimulatedRun]:
    """A run under each rule. Timelines are kept for TIMELINES steps, spread over the run."""
    for name in names:
        if name not in (BEST_STATIC, "oracle", *([BEST_SPLIT] if scenario.staleness else [])):
            # reject a wrong name before the first simulation
            async_rule_of(name, scenario) or rule_of(name, scenario)
    shown = spread(scenario.steps, TIMELINES)
    runs = {
        name: best_static(scenario, report=report, disaggregated=name == BEST_SPLIT)
        if name in (BEST_STATIC, BEST_SPLIT)
        else simulate(scenario, name, keep_timeline=shown, report=report)
        for name in names
    }
    report("")
    return runs


def progress_to(stream: TextIO) -> Report:
    """Shows the latest line: on a terminal in place, elsewhere every PROGRESS_S seconds. "" ends it."""
    last = time.monotonic()

    def show(line: str) -> None:
        nonlocal last
        if stream.isatty():
            print(f"\r{line}\033[K", end="", file=stream, flush=True)
        elif line and (now := time.monotonic()) - last >= PROGRESS_S:
            last = now
            print(line, file=stream, flush=True)

    return show


def spread(steps: int, count: int) -> list[int]:
    """`count` steps, evenly spread from the first to the last: spread(100, 3) == [1, 51, 100]"""
    count = min(count, steps)
    return sorted({1 + round(i * (steps - 1) / max(1, count - 1)) for i in range(count)})


def best_static(
    scenario: Scenario, near: str | None = None, report: Report = lambda _: None, disaggregated: bool = False
) -> SimulatedRun:
    """The static split with the shortest rollouts, in hindsight. Up to ALL splits are all tried. With more, a local
    search with shrinking strides.

    `near`: name of the best split of a similar scenario; the search then starts there with a small stride.
    `disaggregated`: with blocks for the trainer, under asynchronous rollout.
    """
    grid = scenario.grid.with_trainer() if disaggregated else scenario.grid

    @functools.cache
    def run(split: Split) -> SimulatedRun:
        name = split_name(split, grid) if disaggregated else static_name(split, grid)
        return simulate(scenario, name, report=report)

    def seconds(split: Split) -> float:
        return run(split).total_s  # without staleness, the update phase takes the same time after every split

    every = list(itertools.islice(all_splits(grid), ALL + 1))
    if near is None and len(every) <= ALL:
        return run(min(every, key=seconds))
    if near is None:
        start = shares(grid)
    else:
        start = disaggregated_split(near, grid) if disaggregated else static_split(near, scenario)
    stride = max(1, grid.num_blocks // (4 if near is None else 12))
    return run(best_split(start, grid, stride, seconds))


def show(scenario: Scenario, runs: Mapping[str, SimulatedRun]) -> None:
    roles = " · ".join(f"{judge.name} {judge.model} x tp {judge.tensor_parallel}" for judge in scenario.judges)
    policy = scenario.denoiser or scenario.policy
    title = f"{scenario.name}: {scenario.slots} x {scenario.gpu} · policy {policy.model} · {roles}"
    steps = f"{scenario.steps} steps of {scenario.prompts} x {scenario.samples} responses"
    rules = table(f"{title}\n{steps}", ("rule", *COLUMNS), text=("rule",))
    base = runs.get("dynamic")
    for name, run in runs.items():
        rules.add_row(*row(name, run, base), style="bold" if run is base else None)
    console().print(rules)


def usual(scenario: Scenario) -> tuple[str, ...]:
    return (*USUAL, BEST_SPLIT) if scenario.staleness else USUAL


def row(name: str, run: SimulatedRun, base: SimulatedRun | None) -> list[str]:
    numbers = run.summary()
    ours, theirs = (0.0, 0.0) if base is None else (base.rollout_s, run.rollout_s)
    if run.scenario.staleness or (base is not None and base.scenario.staleness):  # the update is a part of `rollout`
        ours, theirs = base.total_s if base is not None else 0.0, run.total_s
    against = "" if base is None or run is base else f"{theirs / ours - 1:+.1%}"
    return [
        name if name == run.rule else f"{name} ({run.rule})",
        duration(numbers["rollout_s"]),
        duration(numbers["total_s"]),
        against,
        f"{numbers['idle']:.1%}",
        f"{numbers['switching']:.1%}",
        f"{numbers['moves']:.0f}",
        f"{numbers['wasted']:.0%}",
    ]
