"""The FSDP2 backend of a trainer rank: networks and optimizer, sharded over the ranks.

    network ──tensor parallel──> matrices split within a group of ranks ──fully_shard──> every rank holds its shards

Ranks form a mesh of copies x shards x tensor. The ranks of a `tensor` group compute the same micro-batch together; all
other ranks are the data-parallel ranks. Each has its own micro-batch, or shares one with its neighbours (context.py).
Loss denominators are global. FSDP averages gradients over data-parallel ranks, so the loss is multiplied by their
number: the gradient is that of one process that holds the whole batch.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gcore.checkpoint.tensors import Shard, shapes
from gcore.config.tree import Config
from gcore.models.towers import takes_media, tower_parameters
from gcore.protocols import Metric, TrainerInfo
from gcore.training import lora, state, tensor_parallel
from gcore.training.backend import Backend, Network, NewNetwork, by_sample, compute_of
from gcore.training.logprob_model import LogprobModel, Packed, own_experts
from gcore.training.objective import Metrics, Objective, StepData, step_columns, to_metrics
from gcore.training.optimizer import MOMENTS, Optimizer
from gcore.training.shards import copy_weights, fill, local_of, reshard
from gcore.training.state import NetworkName, TrainedName
from gcore.training.step_model import StepBatch, Wrap
from gcore.types import Key, MicroBatch

TOKENS_AT_ONCE, MOST_AT_ONCE = 1 << 16, 4  # without gradients: tokens, and micro-batches of the update
log = logging.getLogger(__name__)
LAYERS_PER_GROUP = 4  # that are cast together where no weights are sharded: fewer hooks on the host


def mixed_precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Parameters are cast, inputs are not: temperatures and rotary angles stay exact, as in an engine."""
    if dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def joined_micros(micros: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """Up to `count` neighbours become one, unless ranks share them. All ranks have equally many."""
    found = list[MicroBatch]()
    for context, group in itertools.groupby(micros, key=lambda micro: micro.context):
        same, step = list(group), count if context == 1 else 1
        for part in (same[first : first + step] for first in range(0, len(same), step)):
            rows = tuple(row for micro in part for row in micro.rows)
            found.append(replace(part[0], rows=rows, width=sum(micro.width for micro in part)))
    return found


class FsdpNetwork(Network):
    """A network as a StepModel, sharded. `optimizer`: None for the reference. `summed`: names of the parameters whose
    gradients are summed over the group `tensor`. `offload`: it leaves the device when it is set aside."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        optimizer: Optimizer | None,
        summed: Sequence[str] = (),
        tensor: Any = None,
        offload: bool = False,
    ) -> None:
        self.model, self.device, self.optimizer = model, device, optimizer
        self._summed, self._tensor, self._offload = summed, tensor, offload

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Those that are trained."""
        return lora.trainable_parameters(self.model.network)

    def on_device(self) -> Any:
        """The model, back from host memory."""
        if self._offload:
            self.model.to(self.device)
        return self.model

    def set_aside(self) -> None:
        if self._offload:
            self.model.cpu()

    def passes(self) -> AbstractContextManager[Any]:
        """The model, for passes without gradients. The reference chooses its experts itself."""
        return own_experts(self.on_device()) if self.optimizer is None else nullcontext(self.on_device())

    def step(self, lr: float) -> float:
        for gradient in (self.model.network.get_parameter(name).grad for name in self._summed):
            if gradient is not None:
                dist.all_reduce(local_of(gradient), group=self._tensor)
        return super().step(lr)

    def shards(self) -> list[Shard]:
        return state.shards_of(self.parameters)

    def _moments(self) -> dict[str, Tensor]:
        """Of the parameters that were updated, with the number of updates."""
        held = self.optimizer.state
        updated = {name: held[parameter] for name, parameter in self.parameters.items() if parameter in held}
        return {f"{name}/{part}": entry[part] for name, entry in updated.items() for part in ("step", *MOMENTS)}

    def moments(self) -> list[Shard]:
        holds = {
            f"{name}/{part}": self.optimizer.holds.get(parameter)
            for name, parameter in self.parameters.items()
            for part in MOMENTS
        }
        return [replace(shard, hold=holds.get(shard.name)) for shard in state.shards_of(self._moments())]

    def load(self, weights: Path, moments: Path) -> None:
        reshard(self.model)  # else a pass could use gathered weights of before
        state.fill(weights, self.parameters)
        if self.optimizer is None:
            return
        self.optimizer.drop_gradients()
        self.optimizer.clear()
        saved = shapes(moments) if moments.is_dir() else {}
        for name, parameter in self.parameters.items():
            if f"{name}/step" in saved:
                self.optimizer.add_state(parameter)
        if saved:
            state.fill(moments, self._moments())


class AdapterReference(Network):
    """The reference of a policy with adapters: a copy of them, which takes their place during its passes."""

    def __init__(self, policy: FsdpNetwork) -> None:
        self._policy, self.adapters = policy, lora.copy_adapters(policy.on_device())

    @contextmanager
    def passes(self) -> Iterator[Any]:
        policy = self._policy.on_device()
        with lora.with_adapters(policy, self.adapters), own_experts(policy):
            yield policy

    def shards(self) -> list[Shard]:
        return state.shards_of(self.adapters)

    def load(self, weights: Path, moments: Path) -> None:
        state.fill(weights, self.adapters)


class FsdpBackend(Backend):
    """`shard`: ranks that share one copy of the weights. `tensor`: ranks that split each matrix. Both divide the number
    of ranks: world = copies x shard x tensor. `context`: see Compute."""

    networks: dict[NetworkName, FsdpNetwork | AdapterReference]

    def __init__(
        self,
        config: Config,
        new: Mapping[TrainedName, NewNetwork],
        device: torch.device,
        dtype: torch.dtype,
        shard: int = 1,
        tensor: int = 1,
        context: int = 1,
    ) -> None:
        super().__init__(config, new, compute_of(config.training, device, dtype, tensor, context))
        shape = (self._data_size // shard, shard, tensor)
        self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "shards", "tensor"))
        offload = config.training.offload
        self._offload = "none" if offload == "auto" else offload  # on GPUs, launch/build.py has decided
        self._shard_size = shard
        self.networks[self._first] = self._make(self._first)

    # ---- networks -------------------------------------------------------------------------------------------------

    def _make(self, name: NetworkName) -> FsdpNetwork | AdapterReference:
        if name == "reference" and self._adapters is not None:
            return AdapterReference(self._trained("policy"))
        new, seed = self._new_of(name), self._config.run.seed
        network = new.make()
        if name == "reference":  # it has no gradients and no optimizer, so the compute dtype is enough
            for parameter in network.parameters():
                parameter.data = parameter.data.to(self._compute.dtype)
        elif name == "policy" and self._config.model.lora is not None:
            self._adapters = lora.adapt(network, self._config.model.lora, seed, self._compute.dtype)
        model, summed = self._shard(network, new.wrap)
        if name == "reference" or (new.open is None and name != self._first):
            copy_weights(model, self._trained("policy").model, self.device)
        elif new.open is not None:
            fill(network, new.open(network), self.device)
            lora.fill_adapters(network, seed)
        # Modes of the reference are those of the policy: compiled layers without gradients are the same for both.
        optimizer = None if name == "reference" else self._new_optimizer(name, model)
        tensor = self._mesh.get_group("tensor")
        return FsdpNetwork(model, self.device, optimizer, summed, tensor, self._offload == "all")

    def _trained(self, name: TrainedName) -> FsdpNetwork:
        network = self.networks[name]
        assert isinstance(network, FsdpNetwork)
        return network

    def _shard(self, network: Any, wrap: Wrap) -> tuple[Any, Sequence[str]]:
        """The network as a StepModel, sharded; names of parameters whose gradients are summed over the tensor group."""
        model = wrap(network, self._compute).train()
        if self._config.training.vision_lr == 0:
            for parameter in self._tower(network):
                parameter.requires_grad_(False)
        if self._config.training.activation_checkpointing is True:
            model.checkpoint_activations()
        summed = tensor_parallel.split(network, self._mesh["tensor"]) if self._compute.tensor_size > 1 else ()
        mixed = mixed_precision(self._compute.dtype)
        mesh = self._mesh["copies", "shards"] if self._mesh.size(0) > 1 else self._mesh["shards"]
        layers = model.layers
        self._compile(layers)
        if self._shard_size > 1 or self.device.type == "cuda":  # else nothing is gathered, one reduction is enough
            size = 1 if self._shard_size > 1 else LAYERS_PER_GROUP
            for first in range(0, len(layers), size):
                group = list(layers[first : first + size])
                fully_shard(group, mesh=mesh, mp_policy=mixed, reshard_after_forward=self._shard_size > 1)
        fully_shard(model, mesh=mesh, mp_policy=mixed)
        return model, summed

    def _tower(self, network: Any) -> list[Tensor]:
        """The parameters that have a learning rate of their own (training.vision_lr)."""
        if self._config.training.vision_lr is None or not takes_media(network):
            return []
        return list(tower_parameters(network).values())

    def _new_optimizer(self, name: NetworkName, model: Any) -> Optimizer:
        training = self._settings_of(name)
        parameters = [p for p in lora.trainable_parameters(model.network).values() if p.requires_grad]
        scales = dict.fromkeys(self._tower(model.network), (training.vision_lr or 0.0) / (training.lr or 1.0))
        keep_bytes = 1e9 * training.offload_keep_gb if name == self._first else 0.0
        return Optimizer(parameters, training, self.device, self._offload != "none", scales, keep_bytes)

    # ---- computation ----------------------------------------------------------------------------------------------

    def info(self) -> TrainerInfo:
        first = self._trained(self._first)
        model, num_parameters = first.model, sum(p.numel() for p in first.parameters.values())
        models = [network.model for network in self.networks.values() if isinstance(network, FsdpNetwork)]
        shares = self._config.training.share_prefixes
        if shares and (reasons := [reason for each in models if (reason := each.unshared)]):
            log.log(
                logging.WARNING if shares is True else logging.INFO,
                "training.share_prefixes=%s: samples share nothing: %s",
                str(shares).lower(),
                reasons[0],
            )
            shares = False
        return TrainerInfo(
            num_parameters, model.hidden_size, model.padded, self._shard_size > 1, self.device_name, shares
        )

    def _pack(self, model: Any, micro: MicroBatch, data: StepData) -> StepBatch:
        ranks = self._context_groups.of(micro.context)  # a collective: also of groups that have only padding
        alike = type(model).pack, model.padded, micro
        if (known := data.packed.get(alike)) is not None:
            return known
        packed: StepBatch = model.pack(micro, data.samples, ranks)
        if isinstance(packed, Packed) and packed.mask_R1WW is None:  # masks are large
            data.packed[alike] = packed
        return packed

    @torch.no_grad()
    def outputs(
        self, network: NetworkName, micros: Sequence[MicroBatch], data: StepData, output: int = 0
    ) -> dict[Key, Tensor]:
        assert network in self.networks, f"no {network}: `begin` or `load` was called without one"
        columns: dict[Key, Tensor] = {}
        with self.networks[network].passes() as model:
            at_once = max(1, min(MOST_AT_ONCE, TOKENS_AT_ONCE // self._config.training.max_tokens_per_gpu))
            alone = model.padded or not isinstance(model, LogprobModel)
            for micro in joined_micros(micros, 1 if alone else at_once):
                packed = self._pack(model, micro, data)
                outputs_S = packed.joined(*model(packed))[output]
                columns |= by_sample(packed, outputs_S, data)
            reshard(model)  # FSDP does so by itself only in a backward pass
        self.set_aside(network)
        return columns

    def forward_backward(
        self, micros: Sequence[MicroBatch], data: StepData, objective: Objective, network: TrainedName = "policy"
    ) -> Mapping[str, Metric]:
        metrics: list[Metrics] = []
        model = self._trained(network).on_device()
        for count, micro in enumerate(micros, start=1):
            packed = self._pack(model, micro, data)
            columns = step_columns(packed, data, self.device)
            # Copies are summed once per mini-batch, and whole weights cast once. Shards at once: otherwise each rank
            # would hold all weights and gradients.
            at_once = count == len(micros) or self._shard_size > 1
            cast(FSDPModule, model).set_requires_gradient_sync(at_once)
            cast(FSDPModule, model).set_reshard_after_backward(at_once)
            loss, parts = objective(packed.joined(*model(packed)), columns)
            (loss * self._data_size).backward()
            metrics.append({name: part.shared_by(micro.context) for name, part in parts.items()})
        return to_metrics(metrics)

    def weights(self, network: TrainedName = "policy") -> Mapping[str, Tensor]:
        trained = self._trained(network)
        trained.on_device()
        return trained.parameters
