"""The FSDP2 backend of a trainer rank: networks and optimizer, sharded over the ranks.

    network ──tensor parallel──> matrices split within a group of ranks ──fully_shard──> every rank holds its shards

Ranks form a mesh of copies x shards x tensor. The ranks of a `tensor` group compute the same micro-batch together; all
other ranks are the data-parallel ranks. Each has its own micro-batch, or shares one with its neighbours (context.py).
Loss denominators are global. FSDP averages gradients over data-parallel ranks, so the loss is multiplied by their
number: the gradient is that of one process that holds the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gcore.config.training import Training
from gcore.config.tree import Config
from gcore.models.towers import takes_media, tower_parameters
from gcore.protocols import Metric, TrainerInfo
from gcore.training import loading, lora, state, tensor_parallel
from gcore.training.backend import NetworkName, Snapshot, TrainedName
from gcore.training.context import ContextGroups
from gcore.training.critic import NewCritic, value_model
from gcore.training.logprob_model import LogprobModel, own_experts
from gcore.training.micro import StepData, step_columns
from gcore.training.objective import Metrics, Objective, to_metrics
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
    which knows what it computes (step_model.py). `critic`: how to make the critic, if there will be one. `folders`: of
    the policy in checkpoints."""

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
        folders: state.Folders = state.POLICY_FOLDERS,
    ) -> None:
        self._folders = folders
        self._config, self._make_network, self.device, self._dtype = config, make_network, device, dtype
        self._wrap = wrap
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
        network, chosen = make_network(), config.model.lora
        self._adapters = lora.adapt(network, chosen, config.run.seed, dtype) if chosen else None
        self.policy = self._shard(network, wrap)
        for power in range(1, context.bit_length()):
            self.policy.check_sharing(2**power)
        if fill is not None:
            fill(network)
        self._reference: Any = None
        self._reference_adapters: dict[str, Tensor] | None = None  # the reference policy, with model.lora
        self._reference_version, self._save_plan = 0, state.SavePlan()
        self.optimizer = self._new_optimizer(self.policy, config.training)
        self._new_critic, self.critic, self.critic_optimizer = critic, cast(Any, None), cast(Any, None)

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

    def _new_reference(self) -> Any:
        """A copy of the policy, sharded like it; each rank copies its shards. It has no gradients and no optimizer, so
        the compute dtype is enough."""
        network = self._make_network()
        for parameter in network.parameters():
            parameter.data = parameter.data.to(self._dtype)
        reference = self._shard(network, self._wrap)
        loading.fill_from(reference, self.policy, self.device)
        return reference.requires_grad_(False).eval()

    def _tower(self, network: Any) -> list[Tensor]:
        """The parameters that have a learning rate of their own (training.vision_lr)."""
        if self._config.training.vision_lr is None or not takes_media(network):
            return []
        return list(tower_parameters(network).values())

    def _make_critic(self) -> None:
        assert self._new_critic is not None, "the backend was made without a critic"
        self.critic = self._shard(self._new_critic.make(), value_model)
        self._new_critic.fill(self.critic, self.policy)
        changes = {"lr": self._config.critic.lr, "max_grad_norm": self._config.critic.max_grad_norm}
        self.critic_optimizer = self._new_optimizer(self.critic, self._config.training.model_copy(update=changes))

    def _new_optimizer(self, model: Any, training: Training) -> Optimizer:
        parameters = [p for p in lora.trainable_parameters(model.network).values() if p.requires_grad]
        scales = dict.fromkeys(self._tower(model.network), (training.vision_lr or 0.0) / (training.lr or 1.0))
        return Optimizer(parameters, training, self.device, self._offload != "none", scales)

    def begin(self, reference: bool, critic: bool = False) -> None:
        self._on_device(self.policy)
        self.optimizer = self._new_optimizer(self.policy, self._config.training)
        self._reference_version += 1
        if reference and self._adapters is not None:
            self._reference_adapters = lora.copy_adapters(self.policy)
        elif reference:
            self._reference = self._new_reference()
        if critic:
            self._make_critic()
            self.set_critic_aside()

    @contextmanager
    def _network(self, name: NetworkName) -> Iterator[Any]:
        """A network on the device, for passes without gradients."""
        if name == "policy":
            yield self._on_device(self.policy)
        elif self._reference_adapters is not None:
            with lora.with_adapters(self._on_device(self.policy), self._reference_adapters), own_experts(self.policy):
                yield self.policy
        else:
            assert self._reference is not None, "no reference: `begin` or `load` was called without one"
            with own_experts(self._on_device(self._reference)) as reference:
                yield reference
            if self._offload == "all":
                self._reference.cpu()

    # ---- computation ----------------------------------------------------------------------------------------------

    def info(self) -> TrainerInfo:
        num_parameters = sum(p.numel() for p in lora.trainable_parameters(self.policy.network).values())
        return TrainerInfo(num_parameters, self.policy.hidden_size, self.policy.padded, self._shard_size > 1)

    def _pack(self, model: Any, micro: MicroBatch, data: StepData) -> StepBatch:
        ranks = self._context_groups.of(micro.context)  # a collective: also of groups that have only padding
        return cast(StepBatch, model.pack(micro, data.samples, ranks))

    def logprobs(
        self, network: NetworkName, micros: Sequence[MicroBatch], data: StepData, output: int = 0
    ) -> dict[Key, Tensor]:
        with self._network(network) as model:
            return self._forward(model, micros, data, output)

    def values(self, micros: Sequence[MicroBatch], data: StepData) -> dict[Key, Tensor]:
        found = self._forward(self._on_device(self.critic), micros, data)
        self.set_critic_aside()
        return found

    @torch.no_grad()
    def _forward(self, model: Any, micros: Sequence[MicroBatch], data: StepData, output: int = 0) -> dict[Key, Tensor]:
        """One of the outputs of the model, for the steps of each sample."""
        found: dict[Key, Tensor] = {}
        for micro in micros:
            packed = self._pack(model, micro, data)
            outputs_S = packed.joined(*model(*packed.inputs))[output]
            for i, key in enumerate(packed.keys):
                found[key] = outputs_S[packed.sample_S == i]
        reshard(model)  # FSDP does so by itself only in a backward pass
        return found

    def forward_backward(
        self, micros: Sequence[MicroBatch], data: StepData, objective: Objective, network: TrainedName = "policy"
    ) -> Mapping[str, Metric]:
        metrics: list[Metrics] = []
        model = self._on_device(self.policy if network == "policy" else self.critic)
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
        model, optimizer = self._trained(network)
        for gradient in (model.network.get_parameter(name).grad for name in self._summed.get(model, ())):
            if gradient is not None:
                dist.all_reduce(local_of(gradient), group=self._mesh.get_group("tensor"))
        return float(optimizer.step(lr))

    def is_finite(self, network: TrainedName = "policy") -> bool:
        return self._trained(network)[1].is_finite()

    def _trained(self, network: TrainedName) -> tuple[Any, Optimizer]:
        return (self.policy, self.optimizer) if network == "policy" else (self.critic, self.critic_optimizer)

    def drop_gradients(self) -> None:
        self.optimizer.drop_gradients()

    def sum_over_ranks(self, values: Array) -> Array:
        total = torch.from_numpy(values).to(self.device)
        dist.all_reduce(total)
        result: Array = total.cpu().numpy() / self._tensor_size  # the ranks of a tensor group have the same samples
        return result

    # ---- weights and files ----------------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, Tensor]:
        self._on_device(self.policy)
        return lora.trainable_parameters(self.policy.network)

    def snapshot(self, counters: Mapping[str, float]) -> Snapshot:
        network, reference = self.policy.network, self._reference_adapters or {}
        if self._reference is not None:
            reference = lora.trainable_parameters(self._reference.network)
        tensors = {
            self._folders.weights: lora.trainable_parameters(network),
            self._folders.optimizer: state.optimizer_state(network, self.optimizer),
            state.REFERENCE: reference,
        }
        if self.critic is not None:
            tensors[state.CRITIC] = lora.trainable_parameters(self.critic.network)
            tensors[state.CRITIC_OPTIMIZER] = state.optimizer_state(self.critic.network, self.critic_optimizer)
        about = {self._folders.about: state.describe(counters, self._adapters)} if dist.get_rank() == 0 else {}
        return Snapshot(self._save_plan.own(tensors), {state.REFERENCE: self._reference_version}, about)

    def load(self, folder: Path, reference: bool, critic: bool = False) -> Mapping[str, float]:
        reshard(self.policy)  # else a pass could use gathered weights of before
        counters = state.load(folder, self.policy.network, self.optimizer, self._adapters, self._folders)
        self._reference_version += 1
        if not reference:
            self._reference = self._reference_adapters = None
        elif self._adapters is not None:
            self._reference_adapters = lora.copy_adapters(self.policy)
            state.load_reference(folder, self._reference_adapters)
        else:
            self._reference = self._reference or self._new_reference()
            reshard(self._reference)
            state.load_reference(folder, lora.trainable_parameters(self._reference.network))
        if critic and self.critic is None:
            self._make_critic()
        elif not critic:
            self.critic = self.critic_optimizer = None
        if critic:
            reshard(self.critic)
            state.load_critic(folder, self.critic.network, self.critic_optimizer)
            self.set_critic_aside()
        return counters

    # ---- memory ---------------------------------------------------------------------------------------------------

    def free_memory(self, weights: bool) -> None:
        if self._offload == "all" and weights:
            self.policy.cpu()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def set_critic_aside(self) -> None:
        if self._offload == "all":
            self.critic.cpu()

    def _on_device(self, model: Any) -> Any:
        """Move a network back from host memory. Does nothing if it is on the device."""
        if self._offload == "all":
            model.to(self.device)
        return model
