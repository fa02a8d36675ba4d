"""The denoiser of a recipe: built, or from the folder of a diffusers pipeline. Stable Diffusion 3 and 3.5, Flux,
Qwen-Image, Wan.

    folder/transformer ──> the network, in engines and trainers
    folder/text_encoder*, tokenizer*, vae ──> encode, decode: in engines alone, frozen

Latents are always channels x (frames x) height x width. Networks that take patches get them here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcore.config.denoising import Denoising
from gcore.config.tree import Config
from gcore.diffusion.denoiser import EMPTY, BuiltDenoiser, Condition, Denoiser, to_pixels
from gcore.diffusion.flow_transformer import from_patches, to_patches
from gcore.hub import model_folder
from gcore.models.networks import adapters_of
from gcore.types import UserError

STEPS = 1000.0  # networks that count time in training steps
DECODED_PIXELS = 8 * 512 * 512  # that a VAE decodes at once
PIXELS = 8  # height and width in pixels of one number of the latents


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between the transformers of diffusers."""

    layers: tuple[str, ...]
    arguments: Callable[[Tensor, Tensor, Mapping[str, Tensor], Tensor | None], dict[str, Any]]  # beside the latents
    encode: Callable[[Any, str], dict[str, Tensor]]  # pipeline, prompt -> condition of one row
    shapes: Callable[[Any], dict[str, tuple[int, ...]]]  # of a condition with one token, from the network's config
    patches: bool = False  # the network gets patches of 2 x 2 numbers of the latents
    is_video: bool = False


# ---- calls of the networks ------------------------------------------------------------------------------------------


def _arguments_sd3(x: Tensor, time_B: Tensor, c: Mapping[str, Tensor], _: Tensor | None) -> dict[str, Any]:
    return {
        "timestep": time_B * STEPS,
        "encoder_hidden_states": c["embeds"],
        "pooled_projections": c["pooled"],
    }


def _arguments_flux(x: Tensor, time_B: Tensor, c: Mapping[str, Tensor], guidance: Tensor | None) -> dict[str, Any]:
    height, width = x.shape[2] // 2, x.shape[3] // 2
    ids = torch.zeros(height, width, 3, device=x.device, dtype=x.dtype)
    ids[..., 1] += torch.arange(height, device=x.device)[:, None]
    ids[..., 2] += torch.arange(width, device=x.device)[None, :]
    return {
        "timestep": time_B,
        "guidance": guidance,
        "pooled_projections": c["pooled"],
        "encoder_hidden_states": c["embeds"],
        "txt_ids": torch.zeros(c["embeds"].shape[1], 3, device=x.device, dtype=x.dtype),
        "img_ids": ids.flatten(0, 1),
    }


