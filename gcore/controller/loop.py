"""The training loop. N controllers run this same program, each for its share of the prompts.

    for each step:
        rollout         generate and score groups of samples, until all controllers together have enough
        prepare         engines free their memory; each sample goes to the trainer rank that trains on it; advantages
        train           one optimizer step per mini-batch, on all trainer ranks
        update_weights  choose the engines of the next rollout and send them the new weights: version + 1
        record          one row of metrics; then evaluation, the user's function and checkpoint, when due

Controllers synchronize only in `all_gather` (called in the modules that this one uses), and exchange only metadata
there. Samples go directly from a controller to trainer ranks, weights directly from trainer ranks to engines.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from gcore.controller.collect import check_failures
from gcore.controller.prompt_ledger import Collected
from gcore.controller.record import skipped_line
from gcore.controller.services import Services
from gcore.controller.start_run import open_evaluation, open_run
from gcore.preparation.advantages import with_advantages
from gcore.preparation.samples import make_samples
from gcore.protocols import ControllerStatus, UpdateStats
from gcore.types import SampleMeta, TrainBatch


class TrainingLoop:
    """Implements protocols.Controller: one of N equal controllers."""

    def __init__(self, services: Services) -> None:
        self._services, replicas = services, services.replicas
        # Called when a replica dies, and after its restart: see replicas.py.
        self.mark_dead, self.mark_alive = replicas.mark_dead, replicas.mark_alive
        self.begin_restart, self.restore = replicas.begin_restart, replicas.restore
        self.finished_step, self.go_on = services.gate.finished_step, services.gate.go_on

    async def status(self) -> ControllerStatus:
        status = await self._services.status.take()
        return dataclasses.replace(status, unreachable=self._services.replicas.unreachable())

    async def run(self) -> None:
        """`gcore train`: the whole run."""
        services = self._services
        with services.replicas.watched():
            step = await open_run(services)  # prompts, checkpoint or warm start, first weights
            stopped = False  # by the user's function
            while step < services.config.run.total_steps and not stopped:
                step += 1
                with services.status.timed("step", step):
                    collected = await rollout(services, step)
                    # A restarted engine starts and loads weights before or after this block, not during it.
                    async with services.weights.training():
                        metas, batches = await prepare(services, step, collected)
                        stats = await train(services, step, batches)
                        await update_weights(services, step)
                await services.recorder.record_step(step, collected, metas, stats)
                score = await services.evaluator.evaluate_if_due(step)
                if stopped := await services.ends_by_user(step):
                    score = await services.evaluator.evaluate_if_due(step, last=True)
                await services.checkpointer.save_if_due(step, score, last=stopped)
            await services.close()

    async def evaluate(self) -> dict[str, Any]:
        """`gcore eval`: the engines answer the held-out prompts. There are no trainers."""
        with self._services.replicas.watched():
            step = await open_evaluation(self._services)
            row = await self._services.evaluator.evaluate(step)
            await self._services.endpoint.close()
            return row


async def rollout(services: Services, step: int) -> Collected:
    """Make this controller's groups of the step."""
    collector, placement = services.collector, services.placement
    with services.status.timed("rollout", step):
        async with placement.during(collector.progress, step):
            return await collector.step(step)


async def prepare(services: Services, step: int, collected: Collected) -> tuple[list[SampleMeta], list[TrainBatch]]:
    """The engines free their memory for the trainer. Send each sample to its trainer rank, where logprobs are computed
    if needed; then compute advantages.

    Returns the metadata of all samples of the step, and the batch of each rank. `step - 1`: the current policy version.
    """
    config, groups, algorithm = services.config, collected.groups, services.config.algorithm
    with services.status.timed("preparation", step):
        await services.placement.sleep_engines(step)
        samples = make_samples(groups, algorithm, step - 1, config.sampling.staleness, config.needs.pairs)
        metas, batches = await services.dispatcher.dispatch_samples(step, samples, config.objective)
        await check_failures(config, services.controllers, services.status.note, step, metas, collected)
        kl = await services.dispatcher.compute_logprobs(batches) if config.needs_passes and batches else []
        if config.objective != "policy":
            return metas, batches
        filled, measured = await with_advantages(batches, groups, services.advantage_settings, services.controllers, kl)
        services.status.measured(measured)
        return metas, filled


async def train(services: Services, step: int, batches: list[TrainBatch]) -> list[UpdateStats]:
    """Update the policy. Returns the statistics of each trainer rank; none if the step has no samples."""
    with services.status.timed("training", step):
        if not batches:
            return []
        stats = await services.dispatcher.update(batches)
        if line := skipped_line(step, stats, services.config.run.folder):
            services.status.note(line)
        return stats


async def update_weights(services: Services, step: int) -> None:
    """Send the new weights to the engines of the next rollout. Their version is the number of the step."""
    with services.status.timed("weights", step):
        engines = await services.placement.choose_engines(services.collector.rate)
        await services.weights.update(step, engines)
