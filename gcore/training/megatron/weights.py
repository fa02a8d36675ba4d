"""The parameters of this rank's chunks by Hugging Face names: filled from files, gathered for engines, as shards.

chunks ──Parameter: blocks of each parameter (layout.py)──> fill: this rank reads its own boxes
                                                       ├──> gathered: one whole tensor at a time, on every rank
                                                       └──> Shard: boxes of weights and moments for a checkpoint
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from gcore.checkpoint.tensors import Shard
from gcore.models.networks import SCORE
from gcore.training.megatron.layout import Block, Box, Dimensions, blocks_of, boxes, is_split
from gcore.weights.pretrained import Read

TIED = "output_layer.weight"


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """A parameter of a chunk. `own`: this rank saves and publishes it; the copy of a tied one is only filled."""

    value: Tensor
    blocks: Sequence[Block]
    own: bool = True

    def boxes(self, start: int = 0, end: int | None = None) -> Iterator[Box]:
        return boxes(self.blocks, tuple(self.value.shape), start, self.value.numel() if end is None else end)

    def shards(self, flat: Tensor, start: int, end: int, suffix: str = "") -> list[Shard]:
        """The elements `start` to `end` of the parameter, or moments of them, which `flat` holds."""
        return [
            Shard(box.name + suffix, box.whole, box.offset, flat[box.start - start : box.end - start].view(box.shape))
            for box in self.boxes(start, end)
        ]


def parameters_of(chunks: Sequence[Any], bridge: Any, network: Any) -> list[Parameter]:
    """All parameters of this rank. `network`: the empty Hugging Face network."""
    config = network.config
    shape = Dimensions(
        {name: tuple(tensor.shape) for name, tensor in network.named_parameters()},
        config.num_attention_heads,
        config.num_key_value_heads,
        bridge.config.kv_channels,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    embeddings = next(name for name, p in network.named_parameters() if p is network.get_input_embeddings().weight)
    head = embeddings if config.tie_word_embeddings else "lm_head.weight"
    direct = {"embedding.word_embeddings.weight": embeddings, TIED: head, SCORE: SCORE}
    found, sparse = [], bridge.config.num_moe_experts is not None
    for chunk in chunks:
        for name, value in chunk.named_parameters():
            name = _in_model(name, chunk, config)
            names = [direct[name]] if name in direct else bridge._weight_name_mapping_mcore_to_hf(_fused(name, sparse))
            own = not (name == TIED and config.tie_word_embeddings)
            found.append(Parameter(value, blocks_of(name, names, tuple(value.shape), shape), own))
            # Megatron does so when it initialises weights. Its norm counts other parameters once per tensor group.
            value.tensor_model_parallel = shape.size > 1 and is_split(name)
    return found


def _in_model(name: str, chunk: Any, config: Any) -> str:
    """With the number of the layer in the model, and of the expert among all."""
    if found := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
        layer = chunk.decoder.layers[int(found[1])]
        name = f"decoder.layers.{layer.layer_number - 1}.{found[2]}"
    if found := re.search(r"\.local_experts\.(\d+)\.", name):
        own = config.num_experts // parallel_state.get_expert_model_parallel_world_size()
        number = parallel_state.get_expert_model_parallel_rank() * own + int(found[1])
        name = name.replace(found[0], f".local_experts.{number}.")
    return name


def _fused(name: str, sparse: bool) -> str:
    """The name with layers of Transformer Engine, which fuse norms and stack experts: mbridge knows these."""
    name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if not sparse:
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    if found := re.search(r"\.local_experts\.(\d+)(\..*\.weight)", name):
        return name.replace(found[0], f"{found[2]}{found[1]}")
    return name


def fill(parameters: Sequence[Parameter], read: Read) -> None:
    """Read this rank's boxes. Rows that only pad a matrix are zero. Not a collective."""
    with torch.no_grad():
        for parameter in parameters:
            flat = parameter.value.view(-1)
            if sum(block.count for block in parameter.blocks) < parameter.value.shape[0]:
                flat.zero_()
            for box in parameter.boxes():
                part = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
                flat[box.start : box.end].view(box.shape).copy_(read(box.name, part))


# ---- for engines ----------------------------------------------------------------------------------------------------

Place = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape of a box


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A tensor whose boxes are on several ranks. `full_tensor` is a collective of all ranks, as that of a DTensor."""

    shape: torch.Size
    dtype: torch.dtype
    holders: Mapping[int, Sequence[Place]]  # rank -> boxes that it sends
    mine: Sequence[Tensor]  # of this rank, in the order of its boxes
    device: torch.device

    def numel(self) -> int:
        return math.prod(self.shape)

    def full_tensor(self) -> Tensor:
        whole, rank = torch.empty(self.shape, dtype=self.dtype, device=self.device), dist.get_rank()
        for holder, places in self.holders.items():
            sizes = [math.prod(size) for _, size in places]
            sent = torch.cat([part.reshape(-1) for part in self.mine]) if holder == rank else None
            block = torch.empty(sum(sizes), dtype=self.dtype, device=self.device) if sent is None else sent
            dist.broadcast(block, holder)
            for (offset, size), values in zip(places, block.split(sizes), strict=True):
                whole[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))] = values.view(size)
        return whole


class Gatherer:
    """Which rank sends which box: of ranks that hold the same one, the first. Decided once, in a collective."""

    def __init__(self, parameters: Sequence[Parameter], network: Any, device: torch.device) -> None:
        self._parameters, self._device = [parameter for parameter in parameters if parameter.own], device
        self._shapes = {name: tensor.shape for name, tensor in network.named_parameters()}
        held = [(box.name, box.offset, box.shape) for parameter in self._parameters for box in parameter.boxes()]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, held)
        self._holders: dict[str, dict[int, list[Place]]] = {name: {} for name in self._shapes}
        seen = set()
        for rank, boxes_of_rank in enumerate(gathered):
            for name, offset, shape in boxes_of_rank:
                if (name, offset) not in seen:
                    seen.add((name, offset))
                    self._holders[name].setdefault(rank, []).append((offset, shape))

    def tensors(self) -> dict[str, Gathered]:
        """All tensors of the model, in the order of the Hugging Face network."""
        rank, mine = dist.get_rank(), dict[tuple[str, tuple[int, ...]], Tensor]()
        for parameter in self._parameters:
            flat = parameter.value.detach().view(-1)
            for box in parameter.boxes():
                mine[box.name, box.offset] = flat[box.start : box.end]
        dtype = self._parameters[0].value.dtype
        return {
            name: Gathered(
                shape, dtype, holders, [mine[name, offset] for offset, _ in holders.get(rank, ())], self._device
            )
            for (name, shape), holders in zip(self._shapes.items(), self._holders.values(), strict=True)
        }
