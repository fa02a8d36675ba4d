"""Cost model: seconds and bytes of a model on a GPU, by closed formulas. Needs no torch, no GPU, no weights.

    Shape (shapes.py) ─┐
                       ├──> seconds: decoding step, prefill, training, logprobs, weight update, sleep and wake
    Gpu (hardware.json)┘    bytes:   KV cache (a trainer's memory: training_memory.py)
                            ReplicaSpeed: the linear fit that simulators use (replica_speed.py)

A time is the maximum of arithmetic and memory time, plus the measured overhead. All numbers that are not in the model's
shape come from hardware.json, with their sources. `tp` is the number of GPUs per replica.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gcore.cost.replica_speed import ReplicaSpeed
from gcore.cost.shapes import BYTES
from gcore.cost.shapes import SHAPES as SHAPES
from gcore.cost.shapes import Shape as Shape
from gcore.cost.shapes import shape_of as shape_of
from gcore.cost.workload import UPDATE
from gcore.types import UserError

GB = 1e9
MEMORY_FRACTION = 0.9  # of a GPU that can be allocated; the rest is for contexts, fragmentation and buffers


@dataclass(frozen=True)
class Gpu:
    """One GPU in its machine; rates are for one direction, as on the data sheet.

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
    network_gb_s: float  # between machines, per GPU
    per_node: int
    price: float  # dollars per hour
    source: str

    def collective_gb_s(self, gpus: int) -> float:
        """Rate at which each of `gpus` receives in an all-gather; a machine's network adapters work in parallel."""
        if gpus <= self.per_node:
            return self.nvlink_gb_s
        return min(self.nvlink_gb_s, self.network_gb_s * self.per_node)

    def compute_s(self, flops: float, reach: float, gpus: int = 1) -> float:
        """Seconds of arithmetic, divided among `gpus`. `reach`: one of REACH."""
        return flops / (gpus * self.tflops * 1e12 * reach)

    def memory_s(self, size: float) -> float:
        """Seconds to read or write bytes of its memory."""
        return size / (self.bandwidth_gb_s * GB * REACH.decode_bandwidth)

    def host_s(self, size: float) -> float:
        """Seconds to copy bytes from or to host memory."""
        return size / (self.host_gb_s * GB * REACH.host)

    def collective_s(self, size: float, gpus: int) -> float:
        """Seconds until each of `gpus` has received bytes of the others."""
        return size / (self.collective_gb_s(gpus) * GB * REACH.link)


@dataclass(frozen=True)
class Efficiency:
    """Efficiency: fractions of the data sheet's numbers that are reached in practice. Sources in hardware.json."""

    training: float
    training_recomputed: float  # with activation checkpointing
    logprobs: float
    prefill: float
    decode_compute: float
    decode_bandwidth: float
    link: float
    host: float


@dataclass(frozen=True)
class EngineCosts:
    """Overheads of an engine beyond arithmetic and memory. Sources in hardware.json."""

    step_s: float
    sequence_s: float
    split_step_s: float
    split_sequence_s: float
    all_reduce_s: float
    sleep_s: float
    wake_s: float
    update_s: float
    update_gb_s: float
    asleep_gb: float
    max_sequences: int


@functools.cache
def hardware() -> dict[str, Any]:
    """The content of hardware.json, including sources."""
    data: dict[str, Any] = json.loads(Path(__file__).with_name("hardware.json").read_text())
    return data


GPUS = {name: Gpu(name=name, **facts) for name, facts in hardware()["gpus"].items()}
PEAKS = {**{name: gpu.tflops for name, gpu in GPUS.items()}, **hardware()["peaks"]["tflops"]}
REACH = Efficiency(**{name: fact["value"] for name, fact in hardware()["reach"].items()})
ENGINE = EngineCosts(**{name: fact["value"] for name, fact in hardware()["engine"].items()})


