"""The transfer method `broadcast`: one collective per bucket, in a process group of trainer rank 0 and the engines.

    BroadcastSender.send (trainer rank 0) ──starts the broadcast──> BroadcastTicket
                          ticket ──RPC──> receive_broadcast (engine): joins the group once, then receives the bytes

gloo on CPUs, NCCL between GPUs. The ticket is small and is sent by RPC like any weights; the bytes are sent in the
group. An engine that gets a ticket of a group it has not joined joins it first. Ranks are assigned in the order of
joining: all receivers are equal. If a member dies, both sides raise BroadcastError within TIMEOUT_S; the next transfer
makes a new group.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from gcore.protocols import BroadcastError

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class BroadcastTicket:
    """What a receiver needs to join. BroadcastTicket("10.0.0.1:4242", "group-3", 5, 1048576, device="cuda")"""

    address: str  # of the store where the members find each other
    group: str
    size: int  # members, the sender included
    num_bytes: int
    device: str = "cpu"  # device type of the sender and the receivers


class BroadcastSender:
    """Rank 0 of its groups. It keeps one group, that of the last receivers."""

    def __init__(self, device: torch.device, host: str) -> None:
        self._device, self._host = device, host
        self._store: Any = None
        self._numbers = itertools.count()
        self._receivers: tuple[str, ...] = ()
        self._name = ""
        self._group: Future[Any] | None = None  # joins in the pool
        self._pool = ThreadPoolExecutor(1)
        self._in_flight: list[tuple[Future[None], torch.Tensor]] = []  # each with the memory that it reads

    def connect(self, receivers: Sequence[str], restarted: bool = False) -> None:
        """Send the next blocks to these engines, by name. The group is reused if they are the same as before.
        `restarted`: some of them are new processes with an old name."""
        if self._store is None:
            listener = socket.create_server((self._host, 0))  # not all interfaces, as the store would
            port, given = listener.getsockname()[1], listener.detach()
            self._store = TCPStore(self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=given)
        broken = self._group is None or (self._group.done() and self._group.exception() is not None)
        if tuple(receivers) == self._receivers and not restarted and not broken:
            return
        self._receivers, self._name = tuple(receivers), f"group-{next(self._numbers)}"
        self._in_flight = []
        self.close()  # also drops broadcasts that are stuck in the old group
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._group = self._pool.submit(_join, self._store, self._name, 0, len(receivers) + 1, self._device)

    def send(self, block: torch.Tensor) -> BroadcastTicket:
        """Start the broadcast of these bytes. At most two broadcasts are in flight. The block must not change until
        `wait_sent` returns."""
        block = block.to(self._device)
        self.wait_sent(keep=1)
        group = self._group
        assert group is not None, "`connect` was not called"
        self._in_flight.append((self._pool.submit(lambda: _run(group.result(), block)), block))
        address = f"{self._host}:{self._store.port}"
        return BroadcastTicket(address, self._name, len(self._receivers) + 1, len(block), self._device.type)

    def wait_sent(self, keep: int = 0) -> None:
        """Wait until all broadcasts but the last `keep` have ended, and free their memory. Errors are not raised here:
        the receivers report them."""
        while len(self._in_flight) > keep:
            wait([self._in_flight.pop(0)[0]])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


_GROUPS: dict[str, Any] = {}  # of this receiving process, by address and name; holds the last group only


def receive_broadcast(ticket: BroadcastTicket) -> torch.Tensor:
    """The bytes of the ticket. Blocks until they have arrived; raises BroadcastError."""
    cuda = ticket.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    key = f"{ticket.address}/{ticket.group}"
    if key not in _GROUPS:
        _GROUPS.clear()
        host, _, port = ticket.address.rpartition(":")
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
            rank = store.add(f"{ticket.group}/receivers", 1)
        except Exception as error:
            raise BroadcastError(f"{key}: the sender does not respond ({error})") from error
        _GROUPS[key] = _join(store, ticket.group, rank, ticket.size, device)
    block = torch.empty(ticket.num_bytes, dtype=torch.uint8, device=device)
    try:
        _run(_GROUPS[key], block)
    except BroadcastError:
        _GROUPS.clear()
        raise
    return block


def _join(store: Any, name: str, rank: int, size: int, device: torch.device) -> Any:
    """A process group that is independent of the default one, which may not exist in this process."""
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
        raise BroadcastError(f"{name}: {size} members did not connect within {TIMEOUT_S:g} s ({error})") from error


@contextmanager
def _errors_raised() -> Iterator[None]:
    """NCCL: an error is raised by the call and does not end the process."""
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


def _run(group: Any, block: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timedelta(seconds=TIMEOUT_S)
    try:
        group.broadcast([block], options).wait()
        if block.is_cuda:
            torch.cuda.synchronize(block.device)
    except Exception as error:
        raise BroadcastError(f"the broadcast of weights failed ({error})") from error
