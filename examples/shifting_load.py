"""A judge whose work changes in the middle of a run: who has which slots must follow. See recipes/placement.yaml.

Every response is scored by the recipe's rewards. Besides, a judge is asked to comment on it: not at all at first, many
times later. What it says is not used here; the load is the point.
"""

from __future__ import annotations

import asyncio

from gcore.protocols import Context
from gcore.types import Prompt, Rollout, Scored

JUDGE = "critic"
EARLY, LATE = 0, 8  # comments on a response, besides the verdict
TURN = 64 * 20  # prompts before the load changes: twenty steps of the recipe


async def workflow(ctx: Context, prompt: Prompt) -> list[Scored]:
    group = await ctx.generate(prompt)
    comments = EARLY if prompt.id < TURN else LATE
    await asyncio.gather(*(comment(ctx, rollout, i) for rollout in group for i in range(comments)))
    return await ctx.reward(group)


async def comment(ctx: Context, rollout: Rollout, number: int) -> str:
    question = f"{rollout.prompt.columns['prompt']}{rollout.text}"
    return await ctx.ask(JUDGE, [{"role": "user", "content": question}], draw=rollout.sibling * LATE + number)


def anything(text: str) -> float:
    """The critic's verdict, which weighs nothing in the recipe."""
    return float(len(text))
