"""A simulated rollout: a tiny one against a calculation by hand, larger ones against invariants."""

import gc
import io
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from gcore.cli import main
from gcore.observe.page_data import read_recording
from gcore.placement.baselines import ColocatedRule, StaticRule
from gcore.placement.grid import POLICY, Move, Split, shares, split_by
from gcore.placement.guard import DynamicRule
from gcore.placement.meters import quantiles
from gcore.simulate import run as runs
from gcore.simulate.cluster import PromptCursor, Simulation, State, expected_view, first_state
from gcore.simulate.run import NAMES, simulate
from gcore.simulate.scenario import (
    CHUNK,
    Drift,
    Lengths,
    Scenario,
    Server,
    SimulatedJudge,
    Speed,
    StepWork,
    load_scenario,
)
from gcore.simulate.table import best_static, compare, progress_to, spread
from gcore.types import UserError
from tests.seeds import seeds

SPEED = Speed(
    base_s=0.01, per_sequence_s=0.0005, prefill_s_per_token=0.0001, max_concurrent=12, sleep_s=0.1, wake_s=0.4
)
JUDGE = "judge"
SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


def scenario(**changes):
    facts = {
        "name": "small",
        "slots": 8,
        "steps": 3,
        "prompts": 24,
        "samples": 4,
        "prompt_length": 50,
        "policy": Server(speed=SPEED),
        "judges": (
            SimulatedJudge(
                speed=SPEED, tensor_parallel=2, verdict=Lengths(start=60, sigma=0.3, shared=0.0, longest=99)
            ),
        ),
        "lengths": Lengths(start=100, end=400, longest=2000),
        "acceptance": Drift(start=0.8, end=0.5),
        "oversampling": 1.2,
        "update_s": 2.0,
    }
    return Scenario(**facts | changes)


STATIC = StaticRule(Split(()))  # its moves, none, for any split


def rollout(case, split=None, rule=STATIC, step=1, watch=None, state=None):
    split = split or split_by(case.grid, {POLICY: 2, JUDGE: 2})
    simulation = Simulation(StepWork(case, step), split, rule, state or replace(first_state(case), rate=0.8))
    if watch:
        watch(simulation)
    return simulation, simulation.run()


def test_tiny_case_by_hand():
    """Two slots, groups of one response of 100 tokens, verdicts of 10. Two groups at a rate of 0.8: three are drawn.

    policy: prefill of 3 x 50 x 0.1 ms, then 100 steps of 10 + 3 x 0.5 ms; 4 ms to the judge
    judge: prefill of 3 x 150 x 0.1 ms, then 10 steps of 11.5 ms; 4 ms back
    """
    case = scenario(
        slots=2,
        prompts=2,
        samples=1,
        policy=Server(speed=SPEED),
        judges=(SimulatedJudge(speed=SPEED, verdict=Lengths(start=10, sigma=0, shared=0.0, longest=99)),),
        lengths=Lengths(start=100, sigma=0),
        acceptance=Drift(start=1.0),
        oversampling=1.0,
    )
    _, found = rollout(case, Split((POLICY, JUDGE)))
    assert found.drawn == 3
    generated, judged = 0.015 + 100 * 0.0115, 0.045 + 10 * 0.0115
    assert found.seconds == pytest.approx(generated + judged + 2 * 0.004)
    assert found.timeline.busy_s == {POLICY: pytest.approx(generated), JUDGE: pytest.approx(judged)}
    assert found.timeline.owned_s == {
        POLICY: pytest.approx(found.seconds),
        JUDGE: pytest.approx(found.seconds),
    }
    assert found.timeline.idle == pytest.approx(1 - (generated + judged) / (2 * found.seconds))
    assert found.lengths == [100, 100] and found.timeline.moves == []


