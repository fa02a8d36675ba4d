"""Weights and optimizer state of a sharded network: gathered whole on rank 0, written as safetensors, read by any
number of ranks. Every function here is called by all ranks together (gathering a shard is a collective).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_weights(network: Any, everywhere: bool = False) -> dict[str, np.ndarray]:
    """Parameter name -> whole float32 array, on rank 0 (or everywhere). Copies: later updates do not show in it."""
    result: dict[str, np.ndarray] = {}
    for name, parameter in network.named_parameters():
        whole = _whole(parameter.detach())
        if everywhere or dist.get_rank() == 0:
            result[name] = whole.to(device="cpu", dtype=torch.float32, copy=True).numpy()
    return result


PART_BYTES = 2**30
Way = Literal["process", "gpu", "host"]  # how engines take weights: the same process, the same GPU, or host memory


def parts_of(network: Any, dtype: torch.dtype) -> list[list[str]]:
    """Names of the parameters, in parts of about PART_BYTES in the engines' precision."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, parameter in network.named_parameters():
        if size > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += parameter.numel() * dtype.itemsize
    return parts


def served_weights(network: Any, names: Sequence[str], dtype: torch.dtype, way: Way) -> dict[str, Tensor]:
    """These parameters, whole and in the engines' precision; on rank 0, or on every rank where each serves its GPU."""
    parameters = dict(network.named_parameters())
    result: dict[str, Tensor] = {}
    for name in names:
        whole = _whole(parameters[name].detach()).to(dtype)
        if way == "gpu" or dist.get_rank() == 0:
            result[name] = whole
    return result


def save_weights(path: Path, network: Any) -> None:
    weights = gather_weights(network)
    if dist.get_rank() == 0:
        save_file({name: torch.from_numpy(value) for name, value in weights.items()}, path)


def read_weights(path: Path) -> dict[str, np.ndarray]:
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)


def save(folder: Path, network: Any, optimizer: torch.optim.Optimizer, updates: int) -> None:
    """model.safetensors and optimizer.safetensors, by rank 0."""
    save_weights(folder / "model.safetensors", network)
    moments: dict[str, Tensor] = {"updates": torch.tensor(updates)}
    for name, parameter in network.named_parameters():
        entry = optimizer.state.get(parameter)
        if not entry:
            continue
        moments[f"{name}/step"] = torch.as_tensor(entry["step"]).cpu()
        for moment in MOMENTS:
            moments[f"{name}/{moment}"] = _whole(entry[moment]).cpu().contiguous()
    if dist.get_rank() == 0:
        save_file(moments, folder / "optimizer.safetensors")
    dist.barrier()


def load(folder: Path, network: Any, optimizer: torch.optim.Optimizer) -> int:
    """Fill network and optimizer; returns the number of updates so far. Each rank keeps its shard of what it reads."""
    with (
        safe_open(folder / "model.safetensors", framework="pt") as weights,
        safe_open(folder / "optimizer.safetensors", framework="pt") as moments,
        torch.no_grad(),
    ):
        saved = set(moments.keys())
        optimizer.state.clear()
        for name, parameter in network.named_parameters():
            parameter.copy_(_like(weights.get_tensor(name), parameter))
            if f"{name}/step" in saved:
                optimizer.state[parameter] = {
                    "step": moments.get_tensor(f"{name}/step"),
                    **{m: _like(moments.get_tensor(f"{name}/{m}"), parameter) for m in MOMENTS},
                }
        return int(moments.get_tensor("updates"))


def _like(whole: Tensor, parameter: Tensor) -> Tensor:
    """`whole` sharded and placed as the parameter is."""
    whole = whole.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole
