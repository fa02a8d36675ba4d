"""Builds the runtime, and all roles but the controllers: engines of the policy, judges, scorers, ranks.

    config, plan ──> build_runtime (driver), build_engine, build_judge, build_scorer, build_trainer, build_critic
                     build_controller: see build_controller.py

The runtime calls each `build_*` of a role in the process of that role, with the group's rendezvous as last argument.
Backends are imported inside the functions, so only those in use must be installed.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gcore import faults
from gcore.clients import EngineClient, ScorerClient, TrainerClient
from gcore.config.base import Model, Serving
from gcore.config.judges import ServedJudge
from gcore.config.tree import Config
from gcore.generation.spec import EngineSpec, make_engine
from gcore.hub import model_folder
from gcore.launch.footprint import copies_moments, num_parameters
from gcore.launch.gpu_memory import plan_critic_memory, plan_memory
from gcore.launch.plan import Plan
from gcore.launch.user_code import load_policy_loss
from gcore.modalities.table import kind_of
from gcore.observe.trace import Tracer
from gcore.prompts.tokenizer import load_tokenizer
from gcore.protocols import Engine, Rendezvous, Scorer, Trainer
from gcore.runtime.protocol import Runtime

if TYPE_CHECKING:
    import torch

    from gcore.weights.publisher import WeightPublisher


@dataclass(frozen=True, slots=True)
class Roles:
    """Clients of the replicas that the controllers call."""

    engines: Sequence[EngineClient] = ()
    trainers: Sequence[TrainerClient] = ()
    judges: Mapping[str, Sequence[EngineClient]] = field(default_factory=dict)
    scorers: Mapping[str, Sequence[ScorerClient]] = field(default_factory=dict)
    critics: Sequence[TrainerClient] = ()  # ranks of a critic that has its own


def build_runtime(config: Config, plan: Plan, user_files: bytes = b"", lock: Sequence[int] = ()) -> Runtime:
    """`lock`: descriptors of the lock of the run folder."""
    if config.runtime == "local":
        from gcore.runtime.local import LocalRuntime

        return LocalRuntime()
    from gcore.runtime.ray import RayRuntime
    from gcore.runtime.ray_cluster import ProcessPlace

    def place_of(kind: str, rank: int) -> ProcessPlace:
        return ProcessPlace(plan.nodes[plan.role_nodes[kind][rank]].node_id, *gpus.of(kind, rank))

    gpus = plan.gpu_assignment
    bundle_nodes = [plan.nodes[node].node_id for node in gpus.nodes]
    store_mb = config.placement.object_store_mb
    store_mb = 256 + 2 * _model_megabytes(config) if store_mb == "auto" else store_mb
    return RayRuntime(store_mb, gpus.bundles, place_of, log_folder(config), bundle_nodes, user_files, lock)


def _model_megabytes(config: Config) -> int:
    """Size of the policy, for the object store: of its files, or of the model to build, in float32."""
    if config.model.path is not None:
        files = list(model_folder(config.model).glob("*.safetensors"))
        return int(sum(f.stat().st_size for f in files) / 2**20)
    return 1 + num_parameters(config.model) * 4 // 2**20


# ---- engines, judges, scorers ---------------------------------------------------------------------------------------


def build_engine(config: Config, plan: Plan, rendezvous: Rendezvous) -> Engine:
    spec = _engine_spec(config, plan, "engine", rendezvous, config.model, config.generation, config.max_length)
    return kind_of(config).engine(spec)


def build_judge(config: Config, plan: Plan, judge_name: str, rendezvous: Rendezvous) -> Engine:
    """A replica of the judge `judge_name`: an engine whose weights never change."""
    judge = next(judge for judge in config.rewards.engine_judges if judge.name == judge_name)
    of_policy = config.max_length + judge.traits.scores_at_one  # a teacher reads whole samples of the policy
    longest = judge.max_length if isinstance(judge, ServedJudge) else of_policy
    return make_engine(_engine_spec(config, plan, f"judge-{judge.name}", rendezvous, judge.model, judge, longest))


def _engine_spec(
    config: Config, plan: Plan, kind: str, rendezvous: Rendezvous, model: Model, serving: Serving, max_length: int
) -> EngineSpec:
    name, is_policy = f"{kind}-{rendezvous.rank}", serving is config.generation
    arm_faults(config, name, rendezvous)
    if serving.traits.computes:
        quiet()
    return EngineSpec(
        name,
        model,
        serving,
        max_length,
        seed=config.run.seed,
        device=config.training.device,
        index=rendezvous.rank,
        load_tokenizer=load_tokenizer,
        trace=trace_folder(config),
        memory_fraction=serving.gpu_memory_utilization / (plan.engines_per_gpu if is_policy else 1),
        sleeps=bool(plan.sleep_level) and (is_policy or plan.grid is not None),
        restarts=config.runtime == "ray",
        media=not is_policy or config.generation.media is not False,
    )


def build_scorer(config: Config, plan: Plan, index: int, rendezvous: Rendezvous) -> Scorer:
    """A replica of the scalar reward model rewards.models[index]."""
    spec = config.rewards.models[index]
    name = f"scorer-{spec.name}-{rendezvous.rank}"
    arm_faults(config, name, rendezvous)
    quiet()
    from gcore.models.networks import load_scorer, pick_device, pick_dtype
    from gcore.prompts.tokenizer import with_padding
    from gcore.rewarding.scalar import ScalarModel

    device = pick_device(config.training.device, rendezvous.rank)
    tokenizer = with_padding(load_tokenizer(spec.model, f"rewards.models.{index}.model"), spec.model)
    dtype = pick_dtype(spec.dtype, device)
    network = load_scorer(spec.model, config.run.seed, dtype, device, tokenizer=tokenizer)
    return ScalarModel(network, tracer=Tracer(trace_folder(config), name))


# ---- ranks of the trainer and of the critic -------------------------------------------------------------------------


def build_trainer(config: Config, plan: Plan, rendezvous: Rendezvous) -> Trainer:
    name = f"trainer-{rendezvous.rank}"
    arm_faults(config, name, rendezvous)
    if config.training.emulated is not None:
        from gcore.emulate.trainer import trainer_of

        return trainer_of(config, config.training.emulated, rendezvous.rank)
    quiet()
    from gcore.models.networks import pick_dtype
    from gcore.training.rank import TrainerRank

    device, gpu_bytes = _join(config, rendezvous)
    if gpu_bytes and "auto" in (config.training.activation_checkpointing, config.training.offload):
        config = plan_memory(config, plan, gpu_bytes).config  # the driver saw no GPU
    dtype = pick_dtype(config.training.dtype, device)
    return TrainerRank(
        config,
        partial(kind_of(config).backend, plan.topology, plan.shard, device, dtype),
        rendezvous.rank,
        plan.trainer_threads,
        Tracer(trace_folder(config), name),
        _publisher(config, plan, device, rendezvous),
        load_policy_loss(config.algorithm.policy_loss),
        in_place=not copies_moments(config, plan),
    )


def build_critic(config: Config, plan: Plan, rendezvous: Rendezvous) -> Trainer:
    """A rank of a critic that has its own ranks."""
    name = f"critic-{rendezvous.rank}"
    arm_faults(config, name, rendezvous)
    quiet()
    from gcore.models.networks import pick_dtype
    from gcore.prompts.tokenizer import load_tokenizer
    from gcore.training.critic import new_critic
    from gcore.training.fsdp import FsdpBackend
    from gcore.training.rank import TrainerRank

    device, gpu_bytes = _join(config, rendezvous)
    config, dtype = plan_critic_memory(config, plan, gpu_bytes), pick_dtype(config.training.dtype, device)
    critic = new_critic(config, load_tokenizer(config.model), config.max_length)
    make = partial(FsdpBackend, config, {"critic": critic}, device, dtype, plan.critic_shard)
    tracer, in_place = Tracer(trace_folder(config), name), not copies_moments(config, plan)
    return TrainerRank(config, make, rendezvous.rank, plan.trainer_threads, tracer, in_place=in_place)


def _join(config: Config, rendezvous: Rendezvous) -> tuple[torch.device, float]:
    """Join the process group of the ranks. Returns the device of this one and the bytes of its memory; 0 on a CPU."""
    import torch

    from gcore.models.networks import pick_device
    from gcore.runtime.gloo import join

    device, gpu_bytes = pick_device(config.training.device, rendezvous.rank), 0.0
    if device.type == "cuda":
        torch.cuda.set_device(device)
        gpu_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    join(rendezvous, "nccl" if device.type == "cuda" else "gloo", device=device)
    return device, gpu_bytes


def _publisher(config: Config, plan: Plan, device: torch.device, rendezvous: Rendezvous) -> WeightPublisher:
    """`device`: of the trainer rank that publishes its weights."""
    from gcore.models.networks import pick_device, pick_dtype
    from gcore.weights.broadcast import BroadcastSender
    from gcore.weights.publisher import WeightPublisher, choose_method

    engine_device = pick_device(config.training.device)
    on_gpu = device.type == engine_device.type == "cuda"
    same_gpu, one_process = plan.gpu_assignment.engines_share_gpus, rendezvous.address is None
    method = choose_method(config.placement, one_process=one_process, on_gpu=on_gpu, same_gpu=same_gpu)
    sender = None
    if method == "broadcast" and rendezvous.rank == 0:
        assert rendezvous.address is not None
        common = device if engine_device.type == device.type else pick_device("cpu")
        sender = BroadcastSender(common, rendezvous.address.rpartition(":")[0])
    serving = config.generation
    fp8 = serving.precision == "fp8" and serving.traits.fp8 == "sent"
    return WeightPublisher(rendezvous.rank, method, pick_dtype(serving.dtype, engine_device), sender, fp8)


# ---- every process --------------------------------------------------------------------------------------------------


def arm_faults(config: Config, role: str, rendezvous: Rendezvous) -> None:
    if rendezvous.address is not None:  # each role has its own process
        faults.arm(config.faults.plan, role, config.run.folder)


def quiet() -> None:
    """The environment of processes with torch. Switches off the messages that libraries print at import."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # compiled code of earlier runs; PyTorch's default is a folder in /tmp. vLLM has its own, VLLM_CACHE_ROOT.
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(caches / "gcore" / "torchinductor"))
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    logging_of_transformers = importlib.import_module("transformers").logging
    logging_of_transformers.set_verbosity_error()
    logging_of_transformers.disable_progress_bar()


def trace_folder(config: Config) -> Path | None:
    return config.run.folder if config.observe.trace else None


def log_folder(config: Config) -> Path | None:
    """Where processes write their output. With runtime=local the only process writes to the terminal."""
    return config.run.folder / "logs" if config.observe.logs and config.runtime == "ray" else None
