"""The training loop. N controllers run this same program, each on its share of the samples.

    for every step:
        rollout      my prompts: generate, reward        (no controller waits for another)
        preparation  advantages; agree on a layout; samples move to the ranks that train on them
        training     one optimizer step a mini-batch     (global denominators)
        weights      trainer -> engines, version + 1
        record       one row of metrics; evaluation and checkpoint when due

Controllers meet only where `all_gather` stands (in dispatch.py and below), and only metadata crosses there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gcore.config.tree import Config
from gcore.controller.collect import Collected, collect
from gcore.controller.session import Session
from gcore.controller.workflow import Workflow
from gcore.observe.trace import Tracer
from gcore.preparation.samples import make_samples
from gcore.protocols import Group, Handle, Rewarder
from gcore.types import Prompt, SampleMeta, TrainBatch


class Controller:
    """One of N equal controllers. `run` is the whole program; `status` is what the progress view asks for."""

    def __init__(
        self,
        config: Config,
        group: Group,
        engines: Sequence[Handle],
        trainers: Sequence[Handle],
        tokenizer: Any,
        rewarder: Rewarder,
        workflow: Workflow,
        tracer: Tracer,
    ) -> None:
        self.config, self.group, self.workflow = config, group, workflow
        self.session = Session(config, group, engines, trainers, tokenizer, rewarder, workflow, tracer)
        self.status = self.session.status

    async def run(self) -> None:
        session, steps = self.session, self.config.run.steps
        await session.open()
        while session.step < steps:
            step = session.step + 1
            with session.timed("step"):
                collected = await self.rollout(step)
                metas, batches = await self.preparation(step, collected)
                stats = await self.training(step, batches)
                await self.weights(step)
            await session.record(step, collected, metas, stats)
            session.step, session.cursor = step, session.cursor + self.config.sampling.prompts_per_step
            await session.evaluate_if_due()
            await session.checkpoint_if_due()
        await session.close()

    async def evaluate(self) -> dict[str, Any]:
        """`gcore eval`: no trainer, the engines answer the held-out prompts."""
        await self.session.open()
        return await self.session.evaluate()

    async def rollout(self, step: int) -> Collected:
        with self.session.timed("rollout", step):
            return await collect(self.workflow, self.session.ctx, self.my_prompts(), self.session.report)

    async def preparation(self, step: int, collected: Collected) -> tuple[list[SampleMeta], list[TrainBatch]]:
        with self.session.timed("preparation", step):
            estimator = self.config.algorithm.adv_estimator
            samples = await make_samples(collected.groups, estimator, self.group, version=step - 1)
            metas, batches = await self.session.dispatcher.hand_over(step, samples)
            await self.session.check_failures(step, metas, collected)
            if self.config.algorithm.needs_logprobs:
                await self.session.dispatcher.on_ranks("prepare", [(batch,) for batch in batches])
            return metas, batches

    async def training(self, step: int, batches: list[TrainBatch]) -> list[dict[str, float]]:
        with self.session.timed("training", step):
            return await self.session.dispatcher.on_ranks("update", [(batch,) for batch in batches])

    async def weights(self, step: int) -> None:
        with self.session.timed("weights", step):
            await self.session.dispatcher.sync_weights(version=step)

    def my_prompts(self) -> list[Prompt]:
        """The run's prompts stand in one global order; controller r takes every N-th. So order does not depend on N."""
        cursors = range(self.session.cursor, self.session.cursor + self.config.sampling.prompts_per_step)
        return [self.session.source.at(c) for c in cursors if c % self.group.size == self.group.rank]
