"""A controller's view of the replicas of one role: who waits here, who has what, and what becomes of it.

    generate ──> waiting (priority, then arrival) ──Router has room──> a replica ──> completions
                    ^                                                     │
                    └── all of it, when the replica died; the rest of it, when the replica is drained

Which replica answers never changes what it answers (noise belongs to the sample and to the position in it), so routing
is free to chase speed. A response that is cut continues elsewhere from the tokens it has: the embedded and the emulated
engine make the same tokens as without the cut; vLLM and SGLang draw the rest from the same distribution, with other
noise. A caller that is cancelled takes its requests back: the replica's slots are free at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import uuid
from collections import deque
from collections.abc import AsyncIterator, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gcore.generation.routing import SENT_PER_SLOT, Router, own_replicas
from gcore.protocols import Handle, RoleDied, RoleError
from gcore.types import Completion, Ints, Request

Reason = Literal["dead", "drained", "paused", "suspect"]
REMEMBERED = 2048  # lengths between two reports
RECALL_S = 1.0  # an abort may overtake the requests it is meant for: it is said again until they are back


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
class _Need:
    """A place in the line, and what it asks for. _Need(priority=70, arrival=3, work=9216, count=16, key=70)"""

    priority: int
    arrival: int
    work: int
    count: int
    key: Hashable


class Pool:
    """Replicas of any role. See Router for `turn`, `own` and the limits."""

    def __init__(
        self,
        replicas: Sequence[Handle],
        turn: tuple[int, int] = (0, 1),
        own: Collection[int] | None = None,
        limit: int | None = None,
        guest_limit: int | None = None,
    ) -> None:
        self.replicas = replicas
        self.role = ""  # whose replicas they are, where placement has a say
        self._router = Router(len(replicas), turn, own, limit, guest_limit)
        self._closed: list[set[Reason]] = [set() for _ in replicas]
        self._idle = [asyncio.Event() for _ in replicas]  # set when nothing of ours is there
        self._waiting: list[tuple[int, int, _Need, asyncio.Future[int]]] = []  # heap; the cancelled are passed over
        self._arrivals = itertools.count()

    # ---- who may be sent something --------------------------------------------------------------------------------

    def mark_dead(self, name: str) -> None:
        """A replica is gone: nothing is sent there until it is admitted again."""
        for i in self._numbers(name):
            self._close(i, "dead")

    def mark_alive(self, name: str) -> None:
        for i in self._numbers(name):
            self._open(i, "dead", "suspect")

    def alive(self) -> dict[int, Handle]:
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
        await asyncio.gather(*(self._until_empty(i, why) for i in numbers))

    async def _until_empty(self, i: int, why: Reason) -> None:
        while self._router.counts[i] and why in self._closed[i]:
            self._recall(i)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECALL_S):
                    await self._idle[i].wait()

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

    async def call(self, work: int, method: str, *args: Any, count: int = 1) -> Any:
        """Ask the least loaded; when it dies on that, another. With nobody left, wait until one is back."""
        need = _Need(0, next(self._arrivals), work, count, None)
        while True:
            async with self._place(need) as i:
                try:
                    return await self.replicas[i].call(method, *args)
                except RoleDied:
                    self._close(i, "dead")

    @contextlib.asynccontextmanager
    async def _place(self, need: _Need) -> AsyncIterator[int]:
        """A replica with room, when it is this one's turn. It counts as outstanding there until the block ends."""
        i = await self._turn(need)
        try:
            yield i
        finally:
            self._give_back(i, need)

    async def _turn(self, need: _Need) -> int:
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

    def _give_back(self, i: int, need: _Need) -> None:
        self._router.done(i, need.work, need.count)
        if not self._router.counts[i]:
            self._idle[i].set()
        self._pump()


class EnginePool(Pool):
    """Replicas of protocols.Engine."""

    def __init__(
        self,
        engines: Sequence[Handle],
        turn: tuple[int, int] = (0, 1),
        own: Collection[int] | None = None,
        limit: int | None = None,
        guest_limit: int | None = None,
    ) -> None:
        super().__init__(engines, turn, own, limit, guest_limit)
        self._name, self._numbering = uuid.uuid4().hex[:12], itertools.count()
        self._tickets: list[set[str]] = [set() for _ in engines]  # under way, by replica
        self._recalled: set[str] = set()  # those that were aborted by `drain`: they go on elsewhere
        self._aborts: set[asyncio.Future[Any]] = set()
        self._aborted_requests = self._aborted_tokens = 0  # of callers that were cancelled, since the last report
        self._num_calls = 0
        self._ended: deque[int] = deque(maxlen=REMEMBERED)  # lengths, since the last report
        self._longest: deque[int] = deque(maxlen=REMEMBERED)

    @classmethod
    def for_controller(
        cls, engines: Sequence[Handle], rank: int, size: int, max_concurrent: int, roam: bool = False
    ) -> EnginePool:
        """Engines always have a queue, but most of the waiting is done here, where priorities and moves act on it.

        `roam`: replicas come and go (placement), and so belong to nobody: each controller has its part of every one.
        """
        limit = SENT_PER_SLOT * max_concurrent
        if roam:
            return cls(engines, (rank, size), limit=-(-limit // size))
        own = own_replicas(rank, size, len(engines))
        return cls(engines, (rank, size), own, limit, guest_limit=max(1, max_concurrent // 2))

    async def generate(self, requests: Sequence[Request], priority: int = 0, key: Hashable = None) -> list[Completion]:
        """Completions in the order of the requests, which stay together while none is moved.

        Lower priorities go first, here and in the engine. Equal keys (of a prompt) go to one replica where that costs
        little: it has computed their prefix."""
        left = {n: r if r.priority == priority else replace(r, priority=priority) for n, r in enumerate(requests)}
        found: dict[int, Completion] = {}
        arrival = next(self._arrivals)
        self._num_calls += 1
        try:
            await self._complete(left, found, priority, arrival, key)
        finally:
            self._num_calls -= 1
        lengths = [found[n].content.num_steps for n in range(len(requests))]
        self._ended.extend(lengths)
        self._longest.append(max(lengths, default=0))
        return [found[n] for n in range(len(requests))]

    async def _complete(
        self, left: dict[int, Request], found: dict[int, Completion], priority: int, arrival: int, key: Hashable
    ) -> None:
        while left:
            work = sum(r.content.size + r.params.max_tokens for r in left.values())
            try:
                async with self._place(_Need(priority, arrival, work, len(left), key)) as i:
                    answers, moved = await self._ask(i, list(left.values()))
            except RoleDied:
                continue
            for (n, request), answer in zip(list(left.items()), answers, strict=True):
                piece = _ended(request, answer) if moved else answer
                found[n] = found[n].joined(piece) if n in found else piece
                if moved and piece.finish == "abort":
                    left[n] = request.after(piece)
                else:
                    del left[n]

    def report(self) -> dict[str, Any]:
        """For placement: what this controller has here, and the lengths that ended since it was asked last."""
        seen = self.observe()
        found = {
            "requests": sum(replica.requests for replica in seen.replicas),
            "waiting": seen.waiting,
            "calls": self._num_calls,
            "ended": tuple(self._ended),
            "longest": tuple(self._longest),
        }
        self._ended.clear()
        self._longest.clear()
        return found

    async def _ask(self, i: int, requests: list[Request]) -> tuple[list[Completion], bool]:
        """What the replica answers, and whether that is cut short because it is drained."""
        ticket = f"{self._name}-{next(self._numbering)}"
        self._tickets[i].add(ticket)
        answer = asyncio.ensure_future(self.replicas[i].call("generate", requests, ticket))
        try:
            return await asyncio.shield(answer), ticket in self._recalled
        except RoleDied:
            self._close(i, "dead")
            raise
        except asyncio.CancelledError:
            self._aborts.add(answer)
            answer.add_done_callback(self._count_aborted)
            self._abort(i, ticket)
            raise
        finally:
            self._tickets[i].discard(ticket)
            self._recalled.discard(ticket)

    def take_aborted(self) -> tuple[int, int]:
        """Tokens and requests of callers that were cancelled, since the last call."""
        aborted = self._aborted_tokens, self._aborted_requests
        self._aborted_tokens = self._aborted_requests = 0
        return aborted

    def _count_aborted(self, answer: asyncio.Future[list[Completion]]) -> None:
        self._aborts.discard(answer)
        if not answer.cancelled() and answer.exception() is None:
            self._aborted_requests += len(answer.result())
            self._aborted_tokens += sum(completion.content.num_steps for completion in answer.result())

    def _recall(self, i: int) -> None:
        for ticket in self._tickets[i]:
            self._recalled.add(ticket)
            self._abort(i, ticket)

    def _abort(self, i: int, ticket: str) -> None:
        """Nobody waits for it: a replica that keeps silent holds up nobody."""

        async def abort() -> None:
            with contextlib.suppress(RoleDied):  # that frees its slots too
                await self.replicas[i].call("abort", ticket)

        task = asyncio.ensure_future(abort())
        self._aborts.add(task)  # the loop holds tasks weakly
        task.add_done_callback(self._aborts.discard)


class ScorerPool(Pool):
    """Replicas of a scalar reward model."""

    async def score(self, tokens: Sequence[Ints]) -> list[float]:
        scores: list[float] = await self.call(sum(map(len, tokens)), "score", list(tokens), count=len(tokens))
        return scores


async def _answers(replica: Handle, timeout_s: float) -> bool | None:
    try:
        async with asyncio.timeout(timeout_s):
            await replica.call("stats")
    except TimeoutError:
        return False
    except RoleDied:  # the supervisor hears of it too, and buries it
        return None
    except RoleError:  # it speaks; what it says will end a request
        return True
    return True


def _ended(request: Request, piece: Completion) -> Completion:
    """An abort may arrive together with the last step: then the response is complete."""
    finish = piece.content.end(request.params) if piece.finish == "abort" else None
    return piece if finish is None else replace(piece, finish=finish)
