"""Best of n, selected by a judge, for tasks that a rule cannot score.

Each trained sample is the one with the judge's best verdict among CANDIDATES. The rewards of the recipe then score the
selected samples. The weight of the judge in the recipe may also be 0.

gcore train recipes/panel.yaml workflow=examples/best_of_n.py:workflow
"""

from __future__ import annotations

from gcore.protocols import Context
from gcore.types import Prompt, Rollout, Scored

JUDGE = "checker"
WINNERS, CANDIDATES = 4, 4


async def workflow(ctx: Context, prompt: Prompt) -> list[Scored]:
    sampled = await ctx.generate(prompt, n=WINNERS * CANDIDATES)
    verdicts = await ctx.score(JUDGE, sampled)
    rounds = [
        list(zip(sampled[i : i + CANDIDATES], verdicts[i : i + CANDIDATES], strict=True)) for i in starts(sampled)
    ]
    return await ctx.reward([max(pairs, key=lambda pair: pair[1] or 0.0)[0] for pairs in rounds])


def starts(sampled: list[Rollout]) -> range:
    return range(0, len(sampled), CANDIDATES)
