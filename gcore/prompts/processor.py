"""Which models take media, and the processor of one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from gcore import hub
from gcore.config.base import Model
from gcore.config.engines import DEFAULT_ENGINE, ENGINES, engines_taking
from gcore.content.families import FAMILIES, KINDS, TEXT_ALONE, UNSUPPORTED, built_family, module_of
from gcore.content.processor import KindProcessor, MediaProcessor
from gcore.types import UserError


def media_family(model: Model, key: str = "model") -> str | None:
    """The family of a model that takes media (its model_type); None for a model of text. Reads only config.json."""
    if model.build is not None:
        return built_family(model.build)
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
    if kind in TEXT_ALONE:
        return None
    sections = {row.tower: KINDS[row.kinds[0]].plural for row in FAMILIES.values()}
    if taken := [what for section, what in sections.items() if section in config]:
        raise UserError(
            f"{key}.path={model.path}: takes {taken[0]} and is of type {kind}{UNSUPPORTED.get(kind, '')}; expected one "
            f"of {', '.join(FAMILIES)}, or a model of text"
        )
    return None


def load_processor(
    model: Model, tokenizer: Any, folder: Path | None, key: str = "model", engine: str = DEFAULT_ENGINE
) -> MediaProcessor | None:
    """The processor of a model that takes media, else None. `folder`: where it stores arrays and tensors. `engine`: of
    the model; media that it cannot take are refused, and all media if a file or a package is missing."""
    family = media_family(model, key)
    if family is None:
        return None
    try:
        kinds = _kinds(family, model, tokenizer)
    except UserError as error:
        if key != "model":  # of a judge that would see
            raise UserError(f"{key}: {error}") from None
        return MediaProcessor(family, tokenizer, {}, folder, dict.fromkeys(FAMILIES[family].kinds, str(error)))
    traits = ENGINES[engine]
    taken = " and ".join(row.plural for kind, row in KINDS.items() if traits.takes(kind)) or "text"
    refused = {
        kind: f"generation.engine={engine} gets only {taken} here; use {engines_taking(kind)} for {KINDS[kind].plural}"
        for kind in kinds
        if not traits.takes(kind)
    }
    return MediaProcessor(family, tokenizer, kinds, folder, refused)


def _kinds(family: str, model: Model, tokenizer: Any) -> dict[str, KindProcessor]:
    """UserError if a package or a file is missing."""
    if "image" in FAMILIES[family].kinds and importlib.util.find_spec("PIL") is None:
        raise UserError("Pillow is not installed: pip install 'gcore-rl[vision]'")
    if model.build is not None:
        return module_of(family).built_processors(model.build, tokenizer)
    return module_of(family).processors(family, hub.model_folder(model), tokenizer)
