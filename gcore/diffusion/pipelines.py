"""Denoisers from the folder of a diffusers pipeline: Stable Diffusion 3 and 3.5, Flux, Qwen-Image, Wan.

    folder/transformer ──> the network, in engines and trainers
    folder/text_encoder*, tokenizer*, vae ──> encode, decode: in engines alone, frozen

Latents are always channels x (frames x) height x width. Networks that take patches get them here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcore.config.denoising import Denoising
from gcore.config.tree import Config
from gcore.diffusion.denoiser import EMPTY, Condition, Denoiser, to_pixels
from gcore.hub import model_folder
from gcore.types import UserError

STEPS = 1000.0  # networks that count time in training steps
DECODED_PIXELS = 8 * 512 * 512  # that a VAE decodes at once
Call = Callable[[Any, Tensor, Tensor, Mapping[str, Tensor], Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between the transformers of diffusers."""

    transformer: str  # name of its class
    layers: tuple[str, ...]
    call: Call
    encode: Callable[[Any, str], dict[str, Tensor]]  # pipeline, prompt -> condition of one row
    channels: Callable[[Any], int]  # of the latents, from the config of the transformer
    shapes: Callable[[Any], dict[str, tuple[int, ...]]]  # of a condition with one token
    pixels: int = 8  # height and width in pixels of one number of the latents
    is_video: bool = False


# ---- calls of the networks ------------------------------------------------------------------------------------------


def _call_sd3(network: Any, x: Tensor, time_B: Tensor, condition: Mapping[str, Tensor], _: Tensor | None) -> Tensor:
    found: Tensor = network(
        hidden_states=x,
        timestep=time_B * STEPS,
        encoder_hidden_states=condition["embeds"],
        pooled_projections=condition["pooled"],
        return_dict=False,
    )[0]
    return found


def _call_flux(network: Any, x: Tensor, time_B: Tensor, c: Mapping[str, Tensor], guidance: Tensor | None) -> Tensor:
    height, width = x.shape[2] // 2, x.shape[3] // 2
    ids = torch.zeros(height, width, 3, device=x.device, dtype=x.dtype)
    ids[..., 1] += torch.arange(height, device=x.device)[:, None]
    ids[..., 2] += torch.arange(width, device=x.device)[None, :]
    found: Tensor = network(
        hidden_states=_patches(x),
        timestep=time_B,
        guidance=guidance,
        pooled_projections=c["pooled"],
        encoder_hidden_states=c["embeds"],
        txt_ids=torch.zeros(c["embeds"].shape[1], 3, device=x.device, dtype=x.dtype),
        img_ids=ids.flatten(0, 1),
        return_dict=False,
    )[0]
    return _unpatched(found, x)


