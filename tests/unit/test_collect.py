"""The rollout phase of one controller: what a workflow may return, and what happens to what it raises."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gcore.controller.collect import collect
from gcore.controller.workflow import StageClock
from gcore.types import Prompt, RewardError, Rollout, Scored, UserError


def prompt(number: int) -> Prompt:
    return Prompt(number, number, (), "", np.array([1], np.int32))


def scored(number: int, sibling: int) -> Scored:
    none = np.zeros(0, np.float32)
    return Scored(Rollout(prompt(number), sibling, none.astype(np.int32), none, none.astype(bool), "", 0, "stop"), 1.0)


def run(workflow: Any, prompts: int = 3, least: int = 2) -> Any:
    ctx: Any = SimpleNamespace(clock=StageClock(), begin=lambda: None, least_siblings=least)
    return asyncio.run(collect(workflow, ctx, [prompt(i) for i in range(prompts)], lambda _: None))


def test_groups_come_in_prompt_order_whoever_is_first():
    async def workflow(ctx: Any, p: Prompt) -> list[Scored]:
        await asyncio.sleep(0.02 * (2 - p.id))
        return [scored(p.id, 0), scored(p.id, 1)]

    assert [group[0].rollout.prompt.id for group in run(workflow).groups] == [0, 1, 2]


def test_a_reward_that_cannot_be_had_drops_its_group_alone():
    async def workflow(ctx: Any, p: Prompt) -> list[Scored]:
        if p.id == 1:
            raise RewardError("not today")
        return [scored(p.id, 0), scored(p.id, 1)]

    found = run(workflow)
    assert found.failed == {1: "not today"} and len(found.groups) == 2


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([scored(0, 0)], "compares at least 2"),
        ([scored(0, 0), scored(0, 0)], "twice"),
        ([scored(0, 0), scored(7, 1)], "another prompt"),
        ([], "expected a non-empty list"),
        (None, "expected a non-empty list"),
        ([1.0, 2.0], "expected a non-empty list"),
    ],
)
def test_what_a_workflow_may_not_return(returned, words):
    async def workflow(ctx: Any, p: Prompt) -> Any:
        return returned

    with pytest.raises(UserError, match=words):
        run(workflow, prompts=1)


def test_one_sample_is_enough_where_nothing_is_compared():
    async def workflow(ctx: Any, p: Prompt) -> list[Scored]:
        return [scored(p.id, 0)]

    assert len(run(workflow, least=1).groups) == 3


def test_what_a_workflow_raises_comes_out_as_it_is():
    async def workflow(ctx: Any, p: Prompt) -> list[Scored]:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        run(workflow)