def gpu_of(name: str) -> Gpu:
    if gpu := GPUS.get(name.lower()):
        return gpu
    near = difflib.get_close_matches(name.lower(), GPUS, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"--gpu {name}: unknown{hint}; expected one of {', '.join(GPUS)}")


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 FLOP/s that the maker of a GPU publishes, by the name that its driver gives it: 9.89e14 for
    "NVIDIA H200". None: unknown."""
    words = set(device.lower().replace("-", " ").split())
    found = [(name.count(" "), tflops) for name, tflops in PEAKS.items() if words.issuperset(name.split())]
    return max(found)[1] * 1e12 if found else None


# ---- serving -----------------------------------------------------------------------------------------------


def decode_step_s(shape: Shape, gpu: Gpu, tp: int, running: float, mean_context: float) -> float:
    """Seconds of one token for each of `running` sequences."""
    kv = running * mean_context * shape.kv_bytes_per_token / min(tp, shape.kv_heads)  # beyond kv_heads: copies
    read_s = gpu.memory_s(shape.read_bytes(running) / tp + kv)
    compute_s = gpu.compute_s(running * shape.forward_flops(mean_context) / tp, REACH.decode_compute)
    all_reduces_s = 2 * shape.layers * ENGINE.all_reduce_s if tp > 1 else 0.0
    all_reduces_s += running * _all_reduced_s(shape, gpu, tp)
    return max(read_s, compute_s) + all_reduces_s + engine_overhead_s(running, tp)


def engine_overhead_s(running: float, tp: int) -> float:
    """Seconds of a decoding step beyond arithmetic and memory: launches, sampling, and what the host does while the GPU
    waits. An engine on one GPU launches several steps at once (generation/vllm_run.py)."""
    if tp == 1:
        return ENGINE.step_s + ENGINE.sequence_s * running
    return ENGINE.split_step_s + ENGINE.split_sequence_s * running


def prefill_s(shape: Shape, gpu: Gpu, tp: int, tokens: float, mean_context: float = 0.0) -> float:
    """Seconds of prefill of `tokens`, each of which attends to `mean_context` others."""
    compute_s = gpu.compute_s(tokens * shape.forward_flops(mean_context) / tp, REACH.prefill)
    return compute_s + tokens * _all_reduced_s(shape, gpu, tp)


def _all_reduced_s(shape: Shape, gpu: Gpu, tp: int) -> float:
    """Seconds to send one token's hidden state, twice per layer."""
    return gpu.collective_s(2 * shape.layers * shape.hidden * BYTES * 2 * (tp - 1) / tp, tp)


def kv_tokens(shape: Shape, gpu: Gpu, tp: int, free_gb: float | None = None) -> int:
    """Tokens in the KV cache of a replica, at least 0. `free_gb`: free memory per GPU before loading the weights."""
    free = gpu.memory_gb * MEMORY_FRACTION if free_gb is None else free_gb
    room = free * GB - shape.weight_bytes / tp
    return max(0, int(room * min(tp, shape.kv_heads) / max(1, shape.kv_bytes_per_token)))


def serving(shape: Shape, gpu: Gpu, tp: int, mean_context: float, is_policy: bool = False) -> ReplicaSpeed:
    """A linear fit of `decode_step_s`, and the seconds of sleep, wake and weight updates.

    `is_policy`: after waking, the weights come from the trainer. Otherwise (a judge) from host memory while it wakes.
    """
    held = int(kv_tokens(shape, gpu, tp) / max(1.0, mean_context))
    if held < 1:
        raise UserError(
            f"{shape.name} on {tp} x {gpu.name}: the KV cache cannot hold a sequence of {mean_context:.0f} tokens, "
            f"with {shape.weight_bytes / tp / GB:.0f} GB of weights per GPU; expected a higher tensor_parallel or a "
            "larger GPU"
        )
    return speed_of(shape, gpu, tp, mean_context, min(held, ENGINE.max_sequences), is_policy)


