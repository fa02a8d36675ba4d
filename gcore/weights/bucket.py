"""A bucket: some of the weights, packed into one block of memory with a checksum.

    tensors ──pack_bucket──> block of bytes ──to_payload──> array in host memory, CUDA IPC handle or broadcast ticket
    payload ──unpack_bucket──> block of bytes ──checksum──> tensors (views of the block)

One block instead of one array per tensor: every handle, array and kernel launch has a fixed cost, and a bucket may
hold hundreds of tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from gcore.protocols import Weights
from gcore.weights.broadcast import BroadcastTicket, receive_broadcast

BUCKET_BYTES = 2**30  # a bucket is closed when it holds more than this
PACKED = "#packed"  # the only key of packed weights: {PACKED: Bucket(...)}
ALIGN = 16  # tensors start at multiples of this, so that a view of any dtype is aligned
ROW = 2**16  # int64 words per partial sum of the checksum

Table = tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape and dtype of every tensor


class CudaHandle:
    """A tensor in the GPU memory of its process. Another process on the same GPU maps it (CUDA IPC)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        self._open, self._args = reduce_tensor(tensor)

    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self._open(*self._args)
        return tensor


Payload = np.ndarray | CudaHandle | BroadcastTicket


@dataclass(frozen=True, slots=True)
class Bucket:
    """Bucket((("norm", (8,), "bfloat16"),), payload=..., checksum=1234)"""

    table: Table
    payload: Payload
    checksum: int


class Sharded(Protocol):
    """A parameter whose parts are on several ranks, of a backend that does not use DTensor."""

    def numel(self) -> int: ...

    def full_tensor(self) -> torch.Tensor:
        """Collective of all ranks: the whole tensor, on each of them."""


Parameter = torch.Tensor | Sharded


def bucket_names(parameters: Mapping[str, Parameter], dtype: torch.dtype) -> list[list[str]]:
    """The names of the parameters of each bucket, in order. Sizes are those in `dtype`, the engines' precision."""
    buckets: list[list[str]] = [[]]
    size = 0
    for name, parameter in parameters.items():
        if size > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += parameter.numel() * dtype.itemsize
    return buckets


def pack_bucket(tensors: Mapping[str, torch.Tensor], to_payload: Callable[[torch.Tensor], Payload]) -> Weights:
    """Copy the tensors into one new block. `to_payload` turns the block into what another process can receive."""
    table = tuple((name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items())
    device = next(iter(tensors.values())).device
    block = torch.zeros(_offsets(table)[-1], dtype=torch.uint8, device=device)
    for view, tensor in zip(_views(table, block).values(), tensors.values(), strict=True):
        view.copy_(tensor.detach())
    return {PACKED: Bucket(table, to_payload(block), _checksum(table, block))}


def to_host_memory(block: torch.Tensor) -> np.ndarray:
    return block.cpu().numpy()


def unpack_bucket(weights: Weights) -> dict[str, torch.Tensor]:
    """The tensors that were packed. Raises ValueError if the checksum differs. Weights by name are not packed: they are
    returned as tensors, unchecked."""
    if PACKED not in weights:
        return {name: torch.as_tensor(value) for name, value in weights.items()}
    bucket: Bucket = weights[PACKED]
    match bucket.payload:
        case BroadcastTicket() as ticket:
            block = receive_broadcast(ticket)
        case CudaHandle() as handle:
            block = handle.tensor()
        case array:
            block = torch.as_tensor(array)
    if _checksum(bucket.table, block) != bucket.checksum:
        names = [name for name, _, _ in bucket.table]
        raise ValueError(f"weights were damaged in transit ({len(names)} tensors, the first is {names[0]})")
    return _views(bucket.table, block)


def _views(table: Table, block: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of the table, as views of the block."""
    views: dict[str, torch.Tensor] = {}
    for start, (name, shape, kind) in zip(_offsets(table)[:-1], table, strict=True):
        dtype: torch.dtype = getattr(torch, kind)
        end = start + torch.Size(shape).numel() * dtype.itemsize
        views[name] = block[start:end].view(dtype).view(shape)
    return views


def _offsets(table: Table) -> list[int]:
    """The offset of every tensor in the block, then the size of the block."""
    offsets = [0]
    for _, shape, kind in table:
        size = torch.Size(shape).numel() * getattr(torch, kind).itemsize
        offsets.append(offsets[-1] + -(-size // ALIGN) * ALIGN)
    return offsets


def _checksum(table: Table, block: torch.Tensor) -> int:
    """Checksum of names, shapes and bytes. It depends on the order of the rows; the sum of a row may wrap around."""
    words = block.view(torch.int64)
    whole = len(words) // ROW * ROW
    sums = [*words[:whole].view(-1, ROW).sum(1).tolist(), int(words[whole:].sum())]
    total = zlib.crc32(repr(table).encode())
    for row in sums:
        total = (total * 1000003 + row) % 2**61
    return total
