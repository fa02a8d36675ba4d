"""The FSDP2 backend of a trainer rank: networks and optimizer, sharded over the ranks.

    network ──tensor parallel──> matrices split within a group of ranks ──fully_shard──> every rank holds its shards

Ranks form a mesh of copies x shards x tensor. The ranks of a `tensor` group compute the same micro-batch together; all
other ranks are the data-parallel ranks. Each has its own micro-batch, or shares one with its neighbours (context.py).
Loss denominators are global. FSDP averages gradients over data-parallel ranks, so the loss is multiplied by their
number: the gradient is that of one process that holds the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gcore.config.tree import Config
from gcore.models.towers import takes_media, tower_parameters
from gcore.protocols import Metric, TrainerInfo
from gcore.training import loading, lora, state, tensor_parallel
from gcore.training.backend import NetworkName, Snapshot, TrainedName
from gcore.training.context import ContextGroups
from gcore.training.critic import NewCritic, value_model
from gcore.training.logprob_model import LogprobModel, own_experts
from gcore.training.objective import Metrics, Objective, StepData, step_columns, to_metrics
from gcore.training.optimizer import Optimizer
from gcore.training.shards import local_of, reshard
from gcore.training.step_advantages import Array
from gcore.training.step_model import Compute, StepBatch, Wrap
from gcore.types import Key, MicroBatch

RECOMPILE_LIMIT = 64  # of the code of a layer
LAYERS_PER_GROUP = 4  # that are cast together where no weights are sharded: fewer hooks on the host


def mixed_precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Parameters are cast, inputs are not: temperatures and rotary angles stay exact, as in an engine."""
    if dtype == torch.float32:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


