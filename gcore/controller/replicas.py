"""Handles replicas that die during a run, and checks the health of all replicas of engines, judges and scorers.

died ──mark_dead (all controllers)──> begin_restart (controller 0) ──> a new process is started
     ──restore (controller 0: current weights)──> mark_alive (all) ──> serves

The driver (driver/heal.py) detects the death, restarts the process and makes these calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from gcore.controller.engine_weights import EngineWeights
from gcore.generation.pool import EnginePool
from gcore.placement.placer import Placer
from gcore.protocols import ReplicaPool, RoleDied

CHECK_S = 30.0  # between two health checks
ANSWER_S = 20.0  # timeout of a health check; a replica that exceeds it gets no new requests until it answers


class Replicas:
    """`placer`: of the slots that roles share; None: every replica has its own devices, or shares them with the trainer
    alone. `shares_devices`: the policy's engines and all replicas with slots share theirs with the trainer, and sleep
    while it works."""

    def __init__(
        self,
        policy: EnginePool,
        others: Sequence[ReplicaPool],
        weights: EngineWeights,
        note: Callable[[str], None],
        placer: Placer | None = None,
        shares_devices: bool = False,
    ) -> None:
        self._policy, self._weights, self._shares_devices = policy, weights, shares_devices
        self._pools: list[ReplicaPool] = [policy, *others]
        self._note, self._placer = note, placer

    async def mark_dead(self, name: str) -> None:
        self._weights.mark_dead(name)
        for pool in self._pools:
            pool.mark_dead(name)
        if self._placer is not None:
            self._placer.mark_dead(name)

    async def begin_restart(self, name: str) -> None:
        """On controller 0, before a new process of the replica is started: it allocates its memory as it starts. If it
        shares its devices with the trainer, the trainer waits until `restore`, or this waits for the trainer."""
        has_slots = self._placer is not None and self._placer.has(name)
        if self._shares_devices and (has_slots or self._takes_weights(name)):
            await self._weights.devices.begin_start(name)

    def _takes_weights(self, name: str) -> bool:
        return any(engine.name == name for engine in self._policy.replicas)

    async def restore(self, name: str) -> bool:
        """On controller 0: prepare a restarted replica. False: it died again.

        A policy engine gets the current weights, between two uses of the trainers. If its slots are moving, wait for
        the end of the move; a replica that does not own its slots stays asleep. The replica is marked alive under the
        same lock, because the next weight update goes only to engines that are alive on controller 0, and the driver
        may call `mark_alive` on all controllers later."""
        try:
            return await self._restore(name)
        finally:
            self._weights.devices.end_start(name)

    async def _restore(self, name: str) -> bool:
        trainers_in_use = self._weights.trainers_in_use
        if self._placer is None:
            async with trainers_in_use if self._takes_weights(name) else contextlib.nullcontext():
                return await self._load_and_mark_alive(name)
        while True:
            await self._placer.wait_for_move(name)
            try:
                async with trainers_in_use, self._placer.restarted(name) as serves:
                    if serves is not None:
                        return await self._load_and_mark_alive(name, serves)
            except RoleDied:
                return False

    async def _load_and_mark_alive(self, name: str, serves: bool = True) -> bool:
        mine = {i: engine for i, engine in enumerate(self._policy.replicas) if engine.name == name}
        if serves and not await self._weights.load_restarted(mine):
            return False
        await self.mark_alive(name)
        return True

    async def mark_alive(self, name: str) -> None:
        for pool in self._pools:
            pool.mark_alive(name)
        if self._placer is not None:
            self._placer.mark_alive(name)

    def unreachable(self) -> dict[str, str]:
        """For the driver: it restarts replicas that are alive but that this controller cannot call."""
        return {name: why for pool in self._pools for name, why in pool.unreachable().items()}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which health checks run in the background."""
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
                    no_answer = f"has not answered for {ANSWER_S:.0f} s; it gets no new requests until it answers"
                    self._note(f"{name} {'answers again' if answers else no_answer}")
