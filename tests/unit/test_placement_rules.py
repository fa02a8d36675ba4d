"""The formulas against calculations by hand, and invariants of MovingRule and the baselines."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from gcore.cost.replica_speed import ReplicaSpeed
from gcore.placement.baselines import ColocatedEarlyRule, ColocatedRule, EarlySwapRule, StaticRule, UtilisationRule
from gcore.placement.grid import POLICY, DeviceGrid, Move, Split, shares, split_by
from gcore.placement.rules import (
    ClusterLoad,
    EndEstimate,
    Load,
    MovingRule,
    RoleSpeeds,
    arranged,
    generated_s,
    judged_s,
    request_limit,
    useful_concurrency,
)

SPEED = ReplicaSpeed(
    base_s=0.01, per_sequence_s=0.001, prefill_s_per_token=0.0001, max_concurrent=10, sleep_s=1.0, wake_s=2.0,
    weights_s=3.0,
)  # fmt: skip
JUDGE = "judge"


def end_s(view, known, power):
    return EndEstimate(view, known).end_s(power)


def costs(blocks=8, widths=(1, 1), speeds=None, roles=(POLICY, JUDGE)):
    widths = dict(zip(roles, widths, strict=True))
    grid = DeviceGrid(blocks * max(widths.values()), widths)
    return RoleSpeeds(grid, speeds or dict.fromkeys(roles, SPEED))


def owners(split, moves):
    return Counter(split.after(moves).owners)


# ---- formulas -----------------------------------------------------------------------------------------------------


def test_generated_of_running_requests():
    """Four new requests of 100, 200, 300, 400 tokens on two replicas; all must end: 400 steps, 1000 tokens."""
    load = Load(running=4, needed=4, lengths=(100, 200, 300, 400))
    assert load.tokens_in(400) == 250
    assert generated_s(load, SPEED, 2) == pytest.approx(0.01 * 400 + 0.001 * 1000 / 2)
    assert generated_s(load, SPEED, 0) == math.inf
    assert generated_s(replace(load, needed=0), SPEED, 0) == 0.0


def test_generated_of_a_share_and_with_age():
    """At age 150 only 200, 300, 400 are possible; half of the needed requests have ended after the second of them."""
    load = Load(running=6, needed=6, age=150, lengths=(100, 200, 300, 400))
    steps = 300 - 150
    tokens = 6 * (50 + 150 + 150) / 3
    assert generated_s(load, SPEED, 1, 0.5) == pytest.approx(0.01 * steps + 0.001 * tokens)
    older = replace(load, age=900)
    assert older.steps_to(1.0) == 100 and older.tokens_in(100) == 50, "older than any known length"


def test_siblings_end_with_their_longest():
    load = Load(running=2, needed=2, lengths=(100, 200), longest=(200, 500))
    assert load.steps_to(1.0) == 500


def test_generated_of_requests_that_are_not_drawn_yet():
    """Ten more, of 100 tokens and a prompt of 50, after the running ones."""
    load = Load(running=2, needed=12, lengths=(100,), prompt=50)
    assert generated_s(load, SPEED, 1) == pytest.approx(
        max(0.01 * (100 + 100), 0.01 * 1200 / 10) + 0.001 * (200 + 1000) + 10 * 50 * 0.0001
    )


def test_the_cap_makes_waves():
    load = Load(running=100, needed=100, lengths=(100,))
    assert generated_s(load, SPEED, 2) == pytest.approx(0.01 * 100 * 100 / (2 * 10) + 0.001 * 10_000 / 2)


def test_judged():
    load = Load(needed=20, lengths=(50,), prompt=200)
    assert judged_s(load, SPEED) == pytest.approx(20 * 50 * (0.01 / 10 + 0.001) + 20 * 200 * 0.0001)
    assert judged_s(replace(load, needed=4), SPEED) == pytest.approx(4 * 50 * (0.01 / 4 + 0.001) + 4 * 200 * 0.0001)


def test_the_request_limit_allows_nearly_all_of_the_throughput():
    speed = replace(SPEED, max_concurrent=10_000)
    load = Load(lengths=(100.0,), prompt=50.0)
    assert (
        request_limit(load, speed)
        == math.ceil(useful_concurrency(load, speed, 0.95))
        > useful_concurrency(load, speed, 0.9)
    )
    assert request_limit(load, replace(speed, max_concurrent=7)) == 7


def test_useful_concurrency():
    """1 s per pass and 0.1 s per request: at 10 requests the throughput is half of the maximum."""
    load = Load(lengths=(100,))
    assert useful_concurrency(load, SPEED, 0.5) == pytest.approx(10)
    assert useful_concurrency(load, SPEED, 0.9) == 10, "no more than fit"
    assert useful_concurrency(replace(load, prompt=1e6), SPEED, 0.5) == 1.0, "prefill is the work"
    assert useful_concurrency(load, replace(SPEED, per_sequence_s=0.0), 0.5) == 10


def test_end_is_the_later_of_generation_and_judging():
    known = costs(blocks=2)
    load = Load(running=10, needed=10, lengths=(100,))
    view = ClusterLoad({POLICY: load, JUDGE: Load()})
    assert end_s(view, known, {POLICY: 1, JUDGE: 1}) == pytest.approx(0.01 * 100 + 0.001 * 1000)
    backlog = Load(running=30, needed=30, lengths=(1000,))
    view = ClusterLoad({POLICY: load, JUDGE: backlog})
    assert end_s(view, known, {POLICY: 1, JUDGE: 1}) == pytest.approx(judged_s(backlog, SPEED))
    assert end_s(view, known, {POLICY: 2, JUDGE: 0}) == math.inf


def test_the_last_verdict_lies_behind_the_last_response():
    """All responses end at 2 s; three quarters of the 0.4 s of judging follow, then one verdict of 0.2 s alone."""
    known = costs(blocks=2)
    view = ClusterLoad({POLICY: Load(running=10, needed=10, lengths=(100,)), JUDGE: Load(needed=10, lengths=(20,))})
    assert end_s(view, known, {POLICY: 1, JUDGE: 1}) == pytest.approx(2.0 + 0.75 * 0.4 + 0.2)


# ---- MovingRule --------------------------------------------------------------------------------------------------

BACKLOG = ClusterLoad(
    {
        POLICY: Load(running=40, needed=30, lengths=(500, 1000, 2000)),
        JUDGE: Load(running=10, waiting=3000, needed=3000, lengths=(400,)),
    }
)


def test_a_backlog_takes_the_blocks_with_the_least_work():
    split = split_by(costs().grid, {POLICY: 6, JUDGE: 2})
    view = replace(BACKLOG, work={0: 9, 1: 0, 2: 9, 3: 1, 4: 9, 5: 9})
    moves = MovingRule(max_share=0.5)(split, view, costs())
    assert [(m.block, m.source, m.target) for m in moves] == [
        (1, POLICY, JUDGE),
        (3, POLICY, JUDGE),
        (5, POLICY, JUDGE),
    ]
    assert "judge needs it" in moves[0].reason and "sooner" in moves[0].reason


def test_the_slowest_block_goes_first_from_the_role_with_the_longest_requests():
    """Responses are longer than verdicts, so the policy gives its slow block, although it has the most work; and the
    judge gives a fast one. At the same speed, the block with the least work goes."""
    known = replace(costs(), relative={2: 0.4, 7: 0.5})
    split = split_by(known.grid, {POLICY: 6, JUDGE: 2})
    view = replace(BACKLOG, work={0: 9, 1: 0, 2: 12, 3: 1, 4: 9, 5: 9})
    moves = MovingRule(max_share=0.5)(split, view, known)
    assert [(m.block, m.target) for m in moves] == [(2, JUDGE), (1, JUDGE), (3, JUDGE)]
    loads = {POLICY: replace(BACKLOG.loads[POLICY], running=0, waiting=40), JUDGE: Load(needed=1, lengths=(400,))}
    back = MovingRule()(split_by(known.grid, {POLICY: 2, JUDGE: 6}), ClusterLoad(loads), known)
    assert back and all(m.target == POLICY for m in back) and 7 not in [m.block for m in back]


def test_a_slow_block_counts_less():
    """Half of a block's speed in the estimate of the end, and in the start of a rollout."""
    known = replace(costs(), relative={0: 0.5, 3: 0.5})
    assert known.power([0, 1, 2, 3]) == 3.0
    assert end_s(BACKLOG, known, {POLICY: 6.0, JUDGE: 1.5}) > end_s(BACKLOG, known, {POLICY: 6, JUDGE: 2})
    view = ClusterLoad(
        {POLICY: Load(waiting=100, needed=100, lengths=(1000,)), JUDGE: Load(needed=100, lengths=(500,))}
    )
    found = MovingRule().begin(view, known)
    assert found[0] == found[3] == JUDGE, "the judge has the slow blocks"
    assert arranged(split_by(known.grid, {POLICY: 5, JUDGE: 3}), view, known).blocks(JUDGE) == [0, 3, 7]
    verdicts = replace(view, loads={**view.loads, JUDGE: Load(needed=100, lengths=(5000,))})
    assert arranged(split_by(known.grid, {POLICY: 5, JUDGE: 3}), verdicts, known).blocks(JUDGE) == [1, 2, 4]
    plain = split_by(known.grid, {POLICY: 5, JUDGE: 3})
    assert arranged(plain, view, costs()) == plain


def test_one_decision_takes_a_limited_share():
    split = split_by(costs().grid, {POLICY: 6, JUDGE: 2})
    assert len(MovingRule(max_share=0.5)(split, BACKLOG, costs())) == 3
    assert len(MovingRule(max_share=0.2)(split, BACKLOG, costs())) == 1


def test_one_decision_takes_all_empty_blocks():
    split = split_by(costs().grid, {POLICY: 6, JUDGE: 2})
    view = replace(BACKLOG, work=dict.fromkeys(range(6), 0.0) | {0: 3.0, 4: 5.0})
    moves = MovingRule(max_share=0.2)(split, view, costs())
    assert sorted(m.block for m in moves) == [1, 2, 3, 5]


@pytest.mark.parametrize("sleep_s", [0.0, 1e6])
def test_no_move_that_does_not_pay(sleep_s):
    slow = {role: replace(SPEED, sleep_s=sleep_s) for role in (POLICY, JUDGE)}
    split = split_by(costs().grid, {POLICY: 6, JUDGE: 2})
    assert bool(MovingRule()(split, BACKLOG, costs(speeds=slow))) == (sleep_s == 0.0)


def test_no_move_within_the_margin():
    split = split_by(costs().grid, {POLICY: 6, JUDGE: 2})
    assert MovingRule(margin=0.99)(split, BACKLOG, costs()) == []


