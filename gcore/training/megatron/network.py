"""One network on this rank: chunks of layers, their parameters by Hugging Face name, and perhaps an optimizer.

    empty Hugging Face network ──> chunks (model.py) ──> parameters (weights.py) ──train──> optimizer (optimizer.py)

The reference has no optimizer. The critic has a value head instead of the output matrix.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from gcore.checkpoint.tensors import Shard, ShardFiles
from gcore.config.training import Training
from gcore.models.networks import SCORE
from gcore.training.backend import Network
from gcore.training.fused_head import Head, token_logprobs
from gcore.training.logprob_model import Packed
from gcore.training.megatron import cpu, model
from gcore.training.megatron.optimizer import DistributedAdamW
from gcore.training.megatron.weights import fill, parameters_of
from gcore.training.step_model import Compute
from gcore.types import Topology

LOGITS_AT_ONCE = 1 << 26  # elements on a rank


class MegatronNetwork(Network):
    """`empty`: the Hugging Face network without weights. `critic`: it predicts values."""

    def __init__(self, empty: Any, topology: Topology, compute: Compute, recompute: bool, critic: bool) -> None:
        model.check(empty)
        self.empty, self.is_critic = empty, critic
        self._compute, device = compute, compute.device
        self._vocab = empty.config.vocab_size
        padded = -(-self._vocab // topology.tensor) * topology.tensor
        self._bridge = model.bridge_of(empty, topology, compute.dtype, recompute, device.type == "cpu")
        with self._building():
            self.chunks = model.build(self._bridge, empty, padded, topology.virtual, device, critic)
        self.parameters = parameters_of(self.chunks, self._bridge, empty)
        self.wrapped: list[Any] = []

    def _building(self) -> Any:
        return cpu.building() if self._compute.device.type == "cpu" else nullcontext()

    def train(self, training: Training) -> MegatronNetwork:
        """With gradients and an optimizer. Call it when the weights are there."""
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        settings = self._bridge.config
        settings.finalize_model_grads_func = finalize_model_grads
        with self._building():
            self.wrapped = [
                DistributedDataParallel(settings, ddp, chunk, disable_bucketing=number > 0)
                for number, chunk in enumerate(self.chunks)
            ]
            half = self._compute.dtype == torch.bfloat16
            self.optimizer = DistributedAdamW(self.wrapped, self.parameters, training, half)
        return self

    def freeze(self) -> MegatronNetwork:
        for chunk in self.chunks:
            chunk.requires_grad_(False).eval()
        return self

    # ---- values ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def copy(self, source: MegatronNetwork) -> None:
        """The weights of another network of the same layout; a value head becomes zero. Before `train`."""
        for ours, theirs in zip(self.chunks, source.chunks, strict=True):
            theirs_by_name = dict(theirs.named_parameters())
            for name, parameter in ours.named_parameters():
                if name == SCORE:
                    parameter.zero_()
                else:
                    parameter.copy_(theirs_by_name[name])

    def outputs(self, packed: Packed, hidden: Tensor) -> tuple[Tensor, ...]:
        """Of the last stage: logprobs and entropies, or values. `hidden`: rows x tokens x size."""
        hidden_SD, last = hidden.flatten(0, 1)[packed.select_S], self.chunks[-1]
        if self.is_critic:
            return packed.joined(hidden_SD.float() @ last.score.weight[0].float())
        tied = last.share_embeddings_and_output_weights
        weight_VD = last.shared_embedding_or_output_weight() if tied else last.output_layer.weight  # this rank's rows
        first = parallel_state.get_tensor_model_parallel_rank() * len(weight_VD)
        head = Head(
            max(1, LOGITS_AT_ONCE * (4 if self._compute.compiled else 1) // len(weight_VD)),
            group=parallel_state.get_tensor_model_parallel_group() if self._compute.tensor_size > 1 else None,
            first=first,
            size=max(0, min(len(weight_VD), self._vocab - first)),
            compiled=self._compute.compiled,
        )
        asked = packed.targets_S, packed.temperature_S, packed.sampling_mask
        return packed.joined(*token_logprobs(head, hidden_SD, weight_VD, *asked))

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def shards(self) -> list[Shard]:
        """Its ranges in float32, or of a frozen network everything."""
        if self.optimizer is not None:
            ranges: list[Shard] = self.optimizer.weights()
            return ranges
        whole = [(p, p.value.detach().view(-1)) for p in self.parameters if p.own]
        return [shard for p, flat in whole for shard in p.shards(flat, 0, len(flat))]

    def moments(self) -> list[Shard]:
        moments: list[Shard] = self.optimizer.moments()
        return moments

    def load(self, weights: Path, moments: Path) -> None:
        files = ShardFiles(weights)
        fill(self.parameters, files.part)
        if self.optimizer is None:
            return
        with torch.no_grad():
            for shard in self.optimizer.weights():
                files.read(shard)
        self.optimizer.drop_gradients()
        self.optimizer.restore(ShardFiles(moments) if moments.is_dir() else None)
