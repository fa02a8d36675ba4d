"""A controller's pools of engines and of reward models. Requests that a replica leaves unfinished continue on another.

    generate ──> queue (priority, then arrival) ──Router has room──> a replica ──> completions
                    ^                                                   │
                    └── whole requests, if the replica died; remaining tokens, if the replica is drained

The choice of the replica does not change the tokens (noise depends on the sample and the position in it), so routing
can optimize for speed alone. An interrupted response continues on another replica from the tokens it has. The embedded
and the emulated engine generate the same tokens as without the interruption; vLLM and SGLang draw the rest from the
same distribution with different noise. If a caller is cancelled, its requests are aborted and free their slots at once.

A replica is closed for one or several reasons: it is dead, drained, paused, or fails health checks (suspect).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from gcore.clients import EngineClient, ScorerClient
from gcore.generation.routing import Router, limits_of, own_replicas, shared_limit
from gcore.observe.links import Links
from gcore.protocols import EngineStats, RoleDied, RoleError, RoleReport
from gcore.types import Completion, Ints, Request

Reason = Literal["dead", "drained", "paused", "suspect"]
STATS_TIMEOUT_S = 2.0  # an engine whose counters take longer is left out
RECALL_S = 1.0  # between two aborts of the same requests
MAX_CALLS = 2048  # whose response lengths are held between two reports


R = TypeVar("R", EngineClient, ScorerClient)


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A call in the queue. QueueEntry(priority=70, arrival=3, work=9216, count=16, key=70)"""

    priority: int
    arrival: int
    work: int
    count: int
    key: Hashable


class ClientPool(Generic[R]):
    """Replicas of any role. Implements protocols.ReplicaPool. `router`: None if this pool is the only one."""

    def __init__(self, replicas: Sequence[R], router: Router | None = None) -> None:
        self.replicas: Sequence[R] = replicas
        self._router = router or Router(len(replicas))
        self._closed: list[set[Reason]] = [set() for _ in replicas]
        self._waiting: list[tuple[int, int, QueueEntry, asyncio.Future[int]]] = []  # heap; cancelled entries too
        self._arrivals = itertools.count()

    # ---- open and closed replicas ---------------------------------------------------------------------------------

    def mark_dead(self, name: str) -> None:
        """The replica died: nothing is sent to it until `mark_alive`."""
        self._close(self._indices(name), "dead")

    def mark_alive(self, name: str) -> None:
        self._open(self._indices(name), "dead", "suspect")

    def alive(self) -> dict[int, R]:
        return {i: replica for i, replica in enumerate(self.replicas) if "dead" not in self._closed[i]}

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
                    self._open([i], "suspect")
                else:
                    self._close([i], "suspect")
        return changed

    def unreachable(self) -> dict[str, str]:
        reasons: tuple[Reason, ...] = ("suspect", "dead")
        columns = zip(self.replicas, self._closed, strict=True)
        return {replica.name: why for replica, closed in columns for why in reasons if why in closed}

    def _indices(self, *names: str) -> list[int]:
        return [i for i, replica in enumerate(self.replicas) if replica.name in names]

    def _close(self, indices: Sequence[int], why: Reason) -> None:
        for i in indices:
            self._closed[i].add(why)
        self._router.close(*indices)

    def _open(self, indices: Sequence[int], *why: Reason) -> None:
        """Opens all of them before it dispatches: otherwise the first one would get the whole queue."""
        for i in indices:
            self._closed[i] -= set(why)
        self._router.open(*(i for i in indices if not self._closed[i]))
        self._dispatch()

    # ---- the queue ------------------------------------------------------------------------------------------------

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
                granted.set_result(i)
            heapq.heappop(self._waiting)

    def _release(self, i: int, entry: QueueEntry) -> None:
        self._router.done(i, entry.work, entry.count)
        self._dispatch()


class _NotSent(Exception):
    """The replica was drained before the requests were sent."""


@dataclass(slots=True, eq=False)
class _Call:
    """Requests on their way to a replica, or there, until it answers."""

    ticket: str
    sent: bool = False
    recalled: bool = False  # aborted by `drain`; what is left continues on another replica
    answer: asyncio.Future[list[Completion]] = field(init=False)


