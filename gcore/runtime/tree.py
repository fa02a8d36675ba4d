"""Collectives among controller processes: values go up a tree, and the result comes back down.

                 0                 rank r has the children 16 r + 1 ... 16 r + 16
          1    2  ...  16          up:   what a rank and all ranks below it have
        17...32                    down: what all ranks have

`all_gather`: the values of the ranks, pickled by their owners; every rank reads all of them. `reduce`: one value, which
every rank merges from its own and those of its children, so no rank reads more than 17 values.

A rank exchanges 2 messages with its parent, so a collective of N ranks has 2 N messages; a ring has N * N. Every
message has the name of its collective. If a rank is missing, the rank above it notices first, because limits are
shorter further down. Its note goes up and then down, so all ranks raise the same error, with the name of the missing
one.

Members find each other through rank 0: each tells it where it listens, and gets the address of its parent. Ranks listen
on the interface by which they reach rank 0, and every connection is authenticated by the secret of the rendezvous.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import operator
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any, TypeVar

from gcore.protocols import Rendezvous

if TYPE_CHECKING:
    Link = Connection[Any, Any]
else:
    Link = Connection

TIMEOUT_S = 6 * 3600.0  # the driver notices dead processes; this limit is for processes that hang
START_S = 300.0  # until all members have found each other
PROOF_S = 20.0  # for a connection to prove that it is a member's
FAN_OUT = 16
SHORTER = 0.2  # of the limit, per level of the tree: a rank's note must arrive before those above give up
Address = tuple[str, int]
T = TypeVar("T")


def parent_of(rank: int, fan_out: int) -> int:
    return (rank - 1) // fan_out


def children_of(rank: int, size: int, fan_out: int) -> range:
    return range(min(size, fan_out * rank + 1), min(size, fan_out * rank + fan_out + 1))


def depth_of(rank: int, fan_out: int) -> int:
    return 0 if rank == 0 else 1 + depth_of(parent_of(rank, fan_out), fan_out)


class Meeting:
    """The listening socket of a rank, and the address of its parent. Makes one set of connections per group."""

    def __init__(self, rendezvous: Rendezvous, fan_out: int) -> None:
        assert rendezvous.address is not None
        host, _, port = rendezvous.address.rpartition(":")
        self._rank, self._size, self._fan_out = rendezvous.rank, rendezvous.size, fan_out
        self._secret = rendezvous.secret
        self._early: dict[tuple[str, int], Link] = {}  # children that connected before they were awaited
        if self._rank == 0:
            given = rendezvous.listener
            self._listener = socket.create_server((host, int(port))) if given is None else given.dup()
            self._parent: Address = (host, int(port))
            self._introduce()
        else:
            self._parent = self._introduced((host, int(port)))
        self._listener.settimeout(START_S)

    def _introduce(self) -> None:
        """Rank 0: wait for all members, then tell each where its parent listens."""
        self._listener.listen(self._size)
        self._listener.settimeout(START_S)
        members, places = dict[int, Link](), {0: self._parent}
        while len(members) < self._size - 1:
            try:
                link, (channel, rank, place) = self._accepted()
            except TimeoutError:
                missing = sorted(set(range(1, self._size)) - set(members))
                text = f"the controllers did not meet within {START_S:.0f} s: missing {_names(missing)}"
                raise TimeoutError(text) from None
            assert channel == "meeting", channel
            members[rank], places[rank] = link, place
        for rank, link in members.items():
            link.send(places[parent_of(rank, self._fan_out)])
            link.close()

    def _introduced(self, root: Address) -> Address:
        link, own = self._connected(root)
        self._listener = socket.create_server((own, 0))
        link.send(("meeting", self._rank, self._listener.getsockname()[:2]))
        parent: Address = link.recv()
        link.close()
        return parent

    def connect(self, channel: str) -> tuple[Link | None, dict[int, Link]]:
        """Connections of a group to the parent and to the children. Parents are connected before their children."""
        up = None
        if self._rank:
            up, _ = self._connected(self._parent)
            up.send((channel, self._rank, None))
        wanted = set(children_of(self._rank, self._size, self._fan_out))
        down = {rank: self._early.pop((channel, rank)) for rank in wanted if (channel, rank) in self._early}
        while len(down) < len(wanted):
            try:
                link, (theirs, rank, _) = self._accepted()
            except TimeoutError:
                raise TimeoutError(f"group {channel}: missing {_names(sorted(wanted - set(down)))}") from None
            if theirs == channel:
                down[rank] = link
            else:
                self._early[theirs, rank] = link
        return up, dict(sorted(down.items()))

    def _accepted(self) -> tuple[Link, Any]:
        while True:
            taken, _ = self._listener.accept()
            link = _link(taken)
            try:
                deliver_challenge(link, self._secret)
                answer_challenge(link, self._secret)
                hello = link.recv()
                _limit(link, 0.0)
                return link, hello
            except (OSError, EOFError, ValueError, AuthenticationError):  # not a member
                link.close()

    def _connected(self, address: Address) -> tuple[Link, str]:
        """A connection, and this side's own address."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                made = socket.create_connection(address, timeout=START_S)
                break
            except ConnectionRefusedError:  # it does not listen yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        own: str = made.getsockname()[0]
        link = _link(made)
        _limit(link, START_S)  # its accept loop may be busy with others
        answer_challenge(link, self._secret)
        deliver_challenge(link, self._secret)
        _limit(link, 0.0)
        return link, own


