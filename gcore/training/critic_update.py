"""The critic's part of a training step: values before the update, then its optimizer steps.

A trainer rank uses it if the critic is on the same ranks as the policy (rank.py), a critic rank if the critic has ranks
of its own (critic_rank.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch

from gcore.config.tree import Config
from gcore.protocols import Metric, UpdateStats, add_metrics
from gcore.training import objective
from gcore.training.backend import Backend, TrainedName
from gcore.training.compute_rank import check_weights, count_bad, learning_rate_of, micros_of, updates_of
from gcore.training.micro import StepData
from gcore.training.step_advantages import Ranks
from gcore.types import Floats, Key, TrainBatch


class CriticUpdate:
    """`network`: the name of the critic in the backend: the only network of a critic rank is its policy."""

    def __init__(self, config: Config, backend: Backend, data: StepData, network: TrainedName) -> None:
        self._config, self._backend, self._data, self._network = config, backend, data, network
        self.updates = self.bad_in_a_row = 0  # without skipped ones, since the start of reinforcement learning

    def train(self, batch: TrainBatch) -> UpdateStats:
        """Needs the columns of values and returns. Independent of the policy's updates, because advantages are fixed:
        so the critic can leave the device before them, or train beside them on other devices."""
        wall, busy = time.perf_counter(), time.thread_time()
        metrics, skipped, clip = dict[str, Metric](), 0, self._config.critic.value_clip
        for number, mini in updates_of(self._config, batch):
            lr = learning_rate_of(self._config, batch, number, self._config.critic.lr, self.updates)
            goal = objective.value(mini, clip)
            found = self._backend.forward_backward(mini.micro_batches, self._data, goal, self._network)
            grad_norm = self._backend.step(lr, self._network)
            finite = math.isfinite(grad_norm)
            self.updates += finite
            self.bad_in_a_row = count_bad(self._config, batch, finite, self.bad_in_a_row, True)
            skipped += not finite
            more = {"grad_norm": grad_norm if finite else 0.0, "lr": lr}
            metrics = add_metrics(metrics, found, {f"critic/{name}": Metric(each) for name, each in more.items()})
        check_weights(self._config, self._backend, batch, self._network, of_critic=True)
        metrics["critic/skipped_updates"] = Metric(float(skipped))  # all ranks count the same: their mean is the count
        busy = time.thread_time() - busy if self._backend.device.type == "cpu" else 0.0
        return UpdateStats(metrics=metrics, wall_s=time.perf_counter() - wall, busy_s=busy)

    def reset(self) -> None:
        self.updates = self.bad_in_a_row = 0

    def counters(self) -> dict[str, float]:
        return {"critic_updates": self.updates, "critic_bad_in_a_row": self.bad_in_a_row}

    def restore(self, counters: Mapping[str, float]) -> None:
        self.updates = int(counters.get("critic_updates", 0))
        self.bad_in_a_row = int(counters.get("critic_bad_in_a_row", 0))


def ranks_of(backend: Backend, batch: TrainBatch) -> Ranks:
    """The ranks of the backend, for sums over the samples of the batch."""
    holders = {key: micro.context for micro in micros_of(batch) for row in micro.rows for key in row}
    return Ranks(backend.sum_over_ranks, holders)


def to_column(values: Mapping[Key, Floats], device: torch.device) -> dict[Key, torch.Tensor]:
    return {key: torch.from_numpy(each).to(device) for key, each in values.items()}


def to_numpy(column: Mapping[Key, torch.Tensor], keys: Sequence[Key]) -> dict[Key, Floats]:
    return {key: column[key].double().cpu().numpy() for key in keys}