@seeds(5, 20)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("static:N", "oracle")])
def test_invariants(name, seed):
    case = scenario(seed=seed)
    rule = runs.rule_of(name, case)
    view = expected_view(case, first_state(case))
    simulation, found = rollout(case, rule.begin(view, case.costs(1), shares(case.grid), None), rule)
    assert simulation.kept == case.prompts and len(found.lengths) == case.prompts * case.samples
    assert found.drawn == simulation.kept + simulation.dropped + simulation.running
    generating = simulation.running - simulation.judging
    unfinished = {job.tag.group for device in simulation.policy.devices for job in device.jobs()}
    unfinished |= {call.group for queue in simulation.policy.queues for _, _, call in queue.calls}
    assert len(unfinished) <= generating, "the others are on their way to the judge"
    owned, busy = sum(found.timeline.owned_s.values()), sum(found.timeline.busy_s.values())
    assert owned + found.timeline.switch_s == pytest.approx(found.seconds * case.slots)
    assert busy <= owned + 1e-9 and found.timeline.idle == pytest.approx(1 - busy / (found.seconds * case.slots))
    intervals = found.timeline.intervals
    for slot in range(case.slots):  # the intervals of a slot follow each other without a gap
        pieces = sorted((each["start"], each["end"]) for each in intervals if each["slot"] == slot)
        assert pieces[0][0] == 0.0 and pieces[-1][1] == pytest.approx(found.seconds)
        assert all(a[1] == pytest.approx(b[0]) for a, b in itertools.pairwise(pieces))
    assert all(0.0 <= each.get("busy", 0.0) <= 1.0 + 1e-9 for each in intervals)


