"""Weights on their way between processes: the tensors of a part one after another in one piece of memory, under a seal.

    tensors ──pack──> bytes ──carry──> array in host memory, handle to a GPU's memory, or note of a line (line.py)

One piece, since every handle, array and kernel has a price, and a part may have hundreds of tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gcore.line import Note, receive

SEALED = "#sealed"  # the one name in sealed weights
ALIGN = 16  # where a tensor begins in the piece: any number may lie there
ROW = 2**16  # numbers of 8 bytes that the checksum adds up plainly

Table = tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape and dtype of every tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Bucket((("norm", (8,), "bfloat16"),), data=..., checksum=1234)"""

    table: Table
    data: np.ndarray | OnGpu | Note | torch.Tensor
    checksum: int


class OnGpu:
    """A tensor that stays in its process's GPU memory; another process of the machine opens it there (CUDA IPC)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        self._open, self._args = reduce_tensor(tensor)

    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self._open(*self._args)
        return tensor


def in_host_memory(flat: torch.Tensor) -> np.ndarray:
    return flat.cpu().numpy()


def seal(tensors: Mapping[str, torch.Tensor], carry: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """Tensors for another process, as `carry` makes their bytes travel. The piece they are in is made for them."""
    table = tuple((name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items())
    device = next(iter(tensors.values())).device
    flat = torch.zeros(_places(table)[-1], dtype=torch.uint8, device=device)
    for piece, tensor in zip(unpacked(table, flat).values(), tensors.values(), strict=True):
        piece.copy_(tensor.detach())
    return {SEALED: Bucket(table, carry(flat), _checksum(table, flat))}


def unseal(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors again. Raises ValueError when they are not what was sealed; what never was is taken as it is."""
    if SEALED not in weights:
        return {name: torch.as_tensor(value) for name, value in weights.items()}
    bucket: Bucket = weights[SEALED]
    match bucket.data:
        case Note() as note:
            flat = receive(note)
        case OnGpu() as handle:
            flat = handle.tensor()
        case data:
            flat = torch.as_tensor(data)
    if _checksum(bucket.table, flat) != bucket.checksum:
        names = [name for name, _, _ in bucket.table]
        raise ValueError(f"weights were damaged on their way ({len(names)} tensors, the first is {names[0]})")
    return unpacked(bucket.table, flat)


def unpacked(table: Table, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of the piece."""
    found: dict[str, torch.Tensor] = {}
    for start, (name, shape, kind) in zip(_places(table)[:-1], table, strict=True):
        dtype: torch.dtype = getattr(torch, kind)
        end = start + torch.Size(shape).numel() * dtype.itemsize
        found[name] = flat[start:end].view(dtype).view(shape)
    return found


def _places(table: Table) -> list[int]:
    """Where every tensor begins, and how long the piece is."""
    places = [0]
    for _, shape, kind in table:
        size = torch.Size(shape).numel() * getattr(torch, kind).itemsize
        places.append(places[-1] + -(-size // ALIGN) * ALIGN)
    return places


def _checksum(table: Table, flat: torch.Tensor) -> int:
    """Of names, shapes and bytes, where they lie. Sums wrap around; rows have different weights."""
    words = flat.view(torch.int64)
    whole = len(words) // ROW * ROW
    sums = [*words[:whole].view(-1, ROW).sum(1).tolist(), int(words[whole:].sum())]
    total = zlib.crc32(repr(table).encode())
    for row in sums:
        total = (total * 1000003 + row) % 2**61
    return total
