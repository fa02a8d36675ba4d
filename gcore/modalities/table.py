"""Which kind of policy a configuration selects."""

from __future__ import annotations

from pathlib import Path

from gcore.config.tree import Config
from gcore.modalities.base import PolicyKind
from gcore.modalities.diffusion import Diffusion
from gcore.modalities.language import Language


def kind_of(config: Config, media_folder: Path | None = None) -> PolicyKind:
    """`media_folder`: where the media of prompts are stored; None: they stay in memory."""
    return Language(config, media_folder) if config.generation.denoising is None else Diffusion(config)
