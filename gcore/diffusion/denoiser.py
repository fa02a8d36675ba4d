"""The interface of a network that denoises, for engines and trainers; and the network that a recipe builds.

    prompt ──encode (engine)──> condition: named arrays ──┐
    noisy latents, time ──────────────────────────────────┴──predict──> prediction ──...──> latents ──decode──> pixels

A condition is a dict of arrays. The one of a built model follows from the prompt. Text embeddings are computed by the
engine once per prompt and stored in files; the trainer reads them and has no text encoder. pipelines.py: models of the
package diffusers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from gcore.config.base import BuildDenoiser
from gcore.diffusion.flow_transformer import FlowTransformer
from gcore.diffusion.samplers import to_device
from gcore.types import UserError

Condition = Mapping[str, np.ndarray]
EMPTY = "empty_"  # prefix of the names of the condition without a prompt, for guidance


class Denoiser(nn.Module):
    """A network, with what is needed to call it. `transformer`: its parameters are those that are trained."""

    transformer: Any
    latent_shape: tuple[int, ...]
    hidden_size: int
    layer_lists: tuple[str, ...]  # names of the lists of its layers
    embeds_guidance = False  # the network gets the guidance scale as input

    @property
    def layers(self) -> list[nn.Module]:
        return [layer for name in self.layer_lists for layer in self.get_submodule(name).children()]

    def predict(self, latents: Tensor, time_B: Tensor, condition: Mapping[str, Tensor], guidance: float) -> Tensor:
        """One prediction per row, in float32; `condition`: one row each."""
        raise NotImplementedError

    def encode(self, prompt: str, guided: bool) -> Condition:
        """`guided`: also the condition without a prompt."""
        raise NotImplementedError

    def empty_condition(self, guided: bool) -> Condition:
        """Any condition of the right shape, for a pass whose result is not used."""
        raise NotImplementedError

    def decode(self, latents: Tensor) -> np.ndarray:
        """Pixels, uint8: rows x height x width x 3, or rows x frames x height x width x 3."""
        raise NotImplementedError

    def checkpoint_activations(self, call: Callable[..., Any] | None = None) -> None:
        """`call`: calls a layer with its inputs, and decides whether it is recomputed. Default: all are."""
        raise NotImplementedError

    def frozen(self) -> list[Tensor]:
        """Weights and buffers that only engines have: text encoders and VAE. They never change."""
        return []

    def is_guided(self, guidance: float) -> bool:
        """By classifier-free guidance: two predictions. Else there is none, or the network takes the number itself."""
        return guidance != 1 and not self.embeds_guidance

    def forward(self, latents: Tensor, time_B: Tensor, condition: Mapping[str, Tensor], guidance: float) -> Tensor:
        own = {name: value for name, value in condition.items() if not name.startswith(EMPTY)}
        if not self.is_guided(guidance):
            return self.predict(latents, time_B, own, guidance)
        both = {name: torch.cat([value, condition[EMPTY + name]]) for name, value in own.items()}
        found = self.predict(torch.cat([latents, latents]), torch.cat([time_B, time_B]), both, 1.0)
        with_prompt, without = found.chunk(2)
        return without + guidance * (with_prompt - without)


def tensors_of(condition: Condition, device: torch.device) -> dict[str, Tensor]:
    """Embeddings of a prompt are megabytes: they are copied to the device once, not at every denoising step."""
    return {name: to_device(torch.tensor(np.asarray(array)), device) for name, array in condition.items()}


def stacked(conditions: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The conditions of several rows. Shorter sequences are padded with zeros; networks that get sequences of different
    lengths get a mask too."""
    found = {}
    for name in conditions[0]:
        values = [each[name] for each in conditions]
        if values[0].dim():
            twins = {name, EMPTY + name, name.removeprefix(EMPTY)}  # guidance puts both into one batch
            longest = max(len(each[twin]) for each in conditions for twin in twins if twin in each)
            rest = (0, 0) * (values[0].dim() - 1)
            values = [v if len(v) == longest else functional.pad(v, (*rest, 0, longest - len(v))) for v in values]
        found[name] = torch.stack(values)
    return found


class BuiltDenoiser(Denoiser):
    """`model.denoiser`: pixels are the latents, in [-1, 1]."""

    layer_lists = ("transformer.layers",)

    def __init__(self, spec: BuildDenoiser, seed: int) -> None:
        super().__init__()
        self.spec, self.hidden_size = spec, spec.hidden_size
        self.latent_shape = (spec.channels, spec.image_size, spec.image_size)
        self.transformer = FlowTransformer(spec).initialize(seed)

    def predict(self, latents: Tensor, time_B: Tensor, condition: Mapping[str, Tensor], guidance: float) -> Tensor:
        found: Tensor = self.transformer(latents, time_B, condition["label"])
        return found.float()

    def encode(self, prompt: str, guided: bool) -> Condition:
        classes = self.spec.classes
        if prompt not in classes:
            raise UserError(
                f"the prompt {prompt!r} is no class of the model; expected one of {classes} "
                "(keys: model.denoiser.classes, data.train.prompt_column)"
            )
        empty = {EMPTY + "label": np.array(len(classes))} if guided else {}
        return {"label": np.array(classes.index(prompt)), **empty}

    def empty_condition(self, guided: bool) -> Condition:
        return self.encode(self.spec.classes[0], guided)

    def decode(self, latents: Tensor) -> np.ndarray:
        return to_pixels(latents)

    def checkpoint_activations(self, call: Callable[..., Any] | None = None) -> None:
        raise UserError("training.activation_checkpointing=true: not for model.denoiser; expected false or auto")


def to_pixels(values: Tensor) -> np.ndarray:
    """[-1, 1], rows x channels x (frames x) height x width -> uint8, channels last; grey becomes three channels."""
    scaled = ((values.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    last = scaled.movedim(1, -1)
    return np.ascontiguousarray(last.expand(*last.shape[:-1], 3).cpu().numpy())


def from_pixels(pixels: np.ndarray, channels: int) -> Tensor:
    """The inverse, of one picture."""
    values = torch.from_numpy(pixels[..., :channels].astype(np.float32)) / 127.5 - 1
    return values.movedim(-1, 0)
