"""What controllers cost: CPU seconds of a step, by a model that is linear in what a controller does. Pure functions.

rows of bench/controllers.py ──observation──> fit ──> ControlCosts ──┐
a step (samples, ranks, controllers, calls per group) ──> Step ──────┴──predict──> seconds of each part

calls        generation, rewards, pushes to ranks, calls of the own ranks           shrinks with more controllers
own samples  workflows, decoding, metadata and advantages of the own share          shrinks
known        metadata and advantages of all samples, which every controller reads   does not
layout       which rank trains on which sample; one controller makes it             grows faster than the samples
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

CALLS_PER_RANK = 1  # in a step: update


@dataclass(frozen=True, slots=True)
class Step:
    """What a run does in one step. Step(samples=1024, ranks=64, controllers=4, siblings=8, calls_per_group=1.0)"""

    samples: int  # that are trained on
    ranks: int
    controllers: int
    siblings: int = 8
    calls_per_group: float = 1.0  # of engines, judges and reward workers, with those of groups that are dropped
    parts: int = 1  # of the layout: preparation.balance.num_parts(ranks)

    @property
    def own_samples(self) -> float:
        return self.samples / self.controllers

    @property
    def pushes(self) -> float:
        """Of one controller: ranks that get at least one of its samples, if each sample is at any rank."""
        return self.ranks * (1 - (1 - 1 / self.ranks) ** self.own_samples)

    @property
    def calls(self) -> float:
        """Of one controller."""
        groups = self.own_samples / self.siblings
        return groups * self.calls_per_group + self.pushes + CALLS_PER_RANK * self.ranks / self.controllers


@dataclass(frozen=True, slots=True)
class ControlCosts:
    """Seconds of CPU. ControlCosts(step_s=0.01, call_s=0.001, own_s=0.0003, known_s=0.00001, ...)"""

    step_s: float  # per step and controller
    call_s: float
    own_s: float  # per sample of the own share
    known_s: float  # per sample of other controllers
    deal_s: float = 0.0  # per sample of the step, for each controller that makes a part of the layout
    layout_s: float = 0.0  # per sample of a part


@dataclass(frozen=True, slots=True)
class ControlTime:
    """Seconds of CPU of a controller in one step, and of the controller that makes the layout."""

    calls_s: float
    own_s: float
    known_s: float
    step_s: float
    layout_s: float

    @property
    def each_s(self) -> float:
        """Of a controller that does not make the layout."""
        return self.calls_s + self.own_s + self.known_s + self.step_s

    @property
    def busiest_s(self) -> float:
        return self.each_s + self.layout_s

    @property
    def largest(self) -> str:
        """The name of the part that takes the most time."""
        parts = {"calls": self.calls_s, "own samples": self.own_s, "known samples": self.known_s}
        parts |= {"step": self.step_s, "layout": self.layout_s}
        return max(parts, key=lambda name: parts[name])


def predict(step: Step, costs: ControlCosts) -> ControlTime:
    return ControlTime(
        calls_s=costs.call_s * step.calls,
        own_s=costs.own_s * step.own_samples,
        known_s=costs.known_s * (step.samples - step.own_samples),
        step_s=costs.step_s,
        layout_s=layout_seconds(step.samples, step.parts, -(-step.parts // step.controllers), costs),
    )


def layout_seconds(samples: int, parts: int, made: int, costs: ControlCosts) -> float:
    """Of a controller that makes `made` of the parts."""
    return (costs.deal_s if parts > 1 else 0.0) * samples + costs.layout_s * samples * made / parts


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured step, mean of the controllers. Observation(calls=57, own=64, known=960, seconds=0.2)"""

    calls: float
    own: float
    known: float
    seconds: float


def fit(seen: Sequence[Observation]) -> tuple[ControlCosts, float]:
    """The costs, none of them negative, with the least relative error; and the median relative error. The layout is
    part of the known samples here, divided by the number of controllers that make parts of it: see `fit_layout`."""
    rows = np.array([[1.0, o.calls, o.own, o.known] for o in seen])
    seconds = np.array([o.seconds for o in seen])
    found = _least_squares(rows / seconds[:, None], np.ones(len(seen)))
    error = float(np.median(np.abs(rows @ found / seconds - 1)))
    return ControlCosts(*found.tolist()), error


def fit_layout(costs: ControlCosts, seen: Sequence[tuple[int, int, float]]) -> ControlCosts:
    """`seen`: samples, number of parts, and seconds of one part that was made."""
    rows = np.array([[samples if parts > 1 else 0, samples / parts] for samples, parts, _ in seen], float)
    seconds = np.array([each for _, _, each in seen])
    found = _least_squares(rows / seconds[:, None], np.ones(len(seen)))
    return ControlCosts(*astuple(costs)[:4], *found.tolist())


def _least_squares(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Without negative coefficients: the best of all subsets of columns."""
    best, least = np.zeros(rows.shape[1]), np.inf
    numbers = range(rows.shape[1])
    for columns in itertools.chain(*(itertools.combinations(numbers, n) for n in range(1, len(numbers) + 1))):
        found = np.linalg.lstsq(rows[:, columns], wanted, rcond=None)[0]
        error = float(np.square(rows[:, columns] @ found - wanted).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(rows.shape[1]), error
            best[list(columns)] = found
    return best


if __name__ == "__main__":  # a part of other benches
    print(__doc__)
