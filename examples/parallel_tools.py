"""Several tool calls in one turn: the policy writes [3+4][5+6], both run at once, and the results follow in order.

A model with a chat template for tools needs neither `parse` nor `feedback`: `await use_tools(ctx, prompt, [add])`.

gcore train recipes/quickstart.yaml workflow=examples/parallel_tools.py:workflow \
    model.build.alphabet='0123456789+=[];' generation.max_response_length=16 model.build.max_length=40
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gcore.protocols import Context
from gcore.types import Prompt, Scored
from gcore.workflows import ToolCall, use_tools

CALL = re.compile(r"\[(\d{1,4})\+(\d{1,4})\]")


async def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


def calls_of(text: str) -> list[ToolCall]:
    return [ToolCall("add", {"a": int(a), "b": int(b)}) for a, b in CALL.findall(text)]


def results(texts: Sequence[str]) -> str:
    return ";".join(texts) + ";"


async def workflow(ctx: Context, prompt: Prompt) -> list[Scored]:
    group = await use_tools(ctx, prompt, [add], max_turns=2, parse=calls_of, feedback=results, describe=False)
    return await ctx.reward(group)
