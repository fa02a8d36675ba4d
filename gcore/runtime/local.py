"""All roles in one process: roles are objects on one event loop, controllers are tasks. For debuggers and fast tests.

The same program as under Ray, with direct calls instead of RPC: a breakpoint stops the whole run.
"""

from __future__ import annotations

import asyncio
import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gcore.protocols import Rendezvous, RoleError
from gcore.runtime.protocol import Runtime

T = TypeVar("T")


class LocalHandle:
    def __init__(self, name: str, role: Any) -> None:
        self.name, self.role = name, role

    def submit(self, method: str, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.call(method, *args))

    async def call(self, method: str, *args: Any) -> Any:
        values = [await arg if isinstance(arg, asyncio.Future) else arg for arg in args]
        try:
            return await getattr(self.role, method)(*values)
        except (RoleError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise RoleError.of(self.name, error, traceback.format_exc()) from error


class LocalRuntime(Runtime):
    def __init__(self) -> None:
        self._roles: list[Any] = []

    async def start_group(
        self, kind: str, factory: Callable[..., Any], args: Sequence[tuple[Any, ...]]
    ) -> list[LocalHandle]:
        hub = Hub(len(args))
        handles = []
        for rank, arguments in enumerate(args):
            name = f"{kind}-{rank}"
            try:
                role = factory(*arguments, Rendezvous(rank, len(args), None, hub))
            except Exception as error:
                raise RoleError.of(name, error, traceback.format_exc()) from error
            self._roles.append(role)
            handles.append(LocalHandle(name, role))
        return handles

    async def watch(self) -> None:
        await asyncio.Event().wait()

    def stop(self) -> None:
        for role in reversed(self._roles):
            close = getattr(role, "close", None)
            if close:
                close()
        self._roles.clear()


class Hub:
    """Exchanges the values of a collective among the controllers of one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._rounds: dict[tuple[int, int], tuple[dict[int, Any], asyncio.Event]] = {}

    async def exchange(self, key: tuple[int, int], rank: int, value: Any) -> list[Any]:
        values, full = self._rounds.setdefault(key, ({}, asyncio.Event()))
        values[rank] = value
        if len(values) == self.size:
            self._rounds.pop(key)
            full.set()
        await full.wait()
        return [values[r] for r in range(self.size)]


class LocalGroup:
    """Implements protocols.ControllerGroup among tasks of one event loop."""

    def __init__(self, rendezvous: Rendezvous, number: int = 0) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self._rendezvous, self._hub, self._number = rendezvous, rendezvous.hub, number
        self._round = self._num_subgroups = 0

    async def all_gather(self, name: str, value: Any) -> list[Any]:
        self._round += 1
        values: list[Any] = await self._hub.exchange((self._number, self._round), self.rank, value)
        return values

    async def reduce(self, name: str, value: T, merge: Callable[[T, T], T]) -> T:
        return functools.reduce(merge, await self.all_gather(name, value))

    async def barrier(self, name: str) -> None:
        await self.all_gather(name, None)

    def subgroup(self) -> LocalGroup:
        assert self._number == 0, "only the first group can make subgroups"
        self._num_subgroups += 1
        return LocalGroup(self._rendezvous, self._num_subgroups)
