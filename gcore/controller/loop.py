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

from typing import Any

from gcore.controller.collect import Collected
from gcore.controller.failures import check_failures
from gcore.controller.opening import open_evaluation, open_run
from gcore.controller.record import skipped_line
from gcore.controller.services import Services
from gcore.controller.setup import Setup
from gcore.preparation.samples import charge_kl, make_samples
from gcore.protocols import UpdateStats
from gcore.types import SampleMeta, TrainBatch


class Controller:
    """One of N equal controllers. The driver calls its methods by name; `run` is the whole program."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.status = setup.status.take
        self.mark_dead, self.mark_alive = setup.replicas.mark_dead, setup.replicas.mark_alive
        self.restore = setup.replicas.restore

    async def run(self) -> None:
        with self._setup.replicas.watched():
            services, step = await open_run(self._setup)  # prompts, checkpoint or warm start, first weights
            while step < services.config.run.steps:
                step += 1
                with services.status.timed("step", step):
                    collected = await rollout(services, step)
                    async with services.weights.trainers_in_use:
                        metas, batches = await prepare(services, step, collected)
                        stats = await train(services, step, batches)
                        await update_weights(services, step)
                await services.recorder.record_step(step, collected, metas, stats)
                await services.evaluator.evaluate_if_due(step)
                await services.checkpointer.save_if_due(step)
            await services.close()

    async def evaluate(self) -> dict[str, Any]:
        """`gcore eval`: no trainer, the engines answer the held-out prompts."""
        with self._setup.replicas.watched():
            evaluator = await open_evaluation(self._setup)
            return await evaluator.evaluate(step=0)


async def rollout(services: Services, step: int) -> Collected:
    """This controller's groups of the step. Then the engines free their memory for the trainer."""
    collector, placement = services.collector, services.placement
    with services.status.timed("rollout", step):
        async with placement.during(collector.progress, step):
            collected = await collector.step(step)
        await placement.rest(step)
        return collected


async def prepare(services: Services, step: int, collected: Collected) -> tuple[list[SampleMeta], list[TrainBatch]]:
    """The metadata of all samples of the step, and the batch of each trainer rank. The samples are at their ranks."""
    config, group, groups = services.config, services.group, collected.groups
    algorithm, longest = config.algorithm, config.generation.max_response_length
    with services.status.timed("preparation", step):
        samples = await make_samples(groups, algorithm, group, step - 1, config.sampling.staleness, longest)
        metas, batches = await services.dispatcher.dispatch_samples(step, samples)
        await check_failures(services, step, metas, collected)
        if algorithm.needs_logprobs and batches:
            kl = await services.dispatcher.prepare(batches)
            if algorithm.kl_in_reward:
                batches = await charge_kl(groups, algorithm, group, longest, kl, batches)
        return metas, batches


async def train(services: Services, step: int, batches: list[TrainBatch]) -> list[UpdateStats]:
    """Statistics of each trainer rank; none where no group of the step was worth training on."""
    with services.status.timed("training", step):
        if not batches:
            return []
        ranks = await services.dispatcher.update(batches)
        if line := skipped_line(step, ranks, services.config.run.folder):
            services.status.note(line)
        return ranks


async def update_weights(services: Services, step: int) -> None:
    with services.status.timed("weights", step):
        engines = await services.placement.begin(services.collector.rate)  # that serve the next rollout
        await services.dispatcher.update_weights(step, engines)
