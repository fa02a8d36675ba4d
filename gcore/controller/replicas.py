"""The replicas that a controller sends requests to; some of them die and are started again, and need current weights.

died ──mark_dead (all controllers)──> restarted ──restore (controller 0: current weights)──> mark_alive (all) ──> serves
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from gcore.clients import EngineClient, TrainerClient
from gcore.generation.pool import EnginePool
from gcore.protocols import ReplicaPool, RoleDied
from gcore.weights.transfer import WeightTransfer

CHECK_S = 30.0  # between two health checks
ANSWER_S = 20.0  # a replica that does not answer for longer gets no new requests until it does


class CurrentWeights:
    """The weights that the policy's engines serve, for engines that missed an update. Controller 0 sends them.

    `version`: of these weights. The lock `trainers_in_use` is held during every use of the trainers. An evaluation has
    no trainers and sends nothing."""

    def __init__(self, trainers: Sequence[TrainerClient], version: Callable[[], int]) -> None:
        self._trainers, self._version = trainers, version
        self._transfer = WeightTransfer(trainers)
        self.trainers_in_use = asyncio.Lock()

    async def load(self, engines: Mapping[int, EngineClient]) -> None:
        """To engines that wake during a rollout."""
        async with self.trainers_in_use:
            served = await self._transfer.send(engines, self._version())
        if missing := [engine.name for engine in engines.values() if engine.name not in served]:
            raise RoleDied(missing[0], "it took no weights")

    async def load_restarted(self, engines: Mapping[int, EngineClient]) -> bool:
        """To engines that were started again; the caller holds the lock. False: one of them died again."""
        if not engines or not self._trainers:
            return True
        served = await self._transfer.send(engines, self._version(), restarted=True)
        return all(engine.name in served for engine in engines.values())


class Slots(Protocol):
    """Where roles share devices: the slots of a replica, which may be moving or belong to another role."""

    def mark_dead(self, name: str) -> None: ...

    async def wait_for_move(self, name: str) -> None:
        """Wait for the end of a move of its slots."""
        ...

    def restarted(self, name: str) -> AbstractAsyncContextManager[bool | None]:
        """Its slots stay where they are until this ends. True: it owns them and serves; False: it sleeps; None: a move
        of them has begun, see `wait_for_move`."""
        ...

    def mark_alive(self, name: str) -> None: ...


class Replicas:
    """`slots`: None where every replica has devices of its own."""

    def __init__(
        self,
        policy: EnginePool,
        others: Sequence[ReplicaPool],
        weights: CurrentWeights,
        note: Callable[[str], None],
        slots: Slots | None = None,
    ) -> None:
        self._policy, self._weights = policy, weights
        self._pools: list[ReplicaPool] = [policy, *others]
        self._note, self._slots = note, slots

    async def mark_dead(self, name: str) -> None:
        for pool in self._pools:
            pool.mark_dead(name)
        if self._slots is not None:
            self._slots.mark_dead(name)

    async def restore(self, name: str) -> bool:
        """Controller 0: send current weights to a policy engine that was started again, between two uses of the
        trainers. If its slots are moving, wait for the end of the move; a replica that does not own its slots sleeps.

        It is admitted here under the same lock: the next update goes to the engines that controller 0 has admitted, and
        the driver's call of `mark_alive` on all controllers may come later."""
        trainers_in_use = self._weights.trainers_in_use
        if self._slots is None:
            takes_weights = any(engine.name == name for engine in self._policy.replicas)
            async with trainers_in_use if takes_weights else contextlib.nullcontext():  # judges take no weights
                return await self._renew(name)
        while True:
            await self._slots.wait_for_move(name)
            try:
                async with trainers_in_use, self._slots.restarted(name) as serves:
                    if serves is not None:
                        return await self._renew(name, serves)
            except RoleDied:
                return False

    async def _renew(self, name: str, serves: bool = True) -> bool:
        mine = {i: engine for i, engine in enumerate(self._policy.replicas) if engine.name == name}
        if serves and not await self._weights.load_restarted(mine):
            return False
        await self.mark_alive(name)
        return True

    async def mark_alive(self, name: str) -> None:
        for pool in self._pools:
            pool.mark_alive(name)
        if self._slots is not None:
            self._slots.mark_alive(name)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Health checks run in the background."""
        checks = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            checks.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            for changed in await asyncio.gather(*(pool.check(ANSWER_S) for pool in self._pools)):
                for name, answers in changed.items():
                    silent = f"has not answered for {ANSWER_S:.0f} s; it is sent nothing new until it does"
                    self._note(f"{name} {'answers again' if answers else silent}")
