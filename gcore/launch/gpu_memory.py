"""GPU memory of a run, before any process starts: decides `auto` of training.activation_checkpointing and
training.offload, refuses what cannot fit, warns of what is close. Does not import torch.

    config, plan, model's shape ──rank_of──> TrainingRank ──┐
    config, plan, GPU memory ──engines_beside──> Engines ───┴─choose──> config without `auto`, lines for --dry-run

The driver uses the memory that nvidia-smi reports on its own machine. If it cannot know the GPUs (a joined Ray cluster,
no nvidia-smi), `auto` stays in the configuration, and every trainer rank decides with what torch reports of its GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gcore.config.base import Serving
from gcore.config.rewards import ScalarReward
from gcore.config.tree import Config
from gcore.cost.backends import megatron_memory
from gcore.cost.costs import ENGINE
from gcore.cost.shapes import Shape, model_shape
from gcore.cost.training_memory import (
    COMFORTABLE,
    GB,
    PART_TITLES,
    PARTS,
    Choice,
    Engines,
    Parts,
    TrainingRank,
    adapter_parameters,
    choose,
)
from gcore.launch.footprint import num_parameters
from gcore.launch.plan import Plan
from gcore.modalities.table import kind_of
from gcore.types import UserError

NEGLIGIBLE = 0.05  # of a GPU: a smaller peak needs no table
WORTH_CHANGING = 0.05  # share of the peak of parts that advice is about
MEGATRON_STATE = ("weights", "gradients", "optimizer", "reference")  # on the GPU at all times
BYTES = 2  # engines and scorers on a GPU: bfloat16


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The configuration without `auto`, the memory of the choice (None: not planned), and a line for the user."""

    config: Config
    choice: Choice | None = None
    note: str = ""

    @property
    def notes(self) -> list[str]:
        return [self.note] if self.note else []


def plan_memory(config: Config, plan: Plan, gpu_bytes: float | None = None) -> MemoryPlan:
    """Raises UserError if the trainer and the engines on its GPU cannot fit. `gpu_bytes`: of one GPU; by default those
    of this machine."""
    training = config.training
    if training.emulated is not None:
        return MemoryPlan(config)
    if not plan.gpus:
        return MemoryPlan(_without_auto(config).changed("training", offload="none"))
    if gpu_bytes is None and (gpu_bytes := detect_gpu_bytes()) is None:
        return MemoryPlan(config, note=_unplanned(config))
    if config.critic_ranks:
        plan_critic_memory(config, plan, gpu_bytes)  # a UserError now, not after the start of all processes
    if (activations := kind_of(config).activation_bytes) is not None:
        return _plan_activations(config, activations, gpu_bytes)
    try:
        shape = model_shape(config.model, "model.path")
    except UserError as error:  # a kind of model that the planner does not know
        return MemoryPlan(_without_auto(config), note=f"GPU memory is not planned: {error}")
    if training.backend == "megatron":
        return _plan_megatron(config, plan, shape, gpu_bytes)
    rank, beside = rank_of(config, plan, shape), engines_beside(config, plan, shape, gpu_bytes)
    choice = choose(rank, beside, gpu_bytes, training.activation_checkpointing, training.offload)
    needed, advice = _needed(choice), _advice(config, choice, choose(rank, beside, gpu_bytes))
    if not choice.fits:
        raise UserError(f"this run does not fit on its GPUs: {needed}; {advice}")
    note = f"GPU memory is close to its limit: {needed}; if it runs out of memory, {advice}" if choice.is_tight else ""
    return MemoryPlan(_chosen(config, choice), choice, note)


def _plan_activations(config: Config, activations: float, gpu_bytes: float) -> MemoryPlan:
    """`auto` of training.activation_checkpointing stays: trainer ranks recompute the layers that do not fit. Nothing is
    off-loaded, and nothing is refused: `gcore plan --denoiser` estimates the rest."""
    wanted, config = config.training.activation_checkpointing, _without_auto(config)
    if wanted != "auto" or not activations:
        return MemoryPlan(config)
    note = (
        f"a sample needs {activations / GB:.1f} of {gpu_bytes / GB:.0f} GB for activations; layers that do not fit are "
        "recomputed (training.activation_checkpointing=auto)"
    )
    return MemoryPlan(config.changed("training", activation_checkpointing=wanted), note=note)


