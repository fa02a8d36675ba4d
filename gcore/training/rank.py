"""A trainer rank: it receives samples, fills their columns, and updates its networks.

    push (samples by key, from every controller) ──> prepare: passes fill columns (old, reference logprobs, values)
        └──KL of each sample──> controllers ──advantage of each sample──> update: critic, then policy ──> weight_bucket

A rank holds networks by name (backend.py), and trains, saves and loads each of them in the same way. It does not know
how they are sharded or computed. It trains the policy, and the critic beside it; or one of them, if the critic has
ranks of its own (placement.critic). Then two columns go from one to the other, through the controller that made the
sample: the values, and the penalties of the KL. Both compute advantages and returns by the same pure function
(step_advantages.py). All computation runs in one thread, so that the rank can answer calls while it computes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import torch

from gcore.checkpoint.writer import BackgroundWriter, Snapshot
from gcore.config.algorithm import Algorithm
from gcore.config.tree import Config
from gcore.content.media import on_device
from gcore.models.networks import SCORE
from gcore.observe.trace import Tracer
from gcore.protocols import Metric, Receivers, TrainerInfo, UpdateStats, WeightPlan, Weights
from gcore.threads import use_threads
from gcore.training import bad_batches, objective, preference
from gcore.training.backend import Backend
from gcore.training.objective import ENTROPY, KL, UPDATE_KL, ColumnName, Objective, StepData
from gcore.training.schedule import Coefficients, learning_rate_of, peak_of
from gcore.training.shards import local_of, part_of
from gcore.training.state import NetworkName, TrainedName
from gcore.training.step_advantages import GlobalSums, explained_variance, step_targets
from gcore.types import Floats, Key, MicroBatch, MiniBatch, Sample, TrainBatch, UserError, Written
from gcore.weights.bucket import unpack_bucket
from gcore.weights.publisher import WeightPublisher

P = ParamSpec("P")
T = TypeVar("T")
PREFIX: dict[TrainedName, str] = {"policy": "", "critic": "critic_"}  # of counters in checkpoints


@dataclasses.dataclass(slots=True)
class UpdateCounts:
    """Of a network that a rank trains: its optimizer steps since reinforcement learning started."""

    updates: int = 0  # without skipped ones; determines the warm-up of the learning rate
    bad_in_a_row: int = 0  # skipped ones


def in_compute_thread(
    method: Callable[Concatenate[TrainerRank, P], T],
) -> Callable[Concatenate[TrainerRank, P], Coroutine[Any, Any, T]]:
    """A call of the rank that computes."""

    async def call(rank: TrainerRank, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await rank.compute(method, rank, *args, **kwargs)

    return functools.update_wrapper(call, method)


class TrainerRank:
    """Implements protocols.Trainer. `make_backend` is called in the compute thread. The caller has set up the process
    group (launch/build.py). `own_loss`: algorithm.policy_loss, if it is a function of the user. `in_place`: off-loaded
    moments are not copied for checkpoints."""

    def __init__(
        self,
        config: Config,
        make_backend: Callable[[], Backend],
        rank: int,
        threads: int,
        tracer: Tracer,
        publisher: WeightPublisher | None = None,
        own_loss: objective.OwnLoss | None = None,
        in_place: bool = True,
    ) -> None:
        self._config, self._rank, self._tracer, self._own_loss = config, rank, tracer, own_loss
        self._data = StepData()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._pool.submit(use_threads, threads).result()
        self.backend = self._pool.submit(make_backend).result()
        self._writer = BackgroundWriter(rank, self.backend.device, config.checkpoint.asynchronous, in_place)
        self._publisher = publisher or WeightPublisher(rank)
        self._policy_names = set[str]()  # of the policy's weights that a critic on ranks of its own has received
        self._after_warm_start = False
        self._reset()
        first = self.backend.trained[0]
        if not self._pool.submit(self.backend.is_finite, first).result():
            raise UserError(
                f"the weights of the {first} are NaN or infinite before the first update; expected a model with finite "
                "ones (key: model.path)"
            )

    def _reset(self) -> None:
        self.trained = {name: UpdateCounts() for name in self.backend.trained}
        self.coefficients = Coefficients.of(self._config.algorithm)

    async def compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In the compute thread, after the copy of a snapshot: every function may change or move what is copied. Even
        a pass of the reference does, which writes its adapters into the policy for a while."""

        def fenced() -> T:
            self._writer.fence()
            return function(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._pool, fenced)

    @property
    def _algorithm(self) -> Algorithm:
        """With the current coefficients."""
        return self.coefficients.applied(self._config.algorithm)

    @property
    def _networks(self) -> list[NetworkName]:
        """Of reinforcement learning. A warm start trains the policy alone."""
        with_reference = self._config.has_reference and "policy" in self.trained
        return [*self.trained, "reference"] if with_reference else [*self.trained]

    async def info(self) -> TrainerInfo:
        return self.backend.info()

    @in_compute_thread
    def end_warm_start(self) -> None:
        if "policy" not in self.trained and self._config.critic_copies_policy:
            missing = self.backend.weights("critic").keys() - self._policy_names - {SCORE}
            assert not missing, f"the policy has no {sorted(missing)[:3]}"
        self.backend.end_warm_start(self._networks)
        self._reset()
        self._after_warm_start = True

    # ---- columns --------------------------------------------------------------------------------------------------

    async def push(self, source: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            assert sample.key not in self._data.samples, f"{sample.key} pushed twice (now by controller {source})"
            self._data.samples[sample.key] = sample

    @in_compute_thread
    def compute_logprobs(self, batch: TrainBatch) -> Mapping[Key, float]:
        with self._tracer.span("passes", step=batch.step):
            self._fill_columns(batch)
        algorithm, columns = self._algorithm, self._data.columns
        if batch.objective != "policy" or "policy" not in self.trained or not algorithm.kl_in_reward:
            return {}
        of_kl = partial(objective.kl_penalty, estimator=algorithm.kl_estimator)
        kl = to_numpy(batch.keys, of_kl, columns["old_logprobs"], columns["ref_logprobs"])
        penalties = {key: algorithm.kl_coef * kl_S for key, kl_S in kl.items()}
        if algorithm.kl_per_step:
            columns["penalties"] = to_column(penalties, self.backend.device)
            return {}
        return {key: float(penalty_S[self._data.samples[key].mask_S].sum()) for key, penalty_S in penalties.items()}

    def _fill_columns(self, batch: TrainBatch) -> None:
        for column, network in self._passes(batch).items():
            output = 2 if column == "ref_location" else 0
            self._data.columns[column] = self.backend.outputs(network, micros_of(batch), self._data, output)

    def _passes(self, batch: TrainBatch) -> dict[ColumnName, NetworkName]:
        """Forward passes before the update, by the column that each one fills. Old logprobs are needed if a step has
        several updates, because the policy changes between them, and for the KL in the reward."""
        algorithm, passes = self._config.algorithm, dict[ColumnName, NetworkName]()
        if batch.objective != "policy":
            if batch.objective != "warm_start" and self._config.needs.reference:
                passes["ref_logprobs"] = "reference"
            if batch.objective == "kto":
                passes["old_logprobs"] = "policy"
            return passes
        if "policy" in self.trained:
            if len(batch.mini_batches) * algorithm.epochs > 1 or algorithm.kl_in_reward:
                passes["old_logprobs"] = "policy"
            if algorithm.kl_coef > 0:
                passes["ref_location" if algorithm.kl_of_gaussians else "ref_logprobs"] = "reference"
        if "critic" in self.trained:
            passes["values"] = "critic"
        return passes

    @in_compute_thread
    def column(self, name: ColumnName, keys: Sequence[Key]) -> Mapping[Key, Floats]:
        column = self._data.columns[name]
        return {key: column[key].cpu().numpy() for key in keys}

    async def take_column(self, name: ColumnName, values: Mapping[Key, Floats]) -> None:
        self._data.columns.setdefault(name, {}).update(to_column(values, self.backend.device))

    def _fill_targets(self, batch: TrainBatch) -> dict[str, Metric]:
        """Fill what the networks are trained towards: the columns of advantages and of returns. Returns metrics, which
        are equal on all ranks."""
        algorithm, sums = self._config.algorithm, sums_of(self.backend, batch)
        samples, columns = self._data.samples, self._data.columns
        read = partial(to_numpy, batch.keys, lambda column: column)
        penalties = read(columns.get("penalties", {})) if algorithm.kl_per_step else None
        values = read(columns.get("values", {})) if algorithm.estimator.critic else None
        advantages = {key: batch.advantages[key] for key in batch.keys}
        targets = step_targets(samples, advantages, algorithm, sums, penalties, values)
        if "policy" in self.trained:
            columns["advantages"] = to_column(targets.advantages, self.backend.device)
        if values is None or "critic" not in self.trained:
            return {}
        columns["returns"] = to_column(targets.returns, self.backend.device)
        masks = {key: samples[key].mask_S for key in batch.keys}
        return {"critic/explained_variance": Metric(explained_variance(targets.returns, values, masks, sums))}

    # ---- updates --------------------------------------------------------------------------------------------------

    @in_compute_thread
    def update(self, batch: TrainBatch) -> UpdateStats:
        self._publisher.release()
        algorithm, by_rewards = self._config.algorithm, batch.objective == "policy"
        totals = UpdateStats(metrics=self._fill_targets(batch) if by_rewards else {})
        with self._tracer.span("update", step=batch.step):
            if by_rewards and "critic" in self.trained:
                totals += self._train_critic(batch)
            only_critic = by_rewards and algorithm.estimator.critic and batch.step <= self._config.critic.warmup_steps
            if "policy" in self.trained and not only_critic:
                totals += self._train("policy", batch)
                if by_rewards:
                    totals += UpdateStats(metrics=self._adapt(batch, totals.metrics))
        self._tracer.flush()
        self._forget()
        return totals

    def _forget(self) -> None:
        self._data.clear()
        self.backend.free_memory(weights=False)

    @in_compute_thread
    def evaluate(self, batch: TrainBatch) -> Mapping[str, Metric]:
        self._fill_columns(batch)
        outputs = self.backend.outputs("policy", micros_of(batch), self._data)
        goals = [(self._objective(batch, mini), mini) for mini in batch.mini_batches]  # may be collective
        parts = [
            preference.without_gradients(goal, micro, outputs, self._data)
            for goal, mini in goals
            for micro in mini.micro_batches
            if micro.rows
        ]
        self._forget()
        return objective.to_metrics(parts)

    def _train(self, network: TrainedName, batch: TrainBatch) -> UpdateStats:
        """One optimizer step per mini-batch and epoch, until the policy has moved too far."""
        algorithm, counts, total, stopped = self._config.algorithm, self.trained[network], UpdateStats(), False
        epochs = algorithm.epochs if batch.objective == "policy" else 1
        limit = algorithm.early_stop_kl if network == "policy" else None
        for number, mini in enumerate(mini for _ in range(epochs) for mini in batch.mini_batches):
            lr = learning_rate_of(self._config, batch, number, network, counts.updates)
            wall, busy = time.perf_counter(), time.thread_time()  # a thread that waits for another rank uses no CPU
            goal = self._objective(batch, mini, network)
            metrics = self.backend.forward_backward(mini.micro_batches, self._data, goal, network)
            if limit is not None and (stopped := self._mean_over_ranks(metrics.get(UPDATE_KL)) > limit):
                self.backend.drop_gradients(network)
                break
            grad_norm = self.backend.step(lr, network)  # on a GPU it ends with a value that is read: passes are done
            wall, busy = time.perf_counter() - wall, time.thread_time() - busy
            finite = math.isfinite(grad_norm)
            counts.updates += finite
            counts.bad_in_a_row = 0 if finite else counts.bad_in_a_row + 1
            if not finite:
                if network == "policy":
                    self._dump(batch, number, mini)
                self._check_gradients(network, batch)
            busy = busy if self.backend.device.type == "cpu" else 0.0
            norm = grad_norm if finite else 0.0
            total += UpdateStats(1, int(not finite), norm, lr, metrics, wall, busy, counts.bad_in_a_row, 1)
        self._check_weights(network, batch)
        if limit is not None:
            total += UpdateStats(metrics={"actor/stopped_early": Metric(float(stopped))})
        return total

    def _check_gradients(self, network: TrainedName, batch: TrainBatch) -> None:
        """UserError after too many updates with bad gradients."""
        in_a_row, key = self.trained[network].bad_in_a_row, peak_of(self._config, batch, network)[0]
        if in_a_row < self._config.training.max_bad_updates:
            return
        whose, where = " of the critic", ""
        if network == "policy":
            whose, where = "", f"; the samples are in {self._config.run.folder / bad_batches.FOLDER}"
        raise UserError(
            f"{in_a_row} updates in a row{whose} had NaN or infinite gradients (step {batch.step}{where}); "
            f"lower {key}, or raise training.max_bad_updates to skip more"
        )

    def _check_weights(self, network: TrainedName, batch: TrainBatch) -> None:
        """A collective. UserError if the weights are ruined: all later updates would be skipped. They must reach
        neither engines nor checkpoints."""
        if not self.backend.sum_over_ranks(np.array([not self.backend.is_finite(network)], np.float64))[0]:
            return
        key, lr = peak_of(self._config, batch, network)
        raise UserError(
            f"the weights of the {network} became NaN or infinite in the update of step {batch.step} ({key}={lr:g}); "
            f"expected finite weights: lower {key}, and check training.eps and weight_decay"
        )

    def _train_critic(self, batch: TrainBatch) -> UpdateStats:
        """Needs the columns of values and returns. Independent of the policy's updates, because advantages are fixed:
        so the critic can leave the device before them, or train beside them on other devices."""
        stats = self._train("critic", batch)
        self.backend.set_aside("critic")
        means = {"grad_norm": stats.grad_norm, "lr": stats.lr}
        metrics = {
            **stats.metrics,
            **{f"critic/{name}": Metric(total, float(stats.updates)) for name, total in means.items()},
            "critic/skipped_updates": Metric(float(stats.skipped)),  # all ranks count the same: the mean is the count
        }
        return UpdateStats(metrics=metrics, wall_s=stats.wall_s, busy_s=stats.busy_s, mini_batches=stats.mini_batches)

    def _mean_over_ranks(self, metric: Metric | None) -> float:
        """A collective, also for a rank that has no samples and so no metric."""
        metric = metric or Metric(0.0, 0.0)
        total, weight = self.backend.sum_over_ranks(np.array([metric.total, metric.weight]))
        return float(total / max(weight, 1e-9))

    def _adapt(self, batch: TrainBatch, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """The coefficients of the next training step; returns those of this one."""
        algorithm, now, used = self._config.algorithm, self.coefficients, dict[str, Metric]()
        if algorithm.adaptive_kl is not None:
            used["actor/kl_coef"] = Metric(now.kl)
            num_samples = sum(mini.num_samples for mini in batch.mini_batches)
            now = now.after_kl(algorithm.adaptive_kl, self._mean_over_ranks(metrics.get(KL)), num_samples)
        if algorithm.adaptive_entropy is not None:
            used["actor/entropy_coef"] = Metric(now.applied(algorithm).entropy_coef)
            now = now.after_entropy(algorithm.adaptive_entropy, self._mean_over_ranks(metrics.get(ENTROPY)))
        self.coefficients = now
        return used

    def _objective(self, batch: TrainBatch, mini: MiniBatch, network: TrainedName = "policy") -> Objective:
        if network == "critic":
            return objective.value(mini, self._config.critic.value_clip)
        name, settings = batch.objective, self._config.preference
        if name in ("warm_start", "sft"):
            return objective.demonstrations(mini, name)
        if name == "kto":
            ratios = preference.mismatched_kl((k for m in mini.micro_batches for r in m.rows for k in r), self._data)
            sums = sums_of(self.backend, batch)
            total, count = sums.total({key: np.array([kl, 1.0]) for key, kl in ratios.items()}, 2)
            return preference.kto(settings, mini, max(0.0, float(total) / max(float(count), 1.0)))
        if name in preference.PAIR_LOSSES:
            return preference.preference(name, settings, mini)
        longest = self._config.generation.max_response_length
        return objective.policy(self._algorithm, mini, longest, self._own_loss)

    def _dump(self, batch: TrainBatch, number: int, mini: MiniBatch) -> None:
        """Write the samples of this rank to a file. All ranks call this, because the forward pass is collective."""
        micros = mini.micro_batches
        now = self.backend.outputs("policy", micros, self._data)
        samples = [self._data.samples[key] for micro in micros for row in micro.rows for key in row]
        columns = {"logprobs": now, **{str(name): values for name, values in self._data.columns.items()}}
        bad_batches.dump(self._config.run.folder, (batch.step, number + 1, self._rank), samples, columns)

    # ---- weights --------------------------------------------------------------------------------------------------

    @in_compute_thread
    def weight_plan(self) -> WeightPlan:
        return self._publisher.plan(self.backend.weights())

    @in_compute_thread
    def weight_bucket(self, index: int, receivers: Receivers) -> Weights:
        parameters = self.backend.weights()
        bucket, plan = self._publisher.bucket(parameters, index, receivers), self._publisher.plan(parameters)
        if index + 1 == (plan.critic_buckets if receivers.are_critics else plan.num_buckets):
            self.backend.free_memory(weights=True)
        return bucket

    @in_compute_thread
    @torch.no_grad()
    def load_policy(self, weights: Weights) -> None:
        """Each rank copies its shards of the tensors that the critic has: it has no head for tokens."""
        tensors, own = unpack_bucket(weights), cast(Mapping[str, torch.Tensor], self.backend.weights("critic"))
        for name in own.keys() & tensors.keys():
            if (local := local_of(own[name])).numel():
                local.copy_(tensors[name][part_of(own[name])])
            self._policy_names.add(name)
        local_of(own[SCORE]).zero_()

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    @in_compute_thread
    def snapshot(self) -> int:
        if "policy" not in self.trained and not self._after_warm_start:  # then the critic is not part of a checkpoint
            return self._writer.stage(Snapshot({}))
        counters: dict[str, float] = self.coefficients.counters() if "policy" in self.trained else {}
        for name, counts in self.trained.items():
            counters |= {f"{PREFIX[name]}{field}": value for field, value in dataclasses.asdict(counts).items()}
        return self._writer.stage(self.backend.snapshot(counters))

    async def write(self, folder: str) -> Written:
        with self._tracer.span("write", lane="checkpoint"):
            return await asyncio.wrap_future(self._writer.write(Path(folder)))

    async def abandon(self) -> None:
        await asyncio.to_thread(self._writer.abandon)

    async def load(self, folder: str, after_warm_start: bool = True) -> None:
        await self.abandon()
        await self.compute(self._load, Path(folder), after_warm_start)

    def _load(self, folder: Path, after_warm_start: bool) -> None:
        self._publisher.release()
        self._data.clear()
        networks = self._networks if after_warm_start else [name for name in self._networks if name == "policy"]
        if not networks:  # a warm start has no critic yet
            return
        counters = self.backend.load(folder, networks)
        for name in self.trained.keys() & networks:
            at = {field.name: f"{PREFIX[name]}{field.name}" for field in dataclasses.fields(UpdateCounts)}
            self.trained[name] = UpdateCounts(**{field: int(counters.get(key, 0)) for field, key in at.items()})
        self.coefficients = Coefficients.restored(counters, self._config.algorithm)
        self._after_warm_start = after_warm_start


# ---- pure functions -------------------------------------------------------------------------------------------------


def micros_of(batch: TrainBatch) -> list[MicroBatch]:
    return [micro for mini in batch.mini_batches for micro in mini.micro_batches]


def sums_of(backend: Backend, batch: TrainBatch) -> GlobalSums:
    """Over the samples of the batch, of all ranks of the backend."""
    holders = {key: micro.context for micro in micros_of(batch) for row in micro.rows for key in row}
    return GlobalSums(backend.sum_over_ranks, holders)


def to_column(values: Mapping[Key, Floats], device: torch.device) -> dict[Key, torch.Tensor]:
    if not values:
        return {}
    joined = on_device(np.concatenate([*values.values()]), device)
    return dict(zip(values, joined.split([len(each) for each in values.values()]), strict=True))


def to_numpy(
    keys: Sequence[Key], of: Callable[..., torch.Tensor], *columns: Mapping[Key, torch.Tensor]
) -> dict[Key, Floats]:
    """A function of the steps' values in some columns, computed and copied for all samples together."""
    if not keys:
        return {}
    values = of(*(torch.cat([column[key] for key in keys]) for column in columns)).double().cpu().numpy()
    ends = np.cumsum([len(columns[0][key]) for key in keys])
    return dict(zip(keys, np.split(values, ends[:-1]), strict=True))
