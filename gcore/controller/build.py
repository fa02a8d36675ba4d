"""The only place where configuration becomes objects. Backends are imported inside, so none is needed but the chosen.

Each `build_*` runs in the process of its role, called by the runtime with the group's rendezvous as last argument.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore.config.tree import Config
from gcore.controller.plan import Plan
from gcore.protocols import Group, Handle, Rendezvous, Rewarder, Runtime
from gcore.types import UserError

if TYPE_CHECKING:
    from gcore.controller.loop import Controller
    from gcore.controller.workflow import Workflow
    from gcore.generation.embedded import EmbeddedEngine
    from gcore.training.fsdp import FsdpTrainer


def build_runtime(config: Config, plan: Plan) -> Runtime:
    if config.runtime == "local":
        from gcore.runtime.local import LocalRuntime

        return LocalRuntime()
    from gcore.runtime.ray import RayRuntime

    return RayRuntime(plan.object_store_mb, plan.gpus, plan.gpu_share)


def build_engine(config: Config, plan: Plan, rendezvous: Rendezvous) -> EmbeddedEngine:
    quiet()
    from gcore.generation.embedded import EmbeddedEngine
    from gcore.models import load_model, pick_device, pick_dtype
    from gcore.observe.trace import Tracer
    from gcore.prompts.tokenizer import load_tokenizer

    device = pick_device(_engine_device(config), rendezvous.rank)
    dtype = pick_dtype(config.generation.dtype, device)
    network = load_model(config.model, load_tokenizer(config.model), config.run.seed, dtype, device)
    return EmbeddedEngine(
        network,
        max_concurrent=config.generation.max_concurrent,
        max_length=config.data.max_prompt_length + config.generation.max_response_length,
        threads=plan.engine_threads,
        tracer=Tracer(trace_folder(config), f"engine-{rendezvous.rank}"),
    )


def build_trainer(config: Config, plan: Plan, rendezvous: Rendezvous) -> FsdpTrainer:
    quiet()
    import torch

    from gcore.models import load_model, pick_device, pick_dtype
    from gcore.observe.trace import Tracer
    from gcore.prompts.tokenizer import load_tokenizer
    from gcore.runtime.gloo import join
    from gcore.training.fsdp import FsdpTrainer

    device = pick_device(config.training.device, rendezvous.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join(rendezvous, "nccl" if device.type == "cuda" else "gloo", device=device)
    tokenizer = load_tokenizer(config.model)

    def make_network() -> Any:
        return load_model(config.model, tokenizer, config.run.seed, torch.float32, device)

    return FsdpTrainer(
        config,
        make_network,
        device,
        pick_dtype(config.training.dtype, device),
        plan.trainer_threads,
        plan.shard,
        Tracer(trace_folder(config), f"trainer-{rendezvous.rank}"),
        serve=(pick_dtype(config.generation.dtype, pick_device(_engine_device(config))), rendezvous.address is None),
    )


def _engine_device(config: Config) -> str:
    return config.generation.device if config.generation.device != "auto" else config.training.device


def build_controller(
    config: Config, plan: Plan, engines: Sequence[Handle], trainers: Sequence[Handle], rendezvous: Rendezvous
) -> Controller:
    quiet()
    from gcore.controller.loop import Controller
    from gcore.observe.trace import Tracer
    from gcore.prompts.tokenizer import load_tokenizer

    return Controller(
        config,
        build_group(rendezvous),
        engines,
        trainers,
        load_tokenizer(config.model),
        build_rewarder(config),
        load_workflow(config.workflow),
        Tracer(trace_folder(config), f"controller-{rendezvous.rank}"),
    )


def build_group(rendezvous: Rendezvous) -> Group:
    if rendezvous.address is None:
        from gcore.runtime.local import LocalGroup

        return LocalGroup(rendezvous)
    from gcore.runtime.gloo import GlooGroup

    return GlooGroup(rendezvous)


def build_rewarder(config: Config) -> Rewarder:
    from gcore.rewarding.rewarder import RuleRewarder

    return RuleRewarder(config.rewards)


def load_workflow(path: str) -> Workflow:
    from gcore.rewarding.functions import load_function

    function = load_function(path, key="workflow")
    if not inspect.iscoroutinefunction(function) or len(inspect.signature(function).parameters) != 2:
        raise UserError(f"workflow={path}: expected `async def {path.rpartition(':')[2]}(ctx, prompt)`")
    workflow: Workflow = function
    return workflow


def trace_folder(config: Config) -> Path | None:
    return config.run.folder if config.observe.trace else None


def quiet() -> None:
    """Libraries talk a lot at import; a run's terminal belongs to its user."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    importlib.import_module("transformers").logging.set_verbosity_error()
