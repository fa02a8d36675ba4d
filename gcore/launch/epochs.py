"""The length of a run: run.epochs -> run.steps, before any process starts.

rows of data.train ──measure, as controllers do──> prompts that fit ──x epochs / prompts_per_step──> steps
"""

from __future__ import annotations

import math

from gcore.config.run import Run
from gcore.config.tree import Config
from gcore.modalities.table import kind_of
from gcore.prompts.source import check_bad_rows, measure, rows_of


def with_steps(config: Config) -> tuple[Run, list[str]]:
    """The section `run` with a number in `steps`, and notes for the user."""
    run = config.run
    if run.epochs is None or run.steps == 0:
        return run.model_copy(update={"steps": run.total_steps}), []
    num_prompts, per_step = count_prompts(config), config.sampling.prompts_per_step
    steps = steps_of(run.epochs, num_prompts, per_step)
    what, note = "rows" if config.is_offline else "prompts", ""
    if run.steps != "auto" and run.steps < steps:
        note, steps = f", but run.steps={run.steps} ends it before", run.steps
    elif config.sampling.filter != "none":
        note = f"; {what} that sampling.filter drops are drawn in addition"
    return run.model_copy(update={"steps": steps}), [
        f"{run.epochs:g} epoch(s) of {num_prompts:,} {what} that fit = "
        f"{steps_of(run.epochs, num_prompts, per_step):,} steps of {per_step}{note}"
    ]


def steps_of(epochs: float, num_prompts: int, per_step: int) -> int:
    """The last step begins the next epoch if it is not whole: no prompt is left out. steps_of(2, 50, 8) == 13"""
    prompts = math.ceil(round(epochs * num_prompts, 6))  # 0.07 * 100 is a bit more than 7
    return max(1, -(-prompts // per_step))


def count_prompts(config: Config) -> int:
    """The prompts of an epoch: len(PromptSource) of the run."""
    templater = kind_of(config).templater("train")
    rows, answers = rows_of(config, "train", templater)
    measured = measure(rows, templater, config.data.max_prompt_length, answers=answers)
    check_bad_rows(measured.bad, len(rows), config.data.media.max_bad_rows, templater.key)
    return len(measured.kept)
