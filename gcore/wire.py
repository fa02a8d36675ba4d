"""Weights on their way between processes, under a seal: as arrays in host memory, as handles to memory of a GPU, or
over a line of their own (line.py)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gcore.line import Sender, receive

SEAL = "#checksum"  # among the names of sealed weights
LINE = "#line"  # alone with the seal: what came is a note, and the weights take a line


def to_wire(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array in host memory, for other processes. numpy has no bfloat16: its bits travel as int16."""
    tensor = tensor.to("cpu", copy=True)
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class OnGpu:
    """A tensor that stays in its process's GPU memory; another process of the machine opens it there (CUDA IPC)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        self._open, self._args = reduce_tensor(tensor)

    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self._open(*self._args)
        return tensor


def seal(tensors: Mapping[str, torch.Tensor], wrap: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """Tensors for another process, each as `wrap` makes it travel, with a checksum of them all."""
    return {**{name: wrap(tensor) for name, tensor in tensors.items()}, SEAL: checksum(tensors)}


def announce(tensors: Mapping[str, torch.Tensor], sender: Sender) -> dict[str, Any]:
    """Tensors that take a line: they are on their way, and this says which."""
    return {LINE: sender.send(tensors), SEAL: checksum(tensors)}


def unseal(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors again. Raises ValueError when they are not what was sealed."""
    if LINE in weights:
        tensors = receive(weights[LINE])
    else:
        tensors = {name: from_wire(value) for name, value in weights.items() if name != SEAL}
    if SEAL in weights and checksum(tensors) != weights[SEAL]:
        raise ValueError(f"weights were damaged on their way ({len(tensors)} tensors, the first is {min(tensors)})")
    return tensors


def checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """Of names and bits, wherever the tensors are."""
    names = sorted(tensors)
    sums: list[torch.Tensor] = []
    for name in names:  # all on their device, and looked at once
        flat = tensors[name].detach().contiguous().view(-1).view(torch.uint8)
        whole = len(flat) // 8 * 8
        sums.append(flat[:whole].view(torch.int64).sum() + flat[whole:].sum())  # sums wrap around
    total = 0
    for name, bits in zip(names, torch.stack(sums).tolist() if sums else [], strict=True):
        total = (total * 1000003 + bits + zlib.crc32(name.encode())) % 2**61
    return total


def from_wire(value: torch.Tensor | np.ndarray | OnGpu) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, OnGpu):
        return value.tensor()
    tensor = torch.from_numpy(value)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor
