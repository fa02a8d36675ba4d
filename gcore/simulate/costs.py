"""What things cost: seconds and bytes of a model on a GPU, by closed formulas. No torch, no GPU, no weights.

    Shape (shapes.py) ─┐
                       ├──> seconds: decoding step, prefill, training, logprobs, weight update, sleep and wake
    Gpu (hardware.json)┘    bytes:   weights, gradients, optimizer, activations, KV cache
                            ReplicaSpeed:    the straight line that simulators use (placement/replica_speed.py)

A time is that of the slower of arithmetic and memory, plus what was measured as overhead. All numbers that are not in
the model's shape come from hardware.json, with their sources. `tp` is the number of GPUs one replica spans.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from gcore.placement.replica_speed import ReplicaSpeed
from gcore.simulate.shapes import BYTES
from gcore.simulate.shapes import SHAPES as SHAPES
from gcore.simulate.shapes import Shape as Shape
from gcore.simulate.shapes import shape_of as shape_of
from gcore.types import UserError

GB = 1e9
LOGITS_AT_ONCE = 1 << 27  # as in training/logprob_model.py; the trainer holds each about four times in float32
MEMORY_FRACTION = 0.9  # of a GPU that can be planned with: contexts, fragments and buffers have the rest


@dataclass(frozen=True)
class Gpu:
    """One GPU in its machine; rates are one way, as on the data sheet.

    Gpu("h100", "NVIDIA H100 SXM5", memory_gb=80, bandwidth_gb_s=3350, tflops=989, nvlink_gb_s=450, host_gb_s=64,
        network_gb_s=50, per_node=8, price=3.0, source="data sheet")
    """

    name: str
    title: str
    memory_gb: float
    bandwidth_gb_s: float
    tflops: float  # bfloat16, dense
    nvlink_gb_s: float
    host_gb_s: float
    network_gb_s: float  # between machines, a GPU
    per_node: int
    price: float  # dollars an hour
    source: str

    def collective_gb_s(self, gpus: int) -> float:
        """Rate at which each of `gpus` takes in what all hold together; a machine's adapters work side by side."""
        if gpus <= self.per_node:
            return self.nvlink_gb_s
        return min(self.nvlink_gb_s, self.network_gb_s * self.per_node)


@dataclass(frozen=True)
class Reach:
    """What is reached of a data sheet's numbers, as fractions. Sources in hardware.json."""

    training: float
    logprobs: float
    prefill: float
    decode_compute: float
    decode_bandwidth: float
    link: float
    host: float


@dataclass(frozen=True)
class EngineCosts:
    """What an engine takes beyond arithmetic and memory. Sources in hardware.json."""

    step_s: float
    sequence_s: float
    all_reduce_s: float
    sleep_s: float
    wake_s: float
    update_s: float
    update_gb_s: float
    asleep_gb: float
    max_sequences: int


@functools.cache
def hardware() -> dict[str, Any]:
    """hardware.json as it is, sources included."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name("hardware.json").read_text())
    return data


GPUS = {name: Gpu(name=name, **facts) for name, facts in hardware()["gpus"].items()}
REACH = Reach(**{field.name: hardware()["reach"][field.name]["value"] for field in fields(Reach)})
ENGINE = EngineCosts(**{field.name: hardware()["engine"][field.name]["value"] for field in fields(EngineCosts)})


def gpu_of(name: str) -> Gpu:
    if gpu := GPUS.get(name.lower()):
        return gpu
    near = difflib.get_close_matches(name.lower(), GPUS, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"--gpu {name}: not known here{hint}; expected one of {', '.join(GPUS)}")


# ---- serving -----------------------------------------------------------------------------------------------


def decode_step_s(shape: Shape, gpu: Gpu, tp: int, running: float, mean_context: float) -> float:
    """One token for each of `running` sequences."""
    kv = running * mean_context * shape.kv_bytes_per_token / min(tp, shape.kv_heads)  # more GPUs hold copies
    read_s = (shape.read_bytes(running) / tp + kv) / (gpu.bandwidth_gb_s * GB * REACH.decode_bandwidth)
    compute_s = running * shape.forward_flops(mean_context) / tp / (gpu.tflops * 1e12 * REACH.decode_compute)
    overhead_s = ENGINE.step_s + ENGINE.sequence_s * running
    return max(read_s, compute_s) + _all_reduces_s(shape, gpu, tp, running) + overhead_s


def prefill_s(shape: Shape, gpu: Gpu, tp: int, tokens: float, mean_context: float = 0.0) -> float:
    """`tokens` of prompts, each looking back at `mean_context` others."""
    compute_s = tokens * shape.forward_flops(mean_context) / tp / (gpu.tflops * 1e12 * REACH.prefill)
    return compute_s + tokens * _all_reduced_s(shape, gpu, tp)


def _all_reduces_s(shape: Shape, gpu: Gpu, tp: int, tokens: float) -> float:
    latency = 2 * shape.layers * ENGINE.all_reduce_s if tp > 1 else 0.0
    return latency + tokens * _all_reduced_s(shape, gpu, tp)


def _all_reduced_s(shape: Shape, gpu: Gpu, tp: int) -> float:
    """Sending one token's hidden state twice a layer."""
    sent = 2 * shape.layers * shape.hidden * BYTES * 2 * (tp - 1) / tp
    return sent / (gpu.collective_gb_s(tp) * GB * REACH.link)


def kv_tokens(shape: Shape, gpu: Gpu, tp: int, free_gb: float | None = None, fraction: float = MEMORY_FRACTION) -> int:
    """Tokens the KV cache of a replica holds; negative free memory holds none. `free_gb`: a GPU, before the weights."""
    free = gpu.memory_gb * fraction if free_gb is None else free_gb
    room = free * GB - shape.weight_bytes / tp
    return max(0, int(room * min(tp, shape.kv_heads) / shape.kv_bytes_per_token))


def serving(
    shape: Shape | str,
    gpu: Gpu | str,
    tp: int,
    mean_context: float,
    memory_fraction: float = MEMORY_FRACTION,
    refilled: bool = False,
) -> ReplicaSpeed:
    """The straight line through `decode_step_s`, and what a replica's moves cost.

    `refilled`: its weights come from the trainer (the policy), else from host memory when it wakes (a judge).
    """
    shape = shape_of(shape) if isinstance(shape, str) else shape
    gpu = gpu_of(gpu) if isinstance(gpu, str) else gpu
    held = int(kv_tokens(shape, gpu, tp, fraction=memory_fraction) / max(1.0, mean_context))
    if held < 1:
        raise UserError(
            f"{shape.name} on {tp} x {gpu.name}: no room for a sequence of {mean_context:.0f} tokens beside "
            f"{shape.weight_bytes / tp / GB:.0f} GB of weights a GPU; expected a higher tensor_parallel or a larger GPU"
        )
    return pace_of(shape, gpu, tp, mean_context, min(held, ENGINE.max_sequences), refilled)


@functools.lru_cache(maxsize=4096)
def pace_of(shape: Shape, gpu: Gpu, tp: int, mean_context: float, most: int, refilled: bool = False) -> ReplicaSpeed:
    """As `serving`, with at most `most` sequences at once."""
    base_s, per_sequence_s = _line(shape, gpu, tp, mean_context, most)
    return ReplicaSpeed(
        base_s=base_s,
        per_sequence_s=per_sequence_s,
        prefill_s_per_token=prefill_s(shape, gpu, tp, 1, mean_context / 2),
        max_concurrent=most,
        sleep_s=sleep_s(),
        wake_s=ENGINE.wake_s if refilled else wake_s(shape, gpu, tp),
        weights_s=weight_sync_s(shape, gpu, tp, tp),
    )


def _line(shape: Shape, gpu: Gpu, tp: int, mean_context: float, most: int) -> tuple[float, float]:
    """Least squares of the relative error, over batches spaced by ratio: a nearly drained replica counts as well."""
    batches = np.unique(np.geomspace(1, most, 40).round())
    times = np.array([decode_step_s(shape, gpu, tp, float(b), mean_context) for b in batches])
    if len(batches) == 1:
        return float(times[0]), 0.0
    columns = np.stack([1 / times, batches / times], axis=1)
    (base, slope), *_ = np.linalg.lstsq(columns, np.ones(len(batches)), rcond=None)
    base = min(max(float(base), 0.1 * float(times[0])), float(times[0]))
    return base, max(0.0, float(slope))


# ---- moving ------------------------------------------------------------------------------------------------


