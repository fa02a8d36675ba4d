"""Which models take images, and the processor of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gcore import hub
from gcore.config.base import Model
from gcore.config.engines import ENGINES, engines_with
from gcore.content.vision import FAMILIES, VisionProcessor, built_processor, saved_processor
from gcore.types import UserError


def vision_family(model: Model, key: str = "model") -> str | None:
    """The family of a model that takes images (its model_type); None for a model of text. Reads only config.json."""
    if model.build is not None:
        return "qwen3_vl" if model.build.vision else None
    if model.path is None:  # a diffusion model
        return None
    file = hub.model_folder(model) / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):
        return None  # load_model reports it
    kind = str(config.get("model_type"))
    if kind in FAMILIES:
        return kind
    if "vision_config" in config:
        raise UserError(
            f"{key}.path={model.path}: takes images and is of type {kind}; expected one of {', '.join(FAMILIES)}, or a "
            "model of text"
        )
    return None


def media_of(model: Model) -> frozenset[str]:
    """The kinds of media that prompts of the model may have."""
    return frozenset({"image", "video"} if vision_family(model) else ())


def load_processor(
    model: Model, tokenizer: Any, folder: Path | None, key: str = "model", engine: str = "embedded"
) -> VisionProcessor | None:
    """The processor of a model that takes images, else None. `folder`: where it stores pixels and tensors. `engine`: of
    the model; videos that it cannot take are refused."""
    family = vision_family(model, key)
    if family is None:
        return None
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise UserError(f"{key}: a model that takes images needs Pillow: pip install 'gcore-rl[vision]'") from None
    if model.build is not None:
        assert model.build.vision is not None
        return built_processor(model.build.vision, tokenizer, folder)
    found = saved_processor(family, hub.model_folder(model), tokenizer, folder)
    if not ENGINES[engine].videos:
        found.no_videos = f"generation.engine={engine} gets only images here; use {engines_with('videos')} for videos"
    return found
