"""The weights of the policy's engines: the update after each step, and what engines get that missed one.

    update        all controllers; controller 0 wakes sleeping engines and sends: trainer ranks ──> engines
    load          a block of slots has moved to the policy: its engines get the current version
    load_restarted, load_saved      engines of new processes; in an evaluation the weights of a checkpoint

Only references pass through the controller: see weights/transfer.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from gcore.clients import EngineClient, TrainerClient
from gcore.generation.pool import EnginePool
from gcore.placement.replica_switch import ReplicaSwitch
from gcore.protocols import ControllerGroup, RoleDied, Weights
from gcore.weights.transfer import WeightTransfer


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


class EngineWeights:
    """`switch`: wakes engines for an update that sleep while the trainer works; None: they do not, or placement wakes
    them.

    Everything that changes the trainers' weights or copies them for a checkpoint holds the lock `trainers_in_use`. What
    also needs the memory of sleeping engines is inside `training`: the start of a run, and each step from its
    preparation on. These are two locks because a move of slots sends weights while engines start."""

    def __init__(
        self,
        group: ControllerGroup,
        engines: EnginePool,
        trainers: Sequence[TrainerClient],
        switch: ReplicaSwitch | None = None,
    ) -> None:
        self._group, self._engines, self._trainers, self._switch = group, engines, trainers, switch
        self._transfer = WeightTransfer(trainers)
        self.mark_dead = self._transfer.mark_dead
        self._saved: Path | None = None  # weights of a checkpoint that is evaluated
        self.version = 0  # that the engines serve
        self.trainers_in_use, self.devices = asyncio.Lock(), SharedDevices()

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Context in which no engine starts on the trainer's devices, and none is sent weights again."""
        async with self.devices.trainer_works(), self.trainers_in_use:
            yield

    async def update(self, version: int, engines: Mapping[int, EngineClient] | None = None) -> None:
        """Send new weights. `engines`: those that serve the next rollout; default: all. Returns on every controller
        when they serve `version`. The caller holds the lock."""
        missed: list[str] = []  # engines that died or could not be called: they do not have the weights
        if self._group.rank == 0 and self._engines.replicas:
            alive = self._engines.alive
            async with contextlib.nullcontext() if self._switch is None else self._switch.waking(alive):
                wanted = {i: e for i, e in alive().items() if engines is None or i in engines}
                served = await self._transfer.send(wanted, version)
                for engine in wanted.values():
                    if engine.name not in served:
                        self._engines.mark_dead(engine.name)
            missed = [engine.name for i, engine in enumerate(self._engines.replicas) if i not in alive()]
        for name in (await self._group.all_gather(f"weights of version {version}", missed))[0]:
            self._engines.mark_dead(name)  # until it is restarted
        self.version = version
        self._engines.resume()

    async def load(self, engines: Mapping[int, EngineClient]) -> None:
        """Send to engines that wake during a rollout."""
        async with self.trainers_in_use:
            served = await self._transfer.send(engines, self.version)
        if missing := [engine.name for engine in engines.values() if engine.name not in served]:
            raise RoleDied(missing[0], "it did not load the weights")

    async def load_restarted(self, engines: Mapping[int, EngineClient]) -> bool:
        """Send to restarted engines. The caller holds the lock. False: one of them died again."""
        if not engines:
            return True
        if self._trainers:
            served = await self._transfer.send(engines, self.version)
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
