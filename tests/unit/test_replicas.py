"""A restarted engine: when its process may start, and which weights it gets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gcore.clients import EngineClient
from gcore.controller.replicas import Replicas, WeightResender
from gcore.generation.pool import EnginePool
from gcore.protocols import RoleDied


class Handle:
    """An engine process: records the weights that it is sent."""

    def __init__(self, name: str, dies: bool = False) -> None:
        self.name, self.dies = name, dies
        self.weights: dict[str, Any] = {}

    async def call(self, method: str, *args: Any) -> Any:
        assert method == "load_weights"
        if self.dies:
            raise RoleDied(self.name, "killed")
        version, weights, _ = args
        self.weights |= weights
        return version


def make_replicas(*handles: Handle, shares_devices: bool = False) -> tuple[Replicas, WeightResender, EnginePool]:
    pool = EnginePool([EngineClient(handle) for handle in handles])  # type: ignore[arg-type]
    resender = WeightResender([], lambda: 0)
    return Replicas(pool, [], resender, lambda text: None, shares_devices=shares_devices), resender, pool


def test_an_engine_on_the_trainers_devices_starts_while_the_trainer_does_not_work():
    async def main() -> None:
        replicas, resender, pool = make_replicas(Handle("engine-0"), Handle("engine-1"), shares_devices=True)
        lock = resender.trainers_in_use
        await lock.acquire()  # a training step
        await replicas.mark_dead("engine-0")
        waiting = asyncio.ensure_future(replicas.begin_restart("engine-0"))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        lock.release()
        await waiting
        assert lock.locked()  # the process starts now: the next training step waits
        await replicas.begin_restart("judge-0")  # has devices of its own
        assert await replicas.restore("engine-0") and not lock.locked()
        assert [*pool.alive()] == [0, 1]

    asyncio.run(main())


def test_an_engine_with_its_own_devices_starts_at_any_time():
    async def main() -> None:
        replicas, resender, _ = make_replicas(Handle("engine-0"))
        async with resender.trainers_in_use:
            await replicas.begin_restart("engine-0")
            restoring = asyncio.ensure_future(replicas.restore("engine-0"))
            await asyncio.sleep(0.01)
            assert not restoring.done()  # weights are sent between two uses of the trainers
        assert await restoring

    asyncio.run(main())


def test_an_engine_that_dies_again_gives_the_devices_back():
    async def main() -> None:
        replicas, resender, _ = make_replicas(Handle("engine-0", dies=True), shares_devices=True)
        resender._send_saved = lambda engines: engines[0].load_weights(0, {}, (0, 1))  # type: ignore[method-assign]
        await replicas.begin_restart("engine-0")
        assert not await replicas.restore("engine-0")
        assert not resender.trainers_in_use.locked()

    asyncio.run(main())


def test_an_engine_restarted_in_an_evaluation_gets_the_evaluated_weights(monkeypatch, tmp_path):
    saved = {"layer.weight": torch.arange(6.0).view(2, 3), "norm.weight": torch.ones(3)}
    files = SimpleNamespace(
        shapes=lambda folder: {name: tuple(t.shape) for name, t in saved.items()},
        read=lambda folder, names: {name: saved[name] for name in names},
    )
    monkeypatch.setattr("gcore.checkpoint.tensors.shapes", files.shapes)
    monkeypatch.setattr("gcore.checkpoint.tensors.read", files.read)

    async def main() -> None:
        handles = [Handle("engine-0"), Handle("engine-1")]
        replicas, resender, pool = make_replicas(*handles)
        await resender.load_saved(tmp_path, dict(enumerate(pool.replicas)))
        handles[1].weights.clear()  # a new process
        assert await replicas.restore("engine-1")
        for handle in handles:
            assert handle.weights.keys() == saved.keys()
            assert all(np.array_equal(handle.weights[name], saved[name].numpy()) for name in saved)

    asyncio.run(main())
