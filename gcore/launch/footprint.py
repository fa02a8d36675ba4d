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
from gcore.cost.training_memory import Offload, off_gpu, state_bytes
from gcore.hub import model_folder
from gcore.launch.gpu_assignment import CRITIC, TRAINER
from gcore.launch.machines import Machine
from gcore.launch.plan import Plan
from gcore.types import UserError

# private memory in MB of each kind of process without weights, in a run of a 30k-parameter model (torch 2.13, CPU)
ENGINE_MB, TRAINER_MB, CONTROLLER_MB, EMULATED_MB, WORKER_MB = 290, 295, 215, 65, 20
DRIVER_MB = 450  # including the processes of Ray
COPY_KEY = "checkpoint.asynchronous"
COPIED = 0.8  # share of a node's memory that a run may need if off-loaded moments are copied for checkpoints
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


def copies_moments(config: Config, plan: Plan) -> bool:
    """Whether checkpoints copy off-loaded moments, of which no step waits for the files then: if every node has memory
    for it. Otherwise they are written in place (checkpoint/writer.py)."""
    if not (plan.gpus and config.checkpoint.asynchronous and off_gpu(_offload(config))):
        return True
    nodes = [(node.memory_mb, parts(config, plan, True, i, copied=True)) for i, node in enumerate(plan.nodes)]
    return all(not limit or sum(part.total_mb for part in listed) <= COPIED * limit for limit, listed in nodes)


def parts(
    config: Config, plan: Plan, trains: bool = True, node: int | None = None, copied: bool | None = None
) -> list[MemoryPart]:
    """Every kind of process of the run, or of one node. `trains`: with trainer ranks. `copied`: off-loaded moments, for
    checkpoints; default: if they fit. With runtime=local only weights count."""
    local, counts = config.runtime == "local", plan.counts(node)
    copied = copies_moments(config, plan) if copied is None else copied

    def part(kind: str, key: str, base_mb: float, weights_mb: float, idle: bool = False) -> MemoryPart:
        what = f"{kind} rank" if kind in (TRAINER, CRITIC) else kind.replace("-", " ", 1)  # judge-NAME
        return MemoryPart(what, counts[kind], weights_mb + (0 if local else base_mb), key, idle or local)

    def served(kind: str, key: str, model: Model, by: Serving | ScalarReward) -> MemoryPart:
        if isinstance(by, Serving) and by.emulated is not None:
            return part(kind, key, EMULATED_MB, 0, idle=True)
        width = 0 if plan.gpus and config.training.device != "cpu" else 2 if by.dtype == "bfloat16" else 4
        return part(kind, key, ENGINE_MB, num_parameters(model) * width / 2**20)

    def key(replicas: str) -> str:
        return replicas if plan.grid is None else "placement.slots"

    listed = [MemoryPart("driver", 1, DRIVER_MB, "runtime", idle=True)] if not node else []
    listed.append(served("engine", key("placement.policy.replicas"), config.model, config.generation))
    for place, judge in config.rewards.engine_judges_by_key.items():
        listed.append(served(f"judge-{judge.name}", key(f"{place}.replicas"), judge.model, judge))
    for i, scorer in enumerate(config.rewards.models):
        listed.append(served(f"scorer-{scorer.name}", f"rewards.models.{i}.replicas", scorer.model, scorer))
    if trains and config.training.emulated is not None:
        listed.append(part(TRAINER, "placement.trainer.ranks", EMULATED_MB, 0, idle=True))
    elif trains:
        for kind, sizes in ((TRAINER, _trained_mb), (CRITIC, _critic_mb)):
            if counts.get(kind):
                held_mb, copied_mb = sizes(config, plan, copied)
                listed.append(part(kind, f"placement.{kind}.ranks", TRAINER_MB, held_mb))
                if copied_mb >= 1:
                    listed.append(MemoryPart("copy for checkpoints", counts[kind], copied_mb, COPY_KEY, idle=True))
    listed.append(part("controller", "controllers", CONTROLLER_MB, 0))
    workers = counts["controller"] * plan.reward_workers
    listed.append(MemoryPart("reward worker", workers, WORKER_MB, "rewards.workers", idle=True))
    return [each for each in listed if each.count]


def node_parts(config: Config, plan: Plan, trains: bool = True) -> list[tuple[Machine, list[MemoryPart]]]:
    """The processes of each node. The driver is counted on the first: it runs there, unless its node has no roles."""
    nodes = [(node, parts(config, plan, trains, i)) for i, node in enumerate(plan.nodes)]
    return [(node, listed) for node, listed in nodes if listed]


