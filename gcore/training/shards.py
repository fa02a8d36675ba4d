"""The part of each parameter that this rank holds. A parameter may be whole or sharded in any way that DTensor
describes. Nothing here is a collective."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gcore.weights.files import Part


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
