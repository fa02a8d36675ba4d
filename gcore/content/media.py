"""Media in a sequence of tokens, and references to arrays that are too large to pass through controllers.

    producer: store(array, folder) ──ArrayRef──> controllers ──ArrayRef──> engine or trainer rank: ref.read()

Producer and readers must share the folder. A file is named by the hash of its array, so an array is written only once.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gcore.content.families import KINDS, kind_module
from gcore.types import Ints, Pixels, UserError

if TYPE_CHECKING:
    import torch

MOST_INLINE = 64  # elements of an array in JSON
MAX_SHOWN = 16  # media of a prompt in a page
NO_PLACES: Ints = np.zeros(0, np.int32)


class BadMedia(UserError):
    """A row whose media cannot be used."""


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """ArrayRef(path="runs/demo/media/9f3c.npy", shape=(480, 640, 3), dtype="uint8")"""

    path: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """The array, memory-mapped: pages are read from the file on first use."""
        array: np.ndarray = np.load(self.path, mmap_mode="r")
        if array.shape != self.shape or str(array.dtype) != self.dtype:
            raise ValueError(f"{self.path} has {array.dtype} {array.shape}; expected {self.dtype} {self.shape}")
        return array


@dataclass(frozen=True, slots=True)
class Video:
    """A video before it is processed. Video(frames=[8, 480, 640, 3], fps=2.0) are four seconds."""

    frames: Pixels | ArrayRef  # frames x height x width x 3
    fps: float  # of these frames

    @property
    def array(self) -> Pixels | ArrayRef:
        return self.frames


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a video, ... of a sequence: its array, and what the model's processor made of it.

    Media("image", key="9f3c", array=ArrayRef(...), inputs={"pixel_values": ArrayRef(...)}, places=[2, 3, 4, 5],
    grid=(1, 2, 2))
    """

    kind: str  # of KINDS
    key: str  # equal for equal arrays that were processed in the same way
    array: np.ndarray | ArrayRef  # as in KINDS: height x width x 3; of a video, frames x height x width x 3
    inputs: Mapping[str, np.ndarray | ArrayRef] = field(default_factory=dict)  # of the network's tower
    places: Ints = field(default_factory=lambda: NO_PLACES)  # in the sequence, of its features, in order
    grid: tuple[int, int, int] = (1, 1, 1)  # of the features: time, height, width
    seconds: float = 0.0  # of a video, between two times of the grid
    work: tuple[tuple[str, int], ...] = ()  # of the tower, as in SampleWork.media

    def check(self) -> None:
        """Raises UserError if the array is not of this kind."""
        row, array, axes = KINDS[self.kind], self.array, KINDS[self.kind].shape.split(" x ")
        is_colored = axes[-1] != "3" or array.shape[-1:] == (3,)
        if str(array.dtype) != row.dtype or len(array.shape) != len(axes) or not is_colored or not all(array.shape):
            raise UserError(
                f"an engine request has {row.one} of {array.dtype} and shape {array.shape}; expected {row.dtype}, "
                f"{row.shape} (Tokens.media)"
            )

    @property
    def nbytes(self) -> int:
        """Bytes to send. A reference counts as 0."""
        arrays = (self.array, *self.inputs.values())
        return self.places.nbytes + sum(a.nbytes for a in arrays if not isinstance(a, ArrayRef))

    def tensors(self) -> dict[str, np.ndarray]:
        """The inputs of the tower, read."""
        return {name: resolve(value) for name, value in self.inputs.items()}

    def moved(self, offset: int) -> Media:
        """In a sequence with `offset` more tokens before it."""
        return replace(self, places=self.places + np.int32(offset)) if offset else self

    def as_json(self) -> dict[str, Any]:
        """Large arrays must be references. `from_json` is the inverse."""
        return {
            "kind": self.kind,
            "key": self.key,
            "pixels": _ref_json(self.array),
            "inputs": {name: _ref_json(value) for name, value in self.inputs.items()},
            "places": self.places.tolist(),
            "grid": list(self.grid),
            "seconds": self.seconds,
            "work": [list(each) for each in self.work],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Media:
        return Media(
            data["kind"],
            data["key"],
            _ref_of(data["pixels"]),
            {name: _ref_of(value) for name, value in data["inputs"].items()},
            np.array(data["places"], np.int32),
            tuple(data["grid"]),
            data.get("seconds", 0.0),
            tuple((kind, size) for kind, size in data.get("work", ())),
        )


def _ref_json(array: np.ndarray | ArrayRef) -> list[Any]:
    if isinstance(array, ArrayRef):
        return [array.path, list(array.shape), array.dtype]
    assert array.size <= MOST_INLINE, "large media of later turns are stored by reference"
    return [array.tolist(), str(array.dtype)]


def _ref_of(data: list[Any]) -> Any:
    return ArrayRef(data[0], tuple(data[1]), data[2]) if len(data) == 3 else np.array(data[0], data[1])


def hash_of(array: np.ndarray) -> str:
    array = np.ascontiguousarray(array)
    return hashlib.blake2b(f"{array.dtype}{array.shape}".encode() + array.tobytes(), digest_size=16).hexdigest()


def store(array: np.ndarray, folder: Path) -> ArrayRef:
    """Write the array to a file in `folder`. Readers never see an incomplete file."""
    array = np.ascontiguousarray(array)
    path = folder / f"{hash_of(array)}.npy"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
        with os.fdopen(descriptor, "wb") as file:
            np.save(file, array)
        os.replace(partial, path)
    return ArrayRef(str(path), array.shape, str(array.dtype))


def resolve(array: np.ndarray | ArrayRef) -> np.ndarray:
    return array.read() if isinstance(array, ArrayRef) else array


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy to a GPU does not wait for the work before it, so that the host can prepare the next micro-batch."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def array_of(given: Any) -> np.ndarray | ArrayRef:
    """Of a medium before it is processed: an array, or an object that has one, such as a Video."""
    found: np.ndarray | ArrayRef = given if isinstance(given, np.ndarray | ArrayRef) else given.array
    return found


def png_url(pixels: np.ndarray) -> str:
    """An image as PNG inside a data URL."""
    return picture_url(pixels)


def picture_url(pixels: np.ndarray, longest_side: int | None = None, kind: Literal["PNG", "JPEG"] = "PNG") -> str:
    """Of uint8, height x width x 3; of a video the frame in the middle. It is made smaller than `longest_side`."""
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(pixels[len(pixels) // 2] if pixels.ndim == 4 else pixels))
    if longest_side is not None:
        picture.thumbnail((longest_side, longest_side))
    file = io.BytesIO()
    picture.save(file, kind, optimize=longest_side is not None, quality=80)  # quality: of JPEG
    return data_url(f"image/{kind.lower()}", file.getvalue())


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()


def shown_media(columns: Mapping[str, Any]) -> list[str]:
    """The media of a prompt as small data URLs, for pages. `columns`: of the prompt, with arrays or references."""
    found = list[str]()
    for column, kind in {row.rewards: kind for kind, row in KINDS.items()}.items():
        given = columns.get(column)
        if isinstance(given, Sequence) and not isinstance(given, str):
            arrays = (resolve(each) for each in given[:MAX_SHOWN] if isinstance(each, np.ndarray | ArrayRef))
            found += filter(None, map(kind_module(kind).shown, arrays))
    return found
