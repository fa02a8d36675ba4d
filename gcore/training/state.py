"""Weights, optimizer state and reference of a sharded network, on disk. Each rank writes its shards, and any number of
ranks reads them again; no rank holds a whole model. All ranks must call each function together.

    trainer.json (updates, adapters)    weights/    optimizer/ (moments, step counters)    reference/ (with a KL)

If the network has adapters, only the adapters are written and read. The format of the three folders is in
checkpoint/tensors.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gcore.checkpoint.tensors import read_into, shapes, write
from gcore.models import LORA_A, Adapters
from gcore.training.lora import trainable_parameters
from gcore.training.optimizer import MOMENTS, Optimizer
from gcore.types import UserError

ABOUT, WEIGHTS, OPTIMIZER, REFERENCE = "trainer.json", "weights", "optimizer", "reference"


def save(
    folder: Path,
    network: Any,
    optimizer: Optimizer,
    updates: int,
    adapters: Adapters | None = None,
    reference: Mapping[str, Tensor] | None = None,
) -> None:
    """`reference`: trainable parameters of the KL reference, sharded like those of the network."""
    parameters, moments, entries = trainable_parameters(network), optimizer.state, dict[str, Tensor]()
    for name, parameter in parameters.items():
        if entry := moments.get(parameter):
            entries[f"{name}/step"] = torch.as_tensor(entry["step"])
            entries |= {f"{name}/{moment}": entry[moment] for moment in MOMENTS}
    if dist.get_rank() == 0:
        kind = {"rank": adapters.rank, "alpha": adapters.alpha} if adapters else None
        (folder / ABOUT).write_text(json.dumps({"updates": updates, "adapters": kind}))
    groups = {WEIGHTS: parameters, OPTIMIZER: entries, REFERENCE: reference or {}}
    for name, group in groups.items():
        if group:
            write(folder / name, _values(group))
    dist.barrier()


def load(folder: Path, network: Any, optimizer: Optimizer, adapters: Adapters | None = None) -> int:
    """Fill network and optimizer; returns the number of updates so far."""
    about = json.loads((folder / ABOUT).read_text())
    _check(folder, about["adapters"], adapters)
    parameters = trainable_parameters(network)
    read_into(folder / WEIGHTS, _values(parameters))
    saved = shapes(folder / OPTIMIZER) if (folder / OPTIMIZER).is_dir() else {}
    optimizer.clear()
    entries: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if f"{name}/step" in saved:
            entries |= {f"{name}/{key}": value for key, value in optimizer.new_state(parameter).items()}
    if entries:
        read_into(folder / OPTIMIZER, _values(entries))
    return int(about["updates"])


def load_reference(folder: Path, parameters: Mapping[str, Tensor]) -> None:
    """Fill the parameters of the KL reference: of its network, or of its adapters."""
    if not (folder / REFERENCE).is_dir():
        raise UserError(f"{folder} has no reference model: it was saved with algorithm.kl_coef=0; resume with 0 too")
    read_into(folder / REFERENCE, _values(parameters))


def _values(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in parameters.items()}


def _check(folder: Path, kind: Mapping[str, Any] | None, adapters: Adapters | None) -> None:
    """Raise if the checkpoint has another kind of weights: other adapters could be loaded without an error."""
    if (kind is None) != (adapters is None):
        raise UserError(
            f"{folder} holds adapters, and this run trains all weights; resume with the model.lora it was saved with"
            if kind is not None
            else f"{folder} holds all weights, and this run trains adapters; resume without model.lora, or export it "
            "and start a new run from it with model.path"
        )
    if adapters is None or kind is None:
        return
    layers = sorted(n.removesuffix(LORA_A) for n in shapes(folder / WEIGHTS) if n.endswith(LORA_A))
    saved = f"rank={kind['rank']}, alpha={kind['alpha']}, {len(layers)} layers"
    expected = f"rank={adapters.rank}, alpha={adapters.alpha}, {len(adapters.layers)} layers"
    if saved != expected or layers != sorted(adapters.layers):
        raise UserError(f"{folder} holds adapters of {saved}; model.lora (rank, alpha, targets) now gives {expected}")
