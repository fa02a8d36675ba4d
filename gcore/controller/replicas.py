"""Handles replicas that die during a run, and checks the health of all replicas of engines, judges and scorers.

died ──mark_dead (all controllers)──> begin_restart (controller 0) ──> a new process is started
     ──restore (controller 0: current weights)──> mark_alive (all) ──> serves

The driver (driver/supervise.py) detects the death, restarts the process and makes these calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from gcore.clients import EngineClient, TrainerClient
from gcore.generation.pool import EnginePool
from gcore.protocols import ReplicaPool, RoleDied, Weights
from gcore.weights.transfer import WeightTransfer

CHECK_S = 30.0  # between two health checks
ANSWER_S = 20.0  # timeout of a health check; a replica that exceeds it gets no new requests until it answers


class SharedDevices:
    """Devices of the trainer and of engines that sleep while it works. A process that starts an engine allocates the
    engine's memory: either engines start, any number of them, or the trainer works."""

    def __init__(self) -> None:
        self._starting: Counter[str] = Counter()
        self._none_starts, self._trainer_rests = asyncio.Event(), asyncio.Event()
        self._none_starts.set()
        self._trainer_rests.set()

    async def begin_start(self, name: str) -> None:
        """Wait until the trainer rests. It waits for `end_start` then."""
        while not self._trainer_rests.is_set():
            await self._trainer_rests.wait()
        self._starting[name] += 1
        self._none_starts.clear()

    def end_start(self, name: str) -> None:
        """Without a `begin_start` of this name, nothing happens."""
        self._starting -= Counter([name])
        if not self._starting:
            self._none_starts.set()

    @contextlib.asynccontextmanager
    async def trainer_works(self) -> AsyncIterator[None]:
        while not self._none_starts.is_set():
            await self._none_starts.wait()
        self._trainer_rests.clear()
        try:
            yield
        finally:
            self._trainer_rests.set()


class WeightResender:
    """Sends the weights of the current version to engines that missed an update. Used by controller 0.

    Everything that changes the trainers' weights or copies them for a checkpoint holds the lock `trainers_in_use`. What
    also needs the memory of sleeping engines is inside `training`: the start of a run, and each step from its
    preparation on. These are two locks because a move of slots sends weights while engines start. An evaluation has
    no trainers; it sends the weights of `load_saved` again, if any."""

    def __init__(
        self, trainers: Sequence[TrainerClient], version: Callable[[], int], transfer: WeightTransfer | None = None
    ) -> None:
        """`transfer`: the one that sends the update of each step."""
        self._trainers, self._version = trainers, version
        self._transfer = transfer or WeightTransfer(trainers)
        self.mark_dead = self._transfer.mark_dead
        self._saved: Path | None = None  # weights of a checkpoint that is evaluated
        self.trainers_in_use, self.devices = asyncio.Lock(), SharedDevices()

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Context in which no engine starts on the trainer's devices, and none is sent weights again."""
        async with self.devices.trainer_works(), self.trainers_in_use:
            yield

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
            served = await self._transfer.send(engines, self._version())
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

    def has(self, name: str) -> bool:
        """The replica has slots."""
        ...

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
    policy's engines and all replicas with slots share theirs with the trainer, and sleep while it works."""

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
        self._pools: list[ReplicaPool] = [policy, *others]
        self._note, self._slots = note, slots

    async def mark_dead(self, name: str) -> None:
        self._weights.mark_dead(name)
        for pool in self._pools:
            pool.mark_dead(name)
        if self._slots is not None:
            self._slots.mark_dead(name)

    async def begin_restart(self, name: str) -> None:
        """On controller 0, before a new process of the replica is started: it allocates its memory as it starts. If it
        shares its devices with the trainer, the trainer waits until `restore`, or this waits for the trainer."""
        has_slots = self._slots is not None and self._slots.has(name)
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
