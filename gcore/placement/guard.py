"""Whether moving blocks pays, decided from step to step. Pure: a Memory goes in, another comes out.

    Memory + what the last rollout took + what is expected of the next ──plan──> Memory: a way to place, and its split
    Memory + Split + View ──decide──> moves

There are three ways: `moving` (the rule of policy.py), `still` (the split that is forecast to be best, no moves) and
`turns` (all blocks generate, then all judge). Before every rollout each way is forecast on the lengths of the last one,
with the split that had been planned for it before they were known: how well would it have done? What the rollout really
took corrects the forecast of the way that was used. The way with the least expected time is used next; moving must win
by a margin. A way that comes close is tried now and then, ever less often while it does not win.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gcore.placement.baselines import colocated
from gcore.placement.forecast import Forecast, best_still, poll_interval_s
from gcore.placement.grid import POLICY, Move, Split, neighbours
from gcore.placement.rules import Costs, Decide, Dynamic, View

MOVING, STILL, TURNS = "moving", "still", "turns"


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered from rollout to rollout. Memory(way="still", splits={"still": Split(...), ...})"""

    way: str = MOVING
    splits: Mapping[str, Split] = field(default_factory=dict)  # planned for the rollout under way, by way
    expected_s: float = math.inf  # of the rollout under way
    costs: Mapping[str, float] = field(default_factory=dict)  # log of the time of each way against standing still
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # log of measured / forecast: sum, weight
    noise: float = 0.01  # mean square of that from rollout to rollout, within a way
    regret: float = 0.0  # log of what the best split without moves would have saved against the planned one, lately
    still_s: float = 0.0  # forecast of the rollout under way, standing still
    trend: float = 0.0  # log of its change from step to step, lately
    tried: Mapping[str, int] = field(default_factory=dict)  # the last step of each way
    wait: int = 4  # steps before a way that comes close is tried again
    step: int = 0