def _plan_megatron(config: Config, plan: Plan, shape: Shape, gpu_bytes: float) -> MemoryPlan:
    """Recomputation, if activations do not fit without it. Nothing is off-loaded: the trainer's state is on the GPU
    while engines generate."""
    rank, beside = rank_of(config, plan, shape), engines_beside(config, plan, shape, gpu_bytes)
    wanted = config.training.activation_checkpointing
    for recompute in (False, True) if wanted == "auto" else (wanted,):
        networks = [megatron_memory(shape, plan.topology, rank.max_tokens, recompute, rank.kl)]
        if rank.critic is not None:
            critic = megatron_memory(rank.critic, plan.topology, rank.max_tokens, recompute)
            networks.append({name: critic[name] for name in ("weights", "gradients", "optimizer")})
        state = sum(sum(parts.get(n, 0.0) for n in MEGATRON_STATE) for parts in networks)
        needed = max(state + beside.rollout, sum(sum(parts.values()) for parts in networks) + beside.training)
        if needed <= COMFORTABLE * gpu_bytes:
            break
    text = f"training.backend=megatron and the engines need {needed / GB:.1f} of {gpu_bytes / GB:.1f} GB of a GPU"
    if needed > gpu_bytes:
        raise UserError(
            f"this run does not fit on its GPUs: {text}; expected more ranks or higher degrees in placement.trainer, a "
            "lower generation.gpu_memory_utilization, or placement.mode=disaggregated"
        )
    note = f"GPU memory is close to its limit: {text}" if needed > COMFORTABLE * gpu_bytes else ""
    return MemoryPlan(config.changed("training", activation_checkpointing=recompute, offload="none"), note=note)


