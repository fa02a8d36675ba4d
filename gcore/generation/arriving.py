"""New weights on their way into an engine: in parts, in order, checked before any of them is loaded.

    part ──order, checksum, names, shapes──> whole matrices ──────────────────────────> what the engine loads
                                        └──> factors of adapters ──base + scale B A──┘

Where the policy has adapters (model.lora), only their factors come. The base is kept as it was when the engine
started, and every version is computed from it anew: nothing adds up, and an update that was missed leaves no trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gcore.models import LORA_A, LORA_B, Adapters
from gcore.types import UserError
from gcore.wire import unseal

CHUNK_BYTES = 2**29  # merged matrices that are held at once
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Base:
    """What an engine started with, in host memory, and where adapters add to it: the targets, or all weights."""

    adapters: Adapters
    tensors: Mapping[str, Tensor]
    device: torch.device  # that computes the sums
    dtype: torch.dtype  # of the engine

    def merged(self, factors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The matrices whose two factors are there."""
        for layer in self.adapters.layers:
            if layer + LORA_A in factors and layer + LORA_B in factors:
                name = f"{layer}.weight"
                base, a, b = (
                    tensor.to(self.device, torch.float32)
                    for tensor in (self.tensors[name], factors[layer + LORA_A], factors[layer + LORA_B])
                )
                yield name, self.adapters.merge(base, a, b).to(self.dtype)

    def unpaired(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Factors whose partner is yet to come."""
        other = {LORA_A: LORA_B, LORA_B: LORA_A}
        return {n: t for n, t in factors.items() if n[: -len(LORA_A)] + other[n[-len(LORA_A) :]] not in factors}


@dataclass(slots=True)
class _Update:
    """Weights of which not all parts are there."""

    version: int
    count: int
    next: int = 0
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of what has come
    kept: dict[str, Tensor] = field(default_factory=dict)  # of that, what is not loaded yet


class Arriving:
    """True while weights are half there: nothing may be decoded then.

    `shapes`: of the weights the engine serves; where there are none, the first that come say what fits. `whole`: the
    engine takes all weights at once, or none.
    """

    def __init__(self, shapes: Shapes, base: Base | None = None, whole: bool = False) -> None:
        self._shapes = dict(shapes) if base is None else base.adapters.shapes(shapes)
        self._base, self._whole = base, whole
        self._update: _Update | None = None

    def __bool__(self) -> bool:
        return self._update is not None

    @contextmanager
    def part(
        self, version: int, weights: Mapping[str, Any], part: tuple[int, int]
    ) -> Iterator[Iterator[tuple[dict[str, Tensor], bool]]]:
        """What to load now, bit by bit, each with whether it is the very last: then `version` is served.

        A part that does not fit is refused and changes nothing. One whose loading fails leaves the weights half there:
        it may come again, or all parts anew.
        """
        (index, count), update = part, self._update
        if index == 0:
            update = _Update(version, count)
        elif update is None or (version, count, index) != (update.version, update.count, update.next):
            due = f"part {update.next} of {update.count} of version {update.version}" if update else "part 0"
            raise ValueError(f"got part {index} of {count} of the weights of version {version}, expected {due}")
        last = index + 1 == count
        tensors = self._fitting(version, unseal(weights), update.shapes.keys() if last else None)
        self._update = update
        yield self._loads({**update.kept, **tensors}, last)
        update.next += 1
        update.shapes |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if last:
            self._shapes, self._update = self._shapes or update.shapes, None
        else:  # the caller may change what it gave
            fresh = {name: tensor.clone() for name, tensor in tensors.items()} if self._whole or self._base else {}
            update.kept |= fresh
            if self._base is not None and not self._whole:
                update.kept = self._base.unpaired(update.kept)

    def _loads(self, tensors: dict[str, Tensor], last: bool) -> Iterator[tuple[dict[str, Tensor], bool]]:
        if self._whole and not last:
            return
        if self._base is None:
            yield tensors, last
        elif self._whole:
            yield {**self._base.tensors, **dict(self._base.merged(tensors))}, last
        else:
            chunk: dict[str, Tensor] = {}
            for name, tensor in self._base.merged(tensors):
                if sum(t.nbytes for t in chunk.values()) > CHUNK_BYTES:
                    yield chunk, False
                    chunk = {}
                chunk[name] = tensor
            if chunk or last:
                yield chunk, last

    def _fitting(self, version: int, tensors: Mapping[str, Tensor], before: Set[str] | None) -> dict[str, Tensor]:
        """What belongs here, or a complaint. With `before`, the names of earlier parts, these are the last."""
        if not self._shapes:
            return dict(tensors)
        known = {name: tensor for name, tensor in tensors.items() if name in self._shapes}
        missing = sorted(self._shapes.keys() - known.keys() - before) if before is not None else []
        if missing:
            raise ValueError(f"weights of version {version} lack {missing[:3]} ({len(missing)} names)")
        for name, tensor in known.items():
            if tuple(tensor.shape) != self._shapes[name]:
                raise ValueError(
                    f"weights of version {version}: {name} has shape {tuple(tensor.shape)}, "
                    f"expected {self._shapes[name]}"
                )
        return known


# ---- what a folder holds


def shapes_of(folder: Path, config: Any) -> dict[str, tuple[int, ...]]:
    """The parameters of the checkpoint, each once; empty where it has no safetensors."""
    shapes = {
        name: tuple(file.get_slice(name).get_shape())
        for file in _files(folder)
        for name in file.keys()  # noqa: SIM118
    }
    if getattr(config, "tie_word_embeddings", False):
        shapes.pop("lm_head.weight", None)
    return {name: shape for name, shape in shapes.items() if not name.endswith(".inv_freq")}


def base_of(
    folder: Path, shapes: Shapes, adapters: Adapters | None, device: str, dtype: torch.dtype, whole: bool
) -> Base | None:
    """The folder's weights, where there are adapters: those that they add to, or `whole`."""
    if adapters is None:
        return None
    names = set(shapes) if whole else {f"{layer}.weight" for layer in adapters.layers}
    tensors = {name: file.get_tensor(name) for file in _files(folder) for name in file.keys() if name in names}  # noqa: SIM118
    if missing := sorted({f"{layer}.weight" for layer in adapters.layers} - tensors.keys()):
        raise UserError(
            f"model.lora: {folder} has no safetensors with {missing[0]} ({len(missing)} in all), which adapters add to"
        )
    return Base(adapters, tensors, torch.device(device), dtype)


def _files(folder: Path) -> Iterator[Any]:
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    for file in sorted(files):
        if (folder / file).exists():
            with safe_open(folder / file, "pt") as tensors:
                yield tensors
