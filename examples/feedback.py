"""A second attempt after feedback: a judge comments on the first answer, and the policy answers again.

The judge's text is masked from the loss; both answers are trained on. Rewards that read the last number of the text,
such as gcore.rewarding.rules:last_number, score the second attempt.

gcore train recipes/panel.yaml workflow=examples/feedback.py:workflow
"""

from __future__ import annotations

import asyncio

from gcore.protocols import Context
from gcore.types import Prompt, Rollout, Scored

JUDGE = "checker"


async def workflow(ctx: Context, prompt: Prompt) -> list[Scored]:
    first = await ctx.generate(prompt)
    second = await asyncio.gather(*(retry(ctx, rollout) for rollout in first))
    return await ctx.reward(second)


async def retry(ctx: Context, first: Rollout) -> Rollout:
    question = f"{first.prompt.columns['prompt']}{first.text}"
    feedback = await ctx.ask(JUDGE, [{"role": "user", "content": question}], draw=first.sibling)
    return await ctx.proceed(first, [{"role": "user", "content": feedback}])
