"""The tensors in the safetensors of a Hugging Face folder, by name. Any part of one can be read without the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Part = tuple[slice, ...]  # one slice per dimension: (slice(8, 16), slice(0, 64))


class WeightFiles:
    """Empty if the folder has no safetensors. Files are mapped: of a tensor, only the parts that are used are read."""

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {SINGLE}
        self._files = [safe_open(folder / name, "pt") for name in sorted(names) if (folder / name).is_file()]
        self._where: dict[str, Any] = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._where.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def read(self, name: str, part: Part | None = None) -> Tensor:
        """The tensor, or a part of it, in the dtype of the file."""
        if not part:
            tensor: Tensor = self._where[name].get_tensor(name)
            return tensor
        piece: Tensor = self._where[name].get_slice(name)[part]
        return piece
