"""A controller's pools of engines and of reward models. Requests that a replica leaves unfinished continue on another.

    generate ──> queue (priority, then arrival) ──Router has room──> a replica ──> completions
                    ^                                                   │
                    └── whole requests, if the replica died; remaining tokens, if the replica is drained

The choice of the replica does not change the tokens (noise depends on the sample and the position in it), so routing
can optimize for speed alone. An interrupted response continues on another replica from the tokens it has. The embedded
and the emulated engine generate the same tokens as without the interruption; vLLM and SGLang draw the rest from the
same distribution with different noise. If a caller is cancelled, its requests are aborted and free their slots at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gcore.clients import EngineClient, ScorerClient
from gcore.generation.replica_pool import RECALL_S, Pool, QueueEntry, Reason
from gcore.generation.routing import limits_of, own_replicas, shared_limit
from gcore.observe.links import Links
from gcore.protocols import RoleDied, RoleReport
from gcore.types import Completion, Ints, Request

MAX_CALLS = 2048  # whose response lengths are held between two reports


class _NotSent(Exception):
    """The replica was drained before the requests were sent."""


class EnginePool(Pool[EngineClient]):
    """Replicas of protocols.Engine. `role`: their role name in placement."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        controller: tuple[int, int] = (0, 1),
        own: Collection[int] | None = None,
        limit: int | None = None,
        guest_limit: int | None = None,
        role: str = "",
        links: Links | None = None,
    ) -> None:
        super().__init__(engines, controller, own, limit, guest_limit)
        self.role, self.links = role, links or Links()
        self.cost_of: Callable[[int], float] = float  # of a sequence of this length, in tokens: the work of a request
        self._name, self._numbering = uuid.uuid4().hex[:12], itertools.count()
        self._tickets: list[set[str]] = [set() for _ in engines]  # in progress, by replica
        self._recalled: set[str] = set()  # aborted by `drain`; they continue on another replica
        self._aborts: set[asyncio.Future[Any]] = set()
        self._returning: list[set[asyncio.Future[Any]]] = [set() for _ in engines]  # of cancelled callers, by replica
        self._aborted_requests = self._aborted_tokens = 0  # of cancelled callers, since the last report
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
        own, links = None if roam else own_replicas(rank, size, len(engines), nodes), Links.of(rank, nodes)
        if own is None:
            limit = shared_limit(max_concurrent, size if roam else 1)
            return cls(engines, (rank, size), limit=limit, role=role, links=links)
        limits = limits_of(max_concurrent, per_call)
        return cls(engines, (rank, size), own, limits.own, limits.guest, role, links)

    async def generate(self, requests: Sequence[Request], priority: int = 0, key: Hashable = None) -> list[Completion]:
        """Completions in the order of the requests. The requests go to one replica together, unless it is drained.

        Lower priority values go first, here and in the engine. Calls with the same key (the prompt) go to the same
        replica, which has cached the prefix, unless its load is too high."""
        left = {n: r if r.priority == priority else replace(r, priority=priority) for n, r in enumerate(requests)}
        found: dict[int, Completion] = {}
        arrival = next(self._arrivals)
        self._num_calls += 1
        try:
            await self._complete(left, found, priority, arrival, key)
        finally:
            self._num_calls -= 1
        if requests:
            self._ended.append(tuple(found[n].content.num_steps for n in range(len(requests))))
        return [found[n] for n in range(len(requests))]

    async def _complete(
        self, left: dict[int, Request], found: dict[int, Completion], priority: int, arrival: int, key: Hashable
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
                found[n] = found[n].joined(piece) if n in found else piece
                if moved and piece.finish == "abort":
                    left[n] = request.after(piece)
                else:
                    del left[n]

    def report(self) -> RoleReport:
        """For placement, which adds the replicas' counters."""
        seen = self.observe()
        found = RoleReport(
            requests=sum(replica.requests for replica in seen.replicas),
            waiting=seen.waiting,
            calls=self._num_calls,
            ended=tuple(self._ended),
        )
        self._ended.clear()
        return found

    async def _generate_on(self, i: int, requests: list[Request]) -> tuple[list[Completion], bool]:
        """The replica's completions, and whether a drain interrupted them."""
        ticket = f"{self._name}-{next(self._numbering)}"
        self._tickets[i].add(ticket)
        sent = False

        async def generate() -> list[Completion]:
            nonlocal sent
            if ticket in self._recalled:  # the replica may be asleep already
                raise _NotSent
            sent = True
            self.links.add("requests", i, sum(r.content.nbytes for r in requests))
            answers = await self.replicas[i].generate(requests, ticket)
            self.links.add("responses", i, sum(answer.nbytes for answer in answers))
            return answers

        answer = asyncio.ensure_future(generate())
        try:
            return await asyncio.shield(answer), ticket in self._recalled
        except RoleDied:
            self._close(i, "dead")
            raise
        except asyncio.CancelledError:
            if not sent:
                answer.cancel()
                raise
            self._returning[i].add(answer)
            answer.add_done_callback(partial(self._count_aborted, i))
            self._abort(i, ticket, answer)
            raise
        finally:
            self._tickets[i].discard(ticket)
            self._recalled.discard(ticket)

    def take_aborted(self) -> tuple[int, int]:
        """Aborted tokens and requests of cancelled callers, since the last call."""
        aborted = self._aborted_tokens, self._aborted_requests
        self._aborted_tokens = self._aborted_requests = 0
        return aborted

    def _count_aborted(self, i: int, answer: asyncio.Future[list[Completion]]) -> None:
        self._returning[i].discard(answer)
        if not answer.cancelled() and answer.exception() is None:
            self._aborted_requests += len(answer.result())
            self._aborted_tokens += sum(completion.content.num_steps for completion in answer.result())

    async def _until_empty(self, i: int, why: Reason) -> None:
        """Also of requests of cancelled callers, which may still be on their way to a replica that will sleep."""
        await super()._until_empty(i, why)
        while self._returning[i] and why in self._closed[i]:
            await asyncio.wait(self._returning[i], timeout=RECALL_S)

    def _recall(self, i: int) -> None:
        for ticket in self._tickets[i]:
            self._recalled.add(ticket)
            self._abort(i, ticket)

    def _abort(self, i: int, ticket: str, answer: asyncio.Future[Any] | None = None) -> None:
        """Send the abort without waiting, so that a replica that does not respond blocks no caller. `answer`: repeat it
        until the requests are back."""

        async def abort() -> None:
            with contextlib.suppress(RoleDied):  # a dead replica has no slots to free
                await self.replicas[i].abort(ticket)
                while answer is not None and not (await asyncio.wait({answer}, timeout=RECALL_S))[0]:
                    await self.replicas[i].abort(ticket)

        task = asyncio.ensure_future(abort())
        self._aborts.add(task)  # the event loop holds only weak references to tasks
        task.add_done_callback(self._aborts.discard)


class ScorerPool(Pool[ScorerClient]):
    """Replicas of protocols.Scorer."""

    async def score(self, tokens: Sequence[Ints]) -> list[float]:
        return await self._call(sum(map(len, tokens)), len(tokens), lambda scorer: scorer.score(list(tokens)))


def _with_finish(request: Request, piece: Completion) -> Completion:
    """If an abort arrives together with the last step, the response is complete: correct its `finish`."""
    finish = piece.content.end(request.params) if piece.finish == "abort" else None
    return piece if finish is None else replace(piece, finish=finish)
