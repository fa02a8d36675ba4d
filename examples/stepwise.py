"""Stepwise generation: a scalar reward model selects the branch that continues.

After every CHUNK tokens a sample forks into BRANCHES continuations. The reward model scores them, and the best one
continues. All samples of all prompts run concurrently, without a barrier.

gcore train recipes/panel.yaml workflow=examples/stepwise.py:workflow
"""

from __future__ import annotations

import asyncio

from gcore.protocols import Context
from gcore.types import Prompt, Rollout, Scored

SCORER = "scorer"
CHUNK, BRANCHES = 2, 3


async def workflow(ctx: Context, prompt: Prompt) -> list[Scored]:
    beginnings = await ctx.generate(prompt, max_tokens=CHUNK)
    group = await asyncio.gather(*(grow(ctx, rollout) for rollout in beginnings))
    return await ctx.reward(group)


async def grow(ctx: Context, rollout: Rollout) -> Rollout:
    while rollout.finish == "length":  # the chunk is full; a complete answer ends with "stop"
        branches = await ctx.branch(rollout, BRANCHES, max_tokens=CHUNK)
        if branches[0].content.num_steps == rollout.content.num_steps:
            break  # the response has its maximum length
        scores = await ctx.score(SCORER, branches)
        rollout = max(zip(branches, scores, strict=True), key=lambda pair: pair[1] or 0.0)[0]
    return rollout
