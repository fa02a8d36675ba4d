"""Handles replicas that die during a run, and checks the health of all replicas of engines, judges and scorers.

died ──mark_dead (all controllers)──> begin_restart (controller 0) ──> a new process is started
     ──restore (controller 0: current weights)──> mark_alive (all) ──> serves

The driver (controller/supervise.py) detects the death, restarts the process and makes these calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from gcore.clients import EngineClient, TrainerClient
from gcore.generation.pool import EnginePool
from gcore.protocols import ReplicaPool, RoleDied, Weights
from gcore.weights.transfer import WeightTransfer

CHECK_S = 30.0  # between two health checks
ANSWER_S = 20.0  # timeout of a health check; a replica that exceeds it gets no new requests until it answers


class WeightResender:
    """Sends the weights of the current version to engines that missed an update. Used by controller 0.

    Everything that changes the trainers' weights, copies them for a checkpoint or needs the engines' memory holds the
    lock `trainers_in_use`: the start of a run, each step from its preparation on, and each save. An evaluation has no
    trainers; it sends the weights of `load_saved` again, if any."""

    def __init__(self, trainers: Sequence[TrainerClient], version: Callable[[], int]) -> None:
        self._trainers, self._version = trainers, version
        self._transfer = WeightTransfer(trainers)
        self._saved: Path | None = None  # weights of a checkpoint that is evaluated
        self.trainers_in_use = asyncio.Lock()

    async def load(self, engines: Mapping[int, EngineClient]) -> None:
        """Send to engines that wake during a rollout."""
        async with self.trainers_in_use:
            served = await self._transfer.send(engines, self._version())
        if missing := [engine.name for engine in engines.values() if engine.name not in served]:
            raise RoleDied(missing[0], "it did not load the weights")

    async def load_restarted(self, engines: Mapping[int, EngineClient]) -> bool:
        """Send to restarted engines. The caller holds the lock. False: one of them died again."""
        if not engines:
            return True
        if self._trainers:
            served = await self._transfer.send(engines, self._version(), restarted=True)
        else:
            served = await self._send_saved(engines)
        return all(engine.name in served for engine in engines.values())

    async def load_saved(self, folder: Path, engines: Mapping[int, EngineClient]) -> list[str]:
        """For an evaluation: send the weights of a checkpoint. The caller holds the lock. Returns the names of the
        engines that have them: all but those that died."""
        self._saved = folder
        return await self._send_saved(engines)

    async def _send_saved(self, engines: Mapping[int, EngineClient]) -> list[str]:
        """One bucket in memory at a time."""
        alive = list(engines.values())
        if (folder := self._saved) is None:
            return [engine.name for engine in alive]
        import torch

        from gcore.checkpoint.tensors import read, shapes
        from gcore.weights.bucket import bucket_names

        async def load(engine: EngineClient, weights: Weights, bucket: tuple[int, int]) -> bool:
            try:
                await engine.load_weights(0, weights, bucket)
            except RoleDied:
                return False
            return True

        sizes = {name: torch.empty(shape, device="meta") for name, shape in shapes(folder).items()}
        buckets = bucket_names(sizes, torch.float32)
        for index, names in enumerate(buckets):
            weights = {name: t.numpy() for name, t in (await asyncio.to_thread(read, folder, names)).items()}
            loaded = await asyncio.gather(*(load(engine, weights, (index, len(buckets))) for engine in alive))
            alive = [engine for engine, has in zip(alive, loaded, strict=True) if has]
        return [engine.name for engine in alive]


class Slots(Protocol):
    """For roles that share devices: the slots of a replica. They can be moving, or belong to another role."""

    def mark_dead(self, name: str) -> None: ...

    async def wait_for_move(self, name: str) -> None:
        """Wait until no move of the replica's slots is in progress."""
        ...

    def restarted(self, name: str) -> AbstractAsyncContextManager[bool | None]:
        """Context in which the slots of the replica do not move. True: it owns them and serves; False: it sleeps;
        None: a move of the slots is in progress, call `wait_for_move` first."""
        ...

    def mark_alive(self, name: str) -> None: ...


class Replicas:
    """`slots`: None if every replica has its own devices, or shares them with the trainer alone. `shares_devices`: the
    policy's engines share theirs with the trainer, and sleep while it works."""

    def __init__(
        self,
        policy: EnginePool,
        others: Sequence[ReplicaPool],
        weights: WeightResender,
        note: Callable[[str], None],
        slots: Slots | None = None,
        shares_devices: bool = False,
    ) -> None:
        self._policy, self._weights, self._shares_devices = policy, weights, shares_devices
        self._starting: set[str] = set()  # engines that start now and for which the lock is held
        self._pools: list[ReplicaPool] = [policy, *others]
        self._note, self._slots = note, slots

    async def mark_dead(self, name: str) -> None:
        for pool in self._pools:
            pool.mark_dead(name)
        if self._slots is not None:
            self._slots.mark_dead(name)

    async def begin_restart(self, name: str) -> None:
        """On controller 0, before a new process of the replica is started. A policy engine that shares its devices
        with the trainer allocates its memory as it starts: the trainer waits until `restore`, or this waits for it."""
        if self._shares_devices and self._slots is None and self._takes_weights(name):
            await self._weights.trainers_in_use.acquire()
            self._starting.add(name)

    def _takes_weights(self, name: str) -> bool:
        return any(engine.name == name for engine in self._policy.replicas)

    async def restore(self, name: str) -> bool:
        """On controller 0: prepare a restarted replica. False: it died again.

        A policy engine gets the current weights, between two uses of the trainers. If its slots are moving, wait for
        the end of the move; a replica that does not own its slots stays asleep. The replica is marked alive under the
        same lock, because the next weight update goes only to engines that are alive on controller 0, and the driver
        may call `mark_alive` on all controllers later."""
        trainers_in_use = self._weights.trainers_in_use
        if name in self._starting:
            self._starting.discard(name)
            try:
                return await self._load_and_mark_alive(name)
            finally:
                trainers_in_use.release()
        if self._slots is None:
            async with trainers_in_use if self._takes_weights(name) else contextlib.nullcontext():
                return await self._load_and_mark_alive(name)
        while True:
            await self._slots.wait_for_move(name)
            try:
                async with trainers_in_use, self._slots.restarted(name) as serves:
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
        if self._slots is not None:
            self._slots.mark_alive(name)

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
