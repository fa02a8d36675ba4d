"""Chooses before each rollout whether blocks move during it. Pure: a GuardState goes in, another comes out.

    GuardState + seconds of the last rollout + expected load of the next ──plan──> GuardState: a candidate and its split
    GuardState + Split + ClusterLoad ──decide──> moves

There are three candidates: `moving` (MovingRule in rules.py), `static` (the split with the best forecast, no moves)
and `colocated` (all blocks generate, then all judge). Before each rollout, every candidate is forecast on the lengths
of the last rollout, with the split that was planned for it before those lengths were known: how long would it have
taken? The measured time of the last rollout corrects the forecast of the candidate that was used. The candidate with
the least expected time is used next; moving must win by a margin. A candidate that is nearly as fast is tried from time
to time, at growing intervals while it does not win.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gcore.placement.baselines import ColocatedRule
from gcore.placement.forecast import Forecast, best_static_split, mean_times, poll_interval_s
from gcore.placement.grid import POLICY, Move, Split, neighbours
from gcore.placement.rules import ClusterLoad, MovingRule, RoleSpeeds, Rule

MOVING, STATIC, COLOCATED = "moving", "static", "colocated"
MOVING_RULE = MovingRule()
# the rules that move blocks during a rollout; None: no moves
CANDIDATES: Mapping[str, Rule | None] = {MOVING: MOVING_RULE, STATIC: None, COLOCATED: ColocatedRule()}

MARGIN = 0.045, 0.015  # share of the time that moving must win: steady load, drifting load
DRIFT_TREND = 0.06  # the load drifts if the trend of the rollout's time per step is above this
KEEP_MARGIN = 0.01  # share of the time that a change away from `static` or `colocated` must win
CHANGE_REGRET = 0.015, 0.1  # regret at which the static split changes: mean, in one step
NUM_FORECASTS = 3  # per candidate, each with other draws of lengths and acceptance
DECAY = 0.7  # weight of the older costs at each step
FORECAST_ERROR = 0.03  # by how much the forecast may be wrong for one candidate and not for the others
CLOSE_MARGIN = 0.05  # share of the time: candidates within it are tried from time to time
LATE_FACTOR = 1.25  # times the expected seconds, after which blocks also move under `static`


@dataclass(frozen=True, slots=True)
class GuardState:
    """What is kept from rollout to rollout. GuardState(candidate="static", splits={"static": Split(...), ...})"""

    candidate: str = MOVING
    splits: Mapping[str, Split] = field(default_factory=dict)  # planned for the current rollout, by candidate
    expected_s: float = math.inf  # of the current rollout
    costs: Mapping[str, float] = field(default_factory=dict)  # log of each candidate's time relative to `static`
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # log of measured / forecast: sum, weight
    noise: float = 0.01  # mean square of the change of that error from rollout to rollout, within one candidate
    regret: float = 0.0  # log of the planned static split's time over the best one's, running mean
    static_s: float = 0.0  # forecast of the current rollout without moves
    trend: float = 0.0  # log of the change of static_s per step, running mean
    last_used: Mapping[str, int] = field(default_factory=dict)  # the last step of each candidate
    retry_after: int = 4  # steps before a candidate that is nearly as fast is tried again
    step: int = 0

    def saved(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    @staticmethod
    def restored(saved: Mapping[str, Any]) -> GuardState:
        """From JSON, which has lists instead of tuples."""
        splits = {name: Split(tuple(split["owners"])) for name, split in saved["splits"].items()}
        errors = {name: (total, weight) for name, (total, weight) in saved["errors"].items()}
        return GuardState(**{**saved, "splits": splits, "errors": errors})

    @property
    def _drifts(self) -> bool:
        return abs(self.trend) > DRIFT_TREND

    def plan(self, view: ClusterLoad, costs: RoleSpeeds, took_s: float | None) -> GuardState:
        """Before a rollout. `took_s`: seconds of the last rollout; None: there was none, or it is not comparable."""
        grid, moving = costs.grid, MOVING_RULE.begin(view, costs)
        step = self.step + 1
        if not view.groups or grid.num_blocks < len(grid.roles) or len(grid.roles) < 2:
            return replace(self, candidate=MOVING, splits={MOVING: moving}, expected_s=math.inf, step=step)
        last = self.splits.get(STATIC) or MovingRule(patience=math.inf).begin(view, costs)
        seeds = range(NUM_FORECASTS * step, NUM_FORECASTS * (step + 1))
        forecasts = [Forecast(view, costs, seed).start_after(last) for seed in seeds]
        best_s, static, regret = self._static_split(forecasts, last)
        poll_s = poll_interval_s(best_s)
        planned = {MOVING: moving, STATIC: static, COLOCATED: Split((POLICY,) * grid.num_blocks)}
        before = planned | dict(self.splits)
        seconds = {name: mean_times(forecasts, before[name], CANDIDATES[name], poll_s).seconds for name in planned}
        assert seconds[STATIC] < math.inf, "every role has a block"
        state = self
        if took_s is not None and self.splits and seconds[self.candidate] < math.inf:
            state = self._record_error(seconds[self.candidate], took_s)
        if static != last and not self._drifts:  # the old split is no measure of a rollout without moves any more
            seconds[STATIC] = mean_times(forecasts, static).seconds
        now = {name: math.log(min(seconds[name] / seconds[STATIC], 1e3)) for name in planned}
        decay = DECAY if self.costs and (static == last or self._drifts) else 0.0
        known = {name: decay * self.costs.get(name, 0.0) + (1 - decay) * now[name] for name in planned}
        trend = self.trend
        if self.step > 1 and self.static_s:  # the first forecast uses default speeds
            trend = 0.8 * trend + 0.2 * math.log(seconds[STATIC] / self.static_s)
        state = replace(state, splits=planned, costs=known, step=step, regret=regret, trend=trend)
        return replace(state, static_s=seconds[STATIC])._choose()

    def _record_error(self, forecast_s: float, took_s: float) -> GuardState:
        """Compare the last rollout's forecast, made in hindsight, with the measured time."""
        error = math.log(took_s / forecast_s)
        total, weight = self.errors.get(self.candidate, (0.0, 0.0))
        noise = self.noise
        if weight:
            noise = 0.8 * noise + 0.2 * (error - total / weight) ** 2
        errors = {**self.errors, self.candidate: (0.9 * total + error, 0.9 * weight + 1)}
        return replace(self, errors=errors, noise=noise, last_used={**self.last_used, self.candidate: self.step})

    def _static_split(self, forecasts: Sequence[Forecast], last: Split) -> tuple[float, Split, float]:
        """The best seconds without moves, the split to use, the regret. The lengths of one step are partly random, so
        the split changes by a small stride after several steps of regret, and at once if the regret is large."""
        is_first, first = STATIC not in self.splits, forecasts[0]
        last = first.arranged(last)
        best_s, best = best_static_split(forecasts, last, max(1, len(last.owners) // (8 if is_first else 32)))
        lost = math.log(mean_times(forecasts, last).seconds / best_s)
        regret = DECAY * self.regret + (1 - DECAY) * lost
        mean_regret, step_regret = CHANGE_REGRET
        if is_first or lost > step_regret:
            return best_s, best, 0.0
        if regret <= mean_regret:
            return best_s, last, regret
        near = map(first.arranged, neighbours(last, first.costs.grid, max(1, len(last.owners) // 16)))
        return best_s, min(near, key=lambda split: mean_times(forecasts, split).seconds), 0.0

    def _choose(self) -> GuardState:
        """The candidate with the least expected time, or a close one that has not been used for long."""
        total = sum(s for s, _ in self.errors.values())
        count = sum(weight for _, weight in self.errors.values())
        common = total / count if count else 0.0  # error that the forecast has for all candidates
        prior_weight = max(1.0, self.noise / FORECAST_ERROR**2)  # rollouts that count as much as the forecast

        def expected(name: str) -> float:
            error, weight = self.errors.get(name, (common, 1.0))
            difference, chance = error / weight - common, math.sqrt(self.noise / weight)
            correction = math.copysign(max(0.0, abs(difference) - chance), difference)
            return self.costs[name] + correction * weight / (weight + prior_weight)

        times = {name: expected(name) for name in self.costs}
        handicap = {STATIC: 0.0, MOVING: MARGIN[self._drifts], COLOCATED: MARGIN[0]}
        if self.candidate != MOVING:
            handicap[self.candidate] -= KEEP_MARGIN
        chosen, retry_after = min(times, key=lambda name: times[name] + handicap[name]), self.retry_after
        for other in times:
            since, close = self.step - self.last_used.get(other, 0), CLOSE_MARGIN
            if other == STATIC and STATIC not in self.last_used and chosen in self.errors:
                # never measured, while the chosen one takes longer than forecast: measure `static` too
                close += max(0.0, self.errors[chosen][0] / self.errors[chosen][1])
            if other != chosen and times[other] < times[chosen] + close and since > retry_after and self.last_used:
                chosen, retry_after = other, 2 * retry_after
                break
        expected_s = self.static_s * math.exp(self.costs[chosen] + common)
        return replace(self, candidate=chosen, retry_after=retry_after, expected_s=expected_s)

    def decide(self, split: Split, view: ClusterLoad, costs: RoleSpeeds) -> list[Move]:
        """During a rollout."""
        rule = CANDIDATES[self.candidate]
        starved = any(load.in_progress and not split.blocks(role) for role, load in view.loads.items())
        if rule is None and (starved or view.elapsed_s > LATE_FACTOR * self.expected_s):
            rule = MOVING_RULE
        return [] if rule is None else rule(split, view, costs)


@dataclass
class DynamicRule(Rule):
    """G-Core's placement rule: the guard with its state. All controllers call it with the same arguments, so `state`
    is the same on all of them."""

    state: GuardState = field(default_factory=GuardState)
    before: GuardState = field(default_factory=GuardState)  # the state from which `begin` has made `state`

    def begin(self, view: ClusterLoad, costs: RoleSpeeds, last: Split, took_s: float | None) -> Split:
        self.before, self.state = self.state, self.state.plan(view, costs, took_s)
        return self.state.splits[self.state.candidate]

    def __call__(self, split: Split, view: ClusterLoad, costs: RoleSpeeds) -> list[Move]:
        return self.state.decide(split, view, costs)
