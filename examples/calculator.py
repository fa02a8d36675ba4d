"""A calculator over several turns: the policy writes [46+85], the tool answers 131, the policy continues.

The tool's answer is masked from the loss; the policy's own tokens are never tokenised again. The alphabet of a model
built from scratch must contain the brackets and the semicolon:

gcore train recipes/quickstart.yaml workflow=examples/calculator.py:workflow model.build.alphabet='0123456789+=[];' \
    generation.max_response_length=16 model.build.max_length=40
"""

from __future__ import annotations

import asyncio
import re

from gcore.protocols import Context
from gcore.types import Prompt, Rollout, Scored

TURNS = 3
CALL = re.compile(r"\[(\d{1,4})\+(\d{1,4})\]$")


async def workflow(ctx: Context, prompt: Prompt) -> list[Scored]:
    group = await ctx.generate(prompt, stop="]")
    group = await asyncio.gather(*(with_tool(ctx, rollout) for rollout in group))
    return await ctx.reward(group)


async def with_tool(ctx: Context, rollout: Rollout) -> Rollout:
    for _ in range(TURNS):
        call = CALL.search(rollout.text)
        if call is None:
            break
        rollout = await ctx.proceed(rollout, f"{int(call[1]) + int(call[2])};", stop="]")
    return rollout


def final_answer(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 if the text after the tool's last answer (or the whole text, without one) is right."""
    return [float(c.rpartition(";")[2].strip() == a) for c, a in zip(completions, answer, strict=True)]
