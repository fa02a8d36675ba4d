"""Builds the engine and the trainer backend of a diffusion model. build.py calls it in the processes of these roles."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from gcore.config.tree import Config
from gcore.launch.build import role_device, trace_folder
from gcore.launch.machines import check_shared_folder
from gcore.launch.plan import Plan

if TYPE_CHECKING:
    import torch

    from gcore.protocols import Engine
    from gcore.training.fsdp import FsdpBackend


def diffusion_engine(config: Config, plan: Plan, name: str, rank: int) -> Engine:
    check_shared_folder(config.run.folder, plan.nodes)
    from gcore.diffusion.load import load_denoiser
    from gcore.generation.diffusion import DiffusionEngine
    from gcore.models.networks import adapters_of, pick_device, pick_dtype
    from gcore.observe.trace import Tracer

    generation = config.generation
    assert generation.denoising is not None
    device = pick_device(role_device(config, generation.device), rank)
    denoiser = load_denoiser(config, device, pick_dtype(generation.dtype, device), encoders=True)
    lora, stale = config.model.lora, config.sampling.staleness
    return DiffusionEngine(
        denoiser,
        generation.denoising,
        config.run.folder / "latents" / name,
        max_concurrent=generation.max_concurrent,
        keep=stale + 2 * config.checkpoint.every if stale else 1,  # checkpoints refer to samples not yet trained on
        threads=plan.engine_threads,
        min_step_s=generation.min_step_s,
        adapters=adapters_of(denoiser, lora) if lora else None,
        tracer=Tracer(trace_folder(config), name),
    )


def diffusion_backend(config: Config, plan: Plan, device: torch.device, dtype: torch.dtype) -> FsdpBackend:
    import torch

    from gcore.diffusion.load import load_denoiser
    from gcore.training.denoise_model import DenoiseModel
    from gcore.training.fsdp import FsdpBackend

    spec = config.generation.denoising
    assert spec is not None
    wrap = functools.partial(
        DenoiseModel,
        spec=spec,
        seed=config.run.seed,
        velocity=config.algorithm.kl_estimator == "velocity",
    )

    def make_network() -> Any:
        return load_denoiser(config, device, torch.float32, encoders=False)

    return FsdpBackend(config, make_network, device, dtype, plan.shard, wrap=wrap)