def rank_of(config: Config, plan: Plan, shape: Shape) -> TrainingRank:
    training, lora = config.training, config.model.lora
    return TrainingRank(
        shape,
        shard=plan.shard,
        tensor_parallel=config.placement.trainer.tensor_parallel,
        max_tokens=max(training.max_tokens_per_gpu, -(-config.max_length // training.context_parallel)),
        kl=config.has_reference,
        critic=critic_shape(config, shape),
        # Those of a vision tower are few beside its activations: they are not counted, but not 0.
        adapters=max(1, "text" in lora.parts and adapter_parameters(shape, lora.rank, lora.targets)) if lora else 0,
        keep=GB * training.offload_keep_gb,
        cpu=not plan.gpus,
        float32=training.dtype == "float32",
        compiled=training.compile is not False,
    )


def plan_critic_memory(config: Config, plan: Plan, gpu_bytes: float) -> Config:
    """The configuration of a critic rank that has its GPU for itself, without `auto`: that of the trainer if it fits
    there, else what does. UserError if nothing does. `gpu_bytes`: 0 on a CPU."""
    training = config.training
    checkpointing, offload = training.activation_checkpointing, training.offload
    try:
        shape = model_shape(config.critic.model or config.model, "critic.model.path")
    except UserError:  # a kind of model that the planner does not know
        gpu_bytes = 0.0
    if not gpu_bytes:
        return _without_auto(config)
    rank = replace(
        rank_of(config, plan, shape),
        shape=replace(shape, tied=True),
        shard=plan.critic_shard,
        tensor_parallel=1,
        max_tokens=max(training.max_tokens_per_gpu, config.max_length),  # critic ranks share no sample
        kl=False,
        adapters=0,
    )
    choice = choose(rank, Engines(), gpu_bytes, checkpointing, offload)
    if choice.is_tight:  # the driver may have replaced `auto` by what fits the trainer
        choice = choose(rank, Engines(), gpu_bytes)
    if not choice.fits:
        raise UserError(
            f"the critic does not fit on its GPUs: {_needed(choice)}; raise placement.critic.ranks, or lower "
            "training.max_tokens_per_gpu"
        )
    return _chosen(config, choice)


def critic_shape(config: Config, policy: Shape) -> Shape | None:
    """Of a critic on the trainer ranks. `policy`: the shape of the policy, from which it starts by default."""
    if not config.algorithm.estimator.critic or config.critic_ranks:
        return None
    return model_shape(config.critic.model, "critic.model.path") if config.critic.model else policy


def engines_beside(config: Config, plan: Plan, shape: Shape, gpu_bytes: float) -> Engines:
    """What policy engines, judges and scorers hold on the trainer's most crowded GPU.

    vLLM and SGLang take their share of the GPU; asleep, what was measured of vLLM. The embedded engine never sleeps: it
    has its weights, and the KV cache of as many sequences as a replica can get, at full length.
    """
    if config.placement.mode == "disaggregated" or not plan.gpus:
        return Engines()
    asleep, generation = ENGINE.asleep_gb * GB, config.generation
    samples = config.sampling.prompts_per_step * config.sampling.samples_per_prompt
    rows = min(generation.max_concurrent, -(-samples // max(1, plan.engines)))
    per_row = config.max_length * shape.kv_bytes_per_token + shape.state_bytes
    cache = rows * per_row if not generation.traits.loads_folder else 0
    policy = _awake(config, generation, shape.parameters, gpu_bytes) + (cache if _uses_gpu(config, generation) else 0)
    if generation.traits.loads_folder:
        policy /= plan.engines_per_gpu
    judges = {
        judge.name: _awake(config, judge, num_parameters(judge.model), gpu_bytes)
        for judge in config.rewards.engine_judges
    }
    if plan.grid is not None:  # one role at a time has a slot, the others sleep there
        awake = [size for size in (policy, *judges.values()) if size]
        sleeping = asleep * len(awake)
        weights = BYTES * shape.parameters / generation.tensor_parallel
        return Engines(max(awake, default=0.0) + sleeping - asleep * bool(awake), sleeping, sleeping + weights)

    def each(count: int, width: int) -> int:
        return -(-count * width // plan.gpus)

    others = sum(
        each(plan.judges[judge.name], judge.tensor_parallel) * judges[judge.name]
        for judge in config.rewards.engine_judges
    )
    for scorer in config.rewards.models:
        weights = BYTES * num_parameters(scorer.model) if _uses_gpu(config, scorer) else 0
        others += each(plan.scorers[scorer.name], 1) * weights
    replicas = each(plan.engines, generation.tensor_parallel)
    if not (policy and plan.sleep_level):
        return Engines(*[replicas * policy + others] * 3)
    weights = BYTES * shape.parameters / generation.tensor_parallel
    return Engines(
        replicas * policy + others, replicas * asleep + others, replicas * min(policy, asleep + weights) + others
    )


def detect_gpu_bytes() -> float | None:
    """Memory of this machine's smallest GPU; None if it is unknown, or if the GPUs are those of a joined cluster."""
    from gcore.runtime.nodes import ask_gpus

    if os.environ.get("RAY_ADDRESS"):
        return None
    try:
        return min(float(megabytes) for megabytes in ask_gpus("memory.total")) * 2**20
    except ValueError:  # no GPU, or one that does not tell
        return None


# ---- lines --------------------------------------------------------------------------------------------------------


def memory_lines(plan: MemoryPlan) -> list[str]:
    """For --dry-run: a table of phases and parts in GB, and what was chosen and why."""
    choice = plan.choice
    if choice is None:
        return plan.notes
    if choice.peak < NEGLIGIBLE * choice.total:
        return [f"at most {choice.peak / GB:.1f} of {choice.total / GB:.0f} GB per GPU", *plan.notes]
    rows = table(choice.gpu)
    host = f"; {choice.host_peak / GB:.0f} GB of host memory per rank" if choice.host_peak else ""
    return [
        f"{choice.total / GB:.0f} GB per GPU, at most {choice.peak / GB:.0f} GB used{host}; GB by part:",
        *rows,
        *(f"training.{reason}" for reason in choice.reasons),
        *plan.notes,
    ]


def table(phases: Mapping[Any, Parts]) -> list[str]:
    """One line per phase, with the parts that occur and their sum, in GB."""
    names = [name for name in PARTS if any(parts.get(name) for parts in phases.values())]
    head = ["", *(PART_TITLES.get(name, name) for name in names), "sum"]
    rows = [head]
    for phase, parts in phases.items():
        cells = [f"{parts[name] / GB:.1f}" if parts.get(name) else "·" for name in names]
        rows.append([phase, *cells, f"{sum(parts.values()) / GB:.1f}"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return [
        "  ".join(
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _needed(choice: Choice) -> str:
    """the phase `backward` needs 141 of 150 GB (weights 30, activations 73, ...)"""
    parts = sorted(choice.gpu[choice.worst].items(), key=lambda item: -item[1])
    listed = ", ".join(f"{PART_TITLES.get(name, name)} {size / GB:.0f}" for name, size in parts if size >= 0.5 * GB)
    return (
        f"the phase `{choice.worst}` needs {choice.peak / GB:.0f} of {choice.total / GB:.0f} GB per GPU ({listed}) "
        f"with training.activation_checkpointing={str(choice.rank.checkpointing).lower()} and "
        f"training.offload={choice.rank.offload}"
    )


def _advice(config: Config, choice: Choice, free: Choice) -> str:
    """Keys to change: first those that would help if they were `auto` (`free`), then those of the largest parts."""
    training, parts, rank = config.training, choice.gpu[choice.worst], choice.rank
    longest = config.max_length
    state = sum(parts.get(name, 0.0) for name in ("weights", "gradients", "moments", "copies", "reference", "critic"))
    activations = parts.get("activations", 0.0) + parts.get("work", 0.0)
    more = f"use more GPUs (placement.trainer.ranks, shard={rank.shard})"
    tips = [(state, more if rank.adapters else f"{more} or train adapters (model.lora)")]
    if free.peak < choice.peak:
        for key, better in (
            ("offload", free.rank.offload != rank.offload),
            ("activation_checkpointing", free.rank.checkpointing != rank.checkpointing),
        ):
            tips += [(choice.peak, f"set training.{key}=auto")] if better and getattr(training, key) != "auto" else []
    if rank.kl and parts.get("reference"):
        tips.append((parts["reference"], "set algorithm.kl_coef=0"))
    if training.max_tokens_per_gpu > longest:
        lower = f"lower training.max_tokens_per_gpu={training.max_tokens_per_gpu} (at least {longest})"
        tips.append((activations, lower))
    elif longest > training.max_tokens_per_gpu * training.context_parallel:
        raised = f"raise training.context_parallel={training.context_parallel}: a sample has up to {longest:,} tokens"
        tips.append((activations, raised))
    if parts.get("engines"):
        key = "gpu_memory_utilization" if config.generation.traits.loads_folder else "max_concurrent"
        share = f"lower generation.{key}={getattr(config.generation, key)}"
        keeps = choice.worst not in ("start", "rollout")
        if config.generation.sleep == 0 and keeps:
            tips.append((choice.peak, "set generation.sleep=auto"))
        else:
            tips.append((parts["engines"], "use placement.mode=disaggregated" if keeps else share))
    tips = [tip for tip in tips if tip[0] > WORTH_CHANGING * choice.peak]
    return "; or ".join(text for _, text in sorted(tips, key=lambda tip: -tip[0]))


def _unplanned(config: Config) -> str:
    training = config.training
    keys = [f"training.{key}" for key in ("activation_checkpointing", "offload") if getattr(training, key) == "auto"]
    what = f"{' and '.join(keys)} are decided by each trainer rank at its start" if keys else "nothing is checked"
    return f"GPU memory is unknown on this machine: {what}"


# ---- parts of the configuration -----------------------------------------------------------------------------------


def _without_auto(config: Config) -> Config:
    """Without recomputation and off-load, where the recipe does not ask for them."""
    checkpointing, offload = config.training.activation_checkpointing, config.training.offload
    offload = "none" if offload == "auto" else offload
    return config.changed("training", activation_checkpointing=checkpointing is True, offload=offload)


def _chosen(config: Config, choice: Choice) -> Config:
    return config.changed("training", activation_checkpointing=choice.rank.checkpointing, offload=choice.rank.offload)


def _uses_gpu(config: Config, by: Serving | ScalarReward) -> bool:
    return config.training.device != "cpu" and not (isinstance(by, Serving) and by.emulated is not None)


def _awake(config: Config, serving: Serving, parameters: int, gpu_bytes: float) -> float:
    """Bytes of one replica on each of its GPUs while it generates, without the KV cache of the embedded engine."""
    if not _uses_gpu(config, serving):
        return 0.0
    if serving.traits.loads_folder:
        return serving.gpu_memory_utilization * gpu_bytes
    return float(BYTES * parameters)
