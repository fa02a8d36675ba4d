"""A lower bound of the memory that the processes of a run need, checked against this machine. Does not import torch.

    config, plan ──parts──> [MemoryPart(what, count, MB each, key)] ──check_sizes──> UserError | warnings

A part is a kind of process: a measured constant plus the weights that it holds in host memory. Activations, KV caches,
CUDA contexts and messages are not counted. If even this lower bound exceeds the memory of the machine, the run is
refused. GPU memory: gpu_memory.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gcore.config.base import Model, PolicyModel, Serving
from gcore.config.rewards import ScalarReward
from gcore.config.tree import Config
from gcore.cost.shapes import model_shape
from gcore.cost.training_memory import off_gpu, state_bytes
from gcore.hub import model_folder
from gcore.launch.machines import Machine
from gcore.launch.plan import Plan
from gcore.types import UserError

# private memory in MB of each kind of process without weights, in a run of a 30k-parameter model (torch 2.13, CPU)
ENGINE_MB, TRAINER_MB, CONTROLLER_MB, EMULATED_MB, WORKER_MB = 290, 295, 215, 65, 20
DRIVER_MB = 450  # including the processes of Ray
COPY_KEY = "checkpoint.asynchronous"
MAX_PER_CORE = 8  # processes per core; more give a warning


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """MemoryPart("engine", count=64, each_mb=290, key="placement.policy.replicas", idle=False)"""

    what: str
    count: int
    each_mb: float
    key: str
    idle: bool = False  # not a process, or one that uses almost no CPU

    @property
    def total_mb(self) -> float:
        return self.count * self.each_mb


def parts(config: Config, plan: Plan, trains: bool = True) -> list[MemoryPart]:
    """Every kind of process of the run. `trains`: with trainer ranks. With runtime=local only weights count."""
    local = config.runtime == "local"

    def part(what: str, count: int, key: str, base_mb: float, weights_mb: float, idle: bool = False) -> MemoryPart:
        return MemoryPart(what, count, weights_mb + (0 if local else base_mb), key, idle or local)

    def served(what: str, count: int, key: str, model: Model, by: Serving | ScalarReward) -> MemoryPart:
        if isinstance(by, Serving) and by.emulated is not None:
            return part(what, count, key, EMULATED_MB, 0, idle=True)
        width = 0 if plan.gpus and config.training.device != "cpu" else 2 if by.dtype == "bfloat16" else 4
        return part(what, count, key, ENGINE_MB, num_parameters(model) * width / 2**20)

    def key(own: str) -> str:
        return own if plan.grid is None else "placement.slots"

    every = [MemoryPart("driver", 1, DRIVER_MB, "runtime", idle=True)]
    every.append(served("engine", plan.engines, key("placement.policy.replicas"), config.model, config.generation))
    for place, judge in config.rewards.engine_judges_by_key.items():
        count = plan.judges[judge.name]
        every.append(served(f"judge {judge.name}", count, key(f"{place}.replicas"), judge.model, judge))
    for i, scorer in enumerate(config.rewards.models):
        count = plan.scorers[scorer.name]
        every.append(served(f"scorer {scorer.name}", count, f"rewards.models.{i}.replicas", scorer.model, scorer))
    if trains and config.training.emulated is not None:
        every.append(part("trainer rank", plan.trainers, "placement.trainer.ranks", EMULATED_MB, 0, idle=True))
    elif trains:
        held_mb, copied_mb = _trained_mb(config, plan)
        every.append(part("trainer rank", plan.trainers, "placement.trainer.ranks", TRAINER_MB, held_mb))
        if copied_mb >= 1:
            every.append(MemoryPart("copy for checkpoints", plan.trainers, copied_mb, COPY_KEY, idle=True))
        if plan.critics:
            held_mb, copied_mb = _critic_mb(config, plan)
            every.append(part("critic rank", plan.critics, "placement.critic.ranks", TRAINER_MB, held_mb))
            every.append(MemoryPart("copy for checkpoints", plan.critics, copied_mb, COPY_KEY, idle=True))
    every.append(part("controller", plan.controllers, "controllers", CONTROLLER_MB, 0))
    workers = plan.controllers * plan.reward_workers
    every.append(MemoryPart("reward worker", workers, WORKER_MB, "rewards.workers", idle=True))
    return [each for each in every if each.count]


def node_parts(config: Config, plan: Plan, trains: bool = True) -> list[tuple[Machine, list[MemoryPart]]]:
    """The processes of each node. The driver is counted on the first: it runs there, unless its node has no roles."""
    nodes = []
    for i, node in enumerate(plan.nodes):
        own = parts(config, plan.on_node(i), trains)
        nodes.append((node, own if i == 0 else [part for part in own if part.what != "driver"]))
    return [(node, own) for node, own in nodes if own]


def check_sizes(every: Sequence[MemoryPart], machine: Machine) -> list[str]:
    """UserError if the run needs more memory than the machine has. Returns warnings about free memory and cores."""
    total = sum(part.total_mb for part in every)
    largest = max(every, key=lambda part: part.total_mb)
    if machine.memory_mb and total > machine.memory_mb:
        fewer = f"lower {largest.key}={largest.count}" if largest.count > 1 else "use a smaller model or more memory"
        if total - sum(part.total_mb for part in every if part.key == COPY_KEY) <= machine.memory_mb:
            fewer = f"set {COPY_KEY}=false, which needs no copy"
        raise UserError(
            f"this run needs at least {size(total)} of memory, and this machine has {size(machine.memory_mb)}: "
            f"{_listed(every)}; {fewer}"
        )
    warnings = []
    if machine.free_mb and total > machine.free_mb:
        warnings.append(f"this run needs at least {size(total)} of memory, and {size(machine.free_mb)} are free now")
    busy = [part for part in every if not part.idle]
    count = sum(part.count for part in busy)
    if count > MAX_PER_CORE * machine.cores:
        most = max(busy, key=lambda part: part.count)
        warnings.append(
            f"{count} processes share {machine.cores} core(s) ({_listed(busy)}): they take minutes to start, and more "
            f"processes than cores do not make a run faster; lower {most.key}={most.count}"
        )
    return warnings


def memory_line(every: Sequence[MemoryPart], machine: Machine) -> str:
    """For --dry-run: at least 2.2 GB of 24 GB"""
    of = f" of {size(machine.memory_mb)}" if machine.memory_mb else ""
    return f"at least {size(sum(part.total_mb for part in every))}{of}"


def num_parameters(model: Model) -> int:
    """From the size of its files, or from the shape to build; 0 if the files are not downloaded yet."""
    if model.path is not None:
        folder = model_folder(model)
        if (folder / "transformer").is_dir():  # a diffusers pipeline
            folder = folder / "transformer"
        files = list(folder.glob("*.safetensors")) or list(folder.glob("pytorch_model*.bin"))
        return sum(file.stat().st_size for file in files) // _bytes_per_weight(folder / "config.json")
    if isinstance(model, PolicyModel) and model.denoiser is not None:
        return 18 * model.denoiser.layers * model.denoiser.hidden_size**2 + 200 * model.denoiser.hidden_size
    return model_shape(model, "model.build").parameters


def _bytes_per_weight(file: Path) -> int:
    try:
        config = json.loads(file.read_text())
        kind = config.get("dtype") or config.get("torch_dtype") or config["text_config"]["dtype"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        kind = ""
    return {"float32": 4, "float64": 8}.get(str(kind), 2)


def _trained_mb(config: Config, plan: Plan) -> tuple[float, float]:
    """What a trainer rank holds, and its copy of what it writes of a checkpoint."""
    adapters, sharing = config.model.lora is not None, plan.shard * config.placement.trainer.tensor_parallel
    own = num_parameters(config.model) / sharing
    state = state_bytes(own, 0 if adapters else own, 2 if plan.gpus else 4, config.has_reference, adapters)
    saved = () if adapters else ("weights", "moments", "reference")  # adapters are small
    if config.algorithm.estimator.critic and not config.critic_ranks:
        critic = num_parameters(config.critic.model or config.model) / sharing
        state |= {"critic": 4 * critic, "critic moments": 8 * critic, "critic gradients": 4 * critic}
    copies = plan.topology.ranks / sharing  # on all nodes
    return _held_and_copied(config, plan, state, (*saved, "critic", "critic moments"), copies)


def _critic_mb(config: Config, plan: Plan) -> tuple[float, float]:
    """The same for a rank of a critic that has its own ranks."""
    own = num_parameters(config.critic.model or config.model) / plan.critic_shard
    state, copies = state_bytes(own, own, 4, False, False), config.critic_ranks / plan.critic_shard
    return _held_and_copied(config, plan, state, ("weights", "moments"), copies)


def _held_and_copied(
    config: Config, plan: Plan, state: Mapping[str, float], saved: Sequence[str], copies: float
) -> tuple[float, float]:
    """On a CPU a rank holds all of its state. On a GPU: what training.offload keeps in host memory (`auto`: not known
    yet, counted as nothing). The copy is made if checkpoint.asynchronous; each of the `copies` of the weights writes a
    part."""
    offload = config.training.offload
    held = tuple(state) if not plan.gpus else () if offload == "auto" else off_gpu(offload)
    copied = sum(state.get(name, 0.0) for name in saved) / max(1.0, copies) * config.checkpoint.asynchronous
    return sum(state.get(name, 0.0) for name in held) / 2**20, copied / 2**20


def _listed(every: Sequence[MemoryPart]) -> str:
    """Largest first: 64 x engine of 290 MB, 1 x driver of 450 MB"""
    ordered = sorted(every, key=lambda part: -part.total_mb)
    return ", ".join(f"{part.count} x {part.what} of {size(part.each_mb)}" for part in ordered)


def size(megabytes: float) -> str:
    """290 MB, 1.5 GB, 24 GB"""
    if megabytes < 1000:
        return f"{megabytes:.0f} MB"
    gigabytes = megabytes / 1024
    return f"{gigabytes:.0f} GB" if gigabytes >= 10 else f"{gigabytes:.1f} GB"
