"""Asynchronous rollout in the simulator, and the rule that lends the trainer's blocks to engines."""

from collections import Counter
from dataclasses import replace

import pytest

from gcore.cost.replica_speed import ReplicaSpeed
from gcore.placement.grid import POLICY, TRAINER, DeviceGrid, Split, split_by
from gcore.placement.lending import ContinuedRule, ElasticRule, Flow, LendingRule
from gcore.placement.rules import ClusterLoad, Load, RoleSpeeds, TrainerCosts, TrainerLoad
from gcore.simulate.pipeline import Pipeline
from gcore.simulate.run import simulate
from gcore.simulate.table import best_static
from gcore.types import UserError
from tests.seeds import seeds
from tests.unit.test_simulation import SPEED, Drift, Lengths, Server, SimulatedJudge, scenario

JUDGE = "judge"
QUICK = ReplicaSpeed(0.01, 0.0001, 1e-5, max_concurrent=64, sleep_s=0.1, wake_s=0.3, weights_s=0.1)
GRID = DeviceGrid(8, {POLICY: 1, JUDGE: 1})
COSTS = RoleSpeeds(
    GRID,
    {POLICY: QUICK, JUDGE: QUICK},
    trainer=TrainerCosts(work_s=40.0, fixed_s=0.5, least=1, move_s=2.0, offload_s=0.4),
)
HOME = frozenset(range(3, 8))


def view(**trainer):
    loads = {
        POLICY: Load(running=64, waiting=300, needed=200, age=10.0, lengths=(200.0,) * 4, prompt=50.0),
        JUDGE: Load(running=10, waiting=0, needed=200, lengths=(50.0,) * 4, prompt=100.0),
    }
    facts = {"home": HOME, "updating": False, "ready": False, "missing": 50.0, "due": 0, "running": 400.0}
    return ClusterLoad(loads, work={0: 32, 1: 32, 2: 10}, groups=50.0, trainer=TrainerLoad(**{**facts, **trainer}))


def begun(rule=None):
    rule = rule or LendingRule()
    return rule, rule.begin(view(), COSTS, Split(()), None)


def asynchronous(**changes):
    return scenario(**{"steps": 6, "staleness": 1, "oversampling": 1.0, **changes})


def test_a_simple_pipeline_by_hand():
    """Equal lengths, one response per group, generation of a batch of 4 in 0.01 s x 100, updates of 2 s: the trainer
    decides, and engines generate the next batch during the update."""
    speed = SPEED.model_copy(update={"per_sequence_s": 0.0, "prefill_s_per_token": 0.0, "weights_s": 0.0})
    case = scenario(
        slots=2, steps=5, staleness=1, prompts=4, samples=1, prompt_length=1, policy=Server(speed=speed), judges=(),
        lengths=Lengths(start=100, sigma=0.0), acceptance=Drift(start=1.0), oversampling=1.0, update_s=1.0, rpc_s=0.0,
        controllers=1,
    )  # fmt: skip
    run = simulate(case, "disaggregated:1-1")  # one of two slots trains: 2 s
    assert [step["rollout_s"] for step in run.steps] == pytest.approx([3.0, 2.0, 2.0, 2.0, 2.0])
    assert [step["staleness"] for step in run.steps] == [{"0": 4}, *[{"1": 4}] * 4]
    quick = simulate(case.model_copy(update={"update_s": 0.25}), "disaggregated:1-1")  # generation decides: 1 s
    assert quick.steps[-1]["rollout_s"] == pytest.approx(1.0, abs=0.01)


@seeds(2, 6)
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_every_group_is_trained_once_and_in_time(seed, staleness):
    case = asynchronous(seed=seed, staleness=staleness, acceptance=Drift(start=0.7))
    for rule in (LendingRule(), ElasticRule(), LendingRule(home=4)):
        pipeline = Pipeline(case, rule)
        steps = pipeline.run_all()
        numbers = pipeline.trained
        assert len(numbers) == len(set(numbers)) == case.steps * case.prompts
        assert all(len(step.lengths) == case.prompts * case.samples for step in steps)
        versions = sum((step.staleness for step in steps), Counter())
        assert max(versions) <= staleness and versions[min(1, staleness)] > 0
        assert (
            sum(sum(step.busy.values()) for step in steps) <= case.slots * sum(step.seconds for step in steps) * 1.001
        )


def test_blocks_are_lent_between_updates():
    run = simulate(asynchronous(update_s=0.5), "dynamic", keep_timeline=range(1, 7))
    lent = [move for move in run.moves if move["from"] == TRAINER]
    back = [move for move in run.moves if move["to"] == TRAINER]
    assert lent and back and "lent" in lent[0]["reason"]
    assert {piece["role"] for piece in run.timeline} == {POLICY, JUDGE, TRAINER, "switch"}
    assert run.steps[-1]["split"][TRAINER] < 0.625 * 8  # its home, less what it lends
    assert run.summary()["total_s"] == pytest.approx(sum(step["rollout_s"] for step in run.steps))


