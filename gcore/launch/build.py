"""Builds the objects of every role from the configuration: chooses runtimes, engines, trainers and reward sources.

    config ──> see_cluster (driver)
    config, plan ──> build_runtime (driver), build_engine, build_judge, build_scorer, build_controller
                     build_trainer, build_critic: see build_ranks.py

The runtime calls each `build_*` of a role in the process of that role, with the group's rendezvous as last argument.
Backends are imported inside the functions, so only those in use must be installed.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gcore import faults
from gcore.clients import CriticClient, EngineClient, ScorerClient, TrainerClient
from gcore.config.base import Model, Serving
from gcore.config.judges import ServedJudge
from gcore.config.tree import Config
from gcore.hub import model_folder
from gcore.launch.footprint import num_parameters
from gcore.launch.machines import Cluster, Machine, check_shared_folder, cluster_of, detect_machine
from gcore.launch.plan import Plan
from gcore.modalities.table import kind_of
from gcore.protocols import Group, Rendezvous
from gcore.runtime.protocol import NodeFacts, Runtime
from gcore.types import Scored, UserError

if TYPE_CHECKING:
    from gcore.controller.loop import Controller
    from gcore.controller.run_prompts import Filter
    from gcore.protocols import Engine
    from gcore.rewarding.scalar import ScalarModel
    from gcore.workflows.context import Workflow


def see_cluster(config: Config) -> Cluster:
    """The machines of the run: the nodes of the Ray cluster at RAY_ADDRESS, which is joined, or this machine."""
    from gcore.runtime.ray_cluster import is_joined, list_nodes

    is_alone = config.runtime == "local" or not is_joined()
    return Cluster((detect_machine(),)) if is_alone else cluster_of(*list_nodes())


def see_nodes() -> Cluster:
    """The nodes of the Ray cluster at RAY_ADDRESS, which is joined."""
    from gcore.runtime.ray_cluster import is_joined, list_nodes

    if not is_joined():
        raise UserError("RAY_ADDRESS is not set; expected the address of a Ray cluster, HOST:PORT or auto")
    return cluster_of(*list_nodes())


def look_at_nodes(
    nodes: Sequence[Machine], paths: Sequence[str] = (), folder: Path | None = None, megabytes: int = 0
) -> tuple[NodeFacts, list[NodeFacts]]:
    """Facts of the driver's machine, and of the nodes of the cluster that this process has joined."""
    from gcore.runtime import nodes as probes

    addresses = {node.node_id: node.address for node in nodes}
    return probes.look_here(paths), probes.look_at_nodes(addresses, paths, folder, megabytes)


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
    store_mb = 256 + 2 * model_megabytes(config) if store_mb == "auto" else store_mb
    return RayRuntime(store_mb, gpus.bundles, place_of, log_folder(config), bundle_nodes, user_files, lock)


def model_megabytes(config: Config) -> int:
    """Size of the policy, for the object store: of its files, or of the model to build, in float32."""
    if config.model.path is not None:
        files = list(model_folder(config.model).glob("*.safetensors"))
        return int(sum(f.stat().st_size for f in files) / 2**20)
    return 1 + num_parameters(config.model) * 4 // 2**20


def build_engine(config: Config, plan: Plan, rendezvous: Rendezvous) -> Engine:
    name = f"engine-{rendezvous.rank}"
    arm_faults(config, name, rendezvous)
    return kind_of(config).engine(plan, name, rendezvous.rank)


def build_judge(config: Config, plan: Plan, judge_name: str, rendezvous: Rendezvous) -> Engine:
    """A replica of the judge `judge_name`: an engine whose weights never change."""
    judge = next(judge for judge in config.rewards.engine_judges if judge.name == judge_name)
    if isinstance(judge, ServedJudge):
        longest = judge.max_length
    else:  # a teacher reads whole samples of the policy
        longest = config.data.max_prompt_length + config.generation.max_response_length
        longest += judge.traits.scores_at_one
    name = f"judge-{judge.name}-{rendezvous.rank}"
    arm_faults(config, name, rendezvous)
    return make_engine(config, plan, name, rendezvous.rank, judge.model, judge, longest)


def make_engine(
    config: Config, plan: Plan, name: str, index: int, model: Model, serving: Serving, max_length: int
) -> Engine:
    """An engine for a language model."""
    from gcore.generation.spec import EngineSpec
    from gcore.prompts.tokenizer import load_tokenizer

    if serving.traits.computes:
        quiet()
    is_policy = serving is config.generation
    spec = EngineSpec(
        name,
        model,
        serving,
        max_length,
        seed=config.run.seed,
        device=config.training.device,
        index=index,
        load_tokenizer=load_tokenizer,
        trace=trace_folder(config),
        memory_fraction=serving.gpu_memory_utilization / (plan.engines_per_gpu if is_policy else 1),
        sleeps=bool(sleep_level(config, plan)) and (is_policy or plan.grid is not None),
        restarts=config.runtime == "ray",
    )
    engine: Engine = importlib.import_module(serving.traits.module).make_engine(spec)
    return engine


