"""A controller's view of the replicas of any role: which of them may be sent something, and the queue for them.

    call ──> waiting (priority, then arrival) ──Router has room──> a replica

A replica is closed for one or several reasons: it is dead, drained, paused, or does not answer health checks.
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
RECALL_S = 1.0  # an abort may overtake the requests it is meant for: it is said again until they are back


class Replica(Protocol):
    """What a pool needs of the client of any role (gcore/clients.py)."""

    @property
    def name(self) -> str: ...
    async def stats(self) -> object: ...


R = TypeVar("R", bound=Replica)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outstanding:
    """One controller's part at a replica. Outstanding(name="engine-0", requests=16, work=9216, closed=("suspect",))"""

    name: str
    requests: int
    work: int  # tokens of prompts and at most of responses
    closed: tuple[Reason, ...] = ()  # why it is sent nothing; empty: it is open


@dataclass(frozen=True, slots=True)
class Observation:
    """A pool at a moment. Observation(waiting=8, replicas=(Outstanding(name="engine-0", ...), ...))"""

    waiting: int  # requests that no replica has room for
    replicas: tuple[Outstanding, ...]


@dataclass(frozen=True, slots=True)
class Need:
    """A place in the line, and what it asks for. Need(priority=70, arrival=3, work=9216, count=16, key=70)"""

    priority: int
    arrival: int
    work: int
    count: int
    key: Hashable