def _arguments_qwen(x: Tensor, time_B: Tensor, c: Mapping[str, Tensor], guidance: Tensor | None) -> dict[str, Any]:
    return {
        "timestep": time_B,
        "guidance": guidance,
        "encoder_hidden_states": c["embeds"],
        "encoder_hidden_states_mask": c["mask"],
        "img_shapes": [[(1, x.shape[2] // 2, x.shape[3] // 2)]] * len(x),
    }


def _arguments_wan(x: Tensor, time_B: Tensor, c: Mapping[str, Tensor], _: Tensor | None) -> dict[str, Any]:
    return {"timestep": time_B * STEPS, "encoder_hidden_states": c["embeds"]}


# ---- text encoders --------------------------------------------------------------------------------------------------


def _encode_sd3(pipe: Any, prompt: str) -> dict[str, Tensor]:
    embeds, _, pooled, _ = pipe.encode_prompt(prompt, None, None, do_classifier_free_guidance=False)
    return {"embeds": embeds[0], "pooled": pooled[0]}


def _encode_flux(pipe: Any, prompt: str) -> dict[str, Tensor]:
    embeds, pooled, _ = pipe.encode_prompt(prompt, None)
    return {"embeds": embeds[0], "pooled": pooled[0]}


def _encode_qwen(pipe: Any, prompt: str) -> dict[str, Tensor]:
    embeds, mask = pipe.encode_prompt(prompt)
    mask = torch.ones(embeds.shape[:2], dtype=torch.int64) if mask is None else mask.long()
    return {"embeds": embeds[0], "mask": mask[0]}


def _encode_wan(pipe: Any, prompt: str) -> dict[str, Tensor]:
    embeds, _ = pipe.encode_prompt(prompt, do_classifier_free_guidance=False)
    return {"embeds": embeds[0]}


FAMILIES = {  # by the name of the transformer's class
    "SD3Transformer2DModel": Family(
        ("transformer_blocks",),
        _arguments_sd3,
        _encode_sd3,
        lambda c: {"embeds": (1, c.joint_attention_dim), "pooled": (c.pooled_projection_dim,)},
    ),
    "FluxTransformer2DModel": Family(
        ("transformer_blocks", "single_transformer_blocks"),
        _arguments_flux,
        _encode_flux,
        lambda c: {"embeds": (1, c.joint_attention_dim), "pooled": (c.pooled_projection_dim,)},
        patches=True,
    ),
    "QwenImageTransformer2DModel": Family(
        ("transformer_blocks",),
        _arguments_qwen,
        _encode_qwen,
        lambda c: {"embeds": (1, c.joint_attention_dim), "mask": (1,)},
        patches=True,
    ),
    "WanTransformer3DModel": Family(
        ("blocks",),
        _arguments_wan,
        _encode_wan,
        lambda c: {"embeds": (1, c.text_dim)},
        is_video=True,
    ),
}


class PipelineDenoiser(Denoiser):
    """`pipe`: the text encoders and the VAE; None in a trainer."""

    def __init__(self, family: Family, transformer: Any, spec: Denoising, pipe: Any = None) -> None:
        super().__init__()
        self.family, self.transformer, self.spec, self.pipe = family, transformer, spec, pipe
        config = transformer.config
        self.hidden_size = int(config.num_attention_heads * config.attention_head_dim)
        self.layer_lists = tuple(f"transformer.{name}" for name in family.layers)
        self.embeds_guidance = bool(getattr(config, "guidance_embeds", False))
        channels = int(config.in_channels) // (4 if family.patches else 1)
        frames = (1 + (spec.frames - 1) // 4,) if family.is_video else ()
        self.latent_shape = (channels, *frames, spec.height // PIXELS, spec.width // PIXELS)

    @property
    def _encoders(self) -> list[torch.nn.Module]:
        """Text encoders and VAE."""
        parts = [] if self.pipe is None else self.pipe.components.values()
        return [part for part in parts if isinstance(part, torch.nn.Module) and part is not self.transformer]

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        """Text encoders and VAE move with the network."""
        for module in self._encoders:
            module._apply(function)
        return super()._apply(function, recurse)

    def frozen(self) -> list[Tensor]:
        return [tensor for module in self._encoders for tensor in (*module.parameters(), *module.buffers())]

    def predict(self, latents: Tensor, time_B: Tensor, condition: Mapping[str, Tensor], guidance: float) -> Tensor:
        dtype = next(p for p in self.transformer.parameters() if p.is_floating_point()).dtype
        cast = {name: c.to(dtype) if c.is_floating_point() else c for name, c in condition.items()}
        scale = torch.full((len(latents),), guidance, device=latents.device) if self.embeds_guidance else None
        x = latents.to(dtype)
        arguments = self.family.arguments(x, time_B, cast, scale)
        inputs = to_patches(x, 2) if self.family.patches else x
        prediction: Tensor = self.transformer(hidden_states=inputs, **arguments, return_dict=False)[0]
        return (from_patches(prediction, x.shape, 2) if self.family.patches else prediction).float()

    @torch.inference_mode()
    def encode(self, prompt: str, guided: bool) -> Condition:
        assert self.pipe is not None, "a trainer has no text encoder: the engine stores embeddings"
        texts = {"": prompt, **({EMPTY: ""} if guided else {})}
        parts = {prefix: self.family.encode(self.pipe, text) for prefix, text in texts.items()}
        return {prefix + n: _array(value) for prefix, part in parts.items() for n, value in part.items()}

    def empty_condition(self, guided: bool) -> Condition:
        shapes = self.family.shapes(self.transformer.config)
        own: dict[str, np.ndarray] = {
            n: np.ones(s, np.int64) if n == "mask" else np.zeros(s, np.float32) for n, s in shapes.items()
        }
        return {**own, **({EMPTY + name: array for name, array in own.items()} if guided else {})}

    def decode(self, latents: Tensor) -> np.ndarray:
        """In parts: a VAE needs gigabytes for a few large pictures."""
        pixels = self.spec.height * self.spec.width * self.spec.frames
        return np.concatenate([self._decode(part) for part in latents.split(max(1, DECODED_PIXELS // pixels))])

    @torch.inference_mode()
    def _decode(self, latents: Tensor) -> np.ndarray:
        vae = self.pipe.vae
        latents = latents.to(vae.dtype)
        if getattr(vae.config, "latents_mean", None) is not None:  # per channel: Qwen-Image, Wan
            mean, std = (
                torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
                for values in (vae.config.latents_mean, vae.config.latents_std)
            )
            video = latents if self.family.is_video else latents[:, :, None]
            pixels = to_pixels(vae.decode(video * std + mean, return_dict=False)[0])
            return pixels if self.family.is_video else pixels[:, 0]
        shift = vae.config.shift_factor or 0.0
        return to_pixels(vae.decode(latents / vae.config.scaling_factor + shift, return_dict=False)[0])

    def checkpoint_activations(self, call: Callable[..., Any] | None = None) -> None:
        self.transformer.enable_gradient_checkpointing(call)


def _array(value: Tensor) -> np.ndarray:
    found: np.ndarray = value.float().cpu().numpy() if value.is_floating_point() else value.cpu().numpy()
    return found


# ---- the denoiser of a recipe ---------------------------------------------------------------------------------------


def load_denoiser(config: Config, device: torch.device, dtype: torch.dtype, *, encoders: bool) -> Denoiser:
    """Built from `model.denoiser`, or read from the folder of a pipeline. `encoders`: with text encoders and VAE, for
    engines. The same seed builds the same weights in every process. Buffers keep their precision, as in
    models/networks.py: positions and frequencies of the trainer are not rounded either."""
    if config.model.denoiser is not None:
        denoiser: Denoiser = BuiltDenoiser(config.model.denoiser, config.run.seed)
    else:
        denoiser = _load_pipeline(config, encoders)
    frozen = (tensor for tensor in denoiser.frozen() if isinstance(tensor, torch.nn.Parameter))
    for parameter in (*denoiser.parameters(), *frozen):
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    return denoiser.to(device).eval()


def check_denoiser(config: Config) -> None:
    """Before the start, without weights: the transformer is of a supported kind, and has the layers that model.lora
    names. Raises UserError."""
    if config.model.denoiser is not None:
        return
    folder, name, spec = _open(config)
    kind = getattr(_diffusers(), name)
    with torch.device("meta"):
        transformer = kind.from_config(kind.load_config(str(folder / "transformer")))
        denoiser = PipelineDenoiser(FAMILIES[name], transformer, spec)
    if config.model.lora is not None:
        adapters_of(denoiser, config.model.lora)


def _load_pipeline(config: Config, encoders: bool) -> PipelineDenoiser:
    """The starting weights, in float32 on the CPU."""
    (folder, name, spec), diffusers = _open(config), _diffusers()
    options: dict[str, Any] = {"torch_dtype": torch.float32, "local_files_only": True}
    transformer = getattr(diffusers, name).from_pretrained(str(folder / "transformer"), **options)
    pipe = None
    if encoders:
        index = json.loads((folder / "model_index.json").read_text())
        # parts that the pipeline was saved without, such as the T5 encoder of Stable Diffusion 3
        left_out = {part: None for part, kind in index.items() if isinstance(kind, list) and kind == [None, None]}
        pipe = diffusers.DiffusionPipeline.from_pretrained(str(folder), transformer=transformer, **left_out, **options)
        pipe.set_progress_bar_config(disable=True)
        for module in pipe.components.values():
            if isinstance(module, torch.nn.Module):
                module.requires_grad_(False)
    return PipelineDenoiser(FAMILIES[name], transformer, spec, pipe)


def _open(config: Config) -> tuple[Path, str, Denoising]:
    """The folder of the pipeline, the class of its transformer, and the settings. Raises UserError."""
    spec, folder = config.generation.denoising, model_folder(config.model, weights=True)
    assert spec is not None
    file = folder / "transformer" / "config.json"
    name = json.loads(file.read_text()).get("_class_name") if file.is_file() else None
    if name not in FAMILIES:
        raise UserError(
            f"model.path={config.model.path}: its transformer is {name}; expected one of {', '.join(FAMILIES)} "
            "(docs/diffusion.md)"
        )
    block = 2 * PIXELS
    if spec.height % block or spec.width % block:
        raise UserError(
            f"generation.denoising: {spec.height} x {spec.width} pixels; expected multiples of {block} (keys: height, "
            "width)"
        )
    if spec.frames > 1 and not FAMILIES[name].is_video:
        raise UserError(f"generation.denoising.frames={spec.frames}: {name} makes single pictures; expected 1")
    if spec.sampler == "ddim":
        raise UserError(f"generation.denoising.sampler=ddim: {name} is a flow; expected flow_sde or dance")
    return folder, name, spec


def _diffusers() -> Any:
    try:
        import diffusers

        diffusers.utils.logging.set_verbosity_error()
        diffusers.utils.logging.disable_progress_bar()
    except ImportError:
        raise UserError("model.path: a diffusion model needs diffusers: pip install 'gcore-rl[diffusion]'") from None
    return diffusers