def _call_qwen(network: Any, x: Tensor, time_B: Tensor, c: Mapping[str, Tensor], guidance: Tensor | None) -> Tensor:
    found: Tensor = network(
        hidden_states=_patches(x),
        timestep=time_B,
        guidance=guidance,
        encoder_hidden_states=c["embeds"],
        encoder_hidden_states_mask=c["mask"],
        img_shapes=[[(1, x.shape[2] // 2, x.shape[3] // 2)]] * len(x),
        return_dict=False,
    )[0]
    return _unpatched(found, x)


def _call_wan(network: Any, x: Tensor, time_B: Tensor, condition: Mapping[str, Tensor], _: Tensor | None) -> Tensor:
    found: Tensor = network(
        hidden_states=x,
        timestep=time_B * STEPS,
        encoder_hidden_states=condition["embeds"],
        return_dict=False,
    )[0]
    return found


def _patches(x: Tensor) -> Tensor:
    """Rows x channels x height x width -> rows x patches x (channels, 2, 2)."""
    cut = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # rows, channels, y, dy, x, dx
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _unpatched(patches: Tensor, like: Tensor) -> Tensor:
    _, channels, height, width = like.shape
    cut = patches.unflatten(1, (height // 2, width // 2)).unflatten(3, (channels, 2, 2))
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(like.shape)


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


FAMILIES = {
    family.transformer: family
    for family in (
        Family(
            "SD3Transformer2DModel",
            ("transformer_blocks",),
            _call_sd3,
            _encode_sd3,
            lambda c: int(c.in_channels),
            lambda c: {"embeds": (1, c.joint_attention_dim), "pooled": (c.pooled_projection_dim,)},
        ),
        Family(
            "FluxTransformer2DModel",
            ("transformer_blocks", "single_transformer_blocks"),
            _call_flux,
            _encode_flux,
            lambda c: int(c.in_channels) // 4,
            lambda c: {"embeds": (1, c.joint_attention_dim), "pooled": (c.pooled_projection_dim,)},
        ),
        Family(
            "QwenImageTransformer2DModel",
            ("transformer_blocks",),
            _call_qwen,
            _encode_qwen,
            lambda c: int(c.in_channels) // 4,
            lambda c: {"embeds": (1, c.joint_attention_dim), "mask": (1,)},
        ),
        Family(
            "WanTransformer3DModel",
            ("blocks",),
            _call_wan,
            _encode_wan,
            lambda c: int(c.in_channels),
            lambda c: {"embeds": (1, c.text_dim)},
            is_video=True,
        ),
    )
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
        height, width = (side // family.pixels for side in (spec.height, spec.width))
        frames = (1 + (spec.frames - 1) // 4,) if family.is_video else ()
        self.latent_shape = (family.channels(config), *frames, height, width)

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        """Text encoders and VAE move with the network."""
        if self.pipe is not None:
            for module in self.pipe.components.values():
                if isinstance(module, torch.nn.Module) and module is not self.transformer:
                    module._apply(function)
        return super()._apply(function, recurse)

    def frozen(self) -> list[Tensor]:
        modules = [] if self.pipe is None else self.pipe.components.values()
        own = [m for m in modules if isinstance(m, torch.nn.Module) and m is not self.transformer]
        return [tensor for module in own for tensor in (*module.parameters(), *module.buffers())]

    def predict(self, latents: Tensor, time_B: Tensor, condition: Mapping[str, Tensor], guidance: float) -> Tensor:
        dtype = next(p for p in self.transformer.parameters() if p.is_floating_point()).dtype
        cast = {name: c.to(dtype) if c.is_floating_point() else c for name, c in condition.items()}
        scale = torch.full((len(latents),), guidance, device=latents.device) if self.embeds_guidance else None
        return self.family.call(self.transformer, latents.to(dtype), time_B, cast, scale).float()

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str], guided: bool) -> list[Condition]:
        if self.pipe is None:
            raise AssertionError("a trainer has no text encoder: the engine stores embeddings")
        found: list[Condition] = []
        for prompt in prompts:
            both = {"": prompt, **({EMPTY: ""} if guided else {})}
            parts = {prefix: self.family.encode(self.pipe, text) for prefix, text in both.items()}
            found.append({prefix + n: _array(value) for prefix, part in parts.items() for n, value in part.items()})
        return found

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
        if hasattr(vae.config, "latents_mean") and vae.config.latents_mean is not None:  # per channel: Qwen-Image, Wan
            mean, std = (
                torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
                for values in (vae.config.latents_mean, vae.config.latents_std)
            )
            video = latents if self.family.is_video else latents[:, :, None]
            found = vae.decode(video * std + mean, return_dict=False)[0]
            pixels = to_pixels(found)
            return pixels if self.family.is_video else pixels[:, 0]
        shift = vae.config.shift_factor or 0.0
        return to_pixels(vae.decode(latents / vae.config.scaling_factor + shift, return_dict=False)[0])

    def checkpoint_activations(self) -> None:
        self.transformer.enable_gradient_checkpointing()


def _array(value: Tensor) -> np.ndarray:
    found: np.ndarray = value.float().cpu().numpy() if value.is_floating_point() else value.cpu().numpy()
    return found


# ---- folders --------------------------------------------------------------------------------------------------------


def load_pipeline(config: Config, encoders: bool) -> PipelineDenoiser:
    """The starting weights, in float32 on the CPU."""
    family, folder, spec = _open(config)
    diffusers = _diffusers()
    options: dict[str, Any] = {"torch_dtype": torch.float32, "local_files_only": True}
    kind = getattr(diffusers, family.transformer)
    transformer = kind.from_pretrained(str(folder / "transformer"), **options)
    pipe = None
    if encoders:
        given = dict.fromkeys(_left_out(folder))
        pipe = diffusers.DiffusionPipeline.from_pretrained(str(folder), transformer=transformer, **given, **options)
        pipe.set_progress_bar_config(disable=True)
        for module in pipe.components.values():
            if isinstance(module, torch.nn.Module):
                module.requires_grad_(False)
    return PipelineDenoiser(family, transformer, spec, pipe)


def _left_out(folder: Path) -> list[str]:
    """Parts that the pipeline was saved without, such as the T5 encoder of Stable Diffusion 3."""
    index = json.loads((folder / "model_index.json").read_text())
    return [name for name, kind in index.items() if isinstance(kind, list) and kind == [None, None]]


def make_denoiser(config: Config) -> PipelineDenoiser:
    """Without weights, if called on the meta device."""
    family, folder, spec = _open(config)
    kind = getattr(_diffusers(), family.transformer)
    return PipelineDenoiser(family, kind.from_config(kind.load_config(str(folder / "transformer"))), spec)


def _open(config: Config) -> tuple[Family, Path, Denoising]:
    spec, folder = config.generation.denoising, model_folder(config.model, weights=True)
    assert spec is not None
    file = folder / "transformer" / "config.json"
    name = json.loads(file.read_text()).get("_class_name") if file.is_file() else None
    if name not in FAMILIES:
        raise UserError(
            f"model.path={config.model.path}: its transformer is {name}; expected one of {', '.join(FAMILIES)} "
            "(docs/diffusion.md)"
        )
    family = FAMILIES[name]
    block = 2 * family.pixels
    if spec.height % block or spec.width % block:
        raise UserError(
            f"generation.denoising: {spec.height} x {spec.width} pixels; expected multiples of {block} (keys: height, "
            "width)"
        )
    if spec.frames > 1 and not family.is_video:
        raise UserError(f"generation.denoising.frames={spec.frames}: {name} makes single pictures; expected 1")
    if spec.sampler == "ddim":
        raise UserError(f"generation.denoising.sampler=ddim: {name} is a flow; expected flow_sde or dance")
    return family, folder, spec


def _diffusers() -> Any:
    try:
        import diffusers

        diffusers.utils.logging.set_verbosity_error()
        diffusers.utils.logging.disable_progress_bar()
    except ImportError:
        raise UserError("model.path: a diffusion model needs diffusers: pip install 'gcore-rl[diffusion]'") from None
    return diffusers
