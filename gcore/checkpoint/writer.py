"""Writes the shards of one rank in the background. One save at a time.

    stage ──references to shards──> thread: copy ──> host memory (reused) ──write──> threads: files, read again
    fence: wait until they are copied                                              └──checksums of the copy

`stage` returns at once. Code that changes or moves the shards must call `fence` first. After it, only the copy is read.
Nothing here is a collective.

Shards with a `hold` (off-loaded moments, which would fill host memory a second time) are not copied with `in_place`:
they are written first, and their owner waits for each before it changes it. `write` or `abandon` must follow `stage`.

Without a copy (checkpoint.asynchronous=false) the shards themselves are read while they are written, and host memory
grows by a few pieces only. `fence` then waits until they are written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gcore.checkpoint.store import write_file
from gcore.checkpoint.tensors import Hold, Shard, header, split_into_files
from gcore.types import Written

BLOCK_BYTES = 2**30  # of pinned host memory: PyTorch rounds every pinned allocation up to a power of 2
PIECE_BYTES = 2**25  # between two checks whether the save was abandoned
WRITER_THREADS = 4  # one thread does not reach the bandwidth of a fast disk, because it also computes checksums


class Abandoned(Exception):
    """The save was abandoned."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Snapshot({"weights": [...], "reference": [...]}, versions={"reference": 1}, about={"trainer.json": b"..."})"""

    shards: Mapping[str, Sequence[Shard]]  # by folder
    versions: Mapping[str, int] = field(default_factory=dict)  # a folder with the same version has the same values
    about: Mapping[str, bytes] = field(default_factory=dict)  # more files


class HostMemory:
    """Bytes in host memory, in blocks. They are kept for the next save."""

    def __init__(self, pinned: bool) -> None:
        self._pinned, self._blocks = pinned, list[Tensor]()

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._blocks))

    def reserve(self, num_bytes: int) -> None:
        while (missing := num_bytes - self.num_bytes) > 0:
            size = min(missing, BLOCK_BYTES)
            if self._pinned:
                size = 1 << (size - 1).bit_length()
            self._blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))

    def pieces(self, start: int, end: int) -> Iterator[Tensor]:
        """The bytes from `start` to `end`."""
        for block in self._blocks:
            if start < len(block) and end > 0:
                yield block[max(start, 0) : end]
            start, end = start - len(block), end - len(block)


