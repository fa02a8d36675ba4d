"""What this rank holds of each parameter, and where its values come from. A parameter may be whole, or sharded in any
way that DTensor describes. Nothing here is a collective.

    make_empty ──> adapters, fully_shard (fsdp.py) ──> fill: memory on the device, then parameter by parameter
                                                             this rank's part of it ──safetensors──> copy

No rank holds the whole model, with the two exceptions that weights/pretrained.py names: then it has the whole model in
host memory while it copies its shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gcore.models.networks import SCORE
from gcore.weights.pretrained import Part, Read, stored_tensors


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor) -> Part:
    """Where `local_of` is in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # of torch.distributed.checkpoint
    assert tuple(chunk.sizes) == tuple(local_of(tensor).shape), f"{tensor.placements} has no contiguous shards"
    return tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Memory on the device for parameters that are on the meta device; their values are arbitrary. Tied parameters stay
    tied. Buffers are moved."""
    for parameter in module.parameters():
        if parameter.is_meta:
            memory = torch.empty_like(parameter, device=device, requires_grad=False)
            torch.utils.swap_tensors(parameter, nn.Parameter(memory, parameter.requires_grad))
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)


def reshard(module: nn.Module) -> None:
    """Drop the parameters that FSDP gathered for the last pass: otherwise it would use them instead of the shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@torch.no_grad()
def fill(network: Any, read: Read, device: torch.device) -> None:
    """Give an empty network its memory on `device` and its starting weights, in the dtype of each parameter."""
    materialise(network, device)
    for name, tensor in stored_tensors(network).items():
        if (local := local_of(tensor)).numel():
            local.copy_(read(name, part_of(tensor)))


@torch.no_grad()
def copy_weights(target: nn.Module, source: nn.Module, device: torch.device) -> None:
    """Make an empty network, sharded like `source`, a copy of it; a value head that `source` lacks becomes zero. Pass
    the modules that `fully_shard` was applied to last, which contain the networks."""
    reshard(source)
    materialise(target, device)
    parameters, buffers = dict(source.named_parameters()), dict(source.named_buffers())
    for name, parameter in target.named_parameters():
        if name in parameters:
            parameter.copy_(parameters[name])
        else:
            assert name.endswith(SCORE), f"the policy has no {name}"
            local_of(parameter).zero_()
    for name, buffer in target.named_buffers():
        buffer.copy_(buffers[name])
