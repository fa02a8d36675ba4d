"""The rollout phase of one controller: run the workflow of each of its prompts, all at once.

No prompt waits for another: each is generated, scored and done on its own time. A prompt whose reward cannot be had is
dropped with its whole group and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gcore.controller.workflow import SampleContext, Workflow
from gcore.types import Prompt, RewardError, Scored, UserError


@dataclass(slots=True)
class Collected:
    """Groups in prompt order; failures by prompt id; seconds in which at least one prompt was in each stage."""

    groups: list[list[Scored]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    stage_s: dict[str, float] = field(default_factory=dict)


async def collect(
    workflow: Workflow, ctx: SampleContext, prompts: Sequence[Prompt], report: Callable[[str], None]
) -> Collected:
    collected = Collected()
    results: dict[int, list[Scored]] = {}

    async def one(prompt: Prompt) -> None:
        try:
            group = await workflow(ctx, prompt)
        except RewardError as error:
            collected.failed[prompt.id] = str(error)
        else:
            results[prompt.id] = _checked(group, prompt, ctx.least_siblings)
        report(f"{len(results) + len(collected.failed)}/{len(prompts)} prompts")

    ctx.begin()
    try:
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(one(prompt))
    except* Exception as errors:
        raise errors.exceptions[0] from None
    collected.stage_s = dict(ctx.clock.seconds)
    collected.groups = [results[prompt.id] for prompt in prompts if prompt.id in results]
    return collected


def _checked(group: list[Scored], prompt: Prompt, least: int) -> list[Scored]:
    if not isinstance(group, list) or not group or not all(isinstance(s, Scored) for s in group):
        raise UserError(
            f"workflow returned {type(group).__name__} for prompt {prompt.id}; expected a non-empty list of Scored, "
            "as `await ctx.reward(group)` gives (key: workflow)"
        )
    keys = {(s.rollout.prompt.id, s.rollout.sibling) for s in group}
    if len(keys) < len(group) or any(prompt_id != prompt.id for prompt_id, _ in keys):
        raise UserError(
            f"workflow returned a sample twice, or one of another prompt, for prompt {prompt.id} (key: workflow)"
        )
    if len(group) < least:
        raise UserError(
            f"workflow returned {len(group)} sample for prompt {prompt.id}; algorithm.adv_estimator compares at least "
            f"{least} siblings (keys: workflow, algorithm.adv_estimator)"
        )
    return group
