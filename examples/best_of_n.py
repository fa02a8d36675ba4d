"""Best of n, chosen by a judge: a rule would not do where only another model can tell good from better.

Each sample that is trained on is the one a judge likes best among CANDIDATES. The rewards of the recipe then score the
winners; the judge named here may or may not be one of the weights that count.

gcore train recipes/panel.yaml workflow=examples/best_of_n.py:workflow
"""

from __future__ import annotations

from gcore.protocols import Context
from gcore.types import Prompt, Rollout, Scored

JUDGE = "checker"
WINNERS, CANDIDATES = 4, 4


async def workflow(ctx: Context, prompt: Prompt) -> list[Scored]:
    drawn = await ctx.generate(prompt, n=WINNERS * CANDIDATES)
    verdicts = await ctx.score(JUDGE, drawn)
    heats = [list(zip(drawn[i : i + CANDIDATES], verdicts[i : i + CANDIDATES], strict=True)) for i in starts(drawn)]
    return await ctx.reward([max(heat, key=lambda pair: pair[1] or 0.0)[0] for heat in heats])


def starts(drawn: list[Rollout]) -> range:
    return range(0, len(drawn), CANDIDATES)