class EnginePool(ClientPool[EngineClient]):
    """Replicas of protocols.Engine. `role`: their role name in placement."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        router: Router | None = None,
        role: str = "",
        links: Links | None = None,
    ) -> None:
        super().__init__(engines, router)
        self.role, self.links = role, links or Links()
        self.cost_of: Callable[[int], float] = float  # of a sequence of this length, in tokens: the work of a request
        self._name, self._numbering = uuid.uuid4().hex[:12], itertools.count()
        self._calls: list[set[_Call]] = [set() for _ in engines]  # by replica; of cancelled callers too
        self._aborts: set[asyncio.Future[None]] = set()
        self._aborted_requests = self._aborted_tokens = 0  # of cancelled callers, since the last report
        self._speculated: dict[int, tuple[float, float]] = {}  # of each engine, at the last report
        self._num_calls = 0
        self._ended: deque[tuple[int, ...]] = deque(maxlen=MAX_CALLS)  # since the last report: response lengths

    @classmethod
    def for_controller(
        cls,
        engines: Sequence[EngineClient],
        rank: int,
        size: int,
        max_concurrent: int,
        roam: bool = False,
        role: str = "",
        nodes: tuple[Sequence[int], Sequence[int]] = ((), ()),
        per_call: int = 1,
    ) -> EnginePool:
        """Engines have short queues. Most requests wait in this pool, where priorities and moves apply to them.

        `roam`: placement moves replicas, so no controller owns one: each controller gets a share of every replica.
        `nodes`: of the controllers and of the engines, see own_replicas. `per_call`: requests of a usual call.
        """
        own = None if roam else own_replicas(rank, size, len(engines), nodes)
        if own is None:
            router = Router(len(engines), (rank, size), limit=shared_limit(max_concurrent, size if roam else 1))
        else:
            router = Router(len(engines), (rank, size), own, *limits_of(max_concurrent, per_call))
        return cls(engines, router, role, Links(rank, nodes))

    async def generate(self, requests: Sequence[Request], priority: int = 0, key: Hashable = None) -> list[Completion]:
        """Completions in the order of the requests. The requests go to one replica together, unless it is drained.

        Lower priority values go first, here and in the engine. Calls with the same key (the prompt) go to the same
        replica, which has cached the prefix, unless its load is too high."""
        left = {n: r if r.priority == priority else replace(r, priority=priority) for n, r in enumerate(requests)}
        completions: dict[int, Completion] = {}
        arrival = next(self._arrivals)
        self._num_calls += 1
        try:
            await self._complete(left, completions, priority, arrival, key)
        finally:
            self._num_calls -= 1
        if requests:
            self._ended.append(tuple(completions[n].content.num_steps for n in range(len(requests))))
        return [completions[n] for n in range(len(requests))]

    async def _complete(
        self, left: dict[int, Request], completions: dict[int, Completion], priority: int, arrival: int, key: Hashable
    ) -> None:
        while left:
            work = sum(round(self.cost_of(r.content.size + r.params.max_tokens)) for r in left.values())
            try:
                async with self._reserved(QueueEntry(priority, arrival, work, len(left), key)) as i:
                    answers, moved = await self._generate_on(i, list(left.values()))
            except (RoleDied, _NotSent):
                continue
            for (n, request), answer in zip(list(left.items()), answers, strict=True):
                piece = _with_finish(request, answer) if moved else answer
                completions[n] = completions[n].joined(piece) if n in completions else piece
                if moved and piece.finish == "abort":
                    left[n] = request.after(piece)
                else:
                    del left[n]

    def report(self) -> RoleReport:
        """For placement, which adds the replicas' counters."""
        report = RoleReport(
            requests=sum(self._router.counts),
            waiting=sum(entry.count for _, _, entry, granted in self._waiting if not granted.done()),
            calls=self._num_calls,
            ended=tuple(self._ended),
        )
        self._ended.clear()
        return report

    async def _generate_on(self, i: int, requests: list[Request]) -> tuple[list[Completion], bool]:
        """The replica's completions, and whether a drain interrupted them."""
        call = _Call(f"{self._name}-{next(self._numbering)}")

        async def generate() -> list[Completion]:
            if call.recalled:  # the replica may be asleep already
                raise _NotSent
            call.sent = True
            self.links.add("requests", i, sum(r.content.nbytes for r in requests))
            answers = await self.replicas[i].generate(requests, call.ticket)
            self.links.add("responses", i, sum(answer.nbytes for answer in answers))
            return answers

        call.answer = asyncio.ensure_future(generate())
        self._calls[i].add(call)
        call.answer.add_done_callback(lambda _: self._calls[i].discard(call))
        try:
            return await asyncio.shield(call.answer), call.recalled
        except RoleDied:
            self._close([i], "dead")
            raise
        except asyncio.CancelledError:
            if not call.sent:
                call.answer.cancel()
            else:
                call.answer.add_done_callback(self._count_aborted)
                self._abort(i, call)
            raise

    def take_aborted(self) -> tuple[int, int]:
        """Aborted tokens and requests of cancelled callers, since the last call."""
        aborted = self._aborted_tokens, self._aborted_requests
        self._aborted_tokens = self._aborted_requests = 0
        return aborted

    async def take_speculated(self, timeout_s: float = STATS_TIMEOUT_S) -> tuple[float, float]:
        """Tokens that the engines proposed and accepted since the last call, of those that answer in time."""
        alive = self.alive()
        answers = await asyncio.gather(*(_stats(engine, timeout_s) for engine in alive.values()))
        new = [0.0, 0.0]
        for i, stats in zip(alive, answers, strict=True):
            if stats is not None:
                now = stats.proposed_tokens, stats.accepted_tokens
                before = self._speculated.get(i, (0.0, 0.0))
                before = before if now >= before else (0.0, 0.0)  # it was started again
                new = [total + a - b for total, a, b in zip(new, now, before, strict=True)]
                self._speculated[i] = now
        return new[0], new[1]

    def _count_aborted(self, answer: asyncio.Future[list[Completion]]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            self._aborted_requests += len(answer.result())
            self._aborted_tokens += sum(completion.content.num_steps for completion in answer.result())

    # ---- taking requests back from replicas -----------------------------------------------------------------------

    async def drain(self, name: str) -> None:
        """Close a replica and recall its requests, which continue on other replicas. Returns when the replica has no
        request of this controller left, or when it is reopened."""
        await self._close_and_recall(self._indices(name), "drained")

    def reopen(self, *names: str) -> None:
        self._open(self._indices(*names), "drained")

    async def pause(self) -> None:
        """Recall all requests from all replicas. They and new requests wait until `resume`, then continue from the
        tokens they have. In between, replicas may sleep and load new weights."""
        await self._close_and_recall(range(len(self.replicas)), "paused")

    def resume(self) -> None:
        self._open(range(len(self.replicas)), "paused")

    def limit(self, requests: int) -> None:
        """Maximum number of outstanding requests per replica. Requests above it are not recalled."""
        self._router.limit(requests)
        self._dispatch()

    async def _close_and_recall(self, indices: Sequence[int], why: Reason) -> None:
        self._close(indices, why)
        for i in indices:
            for call in self._calls[i]:  # before the event loop runs: a call that was just assigned would be sent then
                call.recalled = True
                self._abort(i, call)
        for i in indices:
            while self._calls[i] and why in self._closed[i]:
                await asyncio.wait([call.answer for call in self._calls[i]], timeout=RECALL_S)

    def _abort(self, i: int, call: _Call) -> None:
        """Until the requests are back: an abort may overtake them. Does not wait, so that a replica that does not
        respond blocks no caller."""

        async def abort() -> None:
            with contextlib.suppress(RoleDied):  # a dead replica has no slots to free
                while not call.answer.done():
                    await self.replicas[i].abort(call.ticket)
                    await asyncio.wait({call.answer}, timeout=RECALL_S)

        task = asyncio.ensure_future(abort())
        self._aborts.add(task)  # the event loop holds only weak references to tasks
        task.add_done_callback(self._aborts.discard)


class ScorerPool(ClientPool[ScorerClient]):
    """Replicas of protocols.Scorer."""

    async def score(self, tokens: Sequence[Ints]) -> list[float]:
        """By the least loaded replica; if it dies, by another one. If none is alive, waits until one is back."""
        entry = QueueEntry(0, next(self._arrivals), sum(map(len, tokens)), len(tokens), None)
        while True:
            async with self._reserved(entry) as i:
                try:
                    return await self.replicas[i].score(list(tokens))
                except RoleDied:
                    self._close([i], "dead")


def _with_finish(request: Request, piece: Completion) -> Completion:
    """If an abort arrives together with the last step, the response is complete: correct its `finish`."""
    finish = piece.content.end(request.params) if piece.finish == "abort" else None
    return piece if finish is None else replace(piece, finish=finish)


async def _stats(engine: EngineClient, timeout_s: float) -> EngineStats | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await engine.stats()
    except (RoleDied, RoleError, TimeoutError):
        return None


async def _responds(replica: EngineClient | ScorerClient, timeout_s: float) -> bool | None:
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
