"""The replicas that a controller sends requests to; some of them die and are started again.

died ──mark_dead (all controllers)──> restarted ──restore (controller 0: current weights)──> mark_alive (all) ──> serves
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from gcore.clients import EngineClient, TrainerClient
from gcore.controller.placement import Placement
from gcore.generation.pool import EnginePool
from gcore.protocols import ReplicaPool, RoleDied
from gcore.weights.transfer import WeightTransfer

CHECK_S = 30.0  # between two health checks
ANSWER_S = 20.0  # a replica that does not answer for longer gets no new requests until it does


class Replicas:
    """`version`: of the current weights. The lock `trainers_in_use` is held during every use of the trainers."""

    def __init__(
        self,
        policy: EnginePool,
        others: Sequence[ReplicaPool],
        trainers: Sequence[TrainerClient],
        version: Callable[[], int],
        note: Callable[[str], None],
    ) -> None:
        self._policy, self._trainers = policy, trainers
        self._pools: list[ReplicaPool] = [policy, *others]
        self._transfer = WeightTransfer(trainers)
        self._version, self._note = version, note
        self.placement: Placement | None = None
        self.trainers_in_use = asyncio.Lock()

    async def mark_dead(self, name: str) -> None:
        for pool in self._pools:
            pool.mark_dead(name)
        if self.placement is not None:
            self.placement.mark_dead(name)

    async def restore(self, name: str) -> bool:
        """Controller 0: send current weights to a policy engine that was started again, between two uses of the
        trainers. If its slots are moving, wait for the end of the move; a replica that does not own its slots sleeps.

        It is admitted here under the same lock: the next update goes to the engines that controller 0 has admitted, and
        the driver's call of `mark_alive` on all controllers may come later."""
        if self.placement is None:
            takes_weights = any(engine.name == name for engine in self._policy.replicas)
            async with self.trainers_in_use if takes_weights else contextlib.nullcontext():  # judges take no weights
                return await self._renew(name)
        while True:
            await self.placement.arrived(name)
            try:
                async with self.trainers_in_use, self.placement.returning(name) as serves:
                    if serves is not None:
                        return await self._renew(name, serves)
            except RoleDied:
                return False

    async def _renew(self, name: str, serves: bool = True) -> bool:
        mine = {i: engine for i, engine in enumerate(self._policy.replicas) if engine.name == name}
        needs_weights = serves and mine and self._trainers
        if needs_weights and name not in await self._transfer.send(mine, self._version(), restarted=True):
            return False
        await self.mark_alive(name)
        return True

    async def mark_alive(self, name: str) -> None:
        for pool in self._pools:
            pool.mark_alive(name)
        if self.placement is not None:
            self.placement.mark_alive(name)

    async def load(self, engines: Mapping[int, EngineClient]) -> None:
        """Controller 0: send current weights to policy engines that wake during a rollout."""
        async with self.trainers_in_use:
            served = await self._transfer.send(engines, self._version())
        if missing := [engine.name for engine in engines.values() if engine.name not in served]:
            raise RoleDied(missing[0], "it took no weights")

    async def watch(self) -> None:
        """Health checks, in the background during the whole run."""
        while True:
            await asyncio.sleep(CHECK_S)
            for changed in await asyncio.gather(*(pool.check(ANSWER_S) for pool in self._pools)):
                for name, answers in changed.items():
                    silent = f"has not answered for {ANSWER_S:.0f} s; it is sent nothing new until it does"
                    self._note(f"{name} {'answers again' if answers else silent}")
