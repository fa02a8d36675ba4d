"""References to arrays that are too large to pass through controllers: pixels, latents, states of an environment.

    producer: store(array, folder) ──ArrayRef──> controllers ──ArrayRef──> engine or trainer rank: ref.read()

Producer and readers must share the folder. A file is named by the hash of its array, so an array is written only once.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np


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


def store(array: np.ndarray, folder: Path) -> ArrayRef:
    """Write the array to a file in `folder`. Readers never see an incomplete file."""
    array = np.ascontiguousarray(array)
    name = hashlib.blake2b(f"{array.dtype}{array.shape}".encode() + array.tobytes(), digest_size=16).hexdigest()
    path = folder / f"{name}.npy"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=folder, suffix=".partial")
        with os.fdopen(descriptor, "wb") as file:
            np.save(file, array)
        os.replace(partial, path)
    return ArrayRef(str(path), array.shape, str(array.dtype))


def resolve(image: np.ndarray | ArrayRef) -> np.ndarray:
    return image.read() if isinstance(image, ArrayRef) else image