class Shuffle:
    """Moves blocks at random, but leaves every role at least one."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def __call__(self, split, view, costs):
        block = self.rng.randrange(len(split.owners))
        if block in view.moving or len(split.blocks(split[block])) < 2:
            return []
        return [Move(block, split[block], JUDGE if split[block] == POLICY else POLICY)]


def in_progress(fleet):
    """Requests that are queued or at a replica."""
    queued = (call for queue in fleet.queues for _, _, call in queue.calls)
    return sum(len(device.jobs()) for device in fleet.devices) + sum(call.size for call in queued)


@seeds(8, 40)
def test_moves_lose_no_request_and_no_token(seed):
    """Under any moves, every drawn group ends or is still in progress, with the lengths of its draw."""
    case = scenario(seed=seed, prompts=40)
    ended = {POLICY: [], JUDGE: []}

    def watch(simulation):
        for fleet in simulation.fleets.values():
            then = fleet.ended

            def ended_of(fleet, group, then=then):
                ended[fleet.name].append(group.number)
                then(fleet, group)

            fleet.ended = ended_of

    simulation, found = rollout(case, rule=Shuffle(seed), watch=watch)
    assert len(found.timeline.moves) > 5
    for role, fleet in simulation.fleets.items():
        assert len(set(ended[role])) == len(ended[role]), "no group ends twice"
        jobs = [job for device in fleet.devices for job in device.jobs()]
        queued = [call for queue in fleet.queues for _, _, call in queue.calls]
        jobs += [job for call in queued for job in call.jobs]
        assert len(jobs) == in_progress(fleet)
        assert fleet.queued == sum(len(call.jobs) for call in queued)
    assert case.samples * found.drawn == len(simulation.policy.ended_lengths) + in_progress(simulation.policy)
    expected = [n for i in range(found.drawn) if i in set(ended[POLICY]) for n in simulation.work[i].tokens]
    other = sorted(simulation.policy.ended_lengths)
    for tokens in expected:
        other.remove(tokens)
    assert len(other) <= in_progress(simulation.policy) + case.samples * len(ended[POLICY])


def test_a_finished_simulation_leaves_no_garbage():
    case = scenario()
    gc.collect()
    gc.disable()
    try:
        simulation, found = rollout(case, rule=Shuffle(1))
        assert found.timeline.moves and in_progress(simulation.policy) > 0
        del simulation, found
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_evicted_requests_are_prefilled_again():
    case = scenario()

    def once(split, view, costs):
        return [] if view.since_move_s < 1e9 or not view.loads[POLICY].age > 5 else [Move(0, POLICY, JUDGE)]

    unmoved, moved = rollout(case)[0], rollout(case, rule=once)[0]
    prompts = [sum(d.prefilled for d in s.policy.devices) / case.prompt_length for s in (unmoved, moved)]
    assert prompts[0] == int(prompts[0]) and prompts[1] > prompts[0], "a migrated sibling is prefilled with its tokens"


def test_the_view_counts_requests_and_tokens():
    case, observed = scenario(), []

    def decide(split, view, costs):
        fleet = simulation[0].policy
        jobs = [(d, job) for d in fleet.devices for job in d.jobs() if job.state == 1]
        now = simulation[0].clock.now
        clocks = [d.clock + max(0.0, now - max(d.at, d.prefill_until)) / d.step_s for d, _ in jobs]
        made = [clock - job.began + job.before for clock, (_, job) in zip(clocks, jobs, strict=True)]
        age = sum(made) / max(1, len(jobs))
        observed.append((view.loads[POLICY].running, len(jobs), view.loads[POLICY].age, age))
        assert view.loads[POLICY].in_progress == in_progress(fleet)
        return []

    simulation = []
    rollout(case, rule=decide, watch=simulation.append)
    assert observed and all(a == b and c == pytest.approx(d, abs=1e-6) for a, b, c, d in observed)


def test_moving_blocks_are_not_in_the_view():
    case, moving, simulation = scenario(), [], []

    def decide(split, view, costs):
        for role, fleet in simulation[0].fleets.items():
            assert fleet.blocks == [block for block in split.blocks(role) if block not in view.moving]
        assert sorted(view.work) == [block for block in range(4) if block not in view.moving]
        moving.append(len(view.moving))
        return shuffle(split, view, costs)

    shuffle = Shuffle(2)
    rollout(case, rule=decide, watch=simulation.append)
    assert {0, 1} <= set(moving)


def test_a_group_is_decided_when_it_has_all_verdicts():
    judges = (SimulatedJudge(name="fair", speed=SPEED, repeats=3), SimulatedJudge(name="strict", speed=SPEED))
    case = scenario(judges=judges, slots=6)
    simulation, _ = rollout(case, split_by(case.grid, {POLICY: 2, "fair": 2, "strict": 2}))
    decided = case.samples * (simulation.kept + simulation.dropped)
    for judge in judges:
        fleet = simulation.fleets[judge.name]
        ended = len(fleet.ended_lengths)
        assert ended + in_progress(fleet) == judge.repeats * (decided + case.samples * simulation.judging)
        assert ended >= judge.repeats * decided


def test_same_seed_same_result():
    first, second, other = (simulate(scenario(seed=seed)).as_json() for seed in (0, 0, 1))
    assert first == second != other


def test_draws_do_not_depend_on_the_rule():
    """Nor on the order of the requests."""
    one, two = StepWork(scenario(), 2), StepWork(scenario(), 2)
    two[200]
    assert [one[i] for i in (0, 5, 70)] == [two[i] for i in (0, 5, 70)]
    assert one[5].tokens != one[6].tokens and one[5].tokens != one[5 + CHUNK].tokens


def test_the_relative_length_of_a_prompt_is_the_same_in_every_step():
    """Lengths grow from 100 to 400: a prompt of the first step is four times as long in the last. Its acceptance stays
    the same while the rate is the same."""
    case = scenario(acceptance=Drift(start=0.5))
    first, last = StepWork(case, 1), StepWork(case, 3)
    for number in (0, 7, 500):
        assert last[number].tokens == pytest.approx([4 * n for n in first[number].tokens], abs=2.0)
        assert last[number].verdicts == first[number].verdicts and last[number].good == first[number].good
    assert len({first[number].good for number in range(40)}) == 2


# ---- as controllers do ----------------------------------------------------------------------------------------------


def drawn_by(simulation):
    """Every prompt that is started, in order."""
    order, start = [], simulation._start

    def record(number, draw):
        order.append(number)
        start(number, draw)

    simulation._start = record
    return order


def test_each_controller_starts_its_own_share():
    """24 groups at a rate of 0.8 are 30; each of four controllers rounds 7.5 up to 8, of its own prompts."""
    case = scenario(controllers=4, oversampling=1.0)
    simulation = Simulation(StepWork(case, 1), Split((POLICY, POLICY, JUDGE, JUDGE)), STATIC, state_of(case, 0.8))
    order = drawn_by(simulation)
    simulation._fill()
    assert order == list(range(32))
    assert [sorted(c.running) for c in simulation.controllers] == [list(range(rank, 32, 4)) for rank in range(4)]
    simulation.kept = 20  # rate: (6 * 0.8 + 20) / 26; four are missing, one per controller, and 1 / 0.954 makes two
    for number in range(2, 32, 4):  # the third has none in progress
        simulation.controllers[2].running.discard(number)
    del order[:]
    simulation._fill()
    assert order == [34, 38], "the others have enough, and do not start groups for it"


def test_when_one_controller_has_fewer_the_others_start_groups_only_if_more_are_wanted():
    """Four controllers with 8 each (see above); the second loses two, once while 8 are wanted, once while 9 are."""
    case = scenario(controllers=4, oversampling=1.0)
    simulation = Simulation(StepWork(case, 1), Split((POLICY, POLICY, JUDGE, JUDGE)), STATIC, state_of(case, 0.8))
    order, fewer = drawn_by(simulation), simulation.controllers[1]
    simulation._fill()
    for dropped, expected in ((0, [33, 37]), (1, [32, 34, 35, 41, 45, 49])):  # rate: 6 * 0.8 / 7, 6 / that makes 9
        simulation.dropped = dropped
        for number in sorted(fewer.running)[:2]:
            fewer.running.discard(number)
        del order[:]
        simulation._fill(fewer)
        assert order == expected


def state_of(case, rate=1.0, first=()):
    places = first_state(case).cursors
    if first:
        places = tuple(PromptCursor(100 + p.next_prompt, own) for p, own in zip(places, first, strict=True))
    return State(places, first_state(case).lengths, rate)


def test_aborted_prompts_start_first():
    case = scenario(controllers=2, prompts=8, oversampling=1.0)
    before = state_of(case, first=((40, 4), (7,)))
    simulation = Simulation(StepWork(case, 1), Split((POLICY, POLICY, JUDGE, JUDGE)), STATIC, before)
    order = drawn_by(simulation)
    simulation._fill()
    assert order == [4, 7, 40, 100, 101, 102, 103, 105], "4 per controller; with fewer aborted ones, more new ones"
    simulation.controllers[0].running.remove(4)
    after = [controller.cursor() for controller in simulation.controllers]
    assert after == [PromptCursor(104, (40, 100, 102)), PromptCursor(107, (7, 101, 103, 105))]


def test_aborted_prompts_that_are_not_drawn_stay_first():
    case = scenario(controllers=1, prompts=2, oversampling=1.0)
    simulation = Simulation(
        StepWork(case, 1), Split((POLICY, POLICY, JUDGE, JUDGE)), STATIC, state_of(case, first=((9, 5, 6, 8),))
    )
    simulation._fill()
    assert simulation.controllers[0].cursor() == PromptCursor(100, (6, 8, 5, 9)), (
        "two were drawn: they are aborted at the end"
    )


def test_prompts_are_decided_on_once_or_carried_over():
    """Over the steps of a run, no prompt is lost and none is decided on twice."""
    case = scenario(steps=4, controllers=4, oversampling=1.5)
    state, split, decided = first_state(case), split_by(case.grid, {POLICY: 2, JUDGE: 2}), []
    for step in range(1, 5):
        simulation = Simulation(StepWork(case, step), split, STATIC, state)
        order = drawn_by(simulation)
        state = simulation.run().state
        carried = {number for place in state.cursors for number in place.aborted}
        decided += set(order) - carried
        assert carried, "oversampling leaves some"
    drawn = {
        number
        for place, rank in zip(state.cursors, range(4), strict=True)
        for number in range(rank, place.next_prompt, 4)
    }
    assert len(decided) == len(set(decided)) and set(decided) | carried == drawn and not set(decided) & carried


def test_a_run_begins_with_the_rate_of_a_new_controller():
    case = scenario(controllers=2, acceptance=Drift(start=0.3))
    assert first_state(case).rate == 1.0 and first_state(case).cursors == (PromptCursor(0), PromptCursor(1))
    assert 0.3 < rollout(case, state=first_state(case))[1].state.rate < 1.0


def test_a_step_can_be_repeated_from_the_same_state():
    """As the oracle does: a simulation changes neither the state nor the draws."""
    case = scenario(controllers=2, oversampling=1.5)
    state = rollout(case)[1].state
    kept = (state.cursors, dict(state.lengths), state.rate, state.seconds)
    work, splits = StepWork(case, 2), [split_by(case.grid, {POLICY: n, JUDGE: 4 - n}) for n in (2, 1, 2)]
    one, other, again = (Simulation(work, split, STATIC, state).run() for split in splits)
    assert (state.cursors, dict(state.lengths), state.rate, state.seconds) == kept
    assert (one.state, one.timeline.intervals) == (again.state, again.timeline.intervals)
    assert one.lengths == again.lengths and one.seconds != other.seconds and one.state != state


def test_the_oracle_continues_from_its_fastest_rollout():
    """Its second step begins with the state of its fastest first step."""
    case, begun = scenario(steps=2, controllers=2), []
    Simulation_of = runs.Simulation

    class Watched(Simulation_of):
        def __init__(self, work, split, decide, state):
            super().__init__(work, split, decide, state)
            begun.append((work.step, state, self.result))

    runs.Simulation = Watched
    try:
        simulate(case, "oracle")
    finally:
        runs.Simulation = Simulation_of
    first = [result for step, _, result in begun if step == 1]
    second = [state for step, state, _ in begun if step == 2]
    assert len(first) == len(second) > 2
    assert all(state is min(first, key=lambda r: r.seconds).state for state in second)


def test_blocks_that_arrive_at_the_same_time_share_the_work():
    """32 verdicts wait when all four blocks change to judging. Without sharing, the first block would take 24."""
    case = scenario(prompts=8, controllers=1, oversampling=1.0, lengths=Lengths(start=100, sigma=0))
    counts, simulation = [], []

    def decide(split, view, costs):
        counts.append(
            tuple(map(sum, zip(*(queue.router.counts for queue in simulation[0].fleets[JUDGE].queues), strict=True)))
        )
        return ColocatedRule()(split, view, costs)

    rollout(case, Split((POLICY,) * 4), decide, watch=simulation.append, state=first_state(case))
    assert max(counts, key=sum) == (8, 8, 8, 8)


@pytest.mark.parametrize("controllers", [1, 2])
def test_a_replica_gets_twice_as_many_requests_as_it_decodes(controllers):
    """It decodes 12 and gets 24, six groups of four; the seventh waits. Two controllers send three groups each."""
    case = scenario(slots=4, controllers=controllers, prompts=7, oversampling=1.0)
    simulation = Simulation(StepWork(case, 1), Split((POLICY, JUDGE)), STATIC, state_of(case))
    simulation._open(0)
    simulation.policy.open(simulation.policy.by_block[0][:1])  # one of the two replicas of the block
    simulation._fill()
    device = simulation.policy.devices[0]
    assert (device.running, device.waiting) == (12, 12)
    assert simulation.policy.queued == 4 * controllers  # each starts its share, rounded up


def test_drift_and_jitter():
    drift = Drift(start=2.0, end=8.0, jitter=0.5)
    assert drift.at(0.0, 0.0) == 2.0 and drift.at(0.5, 0.0) == pytest.approx(4.0) and drift.at(1.0, 0.0) == 8.0
    assert drift.at(0.0, 2.0) == pytest.approx(2.0 * 2.718281828)
    assert Drift(start=3.0).at(0.7, 1.0) == 3.0


def test_a_cycle_of_loads():
    drift = Drift(start=100, cycle=(1, 1, 0.5))
    assert [drift.at(0.0, 0.0, step) for step in (1, 2, 3, 4)] == [100, 100, 50, 100]
    case = scenario(acceptance=Drift(start=0.8, cycle=(1, 0.5)))
    assert [StepWork(case, step).acceptance for step in (1, 2, 3)] == pytest.approx([0.8, 0.4, 0.8])


def test_a_mixture_of_lengths():
    """A fifth of the responses is twenty times as long. If a prompt decides on the length, it decides on the kind."""
    mode = {"share": 0.2, "factor": 20, "sigma": 0.1}
    for shared, (least, most) in ((1.0, (1.0, 1.0)), (0.0, (0.0, 0.6))):
        spec = Lengths(start=100, sigma=0.2, shared=shared, longest=9000, modes=(mode,))
        work = StepWork(scenario(lengths=spec, samples=4), 1)
        groups = [work[number].tokens for number in range(400)]
        tokens = [n for group in groups for n in group]
        assert sum(n > 700 for n in tokens) / len(tokens) == pytest.approx(0.2, abs=0.05)
        assert sum(tokens) / len(tokens) == pytest.approx(100 * spec.mean_factor, rel=0.15)
        assert not any(300 < n < 1300 for n in tokens), "nothing lies between the two kinds"
        assert least <= sum(len({n > 700 for n in group}) == 1 for group in groups) / 400 <= most


def test_a_judge_of_some_prompts():
    judge = SimulatedJudge(speed=SPEED, tensor_parallel=2, prompts=0.5)
    work = StepWork(scenario(judges=(judge,)), 1)
    judged = [JUDGE in work[number].verdicts for number in range(400)]
    assert sum(judged) / 400 == pytest.approx(0.5, abs=0.1)
    assert judged == [JUDGE in StepWork(scenario(judges=(judge,)), 2)[number].verdicts for number in range(400)]
    simulation, found = rollout(scenario(judges=(judge,)))
    assert simulation.kept == 24 and simulation.judging >= 0
    sent = found.state.counts.per_group(JUDGE, 99.0)
    assert sent == pytest.approx(2.0, rel=0.3), "half of four, measured"
    assert expected_view(scenario(), found.state).loads[JUDGE].needed == pytest.approx(
        sent / 4 * expected_view(scenario(), found.state).loads[POLICY].needed
    )


def test_a_slow_device_is_slow_and_noticed():
    """Device 5 has half of the speed: a replica of the policy, and a half of a judge's."""
    case = scenario(device_speed={5: 0.5}, prompts=48)
    simulation, _ = rollout(case)
    assert [device.step_s for device in simulation.policy.devices[4:6]] == [SPEED.base_s, 2 * SPEED.base_s]
    assert simulation.fleets[JUDGE].devices[2].step_s == 2 * simulation.fleets[JUDGE].devices[3].step_s
    case = scenario(device_speed={5: 0.5}, policy=Server(speed=SPEED, tensor_parallel=2), prompts=96)
    state = first_state(case)
    for step in (1, 2, 3):
        state = rollout(case, split_by(case.grid, {POLICY: 3, JUDGE: 1}), step=step, state=state)[1].state
    assert state.speeds.relative() == {2: 0.5}
    state = first_state(scenario())
    for step in (1, 2, 3):
        state = rollout(scenario(), step=step, state=state)[1].state
    assert state.speeds.relative() == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device_speed": {8: 0.5}}, "device_speed: got slot 8; expected 0 to 7"),
        ({"lengths": {"start": 1, "modes": [{"share": 0.6, "factor": 2}] * 2}}, "shares sum to 1.2"),
    ],
)
def test_impossible_loads(changes, words):
    with pytest.raises(ValueError, match=words):
        scenario(**changes)


