"""Kinds of media and the families of models that take them, as data: one row each. Both name their module:

of a kind     read   ──> the array of a value in a dataset            prompts/media.py
              shown  ──> a small copy, for pages                      content/media.py
of a family   processors, built_processors ──> placeholders, inputs of the tower    content/processor.py
              build_network                ──> a small network, of model.build      models/built.py
              encode, smallest             ──> features of media                    models/towers.py
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from gcore.config.base import BuildModel

if TYPE_CHECKING:
    import numpy as np

    from gcore.config.data import MediaData
    from gcore.content.media import Media
    from gcore.content.processor import KindProcessor


@dataclass(frozen=True, slots=True)
class MediaKind:
    """MediaKind("gcore.media.pixels", "images", "uint8", "height x width x 3", ("image", "images"), "images")"""

    module: str  # with the functions of KindModule
    plural: str
    dtype: str  # of its array
    shape: str  # names of the axes, or a length
    columns: tuple[str, ...]  # of datasets
    rewards: str  # the column in which reward functions receive the arrays of a prompt

    @property
    def one(self) -> str:
        """For messages: an image."""
        return f"{'an' if self.plural[0] in 'aeiou' else 'a'} {self.plural[:-1]}"


class KindModule(Protocol):
    """The functions of the module of a kind. It imports no torch."""

    def read(self, kind: str, value: Any, fps: float | None, source: MediaSource) -> Any:
        """The array of a value of a dataset, or an object that has one, such as a Video. `fps`: of frames, if the
        dataset tells. Raises BadMedia."""
        ...

    def shown(self, array: np.ndarray) -> str:
        """A small copy as a data URL, for pages; empty: it cannot be shown."""
        ...


class MediaSource(Protocol):
    limits: MediaData

    def load(self, kind: str, value: Any) -> bytes: ...  # of bytes, a path, a URL, ... Raises BadMedia


PIXELS, AUDIO = "gcore.media.pixels", "gcore.media.audio"
KINDS = {
    "image": MediaKind(PIXELS, "images", "uint8", "height x width x 3", ("image", "images"), "images"),
    "video": MediaKind(PIXELS, "videos", "uint8", "frames x height x width x 3", ("video", "videos"), "images"),
    "audio": MediaKind(AUDIO, "audio clips", "float32", "samples at 16 kHz", ("audio", "audios"), "audios"),
}


Blocks = Literal["", "all", "sliding_attention"]


@dataclass(frozen=True, slots=True)
class MediaFamily:
    """MediaFamily("gcore.media.images", kinds=("image",), tokens=("image_token_id",))"""

    module: str  # with the functions of FamilyModule
    kinds: tuple[str, ...]  # of media in prompts
    tokens: tuple[str, ...]  # keys of config.json: the tokens that stand for features. No response may contain them
    auto_class: str = "AutoModelForImageTextToText"  # in transformers
    tower: str = "vision_config"  # section of config.json
    grid: bool = False  # positions of features have three axes: time, height, width
    timed: bool = False  # on the first axis, features of a video are as far apart as its seconds
    blocks: Blocks = ""  # the features of a medium attend to each other, also to later ones, in layers of this kind
    build: tuple[str, str] = ("", "")  # section and architecture of model.build that make a small network of it
    marks: Mapping[str, str] = field(default_factory=dict)  # in its chat template, for a part of each kind


class FamilyModule(Protocol):
    """The functions of a module."""

    def processors(self, family: str, folder: Path, tokenizer: Any) -> dict[str, KindProcessor]:
        """By kind of media, with the settings in a model's folder. Imports no torch."""
        ...

    def built_processors(self, build: BuildModel, tokenizer: Any) -> dict[str, KindProcessor]:
        """Of a network that is built from the configuration. Imports no torch."""
        ...

    def build_network(self, build: BuildModel, tokenizer: Any, decoder: dict[str, Any]) -> Any:
        """A small network of transformers. `decoder`: the sizes of its decoder, as in config.json."""
        ...

    def encode(self, network: Any, media: Sequence[Media]) -> list[tuple[Any, ...]]:
        """The features of each medium: [places, width] for the embedding, then for layers of the decoder."""
        ...

    def smallest(self, network: Any) -> Media:
        """The smallest medium that the tower takes, for a rank that has none."""
        ...


IMAGES = "gcore.media.images"
FRAME_TOKENS = ("image_token_id", "video_token_id")
QWEN_MARKS = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
QWEN3 = MediaFamily(IMAGES, ("image", "video"), FRAME_TOKENS, grid=True, marks=QWEN_MARKS)
IMAGES_ALONE = MediaFamily(IMAGES, ("image",), ("image_token_id",))
AUDIO_ALONE = MediaFamily(AUDIO, ("audio",), ("audio_token_id",), "AutoModelForSeq2SeqLM", "audio_config")
CLIP_MARK = {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}
FAMILIES: dict[str, MediaFamily] = {
    "qwen2_5_vl": MediaFamily(IMAGES, ("image", "video"), FRAME_TOKENS, grid=True, timed=True),
    "qwen3_vl": replace(QWEN3, build=("vision", "qwen3")),
    "qwen3_5": replace(QWEN3, build=("vision", "qwen3_5_text")),
    "qwen3_5_moe": QWEN3,
    "qwen4_exp": QWEN3,
    "gemma3": replace(IMAGES_ALONE, blocks="all"),
    "gemma4": replace(IMAGES_ALONE, tokens=(*FRAME_TOKENS, "audio_token_id"), blocks="sliding_attention"),
    **dict.fromkeys(("llama4", "internvl", "idefics3", "smolvlm"), IMAGES_ALONE),
    "llava_onevision": replace(IMAGES_ALONE, tokens=FRAME_TOKENS),
    "qwen2_audio": replace(AUDIO_ALONE, build=("audio", "qwen2"), marks=CLIP_MARK),
}
# Have a tower that is not supported: the decoder is used, for prompts of text.
TEXT_ALONE = {"step3p7", "glm5_next"}
UNSUPPORTED = {  # families that take media, and why engine and trainer do not run them
    "gemma3n": ", whose tower is a network of the package timm (its text part alone: gemma3n_text)"
}
# modules: towers, projectors
TOWERS = {
    *("visual", "vision_tower", "vision_model", "embed_vision", "audio_tower", "multi_modal_projector", "connector")
}


def kind_module(kind: str) -> KindModule:
    return cast(KindModule, importlib.import_module(KINDS[kind].module))


def module_of(family: str) -> FamilyModule:
    return cast(FamilyModule, importlib.import_module(FAMILIES[family].module))


def built_family(build: BuildModel) -> str | None:
    """The family of a network with a tower; None: it has none."""
    sections = {(section, build.architecture) for section, value in build if value is not None}
    return next((family for family, row in FAMILIES.items() if row.build in sections), None)
