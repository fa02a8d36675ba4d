"""A controller's pools of engines and of reward models. What a replica leaves unfinished continues at another one.

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
import itertools
import uuid
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any

from gcore.clients import EngineClient, ScorerClient
from gcore.generation.replica_pool import Need, Pool
from gcore.generation.routing import SENT_PER_SLOT, own_replicas
from gcore.protocols import RoleDied, RoleReport
from gcore.types import Completion, Ints, Request

REMEMBERED = 2048  # lengths between two reports


class _NotSent(Exception):
    """The replica was drained before the requests were sent."""


class EnginePool(Pool[EngineClient]):
    """Replicas of protocols.Engine. `role`: what placement calls them."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        turn: tuple[int, int] = (0, 1),
        own: Collection[int] | None = None,
        limit: int | None = None,
        guest_limit: int | None = None,
        role: str = "",
    ) -> None:
        super().__init__(engines, turn, own, limit, guest_limit)
        self.role = role
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
        cls,
        engines: Sequence[EngineClient],
        rank: int,
        size: int,
        max_concurrent: int,
        roam: bool = False,
        role: str = "",
    ) -> EnginePool:
        """Engines always have a queue, but most of the waiting is done here, where priorities and moves act on it.

        `roam`: replicas come and go (placement), and so belong to nobody: each controller has its part of every one.
        """
        limit = SENT_PER_SLOT * max_concurrent
        if roam:
            return cls(engines, (rank, size), limit=-(-limit // size), role=role)
        own = own_replicas(rank, size, len(engines))
        return cls(engines, (rank, size), own, limit, guest_limit=max(1, max_concurrent // 2), role=role)

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
                async with self._place(Need(priority, arrival, work, len(left), key)) as i:
                    answers, moved = await self._ask(i, list(left.values()))
            except (RoleDied, _NotSent):
                continue
            for (n, request), answer in zip(list(left.items()), answers, strict=True):
                piece = _ended(request, answer) if moved else answer
                found[n] = found[n].joined(piece) if n in found else piece
                if moved and piece.finish == "abort":
                    left[n] = request.after(piece)
                else:
                    del left[n]

    def report(self) -> RoleReport:
        """For placement, which adds the counters of replicas."""
        seen = self.observe()
        found = RoleReport(
            requests=sum(replica.requests for replica in seen.replicas),
            waiting=seen.waiting,
            calls=self._num_calls,
            ended=tuple(self._ended),
            longest=tuple(self._longest),
        )
        self._ended.clear()
        self._longest.clear()
        return found

    async def _ask(self, i: int, requests: list[Request]) -> tuple[list[Completion], bool]:
        """What the replica answers, and whether that is cut short because it is drained."""
        ticket = f"{self._name}-{next(self._numbering)}"
        self._tickets[i].add(ticket)

        async def generate() -> list[Completion]:
            if ticket in self._recalled:  # the replica may sleep by now
                raise _NotSent
            return await self.replicas[i].generate(requests, ticket)

        answer = asyncio.ensure_future(generate())
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
                await self.replicas[i].abort(ticket)

        task = asyncio.ensure_future(abort())
        self._aborts.add(task)  # the loop holds tasks weakly
        task.add_done_callback(self._aborts.discard)


class ScorerPool(Pool[ScorerClient]):
    """Replicas of protocols.Scorer."""

    async def score(self, tokens: Sequence[Ints]) -> list[float]:
        return await self._call(sum(map(len, tokens)), len(tokens), lambda scorer: scorer.score(list(tokens)))


def _ended(request: Request, piece: Completion) -> Completion:
    """An abort may arrive together with the last step: then the response is complete."""
    finish = piece.content.end(request.params) if piece.finish == "abort" else None
    return piece if finish is None else replace(piece, finish=finish)
