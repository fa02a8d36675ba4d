"""What the controllers know in common: speeds from counters, loads by hand, lengths, requests a group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gcore.placement.grid import POLICY, DeviceGrid, Move, Split
from gcore.placement.monitor import GUESS, QUANTILES, Monitor, Report, RolloutProgress
from gcore.protocols import EngineStats, RoleReport

GROUND = DeviceGrid(4, {POLICY: 1, "judge": 2})  # two blocks, of two engines or one judge
SPLIT = Split((POLICY, "judge"))


def make(grid: DeviceGrid = GROUND) -> Monitor:
    return Monitor(grid, dict.fromkeys(grid.roles, 64))


def report(at_s: float = 0.0, policy: Any = None, judge: Any = None, **others: Any) -> Report:
    """Of a controller that has nothing to do, but for what is said."""
    roles = {POLICY: RoleReport(**policy or {}), "judge": RoleReport(**judge or {})}
    nothing: dict[str, Any] = {"target": 0.0, "kept": 0, "decided": 0, "under_way": 0, "rate": 1.0}
    progress = RolloutProgress(**{name: others.pop(name, value) for name, value in nothing.items()})
    return Report(at_s, progress, roles, **others)


def look(monitor: Monitor, *parts: Report, moving: Any = None) -> Any:
    return monitor.add(parts, SPLIT, moving or {}, 1e9)


class Engine:
    """EngineStats of a replica whose decoding step lasts 0.01 + 0.002 * running."""

    def __init__(self) -> None:
        self.busy_s = self.tokens = 0.0

    def decode(self, running: int, steps: int = 10) -> EngineStats:
        self.busy_s += steps * (0.01 + 0.002 * running)
        self.tokens += steps * running
        return EngineStats(running, 0, self.busy_s, self.tokens)


def feed(monitor: Monitor, engine: Engine, batches: list[int]) -> None:
    """Two looks at every batch: the same ran at both ends of the time between them. The last pair ends at second 1."""
    for n, running in enumerate(batches):
        if n:
            monitor.ended_rollout()
        look(monitor, report(0, policy={"replicas": {0: EngineStats(running, 0, engine.busy_s, engine.tokens)}}))
        look(monitor, report(1, policy={"replicas": {0: engine.decode(running)}}))


def speed(monitor: Monitor) -> tuple[float, float]:
    found = monitor.costs.speeds[POLICY]
    return found.base_s, found.per_sequence_s


# ---- the speed


def test_before_anything_is_measured_the_guess_holds():
    monitor = make()
    look(monitor, report())
    assert speed(monitor) == (GUESS.base_s, GUESS.per_sequence_s)
    assert monitor.costs.speeds[POLICY].max_concurrent == 64
    assert monitor.costs.switch_s(Move(0, POLICY, "judge")) == GUESS.wake_s


def test_the_line_of_spread_batches():
    monitor = make()
    feed(monitor, Engine(), [2, 60, 9, 33, 50, 5, 17, 42, 25, 1, 64, 30] * 4)
    base_s, per_sequence_s = speed(monitor)
    assert base_s == pytest.approx(0.01, rel=0.03)
    assert per_sequence_s == pytest.approx(0.002, rel=0.01)


def test_the_more_is_measured_the_less_the_guess_counts():
    errors = []
    for times in (1, 8):
        monitor = make()
        feed(monitor, Engine(), [8, 56] * times)
        errors.append(abs(speed(monitor)[1] / 0.002 - 1))
    assert errors[1] < 0.2 * errors[0] < 0.02


def test_a_batch_that_changed_a_lot_between_two_looks_tells_nothing():
    monitor, engine = make(), Engine()
    look(monitor, report(0, policy={"replicas": {0: engine.decode(8)}}))
    look(monitor, report(1, policy={"replicas": {0: engine.decode(60)}}))
    assert speed(monitor) == (GUESS.base_s, GUESS.per_sequence_s)


def test_one_batch_size_is_divided_as_the_guess_would():
    monitor = make()
    feed(monitor, Engine(), [20] * 8)
    base_s, per_sequence_s = speed(monitor)
    assert base_s + 20 * per_sequence_s == pytest.approx(0.01 + 20 * 0.002)  # what was measured
    assert per_sequence_s / base_s == pytest.approx(GUESS.per_sequence_s / GUESS.base_s)


def test_a_replica_that_was_started_again_counts_from_nothing():
    monitor, engine = make(), Engine()
    feed(monitor, engine, [2, 60, 33])
    found, busy = speed(monitor), monitor.busy[POLICY]
    look(monitor, report(2, policy={"replicas": {0: EngineStats(33, 0, 0.5, 3.0)}}))  # both fell
    assert speed(monitor) == found
    look(monitor, report(3, policy={"replicas": {0: EngineStats(33, 0, 1.4, 2.0)}}))  # tokens fell: busy is not its own
    assert speed(monitor) == found and monitor.busy[POLICY] == busy
    look(monitor, report(4, policy={"replicas": {0: EngineStats(33, 0, 1.4 + 0.5, 2.0 + 330)}}))
    assert speed(monitor) != found and monitor.busy[POLICY] == pytest.approx(0.5)


def test_a_replica_that_did_not_answer_is_left_out():
    """Until it has answered twice in a row: what it had in between is not known."""
    monitor, engine = make(), Engine()
    feed(monitor, engine, [2, 60, 33])
    found = speed(monitor)
    look(monitor, report(2))
    engine.decode(64, 1000)
    look(monitor, report(3, policy={"replicas": {0: engine.decode(4)}}))
    assert speed(monitor) == found
    look(monitor, report(4, policy={"replicas": {0: engine.decode(4)}}))
    assert speed(monitor) != found


def test_what_was_between_two_rollouts_is_nobodys_pace():
    monitor, engine = make(), Engine()
    feed(monitor, engine, [2, 60, 33])
    found, busy = speed(monitor), monitor.busy[POLICY]
    monitor.ended_rollout()
    engine.busy_s += 100  # weights
    look(monitor, report(1000, policy={"replicas": {0: engine.decode(33)}}))
    assert (speed(monitor), monitor.busy[POLICY]) == (found, busy)


def test_blocks_that_move_are_not_measured():
    monitor, engine = make(), Engine()
    moving = {0: Move(0, "judge", POLICY)}
    for at, running in enumerate((2, 2, 60, 60)):
        look(monitor, report(at, policy={"replicas": {0: engine.decode(running)}}), moving=moving)
    assert speed(monitor) == (GUESS.base_s, GUESS.per_sequence_s) and monitor.busy[POLICY] == 0.0


def test_busy_is_the_share_of_the_time_since_the_last_look_over_all_replicas():
    monitor = make()
    for at, busy in ((10.0, (0.0, 0.0)), (12.0, (2.0, 0.5))):
        look(
            monitor,
            report(at, policy={"replicas": {0: EngineStats(1, 0, busy[0], 0)}}),
            report(at + 77, policy={"replicas": {1: EngineStats(1, 0, busy[1], 0)}}),  # its clock does not count
        )
    assert monitor.busy == {POLICY: 2.5 / 4, "judge": 0.0}


# ---- loads


def test_loads_by_hand():
    """16 groups are needed and 4 there, half of them are kept: 24 more. Of 12 under way, 5 are generated still."""
    monitor = make()
    parts = [
        report(
            target=8.0,
            kept=3,
            under_way=7,
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
            under_way=5,
            rate=0.5,
            policy={"requests": 8, "calls": 2, "replicas": {1: EngineStats(16, 0, 0, 0, running_tokens=20)}},
            judge={"requests": 2, "waiting": 3, "calls": 5, "replicas": {1: EngineStats(6, 1, 0, 0)}},
        ),
    ]
    view = look(monitor, *parts)
    policy, judge = view.loads[POLICY], view.loads["judge"]
    assert (policy.running, policy.waiting) == (30, 6)
    assert (judge.running, judge.waiting) == (7, 4)
    missing = 24 - 7  # seven groups are judged already
    assert policy.needed == 36 + (missing - 5) * 1.0
    assert judge.needed == 11 + missing * 1.0
    assert (policy.age, judge.age) == (90 / 30, 0.0)
    assert view.work == {0: 14 + 2 + 16, 1: 7}
    assert not view.stopping and view.moving == frozenset()


def test_more_under_way_than_needed():
    """One group is missing: of ten that are generated, a tenth; none beyond."""
    at_work = {"target": 4.0, "kept": 3, "under_way": 12, "policy": {"requests": 40, "calls": 10}}
    view = look(make(), report(**at_work, judge={"requests": 8, "calls": 2}))
    assert view.loads["judge"].needed == 0.5 * 8
    assert view.loads[POLICY].needed == 0.0  # two are being judged
    view = look(make(), report(**at_work | {"under_way": 10}))
    assert view.loads[POLICY].needed == 0.1 * 40


def test_who_is_done_needs_nothing_more():
    done = report(target=8.0, kept=0, under_way=0, done=True)
    at_work = report(target=8.0, kept=7, under_way=1, policy={"requests": 4, "calls": 1})
    view = look(make(), at_work, done)
    assert view.loads[POLICY].needed == 4.0 and view.loads["judge"].needed == 1.0
    assert look(make(), done, done).stopping


def test_lengths_are_quantiles_of_the_latest():
    monitor = make()
    view = look(monitor, report())
    assert view.loads[POLICY].lengths == [128.0]
    parts = report(policy={"ended": (30, 10), "longest": (30,)}), report(policy={"ended": (20,), "longest": (20,)})
    view = look(monitor, *parts)
    assert (view.loads[POLICY].lengths, view.loads[POLICY].longest) == ([10.0, 20.0, 30.0], [20.0, 30.0])
    assert view.loads["judge"].lengths == view.loads["judge"].longest == [128.0]
    view = look(monitor, report(policy={"ended": tuple(range(1000, 1000 + 2 * 2048))}))
    assert len(view.loads[POLICY].lengths) == QUANTILES
    assert (view.loads[POLICY].lengths[0], view.loads[POLICY].lengths[-1]) == (1000.0 + 2048, 999.0 + 2 * 2048)


# ---- requests of a group


def rollout(monitor: Monitor, groups: int, each: int, verdicts: int) -> None:
    """All at once; in the end the controller has handed its groups over."""
    ended = {"ended": (5,) * (groups * each)}
    judged = {"ended": (3,) * (groups * verdicts)}
    look(monitor, report(decided=groups, kept=groups, target=groups, policy=ended, judge=judged))
    look(monitor, report(done=True))
    monitor.ended_rollout()


def per_group(monitor: Monitor) -> tuple[float, float]:
    """As seen in what is expected of ten groups."""
    view = monitor.expected(10, 1.0, 7)
    assert view.loads[POLICY].needed == 70
    needed = look(monitor, report(target=10.0)).loads[POLICY].needed
    return needed / 10, view.loads["judge"].needed / 10


def test_requests_of_a_group():
    monitor = make()
    assert per_group(monitor) == (7.0, 7.0)  # nothing is known: as many as siblings
    rollout(monitor, 8, each=4, verdicts=12)
    assert per_group(monitor) == (4.0, 12.0)
    rollout(monitor, 8, each=4, verdicts=36)  # the last rollout weighs most
    assert per_group(monitor) == (4.0, (12 * 4 + 36 * 8) / 12)


@pytest.mark.parametrize("first", [True, False])
def test_an_evaluation_tells_nothing_of_groups(first):
    monitor = make()
    if not first:
        rollout(monitor, 8, each=4, verdicts=12)
    look(monitor, report(under_way=50, policy={"ended": (5,) * 100}, judge={"ended": (5,) * 900}))
    look(monitor, report(done=True))
    monitor.ended_rollout()
    assert per_group(monitor) == ((7.0, 7.0) if first else (4.0, 12.0))


def test_groups_that_are_being_judged_have_their_responses():
    """Eight groups of four have been generated, none is decided on: that makes four a group, not more."""
    judging = report(target=8.0, under_way=8, policy={"ended": (5,) * 32}, judge={"ended": (3,) * 8, "calls": 24})
    monitor = make()
    look(monitor, judging)
    assert monitor._per_group == {POLICY: 4.0, "judge": 2.0}


def test_expected():
    monitor = make()
    rollout(monitor, 8, each=4, verdicts=12)
    view = monitor.expected(16, 0.5, 4)
    assert (view.loads[POLICY].waiting, view.loads[POLICY].needed) == (128, 128.0)
    assert (view.loads["judge"].waiting, view.loads["judge"].needed) == (0, 32 * 12.0)
    assert set(view.loads[POLICY].lengths) == {5.0} and set(view.loads["judge"].lengths) == {3.0}
    assert monitor.expected(16, 0.0, 4).loads[POLICY].needed == 16 / 0.05 * 4  # a rate of nothing means nothing


def test_a_forecast_needs_measurements():
    """Until every speed was measured 8 times and lengths were seen, the number of groups is not told."""
    monitor = make()
    rollout(monitor, 8, each=4, verdicts=12)
    assert monitor.expected(16, 0.5, 4).groups == 0.0
    for line in monitor._lines.values():
        for running in range(1, 10):
            line.add(running, 0.01)
    view = monitor.expected(16, 0.5, 4)
    assert (view.groups, view.rate, view.samples) == (16, 0.5, 4) and make().expected(16, 0.5, 4).groups == 0.0


def test_equal_reports_make_equal_views():
    one, other = make(), make()
    engine, judge = Engine(), Engine()
    for at in range(20):
        parts = [
            report(
                at,
                target=8.0,
                kept=at // 4,
                decided=at // 2,
                under_way=6,
                rate=0.7,
                policy={
                    "requests": 20 + at,
                    "calls": 3,
                    "ended": (at, 2 * at),
                    "longest": (2 * at,),
                    "replicas": {0: engine.decode(1 + at)},
                },
                judge={"requests": 3, "replicas": {1: judge.decode(3)}},
            ),
            report(at + 0.3, target=8.0, judge={"ended": (4,)}),
        ]
        assert look(one, *parts) == look(other, *[replace(part) for part in parts])
        assert one.costs == other.costs