def test_quantiles_keep_the_longest():
    assert quantiles([3, 1, 2]) == [1.0, 2.0, 3.0] and quantiles([]) == []
    many = quantiles(list(range(1000)))
    assert (len(many), many[0], many[-1]) == (64, 0.0, 999.0)


def test_the_oracle_is_never_slower_in_its_first_step():
    case = scenario(steps=1)
    others = [simulate(case, name).rollout_s for name in ("dynamic", "static:1", "static:2", "static:3")]
    assert simulate(case, "oracle").rollout_s == min(others) or simulate(case, "oracle").rollout_s < min(others)


def test_best_static_of_few_and_of_many():
    few = scenario(steps=1)
    each = {n: simulate(few, f"static:{n}").rollout_s for n in (1, 2, 3)}
    assert best_static(few).rollout_s == min(each.values())
    many = scenario(steps=1, slots=32, judges=(SimulatedJudge(speed=SPEED),))
    each = {n: simulate(many, f"static:{n}").rollout_s for n in range(1, 32)}
    assert best_static(many).rollout_s == min(each.values())
    assert best_static(many, near="static:3").rollout_s <= sorted(each.values())[4]


def test_two_judges():
    judges = tuple(SimulatedJudge(name=name, speed=SPEED) for name in ("fair", "strict"))
    found = compare(scenario(judges=judges), ["dynamic", "static:4", "colocated", "paper"])
    assert all(run.rollout_s > 0 and len(run.steps) == 3 for run in found.values())
    with pytest.raises(UserError, match="from 1 to 6"):
        simulate(scenario(judges=judges), "static:7")


