"""The interface between a trainer rank (rank.py) and the library that shards and computes the networks.

    TrainerRank ──samples, columns, objective──> Backend ──> logprobs, gradients, optimizer step, weights by name

A backend holds the rank's share of one or more networks, by name, and of their optimizers: policy, reference, critic.
It knows nothing about controllers, files of a run, schedules or algorithms. It alone opens the content of samples.
Every method is a collective: all ranks call it, in the same order, from one thread. Implementations: fsdp.py,
megatron/backend.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from gcore.checkpoint.tensors import Shard
from gcore.protocols import Metric, TrainerInfo
from gcore.training.objective import Objective, StepData
from gcore.training.step_advantages import Array
from gcore.types import Key, MicroBatch
from gcore.weights.publisher import Parameter

NetworkName = Literal["policy", "reference", "critic"]
TrainedName = Literal["policy", "critic"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Snapshot({"weights": [...], "reference": [...]}, versions={"reference": 1}, about={"trainer.json": b"..."})"""

    shards: Mapping[str, Sequence[Shard]]  # by folder
    versions: Mapping[str, int]  # of folders that rarely change: the same version has the same values
    about: Mapping[str, bytes]  # more files


class Backend(Protocol):
    device: torch.device

    def info(self) -> TrainerInfo: ...

    def outputs(
        self, network: NetworkName, micros: Sequence[MicroBatch], data: StepData, output: int = 0
    ) -> dict[Key, Tensor]:
        """One output of the network's StepModel for the steps of each sample, without gradients. The first is the
        logprob, or the value of a critic."""
        ...

    def forward_backward(
        self, micros: Sequence[MicroBatch], data: StepData, objective: Objective, network: TrainedName = "policy"
    ) -> Mapping[str, Metric]:
        """Add the gradients of a mini-batch. The backend runs the micro-batches and calls the objective on each."""
        ...

    def step(self, lr: float, network: TrainedName = "policy") -> float:
        """One optimizer step with the gradients, which are clipped first and dropped afterwards. Returns their norm
        before clipping. If it is NaN or infinite, no weight changes."""
        ...

    def is_finite(self, network: TrainedName = "policy") -> bool:
        """No trained weight of this rank's share is NaN or infinite."""
        ...

    def drop_gradients(self, network: TrainedName = "policy") -> None:
        """Instead of a step."""
        ...

    def set_aside(self, network: NetworkName) -> None:
        """It is not needed until the next training step; with training.offload=all it leaves the device."""
        ...

    def begin(self, networks: Collection[NetworkName]) -> None:
        """Reinforcement learning starts with these networks. Optimizers are reset. The current weights of the policy
        become those of the reference. A critic beside a policy is made now."""
        ...

    def sum_over_ranks(self, values: Array) -> Array:
        """The sums over all data-parallel ranks, on each of them."""
        ...

    def weights(self, network: TrainedName = "policy") -> Mapping[str, Parameter]:
        """The trained parameters by their Hugging Face names, sharded: the publisher gathers them one by one."""
        ...

    def snapshot(self, counters: Mapping[str, float]) -> Snapshot:
        """What this rank writes of a checkpoint: references, which the caller copies before any other call."""
        ...

    def load(self, folder: Path, networks: Collection[NetworkName]) -> Mapping[str, float]:
        """Bring these networks to the state that was saved, by any number of ranks; there are no others afterwards.
        Returns the counters. Not a collective."""
        ...

    def free_memory(self, weights: bool) -> None:
        """Engines use the device until the next call. Free what is not needed, and with training.offload move what it
        says to host memory; the next call moves it back. `weights`: also those of the policy, which were sent."""
        ...
