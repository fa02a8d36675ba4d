"""The Megatron-Core backend of a trainer rank: networks split by tensor, pipeline and expert, and AdamW over the rest.

    micro-batches ──Megatron's schedule: forward, backward of each stage──> last stage: logprobs ──> objective ──> loss
    gradients ──reduce-scatter──> distributed optimizer (optimizer.py) ──all-gather──> weights by Hugging Face name

Ranks are ordered as in types.Topology. Ranks of one tensor group and of one pipeline have the same samples. Experts are
divided among data-parallel ranks. Context parallelism is that of gcore: data-parallel ranks share a row
(training/context.py). Loss denominators are global, and gradients are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from gcore.config.tree import Config
from gcore.protocols import Metric, TrainerInfo
from gcore.training.backend import Backend, NewNetwork, by_sample, compute_of
from gcore.training.logprob_model import LogprobModel, Packed
from gcore.training.megatron import cpu
from gcore.training.megatron.model import Row
from gcore.training.megatron.network import MegatronNetwork
from gcore.training.megatron.weights import Gatherer, fill
from gcore.training.objective import Metrics, Objective, StepData, step_columns, to_metrics
from gcore.training.state import NetworkName, TrainedName
from gcore.types import Key, MicroBatch, Topology
from gcore.weights.bucket import Parameter


class MegatronBackend(Backend):
    """`new`: networks without weights, for names, shapes and configuration, and their starting weights. `context`: see
    Compute."""

    def __init__(
        self,
        config: Config,
        new: Mapping[TrainedName, NewNetwork],
        device: torch.device,
        dtype: torch.dtype,
        topology: Topology,
        context: int = 1,
    ) -> None:
        compute = compute_of(config.training, device, dtype, topology.tensor, context)
        super().__init__(config, new, compute, topology.pipeline)
        if device.type == "cpu":
            cpu.patch()
        cpu.without_transformer_engine()
        cpu.without_warnings()
        self._topology = topology
        parallel_state.destroy_model_parallel()  # of an earlier backend in this process
        parallel_state.initialize_model_parallel(
            topology.tensor,
            topology.pipeline,
            topology.virtual if topology.virtual > 1 else None,
            expert_model_parallel_size=topology.expert,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        self.networks["policy"] = policy = self._make("policy")
        self._packer = LogprobModel(policy.empty, compute)  # only packs: its network has no weights
        self._gatherer = Gatherer(policy.parameters, policy.empty, device)

    def _make(self, name: NetworkName) -> MegatronNetwork:
        new, recompute = self._new_of(name), self._config.training.activation_checkpointing is True
        empty = new.make()
        network = MegatronNetwork(empty, self._topology, self._compute, recompute, critic=name == "critic")
        for chunk in network.chunks:
            self._compile(chunk.decoder.layers)
        if name == "reference" or new.open is None:
            network.copy(self.networks["policy"])
        else:
            fill(network.parameters, new.open(empty))
        return network.freeze() if name == "reference" else network.train(self._settings_of(name))

    # ---- computation ----------------------------------------------------------------------------------------------

    def info(self) -> TrainerInfo:
        num_parameters = sum(parameter.numel() for parameter in self.networks["policy"].empty.parameters())
        packer, shared = self._packer, self._topology.expert > 1
        return TrainerInfo(num_parameters, packer.hidden_size, packer.padded, shared, self.device_name)

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
            answers = self._run(chosen.chunks, batches, read, forward_only=True)
        real = [packed for packed in batches if not packed.is_padding]
        sizes = [len(packed.sample_S) for packed in real]
        if answers is None:
            all_S = torch.empty(sum(sizes), device=self.device)
        else:
            values = [answer for answer, packed in zip(answers, batches, strict=True) if not packed.is_padding]
            all_S = torch.cat([torch.empty(0, device=self.device), *values])
        if self._topology.pipeline > 1:
            dist.broadcast(all_S, *self._last_stage)
        columns: dict[Key, Tensor] = {}
        for packed, values_S in zip(real, all_S.split(sizes), strict=True):
            columns |= by_sample(packed, values_S, data)
        return columns

    @property
    def _last_stage(self) -> tuple[int, Any]:
        """Its rank, and the group of the ranks of a pipeline."""
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        return last, parallel_state.get_pipeline_model_parallel_group()

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
            return loss * (self._data_size * len(batches)), {}

        self._run(trained.wrapped, batches, loss_of, forward_only=False)
        shared = [to_metrics(metrics)]
        if self._topology.pipeline > 1:
            dist.broadcast_object_list(shared, *self._last_stage, device=self.device)
        return shared[0]

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

        def forward_step(data: Iterator[Packed], chunk: Any, *rest: Any) -> tuple[Tensor, Callable[..., Any]]:
            packed = next(data)
            row = Row(qkv_format="sbhd", packed=packed)  # not "thd", which would need Transformer Engine
            output = chunk(packed.tokens_RW, packed.positions_RW, None, packed_seq_params=row)
            return output, partial(use, packed)

        iterators = [iter(batches) for _ in chunks]
        answers: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=1,  # of no meaning: shapes are sent along
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return answers if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else None

    # ---- weights --------------------------------------------------------------------------------------------------

    def weights(self, network: TrainedName = "policy") -> Mapping[str, Parameter]:
        assert network == "policy", "a critic of Megatron-Core has no ranks of its own"
        return self._gatherer.tensors()