def test_no_judge():
    found = simulate(scenario(judges=()), "dynamic")
    assert found.summary()["moves"] == 0 and found.rollout_s > 0


def test_spread():
    assert spread(100, 3) == [1, 51, 100] and spread(2, 8) == [1, 2] and spread(1, 8) == [1]


def test_names():
    with pytest.raises(UserError, match=r"--rule fastest: not a placement rule; expected one of dynamic"):
        simulate(scenario(), "fastest")
    assert simulate(scenario(), "dynamic").rule == "dynamic"
    assert isinstance(runs.rule_of("dynamic", scenario()), DynamicRule), "the rule of runs"


# ---- the command --------------------------------------------------------------------------------------------------

TINY = """
name: tiny
slots: 8
steps: 4
prompts: 16
samples: 4
prompt_length: 50
policy: {speed: {base_s: 0.01, per_sequence_s: 0.0005, prefill_s_per_token: 0.0001, max_concurrent: 12}}
judges: [{tensor_parallel: 2, speed: {base_s: 0.01, per_sequence_s: 0.0005, prefill_s_per_token: 0.0001}}]
lengths: {start: 100, end: 400, longest: 2000}
acceptance: {start: 0.8}
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def test_command_prints_a_table_and_writes_what_the_report_reads(tiny, tmp_path, capsys):
    file = tmp_path / "tiny.json"
    assert main(["simulate", str(tiny), "steps=5", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "tiny: 8 x h100" in out and "5 steps of 16 x 4 responses" in out
    names = [
        line.split()[0] for line in out.splitlines() if line.startswith((" dynamic", " colocated", " best-static"))
    ]
    assert names == ["dynamic", "colocated", "best-static"]
    data = json.loads(file.read_text())
    assert data["rule"] == "dynamic" and set(data["compare"]) == {"dynamic", "colocated", "best-static"}
    source = read_recording(file)
    assert (source.name, source.rule, len(source.rows), len(source.steps)) == ("tiny", "dynamic", 8, 5)
    assert sorted(source.spans) == [1, 2, 3, 4, 5] and {s.role for s in source.segments} >= {POLICY, JUDGE, "trainer"}
    assert {"rollout_s", "update_s", "idle", "busy/policy", "split/judge", "moves", "length"} <= set(source.steps[0])
    split = source.steps[0]
    assert split["split/policy"] + split["split/judge"] <= 8 + 1e-9
    assert main(["report", str(file)]) == 0


def test_progress_in_a_pipe(monkeypatch):
    """A line now and then; none at the end, and none from a short command."""
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr("gcore.simulate.table.time.monotonic", lambda: now[0])
    show = progress_to(stream)
    for seconds, line in ((1.0, "a"), (6.0, "b"), (7.0, "c"), (20.0, "d"), (30.0, "")):
        now[0] = seconds
        show(line)
    assert stream.getvalue().splitlines() == ["b", "d"]


def test_command_with_named_rules(tiny, capsys):
    assert main(["simulate", str(tiny), "--rule", "paper", "--rule", "static:2", "steps=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith((" paper", " static"))] == ["paper", "static:2"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rule", "fastest"], "--rule fastest: not a placement rule"),
        (["--rule", "static:9"], "static:N with N blocks for the policy, from 1 to 3"),
        (["slots=9"], "placement.slots=9 is not a multiple of 2"),
        (["slot=8"], "slots"),
        (["judges.0.model=999T", "judges.0.speed=null"], "999T"),
        (["--json", "/nowhere/at/all.json", "steps=1"], "cannot be written"),
    ],
)
def test_command_reports_errors_in_one_line(tiny, capsys, arguments, words):
    assert main(["simulate", str(tiny), *arguments]) == 2
    err = capsys.readouterr().err.strip()
    assert words in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("name", sorted(file.stem for file in SCENARIOS.glob("*.yaml")))
def test_shipped_scenarios_load(name):
    case = load_scenario(SCENARIOS / f"{name}.yaml")
    assert case.name == name and case.grid.num_blocks >= 2
    case.costs(1), case.costs(case.steps)