def check_sizes(listed: Sequence[MemoryPart], machine: Machine) -> list[str]:
    """UserError if the run needs more memory than the machine has. Returns warnings about free memory and cores."""
    total = sum(part.total_mb for part in listed)
    largest = max(listed, key=lambda part: part.total_mb)
    if machine.memory_mb and total > machine.memory_mb:
        fewer = f"lower {largest.key}={largest.count}" if largest.count > 1 else "use a smaller model or more memory"
        if total - sum(part.total_mb for part in listed if part.key == COPY_KEY) <= machine.memory_mb:
            fewer = f"set {COPY_KEY}=false, which needs no copy"
        raise UserError(
            f"this run needs at least {size(total)} of memory, and this machine has {size(machine.memory_mb)}: "
            f"{_listing(listed)}; {fewer}"
        )
    warnings = []
    if machine.free_mb and total > machine.free_mb:
        warnings.append(f"this run needs at least {size(total)} of memory, and {size(machine.free_mb)} are free now")
    busy = [part for part in listed if not part.idle]
    count = sum(part.count for part in busy)
    if count > MAX_PER_CORE * machine.cores:
        most = max(busy, key=lambda part: part.count)
        warnings.append(
            f"{count} processes share {machine.cores} core(s) ({_listing(busy)}): they take minutes to start, and more "
            f"processes than cores do not make a run faster; lower {most.key}={most.count}"
        )
    return warnings


def memory_line(listed: Sequence[MemoryPart], machine: Machine) -> str:
    """For --dry-run: at least 2.2 GB of 24 GB"""
    of = f" of {size(machine.memory_mb)}" if machine.memory_mb else ""
    return f"at least {size(sum(part.total_mb for part in listed))}{of}"


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


def _trained_mb(config: Config, plan: Plan, copied: bool) -> tuple[float, float]:
    """What a trainer rank holds, and its copy of what it writes of a checkpoint."""
    adapters, sharing = config.model.lora is not None, plan.shard * config.placement.trainer.tensor_parallel
    own = num_parameters(config.model) / sharing
    state = state_bytes(own, 0 if adapters else own, 2 if plan.gpus else 4, config.has_reference, adapters)
    saved = () if adapters else ("weights", "moments", "reference")  # adapters are small
    if config.algorithm.estimator.critic and not config.critic_ranks:
        critic = num_parameters(config.critic.model or config.model) / sharing
        state |= {"critic": 4 * critic, "critic moments": 8 * critic, "critic gradients": 4 * critic}
    copies = plan.topology.ranks / sharing  # on all nodes
    return _held_and_copied(config, plan, state, (*saved, "critic", "critic moments"), copies, copied)


def _critic_mb(config: Config, plan: Plan, copied: bool) -> tuple[float, float]:
    """The same for a rank of a critic that has its own ranks."""
    own = num_parameters(config.critic.model or config.model) / plan.critic_shard
    state, copies = state_bytes(own, own, 4, False, False), config.critic_ranks / plan.critic_shard
    return _held_and_copied(config, plan, state, ("weights", "moments"), copies, copied)


def _held_and_copied(
    config: Config, plan: Plan, state: Mapping[str, float], saved: Sequence[str], copies: float, all_copied: bool
) -> tuple[float, float]:
    """On a CPU a rank holds all of its state. On a GPU: what training.offload keeps in host memory (`auto`: not known
    yet, counted as nothing). The copy is made if checkpoint.asynchronous; each of the `copies` of the weights writes a
    part. `all_copied`: also off-loaded moments."""
    held = off_gpu(_offload(config)) if plan.gpus else tuple(state)
    in_place = set[str]() if all_copied or not plan.gpus else {"moments", "critic moments"} & set(held)
    copied = sum(state.get(name, 0.0) for name in saved if name not in in_place) / max(1.0, copies)
    kept = min(1e9 * config.training.offload_keep_gb, state["moments"]) if plan.gpus and "moments" in held else 0.0
    copied += kept / max(1.0, copies) * bool(in_place)
    held_mb = (sum(state.get(name, 0.0) for name in held) - kept) / 2**20
    return held_mb, copied * config.checkpoint.asynchronous / 2**20


def _offload(config: Config) -> Offload:
    return "none" if config.training.offload == "auto" else config.training.offload


def _listing(listed: Sequence[MemoryPart]) -> str:
    """Largest first: 64 x engine of 290 MB, 1 x driver of 450 MB"""
    ordered = sorted(listed, key=lambda part: -part.total_mb)
    return ", ".join(f"{part.count} x {part.what} of {size(part.each_mb)}" for part in ordered)


def size(megabytes: float) -> str:
    """290 MB, 1.5 GB, 24 GB"""
    if megabytes < 1000:
        return f"{megabytes:.0f} MB"
    gigabytes = megabytes / 1024
    return f"{gigabytes:.0f} GB" if gigabytes >= 10 else f"{gigabytes:.1f} GB"
