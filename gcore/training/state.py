"""Weights and optimizer state of a sharded network: gathered on rank 0, written as safetensors, read by any number of
ranks. All ranks must call each function together, because gathering is a collective.

If the network has adapters, only the adapters are written and read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from gcore.models import LORA_A, Adapters
from gcore.training.lora import trainable_parameters
from gcore.training.optimizer import MOMENTS, Optimizer
from gcore.types import UserError
from gcore.weights.publisher import whole_tensor


def gather_weights(network: Any, everywhere: bool = False) -> dict[str, np.ndarray]:
    """Parameter name -> whole float32 array, on rank 0 (or everywhere). A copy: later updates do not change it."""
    return _gather(trainable_parameters(network), everywhere)


def _gather(parameters: Mapping[str, Tensor], everywhere: bool = False) -> dict[str, np.ndarray]:
    result: dict[str, np.ndarray] = {}
    for name, parameter in parameters.items():
        whole = whole_tensor(parameter.detach())
        if everywhere or dist.get_rank() == 0:
            result[name] = whole.to(device="cpu", dtype=torch.float32, copy=True).numpy()
    return result


def save_weights(path: Path, parameters: Mapping[str, Tensor], adapters: Adapters | None = None) -> None:
    weights = _gather(parameters)
    if dist.get_rank() == 0:
        metadata = {"rank": str(adapters.rank), "alpha": str(adapters.alpha)} if adapters else None
        save_file({name: torch.from_numpy(value) for name, value in weights.items()}, path, metadata)


@torch.no_grad()
def load_weights(path: Path, network: Any) -> None:
    """Fill the network with what save_weights wrote."""
    for name, tensor in read_like(path, network).items():
        network.get_parameter(name).copy_(tensor)


def read_like(path: Path, network: Any) -> dict[str, Tensor]:
    """Read what save_weights wrote, sharded and placed like the network's parameters."""
    with safe_open(path, framework="pt") as file:
        return {
            name: _like(file.get_tensor(name), parameter) for name, parameter in trainable_parameters(network).items()
        }


def save(folder: Path, network: Any, optimizer: Optimizer, updates: int, adapters: Adapters | None = None) -> None:
    """Rank 0 writes model.safetensors and optimizer.safetensors."""
    save_weights(folder / "model.safetensors", trainable_parameters(network), adapters)
    moments: dict[str, Tensor] = {"updates": torch.tensor(updates)}
    entries = optimizer.state
    for name, parameter in trainable_parameters(network).items():
        entry = entries.get(parameter)
        if not entry:
            continue
        moments[f"{name}/step"] = torch.as_tensor(entry["step"]).cpu()
        for moment in MOMENTS:
            moments[f"{name}/{moment}"] = whole_tensor(entry[moment]).cpu().contiguous()
    if dist.get_rank() == 0:
        save_file(moments, folder / "optimizer.safetensors")
    dist.barrier()


def load(folder: Path, network: Any, optimizer: Optimizer, adapters: Adapters | None = None) -> int:
    """Fill network and optimizer; returns the number of updates so far. Each rank keeps its shard of what it reads."""
    with (
        safe_open(folder / "model.safetensors", framework="pt") as weights,
        safe_open(folder / "optimizer.safetensors", framework="pt") as moments,
        torch.no_grad(),
    ):
        _check(folder, weights, adapters)
        saved = set(moments.keys())
        entries: dict[Tensor, dict[str, Any]] = {}
        for name, parameter in trainable_parameters(network).items():
            parameter.copy_(_like(weights.get_tensor(name), parameter))
            if f"{name}/step" in saved:
                entries[parameter] = {
                    "step": moments.get_tensor(f"{name}/step"),
                    **{m: _like(moments.get_tensor(f"{name}/{m}"), parameter) for m in MOMENTS},
                }
        optimizer.set_state(entries)
        return int(moments.get_tensor("updates"))


def _check(folder: Path, weights: Any, adapters: Adapters | None) -> None:
    """Raise if the checkpoint has another kind of weights: other adapters could be loaded without an error."""
    metadata = weights.metadata() or {}
    layers = sorted(name.removesuffix(LORA_A) for name in weights.keys() if name.endswith(LORA_A))  # noqa: SIM118
    if bool(layers) != (adapters is not None):
        raise UserError(
            f"{folder} holds adapters, and this run trains all weights; resume with the model.lora it was saved with"
            if layers
            else f"{folder} holds all weights, and this run trains adapters; resume without model.lora, or export it "
            "and start a new run from it with model.path"
        )
    if adapters is None:
        return
    saved = f"rank={metadata.get('rank')}, alpha={metadata.get('alpha')}, {len(layers)} layers"
    expected = f"rank={adapters.rank}, alpha={adapters.alpha}, {len(adapters.layers)} layers"
    if saved != expected or layers != sorted(adapters.layers):
        raise UserError(f"{folder} holds adapters of {saved}; model.lora (rank, alpha, targets) now gives {expected}")


def _like(whole: Tensor, parameter: Tensor) -> Tensor:
    """`whole`, sharded and placed like the parameter."""
    whole = whole.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole
