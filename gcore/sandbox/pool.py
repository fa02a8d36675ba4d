"""The sandboxes of one controller: of the kind that the recipe names, some of them started before they are needed.

settings ──> kind ──start──> waiting ──start──> a workflow ──stop──> its place is free
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from gcore.config.sandbox import SandboxSettings
from gcore.sandbox.base import Sandbox, Sandboxes
from gcore.types import UserError
from gcore.user_files import load_function

KINDS = {
    "bubblewrap": "gcore.sandbox.bubblewrap:BubblewrapSandboxes",
    "containers": "gcore.sandbox.containers:ContainerSandboxes",
}


def make_kind(settings: SandboxSettings) -> Sandboxes:
    """UserError if there is no such kind, or if it does not work on this machine."""
    path = KINDS.get(settings.kind, settings.kind)
    if ":" not in path:
        raise UserError(
            f"sandbox.kind={settings.kind}; expected one of {', '.join(KINDS)}, or your own class, file.py:NAME"
        )
    kind: Sandboxes = load_function(path, "sandbox.kind")(settings)
    if problem := kind.problem():
        raise UserError(f"sandbox.kind={settings.kind} does not work on this machine: {problem}")
    return kind


class SandboxPool:
    def __init__(self, settings: SandboxSettings, kind: Sandboxes) -> None:
        self.settings, self._kind = settings, kind
        self._places = asyncio.Semaphore(settings.at_once)
        self._waiting: deque[Sandbox] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._starting: set[asyncio.Task[Sandbox]] = set()

    @contextlib.asynccontextmanager
    async def one(self, folder: str | None = None) -> AsyncIterator[Sandbox]:
        """A sandbox for as long as this lasts. `folder`: its files are copied into the working folder."""
        async with self._places:
            box = await self._next()
            try:
                if folder is not None:
                    await box.put(folder)
                yield box
            finally:
                await asyncio.shield(box.stop())

    async def fill(self) -> None:
        while len(self._waiting) < self.settings.pool:
            self._waiting.append(await self._start())

    async def _start(self) -> Sandbox:
        """A start cannot be cancelled, because it happens in a thread: its sandbox then waits for another program."""
        task = asyncio.ensure_future(self._kind.start())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._keep)
            raise

    def _keep(self, started: asyncio.Task[Sandbox]) -> None:
        if started.exception() is None:
            self._waiting.append(started.result())

    async def close(self) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.sleep(0)  # they are among those that wait now
        while self._waiting:
            await self._waiting.popleft().stop()

    async def _next(self) -> Sandbox:
        box = None
        while self._waiting and box is None:
            box = self._waiting.popleft()
            if not box.alive:
                await box.stop()
                box = None
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self.fill())
            self._filling.add_done_callback(lambda task: task.cancelled() or task.exception())  # `start` says it
        return box or await self._start()
