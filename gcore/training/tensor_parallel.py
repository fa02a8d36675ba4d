"""Tensor parallelism: the ranks of a group split the matrices of each decoder layer, as the model's own plan says.

    x ──q, k, v, gate, up: split by output──> this rank's heads ──o, down: split by input──> sum over the group ──> x

Transformers has a plan per model: patterns of module names and how each is split. Embeddings, norms and the output
layer are not split: every rank of the group computes them, with the same result.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from gcore.models.decoders import decoder_of
from gcore.types import UserError

KEY = "placement.trainer.tensor_parallel"
SUMMED = "replicated_with_grad_allreduce"
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # the matrix alone is split, what is between two of them is computed by every rank:
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
}


def check(config: Any, size: int) -> None:
    """Raises UserError if the model cannot be split over `size` ranks. `config`: of the network."""
    plan, model = _layer_plan(config), f"a model of type {config.model_type}"
    if not plan:
        raise UserError(f"{KEY}={size}: transformers has no tensor-parallel plan for {model}; expected 1")
    if unknown := sorted(set(plan.values()) - {*STYLES, SUMMED}):
        raise UserError(f"{KEY}={size}: {model} needs {', '.join(unknown)}, which is not supported; expected 1")
    if getattr(config, "hidden_size_per_layer_input", None):
        raise UserError(f"{KEY}={size}: {model} has embeddings per layer, which are not compared; expected 1")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % size:
            raise UserError(f"{KEY}={size} must divide {name}={getattr(config, name)} of {model}")


def split(network: Any, mesh: DeviceMesh) -> tuple[str, ...]:
    """Split the layers in place over the ranks of the mesh, before they are sharded. Returns the names of parameters
    whose gradients must be summed over these ranks: each rank has only the gradient of its own heads."""
    check(network.config, mesh.size())
    plan, decoder, summed = _layer_plan(network.config), decoder_of(network), list[str]()
    body = next(name for name, module in network.named_modules() if module is decoder)
    for name, module in list(decoder.named_modules()):
        style = next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if style == SUMMED:
            summed += [f"{body}.{name}.{parameter}" for parameter, _ in module.named_parameters()]
        elif style is not None:
            edge = "in_features" if style.startswith("rowwise") else "out_features"
            if getattr(module, edge) % mesh.size():
                raise UserError(f"{KEY}={mesh.size()} must divide the {getattr(module, edge)} {edge} of {body}.{name}")
            parallelize_module(module, mesh, STYLES[style]())
    return tuple(summed)


def _layer_plan(config: Any) -> dict[str, str]:
    """The part of the model's plan for its decoder layers: pattern of module names -> style."""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    return {pattern: style for pattern, style in plan.items() if pattern.startswith("layers.")}
