"""What trainer ranks (rank.py) and critic ranks (critic_rank.py) have in common: the samples of a step, one thread that
computes, and a writer of checkpoints.

All computation runs in that thread, so that the rank can answer calls while it computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gcore.checkpoint.writer import BackgroundWriter
from gcore.config.tree import Config
from gcore.observe.trace import Tracer
from gcore.protocols import TrainerInfo
from gcore.threads import use_threads
from gcore.training import bad_batches
from gcore.training.backend import Backend, Snapshot, TrainedName
from gcore.training.micro import StepData
from gcore.training.schedule import learning_rate
from gcore.types import MicroBatch, MiniBatch, Sample, TrainBatch, UserError, Written

T = TypeVar("T")


class ComputeRank:
    """`make_backend` is called in the compute thread. The caller has set up the process group (build_ranks.py)."""

    def __init__(
        self, config: Config, make_backend: Callable[[], Backend], rank: int, threads: int, tracer: Tracer
    ) -> None:
        self._config, self._rank, self._tracer, self._data = config, rank, tracer, StepData()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._pool.submit(use_threads, threads).result()
        self.backend = self._pool.submit(make_backend).result()
        self._writer = BackgroundWriter(rank, self.backend.device, config.checkpoint.asynchronous)
        self._about = dict[str, bytes]()

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """In the compute thread, after the copy of a snapshot: every function may change or move what is copied. Even
        a pass of the reference does, which writes its adapters into the policy for a while."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._fenced, function, *args)

    def _fenced(self, function: Callable[..., T], *args: Any) -> T:
        self._writer.fence()
        return function(*args)

    async def info(self) -> TrainerInfo:
        return self.backend.info()

    async def push(self, source: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            assert sample.key not in self._data.samples, f"{sample.key} pushed twice (now by controller {source})"
            self._data.samples[sample.key] = sample

    async def snapshot(self) -> int:
        return await self._in_thread(self._stage)

    def _stage(self) -> int:
        found = self._snapshot()
        self._about = dict(found.about)
        return self._writer.stage(found.shards, found.versions)

    def _snapshot(self) -> Snapshot:
        raise NotImplementedError

    async def write(self, folder: str) -> Written:
        with self._tracer.span("write", lane="checkpoint"):
            return await asyncio.wrap_future(self._writer.write(Path(folder), self._about))

    async def abandon(self) -> None:
        await asyncio.to_thread(self._writer.abandon)

    async def load(self, folder: str, begun: bool = True) -> None:
        await self.abandon()
        await self._in_thread(self._load, Path(folder), begun)

    def _load(self, folder: Path, begun: bool) -> None:
        raise NotImplementedError


def micros_of(batch: TrainBatch) -> list[MicroBatch]:
    return [micro for mini in batch.mini_batches for micro in mini.micro_batches]


def updates_of(config: Config, batch: TrainBatch) -> Iterator[tuple[int, MiniBatch]]:
    """The optimizer steps of a training step, numbered."""
    epochs = config.algorithm.epochs if batch.objective == "policy" else 1
    yield from enumerate(mini for _ in range(epochs) for mini in batch.mini_batches)


def learning_rate_of(config: Config, batch: TrainBatch, number: int, peak: float, updates: int) -> float:
    """For update `number` of a step. Progress counts steps: a step may have fewer mini-batches, or none."""
    training, algorithm = config.training, config.algorithm
    planned, actual = algorithm.mini_batches * algorithm.epochs, len(batch.mini_batches) * algorithm.epochs
    return learning_rate(
        updates,
        peak=peak,
        total=config.run.total_steps * planned,
        warmup=training.warmup_steps,
        schedule=training.schedule,
        min_ratio=training.min_lr_ratio,
        position=(batch.step - 1) * planned + number * planned / actual,
    )


def count_bad(config: Config, batch: TrainBatch, finite: bool, before: int, of_critic: bool = False) -> int:
    """Updates in a row with bad gradients, of policy or critic. `before`: without this one."""
    in_a_row = 0 if finite else before + 1
    if in_a_row >= config.training.max_bad_updates:
        found = "" if of_critic else f"; the samples are in {config.run.folder / bad_batches.FOLDER}"
        raise UserError(
            f"{in_a_row} updates in a row{' of the critic' if of_critic else ''} had NaN or infinite gradients (step "
            f"{batch.step}{found}); lower {'critic' if of_critic else 'training'}.lr, or raise "
            "training.max_bad_updates to skip more"
        )
    return in_a_row


def check_weights(
    config: Config, backend: Backend, batch: TrainBatch, network: TrainedName = "policy", of_critic: bool = False
) -> None:
    """After the updates of a training step; a collective. UserError if the weights are ruined: all later updates would
    be skipped. They must reach neither engines nor checkpoints."""
    if not backend.sum_over_ranks(np.array([not backend.is_finite(network)], np.float64))[0]:
        return
    training = config.training
    key, lr = ("critic.lr", config.critic.lr) if of_critic else ("training.lr", training.lr)
    if batch.objective == "imitation" and training.warm_start is not None:
        key, lr = "training.warm_start.lr", training.warm_start.lr
    raise UserError(
        f"the weights of the {'critic' if of_critic else 'policy'} became NaN or infinite in the update of step "
        f"{batch.step} ({key}={lr:g}); expected finite weights: lower {key}, and check training.eps and weight_decay"
    )
