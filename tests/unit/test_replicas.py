"""A restarted engine: when its process may start, and which weights it gets."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from gcore.checkpoint import store
from gcore.clients import EngineClient
from gcore.config import load_config
from gcore.controller import loop, start_run
from gcore.controller.checkpointing import Checkpointer, RunPosition
from gcore.controller.replicas import Replicas, WeightResender
from gcore.controller.status import LiveStatus
from gcore.generation.pool import EnginePool
from gcore.observe.trace import Tracer
from gcore.protocols import Rendezvous, RoleDied
from gcore.runtime.local import Hub, LocalGroup
from tests.e2e.helpers import write_recipe


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


def test_an_engine_gets_no_weights_while_the_trainer_saves(monkeypatch):
    """Two collectives of the trainer ranks at the same time: each rank could start with another one."""

    async def main() -> None:
        replicas, resender, _ = make_replicas(Handle("engine-0"))
        seen = list[bool]()

        async def save_if_due(step: int, score: float | None) -> None:
            restoring = asyncio.ensure_future(replicas.restore("engine-0"))
            await asyncio.sleep(0.01)
            seen.append(restoring.done())

        async def nothing(*args: Any) -> Any:
            return (), ()

        async def open_run(setup: Any) -> tuple[Any, int]:
            return services, 0

        services = SimpleNamespace(
            config=SimpleNamespace(run=SimpleNamespace(steps=1)),
            status=SimpleNamespace(timed=lambda name, step: contextlib.nullcontext()),
            weight_resender=resender,
            recorder=SimpleNamespace(record_step=nothing),
            evaluator=SimpleNamespace(evaluate_if_due=nothing),
            checkpointer=SimpleNamespace(save_if_due=save_if_due),
            close=nothing,
        )
        monkeypatch.setattr(loop, "open_run", open_run)
        for stage in ("rollout", "prepare", "train", "update_weights"):
            monkeypatch.setattr(loop, stage, nothing)
        await loop.Controller(SimpleNamespace(replicas=replicas)).run()  # type: ignore[arg-type]
        assert seen == [False]

    asyncio.run(main())


def test_no_controller_saves_before_controller_0_may(tmp_path):
    """It may still send weights to a restarted engine, on all trainer ranks."""
    config, started = load_config(write_recipe(tmp_path), [f"run.dir={tmp_path}", "run.name=saved"]), list[int]()

    class Trainers:
        def __init__(self, rank: int) -> None:
            self.rank, self.topology = rank, {"controllers": 2}

        async def snapshot(self) -> int:
            started.append(self.rank)
            return 0

        async def write(self, folder: Path) -> list[Any]:
            return []

    def checkpointer(rank: int, hub: Hub) -> Checkpointer:
        status = LiveStatus(rank, Tracer(None, ""))
        place = {"base": 0, "rate": 1.0}
        collector: Any = SimpleNamespace(place=lambda: place, ready={}, saved=dict)
        source: Any = MagicMock(digest="")
        group = LocalGroup(Rendezvous(rank, 2, None, hub))
        parts = {"dispatcher": Trainers(rank), "placement": SimpleNamespace(saved=dict)}
        setup: Any = SimpleNamespace(config=config, controllers=group, status=status, **parts)
        return Checkpointer(setup, source, collector)

    async def main() -> None:
        hub = Hub(2)
        first, second = (checkpointer(rank, hub) for rank in range(2))
        saving = asyncio.ensure_future(second.save(RunPosition(1, warmed=None)))
        await asyncio.sleep(0.01)
        assert not started
        await asyncio.gather(saving, first.save(RunPosition(1, warmed=None)))
        await asyncio.gather(first.close(), second.close())
        assert sorted(started) == [0, 1] and [path.name for path in store.complete(config.run.folder)] == ["step_1"]

    asyncio.run(main())


def test_an_engine_that_dies_again_gives_the_devices_back(saved, tmp_path):
    async def main() -> None:
        replicas, resender, _ = make_replicas(Handle("engine-0", dies=True), shares_devices=True)
        await resender.load_saved(tmp_path, {})
        await replicas.begin_restart("engine-0")
        assert not await replicas.restore("engine-0")
        assert not resender.trainers_in_use.locked()

    asyncio.run(main())


@pytest.fixture
def saved(monkeypatch) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint."""
    found = {"layer.weight": torch.arange(6.0).view(2, 3), "norm.weight": torch.ones(3)}
    files = SimpleNamespace(
        shapes=lambda folder: {name: tuple(t.shape) for name, t in found.items()},
        read=lambda folder, names: {name: found[name] for name in names},
    )
    monkeypatch.setattr("gcore.checkpoint.tensors.shapes", files.shapes)
    monkeypatch.setattr("gcore.checkpoint.tensors.read", files.read)
    return found


def test_an_engine_restarted_in_an_evaluation_gets_the_evaluated_weights(saved, tmp_path):
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


def test_an_engine_that_is_dead_when_an_evaluation_starts(saved, monkeypatch, tmp_path):
    """The evaluation starts without it. It gets the weights and serves when it is restarted."""

    async def no_prompts(setup: Any) -> tuple[None, dict[str, Any]]:
        return None, {}

    monkeypatch.setattr(start_run, "_load_prompts", no_prompts)
    monkeypatch.setattr(start_run, "Evaluator", MagicMock())
    monkeypatch.setattr(start_run, "Recorder", MagicMock())

    async def main() -> None:
        handles = [Handle("engine-0"), Handle("engine-1", dies=True)]
        replicas, resender, pool = make_replicas(*handles)
        config = MagicMock(run=SimpleNamespace(resume=str(tmp_path)))
        config.trains_on_answers.return_value = False
        group = LocalGroup(Rendezvous(0, 1, None, Hub(1)))
        parts = {"pool": pool, "weight_resender": resender, "controllers": group}
        await start_run.open_evaluation(SimpleNamespace(config=config, **parts))  # type: ignore[arg-type]
        assert [*pool.alive()] == [0] and handles[0].weights.keys() == saved.keys()
        handles[1].dies = False
        assert await replicas.restore("engine-1") and handles[1].weights.keys() == saved.keys()
        assert [*pool.alive()] == [0, 1]

    asyncio.run(main())
