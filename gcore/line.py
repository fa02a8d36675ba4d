"""Weights between processes on different devices: one broadcast a part, over a group made for these processes alone.

    Sender (trainer rank 0) ──send: starts the broadcast──> Note ──RPC──> receive (engine): joins, takes

gloo on CPUs, NCCL between GPUs. The note is small and travels like any weights; the bytes take the line. Whoever gets a
note for a line it is not on joins it first: ranks are handed out in the order of coming, since all takers are alike.
A line that breaks (somebody died) raises LineError with both sides within TIMEOUT_S; the next one is a new line.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

TIMEOUT_S = 30.0


class LineError(RuntimeError):
    """Somebody on the line is gone or late."""


@dataclass(frozen=True, slots=True)
class Note:
    """What comes over which line. Note("10.0.0.1:4242", "line-3", size=5, num_bytes=1048576, device="cuda")"""

    address: str  # of the store where its members meet
    line: str
    size: int  # members, the sender included
    num_bytes: int
    device: str = "cpu"  # kind of device at both ends


class Sender:
    """Rank 0 of its lines. One line at a time is kept: that of the takers of the last weights."""

    def __init__(self, device: torch.device, host: str) -> None:
        self._device, self._host = device, host
        self._store: Any = None
        self._numbers = itertools.count()
        self._takers: tuple[str, ...] = ()
        self._name, self._line = "", _none()
        self._pool = ThreadPoolExecutor(1)
        self._under_way: list[tuple[Future[None], Any]] = []  # with what must stay in memory until then

    def open(self, takers: Sequence[str], fresh: bool = False) -> None:
        """The next parts go to these. `fresh`: some of them are not the processes they were."""
        if self._store is None:
            self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        broken = self._line.done() and self._line.exception() is not None
        if tuple(takers) == self._takers and not fresh and not broken:
            return
        self._takers, self._name = tuple(takers), f"line-{next(self._numbers)}"
        self._under_way = []
        self.close()  # with what is stuck on the line before
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._line = self._pool.submit(_join, self._store, self._name, 0, len(takers) + 1, self._device)

    def send(self, flat: torch.Tensor) -> Note:
        """Starts the broadcast of these bytes, and returns what takers must know to join in. At most two are under
        way, and nobody may write to them until `settle`."""
        flat = flat.to(self._device)
        self.settle(but=1)
        self._under_way.append((self._pool.submit(self._broadcast, self._line, flat), flat))
        address = f"{self._host}:{self._store.port}"
        return Note(address, self._name, len(self._takers) + 1, len(flat), self._device.type)

    def settle(self, but: int = 0) -> None:
        """Wait until all but the last so many are sent, and let go of their memory. What failed, its takers tell."""
        while len(self._under_way) > but:
            wait([self._under_way.pop(0)[0]])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _broadcast(self, line: Future[Any], flat: torch.Tensor) -> None:
        _run(line.result(), flat)


_LINES: dict[str, Any] = {}  # of this process, by address and name: the last one


def receive(note: Note) -> torch.Tensor:
    """The bytes of the note. Blocks until they are here; raises LineError."""
    cuda = note.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    key = f"{note.address}/{note.line}"
    if key not in _LINES:
        _LINES.clear()
        host, _, port = note.address.rpartition(":")
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
            rank = store.add(f"{note.line}/takers", 1)
        except Exception as error:
            raise LineError(f"{key}: the sender is not there ({error})") from error
        _LINES[key] = _join(store, note.line, rank, note.size, device)
    flat = torch.empty(note.num_bytes, dtype=torch.uint8, device=device)
    try:
        _run(_LINES[key], flat)
    except LineError:
        _LINES.clear()
        raise
    return flat


def _join(store: Any, name: str, rank: int, size: int, device: torch.device) -> Any:
    """A process group beside the default one, which may not even exist here."""
    members, limit = PrefixStore(name, store), timedelta(seconds=TIMEOUT_S)
    try:
        if device.type != "cuda":
            return dist.ProcessGroupGloo(members, rank, size, limit)
        with _errors_raised():
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            return dist.ProcessGroupNCCL(members, rank, size, options)
    except Exception as error:
        raise LineError(f"{name}: {size} members did not meet within {TIMEOUT_S:g} s ({error})") from error


@contextmanager
def _errors_raised() -> Iterator[None]:
    """NCCL: a line that breaks is an error of the call, not the end of the process."""
    wanted = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ |= wanted
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run(line: Any, flat: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=TIMEOUT_S)
    try:
        line.broadcast([flat], options).wait()
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
    except Exception as error:
        raise LineError(f"weights stopped on their way ({error})") from error


def _none() -> Future[Any]:
    line: Future[Any] = Future()
    line.set_result(None)
    return line
