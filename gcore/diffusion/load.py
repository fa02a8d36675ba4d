"""The denoiser of a recipe: built from `model.denoiser`, or read from the folder of a diffusers pipeline."""

from __future__ import annotations

import torch

from gcore.config.tree import Config
from gcore.diffusion.denoiser import BuiltDenoiser, Denoiser


def load_denoiser(config: Config, device: torch.device, dtype: torch.dtype, *, encoders: bool) -> Denoiser:
    """`encoders`: with text encoders and VAE, for engines. The same seed builds the same weights in every process.
    Buffers keep their precision, as in models/networks.py: positions and frequencies of the trainer are not
    rounded either."""
    if config.model.denoiser is not None:
        denoiser: Denoiser = BuiltDenoiser(config.model.denoiser, config.run.seed)
    else:
        from gcore.diffusion.pipelines import load_pipeline

        denoiser = load_pipeline(config, encoders)
    frozen = (tensor for tensor in denoiser.frozen() if isinstance(tensor, torch.nn.Parameter))
    for parameter in (*denoiser.parameters(), *frozen):
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    return denoiser.to(device).eval()


def check_denoiser(config: Config) -> None:
    """Before the start, without weights: the transformer is of a supported kind, and has the layers that model.lora
    names. Raises UserError."""
    from gcore.models.networks import adapters_of

    with torch.device("meta"):
        if config.model.denoiser is not None:
            return
        from gcore.diffusion.pipelines import make_denoiser

        denoiser = make_denoiser(config)
    if config.model.lora is not None:
        adapters_of(denoiser, config.model.lora)