def test_the_home_is_taken_back_for_an_update():
    rule, split = begun()
    assert split.blocks(TRAINER) == sorted(HOME) and split.blocks(POLICY) == [0, 1] and split.blocks(JUDGE) == [2]
    lent = rule(split, view(), COSTS)
    assert [move.block for move in lent] == sorted(HOME) and {move.source for move in lent} == {TRAINER}
    away = split.after(lent)
    back = rule(away, view(ready=True), COSTS)
    assert away.after(back) == split
    assert not [m for m in rule(split, view(ready=True), COSTS) if TRAINER in (m.source, m.target)]


def test_a_short_wait_is_no_reason_to_lend():
    rule, split = begun()
    assert not [m for m in rule(split, view(missing=0.5), COSTS) if m.source == TRAINER]
    assert [m for m in rule(split, view(missing=0.5, waited_s=30.0), COSTS) if m.source == TRAINER]  # it was not short


def test_responses_are_not_interrupted_for_judges():
    rule, split = begun()
    busy = view(missing=0.5)
    few = replace(busy, loads={**busy.loads, POLICY: replace(busy.loads[POLICY], waiting=0, needed=5.0)})
    judged = replace(few, loads={**few.loads, JUDGE: Load(waiting=2000, needed=2000.0, lengths=(400.0,) * 4)})
    assert not rule(split, judged, COSTS)
    assert [m.block for m in rule(split, replace(judged, work={0: 32, 1: 0, 2: 10}), COSTS)] == [1]


def test_in_runs_the_split_stays_and_no_response_is_interrupted():
    rule, split = ContinuedRule(), split_by(GRID, {POLICY: 6, JUDGE: 2})
    assert rule.begin(view(), COSTS, split, 12.0) == split
    few = view()
    loads = {POLICY: replace(few.loads[POLICY], waiting=0, needed=5.0), JUDGE: Load(waiting=2000, needed=2000.0)}
    busy = dict.fromkeys(range(8), 9.0)
    assert not rule(split, replace(few, loads=loads, work=busy), COSTS)
    moves = rule(split, replace(few, loads=loads, work={**busy, 3: 0.0}), COSTS)
    assert [(move.block, move.target) for move in moves] == [(3, JUDGE)]


def test_flow_gives_blocks_to_the_slower_role():
    flow = Flow(view(), COSTS)
    sums = [flow.split(n) for n in range(2, 9)]
    assert [sum(counts.values()) for counts in sums] == list(range(2, 9)) and flow.split(1) is None
    best = min((flow.step_s({POLICY: n, JUDGE: 8 - n}), n) for n in range(1, 8))
    assert flow.best_s(8) == best[0] and flow.split(8)[POLICY] == best[1]


def test_elastic_trainer_changes_its_blocks_between_steps():
    rule, split = begun(ElasticRule())
    few, heavy = len(split.blocks(TRAINER)), replace(COSTS, trainer=replace(COSTS.trainer, work_s=400.0))
    more = rule.begin(view(home=frozenset(split.blocks(TRAINER))), heavy, split, 10.0)
    assert len(more.blocks(TRAINER)) > few
    assert not [m for m in rule(split, view(), COSTS) if m.source == TRAINER]


def test_best_disaggregated_split_is_the_fastest_of_all():
    case = asynchronous(slots=4, judges=(SimulatedJudge(speed=SPEED, verdict=Lengths(start=60, sigma=0.3)),), steps=3)
    best = best_static(case, disaggregated=True)
    each = [simulate(case, f"disaggregated:{p}-{j}-{4 - p - j}").total_s for p, j in ((1, 1), (1, 2), (2, 1))]
    assert best.total_s == min(each) and best.rule.startswith("disaggregated:")


def test_rules_without_staleness_are_simulated_without_it():
    case = asynchronous(steps=2)
    same = simulate(case.model_copy(update={"staleness": 0}), "colocated")
    assert simulate(case, "colocated").total_s == same.total_s
    with pytest.raises(UserError, match="disaggregated: and the blocks of each of policy, judge, trainer"):
        simulate(case, "disaggregated:3")
    with pytest.raises(UserError, match="not a placement rule"):
        simulate(case.model_copy(update={"staleness": 0}), "elastic")


def test_split_with_a_trainer():
    grid = GRID.with_trainer()
    assert split_by(grid, {POLICY: 3, JUDGE: 2, TRAINER: 3}).blocks(TRAINER) == [5, 6, 7]
