"""How long a rollout takes on a number of GPUs, under each placement: the forecast of runs (placement/forecast.py).

View (expected work) + speeds ──> Rollouts.colocated, static, moving ──> PlannedRollout
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from gcore.cost.replica_speed import ReplicaSpeed
from gcore.placement.baselines import ColocatedRule
from gcore.placement.forecast import Forecast, best_static_split, poll_interval_s
from gcore.placement.grid import POLICY, DeviceGrid, Split, split_by
from gcore.placement.rules import Costs, MovingRule, Rule, View, generated_s, judged_s

NUM_FORECASTS = 3  # of which the mean is taken, as in guard.py


@dataclass(frozen=True)
class PlannedRollout:
    """PlannedRollout({"policy": 40, "judge": 24}, seconds=98.0, generating_s=61.0, switching_s=0.0)"""

    split: Mapping[str, int]  # GPUs per role at its start
    seconds: float
    generating_s: float  # while responses are generated
    switching_s: float  # while all GPUs change their role
    turns: float = 0.0  # how often they do


class Rollouts:
    """Rollouts with the same work and the same replicas. `widths`: GPUs per replica, by role."""

    def __init__(self, view: View, widths: Mapping[str, int], speeds: Mapping[str, ReplicaSpeed]) -> None:
        self.view, self.widths, self.speeds = view, widths, speeds
        self.block = max(widths.values())  # GPUs that change their role together
        self._forecasts: dict[int, list[Forecast]] = {}  # by GPUs
        self._done: dict[tuple[str, int], PlannedRollout] = {}  # by placement and GPUs

    def has_room(self, gpus: int) -> bool:
        """For all roles at the same time."""
        return gpus >= self.block * len(self.widths)

    def colocated(self, gpus: int) -> PlannedRollout:
        rule = ColocatedRule() if len(self.widths) > 1 else None
        return self._once("colocated", gpus, lambda costs: (Split((POLICY,) * costs.grid.num_blocks), rule))

    def static(self, gpus: int) -> PlannedRollout:
        """With the best split."""

        def best(costs: Costs) -> tuple[Split, None]:
            forecasts, first = self._on(gpus), replace(MovingRule(), patience=math.inf).begin(self.view, costs)
            _, near = best_static_split(forecasts[:1], first, max(1, costs.grid.num_blocks // 8))  # one: faster
            return best_static_split(forecasts, near, 1)[1], None

        return self._once("static", gpus, best)

    def moving(self, gpus: int) -> PlannedRollout:
        """Blocks change their role during the rollout."""
        return self._once("moving", gpus, lambda costs: (MovingRule().begin(self.view, costs), MovingRule()))

    def with_split(self, split: Mapping[str, int]) -> PlannedRollout:
        """Without moves. `split`: GPUs per role."""
        gpus = sum(split.values())
        blocks = {role: split[role] // self.block for role in self.widths}
        return self._mean(gpus, split_by(DeviceGrid(gpus, self.widths), blocks), None)

    def _once(self, name: str, gpus: int, begin: Callable[[Costs], tuple[Split, Rule | None]]) -> PlannedRollout:
        if (name, gpus) not in self._done:
            self._done[name, gpus] = self._mean(gpus, *begin(self._on(gpus)[0].costs))
        return self._done[name, gpus]

    def _on(self, gpus: int) -> list[Forecast]:
        if gpus not in self._forecasts:
            costs = Costs(DeviceGrid(gpus, self.widths), self.speeds)
            self._forecasts[gpus] = [Forecast(self.view, costs, seed) for seed in range(NUM_FORECASTS)]
        return self._forecasts[gpus]

    def _mean(self, gpus: int, split: Split, rule: Rule | None) -> PlannedRollout:
        poll_s = poll_interval_s(self._in_turns_s(gpus))
        times = [forecast.times(split, rule, poll_s) for forecast in self._on(gpus)]
        return PlannedRollout(
            {role: self.block * len(split.blocks(role)) for role in self.widths},
            fmean(each.seconds for each in times),
            fmean(each.generating_s for each in times),
            fmean(each.switching_s for each in times),
            fmean(each.turns for each in times),
        )

    def _in_turns_s(self, gpus: int) -> float:
        """About the seconds of a rollout in which all GPUs generate, then judge."""
        loads, judges = self.view.loads, [role for role in self.widths if role != POLICY]
        judging = sum(self.widths[role] * judged_s(loads[role], self.speeds[role]) for role in judges)
        return generated_s(loads[POLICY], self.speeds[POLICY], gpus / self.widths[POLICY]) + judging / gpus