def sleep_level(config: Config, plan: Plan) -> int:
    """Sleep level of the policy's engines while the trainer works; 0: they do not sleep."""
    level = config.generation.sleep
    if not kind_of(config).engines_sleep or config.sampling.max_staleness:
        return 0
    if config.placement.mode == "disaggregated":  # the trainer does not need their memory
        return 0
    if level != "auto":
        return level
    on_gpu = any(node.gpus for node in plan.nodes) and config.training.device != "cpu"
    return (1 if config.model.lora else 2) if on_gpu else 0  # adapters need the base weights, which level 1 keeps


def build_scorer(config: Config, plan: Plan, index: int, rendezvous: Rendezvous) -> ScalarModel:
    """A replica of the scalar reward model rewards.models[index]."""
    quiet()
    arm_faults(config, f"scorer-{config.rewards.models[index].name}-{rendezvous.rank}", rendezvous)
    from gcore.models.networks import load_scorer, pick_device, pick_dtype
    from gcore.observe.trace import Tracer
    from gcore.prompts.tokenizer import load_tokenizer, with_padding
    from gcore.rewarding.scalar import ScalarModel

    spec = config.rewards.models[index]
    device = pick_device(config.training.device, rendezvous.rank)
    tokenizer = with_padding(load_tokenizer(spec.model, f"rewards.models.{index}.model"), spec.model)
    dtype = pick_dtype(spec.dtype, device)
    network = load_scorer(spec.model, config.run.seed, dtype, device, tokenizer=tokenizer)
    return ScalarModel(network, tracer=Tracer(trace_folder(config), f"scorer-{spec.name}-{rendezvous.rank}"))


@dataclass(frozen=True, slots=True)
class Roles:
    """Clients of the replicas that the controllers call."""

    engines: Sequence[EngineClient] = ()
    trainers: Sequence[TrainerClient] = ()
    judges: Mapping[str, Sequence[EngineClient]] = field(default_factory=dict)
    scorers: Mapping[str, Sequence[ScorerClient]] = field(default_factory=dict)
    critics: Sequence[CriticClient] = ()  # ranks of a critic that has its own


def import_controller() -> None:
    """What build_controller imports. Done while the other roles load their models."""
    quiet()
    importlib.import_module("gcore.controller.loop")
    importlib.import_module("gcore.controller.services")


def build_controller(config: Config, plan: Plan, roles: Roles, rendezvous: Rendezvous) -> Controller:
    quiet()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # thousands of live samples make collections slow, and free nothing
    from gcore.controller.loop import Controller
    from gcore.controller.services import make_services

    arm_faults(config, f"controller-{rendezvous.rank}", rendezvous)
    if roles.trainers:
        check_shared_folder(config.run.folder, plan.nodes)
    return Controller(make_services(config, plan, roles, build_group(rendezvous)))


def arm_faults(config: Config, role: str, rendezvous: Rendezvous) -> None:
    if rendezvous.address is not None:  # each role has its own process
        faults.arm(config.faults.plan, role, config.run.folder)


def build_group(rendezvous: Rendezvous) -> Group:
    if rendezvous.address is None:
        from gcore.runtime.local import LocalGroup

        return LocalGroup(rendezvous)
    from gcore.runtime.tree import TreeGroup

    return TreeGroup(rendezvous)


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


def load_workflow(path: str) -> Workflow:
    from gcore.user_functions import load_function

    function = load_function(path, key="workflow")
    if not inspect.iscoroutinefunction(function) or len(inspect.signature(function).parameters) != 2:
        raise UserError(f"workflow={path}: expected `async def {path.rpartition(':')[2]}(ctx, prompt)`")
    workflow: Workflow = function
    return workflow


def load_filter(path: str) -> Filter:
    """sampling.filter: a built-in one by name, or a user's function, which may return only a bool."""
    from gcore.controller.collect import no_filter, spread
    from gcore.user_functions import load_function

    if path in ("none", "spread"):
        return no_filter if path == "none" else spread
    function = load_function(path, key="sampling.filter")

    def keep(group: list[Scored]) -> tuple[bool, str]:
        match function(group):
            case bool() | np.bool_() as keep:
                return bool(keep), "filter"
            case (bool() | np.bool_() as keep, str(reason)):
                return bool(keep), reason or "filter"
            case other:
                raise UserError(f"sampling.filter={path} returned {other!r}; expected (keep, reason) or a bool")

    return keep


def trace_folder(config: Config) -> Path | None:
    return config.run.folder if config.observe.trace else None


def log_folder(config: Config) -> Path | None:
    """Where processes write their output. With runtime=local the only process writes to the terminal."""
    return config.run.folder / "logs" if config.observe.logs and config.runtime == "ray" else None
