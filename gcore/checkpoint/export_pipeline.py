"""`gcore export` of a diffusion model: the folder of a diffusers pipeline with the trained transformer.

    the pipeline of the recipe ──copied: text encoders, VAE, scheduler──┐
    checkpoint ──transformer, with adapters merged──────────────────────┴──> FOLDER
               └──adapters, for `load_lora_weights` of diffusers──> FOLDER-adapter

The transformer is in memory as a whole, in float32.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from gcore.config.denoising import Denoising
from gcore.config.tree import Config
from gcore.types import UserError

SAMPLING = "sampling.json"


def export_pipeline(config: Config, checkpoint: Path, folder: Path, adapters: Path) -> int:
    """Returns the number of tensors of the transformer, which were read again and compared."""
    if config.model.path is None:
        raise UserError(
            "model.denoiser: a network that the recipe builds has no format in diffusers; expected a run with "
            "model.path (its weights are safetensors in the checkpoint's folder `weights`)"
        )
    import torch
    from safetensors.torch import save_file

    from gcore.checkpoint import tensors
    from gcore.diffusion.pipelines import load_denoiser
    from gcore.hub import model_folder
    from gcore.models.networks import LORA_A, LORA_B, adapters_of

    weights = checkpoint / "weights"
    saved = tensors.read(weights, tensors.shapes(weights))
    denoiser = load_denoiser(config, torch.device("cpu"), torch.float32, encoders=False)
    trained = dict(saved)
    if config.model.lora is not None:
        found = adapters_of(denoiser, config.model.lora)
        own = dict(denoiser.named_parameters())
        trained = {
            f"{layer}.weight": found.merge(
                own[f"{layer}.weight"].detach(), saved[layer + LORA_A], saved[layer + LORA_B]
            )
            for layer in found.layers
        }
        adapters.mkdir(parents=True, exist_ok=True)
        scaled = {n: t * (found.alpha / found.rank) if n.endswith(LORA_B) else t for n, t in saved.items()}
        # diffusers takes alpha = rank, if a file does not say otherwise
        save_file({n: t.contiguous() for n, t in scaled.items()}, adapters / "pytorch_lora_weights.safetensors")
    if unknown := denoiser.load_state_dict(trained, strict=False).unexpected_keys:
        raise RuntimeError(f"{weights}: {unknown[0]} is no tensor of the transformer")
    transformer: Any = denoiser.transformer
    left_out = shutil.ignore_patterns("transformer")
    shutil.copytree(model_folder(config.model), folder, ignore=left_out, dirs_exist_ok=True)
    transformer.save_pretrained(folder / "transformer")
    _save_sampling(folder, config.generation.denoising)
    return _compare(folder / "transformer", transformer)


def _save_sampling(folder: Path, spec: Denoising | None) -> None:
    """sampling.json: the arguments of the pipeline with which it samples as in training. The shift of the schedule
    becomes that of the recipe; the other sigmas that diffusers takes by default depend on the kind of pipeline."""
    assert spec is not None
    file = folder / "scheduler" / "scheduler_config.json"
    scheduler = json.loads(file.read_text()) if file.is_file() else {}
    if scheduler.get("_class_name") != "FlowMatchEulerDiscreteScheduler":
        return
    if scheduler.get("use_dynamic_shifting"):  # by the size of the picture: the same for all sizes
        same = {"base_shift": math.log(spec.shift), "max_shift": math.log(spec.shift)}
        scheduler |= {**same, "time_shift_type": "exponential", "shift_terminal": None}
    else:
        scheduler["shift"] = spec.shift
    file.write_text(json.dumps(scheduler, indent=2) + "\n")
    even = [1 - i / spec.steps for i in range(spec.steps)]  # before the shift
    arguments = {"num_inference_steps": spec.steps, "sigmas": even, "guidance_scale": spec.guidance_scale}
    (folder / SAMPLING).write_text(json.dumps(arguments) + "\n")


def _compare(folder: Path, transformer: Any) -> int:
    """Reads the folder as diffusers does. Raises RuntimeError."""
    again = type(transformer).from_pretrained(str(folder), local_files_only=True).state_dict()
    for name, tensor in transformer.state_dict().items():
        if not again[name].equal(tensor):
            raise RuntimeError(f"{folder}: {name} differs from the checkpoint after reloading")
    return len(again)