def test_blocks_that_move_stay():
    split = split_by(costs().grid, {POLICY: 6, JUDGE: 2})
    moving = frozenset(range(5))
    assert [m.block for m in MovingRule()(split, replace(BACKLOG, moving=moving), costs())] == [5]


def test_the_last_block_of_a_role_with_work_stays():
    split = split_by(costs().grid, {POLICY: 1, JUDGE: 7})
    assert MovingRule()(split, BACKLOG, costs()) == []
    done = {**BACKLOG.loads, POLICY: Load()}
    assert [m.source for m in MovingRule()(split, replace(BACKLOG, loads=done), costs())] == [POLICY]


def test_a_role_without_a_block_gets_one_when_it_has_work():
    split = Split((POLICY,) * 8)
    assert {m.target for m in MovingRule()(split, BACKLOG, costs())} == {JUDGE}
    none = {POLICY: BACKLOG.loads[POLICY], JUDGE: Load(needed=3000, lengths=(400,))}
    assert MovingRule()(split, replace(BACKLOG, loads=none), costs()) == [], "nothing to judge yet"


def test_two_roles_without_a_block_get_one_each():
    """No single move lets the rollout end, so a greedy search alone makes none."""
    roles = (POLICY, JUDGE, "critic", "guard")
    known = costs(8, (1, 1, 1, 1), roles=roles)
    split = Split((JUDGE,) * 6 + ("critic",) * 2)
    waits, later = Load(waiting=22, needed=3, lengths=(100,)), Load(needed=11, lengths=(100,))
    starved = Load(waiting=11, needed=11, lengths=(100,))
    view = ClusterLoad({POLICY: waits, JUDGE: later, "critic": later, "guard": starved})
    assert owners(split, MovingRule()(split, view, known)) == {JUDGE: 5, "critic": 1, POLICY: 1, "guard": 1}
    done = ClusterLoad({POLICY: waits, JUDGE: later, "critic": Load(), "guard": Load()})
    assert MovingRule()(split, done, known)[0].source == "critic", "first from a role that needs none"


