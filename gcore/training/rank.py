"""A trainer rank: it receives samples, fills their columns, and updates the policy and the critic through a backend.

    push (samples by key, from every controller) ──> prepare: passes fill columns (old, reference logprobs, values)
        └──KL of each sample──> controllers ──advantage of each sample──> update: critic, then policy ──> weight_bucket

All computation runs in one separate thread, so that the rank can answer calls while it computes. The rank does not
know how networks are sharded or computed: see backend.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from gcore.checkpoint.writer import BackgroundWriter
from gcore.config.tree import Algorithm, Config
from gcore.observe.trace import Tracer
from gcore.protocols import Metric, Receivers, TrainerInfo, UpdateStats, WeightPlan, Weights, add_metrics
from gcore.training import bad_batches, losses, objective, preference
from gcore.training.backend import Backend, NetworkName
from gcore.training.coefficients import Coefficients, next_entropy_coef, next_kl_coef
from gcore.training.micro import ColumnName, StepData
from gcore.training.objective import ENTROPY, KL, UPDATE_KL
from gcore.training.schedule import learning_rate
from gcore.training.step_advantages import Ranks, explained_variance, step_targets
from gcore.types import Floats, Key, MicroBatch, MiniBatch, Sample, TrainBatch, Written
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
        own_loss: losses.OwnLoss | None = None,
    ) -> None:
        """`own_loss`: algorithm.policy_loss, if it is a function of the user."""
        self._config, self._rank, self._tracer = config, rank, tracer
        self._publisher = publisher or WeightPublisher(rank)
        self._data, self._own_loss = StepData(), own_loss
        self.coefficients = Coefficients.of(config.algorithm)
        self._has_critic = config.algorithm.estimator.critic
        self.critic_updates = self._critic_bad_in_a_row = 0
        self.updates = 0  # optimizer steps since `begin`, without skipped ones; determines the warm-up
        self._bad_in_a_row = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._pool.submit(torch.set_num_threads, threads).result()
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

    async def evaluate(self, batch: TrainBatch) -> Mapping[str, Metric]:
        return await self._in_thread(self._evaluate, batch)

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

    @property
    def _algorithm(self) -> Algorithm:
        """With the current coefficients."""
        return self.coefficients.applied(self._config.algorithm)

    def _begin(self) -> None:
        self.backend.begin(self._config.has_reference, self._has_critic)
        self.updates = self.critic_updates = self._bad_in_a_row = self._critic_bad_in_a_row = 0
        self.coefficients = Coefficients.of(self._config.algorithm)

    def _prepare(self, batch: TrainBatch) -> dict[Key, float]:
        algorithm = self._algorithm
        with self._tracer.span("passes", step=batch.step):
            for column, network in self._passes(batch).items():
                output = 2 if column == "ref_location" else 0
                self._data.columns[column] = self.backend.logprobs(network, _micros(batch), self._data, output)
            if self._has_critic and batch.objective == "policy":
                self._data.columns["values"] = self.backend.values(_micros(batch), self._data)
        if batch.objective != "policy" or not algorithm.kl_in_reward or algorithm.kl_per_step:
            return {}
        masks = {key: self._data.samples[key].mask_S for key in batch.keys}
        return {key: algorithm.kl_coef * float(kl_S[masks[key]].sum()) for key, kl_S in self._kl(batch).items()}

    def _passes(self, batch: TrainBatch) -> dict[ColumnName, NetworkName]:
        """Forward passes before the update, by the column that each one fills. Old logprobs are needed if a step has
        several updates, because the policy changes between them, and for the KL in the reward."""
        algorithm, passes = self._config.algorithm, dict[ColumnName, NetworkName]()
        if batch.objective != "policy":
            if batch.objective != "imitation" and self._config.needs.reference:
                passes["ref_logprobs"] = "reference"
            if batch.objective == "kto":
                passes["old_logprobs"] = "policy"
            return passes
        if len(batch.mini_batches) * algorithm.epochs > 1 or algorithm.kl_in_reward:
            passes["old_logprobs"] = "policy"
        if algorithm.kl_coef > 0:
            passes["ref_location" if algorithm.kl_of_gaussians else "ref_logprobs"] = "reference"
        return passes

    def _kl(self, batch: TrainBatch) -> dict[Key, Floats]:
        """KL of each step between the policy before the update and the reference."""
        old, ref = (self._data.columns[name] for name in ("old_logprobs", "ref_logprobs"))
        estimator = self._config.algorithm.kl_estimator
        return {key: losses.kl_penalty(old[key], ref[key], estimator).double().cpu().numpy() for key in batch.keys}

    def _update(self, batch: TrainBatch) -> UpdateStats:
        self._publisher.release()
        totals = UpdateStats()
        if batch.objective == "policy":
            totals += UpdateStats(metrics=self._fill_targets(batch))
        with self._tracer.span("update", step=batch.step):
            if self._has_critic and batch.objective == "policy":
                totals += self._train_critic(batch)
            only_critic = self._has_critic and batch.step <= self._config.critic.warmup_steps
            if batch.objective != "policy" or not only_critic:
                totals += self._train_policy(batch)
        if batch.objective == "policy" and not only_critic:
            totals += UpdateStats(metrics=self._adapt(batch, totals.metrics))
        self._tracer.flush()
        self._data.clear()
        self.backend.free_memory(weights=False)
        return totals

    def _evaluate(self, batch: TrainBatch) -> Mapping[str, Metric]:
        micros = _micros(batch)
        for column, network in self._passes(batch).items():
            self._data.columns[column] = self.backend.logprobs(network, micros, self._data)
        outputs = self.backend.logprobs("policy", micros, self._data)
        goals = [(self._objective(batch, mini), mini) for mini in batch.mini_batches]  # may be collective
        found = [
            preference.without_gradients(goal, micro, outputs, self._data)
            for goal, mini in goals
            for micro in mini.micro_batches
            if micro.rows
        ]
        self._data.clear()
        self.backend.free_memory(weights=False)
        return objective.to_metrics(found)

    def _ranks(self, batch: TrainBatch) -> Ranks:
        holders = {key: micro.context for micro in _micros(batch) for row in micro.rows for key in row}
        return Ranks(self.backend.sum_over_ranks, holders)

    def _fill_targets(self, batch: TrainBatch) -> dict[str, Metric]:
        """Fill the columns of advantages and returns. Returns metrics, which are equal on all ranks."""
        algorithm, ranks, samples = self._algorithm, self._ranks(batch), self._data.samples
        kl = self._kl(batch) if algorithm.kl_per_step else None
        values = None
        if self._has_critic:
            column = self._data.columns["values"]
            values = {key: column[key].double().cpu().numpy() for key in batch.keys}
        advantages = {key: batch.advantages[key] for key in batch.keys}
        found = step_targets(samples, advantages, algorithm, ranks, kl, values)
        self._data.columns["advantages"] = self._to_column(found.advantages)
        if values is None:
            return {}
        self._data.columns["returns"] = self._to_column(found.returns)
        masks = {key: samples[key].mask_S for key in batch.keys}
        return {"critic/explained_variance": Metric(explained_variance(found.returns, values, masks, ranks))}

    def _to_column(self, values: Mapping[Key, Floats]) -> dict[Key, torch.Tensor]:
        return {key: torch.from_numpy(each).to(self.backend.device) for key, each in values.items()}

    def _train_critic(self, batch: TrainBatch) -> UpdateStats:
        """Independent of the policy's updates, because advantages are fixed: so the critic can leave the device."""
        wall, busy = time.perf_counter(), time.thread_time()
        metrics, skipped, clip = dict[str, Metric](), 0, self._config.critic.value_clip
        for number, mini in self._updates(batch):
            lr = self._learning_rate(batch, number, self._config.critic.lr, self.critic_updates)
            goal = objective.value(mini, clip)
            found = self.backend.forward_backward(mini.micro_batches, self._data, goal, "critic")
            grad_norm = self.backend.step(lr, "critic")
            finite = math.isfinite(grad_norm)
            self.critic_updates += finite
            self._critic_bad_in_a_row = self._count_bad(batch, finite, self._critic_bad_in_a_row)
            skipped += not finite
            more = {"grad_norm": grad_norm if finite else 0.0, "lr": lr}
            metrics = add_metrics(metrics, found, {f"critic/{name}": Metric(each) for name, each in more.items()})
        metrics["critic/skipped_updates"] = Metric(float(skipped))  # all ranks count the same: their mean is the count
        self.backend.set_critic_aside()
        busy = time.thread_time() - busy if self.backend.device.type == "cpu" else 0.0
        return UpdateStats(metrics=metrics, wall_s=time.perf_counter() - wall, busy_s=busy)

    def _train_policy(self, batch: TrainBatch) -> UpdateStats:
        totals, stopped = UpdateStats(), False
        for number, mini in self._updates(batch):
            found = self._mini_batch(batch, number, mini)
            stopped = found is None
            if found is None:
                break
            totals += found
        if self._config.algorithm.early_stop_kl is None:
            return totals
        return totals + UpdateStats(metrics={"actor/stopped_early": Metric(float(stopped))})

    def _updates(self, batch: TrainBatch) -> Iterator[tuple[int, MiniBatch]]:
        """The optimizer steps of a training step, numbered."""
        epochs = self._config.algorithm.epochs if batch.objective == "policy" else 1
        yield from enumerate(mini for _ in range(epochs) for mini in batch.mini_batches)

    def _stops(self, metrics: Mapping[str, Metric]) -> bool:
        """Whether the policy has moved too far in this training step. The same answer on all ranks."""
        limit = self._config.algorithm.early_stop_kl
        return limit is not None and self._mean_over_ranks(metrics.get(UPDATE_KL)) > limit

    def _mean_over_ranks(self, metric: Metric | None) -> float:
        """A collective, also for a rank that has no samples and so no metric."""
        metric = metric or Metric(0.0, 0.0)
        total, weight = self.backend.sum_over_ranks(np.array([metric.total, metric.weight]))
        return float(total / max(weight, 1e-9))

    def _adapt(self, batch: TrainBatch, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """The coefficients of the next training step; returns those of this one."""
        algorithm, now, used = self._config.algorithm, self.coefficients, dict[str, Metric]()
        if algorithm.kl_target is not None:
            used["actor/kl_coef"] = Metric(now.kl)
            kl, num_samples = (
                self._mean_over_ranks(metrics.get(KL)),
                sum(mini.num_samples for mini in batch.mini_batches),
            )
            next_kl = next_kl_coef(now.kl, kl, num_samples, algorithm.kl_target, algorithm.kl_horizon)
            now = dataclasses.replace(now, kl=next_kl)
        if algorithm.entropy_target is not None:
            used["actor/entropy_coef"] = Metric(now.entropy if now.bonus else 0.0)
            entropy = self._mean_over_ranks(metrics.get(ENTROPY))
            change = next_entropy_coef(now.entropy, entropy, algorithm.entropy_target, algorithm.entropy_change)
            now = dataclasses.replace(now, entropy=change[0], bonus=change[1])
        self.coefficients = now
        return used

    def _mini_batch(self, batch: TrainBatch, number: int, mini: MiniBatch) -> UpdateStats | None:
        """One optimizer step of the policy. None: it has moved too far already, and nothing was changed."""
        lr = self._policy_lr(batch, number)
        wall, busy = time.perf_counter(), time.thread_time()  # a thread that waits for another rank uses no CPU time
        metrics = self.backend.forward_backward(mini.micro_batches, self._data, self._objective(batch, mini))
        if self._stops(metrics):
            self.backend.drop_gradients()
            return None
        grad_norm = self.backend.step(lr)  # on a GPU it ends with a value that is read: the passes are done
        wall, busy = time.perf_counter() - wall, time.thread_time() - busy
        finite = math.isfinite(grad_norm)
        self.updates += finite
        if not finite:
            self._dump(batch, number, mini)
        self._bad_in_a_row = self._count_bad(batch, finite, self._bad_in_a_row)
        busy = busy if self.backend.device.type == "cpu" else 0.0
        return UpdateStats(1, int(not finite), grad_norm if finite else 0.0, lr, metrics, wall, busy)

    def _count_bad(self, batch: TrainBatch, finite: bool, before: int) -> int:
        """Updates in a row with bad gradients, of policy or critic. `before`: without this one."""
        in_a_row = 0 if finite else before + 1
        if in_a_row >= self._config.training.max_bad_updates:
            raise FloatingPointError(
                f"{in_a_row} updates in a row had NaN or infinite gradients (step {batch.step}; the samples "
                f"are in {self._config.run.folder / bad_batches.FOLDER}); lower training.lr, or raise "
                "training.max_bad_updates to skip more"
            )
        return in_a_row

    def _objective(self, batch: TrainBatch, mini: MiniBatch) -> objective.Objective:
        if batch.objective == "imitation":
            return objective.imitation(mini)
        if batch.objective == "sft":
            return preference.demonstrations(mini)
        if batch.objective == "kto":
            found = preference.mismatched_kl((k for m in mini.micro_batches for r in m.rows for k in r), self._data)
            total, count = self._ranks(batch).total({key: np.array([kl, 1.0]) for key, kl in found.items()}, 2)
            return preference.kto(self._config.preference, mini, max(0.0, float(total) / max(float(count), 1.0)))
        if batch.objective in preference.PAIR_LOSSES:
            return preference.preference(batch.objective, self._config.preference, mini)
        longest = self._config.generation.max_response_length
        return objective.policy(self._algorithm, mini, longest, self._own_loss)

    def _dump(self, batch: TrainBatch, number: int, mini: MiniBatch) -> None:
        """Write the samples of this rank to a file. All ranks call this, because the forward pass is collective."""
        micros, folder = mini.micro_batches, self._config.run.folder
        now = self.backend.logprobs("policy", micros, self._data)
        if bad_batches.may_dump(folder, self._rank):
            samples = [self._data.samples[key] for micro in micros for row in micro.rows for key in row]
            columns = {"logprobs": now, **{str(name): values for name, values in self._data.columns.items()}}
            bad_batches.dump(folder, (batch.step, number + 1, self._rank), samples, columns)

    def _policy_lr(self, batch: TrainBatch, number: int) -> float:
        training = self._config.training
        if batch.objective != "imitation":
            return self._learning_rate(batch, number, training.lr, self.updates)
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

    def _learning_rate(self, batch: TrainBatch, number: int, peak: float, updates: int) -> float:
        """For update `number` of a step. Progress counts steps: a step may have fewer mini-batches, or none."""
        training, algorithm = self._config.training, self._config.algorithm
        planned, actual = algorithm.mini_batches * algorithm.epochs, len(batch.mini_batches) * algorithm.epochs
        return learning_rate(
            updates,
            peak=peak,
            total=self._config.run.steps * planned,
            warmup=training.warmup_steps,
            schedule=training.schedule,
            min_ratio=training.min_lr_ratio,
            position=(batch.step - 1) * planned + number * planned / actual,
        )

    def _weight_bucket(self, index: int, receivers: Receivers) -> Weights:
        parameters = self.backend.weights()
        bucket = self._publisher.bucket(parameters, index, receivers)
        if index == self._publisher.plan(parameters).num_buckets - 1:
            self.backend.free_memory(weights=True)
        return bucket

    def _snapshot(self) -> int:
        counters = {"updates": self.updates, "bad_in_a_row": self._bad_in_a_row}
        if self._has_critic:
            counters |= {"critic_updates": self.critic_updates, "critic_bad_in_a_row": self._critic_bad_in_a_row}
        found = self.backend.snapshot({**counters, **self.coefficients.counters()})
        self._about = dict(found.about)
        return self._writer.stage(found.shards, found.versions)

    def _load(self, folder: Path, begun: bool) -> None:
        self._publisher.release()
        self._data.clear()
        # a warm start has neither reference nor critic until `begin`
        reference, critic = begun and self._config.has_reference, begun and self._has_critic
        counters = dict(self.backend.load(folder, reference, critic))
        self.updates, self._bad_in_a_row = int(counters["updates"]), int(counters["bad_in_a_row"])
        self.critic_updates = int(counters.get("critic_updates", 0))
        self._critic_bad_in_a_row = int(counters.get("critic_bad_in_a_row", 0))
        self.coefficients = Coefficients.restored(counters, self._config.algorithm)


def _micros(batch: TrainBatch) -> list[MicroBatch]:
    return [micro for mini in batch.mini_batches for micro in mini.micro_batches]
