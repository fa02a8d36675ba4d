"""Section `sampling.curriculum`: which prompts a step draws, by how often the policy solves them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gcore.config.base import Fraction, Section


class Curriculum(Section):
    order: Literal["near_half", "easy_first"] = "near_half"
    """`near_half`: prompts are drawn at random, and those whose pass rate is near 0.5 more often: with weight
    4 p (1 - p), at least `min_weight`. `easy_first`: each pass over the prompts goes from the highest pass rate to the
    lowest."""
    pass_reward: float = 0.5
    """A response passes if its reward is at least this."""
    newest: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the newest group in the running pass rate of its prompt; the first one counts in full. 1: only the
    newest."""
    column: str | None = None
    """Column of `data.train` with a pass rate from 0 to 1 to start with, measured by another model or an earlier
    run."""
    start: Fraction = 0.5
    """Pass rate of a prompt that was never drawn and has none in `column`."""
    min_weight: Annotated[float, Field(gt=0, le=1)] = 0.1
    """`near_half`: the least weight of a prompt, so that those of pass rate 0 or 1 are tried again."""