class Pool(Generic[R]):
    """Replicas of any role. Implements protocols.ReplicaPool. See Router for `turn`, `own` and the limits."""

    def __init__(
        self,
        replicas: Sequence[R],
        turn: tuple[int, int] = (0, 1),
        own: Collection[int] | None = None,
        limit: int | None = None,
        guest_limit: int | None = None,
    ) -> None:
        self.replicas = replicas
        self._router = Router(len(replicas), turn, own, limit, guest_limit)
        self._closed: list[set[Reason]] = [set() for _ in replicas]
        self._idle = [asyncio.Event() for _ in replicas]  # set when nothing of ours is there
        self._waiting: list[tuple[int, int, Need, asyncio.Future[int]]] = []  # heap; the cancelled are passed over
        self._arrivals = itertools.count()

    # ---- who may be sent something --------------------------------------------------------------------------------

    def mark_dead(self, name: str) -> None:
        """A replica is gone: nothing is sent there until it is admitted again."""
        for i in self._numbers(name):
            self._close(i, "dead")

    def mark_alive(self, name: str) -> None:
        for i in self._numbers(name):
            self._open(i, "dead", "suspect")

    def alive(self) -> dict[int, R]:
        return {i: replica for i, replica in enumerate(self.replicas) if "dead" not in self._closed[i]}

    async def drain(self, name: str) -> None:
        """Send nothing more to a replica, and take back what it has: that goes on elsewhere. Returns when nothing of
        this controller is left there (or when it is reopened meanwhile)."""
        await self._take_back(self._numbers(name), "drained")

    async def pause(self) -> None:
        """Take back all requests from all replicas. They and new ones wait until `resume`, and continue from the tokens
        they have. The replicas may sleep and take new weights in between."""
        await self._take_back(range(len(self.replicas)), "paused")

    def resume(self) -> None:
        for i in range(len(self.replicas)):
            self._mark_open(i, "paused")
        self._pump()

    async def _take_back(self, numbers: Sequence[int], why: Reason) -> None:
        for i in numbers:
            self._close(i, why)
            self._recall(i)  # before the next turn of the event loop: a call whose turn has come is sent then
        await asyncio.gather(*(self._until_empty(i, why) for i in numbers))

    async def _until_empty(self, i: int, why: Reason) -> None:
        while self._router.counts[i] and why in self._closed[i]:
            try:
                async with asyncio.timeout(RECALL_S):
                    await self._idle[i].wait()
            except TimeoutError:
                if why in self._closed[i]:
                    self._recall(i)

    def reopen(self, *names: str) -> None:
        """All of them, before anybody's turn comes: else the first would be sent all that waits."""
        for name in names:
            for i in self._numbers(name):
                self._mark_open(i, "drained")
        self._pump()

    def limit(self, requests: int) -> None:
        """A replica is sent no more than so many; what it has stays there."""
        self._router.limit(requests)
        self._pump()

    async def check(self, timeout_s: float) -> dict[str, bool]:
        """Ask every replica for its stats. One that keeps silent is sent nothing new until it answers a later check;
        what it has stays there. Returns those that changed: do they answer now?"""
        asked = [i for i, closed in enumerate(self._closed) if not closed & {"dead", "drained"}]
        answers = await asyncio.gather(*(_answers(self.replicas[i], timeout_s) for i in asked))
        changed: dict[str, bool] = {}
        for i, answers_now in zip(asked, answers, strict=True):
            if answers_now is None or "dead" in self._closed[i]:
                continue
            if answers_now == ("suspect" in self._closed[i]):
                changed[self.replicas[i].name] = answers_now
                if answers_now:
                    self._open(i, "suspect")
                else:
                    self._close(i, "suspect")
        return changed

    def observe(self) -> Observation:
        router = self._router
        columns = zip(self.replicas, router.counts, router.loads, self._closed, strict=True)
        found = tuple(Outstanding(r.name, count, work, tuple(sorted(why))) for r, count, work, why in columns)
        return Observation(sum(need.count for _, _, need, granted in self._waiting if not granted.done()), found)

    def _numbers(self, name: str) -> list[int]:
        return [i for i, replica in enumerate(self.replicas) if replica.name == name]

    def _close(self, i: int, why: Reason) -> None:
        self._closed[i].add(why)
        self._router.close(i)

    def _open(self, i: int, *why: Reason) -> None:
        self._mark_open(i, *why)
        self._pump()

    def _mark_open(self, i: int, *why: Reason) -> None:
        self._closed[i] -= set(why)
        if not self._closed[i]:
            self._router.open(i)

    def _recall(self, i: int) -> None:
        """Have a replica give back what it has of ours, where it can; else it is waited for."""

    # ---- the line -------------------------------------------------------------------------------------------------

    async def _call(self, work: int, count: int, ask: Callable[[R], Awaitable[T]]) -> T:
        """Ask the least loaded replica; if it dies, another. If none is alive, wait until one is back."""
        need = Need(0, next(self._arrivals), work, count, None)
        while True:
            async with self._place(need) as i:
                try:
                    return await ask(self.replicas[i])
                except RoleDied:
                    self._close(i, "dead")

    @contextlib.asynccontextmanager
    async def _place(self, need: Need) -> AsyncIterator[int]:
        """A replica with room, when it is this one's turn. It counts as outstanding there until the block ends."""
        i = await self._turn(need)
        try:
            yield i
        finally:
            self._give_back(i, need)

    async def _turn(self, need: Need) -> int:
        while True:
            granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (need.priority, need.arrival, need, granted))
            self._pump()
            try:
                i = await granted
            except asyncio.CancelledError:
                if granted.cancelled():
                    self._pump()  # who stood behind it may fit
                else:  # its turn came, and it did not hear of it any more
                    self._give_back(granted.result(), need)
                raise
            if self._router.is_open(i):
                return i
            self._give_back(i, need)  # closed since its turn came: back to the same place in the line

    def _pump(self) -> None:
        """Whose turn is it? Nobody overtakes the first in the line, or a large call would never find room."""
        while self._waiting:
            _, _, need, granted = self._waiting[0]
            if not granted.done():
                i = self._router.choose(key=need.key, count=need.count)
                if i is None:
                    return
                self._router.sent(i, need.work, need.count)
                self._idle[i].clear()
                granted.set_result(i)
            heapq.heappop(self._waiting)

    def _give_back(self, i: int, need: Need) -> None:
        self._router.done(i, need.work, need.count)
        if not self._router.counts[i]:
            self._idle[i].set()
        self._pump()


async def _answers(replica: Replica, timeout_s: float) -> bool | None:
    try:
        async with asyncio.timeout(timeout_s):
            await replica.stats()
    except TimeoutError:
        return False
    except RoleDied:  # the supervisor hears of it too, and buries it
        return None
    except RoleError:  # it speaks; what it says will end a request
        return True
    return True