class TreeGroup:
    """Implements protocols.ControllerGroup."""

    def __init__(self, rendezvous: Rendezvous, timeout_s: float = TIMEOUT_S, fan_out: int = FAN_OUT) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self._timeout_s, self._fan_out = timeout_s, fan_out
        self._limit_s = timeout_s * (1 - SHORTER * depth_of(self.rank, fan_out))
        with _broken_means_late():
            self._meeting = Meeting(rendezvous, fan_out)
        self._num_subgroups = 0
        self._open("0")

    def _open(self, name: str) -> None:
        self._name = name
        with _broken_means_late():
            self._up, self._down = self._meeting.connect(name)
        self._last = dict.fromkeys(self._down, "the start")  # by child: its last collective
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"collective-{name}")

    def subgroup(self) -> TreeGroup:
        assert self._name == "0", "only the first group can make subgroups"
        self._num_subgroups += 1
        subgroup = copy.copy(self)
        subgroup._open(f"{self._num_subgroups}")
        return subgroup

    async def all_gather(self, name: str, value: Any) -> list[Any]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._all_gather, name, value)

    async def reduce(self, name: str, value: T, merge: Callable[[T, T], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._exchange, name, value, merge)

    async def barrier(self, name: str) -> None:
        await self.reduce(name, None, lambda _, __: None)

    def _all_gather(self, name: str, value: Any) -> list[Any]:
        own = {self.rank: pickle.dumps(value, pickle.HIGHEST_PROTOCOL)}
        pickled = self._exchange(name, own, operator.or_)
        return [pickle.loads(pickled[rank]) for rank in range(self.size)]

    def _exchange(self, name: str, value: T, merge: Callable[[T, T], T]) -> T:
        problem = ""
        deadline = time.monotonic() + self._limit_s
        for rank, link in self._down.items():
            problem_below, below = self._received(link, rank, name, deadline)
            problem = problem or problem_below
            value = value if problem else merge(value, below)
        if self._up is not None:
            problem, value = self._through_parent(name, problem, value)
        for link in self._down.values():
            with contextlib.suppress(OSError):  # it died: the next collective says so
                link.send((name, problem, None if problem else value))
        if problem:
            raise TimeoutError(f"collective {name!r} failed after up to {self._timeout_s:.0f} s: {problem}")
        return value

    def _received(self, link: Link, rank: int, name: str, deadline: float) -> tuple[str, Any]:
        """What is wrong with a child, and what it and the ranks below it have."""
        last = self._last[rank]
        try:
            if not link.poll(max(0.0, deadline - time.monotonic())):
                return f"missing controller-{rank} (last seen at {last!r})", None
            theirs, problem, value = link.recv()
        except (OSError, EOFError):
            return f"the connection to controller-{rank} broke (last seen at {last!r})", None
        self._last[rank] = theirs
        if theirs != name and not problem:
            problem = f"controller-{self.rank} is at {name!r} and controller-{rank} at {theirs!r}"
        return problem, value

    def _through_parent(self, name: str, problem: str, value: T) -> tuple[str, T]:
        """Send what arrived from below; receive what all have."""
        assert self._up is not None
        parent = parent_of(self.rank, self._fan_out)
        try:
            self._up.send((name, problem, None if problem else value))
            if not self._up.poll(self._timeout_s * (1 + 2 * SHORTER)):
                return problem or f"no answer from controller-{parent}", value
            _, problem, value = self._up.recv()
        except (OSError, EOFError):
            problem = problem or f"the connection to controller-{parent} broke"
        return problem, value


@contextlib.contextmanager
def _broken_means_late() -> Iterator[None]:
    """A member that dies while the others connect to it is missing, as in a collective."""
    try:
        yield
    except TimeoutError:
        raise
    except (OSError, EOFError) as error:
        raise TimeoutError(f"the controllers did not meet: {type(error).__name__}: {error}") from error


def _link(made: socket.socket) -> Link:
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link = Connection(made.detach())
    _limit(link, PROOF_S)
    return link


def _limit(link: Link, seconds: float) -> None:
    """A read that waits longer raises an OSError. 0: no limit."""
    with socket.socket(fileno=os.dup(link.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))


def _names(ranks: list[int]) -> str:
    shown = [f"controller-{rank}" for rank in ranks[:8]]
    return ", ".join(shown) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
