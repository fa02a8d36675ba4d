"""Chooses before each rollout whether blocks move during it. Pure: a GuardState goes in, another comes out.

    GuardState + seconds of the last rollout + expected load of the next ──plan──> GuardState: a candidate and its split
    GuardState + Split + View ──decide──> moves

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
from gcore.placement.forecast import Forecast, best_static_split, mean_seconds, poll_interval_s
from gcore.placement.grid import POLICY, Move, Split, neighbours
from gcore.placement.rules import Costs, MovingRule, Rule, View

MOVING, STATIC, COLOCATED = "moving", "static", "colocated"


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


@dataclass(frozen=True, slots=True)
class GuardedRule:
    """Plans a rollout and decides on its moves; its state is an argument."""

    rule: MovingRule = field(default_factory=MovingRule)
    margin: tuple[float, float] = (0.045, 0.015)  # share of the time that moving must win: steady load, drifting load
    drift_trend: float = 0.06  # the load drifts if the trend of the rollout's time per step is above this
    keep_margin: float = 0.01  # share of the time that a change away from `static` or `colocated` must win
    change_regret: tuple[float, float] = (0.015, 0.1)  # regret at which the static split changes: mean, in one step
    num_forecasts: int = 3  # per candidate, each with other draws of lengths and acceptance
    decay: float = 0.7  # weight of the older costs at each step
    forecast_error: float = 0.03  # by how much the forecast may be wrong for one candidate and not for the others
    close_margin: float = 0.05  # share of the time: candidates within it are tried from time to time
    late_factor: float = 1.25  # times the expected seconds, after which blocks also move under `static`

    def plan(self, state: GuardState, view: View, costs: Costs, took_s: float | None) -> GuardState:
        """Before a rollout. `took_s`: seconds of the last rollout; None: there was none, or it is not comparable."""
        grid, moving = costs.grid, self.rule.begin(view, costs)
        step = state.step + 1
        if not view.groups or grid.num_blocks < len(grid.roles) or len(grid.roles) < 2:
            return replace(state, candidate=MOVING, splits={MOVING: moving}, expected_s=math.inf, step=step)
        last = state.splits.get(STATIC) or self._initial_static_split(view, costs)
        seeds = range(self.num_forecasts * step, self.num_forecasts * (step + 1))
        forecasts = [Forecast(view, costs, seed).start_after(last) for seed in seeds]
        best_s, static, regret = self._static_split(state, forecasts, last)
        planned = {MOVING: moving, STATIC: static, COLOCATED: Split((POLICY,) * grid.num_blocks)}
        before = planned | dict(state.splits)
        seconds = {name: self._forecast_s(forecasts, before[name], name, best_s) for name in planned}
        assert seconds[STATIC] < math.inf, "every role has a block"
        if took_s is not None and state.splits and seconds[state.candidate] < math.inf:
            state = self._record_error(state, seconds[state.candidate], took_s)
        drifts = abs(state.trend) > self.drift_trend
        if static != last and not drifts:  # the old split is no measure of a rollout without moves any more
            seconds[STATIC] = self._forecast_s(forecasts, static, STATIC, best_s)
        now = {name: math.log(min(seconds[name] / seconds[STATIC], 1e3)) for name in planned}
        decay = self.decay if state.costs and (static == last or drifts) else 0.0
        known = {name: decay * state.costs.get(name, 0.0) + (1 - decay) * now[name] for name in planned}
        trend = state.trend
        if state.step > 1 and state.static_s:  # the first forecast uses default speeds
            trend = 0.8 * trend + 0.2 * math.log(seconds[STATIC] / state.static_s)
        state = replace(state, splits=planned, costs=known, step=step, regret=regret, trend=trend)
        return self._choose(replace(state, static_s=seconds[STATIC]))

    def _forecast_s(self, forecasts: Sequence[Forecast], split: Split, candidate: str, best_s: float) -> float:
        return mean_seconds(forecasts, split, self.moves_of(candidate), poll_interval_s(best_s))

    def _record_error(self, state: GuardState, forecast_s: float, took_s: float) -> GuardState:
        """Compare the last rollout's forecast, made in hindsight, with the measured time."""
        error = math.log(took_s / forecast_s)
        total, weight = state.errors.get(state.candidate, (0.0, 0.0))
        noise = state.noise
        if weight:
            noise = 0.8 * noise + 0.2 * (error - total / weight) ** 2
        errors = {**state.errors, state.candidate: (0.9 * total + error, 0.9 * weight + 1)}
        return replace(state, errors=errors, noise=noise, last_used={**state.last_used, state.candidate: state.step})

    def _initial_static_split(self, view: View, costs: Costs) -> Split:
        return replace(self.rule, patience=math.inf).begin(view, costs)

    def _static_split(
        self, state: GuardState, forecasts: Sequence[Forecast], last: Split
    ) -> tuple[float, Split, float]:
        """The best seconds without moves, the split to use, the regret. The lengths of one step are partly random, so
        the split changes by a small stride after several steps of regret, and at once if the regret is large."""
        is_first, first = STATIC not in state.splits, forecasts[0]
        last = first.arranged(last)
        best_s, best = best_static_split(forecasts, last, max(1, len(last.owners) // (8 if is_first else 32)))
        lost = math.log(mean_seconds(forecasts, last) / best_s)
        regret = self.decay * state.regret + (1 - self.decay) * lost
        if is_first or lost > self.change_regret[1]:
            return best_s, best, 0.0
        if regret <= self.change_regret[0]:
            return best_s, last, regret
        near = neighbours(last, first.costs.grid, max(1, len(last.owners) // 16))
        return best_s, min(map(first.arranged, near), key=lambda split: mean_seconds(forecasts, split)), 0.0

    def _choose(self, state: GuardState) -> GuardState:
        """The candidate with the least expected time, or a close one that has not been used for long."""
        total = sum(s for s, _ in state.errors.values())
        count = sum(weight for _, weight in state.errors.values())
        common = total / count if count else 0.0  # error that the forecast has for all candidates
        margin = self.margin[abs(state.trend) > self.drift_trend]
        prior_weight = max(1.0, state.noise / self.forecast_error**2)  # rollouts that count as much as the forecast

        def expected(name: str) -> float:
            error, weight = state.errors.get(name, (common, 1.0))
            own, chance = error / weight - common, math.sqrt(state.noise / weight)
            correction = math.copysign(max(0.0, abs(own) - chance), own)
            return state.costs[name] + correction * weight / (weight + prior_weight)

        times = {name: expected(name) for name in state.costs}
        handicap = {STATIC: 0.0, MOVING: margin, COLOCATED: self.margin[0]}
        if state.candidate != MOVING:
            handicap[state.candidate] -= self.keep_margin
        chosen, retry_after = min(times, key=lambda name: times[name] + handicap[name]), state.retry_after
        for other in times:
            since, close = state.step - state.last_used.get(other, 0), self.close_margin
            if other == STATIC and STATIC not in state.last_used and chosen in state.errors:
                # never measured, while the chosen one takes longer than forecast: measure `static` too
                close += max(0.0, state.errors[chosen][0] / state.errors[chosen][1])
            if other != chosen and times[other] < times[chosen] + close and since > retry_after and state.last_used:
                chosen, retry_after = other, 2 * retry_after
                break
        expected_s = state.static_s * math.exp(state.costs[chosen] + common)
        return replace(state, candidate=chosen, retry_after=retry_after, expected_s=expected_s)

    def moves_of(self, candidate: str) -> Rule | None:
        """The rule that decides on moves; None: no moves."""
        return {MOVING: self.rule, STATIC: None, COLOCATED: ColocatedRule()}[candidate]

    def decide(self, state: GuardState, split: Split, view: View, costs: Costs) -> list[Move]:
        """During a rollout."""
        if state.candidate == COLOCATED:
            return ColocatedRule()(split, view, costs)
        starved = any(load.in_progress and not split.blocks(role) for role, load in view.loads.items())
        if state.candidate == MOVING or starved or view.elapsed_s > self.late_factor * state.expected_s:
            return self.rule(split, view, costs)
        return []


@dataclass
class DynamicRule:
    """G-Core's placement rule: the guard with its state. All controllers call it with the same arguments, so `state`
    is the same on all of them."""

    guard: GuardedRule = field(default_factory=GuardedRule)
    state: GuardState = field(default_factory=GuardState)
    before: GuardState = field(default_factory=GuardState)  # the state from which `begin` has made `state`

    def begin(self, view: View, costs: Costs, last: Split, took_s: float | None) -> Split:
        self.before = self.state
        self.state = self.guard.plan(self.state, view, costs, took_s)
        return self.state.splits[self.state.candidate]

    def __call__(self, split: Split, view: View, costs: Costs) -> list[Move]:
        return self.guard.decide(self.state, split, view, costs)
