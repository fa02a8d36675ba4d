"""A trainer rank: it receives samples, fills their columns, and updates the policy through a backend.

    push (samples by key, from every controller) ──> prepare: passes fill columns (old and reference logprobs)
        └──KL of each sample──> controllers ──advantage of each sample──> update ──> weight_bucket

All computation runs in one separate thread, so that the rank can answer calls while it computes. The rank does not
know how networks are sharded or computed: see backend.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from gcore.checkpoint.writer import BackgroundWriter
from gcore.config.tree import Config
from gcore.observe.trace import Tracer
from gcore.protocols import Receivers, TrainerInfo, UpdateStats, WeightPlan, Weights
from gcore.training import bad_batches, losses, objective
from gcore.training.backend import Backend, NetworkName
from gcore.training.micro import ColumnName, StepData
from gcore.training.schedule import learning_rate
from gcore.training.step_advantages import step_advantages
from gcore.types import Floats, Key, MiniBatch, Sample, TrainBatch, Written
from gcore.weights.publisher import WeightPublisher

T = TypeVar("T")


class TrainerRank:
    """Implements protocols.Trainer. `make_backend` is called in the compute thread. The caller has set up the process
    group (see controller/build.py)."""

    def __init__(
        self,
        config: Config,
        make_backend: Callable[[], Backend],
        rank: int,
        threads: int,
        tracer: Tracer,
        publisher: WeightPublisher | None = None,
    ) -> None:
        self._config, self._rank, self._tracer = config, rank, tracer
        self._publisher = publisher or WeightPublisher(rank)
        self._data = StepData()
        self.updates = 0  # optimizer steps since `begin`, without skipped ones; determines the warm-up
        self._bad_in_a_row = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._pool.submit(torch.set_num_threads, threads).result()
        self.backend = self._pool.submit(make_backend).result()
        self._writer, self._about = BackgroundWriter(rank, self.backend.device), dict[str, bytes]()

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """In the compute thread, after the copy of a snapshot: every function may change or move what is copied. Even
        a pass of the reference does, which writes its adapters into the policy for a while."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._fenced, function, *args)

    def _fenced(self, function: Callable[..., T], *args: Any) -> T:
        self._writer.fence()
        return function(*args)

    # ---- protocol -------------------------------------------------------------------------------------------------

    async def info(self) -> TrainerInfo:
        return self.backend.info()

    async def push(self, source: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            assert sample.key not in self._data.samples, f"{sample.key} pushed twice (now by controller {source})"
            self._data.samples[sample.key] = sample

    async def begin(self) -> None:
        """Reinforcement learning starts: the current policy is the KL reference, and the optimizer is reset."""
        await self._in_thread(self._begin)

    async def prepare(self, batch: TrainBatch) -> Mapping[Key, float]:
        return await self._in_thread(self._prepare, batch)

    async def update(self, batch: TrainBatch) -> UpdateStats:
        return await self._in_thread(self._update, batch)

    async def weight_plan(self) -> WeightPlan:
        return await self._in_thread(lambda: self._publisher.plan(self.backend.weights()))

    async def weight_bucket(self, index: int, receivers: Receivers) -> Weights:
        return await self._in_thread(self._weight_bucket, index, receivers)

    async def snapshot(self) -> int:
        return await self._in_thread(self._snapshot)

    async def write(self, folder: str) -> Written:
        with self._tracer.span("write", lane="checkpoint"):
            return await asyncio.wrap_future(self._writer.write(Path(folder), self._about))

    async def abandon(self) -> None:
        await asyncio.to_thread(self._writer.abandon)

    async def load(self, folder: str, begun: bool = True) -> None:
        await self.abandon()
        await self._in_thread(self._load, Path(folder), begun)

    # ---- the compute thread ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.backend.begin(reference=self._config.algorithm.kl_coef > 0)
        self.updates = self._bad_in_a_row = 0

    def _prepare(self, batch: TrainBatch) -> dict[Key, float]:
        algorithm = self._config.algorithm
        micros = [micro for mini in batch.mini_batches for micro in mini.micro_batches]
        if passes := self._passes(batch):
            with self._tracer.span("logprobs", step=batch.step):
                for column, network in passes.items():
                    self._data.columns[column] = self.backend.logprobs(network, micros, self._data)
        if not algorithm.kl_in_reward or algorithm.kl_per_step:
            return {}
        return {key: float(kl_S[self._data.samples[key].mask_S].sum()) for key, kl_S in self._kl(batch).items()}

    def _passes(self, batch: TrainBatch) -> dict[ColumnName, NetworkName]:
        """Forward passes before the update, by the column that each one fills. Old logprobs are needed if a step has
        several mini-batches, because the policy changes between them, and for the KL in the reward."""
        algorithm, passes = self._config.algorithm, dict[ColumnName, NetworkName]()
        if batch.objective != "policy":
            return passes
        if len(batch.mini_batches) > 1 or algorithm.kl_in_reward:
            passes["old_logprobs"] = "policy"
        if algorithm.kl_coef > 0:
            passes["ref_logprobs"] = "reference"
        return passes

    def _kl(self, batch: TrainBatch) -> dict[Key, Floats]:
        """KL of each step between the policy before the update and the reference."""
        old, ref = (self._data.columns[name] for name in ("old_logprobs", "ref_logprobs"))
        estimator = self._config.algorithm.kl_estimator
        return {key: losses.kl_penalty(old[key], ref[key], estimator).double().cpu().numpy() for key in batch.keys}

    def _update(self, batch: TrainBatch) -> UpdateStats:
        self._publisher.release()
        if batch.objective == "policy":
            self._fill_advantages(batch)
        totals = UpdateStats()
        with self._tracer.span("update", step=batch.step):
            for number in range(len(batch.mini_batches)):
                totals += self._mini_batch(batch, number)
        self._tracer.flush()
        self._data.clear()
        self.backend.free_memory(weights=False)
        return totals

    def _fill_advantages(self, batch: TrainBatch) -> None:
        algorithm = self._config.algorithm
        kl = self._kl(batch) if algorithm.kl_per_step else {}
        advantages = {key: batch.advantages[key] for key in batch.keys}
        micros = [micro for mini in batch.mini_batches for micro in mini.micro_batches]
        holders = {key: micro.context for micro in micros for row in micro.rows for key in row}
        sum_over_ranks = self.backend.sum_over_ranks
        found = step_advantages(self._data.samples, advantages, kl, algorithm, sum_over_ranks, holders)
        self._data.columns["advantages"] = {
            key: torch.from_numpy(values).to(self.backend.device) for key, values in found.items()
        }

    def _mini_batch(self, batch: TrainBatch, number: int) -> UpdateStats:
        mini, lr = batch.mini_batches[number], self._learning_rate(batch, number)
        wall, busy = time.perf_counter(), time.thread_time()  # a thread that waits for another rank uses no CPU time
        metrics = self.backend.forward_backward(mini.micro_batches, self._data, self._objective(batch, mini))
        grad_norm = self.backend.step(lr)  # on a GPU it ends with a value that is read: the passes are done
        wall, busy = time.perf_counter() - wall, time.thread_time() - busy
        finite = math.isfinite(grad_norm)
        self.updates += finite
        self._bad_in_a_row = 0 if finite else self._bad_in_a_row + 1
        if not finite:
            self._dump(batch, number)
        if self._bad_in_a_row >= self._config.training.max_bad_updates:
            raise FloatingPointError(
                f"{self._bad_in_a_row} updates in a row had NaN or infinite gradients (step {batch.step}; the samples "
                f"are in {self._config.run.folder / bad_batches.FOLDER}); lower training.lr, or raise "
                "training.max_bad_updates to skip more"
            )
        busy = busy if self.backend.device.type == "cpu" else 0.0
        return UpdateStats(1, int(not finite), grad_norm if finite else 0.0, lr, metrics, wall, busy)

    def _objective(self, batch: TrainBatch, mini: MiniBatch) -> objective.Objective:
        if batch.objective == "imitation":
            return objective.imitation(mini)
        return objective.policy(self._config.algorithm, mini, self._config.generation.max_response_length)

    def _dump(self, batch: TrainBatch, number: int) -> None:
        """Write the samples of this rank to a file. All ranks call this, because the forward pass is collective."""
        micros, folder = batch.mini_batches[number].micro_batches, self._config.run.folder
        now = self.backend.logprobs("policy", micros, self._data)
        if bad_batches.may_dump(folder, self._rank):
            samples = [self._data.samples[key] for micro in micros for row in micro.rows for key in row]
            columns = {"logprobs": now, **{str(name): values for name, values in self._data.columns.items()}}
            bad_batches.dump(folder, (batch.step, number + 1, self._rank), samples, columns)

    def _learning_rate(self, batch: TrainBatch, number: int) -> float:
        """For mini-batch `number` of a step. Progress counts steps: a step may have fewer mini-batches, or none."""
        training, planned = self._config.training, self._config.algorithm.mini_batches
        if batch.objective == "imitation":
            assert training.warm_start is not None
            steps = training.warm_start.steps
            return learning_rate(
                self.updates,
                peak=training.warm_start.lr,
                total=steps,
                warmup=max(1, steps // 10),
                schedule="linear",
                position=batch.step - 1,
            )
        return learning_rate(
            self.updates,
            peak=training.lr,
            total=self._config.run.steps * planned,
            warmup=training.warmup_steps,
            schedule=training.schedule,
            min_ratio=training.min_lr_ratio,
            position=(batch.step - 1) * planned + number * planned / len(batch.mini_batches),
        )

    def _weight_bucket(self, index: int, receivers: Receivers) -> Weights:
        parameters = self.backend.weights()
        bucket = self._publisher.bucket(parameters, index, receivers)
        if index == self._publisher.plan(parameters).num_buckets - 1:
            self.backend.free_memory(weights=True)
        return bucket

    def _snapshot(self) -> int:
        counters = {"updates": self.updates, "bad_in_a_row": self._bad_in_a_row}
        found = self.backend.snapshot(counters)
        self._about = dict(found.about)
        return self._writer.stage(found.shards, found.versions)

    def _load(self, folder: Path, begun: bool) -> None:
        self._publisher.release()
        self._data.clear()
        # a warm start has no reference until `begin`
        counters = self.backend.load(folder, reference=begun and self._config.algorithm.kl_coef > 0)
        self.updates, self._bad_in_a_row = counters["updates"], counters["bad_in_a_row"]
