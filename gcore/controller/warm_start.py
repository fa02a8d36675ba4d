"""The warm start: supervised steps on the answers of the dataset, before reinforcement learning.

demonstrations ──dispatch_samples (as in training)──> trainer ranks ──update ("imitation")──> row of metrics, checkpoint
"""

from __future__ import annotations

import numpy as np

from gcore.controller.checkpointing import RunPosition
from gcore.controller.services import Services
from gcore.prompts.source import PromptSource
from gcore.protocols import add_metrics
from gcore.types import Sample


async def warm_start(services: Services, source: PromptSource, done: int) -> None:
    """`done`: steps of the warm start that the restored checkpoint has completed."""
    config, group, status = services.config, services.controllers, services.status
    warm, every = config.training.warm_start, config.checkpoint.every
    if warm is None:
        return
    for step in range(done + 1, warm.steps + 1):
        status.show("warm start", f"{step - 1}/{warm.steps}")
        cursors = range((step - 1) * warm.batch_size, step * warm.batch_size)
        samples = [_demonstration(source, c) for c in cursors if c % group.size == group.rank]
        with status.timed("warm_start", step):
            _, batches = await services.dispatcher.dispatch_samples(step, samples, "imitation")
            ranks = await services.dispatcher.update(batches)
        services.recorder.write(
            {
                "phase": "warm_start",
                "step": step,
                **{name: metric.value for name, metric in add_metrics(*(rank.metrics for rank in ranks)).items()},
                "warm_start/lr": ranks[0].lr,
                "timing_s/step": status.take_seconds("warm_start"),
            }
        )
        if every and (step == warm.steps or step % every == 0):
            await services.checkpointer.save(RunPosition(step=0, warmed=step))
            status.take_seconds("checkpoint")  # not part of a step of reinforcement learning


def _demonstration(source: PromptSource, cursor: int) -> Sample:
    answer = source.demonstration(cursor)
    ones = np.ones(answer.num_steps, np.float32)
    return Sample(
        prompt_id=cursor,
        sibling=0,
        content=source.at(cursor).content.extended(answer),
        mask_S=ones > 0,
        rollout_logprobs_S=0 * ones,
    )
