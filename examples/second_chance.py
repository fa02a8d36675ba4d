"""A custom workflow and reward: problems that no sample of the group solved are tried again at a higher temperature.

gcore train recipes/quickstart.yaml workflow=examples/second_chance.py:workflow
"""

from __future__ import annotations

from gcore.protocols import Context
from gcore.types import Prompt, Scored


async def workflow(ctx: Context, prompt: Prompt) -> list[Scored]:
    scored = await ctx.reward(await ctx.generate(prompt))
    if all(s.reward == 0 for s in scored):
        scored = await ctx.reward(await ctx.generate(prompt, temperature=1.3))
    return scored


def close(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[float]:
    """A reward with TRL's signature: 1 for the right number, less for more distant ones, 0 if it is not a number."""
    return [_closeness(c, a) for c, a in zip(completions, answer, strict=True)]


def _closeness(completion: str, answer: str) -> float:
    try:
        return 1 / (1 + abs(int(completion) - int(answer)))
    except ValueError:
        return 0.0
