"""Text with media -> the tokens and tensors that a model computes with. It happens once per prompt.

    text with placeholders, media ──KindProcessor of each kind──> tokens (a placeholder becomes one token per feature),
                                                                  inputs of the tower, places of the features

Engines and trainers get the result by reference: what the engine saw is what the trainer trains on. Each medium is
processed alone, so its tensors do not depend on the other media of a prompt.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gcore.content.families import KINDS
from gcore.content.media import ArrayRef, Media, array_of, hash_of, resolve, store
from gcore.content.tokens import Tokens
from gcore.types import UserError

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
MOST_KNOWN = 1 << 16


@dataclass(frozen=True, slots=True)
class Expanded:
    """What became of a medium. Expanded("<|image_pad|>" * 4, {"pixel_values": ...}, grid=(1, 2, 2))"""

    text: str  # that replaces its placeholder
    inputs: Mapping[str, np.ndarray]  # of the tower
    grid: tuple[int, int, int] | None = None  # of its features; None: they have no grid
    seconds: float = 0.0  # as in Media
    work: tuple[tuple[str, int], ...] = ()


class KindProcessor(Protocol):
    """For one kind of media of a model. The functions of its family make it (content/families.py)."""

    placeholder: str  # in the text that the chat template makes
    features: tuple[int, ...]  # tokens that stand for features, after expansion

    def variant(self, given: Any, number: int) -> str:
        """What decides about the result besides the array. `given`: as in MediaProcessor.content; `number`: of media in
        the prompt."""
        ...

    def expand(self, array: np.ndarray, given: Any, number: int) -> Expanded:
        """Raises UserError if the model's processor refuses it. `array`: that of `given`."""
        ...

    def save(self, folder: Path) -> None:
        """The settings, as in a model's folder."""
        ...


@dataclass(frozen=True, slots=True)
class _Made:
    text: str
    num_features: int
    media: Media  # without places


