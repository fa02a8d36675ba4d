"""An on/off switch for the engine replicas of one role: puts them to sleep, wakes them, and keeps the state of each.

    awake ──sleep: wait for aborted requests to end, free memory──> asleep ──wake──> awake
                                     a command that fails or is cancelled ──> unknown, until the next command

Runs without placement have one switch, for the policy (controller/engine_weights.py). With placement there is one per
role (placer.py). Only controller 0 gives commands.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from gcore.clients import EngineClient
from gcore.protocols import MemoryChange, RoleDied

IDLE_POLL_S = 0.005
LoadWeights = Callable[[Mapping[int, EngineClient]], Awaitable[object]]  # current weights into these engines


class SwitchedReplica:
    """One replica and its state. Callers of `sleep` or `wake` must hold `lock`: one command at a time."""

    def __init__(self, client: EngineClient, level: int) -> None:
        self.client, self._level = client, level
        self.awake: bool | None = True  # engines start awake; None: unknown, or a command is in progress
        self.lock = asyncio.Lock()

    async def sleep(self) -> MemoryChange:
        return await self._command(self.client.sleep(self._level), then=False)

    async def wake(self, *tags: str) -> MemoryChange:
        """Without its KV cache a replica cannot serve, so its state stays unknown."""
        return await self._command(self.client.wake(*tags), then=True if not tags or "kv_cache" in tags else None)

    async def _command(self, command: Awaitable[MemoryChange], then: bool | None) -> MemoryChange:
        self.awake = None
        try:
            change = await command
        except RoleDied:
            self.awake = True  # it will be restarted, awake
            raise
        self.awake = then
        return change


class ReplicaSwitch:
    """`level`: see Engine.sleep. `load`: loads the current weights into replicas that wake during a rollout; None for
    judges, which keep their weights.

    A command runs on all given replicas in parallel. The first error is raised after all have ended. With `skip_dead`,
    the death of a replica is no error: the driver restarts it. `on_death`: gets the name of a replica that died. It may
    be alive, if only the command or the answer was lost: then its sleep state is unknown.
    """

    def __init__(
        self,
        replicas: Sequence[EngineClient],
        level: int,
        load: LoadWeights | None = None,
        on_death: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.replicas = [SwitchedReplica(client, level) for client in replicas]
        self._load, self._on_death = load, on_death
        self.metrics: dict[str, float] = {}  # of the last sleep and of the last wake in two stages

    def maybe_awake(self) -> set[int]:
        return {i for i, replica in enumerate(self.replicas) if replica.awake is not False}

    def maybe_asleep(self) -> set[int]:
        return {i for i, replica in enumerate(self.replicas) if replica.awake is not True}

    def mark_dead(self, number: int) -> None:
        """The replica will be restarted, awake."""
        self.replicas[number].awake = True

    async def sleep(self, numbers: Collection[int], *, skip_dead: bool = False) -> None:
        """An engine refuses to sleep while it has requests, so first wait until the aborted ones have ended."""

        async def sleep(replica: SwitchedReplica) -> MemoryChange:
            while (stats := await replica.client.stats()).running + stats.waiting:
                await asyncio.sleep(IDLE_POLL_S)
            async with replica.lock:
                return await replica.sleep()

        self._measure("sleep", await self._all(numbers, sleep, skip_dead))

    async def wake(self, numbers: Collection[int], *tags: str, skip_dead: bool = False) -> list[MemoryChange]:
        async def wake(replica: SwitchedReplica) -> MemoryChange:
            async with replica.lock:
                return await replica.wake(*tags)

        return await self._all(numbers, wake, skip_dead)

    async def wake_with_weights(self, numbers: Collection[int]) -> None:
        """Wake, and load the current weights if the role is trained."""
        await self.wake(numbers)
        if self._load is None:
            return
        replicas = {i: self.replicas[i] for i in numbers}
        for replica in replicas.values():
            replica.awake = None
        await self._load({i: replica.client for i, replica in replicas.items()})
        for replica in replicas.values():
            replica.awake = True

    @contextlib.asynccontextmanager
    async def waking(self, alive: Callable[[], Iterable[int]]) -> AsyncIterator[None]:
        """Wake replicas in two stages: first memory for the weights, which the `with` body loads; then memory for the
        KV cache, after the transfer buffers are freed. `alive`: the replicas that are alive, at each stage."""
        for_weights = self.maybe_asleep().intersection(alive())
        self._measure("wake_weights", await self.wake(for_weights, "weights", skip_dead=True))
        yield
        for_cache = self.maybe_asleep().intersection(alive())
        self._measure("wake_cache", await self.wake(for_cache, "kv_cache", skip_dead=True))

    async def _all(
        self, numbers: Collection[int], command: Callable[[SwitchedReplica], Awaitable[MemoryChange]], skip_dead: bool
    ) -> list[MemoryChange]:
        replicas = [self.replicas[i] for i in sorted(numbers)]
        results = await asyncio.gather(*map(command, replicas), return_exceptions=True)
        changes = []
        for replica, result in zip(replicas, results, strict=True):
            if isinstance(result, RoleDied):
                self._on_death(replica.client.name)
        for result in results:
            if not isinstance(result, BaseException):
                changes.append(result)
            elif not (skip_dead and isinstance(result, RoleDied)):
                raise result
        return changes

    def _measure(self, name: str, changes: Sequence[MemoryChange]) -> None:
        """The maximum over replicas: seconds, and gigabytes per replica."""
        if changes:
            self.metrics[f"placement/{name}_s"] = max(change.seconds for change in changes)
            self.metrics[f"placement/{name}_gb"] = max(change.gigabytes for change in changes)
