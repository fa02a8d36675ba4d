"""A judge whose load changes in the middle of a run, so that slots must move. See recipes/placement.yaml.

The recipe's rewards score every response. In addition, a judge comments on it: never at first, several times later. The
comments are not used; they only create load.
"""

from __future__ import annotations

import asyncio

from gcore.protocols import Context
from gcore.types import Prompt, Rollout, Scored

JUDGE = "grader"
EARLY, LATE = 0, 8  # comments per response, in addition to the verdict
CHANGE = 64 * 20  # prompts before the load changes: twenty steps of the recipe


async def workflow(ctx: Context, prompt: Prompt) -> list[Scored]:
    group = await ctx.generate(prompt)
    comments = EARLY if prompt.id < CHANGE else LATE
    await asyncio.gather(*(comment(ctx, rollout, i) for rollout in group for i in range(comments)))
    return await ctx.reward(group)


async def comment(ctx: Context, rollout: Rollout, number: int) -> str:
    question = f"{rollout.prompt.columns['prompt']}{rollout.text}"
    return await ctx.ask(JUDGE, [{"role": "user", "content": question}], draw=rollout.sibling * LATE + number)


def anything(text: str) -> float:
    """The judge's verdict, which has weight 0 in the recipe."""
    return float(len(text))