def test_the_last_block_of_the_policy_counts_the_move_back_while_groups_may_be_dropped():
    """Nothing is generated; verdicts are left. One more block would save time, but less than a move and a move back."""
    quick = {role: replace(SPEED, sleep_s=0.1, wake_s=0.1, weights_s=0.1) for role in (POLICY, JUDGE)}
    split = split_by(costs().grid, {POLICY: 1, JUDGE: 7})
    judge = Load(running=100, waiting=4000, needed=4000, lengths=(400,))
    view = ClusterLoad({POLICY: Load(), JUDGE: judge})
    assert [m.source for m in MovingRule()(split, view, costs(speeds=quick))] == [POLICY]
    gain = end_s(view, costs(), {POLICY: 1, JUDGE: 7}) - end_s(view, costs(), {POLICY: 0, JUDGE: 8})
    slow = {role: replace(SPEED, sleep_s=gain / 2, wake_s=gain / 2, weights_s=0.0) for role in (POLICY, JUDGE)}
    assert len(MovingRule()(split, view, costs(speeds=slow))) == 1
    assert MovingRule()(split, replace(view, rate=0.7), costs(speeds=slow)) == []


def test_judges_wait_for_fuller_batches():
    """60 verdicts in progress: enough for more judges if generation ends soon, not while most is still to come."""
    speeds = {POLICY: SPEED, JUDGE: replace(SPEED, max_concurrent=200)}
    judge = Load(running=60, needed=4000, lengths=(100,))
    split = split_by(costs().grid, {POLICY: 6, JUDGE: 2})
    soon = ClusterLoad({POLICY: Load(running=40, needed=40, age=990, lengths=(1000,)), JUDGE: judge})
    late = ClusterLoad({POLICY: Load(running=40, needed=40, lengths=(100_000,)), JUDGE: judge})
    least, most = MovingRule().fill
    assert MovingRule()._required_fill(JUDGE, EndEstimate(soon, costs(speeds=speeds)), Counter(split.owners)) == least
    assert MovingRule()._required_fill(JUDGE, EndEstimate(late, costs(speeds=speeds)), Counter(split.owners)) == most
    assert MovingRule()(split, soon, costs(speeds=speeds)) != []
    assert MovingRule()(split, late, costs(speeds=speeds)) == []


def random_view(rng, roles, blocks):
    def load():
        lengths = sorted(rng.uniform(10, 3000) for _ in range(rng.randint(1, 20)))
        return Load(
            running=rng.choice([0, rng.randint(1, 500)]),
            waiting=rng.choice([0, rng.randint(1, 500)]),
            needed=rng.choice([0.0, rng.uniform(0, 2000)]),
            age=rng.uniform(0, 3500),
            lengths=lengths,
            prompt=rng.choice([0.0, rng.uniform(1, 4000)]),
            busy=rng.random(),
        )

    work = {b: rng.uniform(0, 50) for b in range(blocks) if rng.random() < 0.8}
    moving = frozenset(b for b in range(blocks) if rng.random() < 0.1)
    return ClusterLoad({role: load() for role in roles}, work, moving, rng.choice([0.0, math.inf]))


@pytest.mark.parametrize("roles", [(POLICY, JUDGE), (POLICY, JUDGE, "critic")])
@pytest.mark.parametrize(
    "rule",
    [
        MovingRule(),
        UtilisationRule(cool_down_s=0.0),
        ColocatedRule(),
        ColocatedEarlyRule(),
        EarlySwapRule(),
        StaticRule(Split(())),
    ],
)
def test_every_move_is_valid(rule, roles):
    rng = random.Random(7)
    for _ in range(300):
        blocks = rng.randint(2, 12)
        known = costs(blocks, tuple(rng.choice([1, 2, 4]) for _ in roles), roles=roles)
        split = Split(tuple(rng.choice(roles) for _ in range(blocks)))
        if isinstance(rule, ColocatedRule):
            split = Split((split[0],) * blocks)
        view = random_view(rng, roles, blocks)
        moves = rule(split, view, known)
        after = split.after(moves).check(known.grid)
        assert len({m.block for m in moves}) == len(moves)
        assert not {m.block for m in moves} & view.moving
        if isinstance(rule, MovingRule):
            for role, load in view.loads.items():
                if load.needed > 0 and split.blocks(role):
                    assert after.blocks(role), f"the last block of {role} was taken"


def test_moves_stop_under_constant_load():
    """With the same view at every poll, the split stops changing, and no move is undone."""
    rng = random.Random(3)
    for _ in range(100):
        known = costs(rng.randint(2, 16))
        split = shares(known.grid, {POLICY: rng.random(), JUDGE: rng.random()})
        view = replace(random_view(rng, (POLICY, JUDGE), 0), since_move_s=math.inf)
        made = []
        for _ in range(40):
            moves = MovingRule()(split, view, known)
            split = split.after(moves)
            made += [(m.source, m.target) for m in moves]
            if not moves:
                break
        assert not moves and len(set(made)) <= 1


