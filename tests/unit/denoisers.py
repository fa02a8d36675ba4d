"""A tiny diffusion policy for tests: configuration, engine, requests, samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcore.config.tree import Config
from gcore.content.latents import Latents
from gcore.diffusion.denoiser import BuiltDenoiser
from gcore.generation.diffusion import DiffusionBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.types import Completion, Request, Sample, SamplingParams

TINY = {"hidden_size": 16, "layers": 2, "heads": 2, "image_size": 4, "patch_size": 2}


def config_of(folder: Path | str = "runs", **sections: Any) -> Config:
    denoising = {"steps": 4, **sections.pop("denoising", {})}
    tree: dict[str, Any] = {
        "run": {"name": "tiny", "dir": str(folder)},
        "model": {"denoiser": TINY, **sections.pop("model", {})},
        "data": {"train": {"task": "draw_digits", "args": {"wrong": 0.5}}, "max_prompt_length": 8},
        "generation": {"denoising": denoising},
        "rewards": {"functions": [{"name": "digit", "path": "examples/digits.py:Classifier"}]},
        "algorithm": {"kl_coef": 0.0},
        **sections,
    }
    return Config.model_validate(tree)


def network_of(config: Config, seed: int = 0) -> BuiltDenoiser:
    """With random weights everywhere: a new network is the zero function."""
    assert config.model.denoiser is not None
    network = BuiltDenoiser(config.model.denoiser, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return network


def engine_of(
    config: Config, folder: Path, network: Any = None, min_step_s: float = 0.0, **options: Any
) -> SteppedEngine:
    assert config.generation.denoising is not None
    options = {"max_concurrent": 16, **options}
    backend = DiffusionBackend(network or network_of(config), config.generation.denoising, folder, **options)
    return SteppedEngine(backend, min_step_s=min_step_s)


def request_of(config: Config, prompt: str = "3", key: int = 5, greedy: bool = False) -> Request:
    denoising = config.generation.denoising
    assert denoising is not None
    content = Latents(prompt, 4, denoising.window_at(0, 1, 0.0))
    return Request(content, SamplingParams(denoising.steps, 0.0 if greedy else 1.0), key)


def generate(engine: SteppedEngine, requests: Sequence[Request]) -> list[Completion]:
    return asyncio.run(engine.generate(requests))


def samples_of(config: Config, requests: Sequence[Request], completions: Sequence[Completion]) -> list[Sample]:
    found = []
    for number, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        whole = request.content.extended(completion.content)
        found.append(Sample(number // 2, number % 2, whole, whole.actions_S, completion.logprobs_S))
    return found


def states(completion: Completion) -> np.ndarray:
    content = completion.content
    assert isinstance(content, Latents)
    return content.states()
