"""Folders of sharded tensors: each rank writes its shards to its own files; any process reads any part of any tensor.

    N ranks: Shard (name, place, values) ──assign: one writer per shard──> folder/RANK-NUMBER.safetensors (writer.py)
    folder ──ShardFiles: headers of all files──> name -> shards ──read (a part of a tensor)──> M ranks, one process

The files are ordinary safetensors. The header of a file also says where each of its shards is in the whole tensor, so a
folder needs no index, and reading it needs neither pickle nor collectives. A second shard of a tensor in one file has
the name NAME#1, the third NAME#2.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gcore.types import UserError

FILES = "*.safetensors"
FILE_BYTES = 2**31  # of a file, about; a larger shard has a file of its own
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
}
Sizes = tuple[int, ...]
Place = tuple[str, Sizes]  # of a shard: name of the tensor, offset in each dimension


class Hold:
    """Of memory from which checkpoints are written without a copy: its owner calls `wait` before it changes it."""

    def __init__(self) -> None:
        self._readers, self._changed = 0, threading.Condition()
        self.waited_s = 0.0  # the owner

    def take(self) -> None:
        with self._changed:
            self._readers += 1

    def release(self) -> None:
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            if self._readers:
                started = time.perf_counter()
                self._changed.wait_for(lambda: not self._readers)
                self.waited_s += time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous part of a tensor. Shard("w", whole=(8, 4), offset=(4, 0), values=torch.zeros(4, 4))"""

    name: str
    whole: Sizes
    offset: Sizes
    values: Tensor
    hold: Hold | None = None  # if its memory is large, in the host and rarely changes: it is not copied

    @property
    def place(self) -> Place:
        return self.name, self.offset

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.element_size()


# ---- writing --------------------------------------------------------------------------------------------------------


def assign(held: Sequence[Mapping[Place, int]], rank: int) -> set[Place]:
    """The shards that `rank` writes. `held`: the bytes of each shard, by the rank that holds it. Of ranks that hold
    the same shard, one writes it: the one with the fewest bytes so far. Every rank computes the same."""
    holders: dict[Place, list[int]] = {}
    for holder, shards in enumerate(held):
        for place in shards:
            holders.setdefault(place, []).append(holder)
    loads, chosen = [0] * len(held), set[Place]()
    for place, ranks in sorted(holders.items()):
        writer = min(ranks, key=lambda r: (loads[r], r))
        loads[writer] += held[writer][place]
        if writer == rank:
            chosen.add(place)
    return chosen


def split_into_files(shards: Iterable[Shard]) -> list[list[Shard]]:
    """The shards of each file, largest elements first, so that all elements are aligned."""
    files, size = list[list[Shard]](), FILE_BYTES
    for shard in sorted(shards, key=lambda shard: -shard.values.element_size()):
        if size + shard.num_bytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(shard)
        size += shard.num_bytes
    return files


def header(shards: Sequence[Shard]) -> bytes:
    """The start of a safetensors file; the values of the shards follow it without gaps."""
    counts, keys = Counter[str](), list[str]()
    for shard in shards:
        keys.append(f"{shard.name}#{counts[shard.name]}" if counts[shard.name] else shard.name)
        counts[shard.name] += 1
    places = {key: [shard.whole, shard.offset] for key, shard in zip(keys, shards, strict=True)}
    entries: dict[str, Any] = {"__metadata__": {"places": json.dumps(places)}}
    start = 0
    for key, shard in zip(keys, shards, strict=True):
        end = start + shard.num_bytes
        entries[key] = {
            "dtype": DTYPES[shard.values.dtype],
            "shape": list(shard.values.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# ---- reading --------------------------------------------------------------------------------------------------------


class ShardFiles:
    """The tensors of a folder. Files are mapped: only the parts that are used are read."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.shapes = folder, dict[str, Sizes]()
        self._shards: dict[str, list[tuple[Any, str, Sizes]]] = {}  # name -> (file, name there, offset in the tensor)
        for path in sorted(folder.glob(FILES)):
            file = safe_open(path, "pt")
            for key, (whole, offset) in json.loads(file.metadata()["places"]).items():
                name = key.partition("#")[0]
                self.shapes[name] = tuple(whole)
                self._shards.setdefault(name, []).append((file, key, tuple(offset)))

    def part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, in float32."""
        values = torch.empty([at.stop - at.start for at in part])
        self.read(Shard(name, self.shapes.get(name, ()), tuple(at.start for at in part), values))
        return values

    def read(self, shard: Shard) -> None:
        """Fill the values of the shard, which may be another part of the tensor than any that was written."""
        saved, into = self.shapes.get(shard.name), shard.values
        if saved != shard.whole:
            raise UserError(
                f"{self._folder}: {shard.name} has shape {saved}, got a model with shape {shard.whole}; expected the "
                "model that the checkpoint was made with (key: model)"
            )
        filled = 0
        for file, key, start in self._shards[shard.name]:
            stored = file.get_slice(key)
            found = _overlap(start, tuple(stored.get_shape()), shard.offset, tuple(into.shape))
            if found is not None:
                theirs, ours = found
                target = into[ours] if ours else into
                target.copy_(stored[theirs] if theirs else file.get_tensor(key))
                filled += target.numel()
        if filled != into.numel():
            raise UserError(
                f"{self._folder}: {filled} of {into.numel()} values of {shard.name} found; expected the files of all "
                "ranks in one folder (key: run.dir)"
            )


def _overlap(
    start: Sizes, sizes: Sizes, at: Sizes, wanted: Sizes
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The common part of two boxes, as slices of the first and of the second; None if they have none."""
    theirs, ours = list[slice](), list[slice]()
    for a, n, b, m in zip(start, sizes, at, wanted, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        theirs.append(slice(low - a, high - a))
        ours.append(slice(low - b, high - b))
    return tuple(theirs), tuple(ours)


def shapes(folder: Path) -> dict[str, Sizes]:
    """Names and shapes of the whole tensors."""
    return ShardFiles(folder).shapes


def read(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Some tensors, whole and in float32."""
    files = ShardFiles(folder)
    return {name: files.part(name, tuple(slice(0, size) for size in files.shapes[name])) for name in names}