class BackgroundWriter:
    """`device`: of the shards. `copies`: whether they are copied before they are written; `in_place`: all but those
    that have a hold."""

    def __init__(self, rank: int, device: torch.device, copies: bool = True, in_place: bool = True) -> None:
        self._rank, self._device, self._copies, self._in_place = rank, device, copies, in_place
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._memory: dict[str, HostMemory] = {}  # by folder
        self._versions: dict[str, int] = {}  # of what the host memory of a folder holds
        self._snapshot = Snapshot({})  # the staged one; its shards have no values once they are copied
        self._copied: Future[float] | None = None
        self._written: Future[Written] | None = None
        self._abandoned = threading.Event()
        self._waited_s = 0.0
        self._held: dict[int, Hold] = {}  # not written yet, by id of the shard
        self._holds = set[Hold]()  # of the staged snapshot

    @property
    def host_bytes(self) -> int:
        """Host memory of the copies."""
        return sum(memory.num_bytes for memory in self._memory.values())

    def stage(self, snapshot: Snapshot) -> int:
        """Start to copy the shards; returns the number of bytes to write. A folder with a version is not copied again
        while its version stays the same."""
        assert self._copied is None or (self._written is not None and self._written.done()), "one save at a time"
        self._abandoned.clear()
        self._written = None
        self._waited_s = 0.0
        if not (self._copies and self._in_place):
            bare = {name: [replace(s, hold=None) for s in shards] for name, shards in snapshot.shards.items()}
            snapshot = replace(snapshot, shards=bare)
        self._snapshot = snapshot
        ready = None
        if self._device.type == "cuda":  # what the compute stream has queued comes before the copy
            ready = torch.cuda.current_stream(self._device).record_event()
        copied = self._versions.items() & snapshot.versions.items()
        due = [name for name in snapshot.shards if name not in dict(copied)] if self._copies else []
        for name in due:
            self._versions.pop(name, None)
        shards = [shard for group in snapshot.shards.values() for shard in group]
        self._held = {id(shard): shard.hold for shard in shards if shard.hold is not None}
        self._holds = set(self._held.values())
        for hold in self._holds:
            hold.waited_s = 0.0
        for hold in self._held.values():
            hold.take()
        self._copied = self._thread.submit(self._copy_all, due, ready)
        return sum(shard.num_bytes for shard in shards)

    def fence(self) -> None:
        """Wait until the shards are copied, or written if there is no copy. Call before they change or move."""
        if not self._copies and self._copied is not None and self._written is None:
            self._abandoned.set()  # they change before anybody asked to write them
        running = self._copied if self._copies else self._written
        if running is not None and not running.done():
            started = time.perf_counter()
            running.exception()
            self._waited_s += time.perf_counter() - started

    def write(self, folder: Path) -> Future[Written]:
        """Start to write the staged snapshot to `folder`. The result says if it failed."""
        assert self._copied is not None and self._written is None, "`write` follows `stage`, once"
        self._written = self._thread.submit(self._write_all, folder)
        return self._written

    def abandon(self) -> None:
        """Stop the save, if there is one, and wait until no file of it is written any more."""
        self._abandoned.set()
        for running in (self._copied, self._written):
            if running is not None:
                running.exception()
        self._copied = self._written = None
        self._forget()

    def _forget(self) -> None:
        """References would keep memory alive that an off-load wants to free."""
        self._snapshot = Snapshot({})
        self._let_go(list(self._held))

    def _let_go(self, shards: Iterable[int]) -> None:
        """Their owner may change these held shards."""
        for hold in (self._held.pop(shard, None) for shard in shards):
            if hold is not None:
                hold.release()

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _copy_all(self, names: Sequence[str], ready: Any) -> float:
        started, snapshot = time.perf_counter(), self._snapshot
        if ready is None:
            self._copy(names)
        else:
            stream = torch.cuda.Stream(self._device)
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                self._copy(names)
            stream.synchronize()
        if self._copies:
            self._versions |= {name: snapshot.versions[name] for name in names if name in snapshot.versions}
            # References would keep memory alive that an off-load wants to free.
            bare = {
                name: [s if s.hold is not None else replace(s, values=s.values.to("meta")) for s in shards]
                for name, shards in snapshot.shards.items()
            }
            self._snapshot = replace(snapshot, shards=bare)
        return time.perf_counter() - started

    def _copy(self, names: Sequence[str]) -> None:
        for name in names:
            memory = self._memory.setdefault(name, HostMemory(pinned=self._device.type == "cuda"))
            shards = [shard for file in split_into_files(self._snapshot.shards[name]) for shard in file]
            copied = [shard for shard in shards if shard.hold is None]
            memory.reserve(sum(shard.num_bytes for shard in copied))
            start = 0
            for shard in copied:
                source, end = _bytes_of(shard.values), start + shard.num_bytes
                for piece in memory.pieces(start, end):
                    piece.copy_(source[: len(piece)], non_blocking=True)
                    source = source[len(piece) :]
                start = end

    def _write_all(self, folder: Path) -> Written:
        assert self._copied is not None
        started, snapshot = time.perf_counter(), self._snapshot
        if (failed := self._copied.exception()) is not None:  # host memory is used up, for example
            self._forget()
            return Written({}, error=f"the copy in host memory failed: {type(failed).__name__}: {failed}")
        try:
            copy_s = self._copied.result()
            files = {name: write_file(folder / name, [content]) for name, content in snapshot.about.items()}
            for group in snapshot.shards:
                (folder / group).mkdir(exist_ok=True)
            with ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="checkpoint") as threads:
                jobs = {name: threads.submit(write_file, folder / name, parts) for name, parts in self._files()}
                files |= {name: job.result() for name, job in jobs.items()}
        except (OSError, Abandoned) as error:
            return Written({}, error=f"{type(error).__name__}: {error}")
        finally:
            if not self._copies or self._holds:
                self._forget()
        waited_s = self._waited_s + sum(hold.waited_s for hold in self._holds)
        return Written(files, waited_s, copy_s, time.perf_counter() - started)

    def _files(self) -> Iterator[tuple[str, Iterator[Any]]]:
        """Path in the folder, and contents; held shards first."""
        groups = sorted(self._snapshot.shards.items(), key=lambda item: all(s.hold is None for s in item[1]))
        for group, shards in groups:
            start = 0
            for number, file in enumerate(split_into_files(shards)):
                contents = self._contents(header(file), self._pieces(group, file, start))
                yield f"{group}/{self._rank}-{number}.safetensors", contents
                start += sum(shard.num_bytes for shard in file if shard.hold is None)

    def _pieces(self, group: str, file: Sequence[Shard], start: int) -> Iterator[Tensor]:
        """The bytes of each shard, whose copies begin at `start` of the group's host memory. When the next one is asked
        for, those before it are in the file."""
        for shard in file:
            if shard.hold is not None or not self._copies:
                yield _bytes_of(shard.values)
                self._let_go([id(shard)])
            else:
                yield from self._memory[group].pieces(start, start + shard.num_bytes)
                start += shard.num_bytes

    def _contents(self, head: bytes, pieces: Iterator[Tensor]) -> Iterator[Any]:
        yield head
        for piece in pieces:
            for part in piece.split(PIECE_BYTES):
                if self._abandoned.is_set():
                    raise Abandoned("abandoned")
                yield part.cpu().numpy()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
