"""The rollout phase of one controller: run the workflow of each of its prompts, all at once.

No prompt waits for another: each is generated, scored and done on its own time. A prompt whose reward cannot be had is
dropped with its whole group and counted.
"""

from __future__ import annotations

import asyncio
import time
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
            results[prompt.id] = _checked(group, prompt)
        report(f"{len(results) + len(collected.failed)}/{len(prompts)} prompts")

    watch = asyncio.create_task(_stage_clock(ctx, collected.stage_s))
    try:
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(one(prompt))
    except* Exception as errors:
        raise errors.exceptions[0] from None
    finally:
        watch.cancel()
    collected.groups = [results[prompt.id] for prompt in prompts if prompt.id in results]
    return collected


def _checked(group: list[Scored], prompt: Prompt) -> list[Scored]:
    if not isinstance(group, list) or not group or not all(isinstance(s, Scored) for s in group):
        raise UserError(
            f"workflow returned {type(group).__name__} for prompt {prompt.id}; expected a non-empty list of Scored, "
            "as `await ctx.reward(group)` gives (key: workflow)"
        )
    return group


async def _stage_clock(ctx: SampleContext, stage_s: dict[str, float], tick: float = 0.005) -> None:
    """Stages overlap, so their times are sampled: how long was anything in generation, how long in rewarding."""
    last = time.perf_counter()
    while True:
        await asyncio.sleep(tick)
        now = time.perf_counter()
        for stage, count in ctx.in_flight.items():
            stage_s[stage] = stage_s.get(stage, 0.0) + (now - last) * (count > 0)
        last = now