def sleep_s() -> float:
    """Dropping weights and cache; host memory keeps a judge's weights, the trainer the policy's."""
    return ENGINE.sleep_s


def wake_s(shape: Shape, gpu: Gpu, tp: int) -> float:
    """Taking memory again, and the weights from host memory."""
    return ENGINE.wake_s + shape.weight_bytes / tp / (gpu.host_gb_s * GB * REACH.host)


def weight_sync_s(shape: Shape, gpu: Gpu, tp: int, gpus: int) -> float:
    """From a trainer sharded over `gpus` to every engine: gathered over the links, then taken in by each GPU."""
    gather_s = shape.weight_bytes * (gpus - 1) / gpus / (gpu.collective_gb_s(gpus) * GB * REACH.link)
    return ENGINE.update_s + gather_s + shape.weight_bytes / tp / (ENGINE.update_gb_s * GB)


def swap_s(shape: Shape, gpu: Gpu, tp: int) -> float:
    """Whoever is awake drops its memory, which takes the same time for all, and `shape` wakes in its place."""
    return sleep_s() + wake_s(shape, gpu, tp)


def offload_s(shape: Shape, gpu: Gpu, gpus: int) -> float:
    """The trainer's state to host memory and back, sharded over `gpus`."""
    return 2 * trainer_state_bytes(shape, gpus) / (gpu.host_gb_s * GB * REACH.host)


# ---- training ----------------------------------------------------------------------------------------------


def training_s(shape: Shape, gpu: Gpu, gpus: int, tokens: float, context: float, micro_tokens: int = 16384) -> float:
    """Forward and backward over `tokens`, sharded over `gpus`; a token looks back at `context` others.

    Gathering weights (twice) and scattering gradients overlaps with arithmetic, micro-batch by micro-batch.
    """
    compute_s = 3 * tokens * shape.forward_flops(context) / (gpus * gpu.tflops * 1e12 * REACH.training)
    micro_batches = max(1, math.ceil(tokens / gpus / micro_tokens))
    moved = (2 * BYTES + 4) * shape.parameters * (gpus - 1) / gpus  # gradients are summed in float32
    moving_s = micro_batches * moved / (gpu.collective_gb_s(gpus) * GB * REACH.link)
    optimizer_s = 2 * trainer_state_bytes(shape, gpus) / (gpu.bandwidth_gb_s * GB * REACH.decode_bandwidth)
    return max(compute_s, moving_s) + optimizer_s


def logprob_s(shape: Shape, gpu: Gpu, gpus: int, tokens: float, context: float, micro_tokens: int = 16384) -> float:
    """One forward pass over `tokens` by the trainer."""
    compute_s = tokens * shape.forward_flops(context) / (gpus * gpu.tflops * 1e12 * REACH.logprobs)
    micro_batches = max(1, math.ceil(tokens / gpus / micro_tokens))
    moving = micro_batches * shape.weight_bytes * (gpus - 1) / gpus
    return max(compute_s, moving / (gpu.collective_gb_s(gpus) * GB * REACH.link))


def gathered_bytes(shape: Shape) -> float:
    """What a sharded trainer holds whole for a moment: two layers (one comes, one is in use) and both tables."""
    tables = shape.table_parameters * (1 if shape.tied else 2)
    return BYTES * (2 * shape.layer_parameters + tables)


def gradient_bytes(shape: Shape, gpus: int) -> float:
    """float32, sharded; one layer's whole on its way out."""
    return 4.0 * shape.parameters / gpus + 4.0 * shape.layer_parameters


def optimizer_bytes(shape: Shape, gpus: int) -> float:
    """float32 master weights and Adam's two moments, sharded."""
    return 12.0 * shape.parameters / gpus


def trainer_state_bytes(shape: Shape, gpus: int) -> float:
    """What stays between steps."""
    return optimizer_bytes(shape, gpus)


def activation_bytes(shape: Shape, micro_tokens: int) -> float:
    """With checkpointing: the input of every layer, one layer's inside with its gradients, and a chunk of logits."""
    kept = shape.layers * shape.hidden * BYTES
    active = shape.intermediate * max(1, shape.active_experts)
    inside = 2 * BYTES * (8 * shape.hidden + 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 4 * active)
    logits = 4 * 4 * min(LOGITS_AT_ONCE, micro_tokens * shape.vocab)
    return micro_tokens * (kept + inside) + logits
