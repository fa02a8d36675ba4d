"""The Megatron-Core backend of a trainer rank: networks split by tensor, pipeline and expert, and AdamW over the rest.

    micro-batches ──Megatron's schedule: forward, backward of each stage──> last stage: head.py ──> objective ──> loss
    gradients ──reduce-scatter──> distributed optimizer (optimizer.py) ──all-gather──> weights by Hugging Face name

Ranks are ordered as in types.Topology. Ranks of one tensor group and of one pipeline have the same samples. Experts are
divided among data-parallel ranks. Context parallelism is that of gcore: data-parallel ranks share a row
(training/context.py). Loss denominators are global, and gradients are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gcore.config.tree import Config
from gcore.protocols import Metric, TrainerInfo
from gcore.training import state
from gcore.training.backend import NetworkName, Snapshot, TrainedName
from gcore.training.context import ContextGroups
from gcore.training.critic import HEAD, NewCritic
from gcore.training.logprob_model import LogprobModel, Packed
from gcore.training.megatron import cpu
from gcore.training.objective import Metrics, Objective, StepData, step_columns, to_metrics
from gcore.training.step_advantages import Array
from gcore.training.step_model import Compute
from gcore.types import Key, MicroBatch, Topology
from gcore.weights.pretrained import Read
from gcore.weights.publisher import Parameter

OpenWeights = Callable[[Any], Read]  # empty Hugging Face network -> its starting weights, part by part


class MegatronBackend:
    """Implements backend.Backend. `make_network`: the Hugging Face network without weights, for names, shapes and
    configuration. `open_weights`: its starting weights. `context`, `critic`: as in FsdpBackend."""

    def __init__(
        self,
        config: Config,
        make_network: Callable[[], Any],
        device: torch.device,
        dtype: torch.dtype,
        topology: Topology,
        open_weights: OpenWeights,
        context: int = 1,
        critic: NewCritic | None = None,
    ) -> None:
        if device.type == "cpu":
            cpu.patch()
        cpu.without_transformer_engine()
        from megatron.core import parallel_state

        from gcore.training.megatron.weights import Gatherer

        self._config, self.device, self._dtype, self._topology = config, device, dtype, topology
        parallel_state.destroy_model_parallel()  # of an earlier backend in this process
        parallel_state.initialize_model_parallel(
            topology.tensor,
            topology.pipeline,
            topology.virtual if topology.virtual > 1 else None,
            expert_model_parallel_size=topology.expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        self._make_network, empty = make_network, make_network()
        compute = Compute(device, dtype, False, topology.tensor, config.training.context_attention)
        self._packer = LogprobModel(empty, compute)  # only packs: its network has no weights
        for power in range(1, context.bit_length()):
            self._packer.check_sharing(2**power)
        self._context_groups = ContextGroups(topology.data_parallel, topology.tensor, topology.pipeline)
        policy = self._network(empty)
        policy.fill(open_weights(empty))
        policy.train(config.training)
        self._gatherer = Gatherer(policy.parameters, empty, device)
        self._new_critic = critic
        self.networks: dict[NetworkName, Any] = {"policy": policy}  # network.Network
        self._reference_version, self._save_plan = 0, state.SavePlan()

    # ---- networks -------------------------------------------------------------------------------------------------

    def _network(self, empty: Any, critic: bool = False) -> Any:
        from gcore.training.megatron.network import Network

        recompute = self._config.training.activation_checkpointing is True
        return Network(empty, self._topology, self.device, self._dtype, recompute, critic)

    def begin(self, networks: Collection[NetworkName]) -> None:
        policy = self.networks["policy"]
        policy.optimizer.zero_grad()
        policy.optimizer.clear()
        self._reference_version += 1
        if "reference" in networks:
            self._add("reference")
            self.networks["reference"].copy(policy)
        if "critic" in networks:
            self.networks.pop("critic", None)
            self._add("critic")

    def _add(self, name: NetworkName) -> None:
        """Make a network beside the policy, if it is not there. A reference has no weights yet."""
        if name in self.networks:
            return
        if name == "reference":
            self.networks[name] = self._network(self._make_network()).freeze()
            return
        assert self._new_critic is not None, "the backend was made without a critic"
        empty = self._new_critic.make()
        self.networks[name] = critic = self._network(empty, critic=True)
        if self._new_critic.read is None:
            critic.copy(self.networks["policy"])
        else:
            read, names = self._new_critic.read(empty)
            size = empty.config.hidden_size
            critic.fill(lambda n, part: read(n, part) if n in names or n != HEAD else torch.zeros(1, size)[part])
        critic.train(state.settings_of(self._config, name))

    # ---- computation ----------------------------------------------------------------------------------------------

    def info(self) -> TrainerInfo:
        num_parameters = sum(parameter.numel() for parameter in self.networks["policy"].empty.parameters())
        return TrainerInfo(num_parameters, self._packer.hidden_size, self._packer.padded, self._topology.expert > 1)

    def outputs(
        self, network: NetworkName, micros: Sequence[MicroBatch], data: StepData, output: int = 0
    ) -> dict[Key, Tensor]:
        assert output == 0, "language models have no other outputs that a pass needs"
        assert network in self.networks, f"no {network}: `begin` or `load` was called without one"
        chosen = self.networks[network]

        def read(packed: Packed, hidden: Tensor, non_loss_data: bool = True) -> Tensor:
            first: Tensor = chosen.outputs(packed, hidden)[0]
            return first

        batches = self._pack(micros, data)
        with torch.no_grad():
            found = self._run(chosen.chunks, batches, read, forward_only=True)
        sizes = [0 if packed.is_padding else len(packed.sample_S) for packed in batches]
        columns: dict[Key, Tensor] = {}
        for packed, values_S in zip(batches, self._from_last_stage(found, sizes), strict=True):
            for i, key in enumerate(packed.keys if not packed.is_padding else ()):
                columns[key] = values_S[packed.sample_S == i]
        return columns

    def forward_backward(
        self, micros: Sequence[MicroBatch], data: StepData, objective: Objective, network: TrainedName = "policy"
    ) -> Mapping[str, Metric]:
        trained, batches, metrics = self.networks[network], self._pack(micros, data), list[Metrics]()
        contexts = {id(packed): micro.context for packed, micro in zip(batches, micros, strict=False)}

        def loss_of(packed: Packed, hidden: Tensor) -> tuple[Tensor, dict[str, Any]]:
            loss, parts = objective(trained.outputs(packed, hidden), step_columns(packed, data, self.device))
            if context := contexts.get(id(packed)):  # else a batch that only fills the schedule
                metrics.append({name: part.shared_by(context) for name, part in parts.items()})
            # Megatron divides by the number of micro-batches, and averages over data-parallel ranks.
            return loss * (self._topology.data_parallel * len(batches)), {}

        self._run(trained.wrapped, batches, loss_of, forward_only=False)
        return self._metrics_of_last_stage(to_metrics(metrics))

    def _pack(self, micros: Sequence[MicroBatch], data: StepData) -> list[Packed]:
        """As tensors. With virtual stages, Megatron's schedule needs a multiple of the pipeline's length."""
        groups = self._context_groups  # a collective: also of groups that have only padding
        batches = [self._packer.pack(micro, data.samples, groups.of(micro.context)) for micro in micros]
        if self._topology.virtual > 1:
            missing = -len(batches) % self._topology.pipeline
            batches += [self._packer.pack(MicroBatch((), 8), {}, groups.of(1)) for _ in range(missing)]
        return batches

    def _run(
        self, chunks: Sequence[Any], batches: Sequence[Packed], use: Callable[..., Any], forward_only: bool
    ) -> list[Any] | None:
        """Megatron's schedule. `use`: called on the last stage with each micro-batch and its hidden states. Returns its
        answers if there is no gradient; None on other stages."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        from gcore.training.megatron.model import Row

        def forward_step(data: Iterator[Packed], chunk: Any, *rest: Any) -> tuple[Tensor, Callable[..., Any]]:
            packed = next(data)
            output = chunk(packed.tokens_RW, packed.positions_RW, None, packed_seq_params=Row.of(packed))
            return output, partial(use, packed)

        iterators = [iter(batches) for _ in chunks]
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=1,  # of no meaning: shapes are sent along
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return found if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else None

    def _from_last_stage(self, found: Sequence[Tensor] | None, sizes: Sequence[int]) -> list[Tensor]:
        """What the last stage has for each micro-batch, on every stage."""
        from megatron.core import parallel_state

        parts = [values[:size] for values, size in zip(found, sizes, strict=True)] if found else []
        joined = torch.cat(parts) if parts else torch.empty(sum(sizes), device=self.device)
        if self._topology.pipeline > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(joined, last, group=self._pipeline_group())
        return list(joined.split(list(sizes)))

    def _metrics_of_last_stage(self, metrics: Mapping[str, Metric]) -> Mapping[str, Metric]:
        from megatron.core import parallel_state

        if self._topology.pipeline > 1:
            shared = [metrics]
            last, group = parallel_state.get_pipeline_model_parallel_last_rank(), self._pipeline_group()
            dist.broadcast_object_list(shared, last, group=group, device=self.device)
            (metrics,) = shared
        return metrics

    def _pipeline_group(self) -> Any:
        from megatron.core import parallel_state

        return parallel_state.get_pipeline_model_parallel_group()

    def step(self, lr: float, network: TrainedName = "policy") -> float:
        return float(self.networks[network].optimizer.step(lr))

    def is_finite(self, network: TrainedName = "policy") -> bool:
        return bool(self.networks[network].optimizer.is_finite())

    def drop_gradients(self, network: TrainedName = "policy") -> None:
        self.networks[network].optimizer.zero_grad()

    def sum_over_ranks(self, values: Array) -> Array:
        total = torch.from_numpy(values).to(self.device)
        dist.all_reduce(total)
        copies = self._topology.tensor * self._topology.pipeline  # ranks that have the same samples
        result: Array = total.cpu().numpy() / copies
        return result

    # ---- weights and files ----------------------------------------------------------------------------------------

    def weights(self, network: TrainedName = "policy") -> Mapping[str, Parameter]:
        assert network == "policy", "a critic of Megatron-Core has no ranks of its own"
        return self._gatherer.tensors()

    def snapshot(self, counters: Mapping[str, float]) -> Snapshot:
        held = {state.WEIGHTS[name]: network.shards() for name, network in self.networks.items()}
        kinds = set(held)
        for name, network in self.networks.items():
            if network.optimizer is not None and network.optimizer.has_moments:
                held[state.OPTIMIZERS[name]] = network.optimizer.moments()
                kinds.add(state.OPTIMIZERS[name])
        about = {state.ABOUT["policy"]: state.describe(counters, None)} if dist.get_rank() == 0 else {}
        versions = {state.REFERENCE: self._reference_version}
        return Snapshot(self._save_plan.own_of(held, frozenset(kinds)), versions, about)

    def load(self, folder: Path, networks: Collection[NetworkName]) -> Mapping[str, float]:
        counters = state.counters_of(folder, "policy")
        self._reference_version += 1
        self.networks = {name: network for name, network in self.networks.items() if name in networks}
        for name in sorted(networks, key=state.ORDER.index):  # the policy first: a critic may start as a copy of it
            self._add(name)
            moments = folder / state.OPTIMIZERS[name] if name in state.OPTIMIZERS else None
            self.networks[name].load(state.folder_of(folder, name), moments)
        return counters

    def set_aside(self, network: NetworkName) -> None:
        pass  # training.offload is refused

    def free_memory(self, weights: bool) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
