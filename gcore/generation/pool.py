"""A controller's view of the replicas of one role: send a request where the least work is outstanding.

Which replica answers never changes what it answers (noise belongs to the sample), so routing is free to chase speed,
and what a replica was asked before it died is asked again elsewhere. A caller that is cancelled takes its requests
back: the replica's slots are free at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Sequence
from typing import Any

from gcore.protocols import Handle, RoleDied
from gcore.types import Completion, Ints, Request


class Pool:
    """Who has the least to do, among those alive. `first` is where ties start: controllers begin at different ones."""

    def __init__(self, replicas: Sequence[Handle], first: int) -> None:
        self.replicas = replicas
        self._order = [(i + first) % len(replicas) for i in range(len(replicas))]
        self._outstanding = [0] * len(replicas)  # tokens asked for and not yet answered
        self._dead: set[int] = set()
        self._returned = asyncio.Event()

    def bury(self, name: str) -> None:
        """A replica is gone: nothing is sent there until it is admitted again."""
        self._dead |= {i for i, replica in enumerate(self.replicas) if replica.name == name}

    def admit(self, name: str) -> None:
        self._dead -= {i for i, replica in enumerate(self.replicas) if replica.name == name}
        self._returned.set()

    def alive(self) -> dict[int, Handle]:
        return {i: replica for i, replica in enumerate(self.replicas) if i not in self._dead}

    async def call(self, work: int, method: str, *args: Any) -> Any:
        """Ask the least loaded; when it dies on that, another. With nobody left, wait until one is back."""
        while True:
            living = [i for i in self._order if i not in self._dead]
            if not living:
                self._returned.clear()
                await self._returned.wait()
                continue
            chosen = min(living, key=lambda i: self._outstanding[i])
            self._outstanding[chosen] += work
            try:
                return await self._ask(self.replicas[chosen], method, *args)
            except RoleDied:
                self._dead.add(chosen)
            finally:
                self._outstanding[chosen] -= work

    async def _ask(self, replica: Handle, method: str, *args: Any) -> Any:
        return await replica.call(method, *args)


class EnginePool(Pool):
    """Replicas of protocols.Engine."""

    def __init__(self, engines: Sequence[Handle], first: int) -> None:
        super().__init__(engines, first)
        self._name, self._tickets = uuid.uuid4().hex[:12], itertools.count()
        self._aborts: set[asyncio.Future[None]] = set()

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        work = sum(len(r.tokens_P) + r.params.max_tokens for r in requests)
        ticket = f"{self._name}-{next(self._tickets)}"
        completions: list[Completion] = await self.call(work, "generate", list(requests), ticket)
        return completions

    async def _ask(self, replica: Handle, method: str, *args: Any) -> Any:
        try:
            return await replica.call(method, *args)
        except asyncio.CancelledError:
            abort = asyncio.ensure_future(self._abort(replica, args[-1]))
            self._aborts.add(abort)  # the loop holds tasks weakly
            abort.add_done_callback(self._aborts.discard)
            raise

    async def _abort(self, replica: Handle, ticket: str) -> None:
        with contextlib.suppress(RoleDied):  # that frees its slots too
            await replica.call("abort", ticket)


class ScorerPool(Pool):
    """Replicas of a scalar reward model."""

    async def score(self, tokens: Sequence[Ints]) -> list[float]:
        scores: list[float] = await self.call(sum(map(len, tokens)), "score", list(tokens))
        return scores