@functools.lru_cache(maxsize=4096)
def speed_of(shape: Shape, gpu: Gpu, tp: int, mean_context: float, most: int, is_policy: bool = False) -> ReplicaSpeed:
    """As `serving`, with at most `most` running sequences."""
    base_s, per_sequence_s = _linear_fit(shape, gpu, tp, mean_context, most)
    return ReplicaSpeed(
        base_s=base_s,
        per_sequence_s=per_sequence_s,
        prefill_s_per_token=prefill_s(shape, gpu, tp, 1, mean_context / 2),
        max_concurrent=most,
        sleep_s=ENGINE.sleep_s,  # a judge's weights stay in host memory, the policy's in the trainer
        wake_s=ENGINE.wake_s if is_policy else wake_s(shape, gpu, tp),
        weights_s=weight_sync_s(shape, gpu, tp, tp),
    )


def _linear_fit(shape: Shape, gpu: Gpu, tp: int, mean_context: float, most: int) -> tuple[float, float]:
    """Base and slope: least squares of the relative error over geometrically spaced batch sizes, so that small batches
    count too."""
    batches = np.unique(np.geomspace(1, most, 40).round())
    times = np.array([decode_step_s(shape, gpu, tp, float(b), mean_context) for b in batches])
    if len(batches) == 1:
        return float(times[0]), 0.0
    columns = np.stack([1 / times, batches / times], axis=1)
    (base, slope), *_ = np.linalg.lstsq(columns, np.ones(len(batches)), rcond=None)
    base = min(max(float(base), 0.1 * float(times[0])), float(times[0]))
    return base, max(0.0, float(slope))


# ---- sleep, wake, weight updates ---------------------------------------------------------------------------


def wake_s(shape: Shape, gpu: Gpu, tp: int) -> float:
    """Seconds to allocate memory and load the weights from host memory."""
    return ENGINE.wake_s + gpu.host_s(shape.weight_bytes / tp)


def weight_sync_s(shape: Shape, gpu: Gpu, tp: int, gpus: int) -> float:
    """Seconds of a weight update from a trainer sharded over `gpus` to every engine: all-gather, then load per GPU."""
    gather_s = gpu.collective_s(shape.weight_bytes * (gpus - 1) / gpus, gpus)
    return ENGINE.update_s + gather_s + shape.weight_bytes / tp / (ENGINE.update_gb_s * GB)


# ---- training ----------------------------------------------------------------------------------------------


def training_s(
    shape: Shape,
    gpu: Gpu,
    gpus: int,
    tokens: float,
    context: float,
    micro_tokens: int = 16384,
    checkpointing: bool = True,
) -> float:
    """Seconds of forward and backward over `tokens`, sharded over `gpus`; a token attends to `context` others.

    Gathering weights (twice) and scattering gradients, once per micro-batch, overlap with arithmetic.
    """
    reach = REACH.training_recomputed if checkpointing else REACH.training
    compute_s = gpu.compute_s(UPDATE * tokens * shape.forward_flops(context), reach, gpus)
    micro_batches = max(1, math.ceil(tokens / gpus / micro_tokens))
    moved = (2 * BYTES + 4) * shape.parameters * (gpus - 1) / gpus  # gradients are summed in float32
    state = 12.0 * shape.parameters / gpus  # float32 weights and both moments are read and written
    return max(compute_s, gpu.collective_s(micro_batches * moved, gpus)) + gpu.memory_s(2 * state)


def logprob_s(shape: Shape, gpu: Gpu, gpus: int, tokens: float, context: float, micro_tokens: int = 16384) -> float:
    """Seconds of one forward pass over `tokens` by the trainer."""
    compute_s = gpu.compute_s(tokens * shape.forward_flops(context), REACH.logprobs, gpus)
    micro_batches = max(1, math.ceil(tokens / gpus / micro_tokens))
    return max(compute_s, gpu.collective_s(micro_batches * shape.weight_bytes * (gpus - 1) / gpus, gpus))
