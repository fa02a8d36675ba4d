"""The library that shards and computes the networks of a rank: its interface, and what all backends share.

    TrainerRank ──samples, columns, objective──> Backend ──> logprobs, gradients, optimizer step, weights by name
                                                    └── Network: this rank's share of the policy, reference or critic

A backend holds the rank's share of one or more networks, by name, and of their optimizers. It knows nothing about
controllers, files of a run, schedules or algorithms. It alone opens the content of samples. Every method is a
collective: all ranks call it, in the same order, from one thread. Implementations: fsdp.py, megatron/backend.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gcore.checkpoint.tensors import Shard
from gcore.checkpoint.writer import Snapshot
from gcore.config.training import Training
from gcore.config.tree import Config
from gcore.models.networks import Adapters, compile_each
from gcore.protocols import Metric, TrainerInfo
from gcore.training import state
from gcore.training.context import ContextGroups
from gcore.training.logprob_model import LogprobModel
from gcore.training.objective import Objective, StepData
from gcore.training.state import NetworkName, SavePlan, TrainedName
from gcore.training.step_advantages import Array
from gcore.training.step_model import Compute, StepBatch, Wrap
from gcore.types import Key, MicroBatch
from gcore.weights.bucket import Parameter
from gcore.weights.pretrained import Read


@dataclass(frozen=True, slots=True)
class NewNetwork:
    """How a backend makes a network. `make`: of Hugging Face, perhaps without weights. `wrap`: makes it a StepModel,
    which knows what it computes (step_model.py). `open`: its starting weights, for a network without them; None: it
    has them, or it starts as a copy of the policy."""

    make: Callable[[], Any]
    wrap: Wrap = LogprobModel
    open: Callable[[Any], Read] | None = None


def by_sample(packed: StepBatch, outputs_S: Tensor, data: StepData) -> dict[Key, Tensor]:
    """The outputs of each sample's steps. The host knows their numbers and does not wait for the device."""
    if packed.is_padding:
        return {}
    sizes = [data.samples[key].num_steps for key in packed.keys]
    return dict(zip(packed.keys, outputs_S.split(sizes), strict=True))


class Network(ABC):
    """This rank's share of a network. `optimizer`: of one that is trained, FSDP's or Megatron's."""

    optimizer: Any = None

    @abstractmethod
    def shards(self) -> list[Shard]:
        """What this rank holds of the weights, without a copy."""

    def moments(self) -> list[Shard]:
        """The same of the optimizer."""
        return []

    @abstractmethod
    def load(self, weights: Path, moments: Path) -> None:
        """From folders of a checkpoint. The second one may not exist: the optimizer has no moments then."""

    def step(self, lr: float) -> float:
        return float(self.optimizer.step(lr))

    def set_aside(self) -> None:  # noqa: B027
        """To host memory, if the backend can."""


