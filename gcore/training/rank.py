"""A rank of the trainer or of the critic: it receives samples, fills their columns, and updates its networks.

    push (samples by key, from every controller) ──> prepare: passes fill columns (old, reference logprobs, values)
        └──KL of each sample──> controllers ──advantage of each sample──> update: critic, then policy ──> weight_bucket

A rank holds networks by name (backend.py), and trains, saves and loads each of them in the same way. It does not know
how they are sharded or computed. The critic is on the trainer ranks, or on ranks of its own (critic_rank.py): then its
values come from there, and the penalties of the KL go there. All computation runs in one thread, so that the rank can
answer calls while it computes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from gcore.checkpoint.writer import BackgroundWriter
from gcore.config.algorithm import Algorithm
from gcore.config.tree import Config
from gcore.observe.trace import Tracer
from gcore.protocols import Metric, Receivers, TrainerInfo, UpdateStats, WeightPlan, Weights
from gcore.threads import use_threads
from gcore.training import bad_batches, objective, preference
from gcore.training.backend import Backend, Snapshot
from gcore.training.coefficients import Coefficients, next_entropy_coef, next_kl_coef
from gcore.training.objective import ENTROPY, KL, UPDATE_KL, ColumnName, Objective, StepData
from gcore.training.schedule import learning_rate
from gcore.training.state import NetworkName, TrainedName
from gcore.training.step_advantages import Ranks, explained_variance, step_targets
from gcore.types import Floats, Key, MicroBatch, MiniBatch, Sample, TrainBatch, UserError, Written
from gcore.weights.publisher import WeightPublisher

T = TypeVar("T")
PREFIX: dict[TrainedName, str] = {"policy": "", "critic": "critic_"}  # of counters in checkpoints


@dataclasses.dataclass(slots=True)
class Trained:
    """A network that a rank trains: its optimizer steps since reinforcement learning started."""

    updates: int = 0  # without skipped ones; determines the warm-up of the learning rate
    bad_in_a_row: int = 0  # skipped ones


class ComputeRank:
    """What ranks of the trainer and of the critic have in common. `make_backend` is called in the compute thread. The
    caller has set up the process group (build_ranks.py). `trained`: the networks that the rank trains."""

    def __init__(
        self,
        config: Config,
        make_backend: Callable[[], Backend],
        rank: int,
        threads: int,
        tracer: Tracer,
        trained: Sequence[TrainedName],
    ) -> None:
        self._config, self._rank, self._tracer, self._data = config, rank, tracer, StepData()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._pool.submit(use_threads, threads).result()
        self.backend = self._pool.submit(make_backend).result()
        self._writer = BackgroundWriter(rank, self.backend.device, config.checkpoint.asynchronous)
        self._about = dict[str, bytes]()
        self.trained = {name: Trained() for name in trained}
        for name in trained:
            if not self._pool.submit(self.backend.is_finite, name).result():
                raise UserError(
                    f"the weights of the {name} are NaN or infinite before the first update; expected a model with "
                    "finite ones (key: model.path)"
                )

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

    # ---- updates --------------------------------------------------------------------------------------------------

    def _train(
        self,
        network: TrainedName,
        batch: TrainBatch,
        goal: Callable[[MiniBatch], Objective],
        stops: Callable[[Mapping[str, Metric]], bool] = lambda _: False,
        on_bad: Callable[[int, MiniBatch], None] = lambda *_: None,
    ) -> tuple[UpdateStats, bool]:
        """One optimizer step per mini-batch and epoch. `stops`: whether to end before a step, with the metrics of its
        passes; the second result says if it did. `on_bad`: called when gradients were not finite."""
        trained, total = self.trained[network], UpdateStats()
        epochs = self._config.algorithm.epochs if batch.objective == "policy" else 1
        for number, mini in enumerate(mini for _ in range(epochs) for mini in batch.mini_batches):
            lr = learning_rate_of(self._config, batch, number, network, trained.updates)
            wall, busy = time.perf_counter(), time.thread_time()  # a thread that waits for another rank uses no CPU
            metrics = self.backend.forward_backward(mini.micro_batches, self._data, goal(mini), network)
            if stops(metrics):
                self.backend.drop_gradients(network)
                return total, True
            grad_norm = self.backend.step(lr, network)  # on a GPU it ends with a value that is read: passes are done
            wall, busy = time.perf_counter() - wall, time.thread_time() - busy
            finite = math.isfinite(grad_norm)
            trained.updates += finite
            trained.bad_in_a_row = 0 if finite else trained.bad_in_a_row + 1
            if not finite:
                on_bad(number, mini)
                check_bad(self._config, batch, network, trained.bad_in_a_row)
            busy = busy if self.backend.device.type == "cpu" else 0.0
            total += UpdateStats(1, int(not finite), grad_norm if finite else 0.0, lr, metrics, wall, busy)
        return total, False

    def _train_critic(self, batch: TrainBatch) -> UpdateStats:
        """Needs the columns of values and returns. Independent of the policy's updates, because advantages are fixed:
        so the critic can leave the device before them, or train beside them on other devices."""
        clip = self._config.critic.value_clip
        found, _ = self._train("critic", batch, lambda mini: objective.value(mini, clip))
        self._check_weights("critic", batch)
        means = {"grad_norm": found.grad_norm, "lr": found.lr}
        metrics = {
            **found.metrics,
            **{f"critic/{name}": Metric(total, float(found.updates)) for name, total in means.items()},
            "critic/skipped_updates": Metric(float(found.skipped)),  # all ranks count the same: the mean is the count
        }
        return UpdateStats(metrics=metrics, wall_s=found.wall_s, busy_s=found.busy_s)

    def _check_weights(self, network: TrainedName, batch: TrainBatch) -> None:
        """After the updates of a training step; a collective. UserError if the weights are ruined: all later updates
        would be skipped. They must reach neither engines nor checkpoints."""
        if not self.backend.sum_over_ranks(np.array([not self.backend.is_finite(network)], np.float64))[0]:
            return
        training = self._config.training
        key, lr = ("critic.lr", self._config.critic.lr) if network == "critic" else ("training.lr", training.lr)
        if batch.objective == "imitation" and training.warm_start is not None:
            key, lr = "training.warm_start.lr", training.warm_start.lr
        raise UserError(
            f"the weights of the {network} became NaN or infinite in the update of step {batch.step} ({key}={lr:g}); "
            f"expected finite weights: lower {key}, and check training.eps and weight_decay"
        )

    @property
    def _algorithm(self) -> Algorithm:
        return self._config.algorithm

    def _penalties(self, keys: Sequence[Key]) -> Mapping[Key, Floats]:
        """Of each step: kl_coef x KL between the policy before the update and the reference."""
        raise NotImplementedError

    def _fill_targets(self, batch: TrainBatch) -> dict[str, Metric]:
        """Fill what the networks of this rank are trained towards: the columns of advantages and of returns. Returns
        metrics, which are equal on all ranks."""
        algorithm, ranks = self._algorithm, ranks_of(self.backend, batch)
        samples, columns = self._data.samples, self._data.columns
        penalties = self._penalties(batch.keys) if algorithm.kl_per_step else None
        values = to_numpy(columns.get("values", {}), batch.keys) if algorithm.estimator.critic else None
        advantages = {key: batch.advantages[key] for key in batch.keys}
        targets = step_targets(samples, advantages, algorithm, ranks, penalties, values)
        if "policy" in self.trained:
            columns["advantages"] = to_column(targets.advantages, self.backend.device)
        if values is None or "critic" not in self.trained:
            return {}
        columns["returns"] = to_column(targets.returns, self.backend.device)
        masks = {key: samples[key].mask_S for key in batch.keys}
        return {"critic/explained_variance": Metric(explained_variance(targets.returns, values, masks, ranks))}

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    async def snapshot(self) -> int:
        return await self._in_thread(self._stage)

    def _stage(self) -> int:
        snapshot = self._snapshot()
        self._about = dict(snapshot.about)
        return self._writer.stage(snapshot.shards, snapshot.versions)

    def _snapshot(self) -> Snapshot:
        return self.backend.snapshot(self._counters())

    def _counters(self) -> dict[str, float]:
        """By their names in checkpoints."""
        return {
            f"{PREFIX[name]}{field}": value
            for name, trained in self.trained.items()
            for field, value in dataclasses.asdict(trained).items()
        }

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

    def _restore(self, folder: Path, networks: Sequence[NetworkName]) -> Mapping[str, float]:
        """Networks and counters. Returns all counters that were saved."""
        self._data.clear()
        counters = self.backend.load(folder, networks)
        for name, trained in self.trained.items():
            if name in networks:
                trained.updates = int(counters.get(f"{PREFIX[name]}updates", 0))
                trained.bad_in_a_row = int(counters.get(f"{PREFIX[name]}bad_in_a_row", 0))
        return counters


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
        own_loss: objective.OwnLoss | None = None,
    ) -> None:
        """`own_loss`: algorithm.policy_loss, if it is a function of the user."""
        trained: list[TrainedName] = ["policy"]
        if config.algorithm.estimator.critic and not config.critic_ranks:
            trained.append("critic")
        super().__init__(config, make_backend, rank, threads, tracer, trained)
        self._publisher, self._own_loss = publisher or WeightPublisher(rank), own_loss
        self._exact_publisher = self._publisher.exact()
        self.coefficients = Coefficients.of(config.algorithm)

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

    @property
    def _networks(self) -> list[NetworkName]:
        """Of reinforcement learning. A warm start trains the policy alone."""
        networks: list[NetworkName] = [*self.trained]
        return [*networks, "reference"] if self._config.has_reference else networks

    def _begin(self) -> None:
        self.backend.begin(self._networks)
        self.trained = {name: Trained() for name in self.trained}
        self.coefficients = Coefficients.of(self._config.algorithm)

    def _prepare(self, batch: TrainBatch) -> dict[Key, float]:
        algorithm = self._algorithm
        with self._tracer.span("passes", step=batch.step):
            for column, network in self._passes(batch).items():
                output = 2 if column == "ref_location" else 0
                self._data.columns[column] = self.backend.outputs(network, micros_of(batch), self._data, output)
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
        if "critic" in self.trained:
            passes["values"] = "critic"
        return passes

    def _penalties(self, keys: Sequence[Key]) -> Mapping[Key, Floats]:
        old, ref = (self._data.columns[name] for name in ("old_logprobs", "ref_logprobs"))
        algorithm = self._algorithm
        kl = {key: objective.kl_penalty(old[key], ref[key], algorithm.kl_estimator) for key in keys}
        return {key: algorithm.kl_coef * kl_S for key, kl_S in to_numpy(kl, keys).items()}

    def _update(self, batch: TrainBatch) -> UpdateStats:
        self._publisher.release()
        totals = UpdateStats()
        if batch.objective == "policy":
            totals += UpdateStats(metrics=self._fill_targets(batch))
        with self._tracer.span("update", step=batch.step):
            if "critic" in self.trained and batch.objective == "policy":
                totals += self._train_critic(batch)
                self.backend.set_aside("critic")
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
            self._data.columns[column] = self.backend.outputs(network, micros, self._data)
        outputs = self.backend.outputs("policy", micros, self._data)
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

    def _train_policy(self, batch: TrainBatch) -> UpdateStats:
        stats, stopped = self._train(
            "policy",
            batch,
            lambda mini: self._objective(batch, mini),
            stops=self._stops,
            on_bad=lambda number, mini: self._dump(batch, number, mini),
        )
        self._check_weights("policy", batch)
        if self._config.algorithm.early_stop_kl is None:
            return stats
        return stats + UpdateStats(metrics={"actor/stopped_early": Metric(float(stopped))})

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
        now = self.backend.outputs("policy", micros, self._data)
        if bad_batches.may_dump(folder, self._rank):
            samples = [self._data.samples[key] for micro in micros for row in micro.rows for key in row]
            columns = {"logprobs": now, **{str(name): values for name, values in self._data.columns.items()}}
            bad_batches.dump(folder, (batch.step, number + 1, self._rank), samples, columns)

    def _weight_plan(self) -> WeightPlan:
        parameters = self.backend.weights()
        exact = self._exact_publisher.plan(parameters).num_buckets
        return dataclasses.replace(self._publisher.plan(parameters), critic_buckets=exact)

    def _weight_bucket(self, index: int, receivers: Receivers) -> Weights:
        parameters = self.backend.weights()
        publisher = self._exact_publisher if receivers.are_critics else self._publisher
        bucket = publisher.bucket(parameters, index, receivers)
        if index == publisher.plan(parameters).num_buckets - 1:
            self.backend.free_memory(weights=True)
        return bucket

    def _counters(self) -> dict[str, float]:
        return {**super()._counters(), **self.coefficients.counters()}

    def _load(self, folder: Path, begun: bool) -> None:
        self._publisher.release()
        counters = self._restore(folder, self._networks if begun else ["policy"])
        self.coefficients = Coefficients.restored(dict(counters), self._config.algorithm)


# ---- pure functions -------------------------------------------------------------------------------------------------


def micros_of(batch: TrainBatch) -> list[MicroBatch]:
    return [micro for mini in batch.mini_batches for micro in mini.micro_batches]


def learning_rate_of(config: Config, batch: TrainBatch, number: int, network: TrainedName, updates: int) -> float:
    """For update `number` of a step. Progress counts steps: a step may have fewer mini-batches, or none."""
    training, algorithm, warm = config.training, config.algorithm, config.training.warm_start
    if batch.objective == "imitation":
        assert warm is not None
        warmup, position = max(1, warm.steps // 10), batch.step - 1
        return learning_rate(
            updates, peak=warm.lr, total=warm.steps, warmup=warmup, schedule="linear", position=position
        )
    planned, actual = algorithm.mini_batches * algorithm.epochs, len(batch.mini_batches) * algorithm.epochs
    return learning_rate(
        updates,
        peak=config.critic.lr if network == "critic" else training.lr,
        total=config.run.total_steps * planned,
        warmup=training.warmup_steps,
        schedule=training.schedule,
        min_ratio=training.min_lr_ratio,
        position=(batch.step - 1) * planned + number * planned / actual,
    )


def check_bad(config: Config, batch: TrainBatch, network: TrainedName, in_a_row: int) -> None:
    """UserError after too many updates with bad gradients."""
    if in_a_row < config.training.max_bad_updates:
        return
    of_critic = network == "critic"
    where = "" if of_critic else f"; the samples are in {config.run.folder / bad_batches.FOLDER}"
    raise UserError(
        f"{in_a_row} updates in a row{' of the critic' if of_critic else ''} had NaN or infinite gradients (step "
        f"{batch.step}{where}); lower {'critic' if of_critic else 'training'}.lr, or raise "
        "training.max_bad_updates to skip more"
    )


def ranks_of(backend: Backend, batch: TrainBatch) -> Ranks:
    """The ranks of the backend, for sums over the samples of the batch."""
    holders = {key: micro.context for micro in micros_of(batch) for row in micro.rows for key in row}
    return Ranks(backend.sum_over_ranks, holders)


def to_column(values: Mapping[Key, Floats], device: torch.device) -> dict[Key, torch.Tensor]:
    return {key: torch.from_numpy(each).to(device) for key, each in values.items()}


def to_numpy(column: Mapping[Key, torch.Tensor], keys: Sequence[Key]) -> dict[Key, Floats]:
    return {key: column[key].double().cpu().numpy() for key in keys}