class FsdpBackend:
    """Implements backend.Backend. `shard`: ranks that share one copy of the weights. `tensor`: ranks that split each
    matrix. Both divide the number of ranks: world = copies x shard x tensor. `fill`: gives the sharded network its
    weights if `make_network` makes it without (loading.py). `context`: the largest number of data-parallel ranks that
    will share a micro-batch, a power of two, to check at the start that they can. `wrap`: makes a network a StepModel,
    which knows what it computes (step_model.py). `critic`: how to make the critic beside the policy, if there will be
    one. `first`: the network that all this is about: of critic ranks, the critic."""

    def __init__(
        self,
        config: Config,
        make_network: Callable[[], Any],
        device: torch.device,
        dtype: torch.dtype,
        shard: int = 1,
        tensor: int = 1,
        fill: Callable[[Any], None] | None = None,
        context: int = 1,
        wrap: Wrap = LogprobModel,
        critic: NewCritic | None = None,
        first: TrainedName = "policy",
    ) -> None:
        self._config, self._make_network, self.device, self._dtype = config, make_network, device, dtype
        self._wrap, self._new_critic, self._first = wrap, critic, first
        world = dist.get_world_size()
        self._shard_size, self._tensor_size, self._data_size = shard, tensor, world // tensor
        shape = (world // shard // tensor, shard, tensor)
        self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "shards", "tensor"))
        self._context_groups = ContextGroups(self._data_size, tensor)
        self._summed = dict[Any, tuple[str, ...]]()
        offload, compiles = config.training.offload, config.training.compile
        self._offload = "none" if offload == "auto" else offload  # on GPUs, launch/build.py has decided
        compiles = device.type == "cuda" if compiles == "auto" else compiles
        self._compute = Compute(device, dtype, compiles, tensor, config.training.context_attention)
        network, chosen = make_network(), config.model.lora if first == "policy" else None
        self._adapters = lora.adapt(network, chosen, config.run.seed, dtype) if chosen else None
        model = self._shard(network, wrap)
        for power in range(1, context.bit_length()):
            model.check_sharing(2**power)
        if fill is not None:
            fill(network)
        self.networks: dict[NetworkName, Any] = {first: model}
        self.optimizers: dict[NetworkName, Optimizer] = {first: self._new_optimizer(first, model)}
        self._reference_adapters: dict[str, Tensor] | None = None  # the reference policy, with model.lora
        self._reference_version, self._save_plan = 0, state.SavePlan()

    # ---- networks -------------------------------------------------------------------------------------------------

    def _shard(self, network: Any, wrap: Wrap) -> Any:
        """The network as a StepModel, sharded."""
        model = wrap(network, self._compute).train()
        if self._config.training.vision_lr == 0:
            for parameter in self._tower(network):
                parameter.requires_grad_(False)
        if self._config.training.activation_checkpointing is True:
            model.checkpoint_activations()
        if self._tensor_size > 1:  # parameters whose gradients are summed over the tensor group
            self._summed[model] = tensor_parallel.split(network, self._mesh["tensor"])
        mixed = mixed_precision(self._dtype)
        mesh = self._mesh["copies", "shards"] if self._mesh.size(0) > 1 else self._mesh["shards"]
        layers = model.layers
        if self._compute.compiled:
            # Variants: with and without gradients, fixed and dynamic shapes, shared sequences. Beyond the limit of 8,
            # layers would run eagerly without a word.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
            if self._config.training.compile == "auto":  # a layer that does not compile runs eagerly, with a warning
                torch._dynamo.config.suppress_errors = True
            for layer in layers:
                layer.compile()
        if self._shard_size > 1 or self.device.type == "cuda":  # else nothing is gathered, one reduction is enough
            size = 1 if self._shard_size > 1 else LAYERS_PER_GROUP
            for first in range(0, len(layers), size):
                group = list(layers[first : first + size])
                fully_shard(group, mesh=mesh, mp_policy=mixed, reshard_after_forward=self._shard_size > 1)
        fully_shard(model, mesh=mesh, mp_policy=mixed)
        return model

    def _add(self, name: NetworkName) -> None:
        """Make a network beside the policy. The reference is a copy of it, sharded like it, of which each rank copies
        its shards; it has no gradients and no optimizer, so the compute dtype is enough."""
        policy = self.networks["policy"]
        if name == "reference":
            network = self._make_network()
            for parameter in network.parameters():
                parameter.data = parameter.data.to(self._dtype)
            model = self._shard(network, self._wrap)
            loading.fill_from(model, policy, self.device)
            model.requires_grad_(False).eval()
        else:
            assert self._new_critic is not None, "the backend was made without a critic"
            model = self._shard(self._new_critic.make(), value_model)
            self._new_critic.fill(model, policy)
            self.optimizers[name] = self._new_optimizer(name, model)
        self.networks[name] = model

    def _tower(self, network: Any) -> list[Tensor]:
        """The parameters that have a learning rate of their own (training.vision_lr)."""
        if self._config.training.vision_lr is None or not takes_media(network):
            return []
        return list(tower_parameters(network).values())

    def _new_optimizer(self, name: NetworkName, model: Any) -> Optimizer:
        training = state.settings_of(self._config, name)
        parameters = [p for p in lora.trainable_parameters(model.network).values() if p.requires_grad]
        scales = dict.fromkeys(self._tower(model.network), (training.vision_lr or 0.0) / (training.lr or 1.0))
        return Optimizer(parameters, training, self.device, self._offload != "none", scales)

    def begin(self, networks: Collection[NetworkName]) -> None:
        first = self._on_device(self.networks[self._first])
        self.optimizers[self._first] = self._new_optimizer(self._first, first)
        self._reference_version += 1
        if "reference" in networks and self._adapters is not None:
            self._reference_adapters = lora.copy_adapters(first)
        elif "reference" in networks:
            self._add("reference")
        if "critic" in networks and self._first != "critic":
            self._add("critic")
            self.set_aside("critic")

    @contextmanager
    def _network(self, name: NetworkName) -> Iterator[Any]:
        """A network on the device, for passes without gradients."""
        if name == "reference" and self._reference_adapters is not None:
            policy = self._on_device(self.networks["policy"])
            with lora.with_adapters(policy, self._reference_adapters), own_experts(policy):
                yield policy
            return
        assert name in self.networks, f"no {name}: `begin` or `load` was called without one"
        model = self._on_device(self.networks[name])
        if name == self._first:
            yield model
            return
        with own_experts(model):
            yield model
        self.set_aside(name)

    # ---- computation ----------------------------------------------------------------------------------------------

    def info(self) -> TrainerInfo:
        model = self.networks[self._first]
        num_parameters = sum(p.numel() for p in lora.trainable_parameters(model.network).values())
        return TrainerInfo(num_parameters, model.hidden_size, model.padded, self._shard_size > 1)

    def _pack(self, model: Any, micro: MicroBatch, data: StepData) -> StepBatch:
        ranks = self._context_groups.of(micro.context)  # a collective: also of groups that have only padding
        return cast(StepBatch, model.pack(micro, data.samples, ranks))

    @torch.no_grad()
    def outputs(
        self, network: NetworkName, micros: Sequence[MicroBatch], data: StepData, output: int = 0
    ) -> dict[Key, Tensor]:
        columns: dict[Key, Tensor] = {}
        with self._network(network) as model:
            for micro in micros:
                packed = self._pack(model, micro, data)
                outputs_S = packed.joined(*model(*packed.inputs))[output]
                for i, key in enumerate(packed.keys):
                    columns[key] = outputs_S[packed.sample_S == i]
            reshard(model)  # FSDP does so by itself only in a backward pass
        return columns

    def forward_backward(
        self, micros: Sequence[MicroBatch], data: StepData, objective: Objective, network: TrainedName = "policy"
    ) -> Mapping[str, Metric]:
        metrics: list[Metrics] = []
        model = self._on_device(self.networks[network])
        for count, micro in enumerate(micros, start=1):
            packed = self._pack(model, micro, data)
            columns = step_columns(packed, data, self.device)
            # Copies are summed once per mini-batch. Shards at once: otherwise each rank would hold all gradients.
            cast(FSDPModule, model).set_requires_gradient_sync(count == len(micros) or self._shard_size > 1)
            loss, parts = objective(packed.joined(*model(*packed.inputs)), columns)
            (loss * self._data_size).backward()
            metrics.append({name: part.shared_by(micro.context) for name, part in parts.items()})
        return to_metrics(metrics)

    def step(self, lr: float, network: TrainedName = "policy") -> float:
        model = self.networks[network]
        for gradient in (model.network.get_parameter(name).grad for name in self._summed.get(model, ())):
            if gradient is not None:
                dist.all_reduce(local_of(gradient), group=self._mesh.get_group("tensor"))
        return float(self.optimizers[network].step(lr))

    def is_finite(self, network: TrainedName = "policy") -> bool:
        return self.optimizers[network].is_finite()

    def drop_gradients(self, network: TrainedName = "policy") -> None:
        self.optimizers[network].drop_gradients()

    def sum_over_ranks(self, values: Array) -> Array:
        total = torch.from_numpy(values).to(self.device)
        dist.all_reduce(total)
        result: Array = total.cpu().numpy() / self._tensor_size  # the ranks of a tensor group have the same samples
        return result

    # ---- weights and files ----------------------------------------------------------------------------------------

    def weights(self, network: TrainedName = "policy") -> Mapping[str, Tensor]:
        return lora.trainable_parameters(self._on_device(self.networks[network]).network)

    def snapshot(self, counters: Mapping[str, float]) -> Snapshot:
        tensors: dict[str, Mapping[str, Tensor]] = {state.REFERENCE: self._reference_adapters or {}}
        for name, model in self.networks.items():
            tensors[state.WEIGHTS[name]] = lora.trainable_parameters(model.network)
            if name in self.optimizers:
                tensors[state.OPTIMIZERS[name]] = state.optimizer_state(model.network, self.optimizers[name])
        about = {state.ABOUT[self._first]: state.describe(counters, self._adapters)} if dist.get_rank() == 0 else {}
        return Snapshot(self._save_plan.own(tensors), {state.REFERENCE: self._reference_version}, about)

    def load(self, folder: Path, networks: Collection[NetworkName]) -> Mapping[str, float]:
        counters = state.counters_of(folder, self._first, self._adapters)
        self._reference_version += 1
        self._reference_adapters = None
        self.networks = {name: model for name, model in self.networks.items() if name in networks}
        self.optimizers = {name: optimizer for name, optimizer in self.optimizers.items() if name in networks}
        for name in sorted(networks, key=state.ORDER.index):  # the policy first: others may start as copies of it
            if name == "reference" and self._adapters is not None:
                self._reference_adapters = lora.copy_adapters(self.networks["policy"])
                state.fill(state.folder_of(folder, name), self._reference_adapters)
                continue
            if name not in self.networks:
                self._add(name)
            reshard(self.networks[name])  # else a pass could use gathered weights of before
            state.load(folder, name, self.networks[name].network, self.optimizers.get(name))
            if name != self._first:
                self.set_aside(name)
        return counters

    # ---- memory ---------------------------------------------------------------------------------------------------

    def free_memory(self, weights: bool) -> None:
        if weights:
            self.set_aside(self._first)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def set_aside(self, network: NetworkName) -> None:
        if self._offload == "all":
            self.networks[network].cpu()

    def _on_device(self, model: Any) -> Any:
        """Move a network back from host memory. Does nothing if it is on the device."""
        if self._offload == "all":
            model.to(self.device)
        return model
