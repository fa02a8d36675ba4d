"""The FSDP2 backend of a trainer rank: networks and optimizer, sharded over the ranks.

    network ──tensor parallel──> matrices split within a group of ranks ──fully_shard──> every rank holds its shards

Ranks form a mesh of copies x shards x tensor. The ranks of a `tensor` group compute the same micro-batch together; all
other ranks are the data-parallel ranks. Each has its own micro-batch, or shares one with its neighbours (context.py).
Loss denominators are global. FSDP averages gradients over data-parallel ranks, so the loss is multiplied by their
number: the gradient is that of one process that holds the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gcore.config.tree import Config
from gcore.protocols import Metric, TrainerInfo
from gcore.training import context as context_parallel
from gcore.training import loading, lora, state, tensor_parallel, varlen
from gcore.training.backend import NetworkName, Snapshot
from gcore.training.logprob_model import LogprobModel
from gcore.training.micro import Packed, StepData, step_columns, to_tensors
from gcore.training.objective import Metrics, Objective, StepOutputs, to_metrics
from gcore.training.optimizer import Optimizer
from gcore.training.shards import local_of, reshard
from gcore.training.step_advantages import Array
from gcore.types import Key, MicroBatch

RECOMPILE_LIMIT = 64  # of the code of a layer
LAYERS_PER_GROUP = 4  # that are cast together where no weights are sharded: fewer hooks on the host


class FsdpBackend:
    """Implements backend.Backend. `shard`: ranks that share one copy of the weights. `tensor`: ranks that split each
    matrix. Both divide the number of ranks: world = copies x shard x tensor. `fill`: gives the sharded network its
    weights if `make_network` makes it without (loading.py). `context`: the largest number of data-parallel ranks that
    will share a micro-batch, a power of two, to check at the start that they can."""

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
    ) -> None:
        self._config, self._make_network, self.device, self._dtype = config, make_network, device, dtype
        world = dist.get_world_size()
        self._shard_size, self._tensor_size, self._data_size = shard, tensor, world // tensor
        shape = (world // shard // tensor, shard, tensor)
        self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "shards", "tensor"))
        self._context_groups = context_parallel.ContextGroups(self._data_size, tensor)
        self._summed: tuple[str, ...] = ()  # parameters whose gradients are summed over the tensor group
        offload, compiles = config.training.offload, config.training.compile
        self._offload = "none" if offload == "auto" else offload  # on GPUs, controller/build.py has decided
        self._compiles = device.type == "cuda" if compiles == "auto" else compiles
        network, chosen = make_network(), config.model.lora
        for power in range(1, context.bit_length()):
            self._context_method(network, 2**power)
        self._adapters = lora.adapt(network, chosen, config.run.seed, dtype) if chosen else None
        self.policy = self._shard(network)
        if fill is not None:
            fill(network)
        self._reference: LogprobModel | None = None
        self._reference_adapters: dict[str, Tensor] | None = None  # the reference policy, with model.lora
        self._reference_version, self._save_plan = 0, state.SavePlan()
        self.optimizer = self._new_optimizer()

    # ---- networks -------------------------------------------------------------------------------------------------

    def _shard(self, network: Any) -> LogprobModel:
        model = LogprobModel(network, self._compiles).train()
        self._varlen = varlen.usable(network, self.device, self._dtype)
        if self._config.training.activation_checkpointing is True:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self._tensor_size > 1:
            self._summed = tensor_parallel.split(network, self._mesh["tensor"])
        mixed = MixedPrecisionPolicy()
        if self._dtype != torch.float32:
            mixed = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        mesh = self._mesh["copies", "shards"] if self._mesh.size(0) > 1 else self._mesh["shards"]
        layers = network.get_decoder().layers
        if self._compiles:
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
        outer = dataclasses.replace(mixed, cast_forward_inputs=False)  # temperatures stay exact
        fully_shard(model, mesh=mesh, mp_policy=outer)
        return model

    def _new_reference(self) -> LogprobModel:
        """A copy of the policy, sharded like it; each rank copies its shards. It has no gradients and no optimizer, so
        the compute dtype is enough."""
        network = self._make_network()
        for parameter in network.parameters():
            parameter.data = parameter.data.to(self._dtype)
        reference = self._shard(network)
        loading.fill_from(reference, self.policy, self.device)
        return reference.requires_grad_(False).eval()

    def _new_optimizer(self) -> Optimizer:
        parameters = list(lora.trainable_parameters(self.policy.network).values())
        return Optimizer(parameters, self._config.training, self.device, offload=self._offload != "none")

    def begin(self, reference: bool) -> None:
        self._on_device(self.policy)
        self.optimizer = self._new_optimizer()
        self._reference_version += 1
        if reference and self._adapters is not None:
            self._reference_adapters = lora.copy_adapters(self.policy)
        elif reference:
            self._reference = self._new_reference()

    @contextmanager
    def _network(self, name: NetworkName) -> Iterator[LogprobModel]:
        """A network on the device, for passes without gradients."""
        if name == "policy":
            yield self._on_device(self.policy)
        elif self._reference_adapters is not None:
            with lora.with_adapters(self._on_device(self.policy), self._reference_adapters):
                yield self.policy
        else:
            assert self._reference is not None, "no reference: `begin` or `load` was called without one"
            yield self._on_device(self._reference)
            if self._offload == "all":
                self._reference.cpu()

    # ---- computation ----------------------------------------------------------------------------------------------

    def info(self) -> TrainerInfo:
        network = self.policy.network
        num_parameters = sum(p.numel() for p in lora.trainable_parameters(network).values())
        return TrainerInfo(num_parameters, network.config.hidden_size, not self._varlen, self._shard_size > 1)

    def _pack(self, micro: MicroBatch, data: StepData) -> Packed:
        ranks = self._context_groups.of(micro.context)  # a collective: also of groups that have only padding
        if ranks.size == 1 or not micro.rows:
            return to_tensors(micro, data.samples, self.device, self._varlen)
        method = self._context_method(self.policy.network, micro.context)
        multiple = context_parallel.padding_of(micro.context, method)
        packed = to_tensors(micro, data.samples, torch.device("cpu"), varlen=True, multiple=multiple)
        return context_parallel.split(packed, ranks, method, self.device)

    def _context_method(self, network: Any, size: int) -> context_parallel.Method:
        wanted = self._config.training.context_attention
        return context_parallel.choose_method(network.config, size, self._tensor_size, wanted)

    @torch.no_grad()
    def logprobs(self, network: NetworkName, micros: Sequence[MicroBatch], data: StepData) -> dict[Key, Tensor]:
        found: dict[Key, Tensor] = {}
        with self._network(network) as model:
            for micro in micros:
                packed = self._pack(micro, data)
                logprobs_S, _ = packed.joined(*model(*packed.inputs))
                for i, key in enumerate(packed.keys):
                    found[key] = logprobs_S[packed.sample_S == i]
            reshard(model)  # FSDP does so by itself only in a backward pass
        return found

    def forward_backward(
        self, micros: Sequence[MicroBatch], data: StepData, objective: Objective
    ) -> Mapping[str, Metric]:
        metrics: list[Metrics] = []
        self._on_device(self.policy)
        for count, micro in enumerate(micros, start=1):
            packed = self._pack(micro, data)
            columns = step_columns(packed, data, self.device)
            # Copies are summed once per mini-batch. Shards at once: otherwise each rank would hold all gradients.
            cast(FSDPModule, self.policy).set_requires_gradient_sync(count == len(micros) or self._shard_size > 1)
            outputs = StepOutputs(*packed.joined(*self.policy(*packed.inputs)))
            loss, parts = objective(outputs, columns)
            (loss * self._data_size).backward()
            metrics.append({name: part.shared_by(micro.context) for name, part in parts.items()})
        return to_metrics(metrics)

    def step(self, lr: float) -> float:
        parameters = self.policy.network.get_parameter
        for gradient in (parameters(name).grad for name in self._summed):
            if gradient is not None:
                dist.all_reduce(local_of(gradient), group=self._mesh.get_group("tensor"))
        return self.optimizer.step(lr)

    def sum_over_ranks(self, values: Array) -> Array:
        total = torch.from_numpy(values).to(self.device)
        dist.all_reduce(total)
        result: Array = total.cpu().numpy() / self._tensor_size  # the ranks of a tensor group have the same samples
        return result

    # ---- weights and files ----------------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, Tensor]:
        self._on_device(self.policy)
        return lora.trainable_parameters(self.policy.network)

    def snapshot(self, counters: Mapping[str, int]) -> Snapshot:
        network, reference = self.policy.network, self._reference_adapters or {}
        if self._reference is not None:
            reference = lora.trainable_parameters(self._reference.network)
        tensors = {
            state.WEIGHTS: lora.trainable_parameters(network),
            state.OPTIMIZER: state.optimizer_state(network, self.optimizer),
            state.REFERENCE: reference,
        }
        about = {state.ABOUT: state.describe(counters, self._adapters)} if dist.get_rank() == 0 else {}
        return Snapshot(self._save_plan.own(tensors), {state.REFERENCE: self._reference_version}, about)

    def load(self, folder: Path, reference: bool) -> Mapping[str, int]:
        reshard(self.policy)  # else a pass could use gathered weights of before
        counters = state.load(folder, self.policy.network, self.optimizer, self._adapters)
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
        return counters

    # ---- memory ---------------------------------------------------------------------------------------------------

    def free_memory(self, weights: bool) -> None:
        if self._offload == "all" and weights:
            self.policy.cpu()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _on_device(self, model: LogprobModel) -> LogprobModel:
        """Move a network back from host memory. Does nothing if it is on the device."""
        if self._offload == "all":
            model.to(self.device)
        return model
