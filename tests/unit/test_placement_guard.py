"""The forecast against calculations by hand, the guard's state, and cases in which moving costs time."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest

from gcore.cost.replica_speed import ReplicaSpeed
from gcore.placement.forecast import Forecast, best_static_split
from gcore.placement.grid import POLICY, DeviceGrid, Move, Split, all_splits, neighbours, split_by
from gcore.placement.guard import CANDIDATES, COLOCATED, MOVING, MOVING_RULE, STATIC, GuardState
from gcore.placement.rules import ClusterLoad, Load, RoleSpeeds
from gcore.simulate.run import simulate, static_name
from gcore.simulate.scenario import load_scenario
from gcore.simulate.table import best_static
from gcore.types import UserError

JUDGE = "judge"
SPEED = ReplicaSpeed(
    base_s=0.01, per_sequence_s=0.001, prefill_s_per_token=0.0001, max_concurrent=10, sleep_s=1.0, wake_s=2.0,
    weights_s=3.0,
)  # fmt: skip
COSTS = RoleSpeeds(DeviceGrid(4, {POLICY: 1, JUDGE: 1}), {POLICY: SPEED, JUDGE: SPEED})
TWO = Split((POLICY, POLICY, JUDGE, JUDGE))


def expected(groups=4, rate=1.0, samples=2, length=100.0, verdict=20.0):
    requests = groups / rate * samples
    loads = {
        POLICY: Load(waiting=round(requests), needed=requests, lengths=(length,)),
        JUDGE: Load(needed=requests, lengths=(verdict,)),
    }
    return ClusterLoad(loads, groups=groups, rate=rate, samples=samples)


# ---- the forecast -------------------------------------------------------------------------------------------------


def test_a_rollout_without_moves():
    """8 responses on 2 replicas: 100 steps of 10 + 4 ms. Then 8 verdicts on 2: 20 steps of 10 + 4 ms."""
    assert Forecast(expected(), COSTS).times(TWO).seconds == pytest.approx(100 * 0.014 + 20 * 0.014)


def test_siblings_share_a_replica():
    """One group on two replicas: both of its responses are on one of them."""
    assert Forecast(expected(groups=1), COSTS).times(TWO).seconds == pytest.approx(100 * 0.012 + 20 * 0.011)


def test_waves_where_not_all_fit():
    """40 responses on 2 replicas of 10: two waves of 100 steps of 20 ms; verdicts of the first overlap the second."""
    found = Forecast(expected(groups=20), COSTS).times(TWO).seconds
    assert found == pytest.approx(2 * 100 * 0.02 + 20 * 0.02)


def test_a_dropped_group_is_replaced():
    """Some of the 4 groups are dropped, and others replace them."""
    seconds = {seed: Forecast(expected(rate=0.5), COSTS, seed).times(TWO).seconds for seed in range(8)}
    assert len(set(seconds.values())) > 1 and min(seconds.values()) > Forecast(expected(), COSTS).times(TWO).seconds
    assert Forecast(expected(rate=0.5), COSTS, 3).times(TWO).seconds == seconds[3]


def test_prefill_stalls_the_pool():
    view = expected()
    view = replace(view, loads={**view.loads, JUDGE: replace(view.loads[JUDGE], prompt=500.0)})
    assert Forecast(view, COSTS).times(TWO).seconds == pytest.approx(100 * 0.014 + 8 * 500 * 0.0001 / 2 + 20 * 0.014)


def test_colocated():
    """All 4 replicas generate: 100 steps of 10 + 2 ms; at the next poll they change, in 3 s; 20 steps of 10 + 2 ms."""
    found = Forecast(expected(), COSTS).times(Split((POLICY,) * 4), CANDIDATES[COLOCATED], poll_interval_s=0.5)
    assert found.seconds == pytest.approx(1.5 + 3.0 + 20 * 0.012)


def test_some_groups_represent_many():
    few, many = (Forecast(expected(groups=n), COSTS).times(TWO).seconds for n in (60, 600))
    assert many == pytest.approx(10 * few, rel=0.05)


def test_a_role_without_a_block_never_ends():
    assert Forecast(expected(), COSTS).times(Split((POLICY,) * 4)).seconds == math.inf


def test_aborted_groups_start_first():
    view = replace(expected(rate=0.6), samples=1)
    one = Forecast(view, COSTS, 1)
    after = Forecast(view, COSTS, 1).start_after(TWO)
    assert (one.resumed, one.first_new) == ([], 0)
    assert after.first_new >= 4 and all(0 <= number < after.first_new for number in after.resumed)


def test_a_slow_replica_makes_its_groups_late():
    """Two groups of two, one on each policy block: 100 steps of 12 ms, on the slow block twice as long. Its verdicts
    are the last: 20 steps of 12 ms."""
    slow = replace(COSTS, relative={1: 0.5})
    assert Forecast(expected(groups=2), COSTS).times(TWO).seconds == pytest.approx(1.2 + 20 * 0.012)
    assert Forecast(expected(groups=2), slow).times(TWO).seconds == pytest.approx(2.4 + 20 * 0.011)
    judges = replace(COSTS, relative={3: 0.5})
    assert 1.44 < Forecast(expected(groups=2), judges).times(TWO).seconds < 1.8, "the fast judge gets as many verdicts"


def test_requests_leave_a_slow_pool_that_loses_its_last_block():
    """They continue on the fast block, from the tokens they have."""
    slow = replace(COSTS, relative={1: 0.5})

    def to_judge(split, view, costs):
        return [Move(1, POLICY, JUDGE)] if split[1] == POLICY and view.elapsed_s > 0.9 else []

    moved = Forecast(expected(groups=2), slow).times(TWO, to_judge, poll_interval_s=1.0).seconds
    assert 1.4 < moved < Forecast(expected(groups=2), slow).times(TWO).seconds


def test_siblings_of_the_last_rollout_are_replayed():
    """Two kinds of groups: all short, or all long. Their mean, or the longest of each, says less."""
    calls = [(10.0, 10.0), (400.0, 400.0)]
    forecast = Forecast(replace(expected(), calls=calls), COSTS)
    drawn = [tuple(forecast.lengths_of(group)) for group in range(64)]
    assert set(drawn) == set(calls) and 24 <= drawn.count(calls[0]) <= 40
    alone = Forecast(replace(expected(), calls=[(10.0,), (400.0,)]), COSTS)  # a workflow that asks one by one
    assert {len(alone.lengths_of(group)) for group in range(8)} == {2}


def test_the_best_static_split():
    """Judging is three times the work: one block for the policy, three for the judge, of all three splits."""
    forecast = Forecast(expected(groups=40, verdict=300.0), COSTS)
    seconds = {split: forecast.times(split).seconds for split in all_splits(COSTS.grid)}
    best_s, best = best_static_split([forecast], TWO, 1)
    assert best_s == seconds[best] == min(seconds.values()) and Counter(best.owners) == {POLICY: 1, JUDGE: 3}


# ---- the guard ----------------------------------------------------------------------------------------------------

SPLITS = {MOVING: TWO, STATIC: TWO, COLOCATED: Split((POLICY,) * 4)}


def state(**changes):
    facts = {
        "splits": SPLITS, "step": 2, "static_s": 10.0, "last_used": {MOVING: 1, STATIC: 1},
        "costs": {MOVING: -0.05, STATIC: 0.0, COLOCATED: 0.5},
    }  # fmt: skip
    return GuardState(**facts | changes)


def test_it_moves_if_the_forecast_gain_is_large_enough():
    """Moving must win 4.5 %, or 1.5 % if the load drifts."""
    assert state()._choose().candidate == MOVING
    little = state(costs={MOVING: -0.03, STATIC: 0.0, COLOCATED: 0.5})
    assert little._choose().candidate == STATIC
    assert replace(little, trend=0.07)._choose().candidate == MOVING
    assert replace(little, trend=-0.07)._choose().candidate == MOVING
    found = state()._choose()
    assert found.expected_s == pytest.approx(10.0 * math.exp(-0.05))


def test_measured_time_corrects_the_forecast():
    """Moving took 1.5 times its forecast, static exactly its forecast: 2 rollouts each.

    The common error of the forecast is log(1.5) / 2 = 0.2. With a noise of 0.0018 the standard error is 0.03, and two
    rollouts weigh as much as the forecast: half of 0.17 counts, which is more than the 0.05 that moving should win.
    """
    half = math.log(1.5) / 2
    measured = state(errors={MOVING: (4 * half, 2.0), STATIC: (0.0, 2.0)}, noise=2 * 0.03**2)
    found = measured._choose()
    assert found.candidate == STATIC and found.expected_s == pytest.approx(10.0 * math.exp(half))
    same_error = state(errors={MOVING: (4 * half, 2.0), STATIC: (4 * half, 2.0)}, noise=2 * 0.03**2)
    assert same_error._choose().candidate == MOVING, "both have the same error"
    noisy = state(errors={MOVING: (4 * half, 2.0), STATIC: (0.0, 2.0)}, noise=0.25)
    assert noisy._choose().candidate == MOVING, "with this noise, two rollouts are not significant"


def test_the_error_of_a_forecast_is_recorded():
    found = state(errors={MOVING: (0.2, 1.0)})._record_error(10.0, 10.0 * math.e)
    assert found.errors == {MOVING: (pytest.approx(0.9 * 0.2 + 1.0), pytest.approx(1.9))}
    assert found.noise == pytest.approx(0.8 * 0.01 + 0.2 * 0.8**2) and found.last_used == {MOVING: 2, STATIC: 1}


def test_a_close_candidate_is_tried_at_growing_intervals():
    now, used = state(candidate=STATIC, costs={MOVING: 0.01, STATIC: 0.0, COLOCATED: 0.5}), []
    for step in range(3, 40):
        now = replace(now, step=step)._choose()
        used.append(now.candidate)
        now = replace(now, last_used={**now.last_used, now.candidate: step})
    assert [i + 3 for i, name in enumerate(used) if name == MOVING] == [6, 15, 32] and COLOCATED not in used


def test_static_is_tried_when_moving_takes_longer_than_forecast():
    """The forecast of static is 30 % slower. But moving takes 1.5 times its own forecast."""
    costs = {MOVING: -0.3, STATIC: 0.0, COLOCATED: 0.9}
    never = state(costs=costs, last_used={MOVING: 5}, step=6)
    assert never._choose().candidate == MOVING
    assert replace(never, errors={MOVING: (0.4, 1.0)})._choose().candidate == STATIC


def test_decisions_follow_the_candidate():
    backlog = ClusterLoad(
        {POLICY: Load(running=40, needed=30, lengths=(500, 1000)), JUDGE: Load(waiting=3000, needed=3000)},
        elapsed_s=10.0,
    )
    split = Split((POLICY, POLICY, POLICY, JUDGE))

    def moves(candidate, view=backlog, expected_s=10.0):
        return len(state(candidate=candidate, expected_s=expected_s).decide(split, view, COSTS))

    assert (moves(MOVING), moves(STATIC), moves(COLOCATED)) == (1, 0, 0)
    assert moves(STATIC, expected_s=7.9) == 1, "late: more than 1.25 times the expected seconds"
    assert state(candidate=STATIC).decide(Split((POLICY,) * 4), backlog, COSTS) != [], "the judge has no block"


def test_without_measurements_the_dynamic_rule_is_used():
    view = replace(expected(), groups=0.0)
    found = GuardState().plan(view, COSTS, None)
    assert found.candidate == MOVING and found.splits == {MOVING: MOVING_RULE.begin(view, COSTS)}
    assert found.expected_s == math.inf


def test_planning_is_pure():
    """The same state and view lead to the same plan: controllers need not communicate."""
    view, first = expected(groups=20, rate=0.7), GuardState()
    one = first.plan(view, COSTS, None)
    assert one == first.plan(view, COSTS, None) and first == GuardState()
    after = one.plan(view, COSTS, 5.0)
    assert after == one.plan(view, COSTS, 5.0) and after.step == 2
    assert list(after.errors) == [one.candidate]


# ---- every split --------------------------------------------------------------------------------------------------


def test_all_splits_of_three_roles():
    grid = DeviceGrid(5, {POLICY: 1, "a": 1, "b": 1})
    found = [tuple(Counter(split.owners).values()) for split in all_splits(grid)]
    assert found == [(1, 1, 3), (1, 2, 2), (1, 3, 1), (2, 1, 2), (2, 2, 1), (3, 1, 1)]
    near = neighbours(split_by(grid, {POLICY: 3, "a": 1, "b": 1}), grid, 1)
    assert [tuple(Counter(split.owners).values()) for split in near] == [(2, 2, 1), (2, 1, 2)]


def test_best_static_searches_all_splits(request):
    """With judges of different sizes, an even split of their blocks is far from the best."""
    case = load_scenario(request.config.rootpath / "scenarios" / "three-judges.yaml", ["steps=1"])
    found = best_static(case)
    assert found.rule == "static:2-4-1-1"
    every = [simulate(case, static_name(split, case.grid)).rollout_s for split in all_splits(case.grid)]
    assert found.rollout_s == min(every) and len(every) == 35
    evenly = min(simulate(case, f"static:{n}").rollout_s for n in range(1, 6))
    assert evenly > 1.1 * found.rollout_s
    with pytest.raises(UserError, match="separated by dashes, 8 in all"):
        simulate(case, "static:2-4-1")


# ---- cases that are bad without the guard -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "steps", "best", "bound"),
    [
        ("equal-lengths", 12, ("6",), 1.0),
        ("few-prompts", 24, ("7", "8", "9", "10", "11"), 1.03),
        ("large-judge", 8, ("1",), 1.03),
        ("constant", 12, ("5",), 1.03),
        ("three-judges", 5, ("2-4-1-1",), 1.03),
        ("slow-device", 16, ("2",), 1.03),
        ("half-judged", 16, ("4",), 1.03),
        ("bimodal", 12, ("3",), 1.03),
    ],
)
def test_never_far_behind_the_best_static_split(name, steps, best, bound, request):
    """In few-prompts, the splits around the best differ only by chance, so their mean is used."""
    case = load_scenario(request.config.rootpath / "scenarios" / f"{name}.yaml", [f"steps={steps}"])
    static_s = sum(simulate(case, f"static:{split}").rollout_s for split in best) / len(best)
    assert simulate(case, "dynamic").rollout_s <= bound * static_s


def test_moves_stop_under_constant_load(request):
    """Except for occasional probes. Without the guard 2 or 3 blocks move in every step."""
    case = load_scenario(request.config.rootpath / "scenarios" / "constant.yaml", ["steps=16"])
    guarded, alone = ([step["moves"] for step in simulate(case, name).steps[10:]] for name in ("dynamic", "unguarded"))
    assert sum(moves > 0 for moves in guarded) <= 1 and min(alone) >= 2


def test_a_restored_state_plans_the_same():
    """Also through JSON, as in a checkpoint."""
    state = GuardState()
    for length in (100.0, 140.0, 90.0):
        state = state.plan(expected(length=length), COSTS, took_s=2.0)
    found = GuardState.restored(json.loads(json.dumps(state.saved())))
    assert found == state != GuardState()
    view = expected(length=200.0)
    assert found.plan(view, COSTS, 3.0) == state.plan(view, COSTS, 3.0)
