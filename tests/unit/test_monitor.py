"""The monitor: speeds from counters, loads by hand, lengths, requests per group."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from gcore.placement.grid import POLICY, DeviceGrid, Move, Split
from gcore.placement.meters import DEFAULT_SPEED, QUANTILES, GroupCounts, LinearFit, SpeedMeter
from gcore.placement.monitor import Monitor, Report, RolloutProgress
from gcore.protocols import EngineStats, RoleReport

GRID = DeviceGrid(4, {POLICY: 1, "judge": 2})  # two blocks, of two engines or one judge
SPLIT = Split((POLICY, "judge"))


def make(grid: DeviceGrid = GRID) -> Monitor:
    return Monitor(grid, dict.fromkeys(grid.roles, 64))


def report(at_s: float = 0.0, policy: Any = None, judge: Any = None, **others: Any) -> Report:
    """The report of an idle controller, except for the given values."""
    roles = {POLICY: RoleReport(**policy or {}), "judge": RoleReport(**judge or {})}
    idle: dict[str, Any] = {"target": 0.0, "kept": 0, "decided": 0, "in_progress": 0, "rate": 1.0}
    progress = RolloutProgress(**{name: others.pop(name, value) for name, value in idle.items()})
    return Report(at_s, progress, roles, **others)


def poll(monitor: Monitor, *reports: Report, moving: Any = None) -> Any:
    return monitor.add(reports, SPLIT, moving or {}, 1e9)


class Engine:
    """EngineStats of a replica whose decoding step takes 0.01 + 0.002 * running."""

    def __init__(self) -> None:
        self.busy_s = self.tokens = 0.0

    def decode(self, running: int, steps: int = 10) -> EngineStats:
        self.busy_s += steps * (0.01 + 0.002 * running)
        self.tokens += steps * running
        return EngineStats(running, 0, self.busy_s, self.tokens)


def feed(monitor: Monitor, engine: Engine, batches: list[int]) -> None:
    """Two polls per batch size, with the same batch at both. The last pair ends at second 1."""
    for n, running in enumerate(batches):
        if n:
            monitor.end_rollout()
        poll(monitor, report(0, policy={"replicas": {0: EngineStats(running, 0, engine.busy_s, engine.tokens)}}))
        poll(monitor, report(1, policy={"replicas": {0: engine.decode(running)}}))


def speed(monitor: Monitor) -> tuple[float, float]:
    found = monitor.costs.speeds[POLICY]
    return found.base_s, found.per_sequence_s


# ---- the speed


def test_without_measurements_the_default_is_used():
    monitor = make()
    poll(monitor, report())
    assert speed(monitor) == (DEFAULT_SPEED.base_s, DEFAULT_SPEED.per_sequence_s)
    assert monitor.costs.speeds[POLICY].max_concurrent == 64
    assert monitor.costs.switch_s(Move(0, POLICY, "judge")) == DEFAULT_SPEED.wake_s


def test_the_linear_fit_of_different_batches():
    monitor = make()
    feed(monitor, Engine(), [2, 60, 9, 33, 50, 5, 17, 42, 25, 1, 64, 30] * 4)
    base_s, per_sequence_s = speed(monitor)
    assert base_s == pytest.approx(0.01, rel=0.03)
    assert per_sequence_s == pytest.approx(0.002, rel=0.01)


def test_with_more_measurements_the_default_counts_less():
    errors = []
    for times in (1, 8):
        monitor = make()
        feed(monitor, Engine(), [8, 56] * times)
        errors.append(abs(speed(monitor)[1] / 0.002 - 1))
    assert errors[1] < 0.2 * errors[0] < 0.02


def test_a_batch_that_changed_a_lot_between_two_polls_is_not_used():
    monitor, engine = make(), Engine()
    poll(monitor, report(0, policy={"replicas": {0: engine.decode(8)}}))
    poll(monitor, report(1, policy={"replicas": {0: engine.decode(60)}}))
    assert speed(monitor) == (DEFAULT_SPEED.base_s, DEFAULT_SPEED.per_sequence_s)


def test_with_one_batch_size_the_ratio_is_that_of_the_default():
    monitor = make()
    feed(monitor, Engine(), [20] * 8)
    base_s, per_sequence_s = speed(monitor)
    assert base_s + 20 * per_sequence_s == pytest.approx(0.01 + 20 * 0.002)  # what was measured
    assert per_sequence_s / base_s == pytest.approx(DEFAULT_SPEED.per_sequence_s / DEFAULT_SPEED.base_s)


def test_a_restarted_replica_counts_from_zero():
    monitor, engine = make(), Engine()
    feed(monitor, engine, [2, 60, 33])
    found, busy = speed(monitor), monitor.busy[POLICY]
    poll(monitor, report(2, policy={"replicas": {0: EngineStats(33, 0, 0.5, 3.0)}}))  # both fell
    assert speed(monitor) == found
    poll(
        monitor, report(3, policy={"replicas": {0: EngineStats(33, 0, 1.4, 2.0)}})
    )  # tokens fell: busy_s cannot be compared
    assert speed(monitor) == found and monitor.busy[POLICY] == busy
    poll(monitor, report(4, policy={"replicas": {0: EngineStats(33, 0, 1.4 + 0.5, 2.0 + 330)}}))
    assert speed(monitor) != found and monitor.busy[POLICY] == pytest.approx(0.5)


def test_a_replica_that_did_not_answer_is_left_out():
    """Until it has answered twice in a row: before that, the difference of its counters is unknown."""
    monitor, engine = make(), Engine()
    feed(monitor, engine, [2, 60, 33])
    found = speed(monitor)
    poll(monitor, report(2))
    engine.decode(64, 1000)
    poll(monitor, report(3, policy={"replicas": {0: engine.decode(4)}}))
    assert speed(monitor) == found
    poll(monitor, report(4, policy={"replicas": {0: engine.decode(4)}}))
    assert speed(monitor) != found


def test_the_time_between_two_rollouts_is_not_measured():
    monitor, engine = make(), Engine()
    feed(monitor, engine, [2, 60, 33])
    found, busy = speed(monitor), monitor.busy[POLICY]
    monitor.end_rollout()
    engine.busy_s += 100  # weights
    poll(monitor, report(1000, policy={"replicas": {0: engine.decode(33)}}))
    assert (speed(monitor), monitor.busy[POLICY]) == (found, busy)


def test_blocks_that_move_are_not_measured():
    monitor, engine = make(), Engine()
    moving = {0: Move(0, "judge", POLICY)}
    for at, running in enumerate((2, 2, 60, 60)):
        poll(monitor, report(at, policy={"replicas": {0: engine.decode(running)}}), moving=moving)
    assert speed(monitor) == (DEFAULT_SPEED.base_s, DEFAULT_SPEED.per_sequence_s) and monitor.busy[POLICY] == 0.0


def test_busy_is_the_share_of_the_time_since_the_last_poll_over_all_replicas():
    monitor = make()
    for at, busy in ((10.0, (0.0, 0.0)), (12.0, (2.0, 0.5))):
        poll(
            monitor,
            report(at, policy={"replicas": {0: EngineStats(1, 0, busy[0], 0)}}),
            report(at + 77, policy={"replicas": {1: EngineStats(1, 0, busy[1], 0)}}),  # its clock is not used
        )
    assert monitor.busy == {POLICY: 2.5 / 4, "judge": 0.0}


# ---- the speed of every block


def measure(slowness: list[float], polls: int, noise: float = 0.0) -> SpeedMeter:
    """A meter that has polled one replica per block. Prefill makes all of them slower at every third poll."""
    meter, rng = SpeedMeter(), random.Random(0)
    busy, tokens = [0.0] * len(slowness), [0.0] * len(slowness)
    for n in range(polls):
        polled = []
        for i, slower in enumerate(slowness):
            before = EngineStats(20, 0, busy[i], tokens[i])
            step_s = (0.01 + 0.002 * 20) * slower * (3 if n % 3 == 0 else 1) * math.exp(rng.gauss(0, noise))
            busy[i], tokens[i] = busy[i] + 10 * step_s, tokens[i] + 10 * 20
            polled.append((i, before, EngineStats(20, 0, busy[i], tokens[i])))
        meter.relative()
        meter.add(POLICY, polled)
    return meter


def test_a_slow_block_stands_out():
    assert measure([1.0, 1.0, 2.5, 1.0], 40).relative() == {2: 0.4}
    assert measure([1.0, 1.0, 2.5, 1.0], 10).relative() == {}, "too few measurements"
    assert measure([1.0, 1.1, 1.15, 0.95], 40).relative() == {}, "nearly as fast as the others"
    assert measure([1.0, 1.0, 1.0, 1.0], 40, noise=0.5).relative() == {}, "chance"
    assert set(measure([1.0, 1.0, 2.5, 1.0], 80, noise=0.3).relative()) == {2}
    assert measure([2.5], 40).relative() == {}, "there is nothing to compare it with"


def test_the_speed_of_a_role_is_that_of_its_usual_blocks():
    fit = measure([1.0, 1.0, 2.5, 1.0], 300).fits[POLICY]
    usual = measure([1.0, 1.0, 1.0, 1.0], 300).fits[POLICY]
    assert fit.y / fit.n == pytest.approx(usual.y / usual.n, rel=0.03)


def test_a_new_devices_speed_is_measured_again_after_a_resume():
    monitor = make()
    monitor._speeds = measure([1.0, 2.5, 1.0], 40)
    found = make()
    found.restore(json.loads(json.dumps(monitor.saved())))
    assert monitor.costs.relative == {1: 0.4} and found.costs.relative == {}


def test_requests_per_group_of_a_judge_that_judges_half_of_the_prompts():
    counts = GroupCounts().plus(decided=40, judging=8, ended={POLICY: 48 * 8, "judge": 22 * 8})
    assert (counts.per_group(POLICY, 1.0), counts.per_group("judge", 1.0)) == (8.0, 4.0)
    assert counts.halved().per_group("judge", 1.0) == 4.0
    assert GroupCounts().plus(1, 0, {"judge": 8}).per_group("judge", 5.0) == 5.0, "too few groups"


# ---- loads


def test_loads_by_hand():
    """16 groups are needed, 4 are kept, at a rate of 0.5: 24 more. Of 12 in progress, 5 are still being generated."""
    monitor = make()
    reports = [
        report(
            target=8.0,
            kept=3,
            in_progress=7,
            rate=0.5,
            policy={
                "requests": 24,
                "waiting": 4,
                "calls": 3,
                "replicas": {0: EngineStats(14, 2, 0, 0, running_tokens=70)},
            },
            judge={"requests": 6, "calls": 6},
        ),
        report(
            target=8.0,
            kept=1,
            in_progress=5,
            rate=0.5,
            policy={"requests": 8, "calls": 2, "replicas": {1: EngineStats(16, 0, 0, 0, running_tokens=20)}},
            judge={"requests": 2, "waiting": 3, "calls": 5, "replicas": {1: EngineStats(6, 1, 0, 0)}},
        ),
    ]
    view = poll(monitor, *reports)
    policy, judge = view.loads[POLICY], view.loads["judge"]
    assert (policy.running, policy.waiting) == (30, 6)
    assert (judge.running, judge.waiting) == (7, 4)
    missing = 24 - 7  # seven groups are being judged
    assert policy.needed == 36 + (missing - 5) * 1.0
    assert judge.needed == 11 + missing * 1.0
    assert (policy.age, judge.age) == (90 / 30, 0.0)
    assert view.work == {0: 14 + 2 + 16, 1: 7}
    assert view.moving == frozenset()


def test_more_in_progress_than_needed():
    """One group is missing: of the ten being generated, a tenth is needed, and no further group."""
    active = {"target": 4.0, "kept": 3, "in_progress": 12, "policy": {"requests": 40, "calls": 10}}
    view = poll(make(), report(**active, judge={"requests": 8, "calls": 2}))
    assert view.loads["judge"].needed == 0.5 * 8
    assert view.loads[POLICY].needed == 0.0  # two are being judged
    view = poll(make(), report(**active | {"in_progress": 10}))
    assert view.loads[POLICY].needed == 0.1 * 40


def test_a_controller_that_is_done_needs_no_more_groups():
    done = report(target=8.0, kept=0, in_progress=0, done=True)
    active = report(target=8.0, kept=7, in_progress=1, policy={"requests": 4, "calls": 1})
    view = poll(make(), active, done)
    assert view.loads[POLICY].needed == 4.0 and view.loads["judge"].needed == 1.0


def test_lengths_are_quantiles_of_the_latest():
    monitor = make()
    view = poll(monitor, report())
    assert view.loads[POLICY].lengths == [128.0]
    reports = report(policy={"ended": ((30, 10),)}), report(policy={"ended": ((20,),)})
    view = poll(monitor, *reports)
    assert (view.loads[POLICY].lengths, view.loads[POLICY].longest) == ([10.0, 20.0, 30.0], [20.0, 30.0])
    assert view.loads["judge"].lengths == view.loads["judge"].longest == [128.0]
    view = poll(monitor, report(policy={"ended": tuple((n,) for n in range(1000, 1000 + 2 * 2048))}))
    assert len(view.loads[POLICY].lengths) == QUANTILES
    assert (view.loads[POLICY].lengths[0], view.loads[POLICY].lengths[-1]) == (1000.0 + 2048, 999.0 + 2 * 2048)


# ---- requests per group


def rollout(monitor: Monitor, groups: int, each: int, verdicts: int) -> None:
    """A whole rollout in one poll; then the controller is done."""
    ended = {"ended": ((5,) * each,) * groups}
    judged = {"ended": ((3,),) * (groups * verdicts)}
    poll(monitor, report(decided=groups, kept=groups, target=groups, policy=ended, judge=judged))
    poll(monitor, report(done=True))
    monitor.end_rollout()


def per_group(monitor: Monitor) -> tuple[float, float]:
    """Requests of the policy and the judge per group, from the expected load of ten groups."""
    view = monitor.expected(10, 1.0, 7)
    assert view.loads[POLICY].needed == 70
    needed = poll(monitor, report(target=10.0)).loads[POLICY].needed
    return needed / 10, view.loads["judge"].needed / 10


def test_requests_of_a_group():
    monitor = make()
    assert per_group(monitor) == (7.0, 7.0)  # unknown: one per sibling
    rollout(monitor, 8, each=4, verdicts=12)
    assert per_group(monitor) == (4.0, 12.0)
    rollout(monitor, 8, each=4, verdicts=36)  # the last rollout has the largest weight
    assert per_group(monitor) == (4.0, (12 * 4 + 36 * 8) / 12)


@pytest.mark.parametrize("first", [True, False])
def test_requests_of_an_evaluation_are_not_counted(first):
    monitor = make()
    if not first:
        rollout(monitor, 8, each=4, verdicts=12)
    poll(monitor, report(in_progress=50, policy={"ended": ((5,) * 100,)}, judge={"ended": ((5,),) * 900}))
    poll(monitor, report(done=True))
    monitor.end_rollout()
    assert per_group(monitor) == ((7.0, 7.0) if first else (4.0, 12.0))


def test_groups_that_are_being_judged_have_their_responses():
    """Eight groups of four have been generated, none is decided on: four requests per group, not more."""
    judging = report(
        target=8.0, in_progress=8, policy={"ended": ((5,) * 4,) * 8}, judge={"ended": ((3,),) * 8, "calls": 24}
    )
    monitor = make()
    poll(monitor, judging)
    assert [monitor._counts().per_group(role, 7.0) for role in (POLICY, "judge")] == [4.0, 2.0]


def test_expected():
    monitor = make()
    rollout(monitor, 8, each=4, verdicts=12)
    view = monitor.expected(16, 0.5, 4)
    assert (view.loads[POLICY].waiting, view.loads[POLICY].needed) == (128, 128.0)
    assert (view.loads["judge"].waiting, view.loads["judge"].needed) == (0, 32 * 12.0)
    assert set(view.loads[POLICY].lengths) == {5.0} and set(view.loads["judge"].lengths) == {3.0}
    assert monitor.expected(16, 0.0, 4).loads[POLICY].needed == 16 / 0.05 * 4  # a rate of 0 is not extrapolated


def test_a_forecast_needs_measurements():
    """Until every speed was measured 8 times and lengths are known, the number of groups is 0."""
    monitor = make()
    rollout(monitor, 8, each=4, verdicts=12)
    assert monitor.expected(16, 0.5, 4).groups == 0.0
    for role in (POLICY, "judge"):
        fit = monitor._speeds.fits[role] = LinearFit()
        for running in range(1, 10):
            fit.add(running, 0.01)
    view = monitor.expected(16, 0.5, 4)
    assert (view.groups, view.rate, view.samples) == (16, 0.5, 4) and make().expected(16, 0.5, 4).groups == 0.0


def test_equal_reports_make_equal_views():
    one, other = make(), make()
    engine, judge = Engine(), Engine()
    for at in range(20):
        reports = [
            report(
                at,
                target=8.0,
                kept=at // 4,
                decided=at // 2,
                in_progress=6,
                rate=0.7,
                policy={
                    "requests": 20 + at,
                    "calls": 3,
                    "ended": ((at, 2 * at),),
                    "replicas": {0: engine.decode(1 + at)},
                },
                judge={"requests": 3, "replicas": {1: judge.decode(3)}},
            ),
            report(at + 0.3, target=8.0, judge={"ended": ((4,),)}),
        ]
        assert poll(one, *reports) == poll(other, *[replace(one) for one in reports])
        assert one.costs == other.costs


def test_a_restored_monitor_expects_the_same():
    """Also through JSON, as in a checkpoint."""
    monitor = make()
    feed(monitor, Engine(), [4, 8, 16])
    rollout(monitor, 8, each=4, verdicts=12)
    monitor.switch_s["judge"] = 1.5
    found = make()
    assert found.costs != monitor.costs
    found.restore({"lengths": {}, "longest": {}, "fits": {}, "ended_before": {}, "decided_before": 0, "switch_s": {}})
    assert found.costs == make().costs, "of an earlier version: measured again"
    found.restore(json.loads(json.dumps(monitor.saved())))
    assert found.costs == monitor.costs and found.expected(16, 0.5, 4) == monitor.expected(16, 0.5, 4)
    for each in (found, monitor):
        rollout(each, 4, each=4, verdicts=2)
    assert found.expected(16, 0.5, 4) == monitor.expected(16, 0.5, 4) and found.saved() == monitor.saved()