class Backend(ABC):
    """`new`: the networks that this rank may train, the first of which is made at once. `stages`: ranks that divide the
    layers. They have the same samples, as the ranks that split each matrix."""

    networks: dict[NetworkName, Any]  # each a Network

    def __init__(
        self, config: Config, new: Mapping[TrainedName, NewNetwork], compute: Compute, stages: int = 1
    ) -> None:
        self.device, self.networks, self.trained = compute.device, {}, tuple(new)
        self._config, self._new, self._compute = config, new, compute
        self._copies = compute.tensor_size * stages
        self._data_size = dist.get_world_size() // self._copies
        self._context_groups = ContextGroups(self._data_size, compute.tensor_size, stages)
        self._first: TrainedName = next(iter(new))  # of critic ranks the critic, else the policy
        self._adapters: Adapters | None = None  # of the policy, with model.lora
        self._reference_version, self._save_plan = 0, SavePlan()

    @abstractmethod
    def _make(self, name: NetworkName) -> Network:
        """A network in its starting state. The reference is a copy of the policy."""

    def _new_of(self, name: NetworkName) -> NewNetwork:
        return self._new["critic" if name == "critic" else "policy"]

    def _compile(self, layers: Iterable[nn.Module]) -> None:
        if self._compute.compiled:
            compile_each(layers, must=self._config.training.compile is True)

    def _settings_of(self, name: NetworkName) -> Training:
        """Of its optimizer."""
        training, critic = self._config.training, self._config.critic
        if name != "critic":
            return training
        return training.model_copy(update={"lr": critic.lr, "max_grad_norm": critic.max_grad_norm})

    def end_warm_start(self, networks: Collection[NetworkName]) -> None:
        """Reinforcement learning starts with these networks. Optimizers are reset. The current weights of the policy
        become those of the reference. A critic beside a policy is made now."""
        optimizer = self.networks[self._first].optimizer
        optimizer.drop_gradients()
        optimizer.clear()
        self._reference_version += 1
        self.networks = {self._first: self.networks[self._first]}
        self._bring(networks)

    def _bring(self, networks: Collection[NetworkName]) -> None:
        """Make those that are not there; the policy is there already."""
        for name in networks:
            if name not in self.networks:
                self.networks[name] = self._make(name)
                self.set_aside(name)

    # ---- computation ----------------------------------------------------------------------------------------------

    @abstractmethod
    def info(self) -> TrainerInfo: ...

    @abstractmethod
    def outputs(
        self, network: NetworkName, micros: Sequence[MicroBatch], data: StepData, output: int = 0
    ) -> dict[Key, Tensor]:
        """One output of the network's StepModel for the steps of each sample, without gradients. The first is the
        logprob, or the value of a critic."""

    @abstractmethod
    def forward_backward(
        self, micros: Sequence[MicroBatch], data: StepData, objective: Objective, network: TrainedName = "policy"
    ) -> Mapping[str, Metric]:
        """Add the gradients of a mini-batch. The backend runs the micro-batches and calls the objective on each."""

    def step(self, lr: float, network: TrainedName = "policy") -> float:
        """One optimizer step with the gradients, which are clipped first and dropped afterwards. Returns their norm
        before clipping. If it is NaN or infinite, no weight changes."""
        return float(self.networks[network].step(lr))

    def is_finite(self, network: TrainedName = "policy") -> bool:
        """No trained weight of this rank's share is NaN or infinite."""
        return bool(self.networks[network].optimizer.is_finite())

    def drop_gradients(self, network: TrainedName = "policy") -> None:
        """Instead of a step."""
        self.networks[network].optimizer.drop_gradients()

    @property
    def device_name(self) -> str:
        """Of a GPU, else empty."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""

    def sum_over_ranks(self, values: Array) -> Array:
        """The sums over all data-parallel ranks, on each of them."""
        total = torch.from_numpy(values).to(self.device)
        dist.all_reduce(total)
        result: Array = total.cpu().numpy() / self._copies
        return result

    # ---- weights and files ----------------------------------------------------------------------------------------

    @abstractmethod
    def weights(self, network: TrainedName = "policy") -> Mapping[str, Parameter]:
        """The trained parameters by their Hugging Face names, sharded: the publisher gathers them one by one."""

    def snapshot(self, counters: Mapping[str, float]) -> Snapshot:
        """What this rank writes of a checkpoint: references, which the caller copies before any other call."""
        held, places = dict[str, list[Shard]](), set[tuple[str, int]]()
        for name, network in self.networks.items():
            held[state.WEIGHTS[name]] = network.shards()
            if network.optimizer is not None:
                held[state.OPTIMIZERS[name]] = network.moments()
            places.add((name, network.optimizer.num_moments if network.optimizer is not None else 0))
        about = {state.ABOUT[self._first]: state.describe(counters, self._adapters)} if dist.get_rank() == 0 else {}
        return Snapshot(self._save_plan.own(held, frozenset(places)), {state.REFERENCE: self._reference_version}, about)

    def load(self, folder: Path, networks: Collection[NetworkName]) -> Mapping[str, float]:
        """Bring these networks to the state that was saved, by any number of ranks; there are no others afterwards.
        Returns the counters. Not a collective."""
        counters = state.counters_of(folder, self._first, self._adapters)
        self._reference_version += 1
        self.networks = {name: network for name, network in self.networks.items() if name in networks}
        self._bring(networks)
        for name in networks:
            moments = folder / state.OPTIMIZERS.get(name, "")
            self.networks[name].load(state.weights_folder(folder, name), moments)
            self.set_aside(name)
        return counters

    # ---- memory ---------------------------------------------------------------------------------------------------

    def set_aside(self, network: NetworkName) -> None:
        """It is not needed until the next training step; with training.offload=all it leaves the device. That of which
        there is always more to come stays: the policy, or the critic on ranks of its own."""
        if network != self._first:
            self.networks[network].set_aside()

    def free_memory(self, weights: bool) -> None:
        """Engines use the device until the next call. Free what is not needed, and with training.offload move what it
        says to host memory; the next call moves it back. `weights`: also those of the policy, which were sent."""
        if weights:
            self.networks[self._first].set_aside()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def compute_of(training: Training, device: torch.device, dtype: torch.dtype, tensor: int, context: int) -> Compute:
    compiled = device.type == "cuda" if training.compile == "auto" else training.compile
    return Compute(device, dtype, compiled, tensor, training.context_attention, context)
