"""The degrees of training.backend=megatron, and what contradicts them. The shape of the model is checked before a run
starts (launch/preflight.py)."""

from __future__ import annotations

from typing import Any

from gcore.types import Topology, UserError

TRAINER = "placement.trainer"
FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")  # model types whose mapping of weights is tested
UNTESTED = ("qwen2_moe", "mixtral", "deepseek_v3", "glm4_moe", "mimo", "qwen2_5_vl", "gemma3", "glm4v", "glm4v_moe")
DELTA_RULE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
MAMBA = ("nemotron_h", "falcon_h1", "bamba", "granitemoehybrid", "jamba", "mamba2")
SPARSE = ("deepseek_v32", "glm_moe_dsa")
NO_MAPPING = "mbridge 0.15 has no mapping of its weights"
REFUSED = {  # what Megatron-Core 0.16 has of these families
    **dict.fromkeys(UNTESTED, "the mapping of its weights in mbridge 0.15 is not tested here"),
    **dict.fromkeys(DELTA_RULE, f"{NO_MAPPING}, and Megatron-Core 0.16 computes no delta rule over packed samples"),
    **dict.fromkeys(MAMBA, f"{NO_MAPPING}, and Mamba layers of Megatron-Core need mamba-ssm"),
    **dict.fromkeys(SPARSE, f"{NO_MAPPING}, and Megatron-Core 0.16 has no sparse attention over packed samples"),
}


def topology_of(trainer: Any, ranks: int) -> Topology:
    """`trainer`: config.placement.trainer. Raises UserError if the degrees do not divide the ranks."""
    degrees = (trainer.tensor_parallel, trainer.pipeline_parallel, trainer.virtual_pipeline, trainer.expert_parallel)
    topology = Topology(ranks, *degrees)
    copy = topology.tensor * topology.pipeline
    if ranks % copy:
        raise UserError(
            f"{TRAINER}: tensor_parallel={topology.tensor} x pipeline_parallel={topology.pipeline} = {copy} must "
            f"divide the number of ranks, {ranks}"
        )
    if topology.data_parallel % topology.expert:
        raise UserError(
            f"{TRAINER}.expert_parallel={topology.expert} must divide the number of data-parallel ranks, "
            f"{topology.data_parallel} (ranks / tensor_parallel / pipeline_parallel)"
        )
    return topology


def check_family(model_type: str) -> None:
    if model_type not in FAMILIES:
        raise UserError(
            f"training.backend=megatron: got a model of type {model_type}: {REFUSED.get(model_type, NO_MAPPING)}; "
            f"expected one of {', '.join(FAMILIES)}, or training.backend=fsdp"
        )


def is_uneven(layers: int, topology: Topology) -> bool:
    """The first and the last stage have one layer less, and the embedding or the output in its place."""
    parts = topology.pipeline * topology.virtual
    return topology.pipeline > 1 and layers % parts > 0 and (layers + 2) % parts == 0 and layers + 2 > parts


def check_tensor_parallel(degree: int, shape: Any) -> None:
    """Raises UserError if the degree does not divide the model. `shape`: cost.shapes.Shape. For both backends."""
    parts = {
        "attention heads": shape.heads,
        "key and value heads": shape.kv_heads,
        "rows of an MLP": shape.intermediate,
    }
    for what, number in parts.items():
        if number % degree:
            raise UserError(f"{TRAINER}.tensor_parallel={degree} must divide the {number} {what} of {shape.name}")


def check_shape(topology: Topology, shape: Any) -> None:
    """Raises UserError if the degrees do not divide the model. `shape`: cost.shapes.Shape."""
    check_tensor_parallel(topology.tensor, shape)
    if shape.experts % topology.expert:
        raise UserError(
            f"{TRAINER}.expert_parallel={topology.expert} must divide the {shape.experts} experts of {shape.name}"
        )
    parts = topology.pipeline * topology.virtual
    if shape.layers % parts and not is_uneven(shape.layers, topology):
        key = "pipeline_parallel" if topology.virtual == 1 else "pipeline_parallel x virtual_pipeline"
        raise UserError(
            f"{TRAINER}.{key}={parts} must divide the {shape.layers} layers of {shape.name}, or {shape.layers} + 2: "
            "then the embedding and the output count as layers"
        )
    if topology.expert > 1 and not shape.experts:
        raise UserError(f"{TRAINER}.expert_parallel={topology.expert}: {shape.name} has no experts; expected 1")
    if topology.tensor > 1 and shape.experts:
        raise UserError(
            f"{TRAINER}.tensor_parallel={topology.tensor}: Megatron splits matrices of a mixture of experts only with "
            "Transformer Engine, which is not supported here; expected 1, and expert_parallel or pipeline_parallel"
        )