class MediaProcessor:
    """`kinds`: by kind of media. `folder`: where arrays and tensors are stored; None: they stay in memory. An array
    that is a reference stays where it is, and its tensors are stored beside it: they are removed together. `refused`:
    kinds that the engine does not take, and why."""

    def __init__(
        self,
        family: str,
        tokenizer: Any,
        kinds: Mapping[str, KindProcessor],
        folder: Path | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self.family, self._tokenizer, self._kinds, self._folder = family, tokenizer, kinds, folder
        self._refused = refused or {}
        self._known: dict[str, _Made] = {}
        self._num_bytes = 0
        self._max_known = MOST_KNOWN if folder is not None else 16  # with a folder they are references
        self._by_placeholder = {processor.placeholder: kind for kind, processor in kinds.items()}
        self._features = sorted({token for processor in kinds.values() for token in processor.features})

    @property
    def kinds(self) -> frozenset[str]:
        """Of the media that the model takes."""
        return frozenset(self._kinds) | self._refused.keys()

    def content(self, text: str, media: Sequence[tuple[str, Any]]) -> Tokens:
        """The prompt `text` with one placeholder per medium, given as (kind, array, Video, ...). Raises UserError if
        they do not fit each other."""
        for kind, given in media:
            self._check(kind, given)
        marks = "|".join(map(re.escape, self._by_placeholder))
        pieces = re.split(f"({marks})", text) if marks else [text]
        found, kinds = [self._by_placeholder[mark] for mark in pieces[1::2]], [kind for kind, _ in media]
        if found != kinds:
            raise UserError(
                f"{_named(kinds)}, and placeholders of {_named(found)} in the prompt after the chat template; expected "
                'one each, in the same order (an image belongs to a message part {"type": "image"})'
            )
        arrays = [array_of(given) for _, given in media]
        self._num_bytes += sum(array.nbytes for array in arrays if not isinstance(array, ArrayRef))
        made = [self._made(kind, given, len(media)) for kind, given in media]
        pieces[1::2] = [each.text for each in made]
        return self._tokens(text, self._encode("".join(pieces)), made)

    def take_bytes(self) -> int:
        """Of the media that prompts had since the last call, without those by reference."""
        found, self._num_bytes = self._num_bytes, 0
        return found

    def save(self, folder: Path, source: Path | None) -> None:
        """The settings of the processor, as in a model's folder. `source`: the folder they came from."""
        if source is None:
            for processor in self._kinds.values():
                processor.save(folder)
            return
        for name in FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)

    def _check(self, kind: str, given: Any) -> None:
        why = self._refused.get(kind, "")
        if not why and kind not in self._kinds:
            why = f"{KINDS[kind].plural} are not supported for {self.family}"
        elif kind == "video" and array_of(given) is given:  # without its rate
            why = why or f"judges get no {KINDS[kind].plural}"
        if why:
            expected = [KINDS[known].plural for known in self._kinds if known != kind and known not in self._refused]
            raise UserError(f"{KINDS[kind].one}; expected {' or '.join(expected) or 'text'}: {why}")

    def _tokens(self, text: str, tokens: np.ndarray, made: Sequence[_Made]) -> Tokens:
        places = np.flatnonzero(np.isin(tokens, self._features)).astype(np.int32)
        ends = np.cumsum([m.num_features for m in made], dtype=np.int64)
        assert len(places) == (ends[-1] if made else 0), f"{len(places)} tokens for the features of {len(made)} media"
        split = np.split(places, ends[:-1]) if made else []
        media = tuple(replace(m.media, places=own) for m, own in zip(made, split, strict=True))
        return Tokens(tokens, media=media, short_P=self._encode(text) if media else None)

    def _made(self, kind: str, given: Any, number: int) -> _Made:
        """Of a medium in a prompt of `number`. The same array is processed once while it is remembered; the same array
        in two files twice, since one of the files may be removed."""
        processor, array = self._kinds[kind], array_of(given)
        variant = processor.variant(given, number)
        known = f"{array.path if isinstance(array, ArrayRef) else hash_of(array)}-{variant}"
        if (found := self._known.get(known)) is None:
            values = resolve(array)
            expanded = processor.expand(values, given, number)
            num_features = int(np.isin(self._encode(expanded.text), processor.features).sum())
            media = self._media(kind, f"{hash_of(values)}-{variant}", array, expanded, num_features)
            found = _Made(expanded.text, num_features, media)
            if len(self._known) >= self._max_known:
                del self._known[next(iter(self._known))]
            self._known[known] = found
        return found

    def _media(self, kind: str, key: str, array: Any, expanded: Expanded, num_features: int) -> Media:
        folder = self._folder
        if folder is not None and isinstance(array, ArrayRef):
            folder = Path(array.path).parent
        inputs = {
            name: _kept(a.astype(np.float32), folder) if a.dtype.kind == "f" else a
            for name, a in expanded.inputs.items()
        }
        grid = expanded.grid or (1, 1, num_features)
        return Media(kind, key, _kept(array, folder), inputs, grid=grid, seconds=expanded.seconds, work=expanded.work)

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def read_settings(folder: Path, section: str) -> dict[str, Any]:
    """Of a part of a model's processor: a section of processor_config.json, or preprocessor_config.json."""
    whole, own = (read_json(folder / name) for name in FILES[:2])
    settings = own[section] if isinstance(own.get(section), dict) else whole
    if not settings:
        raise UserError(f"model.path={folder}: no {FILES[0]}; expected the settings of its {section.replace('_', ' ')}")
    return settings


def read_json(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text()) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _named(kinds: Sequence[str]) -> str:
    """Those of a prompt, in order: image, image, video"""
    return ", ".join(kinds) or "no image"


def _kept(array: np.ndarray | ArrayRef, folder: Path | None) -> np.ndarray | ArrayRef:
    if folder is None:
        return resolve(array)
    return array if isinstance(array, ArrayRef) else store(array, folder)
