"""A trainer rank: it receives samples, fills their columns, and updates the policy and the critic through a backend.

    push (samples by key, from every controller) ──> prepare: passes fill columns (old, reference logprobs, values)
        └──KL of each sample──> controllers ──advantage of each sample──> update: critic, then policy ──> weight_bucket

The rank does not know how networks are sharded or computed: see backend.py. The critic may have ranks of its own
(critic_rank.py): then its values come from there, and the penalties of the KL go there.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gcore.config.algorithm import Algorithm
from gcore.config.tree import Config
from gcore.observe.trace import Tracer
from gcore.protocols import Metric, Receivers, UpdateStats, WeightPlan, Weights
from gcore.training import bad_batches, losses, objective, preference, state
from gcore.training.backend import Backend, NetworkName, Snapshot
from gcore.training.coefficients import Coefficients, next_entropy_coef, next_kl_coef
from gcore.training.compute_rank import ComputeRank, check_weights, count_bad, learning_rate_of, micros_of, updates_of
from gcore.training.critic_update import CriticUpdate, ranks_of, to_column, to_numpy
from gcore.training.micro import ColumnName
from gcore.training.objective import ENTROPY, KL, UPDATE_KL
from gcore.training.schedule import learning_rate
from gcore.training.step_advantages import explained_variance, step_targets
from gcore.types import Floats, Key, MiniBatch, TrainBatch
from gcore.weights.publisher import WeightPublisher


class TrainerRank(ComputeRank):
    """Implements protocols.Trainer."""

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
        super().__init__(config, make_backend, rank, threads, tracer)
        self._publisher, self._own_loss = publisher or WeightPublisher(rank), own_loss
        self._exact_publisher = self._publisher.exact()
        self.coefficients = Coefficients.of(config.algorithm)
        self.critic: CriticUpdate | None = None  # also None if the critic has ranks of its own
        if config.algorithm.estimator.critic and not config.critic_ranks:
            self.critic = CriticUpdate(config, self.backend, self._data, "critic")
        self.updates = 0  # optimizer steps since `begin`, without skipped ones; determines the warm-up
        self._bad_in_a_row = 0

    # ---- protocol -------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Reinforcement learning starts: the current policy is the KL reference, and the optimizer is reset."""
        await self._in_thread(self._begin)

    async def prepare(self, batch: TrainBatch) -> Mapping[Key, float]:
        return await self._in_thread(self._prepare, batch)

    async def update(self, batch: TrainBatch) -> UpdateStats:
        return await self._in_thread(self._update, batch)

    async def evaluate(self, batch: TrainBatch) -> Mapping[str, Metric]:
        return await self._in_thread(self._evaluate, batch)

    async def penalties(self, keys: Sequence[Key]) -> Mapping[Key, Floats]:
        return await self._in_thread(self._penalties, keys)

    async def take_values(self, values: Mapping[Key, Floats]) -> None:
        self._data.columns.setdefault("values", {}).update(to_column(values, self.backend.device))

    async def weight_plan(self) -> WeightPlan:
        return await self._in_thread(self._weight_plan)

    async def weight_bucket(self, index: int, receivers: Receivers) -> Weights:
        return await self._in_thread(self._weight_bucket, index, receivers)

    # ---- the compute thread ---------------------------------------------------------------------------------------

    @property
    def _algorithm(self) -> Algorithm:
        """With the current coefficients."""
        return self.coefficients.applied(self._config.algorithm)

    def _begin(self) -> None:
        self.backend.begin(self._config.has_reference, self.critic is not None)
        self.updates = self._bad_in_a_row = 0
        if self.critic is not None:
            self.critic.reset()
        self.coefficients = Coefficients.of(self._config.algorithm)

    def _prepare(self, batch: TrainBatch) -> dict[Key, float]:
        algorithm = self._algorithm
        with self._tracer.span("passes", step=batch.step):
            for column, network in self._passes(batch).items():
                output = 2 if column == "ref_location" else 0
                self._data.columns[column] = self.backend.logprobs(network, micros_of(batch), self._data, output)
            if self.critic is not None and batch.objective == "policy":
                self._data.columns["values"] = self.backend.values(micros_of(batch), self._data)
        if batch.objective != "policy" or not algorithm.kl_in_reward or algorithm.kl_per_step:
            return {}
        masks = {key: self._data.samples[key].mask_S for key in batch.keys}
        return {key: float(penalty_S[masks[key]].sum()) for key, penalty_S in self._penalties(batch.keys).items()}

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

    def _penalties(self, keys: Sequence[Key]) -> dict[Key, Floats]:
        """Of each step: kl_coef x KL between the policy before the update and the reference."""
        old, ref = (self._data.columns[name] for name in ("old_logprobs", "ref_logprobs"))
        algorithm = self._algorithm
        kl = {key: losses.kl_penalty(old[key], ref[key], algorithm.kl_estimator) for key in keys}
        return {key: algorithm.kl_coef * kl_S for key, kl_S in to_numpy(kl, keys).items()}

    def _update(self, batch: TrainBatch) -> UpdateStats:
        self._publisher.release()
        totals = UpdateStats()
        if batch.objective == "policy":
            totals += UpdateStats(metrics=self._fill_targets(batch))
        with self._tracer.span("update", step=batch.step):
            if self.critic is not None and batch.objective == "policy":
                totals += self.critic.train(batch)
                self.backend.set_critic_aside()
            only_critic = self._algorithm.estimator.critic and batch.step <= self._config.critic.warmup_steps
            if batch.objective != "policy" or not only_critic:
                totals += self._train_policy(batch)
        if batch.objective == "policy" and not only_critic:
            totals += UpdateStats(metrics=self._adapt(batch, totals.metrics))
        self._tracer.flush()
        self._data.clear()
        self.backend.free_memory(weights=False)
        return totals

    def _evaluate(self, batch: TrainBatch) -> Mapping[str, Metric]:
        micros = micros_of(batch)
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

    def _fill_targets(self, batch: TrainBatch) -> dict[str, Metric]:
        """Fill the columns of advantages and returns. Returns metrics, which are equal on all ranks."""
        algorithm, ranks, samples = self._algorithm, ranks_of(self.backend, batch), self._data.samples
        penalties = self._penalties(batch.keys) if algorithm.kl_per_step else None
        values = to_numpy(self._data.columns.get("values", {}), batch.keys) if algorithm.estimator.critic else None
        advantages = {key: batch.advantages[key] for key in batch.keys}
        found = step_targets(samples, advantages, algorithm, ranks, penalties, values)
        self._data.columns["advantages"] = to_column(found.advantages, self.backend.device)
        if values is None or self.critic is None:
            return {}
        self._data.columns["returns"] = to_column(found.returns, self.backend.device)
        masks = {key: samples[key].mask_S for key in batch.keys}
        return {"critic/explained_variance": Metric(explained_variance(found.returns, values, masks, ranks))}

    def _train_policy(self, batch: TrainBatch) -> UpdateStats:
        totals, stopped = UpdateStats(), False
        for number, mini in updates_of(self._config, batch):
            found = self._mini_batch(batch, number, mini)
            stopped = found is None
            if found is None:
                break
            totals += found
        check_weights(self._config, self.backend, batch)
        if self._config.algorithm.early_stop_kl is None:
            return totals
        return totals + UpdateStats(metrics={"actor/stopped_early": Metric(float(stopped))})

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
        if (adaptive := algorithm.adaptive_kl) is not None:
            used["actor/kl_coef"] = Metric(now.kl)
            kl, num_samples = (
                self._mean_over_ranks(metrics.get(KL)),
                sum(mini.num_samples for mini in batch.mini_batches),
            )
            next_kl = next_kl_coef(now.kl, kl, num_samples, adaptive.target, adaptive.horizon)
            now = dataclasses.replace(now, kl=next_kl)
        if (control := algorithm.adaptive_entropy) is not None:
            used["actor/entropy_coef"] = Metric(now.entropy if now.bonus else 0.0)
            entropy = self._mean_over_ranks(metrics.get(ENTROPY))
            change = next_entropy_coef(now.entropy, entropy, control.target, control.change)
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
        self._bad_in_a_row = count_bad(self._config, batch, finite, self._bad_in_a_row)
        busy = busy if self.backend.device.type == "cpu" else 0.0
        return UpdateStats(1, int(not finite), grad_norm if finite else 0.0, lr, metrics, wall, busy)

    def _objective(self, batch: TrainBatch, mini: MiniBatch) -> objective.Objective:
        if batch.objective == "imitation":
            return objective.imitation(mini)
        if batch.objective == "sft":
            return preference.demonstrations(mini)
        if batch.objective == "kto":
            found = preference.mismatched_kl((k for m in mini.micro_batches for r in m.rows for k in r), self._data)
            ranks = ranks_of(self.backend, batch)
            total, count = ranks.total({key: np.array([kl, 1.0]) for key, kl in found.items()}, 2)
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
            return learning_rate_of(self._config, batch, number, training.lr, self.updates)
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

    def _weight_plan(self) -> WeightPlan:
        parameters = self.backend.weights()
        exact = self._exact_publisher.plan(parameters).num_buckets
        return dataclasses.replace(self._publisher.plan(parameters), exact_buckets=exact)

    def _weight_bucket(self, index: int, receivers: Receivers) -> Weights:
        parameters = self.backend.weights()
        publisher = self._exact_publisher if receivers.exact else self._publisher
        bucket = publisher.bucket(parameters, index, receivers)
        if index == publisher.plan(parameters).num_buckets - 1:
            self.backend.free_memory(weights=True)
        return bucket

    def _snapshot(self) -> Snapshot:
        counters: dict[str, float] = {"updates": self.updates, "bad_in_a_row": self._bad_in_a_row}
        if self.critic is not None:
            counters |= self.critic.counters()
        return self.backend.snapshot({**counters, **self.coefficients.counters()})

    def _load(self, folder: Path, begun: bool) -> None:
        self._publisher.release()
        self._data.clear()
        # a warm start has neither reference nor critic until `begin`
        reference, critic = begun and self._config.has_reference, begun and self.critic is not None
        counters = dict(self.backend.load(folder, reference, critic))
        self.updates, self._bad_in_a_row = int(counters["updates"]), int(counters["bad_in_a_row"])
        if self.critic is not None and begun:
            self.critic.restore(state.critic_counters(folder))
        self.coefficients = Coefficients.restored(counters, self._config.algorithm)