def test_begin():
    """If a move is quick compared with the wait for the first response, one judge is enough; else the best split."""
    view = ClusterLoad(
        {POLICY: Load(waiting=100, needed=100, lengths=(1000,)), JUDGE: Load(needed=100, lengths=(1000,))}
    )
    cheap = {role: replace(SPEED, sleep_s=0.0, wake_s=0.001) for role in (POLICY, JUDGE)}
    assert Counter(MovingRule().begin(view, costs(speeds=cheap)).owners) == {POLICY: 7, JUDGE: 1}
    slow = {role: replace(SPEED, wake_s=1000.0) for role in (POLICY, JUDGE)}
    known = costs(speeds=slow)
    found = Counter(MovingRule().begin(view, known).owners)
    ends = {n: end_s(view, known, {POLICY: n, JUDGE: 8 - n}) for n in range(1, 8)}
    assert ends[found[POLICY]] == min(ends.values()) and found[POLICY] < 7
    assert MovingRule().begin(view, costs(blocks=1)) == Split((POLICY,))
    few = 8 - found[POLICY]
    wait_s = generated_s(view.loads[POLICY], SPEED, 8, 0.1)
    half = {role: replace(SPEED, sleep_s=0.0, wake_s=wait_s / 8) for role in (POLICY, JUDGE)}  # patience is 4
    assert Counter(MovingRule().begin(view, costs(speeds=half)).owners)[JUDGE] == 1 + (few - 1) // 2, "half of the path"


# ---- baselines ----------------------------------------------------------------------------------------------------


def test_colocated_takes_turns():
    known, all_policy, colocated = costs(blocks=2), Split((POLICY, POLICY)), ColocatedRule()
    busy, idle = Load(running=1, needed=1), Load()
    assert colocated(all_policy, ClusterLoad({POLICY: busy, JUDGE: busy}), known) == []
    moves = colocated(all_policy, ClusterLoad({POLICY: idle, JUDGE: busy}), known)
    assert owners(all_policy, moves) == {JUDGE: 2}
    assert colocated(all_policy, ClusterLoad({POLICY: idle, JUDGE: busy}, moving=frozenset({1})), known) == []
    enough = ClusterLoad({POLICY: Load(running=1), JUDGE: busy})
    assert colocated(all_policy, enough, known) == []
    assert owners(all_policy, ColocatedEarlyRule()(all_policy, enough, known)) == {JUDGE: 2}


def test_early_swap_moves_each_block_as_it_drains():
    known, split, early_swap = costs(blocks=3), Split((POLICY, POLICY, JUDGE)), EarlySwapRule()
    judging = Load(running=5, waiting=3, needed=8)
    view = ClusterLoad({POLICY: Load(running=2, needed=2), JUDGE: judging}, work={0: 0.0, 1: 2.0, 2: 5.0})
    assert early_swap(split, view, known) == [Move(0, POLICY, JUDGE, "drained")]
    assert early_swap(split, replace(view, loads={**view.loads, POLICY: Load(waiting=1, needed=1)}), known) == []
    back = ClusterLoad(
        {POLICY: Load(waiting=4, needed=4), JUDGE: Load(running=1, needed=1)}, work={0: 0.0, 1: 2.0, 2: 0.0}
    )
    assert early_swap(split, back, known) == [Move(2, JUDGE, POLICY, "drained, policy waits")]


def test_the_papers_rule_moves_one_block_from_the_least_to_the_most_utilised():
    known, split = costs(blocks=4), Split((POLICY, POLICY, POLICY, JUDGE))
    view = ClusterLoad({POLICY: Load(busy=0.5), JUDGE: Load(busy=0.95)}, work={0: 3, 1: 1, 2: 2})
    moves = UtilisationRule()(split, view, known)
    assert moves == [Move(1, POLICY, JUDGE, "judge is 95% busy, policy 50%")]
    assert UtilisationRule()(split, replace(view, since_move_s=9.0), known) == []
    assert UtilisationRule()(split, ClusterLoad({POLICY: Load(busy=0.8), JUDGE: Load(busy=0.95)}), known) == []
    assert UtilisationRule()(Split((POLICY, JUDGE, JUDGE, JUDGE)), view, known) == [], "the last one stays"


def test_a_move_costs_sleep_and_wake_and_the_policy_its_weights():
    assert costs().switch_s(Move(0, POLICY, JUDGE)) == 3.0
    assert costs().switch_s(Move(0, JUDGE, POLICY)) == 6.0
