"""`placement.policy.engines_per_gpu: auto`: replaces `auto` by a number before any process starts.

config, cluster, GPU ──> choose_engines ──> config with a number, and the reason for --dry-run

One engine process decodes as fast as Python schedules its sequences and reads its results; during that time the GPU
waits. With a small model, two processes with half of the sequences each use the GPU in turns: 1.7 times the tokens per
second were measured (docs/benchmarks.md). They are two replicas on the same GPU: each has its weights, its share of
generation.gpu_memory_utilization and its requests, and sleeps, wakes and loads weights like any other replica.
"""

from __future__ import annotations

from collections.abc import Sequence

from gcore.config.tree import Config
from gcore.controller.auto_placement import detect_gpu_names, planner_gpu
from gcore.controller.gpu_memory import detect_gpu_bytes, kv_cache_bytes, resolve
from gcore.controller.machines import Cluster, Machine, as_cluster
from gcore.controller.plan import make_plan
from gcore.simulate.costs import GB, Gpu, decode_step_s, engine_overhead_s
from gcore.simulate.shapes import Shape, model_shape
from gcore.types import UserError

SEVERAL = 2  # more were slower on the only GPU that was measured
CORES = 2  # of a node per engine; chosen: one for its decoding thread, one for all other processes
LEAST_GAIN = 1.25  # below it, the estimate is too uncertain for the memory of a second engine


def choose_engines(
    config: Config, machines: Cluster | Machine, gpu_names: Sequence[str] | None = None, gpu_bytes: float | None = None
) -> tuple[Config, str]:
    """The configuration with a number, and a line for the user. Unchanged, with an empty line, where there is no
    choice: no GPU, a number of replicas, or an engine for which several processes were not measured. `gpu_names`,
    `gpu_bytes`: by default those of this machine."""
    cluster, policy, generation = as_cluster(machines), config.placement.policy, config.generation
    if policy.engines_per_gpu != "auto":
        return config, ""
    on_cpu = "cpu" in (config.training.device, generation.device) or not cluster.gpus
    if on_cpu or config.runtime == "local" or generation.engine != "vllm" or policy.replicas != "auto":
        return config, ""  # the plan takes `auto` as 1
    count, why = 1, _why_one(config, cluster)
    if not why:
        names = detect_gpu_names(cluster) if gpu_names is None else gpu_names
        gpu = planner_gpu(names)
        if gpu is None:
            why = f"the planner has no data for {names[0]!r}" if names else "the name of the GPUs is unknown"
        else:
            count, why = _planned(config, cluster, gpu, gpu_bytes or detect_gpu_bytes() or gpu.memory_gb * GB)
    return _with_engines(config, count), f"placement.policy.engines_per_gpu=auto: {count} ({why})"


def _why_one(config: Config, cluster: Cluster) -> str:
    placement, width = config.placement, config.generation.tensor_parallel
    if width > 1:
        return f"generation.tensor_parallel={width}"
    if placement.mode != "shared":
        return f"placement.mode={placement.mode} has one engine of a role per device"
    if placement.weights == "broadcast":
        return "placement.weights=broadcast has one engine per GPU"
    busiest = min((node for node in cluster.nodes if node.gpus), key=lambda node: node.cores / node.gpus)
    if busiest.cores < CORES * SEVERAL * busiest.gpus:
        return f"{busiest.cores} cores are too few for {SEVERAL * busiest.gpus} engines; expected {CORES} for each"
    return ""


def _planned(config: Config, cluster: Cluster, gpu: Gpu, gpu_bytes: float) -> tuple[int, str]:
    try:
        shape = model_shape(config.model, "model.path")
    except UserError as error:
        return 1, f"the planner does not know the model: {error}"
    plan = make_plan(_with_engines(config, 1), cluster)
    samples = config.sampling.prompts_per_step * config.sampling.samples_per_prompt
    sequences = min(config.generation.max_concurrent, -(-samples // plan.engines))
    gain, device_s = expected_gain(config, shape, gpu, sequences)
    python_s = engine_overhead_s(sequences / SEVERAL)
    times = (
        f"per step of {sequences // SEVERAL} sequences, {gpu.title} {1e3 * device_s:.1f} ms, Python "
        f"{1e3 * python_s:.1f} ms"
    )
    if SEVERAL * device_s > python_s:  # they would wait for each other on the GPU
        return 1, f"{times}: the GPU is not idle long enough for {SEVERAL}"
    if gain < LEAST_GAIN:
        return 1, f"{times}: {SEVERAL} would be only {gain:.2f} times as fast"
    if reason := _no_memory(config, cluster, shape, gpu_bytes, sequences):
        return 1, f"{times}, but {reason}"
    return SEVERAL, f"{times}: planned to be {gain:.2f} times as fast as 1"


def expected_gain(config: Config, shape: Shape, gpu: Gpu, sequences: int) -> tuple[float, float]:
    """How many times as fast two engines decode as one, and the seconds of the GPU in a step of one of the two. Their
    steps overlap, except on the GPU. Responses are assumed to have half of their maximum length. Pure."""
    context = config.data.max_prompt_length / 2 + config.generation.max_response_length / 4

    def device_s(running: float) -> float:
        return decode_step_s(shape, gpu, 1, running, context) - engine_overhead_s(running)

    half = sequences / SEVERAL
    one_s = device_s(sequences) + engine_overhead_s(sequences)
    several_s = max(SEVERAL * device_s(half), device_s(half) + engine_overhead_s(half))
    return one_s / several_s, device_s(half)


def _no_memory(config: Config, cluster: Cluster, shape: Shape, gpu_bytes: float, sequences: int) -> str:
    """Why the memory of a GPU does not suffice for two engines; empty: it does. They hold the weights twice."""
    needed = sequences / SEVERAL * shape.kv_bytes_per_token
    needed *= config.data.max_prompt_length + config.generation.max_response_length
    several, one = (_with_engines(config, count) for count in (SEVERAL, 1))
    plan = make_plan(several, cluster)
    cache = kv_cache_bytes(config.generation, SEVERAL, gpu_bytes, shape)
    if cache < needed:
        return (
            f"the KV cache of each would have {max(0.0, cache) / GB:.1f} of {needed / GB:.1f} GB "
            f"(key: generation.gpu_memory_utilization={config.generation.gpu_memory_utilization})"
        )
    found, before = (resolve(each, make_plan(each, cluster), shape, gpu_bytes).rank for each in (several, one))
    if (found.checkpointing, found.offload) != (before.checkpointing, before.offload):
        return "the trainer would have to give up memory (checkpointing or off-load)"
    return "" if resolve(several, plan, shape, gpu_bytes).fits else "the run would not fit on its GPUs"


def _with_engines(config: Config, count: int) -> Config:
    policy = config.placement.policy.model_copy(update={"engines_per_gpu": count})
    return config.model_copy(update={"placement": config.placement.model_copy(update={"policy": policy})})
