"""The training loop. N controllers run this same program, each on its share of the samples.

    for every step:
        rollout      my prompts: generate, reward, keep or draw another, until all have enough together
        preparation  advantages; agree on a layout; samples move to the ranks that train on them
        training     one optimizer step per mini-batch     (global denominators)
        weights      choose the engines of the next rollout; trainer -> those engines, version + 1
        record       one row of metrics; evaluation and checkpoint when due

Controllers meet only where `all_gather` stands (in dispatch.py and below), and only metadata crosses there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gcore.clients import EngineClient, TrainerClient
from gcore.config.tree import Config
from gcore.controller.collect import Collected, Filter
from gcore.controller.record import skipped_line
from gcore.controller.session import Session
from gcore.controller.workflow import Workflow
from gcore.observe.trace import Tracer
from gcore.placement.grid import DeviceGrid
from gcore.preparation.samples import charge_kl, make_samples
from gcore.protocols import Group, Rewarder, UpdateStats
from gcore.types import SampleMeta, TrainBatch


class Controller:
    """One of N equal controllers. `run` is the whole program; `status` is what the progress view asks for."""

    def __init__(
        self,
        config: Config,
        group: Group,
        engines: Sequence[EngineClient],
        trainers: Sequence[TrainerClient],
        tokenizer: Any,
        rewarder: Rewarder,
        workflow: Workflow,
        keep: Filter,
        sleep_level: int,
        tracer: Tracer,
        grid: DeviceGrid | None = None,
    ) -> None:
        self.config, self.group = config, group
        roles = engines, trainers, tokenizer, rewarder, workflow
        self.session = Session(config, group, *roles, keep, sleep_level, tracer, grid)
        replicas = self.session.replicas
        self.status, self.mark_dead, self.restore, self.mark_alive = (
            self.session.status,
            replicas.mark_dead,
            replicas.restore,
            replicas.mark_alive,
        )

    async def run(self) -> None:
        session, steps = self.session, self.config.run.steps
        await session.open()
        while session.step < steps:
            step = session.step + 1
            with session.timed("step"):
                collected = await self.rollout(step)
                async with session.replicas.trainers_in_use:
                    metas, batches = await self.preparation(step, collected)
                    stats = await self.training(step, batches)
                    await self.weights(step)
            await session.record(step, collected, metas, stats)
            session.step = step
            await session.evaluate_if_due()
            await session.checkpoint_if_due()
        await session.close()

    async def evaluate(self) -> dict[str, Any]:
        """`gcore eval`: no trainer, the engines answer the held-out prompts."""
        await self.session.open()
        return await self.session.evaluate()

    async def rollout(self, step: int) -> Collected:
        with self.session.timed("rollout", step):
            async with self.session.placing(step):
                collected = await self.session.collector.step(step)
            await self.session.rest(step)
            return collected

    async def preparation(self, step: int, collected: Collected) -> tuple[list[SampleMeta], list[TrainBatch]]:
        with self.session.timed("preparation", step):
            algorithm, groups = self.config.algorithm, collected.groups
            longest, staleness = self.config.generation.max_response_length, self.config.sampling.staleness
            samples = await make_samples(groups, algorithm, self.group, step - 1, staleness, longest)
            metas, batches = await self.session.dispatcher.dispatch_samples(step, samples)
            await self.session.check_failures(step, metas, collected)
            if algorithm.needs_logprobs and batches:
                kl = await self.session.dispatcher.prepare(batches)
                if algorithm.kl_in_reward:
                    batches = await charge_kl(groups, algorithm, self.group, longest, kl, batches)
            return metas, batches

    async def training(self, step: int, batches: list[TrainBatch]) -> list[UpdateStats]:
        with self.session.timed("training", step):
            if not batches:  # no group of this step was worth training on
                return []
            ranks = await self.session.dispatcher.update(batches)
            if line := skipped_line(step, ranks, self.session.folder):
                self.session.note(line)
            return ranks

    async def weights(self, step: int) -> None:
        with self.session.timed("weights", step):
            engines = await self.session.choose_placement()
            await self.session.dispatcher.update_weights(step, engines)
            self.session.collector.version = step
