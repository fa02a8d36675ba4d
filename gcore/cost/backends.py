"""`gcore plan --backends`: FSDP2 and Megatron-Core on the same GPUs: memory of a rank by part, and time of an update.

    shape, GPUs ──> layouts (tensor, pipeline, expert) ──memory: does it fit──> the fastest layout of each backend

Memory is that of a trainer alone, without engines and without off-load. With Megatron, as this project uses it: weights
in bfloat16 and gradients in float32 on every rank of a copy, float32 weights and moments divided among data-parallel
ranks (6 + 12 / d bytes per parameter), layers that are not compiled, no sequence parallelism. Pure arithmetic; compared
with published numbers in docs/megatron.md. No time was measured on more than one GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from gcore.config.megatron import check_shape, is_uneven
from gcore.cost.costs import GB, REACH, Gpu, Shape, training_s
from gcore.cost.training_memory import COMFORTABLE, Engines, TrainingRank, choose, kept_per_token
from gcore.cost.workload import UPDATE
from gcore.types import Topology, UserError

WIDTHS = (1, 2, 4, 8)
STAGES = (1, 2, 4, 8, 16)
EXPERTS = (1, 2, 4, 8, 16, 32, 64)
LOGITS_AT_ONCE = 1 << 26  # as in training/megatron/network.py
FSDP_PARTS = {  # of a layout: those of a rank (training_memory.PARTS)
    "weights": ("weights", "copies"),
    "gradients": ("gradients",),
    "optimizer": ("moments",),
    "reference": ("reference",),
    "activations": ("activations",),
    "temporary": ("work", "buckets"),
}
PARTS = tuple(FSDP_PARTS)


@dataclass(frozen=True)
class Layout:
    """A backend on a number of GPUs. `parts`: bytes of the fullest rank. `update_s`: forward, backward, optimizer."""

    backend: str
    topology: Topology
    checkpointing: bool
    parts: Mapping[str, float]
    update_s: float
    bubble: float = 0.0  # share of the time in which a stage waits for others

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Work:
    """An update. Work(tokens=10e6, context=1280, micro_tokens=16384, kl=False)"""

    tokens: float
    context: float  # that a token attends to, on average
    micro_tokens: int
    kl: bool = False


def compare(shape: Shape, gpu: Gpu, gpus: int, work: Work) -> list[Layout]:
    """The fastest layout of each backend that leaves a tenth of the GPU free; if none does, the smallest one."""
    limit = COMFORTABLE * gpu.memory_gb * GB
    fastest = []
    for layouts in (list(fsdp_layouts(shape, gpu, gpus, work)), list(megatron_layouts(shape, gpu, gpus, work))):
        fitting = [layout for layout in layouts if layout.total <= limit]
        if layouts:
            smallest = min(layouts, key=lambda layout: layout.total)
            fastest.append(min(fitting, key=lambda layout: layout.update_s, default=smallest))
    return fastest


def fsdp_layouts(shape: Shape, gpu: Gpu, gpus: int, work: Work) -> Iterator[Layout]:
    for tensor in WIDTHS:
        if gpus % tensor or shape.heads % tensor or (tensor > 1 and shape.experts):
            continue
        rank = TrainingRank(shape, gpus // tensor, tensor, work.micro_tokens, kl=work.kl)
        chosen = choose(rank, Engines(), gpu.memory_gb * GB, "auto", "none")
        peak = chosen.gpu[chosen.worst]
        parts = {name: sum(peak.get(part, 0.0) for part in names) for name, names in FSDP_PARTS.items()}
        seconds = training_s(
            shape, gpu, gpus, work.tokens, work.context, work.micro_tokens * tensor, chosen.rank.checkpointing
        )
        seconds += _tensor_s(shape, gpu, tensor, work.tokens * tensor / gpus, chosen.rank.checkpointing)
        yield Layout("fsdp", Topology(gpus, tensor), chosen.rank.checkpointing, parts, seconds)


def megatron_layouts(shape: Shape, gpu: Gpu, gpus: int, work: Work) -> Iterator[Layout]:
    for tensor, pipeline, expert in itertools.product(WIDTHS, STAGES, EXPERTS):
        copy = tensor * pipeline
        if gpus % copy or gpus // copy % expert or tensor > gpu.per_node:
            continue
        topology = Topology(gpus, tensor, pipeline, expert=expert)
        try:
            check_shape(topology, shape)
        except UserError:
            continue
        for checkpointing in (False, True):
            yield _megatron(shape, gpu, topology, work, checkpointing)


def _megatron(shape: Shape, gpu: Gpu, topology: Topology, work: Work, checkpointing: bool) -> Layout:
    micros = max(1, math.ceil(work.tokens / topology.data_parallel / work.micro_tokens))
    waiting = (topology.pipeline - 1) / micros / topology.virtual  # of the 1F1B schedule, per unit of work
    reach = REACH.training_recomputed if checkpointing else REACH.training
    tokens = work.tokens / topology.data_parallel / topology.pipeline  # x layers that a rank computes, / layers
    seconds = gpu.compute_s(UPDATE * work.tokens * shape.forward_flops(work.context), reach, topology.ranks)
    seconds += _tensor_s(shape, gpu, topology.tensor, tokens, checkpointing)
    seconds += _expert_s(shape, gpu, topology, tokens, checkpointing)
    seconds *= 1 + waiting
    dense, experts = parameters_of_rank(shape, topology)
    reduced = 6.0 * (dense + experts)  # gradients are scattered in float32, weights gathered in bfloat16, once
    seconds += gpu.collective_s(reduced, topology.data_parallel * topology.tensor)
    seconds += gpu.memory_s(2 * 12.0 * (dense / topology.data_parallel + experts / _expert_copies(topology)))
    parts = megatron_memory(shape, topology, work.micro_tokens, checkpointing, work.kl, micros)
    return Layout("megatron", topology, checkpointing, parts, seconds, waiting / (1 + waiting))


def _tensor_s(shape: Shape, gpu: Gpu, tensor: int, tokens: float, checkpointing: bool) -> float:
    """Seconds of the all-reduces of `tokens` hidden states: two per layer and pass, which nothing overlaps."""
    passes = 3 if checkpointing else 2
    return gpu.collective_s(passes * 2 * shape.layers * tokens * shape.hidden * 2 * 2 * (tensor - 1) / tensor, tensor)


def _expert_s(shape: Shape, gpu: Gpu, topology: Topology, tokens: float, checkpointing: bool) -> float:
    """Seconds of the all-to-alls: each token goes to its experts and back, in every pass."""
    if topology.expert == 1:
        return 0.0
    passes = 3 if checkpointing else 2
    away = (topology.expert - 1) / topology.expert
    sent = passes * 2 * shape.layers * tokens * shape.active_experts * shape.hidden * 2 * away
    within = topology.expert * topology.tensor <= gpu.per_node
    return sent / ((gpu.nvlink_gb_s if within else gpu.network_gb_s) * GB * REACH.link)


# ---- memory ---------------------------------------------------------------------------------------------------------


def parameters_of_rank(shape: Shape, topology: Topology) -> tuple[float, float]:
    """Parameters of the fullest rank: those that data-parallel ranks share, and those of its experts."""
    layers = _layers(shape, topology)
    stacked = 3 * shape.hidden * shape.intermediate * shape.experts  # gate, up and down of all experts of a layer
    rest = shape.layer_parameters - stacked
    tables = 1 if shape.tied or topology.pipeline > 1 else 2  # the first stage has one, the last one the other
    dense = layers * rest / topology.tensor + tables * shape.table_parameters / topology.tensor
    return dense, layers * stacked / topology.expert


def _layers(shape: Shape, topology: Topology) -> int:
    """Of the fullest stage: without the embedding or the output, where these count as layers."""
    return -(-(shape.layers + 2 * is_uneven(shape.layers, topology)) // topology.pipeline)


def _expert_copies(topology: Topology) -> float:
    """Ranks that divide the optimizer state of one expert."""
    return topology.ranks / topology.pipeline / topology.expert


def megatron_memory(
    shape: Shape, topology: Topology, micro_tokens: int, checkpointing: bool, kl: bool = False, micros: int = 1 << 30
) -> dict[str, float]:
    """Bytes of the fullest rank. `micros`: micro-batches per update; the first stage holds one per stage at once."""
    dense, experts = parameters_of_rank(shape, topology)
    own = dense + experts
    eager = TrainingRank(
        shape, tensor_parallel=topology.tensor, compiled=False, checkpointing=checkpointing, max_tokens=micro_tokens
    )
    layers = _layers(shape, topology)
    flying = min(topology.pipeline, micros)
    kept = micro_tokens * layers * kept_per_token(eager) * flying
    logits = min(micro_tokens * shape.vocab / topology.tensor, LOGITS_AT_ONCE)
    head = 4 * 4 * logits + (4 + 2) * shape.table_parameters / topology.tensor
    layer = micro_tokens * 2 * (3 * shape.intermediate * max(1, shape.active_experts) / topology.tensor)
    if checkpointing:
        layer += micro_tokens * kept_per_token(replace(eager, checkpointing=False))
    return {
        "weights": 2.0 * own,
        "gradients": 4.0 * own,
        "optimizer": 12.0 * (dense / topology.data_parallel + experts / _expert_copies(topology)),
        "reference": 2.0 * own if kl else 0.0,
        "activations": kept + micro_tokens * 14 * shape.hidden,
        "temporary": max(head, layer),
    }