@dataclass(frozen=True, slots=True)
class Guarded:
    """G-Core's placement rule."""

    rule: Dynamic = field(default_factory=Dynamic)
    margin: tuple[float, float] = (0.045, 0.015)  # of the time: what moving must win; less if the load drifts
    steady: float = 0.06  # trend of the rollout's time from step to step, above which the load drifts
    keep: float = 0.01  # of the time: what another way must win against standing still or taking turns
    change: tuple[float, float] = (0.015, 0.1)  # regret at which another split stands still: lately, in one step
    tries: int = 3  # forecasts of each way, with lengths and acceptance drawn anew
    fade: float = 0.7  # how much of older costs stays at every step
    unsure: float = 0.03  # how far the forecast may be off for one way and not for the others
    close: float = 0.05  # of the time: ways that are no further behind are tried now and then
    late: float = 1.25  # times the expected seconds, after which blocks may move whatever the way

    def plan(self, memory: Memory, view: View, costs: Costs, took_s: float | None) -> Memory:
        """Before a rollout. `took_s`: seconds of the last one; None: there is none, or it tells nothing."""
        grid, moving = costs.grid, self.rule.begin(view, costs)
        step = memory.step + 1
        if not view.groups or grid.num_blocks < len(grid.roles) or len(grid.roles) < 2:
            return replace(memory, way=MOVING, splits={MOVING: moving}, expected_s=math.inf, step=step)
        last = memory.splits.get(STILL) or self._guess(view, costs)
        forecasts = [Forecast(view, costs, self.tries * step + i).follow(last) for i in range(self.tries)]
        best_s, still, regret = self._still(memory, forecasts[0], last)
        fresh = {MOVING: moving, STILL: still, TURNS: Split((POLICY,) * grid.num_blocks)}
        before = fresh | dict(memory.splits)
        seconds = {way: self._forecast(forecasts, before[way], way, best_s) for way in fresh}
        assert seconds[STILL] < math.inf, "every role has a block"
        if took_s is not None and memory.splits and seconds[memory.way] < math.inf:
            memory = self._learn(memory, seconds[memory.way], took_s)
        drifts = abs(memory.trend) > self.steady
        if still != last and not drifts:  # the old split tells nothing any more of what standing still costs
            seconds[STILL] = self._forecast(forecasts, still, STILL, best_s)
        now = {way: math.log(min(seconds[way] / seconds[STILL], 1e3)) for way in fresh}
        fade = self.fade if memory.costs and (still == last or drifts) else 0.0
        known = {way: fade * memory.costs.get(way, 0.0) + (1 - fade) * now[way] for way in fresh}
        trend = memory.trend
        if memory.step > 1 and memory.still_s:  # the first forecast is made of guesses
            trend = 0.8 * trend + 0.2 * math.log(seconds[STILL] / memory.still_s)
        memory = replace(memory, splits=fresh, costs=known, step=step, regret=regret, trend=trend)
        return self._choose(replace(memory, still_s=seconds[STILL]))

    def _forecast(self, forecasts: Sequence[Forecast], split: Split, way: str, best_s: float) -> float:
        """Mean over the tries."""
        found = [forecast.seconds(split, self.mover(way), poll_interval_s(best_s)) for forecast in forecasts]
        return sum(found) / len(found)

    def _learn(self, memory: Memory, forecast_s: float, took_s: float) -> Memory:
        """The last rollout was forecast in hindsight, and took so long."""
        error = math.log(took_s / forecast_s)
        total, weight = memory.errors.get(memory.way, (0.0, 0.0))
        noise = memory.noise
        if weight:
            noise = 0.8 * noise + 0.2 * (error - total / weight) ** 2
        errors = {**memory.errors, memory.way: (0.9 * total + error, 0.9 * weight + 1)}
        return replace(memory, errors=errors, noise=noise, tried={**memory.tried, memory.way: memory.step})

    def _guess(self, view: View, costs: Costs) -> Split:
        return replace(self.rule, patience=math.inf).begin(view, costs)

    def _still(self, memory: Memory, forecast: Forecast, last: Split) -> tuple[float, Split, float]:
        """The best seconds, the split to stand still with, the regret. The lengths of one step are chance in part, so
        the split changes by a step when others would have been better for a while, and at once if by much."""
        is_first = STILL not in memory.splits
        best_s, best = best_still(forecast, last, max(1, len(last.owners) // (8 if is_first else 32)))
        lost = math.log(forecast.seconds(last) / best_s)
        regret = self.fade * memory.regret + (1 - self.fade) * lost
        if is_first or lost > self.change[1]:
            return best_s, best, 0.0
        if regret <= self.change[0]:
            return best_s, last, regret
        near = neighbours(last, forecast.costs.grid, max(1, len(last.owners) // 16))
        return best_s, min(near, key=forecast.seconds), 0.0

    def _choose(self, memory: Memory) -> Memory:
        """The way with the least expected time, or one that has not been tried for long."""
        total = sum(s for s, _ in memory.errors.values())
        count = sum(weight for _, weight in memory.errors.values())
        common = total / count if count else 0.0  # the forecast is as far off for all ways
        margin = self.margin[abs(memory.trend) > self.steady]
        doubt = max(1.0, memory.noise / self.unsure**2)  # rollouts that weigh as much as the forecast

        def expected(way: str) -> float:
            error, weight = memory.errors.get(way, (common, 1.0))
            own, chance = error / weight - common, math.sqrt(memory.noise / weight)
            return memory.costs[way] + math.copysign(max(0.0, abs(own) - chance), own) * weight / (weight + doubt)

        times = {way: expected(way) for way in memory.costs}
        held = {STILL: 0.0, MOVING: margin, TURNS: self.margin[0]}
        if memory.way != MOVING:
            held[memory.way] -= self.keep
        way, wait = min(times, key=lambda w: times[w] + held[w]), memory.wait
        for other in times:
            since, close = memory.step - memory.tried.get(other, 0), self.close
            if other == STILL and STILL not in memory.tried and way in memory.errors:  # how long would that take?
                close += max(0.0, memory.errors[way][0] / memory.errors[way][1])
            if other != way and times[other] < times[way] + close and since > wait and memory.tried:
                way, wait = other, 2 * wait
                break
        return replace(memory, way=way, wait=wait, expected_s=memory.still_s * math.exp(memory.costs[way] + common))

    def mover(self, way: str) -> Decide | None:
        return {MOVING: self.rule, STILL: None, TURNS: colocated}[way]

    def decide(self, memory: Memory, split: Split, view: View, costs: Costs) -> list[Move]:
        """During a rollout."""
        if memory.way == TURNS:
            return colocated(split, view, costs)
        stranded = any(load.at_hand and not split.blocks(role) for role, load in view.loads.items())
        if memory.way == MOVING or stranded or view.elapsed_s > self.late * memory.expected_s:
            return self.rule(split, view, costs)
        return []
