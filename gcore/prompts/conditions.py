"""Rows -> prompts of a diffusion model: the text, or the class, of the picture to make. No tokens, no chat template.

row ──ConditionTemplater.prompt──> Prompt with Latents: the text, tokens of a pass, window of stochastic steps
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gcore.config.base import PolicyModel
from gcore.config.data import Dataset
from gcore.config.denoising import Denoising
from gcore.config.tree import Config
from gcore.content.latents import Latents
from gcore.content.tokens import Tokens
from gcore.hub import model_folder
from gcore.prompts.files import short
from gcore.prompts.rows import prompt_of, reward_columns
from gcore.types import Message, Pixels, Prompt, UserError

Row = Mapping[str, Any]
TEXT_TOKENS = {"SD3Transformer2DModel": 333, "FluxTransformer2DModel": 512, "WanTransformer3DModel": 0}
LATENT_PIXELS = 8  # height and width in pixels of one number of the latents


class ConditionTemplater:
    """In place of source.Templater, with the same methods."""

    media = frozenset[str]()

    def __init__(self, config: Config, split: Literal["train", "eval"] = "train", eval_set: str = "") -> None:
        assert config.generation.denoising is not None
        self.spec: Dataset = config.data.train if split == "train" else config.data.eval_sets[eval_set]
        self.key = f"data.{split}" + (f".{eval_set}" if eval_set else "")
        self._denoising, self._seed = config.generation.denoising, config.run.seed
        self._prompts_per_step = config.sampling.prompts_per_step
        self._tokens = pass_tokens(config.model, self._denoising)
        built = config.model.denoiser
        self._classes = frozenset(built.classes) if built else frozenset[str]()

    def messages(self, row: Row) -> tuple[Message, ...]:
        return ({"role": "user", "content": self._text(row)},)

    def content(self, row: Row) -> tuple[tuple[Message, ...], str, Tokens]:
        """To measure a row. The last: the characters, whose number is limited by data.max_prompt_length."""
        text = self._text(row)
        return self.messages(row), text, Tokens(np.array([ord(c) for c in text], np.int32))

    def prompt(self, row: Row, index: int, cursor: int) -> Prompt:
        text, columns = self._text(row), reward_columns(row, self.spec, self.key)
        columns.pop("demonstration", None)
        return Prompt(cursor, index, self.messages(row), text, self._content(text, cursor), columns)

    def length(self, prompt: Prompt) -> int:
        return len(prompt.text)

    def demonstration(self, row: Row) -> Latents:
        """The picture in the column `demonstration`, as nested lists or an array: height x width, or with channels."""
        given = row.get("demonstration")
        if given is None:
            raise UserError(f"{self.key}: no picture to demonstrate in this row (column `demonstration`)")
        pixels = _pixels(given, self.key)
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        if pixels.ndim != 3:
            raise UserError(f"{self.key}: a demonstration has {pixels.ndim} dimensions; expected height x width")
        return Latents("", self._tokens, (0, 0), demonstration=pixels)

    def _content(self, text: str, cursor: int) -> Latents:
        """The window and the shared start noise depend on the number of the prompt, so siblings have the same."""
        denoising = self._denoising
        random = np.random.Philox(key=np.array([self._seed % 2**64, cursor], np.uint64)).random_raw(2)
        window = denoising.window_at(cursor, self._prompts_per_step, float(random[0] >> np.uint64(11)) * 2.0**-53)
        return Latents(text, self._tokens, window, int(random[1]) if denoising.shared_start else None)

    def _text(self, row: Row) -> str:
        text = prompt_of(row, self.spec, self.key)
        if not isinstance(text, str):
            raise UserError(f"{self.key}: a diffusion model got messages; expected a string (set prompt_column)")
        if self._classes and text not in self._classes:
            raise UserError(
                f"{self.key}: the prompt {text!r} is no class of the model; expected one of {sorted(self._classes)} "
                "(key: model.denoiser.classes)"
            )
        return text


def _pixels(given: Any, key: str) -> Pixels:
    """Numbers of another range would become other pictures without an error: 0.5 as an integer is 0."""
    try:
        found = np.asarray(given)
    except ValueError as error:  # rows of different lengths
        raise UserError(f"{key}: a demonstration is no picture: {error}") from None
    is_number = found.dtype.kind in "iuf" and found.size > 0
    if not is_number or (found != found.round()).any() or found.min() < 0 or found.max() > 255:
        shown = f"numbers from {found.min():g} to {found.max():g}" if is_number else short(given)
        raise UserError(f"{key}: a demonstration has {shown}; expected whole numbers from 0 to 255")
    return found.astype(np.uint8)


def pass_tokens(model: PolicyModel, spec: Denoising) -> int:
    """Tokens of one denoising step: the patches of the latents and the text, twice with guidance. For the cost of a
    sample; from config.json, without weights."""
    if model.denoiser is not None:
        return model.denoiser.tokens * (2 if spec.guidance_scale != 1 else 1)
    about = transformer_config(model)
    patch = about.get("patch_size") or 2
    side = patch[-1] if isinstance(patch, list) else patch
    if about.get("_class_name") == "FluxTransformer2DModel":
        side = 2  # its pipeline packs 2 x 2 numbers before the network
    latent_frames = 1 + (spec.frames - 1) // 4
    image = (spec.height // LATENT_PIXELS // side) * (spec.width // LATENT_PIXELS // side) * latent_frames
    tokens = image + TEXT_TOKENS.get(str(about.get("_class_name")), 256)
    doubles = spec.guidance_scale != 1 and not about.get("guidance_embeds")
    return tokens * (2 if doubles else 1)


def transformer_config(model: PolicyModel) -> dict[str, Any]:
    """config.json of the transformer in the folder of a diffusers pipeline."""
    file: Path = model_folder(model) / "transformer" / "config.json"
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path={model.path}: cannot read {file} ({error}); expected the folder of a diffusers pipeline "
            "(key: generation.denoising)"
        ) from error
    return found
