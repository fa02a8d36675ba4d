"""A restarted engine: when its process may start, and which weights it gets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest
import torch

from gcore.checkpoint import store
from gcore.clients import EngineClient
from gcore.config.load import load_config
from gcore.config.tree import Config
from gcore.controller import start_run
from gcore.controller.checkpointing import Checkpointer
from gcore.controller.engine_weights import EngineWeights
from gcore.controller.replicas import Replicas
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


def make_replicas(*handles: Handle, shares_devices: bool = False) -> tuple[Replicas, EngineWeights, EnginePool]:
    pool = EnginePool([EngineClient(handle) for handle in handles])  # type: ignore[arg-type]
    weights = weights_of(pool)
    return Replicas(pool, [], weights, lambda text: None, shares_devices=shares_devices), weights, pool


def weights_of(pool: EnginePool) -> EngineWeights:
    return EngineWeights(LocalGroup(Rendezvous(0, 1, None, Hub(1))), pool, [])


def test_engines_on_the_trainers_devices_start_while_the_trainer_does_not_work():
    async def main() -> None:
        replicas, weights, pool = make_replicas(Handle("engine-0"), Handle("engine-1"), shares_devices=True)
        async with weights.training():
            await replicas.begin_restart("judge-0")  # has devices of its own
            for name in ("engine-0", "engine-1"):
                await replicas.mark_dead(name)
            starting = [asyncio.ensure_future(replicas.begin_restart(name)) for name in ("engine-0", "engine-1")]
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in starting)
        await asyncio.gather(*starting)  # both at the same time
        trained = asyncio.ensure_future(step(weights))
        assert await replicas.restore("engine-0")
        await asyncio.sleep(0.01)
        assert not trained.done()
        assert await replicas.restore("engine-1")
        await trained
        assert [*pool.alive()] == [0, 1]

    asyncio.run(main())


async def step(weights: EngineWeights) -> None:
    async with weights.training():
        pass


def test_an_engine_with_its_own_devices_starts_at_any_time():
    async def main() -> None:
        replicas, weights, _ = make_replicas(Handle("engine-0"))
        async with weights.training():
            await replicas.begin_restart("engine-0")
            restoring = asyncio.ensure_future(replicas.restore("engine-0"))
            await asyncio.sleep(0.01)
            assert not restoring.done()  # weights are sent between two uses of the trainers
        assert await restoring

    asyncio.run(main())


def test_the_transfer_of_each_step_knows_that_an_engine_is_another_process():
    replicas, weights, _ = make_replicas(Handle("engine-0"))
    asyncio.run(replicas.mark_dead("engine-0"))
    assert weights._transfer._unconnected == {"engine-0"}


class Trainers:
    """A dispatcher whose ranks have nothing to save."""

    def __init__(self, rank: int, started: list[int]) -> None:
        self.rank, self.started, self.topology = rank, started, {"controllers": 2}

    async def snapshot(self) -> int:
        self.started.append(self.rank)
        await asyncio.sleep(0.01)
        return 0

    my_ranks: ClassVar[list[Any]] = []


def make_checkpointer(config: Config, trainers: Trainers, hub: Hub, weights: EngineWeights) -> Checkpointer:
    group = LocalGroup(Rendezvous(trainers.rank, hub.size, None, hub))
    prompts = SimpleNamespace(place=lambda rate: {"base": 0, "rate": rate}, ready={})
    collector: Any = SimpleNamespace(prompts=prompts, rate=1.0, saved=dict)
    parts = {"dispatcher": trainers, "placement": SimpleNamespace(saved=dict), "weights": weights}
    parts |= {"pool": SimpleNamespace(replicas=())}
    status = LiveStatus(trainers.rank, Tracer(None, ""))
    services: Any = SimpleNamespace(config=config, controllers=group, status=status, collector=collector, **parts)
    return Checkpointer(services, MagicMock(digest=""))


def test_an_engine_gets_no_weights_while_the_trainer_saves(tmp_path):
    """Two collectives of the trainer ranks at the same time: each rank could start with another one."""

    async def main() -> None:
        replicas, weights, _ = make_replicas(Handle("engine-0"))
        started, config = list[int](), load_config(write_recipe(tmp_path), ["checkpoint.every=2"])
        checkpointer = make_checkpointer(config, Trainers(0, started), Hub(1), weights)
        saving = asyncio.ensure_future(checkpointer.save_if_due(2))
        while not started:
            await asyncio.sleep(0)
        restoring, order = asyncio.ensure_future(replicas.restore("engine-0")), list[str]()
        saving.add_done_callback(lambda _: order.append("saved"))
        restoring.add_done_callback(lambda _: order.append("restored"))
        await asyncio.gather(saving, restoring)
        assert order == ["saved", "restored"]
        async with weights.trainers_in_use:
            await checkpointer.save_if_due(3)  # none is due: the next rollout does not wait for a restart
        await checkpointer.close()

    asyncio.run(main())


def test_no_controller_saves_before_controller_0_may(tmp_path):
    """It may still send weights to a restarted engine, on all trainer ranks."""
    config, started = load_config(write_recipe(tmp_path), []), list[int]()

    async def main() -> None:
        hub, both = Hub(2), [weights_of(EnginePool([])) for _ in range(2)]
        first, second = (make_checkpointer(config, Trainers(r, started), hub, both[r]) for r in range(2))
        async with both[0].trainers_in_use:
            saving = [asyncio.ensure_future(each.save_if_due(config.run.steps)) for each in (first, second)]
            await asyncio.sleep(0.01)
            assert not started
        await asyncio.gather(*saving)
        await asyncio.gather(first.close(), second.close())
        assert sorted(started) == [0, 1] and [path.name for path in store.complete_checkpoints(config.run.folder)] == [
            "step_5"
        ]

    asyncio.run(main())


def test_an_engine_that_dies_again_gives_the_devices_back(saved, tmp_path):
    async def main() -> None:
        replicas, weights, _ = make_replicas(Handle("engine-0", dies=True), shares_devices=True)
        await weights.load_saved(tmp_path, {})
        await replicas.begin_restart("engine-0")
        assert not await replicas.restore("engine-0")
        await asyncio.wait_for(step(weights), 10)

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
        replicas, weights, pool = make_replicas(*handles)
        await weights.load_saved(tmp_path, dict(enumerate(pool.replicas)))
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
        replicas, weights, pool = make_replicas(*handles)
        config = MagicMock(run=SimpleNamespace(resume=str(tmp_path)))
        config.trains_on_answers.return_value = False
        group = LocalGroup(Rendezvous(0, 1, None, Hub(1)))
        parts = {"pool": pool, "weights": weights, "controllers": group}
        parts["agents"] = SimpleNamespace(endpoint=AsyncMock())
        await start_run.open_evaluation(SimpleNamespace(config=config, **parts))  # type: ignore[arg-type]
        assert [*pool.alive()] == [0] and handles[0].weights.keys() == saved.keys()
        handles[1].dies = False
        assert await replicas.restore("engine-1") and handles[1].weights.keys() == saved.keys()
        assert [*pool.alive()] == [0, 1]

    asyncio.run(main())
