"""A controller's view of the replicas of any role: which replicas accept calls, and the queue of calls.

    call ──> queue (priority, then arrival) ──Router has room──> a replica

A replica is closed for one or several reasons: it is dead, drained, paused, or fails health checks (suspect).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from gcore.generation.routing import Router
from gcore.protocols import RoleDied, RoleError

Reason = Literal["dead", "drained", "paused", "suspect"]
RECALL_S = 1.0  # an abort may overtake its own requests: it is repeated until they are back


class Replica(Protocol):
    """The part of any role's client (gcore/clients.py) that a pool uses."""

    @property
    def name(self) -> str: ...
    async def stats(self) -> object: ...


R = TypeVar("R", bound=Replica)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outstanding:
    """One controller's load on a replica. Outstanding(name="engine-0", requests=16, work=9216, closed=("suspect",))"""

    name: str
    requests: int
    work: int  # tokens of the prompts plus maximum tokens of the responses
    closed: tuple[Reason, ...] = ()  # why nothing is sent to it; empty: it is open


@dataclass(frozen=True, slots=True)
class Observation:
    """Snapshot of a pool. Observation(waiting=8, replicas=(Outstanding(name="engine-0", ...), ...))"""

    waiting: int  # requests in the pool's own queue
    replicas: tuple[Outstanding, ...]


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A call in the queue. QueueEntry(priority=70, arrival=3, work=9216, count=16, key=70)"""

    priority: int
    arrival: int
    work: int
    count: int
    key: Hashable


class Pool(Generic[R]):
    """Replicas of any role. Implements protocols.ReplicaPool. See Router for `controller`, `own` and the limits."""

    def __init__(
        self,
        replicas: Sequence[R],
        controller: tuple[int, int] = (0, 1),
        own: Collection[int] | None = None,
        limit: int | None = None,
        guest_limit: int | None = None,
    ) -> None:
        self.replicas = replicas
        self._router = Router(len(replicas), controller, own, limit, guest_limit)
        self._closed: list[set[Reason]] = [set() for _ in replicas]
        self._idle = [asyncio.Event() for _ in replicas]  # set when no request of this pool is there
        self._waiting: list[tuple[int, int, QueueEntry, asyncio.Future[int]]] = []  # heap; cancelled entries too
        self._arrivals = itertools.count()

    # ---- open and closed replicas ---------------------------------------------------------------------------------

    def mark_dead(self, name: str) -> None:
        """The replica died: nothing is sent to it until `mark_alive`."""
        for i in self._indices(name):
            self._close(i, "dead")

    def mark_alive(self, name: str) -> None:
        for i in self._indices(name):
            self._open(i, "dead", "suspect")

    def alive(self) -> dict[int, R]:
        return {i: replica for i, replica in enumerate(self.replicas) if "dead" not in self._closed[i]}

    async def drain(self, name: str) -> None:
        """Close a replica and recall its requests, which continue on other replicas. Returns when the replica has no
        request of this controller left, or when it is reopened."""
        await self._close_and_recall(self._indices(name), "drained")

    async def pause(self) -> None:
        """Recall all requests from all replicas. They and new requests wait until `resume`, then continue from the
        tokens they have. In between, replicas may sleep and load new weights."""
        await self._close_and_recall(range(len(self.replicas)), "paused")

    def resume(self) -> None:
        for i in range(len(self.replicas)):
            self._mark_open(i, "paused")
        self._dispatch()

    async def _close_and_recall(self, indices: Sequence[int], why: Reason) -> None:
        for i in indices:
            self._close(i, why)
            self._recall(i)  # before the event loop runs: a call that was just assigned would be sent then
        await asyncio.gather(*(self._until_empty(i, why) for i in indices))

    async def _until_empty(self, i: int, why: Reason) -> None:
        while self._router.counts[i] and why in self._closed[i]:
            try:
                async with asyncio.timeout(RECALL_S):
                    await self._idle[i].wait()
            except TimeoutError:
                if why in self._closed[i]:
                    self._recall(i)

    def reopen(self, *names: str) -> None:
        """Opens all of them before it dispatches: otherwise the first one would get the whole queue."""
        for name in names:
            for i in self._indices(name):
                self._mark_open(i, "drained")
        self._dispatch()

    def limit(self, requests: int) -> None:
        """Maximum number of outstanding requests per replica. Requests above it are not recalled."""
        self._router.limit(requests)
        self._dispatch()

    async def check(self, timeout_s: float) -> dict[str, bool]:
        """Health check: request the stats of every replica. One that does not respond gets no new calls until it
        responds to a later check; its requests stay there. Returns the replicas that changed -> do they respond?"""
        checked = [i for i, closed in enumerate(self._closed) if not closed & {"dead", "drained"}]
        answers = await asyncio.gather(*(_responds(self.replicas[i], timeout_s) for i in checked))
        changed: dict[str, bool] = {}
        for i, responds in zip(checked, answers, strict=True):
            if responds is None or "dead" in self._closed[i]:
                continue
            if responds == ("suspect" in self._closed[i]):
                changed[self.replicas[i].name] = responds
                if responds:
                    self._open(i, "suspect")
                else:
                    self._close(i, "suspect")
        return changed

    def unreachable(self) -> dict[str, str]:
        reasons: tuple[Reason, ...] = ("suspect", "dead")
        columns = zip(self.replicas, self._closed, strict=True)
        return {replica.name: why for replica, closed in columns for why in reasons if why in closed}

    def observe(self) -> Observation:
        router = self._router
        columns = zip(self.replicas, router.counts, router.loads, self._closed, strict=True)
        found = tuple(Outstanding(r.name, count, work, tuple(sorted(why))) for r, count, work, why in columns)
        return Observation(sum(entry.count for _, _, entry, granted in self._waiting if not granted.done()), found)

    def _indices(self, name: str) -> list[int]:
        return [i for i, replica in enumerate(self.replicas) if replica.name == name]

    def _close(self, i: int, why: Reason) -> None:
        self._closed[i].add(why)
        self._router.close(i)

    def _open(self, i: int, *why: Reason) -> None:
        self._mark_open(i, *why)
        self._dispatch()

    def _mark_open(self, i: int, *why: Reason) -> None:
        self._closed[i] -= set(why)
        if not self._closed[i]:
            self._router.open(i)

    def _recall(self, i: int) -> None:
        """Abort this pool's requests on a replica, if the role supports it. Otherwise they run to their end."""

    # ---- the queue ------------------------------------------------------------------------------------------------

    async def _call(self, work: int, count: int, function: Callable[[R], Awaitable[T]]) -> T:
        """Call the least loaded replica; if it dies, another one. If none is alive, wait until one is back."""
        entry = QueueEntry(0, next(self._arrivals), work, count, None)
        while True:
            async with self._reserved(entry) as i:
                try:
                    return await function(self.replicas[i])
                except RoleDied:
                    self._close(i, "dead")

    @contextlib.asynccontextmanager
    async def _reserved(self, entry: QueueEntry) -> AsyncIterator[int]:
        """Wait for a replica with room. The entry counts as outstanding there until the block ends."""
        i = await self._wait_for_replica(entry)
        try:
            yield i
        finally:
            self._release(i, entry)

    async def _wait_for_replica(self, entry: QueueEntry) -> int:
        while True:
            granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (entry.priority, entry.arrival, entry, granted))
            self._dispatch()
            try:
                i = await granted
            except asyncio.CancelledError:
                if granted.cancelled():
                    self._dispatch()  # the next entry may fit
                else:  # assigned to a replica, but cancelled before this coroutine resumed
                    self._release(granted.result(), entry)
                raise
            if self._router.is_open(i):
                return i
            self._release(i, entry)  # closed since it was assigned: back to the same place in the queue

    def _dispatch(self) -> None:
        """Assign queued calls to replicas. None overtakes the first: otherwise a large call would never find room."""
        while self._waiting:
            _, _, entry, granted = self._waiting[0]
            if not granted.done():
                i = self._router.choose(key=entry.key, count=entry.count)
                if i is None:
                    return
                self._router.sent(i, entry.work, entry.count)
                self._idle[i].clear()
                granted.set_result(i)
            heapq.heappop(self._waiting)

    def _release(self, i: int, entry: QueueEntry) -> None:
        self._router.done(i, entry.work, entry.count)
        if not self._router.counts[i]:
            self._idle[i].set()
        self._dispatch()


async def _responds(replica: Replica, timeout_s: float) -> bool | None:
    try:
        async with asyncio.timeout(timeout_s):
            await replica.stats()
    except TimeoutError:
        return False
    except RoleDied:  # the driver notices it too, and calls mark_dead
        return None
    except RoleError:  # it responds; requests will report the error
        return True
    return True
