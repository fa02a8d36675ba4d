"""The rollout phase: which prompts a step trains on, what becomes of the others, and what ends it. See rollouts.py."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gcore.config import sampling as config
from gcore.config.algorithm import Algorithm
from gcore.config.sampling import Sampling
from gcore.controller.collect import no_filter
from gcore.controller.evaluation import answer_all
from gcore.controller.prompt_ledger import Collected, merge_places
from gcore.launch.user_code import load_filter
from gcore.preparation.samples import make_samples
from gcore.prompts.curriculum import CurriculumOrder
from gcore.types import Prompt, RewardError, Scored, UserError
from gcore.workflows.context import StageClock, generate_and_reward
from tests.seeds import seeds
from tests.unit.rollouts import (
    FOREVER,
    World,
    group_of,
    in_order,
    number_of,
    numbers,
    of_chance,
    prompt_at,
    run,
    scored,
)

FREE: dict[str, Any] = {"deterministic": False, "surplus": "abort"}
MODES: dict[str, dict[str, Any]] = {  # those in which timing decides
    "free": FREE,
    "keep": {"surplus": "keep"},
    "keep all": {"surplus": "keep", "filter": "none"},
    "ahead 1": {"max_staleness": 1},
    "ahead 2": {"max_staleness": 2},
    "ahead 3": {"max_staleness": 3},
    "ahead 2, all": {"max_staleness": 2, "filter": "none"},
}


def sampling(**changes: Any) -> Sampling:
    return Sampling(
        **{"prompts_per_step": 5, "samples_per_prompt": 2, "filter": "spread", "oversampling": 1, **changes}
    )


def fixed(prompts: int) -> Sampling:
    return sampling(prompts_per_step=prompts, filter="none")


def totals(found: list[Collected]) -> tuple[int, int, Counter[str], int]:
    """Drawn, trained, dropped, pending of a step, over all controllers."""
    dropped = sum((part.dropped for part in found), Counter[str]())
    return sum(p.drawn for p in found), len(numbers(found)), dropped, sum(p.pending for p in found)


def oldest(group: list[Scored]) -> int:
    return min(s.rollout.version for s in group)


# --- what a workflow may return, and what it may raise


def answer(workflow: Any, prompts: int = 3, least: int = 2) -> Collected:
    shared: Any = SimpleNamespace(clock=StageClock(), take_calls=Counter, least_siblings=least, baseline=None)
    return run(answer_all(workflow, shared, [prompt_at(i) for i in range(prompts)], lambda _: None))


def test_groups_come_in_prompt_order_in_any_order_of_arrival():
    async def workflow(ctx: Any, p: Prompt) -> list[Scored]:
        await asyncio.sleep(2 - p.id)
        return group_of(p.id)

    assert [number_of(group) for group in answer(workflow).groups] == [0, 1, 2]
    world = World(fixed(3), delay=lambda prompt, attempt: 2.0 - prompt)
    run(world.train(1))
    assert [number_of(group) for group in world.steps[0][0].groups] == [0, 1, 2]


def test_a_reward_that_cannot_be_had_drops_its_group_alone():
    async def workflow(ctx: Any, p: Prompt) -> list[Scored]:
        if p.id == 1:
            raise RewardError("not today")
        return group_of(p.id)

    found = answer(workflow)
    assert [number_of(group) for group in found.groups] == [0, 2]
    assert (found.drawn, found.dropped, found.cause) == (3, {"reward_error": 1}, "not today")


@pytest.mark.parametrize("mode", [{"filter": "none"}, {}], ids=["fixed", "spread"])
def test_a_curriculum_knows_prompts_that_fail(mode):
    """Else `easy_first` would draw them in every step."""

    def outcome(prompt: int, version: int) -> bool | Exception:
        return RewardError("not today") if prompt == 1 else prompt != 2

    world = World(sampling(prompts_per_step=3, **mode), 2, outcome=outcome)
    learned: list[Any] = []
    for collector in world.collectors:
        collector._runner.source = SimpleNamespace(at=prompt_at, give_order=lambda first, rows: None)  # type: ignore[assignment]
        collector._runner.curriculum = CurriculumOrder(config.Curriculum(), np.arange(99), seed=0)
        collector._runner.curriculum.update = lambda groups: learned.append(sorted(groups))  # type: ignore[method-assign]
    run(world.train(1))
    rates = [(0, 0, 0.5), (1, 1, None), (2, 2, 0.0), (3, 3, 0.5), (4, 4, 0.5)]
    assert learned == [rates[:3] if mode else rates] * 2


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([scored(0, 0)], "returned 1 sample for prompt 0; algorithm.adv_estimator compares at least 2"),
        ([scored(0, 0), scored(0, 0)], "twice"),
        ([scored(0, 0), scored(7, 1)], "another prompt"),
        ([scored(0, 0), scored(0, 1, versions=())], "without steps"),
        ([scored(0, 0), dataclasses.replace(scored(0, 1), reward=np.nan)], "the reward nan for prompt 0; expected a"),
        ([], "expected a non-empty list"),
        (None, "returned NoneType for prompt 0; expected a non-empty list"),
        ([1.0, 2.0], "expected a non-empty list"),
    ],
)
def test_what_a_workflow_may_not_return(returned, words):
    async def workflow(ctx: Any, p: Prompt) -> Any:
        return returned

    with pytest.raises(UserError, match=words):
        answer(workflow, prompts=1)
    world = World(fixed(1))
    world.collectors[0]._runner._workflow = workflow
    with pytest.raises(UserError, match=words):
        run(world.train(1))


def test_one_sample_is_enough_where_nothing_is_compared():
    async def workflow(ctx: Any, p: Prompt) -> list[Scored]:
        return [scored(p.id, 0)]

    assert len(answer(workflow, least=1).groups) == 3


def test_what_a_workflow_raises_drops_its_group_and_names_the_users_line():
    async def workflow(ctx: Any, p: Prompt) -> list[Scored]:
        if p.id == 1:
            raise KeyError("lost")
        return group_of(p.id)

    line = inspect.getsourcelines(workflow)[1] + 2
    found = answer(workflow)
    assert [number_of(group) for group in found.groups] == [0, 2] and found.dropped == {"workflow_error": 1}
    assert found.cause == f"test_collect.py:{line} in workflow: KeyError: 'lost' (workflow, prompt 1)"
    outcome: Any = lambda prompt, version: KeyError("lost") if prompt == 1 else True  # noqa: E731
    for mode in ({"filter": "none"}, {}, FREE, {"surplus": "keep"}, {"max_staleness": 1}):
        world = World(sampling(prompts_per_step=3, **mode), 2, outcome=outcome, keep=no_filter)
        run(world.train(1))
        assert totals(world.steps[0])[2] == {"workflow_error": 1}
        assert [part.failed_globally for part in world.steps[0]] == [1, 1]
        assert any("KeyError: 'lost'" in (part.cause or "") for part in world.steps[0])


def test_what_a_workflow_of_ours_raises_comes_out_as_it_is():
    broken: Any = SimpleNamespace(clock=StageClock(), least_siblings=2, baseline=None)  # it has no `sampling`
    with pytest.raises(AttributeError, match="attribute 'n'"):
        run(answer_all(generate_and_reward, broken, [prompt_at(0)], lambda _: None))


@pytest.mark.parametrize("mode", [{"filter": "none"}, {}, FREE, {"surplus": "keep"}, {"max_staleness": 1}], ids=str)
def test_a_failure_ends_the_step_at_once(mode):
    """One prompt raises; all others, here and elsewhere, would take for ever. Its controller does not wait for them."""

    def outcome(prompt: int, version: int) -> bool | Exception:
        return UserError("lost") if prompt == 0 else True

    world = World(sampling(**mode), 2, delay=lambda prompt, attempt: FOREVER if prompt else 1.0, outcome=outcome)

    async def first_to_end() -> float:
        steps = [asyncio.ensure_future(collector.step(1)) for collector in world.collectors]
        done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
        assert done == {steps[0]}
        with pytest.raises(UserError, match="lost"):
            steps[0].result()
        return asyncio.get_running_loop().time()

    assert run(first_to_end()) < 1.2


def test_a_failure_is_heard_while_another_controller_keeps_silent():
    """The exchange is under way, and controller 1 does not join it; then a group here raises."""
    outcome: Any = lambda prompt, version: UserError("lost")  # noqa: E731
    world = World(sampling(), 2, delay=lambda prompt, attempt: 10.0, outcome=outcome)
    with pytest.raises(UserError, match="lost"):
        run(world.collectors[0].step(1), bound_s=11.0)


def test_a_failure_between_two_steps_ends_the_next():
    def outcome(prompt: int, version: int) -> bool | Exception:
        return UserError("lost") if prompt == 7 else True

    world = World(sampling(max_staleness=1), delay=lambda prompt, attempt: 1.0 if prompt == 7 else 0.1, outcome=outcome)
    with pytest.raises(UserError, match="lost"):
        run(world.train(2), bound_s=100.0)
    assert len(numbers(world.steps[0])) == 5


def test_a_workflow_that_cancels_itself_is_a_failure_and_no_hang():
    async def workflow(ctx: Any, p: Prompt) -> list[Scored]:
        inner = asyncio.ensure_future(asyncio.sleep(1))
        inner.cancel()
        await inner
        return group_of(p.id)

    with pytest.raises(UserError, match="cancelled itself at prompt 0"):
        answer(workflow, prompts=1)
    world = World(fixed(1))
    world.collectors[0]._runner._workflow = workflow
    with pytest.raises(UserError, match="cancelled itself at prompt 0"):
        run(world.train(1))


# --- fixed: the next so many prompts, whatever becomes of them


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_fixed_steps(size):
    def outcome(prompt: int, version: int) -> bool | Exception:
        return RewardError(f"no {prompt}") if prompt in (1, 2) else prompt % 2 == 0

    chosen = sampling(prompts_per_step=6, filter="none", on_exhausted="stop")  # that is for dynamic sampling
    world = World(chosen, size, **{**of_chance(f"0/{size}", 0), "outcome": outcome}, keep=no_filter)
    run(world.train(2))
    assert [numbers(found) for found in world.steps] == [[0, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert [totals(found) for found in world.steps] == [(6, 4, {"reward_error": 2}, 0), (6, 6, {}, 0)]
    for part in world.steps[0]:
        assert (part.failed_globally, part.decided_globally) == (2, 6)
    assert sorted(world.started) == list(range(12)) and world.aborted == []
    causes = [part.cause for part in world.steps[0]]
    assert (
        causes == {1: ["no 1"], 2: ["no 2", "no 1"], 3: [None, "no 1", "no 2"], 4: [None, "no 1", "no 2", None]}[size]
    )
    assert all(part.cause is None for part in world.steps[1])


# --- strict: the first good groups in the order of the prompts


@seeds(50, 200)
def test_strict_steps_do_not_know_how_many_controllers_there_are(seed):
    """Random delays, drops and errors; where the window ends early, steps are smaller. All as one by one, in order."""
    dice = random.Random(seed)
    chosen = sampling(prompts_per_step=dice.randint(1, 5), max_draws=dice.choice([1.0, 1.5, 3.0]))
    drop, slow = dice.choice([0.0, 0.3, 0.8]), dice.choice([0.1, 0.5])
    for size in (1, 2, 3, 4):
        world = World(chosen, size, **of_chance(f"{seed}/{size}", drop, error=0.1, slow=slow), train_s=0.0)
        run(world.train(3))
        found = [(numbers(step), totals(step)[2], totals(step)[0]) for step in world.steps]
        expected = in_order(world, 3)
        assert found == expected
        for step, (good, why, _) in zip(world.steps, expected, strict=True):
            rewards = [reward for part in step for reward in part.rewards]  # of all that were looked at, and no others
            assert sorted(rewards) == [0.0] * (len(good) + 2 * why["no_spread"]) + [1.0] * len(good)
            for part in step:
                assert (part.pending, part.failed_globally) == (0, why["reward_error"])
                assert part.decided_globally == len(good) + why.total()
                assert all(oldest(group) == world.steps.index(step) for group in part.groups)
        assert merge_places(world.places, strict=True)["cursor"] == sum(drawn for *_, drawn in expected)


def test_strict_waits_for_a_slow_first_prompt_while_others_draw():
    """Prompt 0 alone is slow, and dropped; before, both controllers have tried the rest of the window. No deadlock."""
    chosen = sampling(prompts_per_step=3, max_draws=4.0)
    good = {4, 7, 10}
    world = World(chosen, 2, delay=lambda p, _: 50.0 if p == 0 else 0.1, outcome=lambda prompt, version: prompt in good)
    run(world.train(1))
    assert numbers(world.steps[0]) == [4, 7, 10]
    assert totals(world.steps[0]) == (11, 3, {"no_spread": 8}, 0)
    assert sorted(set(world.started)) == list(range(12))


def test_strict_forgets_what_came_too_far_ahead():
    """Prompt 3 fails at once, but the step ends with prompt 2: it is asked again, by the next policy."""

    def outcome(prompt: int, version: int) -> bool | Exception:
        return RewardError(f"no {prompt}") if prompt == 3 and version == 0 else True

    chosen = sampling(prompts_per_step=3, oversampling=4 / 3)
    world = World(chosen, 2, delay=lambda p, _: 0.01 if p == 3 else 1.0, outcome=outcome)
    run(world.train(2))
    assert [numbers(found) for found in world.steps] == [[0, 1, 2], [3, 4, 5]]
    assert [totals(found) for found in world.steps] == [(3, 3, {}, 0), (3, 3, {}, 0)]
    assert all(part.failed_globally == 0 and part.cause is None for part in world.steps[0])
    assert world.started.count(3) == 2


def test_a_dropped_group_is_replaced_without_a_word_to_others():
    """Controller 1 does not join the first exchange; controller 0 goes through its part of the window."""
    world = World(sampling(prompts_per_step=4, max_draws=3.0), 2, outcome=lambda prompt, version: False)

    async def alone() -> None:
        step = asyncio.ensure_future(world.collectors[0].step(1))
        await asyncio.sleep(5.0)
        assert not step.done()

    run(alone())
    assert world.started == [0, 2, 4, 6, 8, 10]


def test_a_controller_without_luck_is_helped_by_others():
    """Controller 0 is stuck with its prompts; controller 1 draws until there are enough."""
    world = World(sampling(prompts_per_step=4, **FREE), 2)
    world.delay = lambda prompt, attempt: FOREVER if prompt % 2 == 0 else 0.1
    world.outcome = lambda prompt, version: prompt > 6
    run(world.train(1), bound_s=100.0)
    assert numbers(world.steps[0]) == [7, 9, 11, 13]


# --- all that was drawn is trained on, dropped, or still to come


def check_books(*worlds: World) -> None:
    """Row by row the sums agree; and at the end every number below the head is in exactly one place."""
    drawn = trained = dropped = 0
    for world in worlds:
        for found in world.steps:
            new, groups, why, pending = totals(found)
            drawn, trained, dropped = drawn + new, trained + groups, dropped + why.total()
            assert drawn == trained + dropped + pending
    state = merge_places(worlds[-1].places, strict=False)
    where = [number for world in worlds for found in world.steps for number in numbers(found)]
    where += [number for world in worlds for number in world.dropped]
    where += [*map(number_of, worlds[-1].pool), *state["pending"], *state["undrawn"]]
    assert sorted(where) == list(range(state["cursor"]))


def check_ages(world: World, first_step: int = 1) -> Counter[int]:
    """As preparation asserts it: no sample older than allowed, none newer than the policy. How many of which age."""
    ages = Counter[int]()
    for step, found in enumerate(world.steps, first_step):
        groups = [group for part in found for group in part.groups]
        make_samples(groups, Algorithm(), step - 1, world.sampling.staleness)
        ages.update(step - 1 - oldest(group) for group in groups)
    return ages


@pytest.mark.parametrize("mode", MODES)
def test_books_and_ages_whatever_the_timing(mode):
    ages = Counter[int]()
    for seed in range(12):
        chosen, size = sampling(**MODES[mode]), 1 + seed % 4
        drop = random.Random(seed).choice([0.0, 0.4, 0.7]) if chosen.filter == "spread" else 0.0
        chance = of_chance(f"{seed}/{size}", drop, error=0.1, slow=0.1 if seed % 3 else 0.5)
        world = World(chosen, size, **chance, train_s=seed % 2 * 0.5)
        run(world.train(6))
        check_books(world)
        ages += check_ages(world)
        for found in world.steps:
            assert len(numbers(found)) == 5
    assert set(ages) == set(range(chosen.staleness + 1))  # all that is allowed happens, and no more


@pytest.mark.parametrize("mode", MODES)
def test_a_controller_that_is_always_slow(mode):
    """Half of the prompts take 20 times as long; nothing is lost, nothing grows too old."""
    delay: Any = lambda prompt, attempt: 2.0 if prompt % 2 else 0.1  # noqa: E731
    world = World(sampling(**MODES[mode]), 2, delay=delay, train_s=0.2)
    run(world.train(8))
    check_books(world)
    check_ages(world)


# --- free: what is under way at the end is aborted


def test_free_steps_do_not_wait_for_the_last():
    """Prompt 2 hangs at its first try. One more than needed was begun; 2 is aborted, and then first in line."""
    world = World(sampling(prompts_per_step=4, oversampling=1.25, **FREE), 2)
    world.delay = lambda prompt, attempt: FOREVER if prompt == 2 and attempt == 0 else 0.1
    run(world.train(2), bound_s=100.0)
    assert numbers(world.steps[0]) == [0, 1, 3, 4] and world.aborted == [2]
    assert [totals(found) for found in world.steps] == [(5, 4, {}, 1), (4, 4, {}, 1)]  # a second try is no second draw
    assert world.started == [0, 2, 4, 1, 3, 2, 6, 8, 5, 7]
    assert numbers(world.steps[1]) == [2, 5, 6, 7]


def test_free_steps_give_surplus_groups_back():
    """Both controllers start 2 for a step of 3; all four are done in the same exchange. The fourth is made again."""
    world = World(sampling(prompts_per_step=3, oversampling=4 / 3, **FREE), 2)
    run(world.train(2))
    assert [numbers(found) for found in world.steps] == [[0, 1, 2], [3, 4, 5]]
    assert [totals(found)[3] for found in world.steps] == [1, 1]
    assert world.started.count(3) == 2 and world.aborted == []
    assert [oldest(group) for part in world.steps[1] for group in part.groups] == [1, 1, 1]


@pytest.mark.parametrize("says", [None, RewardError("too late"), KeyError("too late")], ids=repr)
def test_what_an_aborted_workflow_still_says_is_not_heard(says):
    world = World(sampling(prompts_per_step=1, oversampling=2.0, **FREE), 2, delay=lambda prompt, attempt: 0.1)
    tell = world.workflow

    async def deaf(ctx: Any, p: Prompt) -> list[Scored]:
        if p.id != 1 or world.version > 0:
            return await tell(ctx, p)
        world.started.append(1)
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            if says is not None:
                raise says from None
        return group_of(p.id)

    for collector in world.collectors:
        collector._runner._workflow = deaf
    run(world.train(3))
    assert numbers(world.steps[0]) == [0]
    assert all(found.failed_globally == 0 and found.cause is None for step in world.steps for found in step)
    check_books(world)


# --- keep, and ahead of the trainer


def test_kept_surplus_trains_in_the_next_step():
    world = World(
        sampling(prompts_per_step=3, surplus="keep", oversampling=4 / 3), 2, delay=lambda p, _: 1.0 if p == 3 else 0.1
    )
    run(world.train(2))
    assert numbers(world.steps[0]) == [0, 1, 2]
    assert totals(world.steps[0]) == (4, 3, {}, 1)
    assert 3 in numbers(world.steps[1]) and world.started.count(3) == 1 and world.aborted == []
    (late,) = [group for part in world.steps[1] for group in part.groups if number_of(group) == 3]
    assert [s.rollout.versions_S.tolist() for s in late] == [[0, 1], [0, 1]]


def test_surplus_alone_goes_on_while_the_trainer_works():
    """Prompts 2 and 3 end in mid-training, one of them badly; nothing new is begun by a policy that is about to go."""
    world = World(sampling(prompts_per_step=2, surplus="keep"), 2, train_s=5.0)
    world.collectors[0].rate = world.collectors[1].rate = 0.5  # 2 each
    world.delay = lambda prompt, attempt: 2.0 if prompt in (2, 3) else 0.1
    world.outcome = lambda prompt, version: prompt != 3
    run(world.train(1))
    assert numbers(world.steps[0]) == [0, 1] and sorted(world.started) == [0, 1, 2, 3]
    assert [number_of(group) for group in world.pool] == [2] and world.dropped == [3]


def test_a_step_waits_for_groups_the_next_could_not_use():
    """Prompt 3 was begun by policy 0 and runs through step 2: the last that may train on it. Step 2 takes it in."""
    world = World(
        sampling(prompts_per_step=3, surplus="keep", oversampling=4 / 3), 2, delay=lambda p, _: 20.0 if p == 3 else 0.1
    )
    run(world.train(3))
    assert 3 in numbers(world.steps[1]) and world.started.count(3) == 1
    check_ages(world)


def test_groups_that_grew_too_old_are_made_again():
    """Both are begun by policy 0 and done in time for step 2, which has room for one of them."""
    world = World(sampling(prompts_per_step=1, surplus="keep"))
    collector = world.collectors[0]
    collector.restore({"cursor": 3, "pending": [], "undrawn": []}, [group_of(i, versions=(0,)) for i in range(3)])
    world.version = 1
    run(world.train(2))
    assert [numbers(found) for found in world.steps] == [[0], [1]]
    assert world.started == [1]  # 2 waits: no step needed it yet
    assert world.places[0]["pending"] == [2]
    assert [part.pending for found in world.steps for part in found] == [2, 1]
    assert [oldest(group) for part in world.steps[1] for group in part.groups] == [2]


def test_generation_goes_on_while_the_trainer_works():
    world = World(sampling(prompts_per_step=4, max_staleness=2), 2, train_s=10.0)
    run(world.train(3))
    assert [numbers(found) for found in world.steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [totals(found)[3] for found in world.steps] == [8, 8, 8]
    ages = [{step - oldest(group) for part in world.steps[step] for group in part.groups} for step in range(3)]
    assert ages == [{0}, {1}, {2}]
    # what placement looks ahead to: the groups of three steps, the share of one of two controllers
    assert [collector.progress().target for collector in world.collectors] == [6, 6]


def test_the_share_accepted_lately_decides_how_many_are_started():
    """A third passes: after some steps about three times the missing groups are under way at once, and no more."""
    world = World(sampling(prompts_per_step=6, max_oversampling=2.0), outcome=lambda prompt, version: prompt % 3 == 0)
    running = list[int]()
    world.delay = lambda prompt, attempt: running.append(world.collectors[0].prompts.num_running) or 0.1  # type: ignore
    run(world.train(12))
    assert world.collectors[0].rate == pytest.approx(1 / 3, abs=0.05)
    assert max(running[:6]) == 6 and max(running) == 12  # 6 / max(rate, 1 / max_oversampling)


# --- too few groups


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("mode", [{}, FREE, {"surplus": "keep"}, {"max_staleness": 2}], ids=str)
def test_exhausted_steps_train_on_what_there_is(mode, size):
    chosen = sampling(prompts_per_step=6, max_draws=2.0, **mode)
    world = World(chosen, size, **of_chance(f"1/{size}", 0), train_s=0.0)
    world.outcome = lambda prompt, version: prompt == 4
    run(world.train(2))
    assert [numbers(found) for found in world.steps] == [[4], []]
    for step, found in enumerate(world.steps):
        drawn, _, why, pending = totals(found)
        assert why["no_spread"] + pending + (step == 0) == drawn >= 12 and pending == 0
    assert sorted(set(world.started)) == list(range(len(world.started)))  # each once


@pytest.mark.parametrize("mode", [{}, FREE, {"surplus": "keep"}], ids=str)
def test_exhausted_steps_end_the_run_where_asked_to(mode):
    chosen = sampling(prompts_per_step=6, max_draws=2.0, on_exhausted="stop", **mode)
    world = World(chosen, 2, outcome=lambda prompt, version: prompt == 4)

    async def steps() -> list[Any]:
        return await asyncio.gather(*(c.step(1) for c in world.collectors), return_exceptions=True)

    for error in run(steps()):  # all of them know
        assert isinstance(error, UserError)
        assert "step 1: 1 of 6 groups from 12 prompts (no_spread 11); increase sampling.max_draws" in str(error)


def test_a_step_that_is_just_enough_is_not_exhausted():
    chosen = sampling(prompts_per_step=3, max_draws=2.0, on_exhausted="stop")
    world = World(chosen, 2, outcome=lambda prompt, version: prompt % 2 == 1)
    run(world.train(2))
    assert [numbers(found) for found in world.steps] == [[1, 3, 5], [7, 9, 11]]


# --- rewards that could not be had


@pytest.mark.parametrize("mode", [{}, FREE, {"surplus": "keep"}, {"max_staleness": 1}], ids=str)
def test_groups_without_a_reward_are_replaced_counted_and_explained(mode):
    def outcome(prompt: int, version: int) -> bool | Exception:
        return RewardError(f"no {prompt}") if prompt in (1, 3) else True

    world = World(sampling(prompts_per_step=4, **mode), 2, delay=lambda p, _: 0.1 + p / 1000, outcome=outcome)
    run(world.train(1))
    found = world.steps[0]
    assert numbers(found) == [0, 2, 4, 5]
    assert totals(found)[2] == {"reward_error": 2}
    assert [part.cause for part in found] == [None, "no 1"]
    assert [part.dropped for part in found] == [{}, {"reward_error": 2}]
    for part in found:
        assert part.failed_globally == 2 and part.decided_globally >= 6


def test_a_failure_between_two_steps_is_reported_in_the_second_with_its_cause():
    """Both the count of failures and the cause belong to the step whose exchanges report them."""
    world = World(sampling(prompts_per_step=2, surplus="keep"), 2)
    for collector in world.collectors:
        collector.rate = 0.5  # 2 each
    world.delay = lambda prompt, attempt: 3.0 if prompt == 3 else 0.1
    world.outcome = lambda prompt, version: RewardError("late") if prompt == 3 else True
    world.train_s = 5.0
    run(world.train(2))
    first, second = world.steps
    assert [(part.failed_globally, part.cause) for part in first] == [(0, None), (0, None)]
    assert [(part.failed_globally, part.cause) for part in second] == [(1, None), (1, "late")]


def test_a_failure_during_the_last_exchange_is_reported_in_the_next_step_with_its_cause():
    """Prompt 2 fails while controller 0 waits at the exchange that ends the step: counted here, not yet reported."""
    world = World(sampling(prompts_per_step=2, surplus="keep"), 2, late_s=2.0)
    world.collectors[0].rate = world.collectors[1].rate = 0.5  # 2 each
    world.delay = lambda prompt, attempt: 1.0 if prompt == 2 else 0.001
    world.outcome = lambda prompt, version: RewardError("late") if prompt == 2 else True
    run(world.train(2))
    first, second = world.steps
    assert numbers(first) == [0, 1] and totals(first)[2] == {"reward_error": 1}
    assert [(part.failed_globally, part.cause) for part in first] == [(0, None), (0, None)]
    assert [(part.failed_globally, part.cause) for part in second] == [(1, "late"), (1, None)]
    check_books(world)


def test_one_late_failure_does_not_make_a_step_of_failures():
    """The groups of step 2 wait already; one failure is all that it reports. It is 1 of 3, not 1 of 1."""
    world = World(sampling(prompts_per_step=2, max_staleness=1, max_draws=1.5))
    world.collectors[0].restore(
        {"cursor": 2, "pending": [], "undrawn": []}, [group_of(i, versions=(0,)) for i in range(2)]
    )
    world.outcome = lambda prompt, version: RewardError("late")
    world.delay = lambda prompt, attempt: 0.001
    run(world.train(1))
    (found,) = world.steps[0]
    assert numbers([found]) == [0, 1]
    assert found.failed_globally >= 1 and found.decided_globally == found.failed_globally + 2


# --- checkpoints


def resumed(world: World, size: int, **changes: Any) -> World:
    """What a run of `size` controllers makes of the checkpoint of another."""
    after = World(world.sampling, size, **{"version": world.version, **changes})
    state = merge_places(world.places, world.sampling.strict)
    for collector in after.collectors:
        collector.restore(state, world.pool)
    return after


@pytest.mark.parametrize("mode", ["free", "keep", "ahead 2"])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_any_number_of_controllers_goes_on_where_any_other_stopped(before, after, mode):
    chance = {"drop": 0.4, "error": 0.1, "slow": 0.4}
    first = World(sampling(**MODES[mode]), before, **of_chance(f"3/{before}", **chance))
    run(first.train(3))
    second = resumed(first, after, **of_chance(f"3/{after}/again", **chance))
    ready = sorted(c for collector in second.collectors for c in collector.prompts.ready)
    assert ready == sorted(map(number_of, first.pool))
    run(second.train(4))
    check_books(first, second)
    check_ages(second, first_step=4)
    third = resumed(second, before, **of_chance(f"3/{before}/third", **chance))
    run(third.train(2))
    check_books(first, second, third)


def test_pending_prompts_come_first_then_those_left_behind():
    world = World(sampling(prompts_per_step=6, deterministic=False), 3)
    places = [
        {"base": 0, "head": 12, "pending": [9, 3], "undrawn": [], "rate": 0.5, "drawn": 2, "dropped": {"no_spread": 1}},
        {"base": 0, "head": 4, "pending": [], "undrawn": [1], "rate": 0.5, "drawn": 1, "dropped": {}},
        {"base": 0, "head": 8, "pending": [5], "undrawn": [], "rate": 0.5, "drawn": 0, "dropped": {"no_spread": 2}},
    ]
    state = merge_places(places, strict=False)
    assert state == {
        "cursor": 12,
        "rate": 0.5,
        "pending": [3, 5, 9],
        "undrawn": [1, 4, 7, 8, 10, 11],
        "drawn": 3,
        "dropped": {"no_spread": 3},
    }
    world = World(sampling(prompts_per_step=12, deterministic=False), 2)
    for collector in world.collectors:
        collector.restore({**state, "rate": 1.0}, [])
        assert collector.begun_again == len(state["pending"])
    run(world.train(1))
    assert world.started == [3, 9, 1, 7, 10, 12, 5, 4, 8, 11, 13, 15]  # first those of controller 0
    assert totals(world.steps[0]) == (9 + 3, 12, {"no_spread": 3}, 0)  # 3 of the 12 had been drawn before


@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_strict_runs_resume_as_if_nothing_had_happened(before, after):
    whole = World(sampling(), 1, **of_chance("5/whole", 0.5))
    run(whole.train(5))
    first = World(sampling(), before, **of_chance(f"5/{before}", 0.5))
    run(first.train(2))
    second = resumed(first, after, **of_chance(f"5/{after}", 0.5))
    run(second.train(3))
    assert [numbers(f) for f in first.steps + second.steps] == [numbers(f) for f in whole.steps]


def test_a_strict_run_does_not_take_over_groups_of_older_policies():
    for state, pool in (({"pending": [3]}, []), ({"undrawn": [3]}, []), ({}, [group_of(3)])):
        with pytest.raises(UserError, match=r"sampling\.surplus and sampling\.max_staleness .*deterministic=false"):
            World(sampling()).collectors[0].restore({"cursor": 7, **state}, pool)


# --- filters


def filter_of(tmp_path: Any, body: str) -> Any:
    (tmp_path / "mine.py").write_text(f"def f(group):\n    return {body}\n")
    return load_filter(f"{tmp_path / 'mine.py'}:f")


def test_a_filter_of_ones_own_gives_its_reasons(tmp_path):
    body = "(group[0].rollout.prompt.id != 1, 'unlucky') if group[0].rollout.prompt.id < 3 else (False, '')"
    world = World(sampling(prompts_per_step=4, max_draws=1.0), 2, keep=filter_of(tmp_path, body))
    run(world.train(1))
    assert numbers(world.steps[0]) == [0, 2]
    assert totals(world.steps[0])[2] == {"unlucky": 1, "filter": 1}


@pytest.mark.parametrize(
    ("body", "expected"),
    [("True", (True, "filter")), ("False", (False, "filter")), ("(False, 'why')", (False, "why"))],
)
def test_what_a_filter_may_return(tmp_path, body, expected):
    assert filter_of(tmp_path, body)(group_of(0)) == expected


@pytest.mark.parametrize(
    "body", ["None", "1", "'yes'", "(True,)", "(1, 'why')", "(True, None)", "[]", "(True, 'a', 'b')"]
)
def test_what_a_filter_may_not_return(tmp_path, body):
    keep = filter_of(tmp_path, body)
    with pytest.raises(
        UserError, match=r"sampling\.filter=.*mine\.py:f returned .*; expected \(keep, reason\) or a bool"
    ):
        keep(group_of(0))
    with pytest.raises(UserError, match=r"sampling\.filter"):  # and the run ends with it
        run(World(sampling(), keep=keep).train(1))


def test_filters_of_ours():
    spread, none = load_filter("spread"), load_filter("none")
    assert spread(group_of(0, good=True))[0] is True and spread(group_of(0, good=False)) == (False, "no_spread")
    assert none(group_of(0, good=False)) == (True, "")
    assert spread([scored(0, 0, 0.1 + 0.2), scored(0, 1, 0.3)])[0] is True  # equality is exact
