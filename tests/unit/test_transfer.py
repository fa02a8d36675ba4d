"""WeightTransfer: trainers to engines, with engines that die and broadcasts that fail during the transfer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gcore.clients import EngineClient, TrainerClient
from gcore.protocols import Receivers, RoleDied, RoleError, WeightPlan
from gcore.weights.broadcast import BroadcastError
from gcore.weights.transfer import WeightTransfer

BROKEN = RoleError.of("engine-1", BroadcastError("the broadcast of weights failed"), "")


class Ref:
    def __init__(self, trainer: Trainer, index: int) -> None:
        self.trainer, self.index = trainer, index

    def __await__(self) -> Any:
        yield from asyncio.sleep(0.01).__await__()
        self.trainer.log.append(f"sent {self.index}")
        return {}


class Trainer:
    """Two buckets, from rank 0 alone."""

    name = "trainer-0"

    def __init__(self) -> None:
        self.log: list[Any] = []

    async def call(self, method: str) -> WeightPlan:
        assert method == "weight_plan"
        self.log.append("plan")
        return WeightPlan(2, every_rank=False)

    def submit(self, method: str, index: int, receivers: Receivers) -> Ref:
        assert method == "weight_bucket"
        if index == 0:
            self.log.append(receivers)
        return Ref(self, index)

    @property
    def receivers(self) -> list[Receivers]:
        return [entry for entry in self.log if isinstance(entry, Receivers)]


class Engine:
    """Gives the answers in the list, one per call; after them it loads everything."""

    def __init__(self, name: str, *answers: Any) -> None:
        self.name, self.answers, self.buckets = name, list(answers), list[tuple[int, int]]()

    async def call(self, method: str, version: int, weights: Ref, bucket: tuple[int, int]) -> int:
        assert method == "load_weights"
        await weights
        self.buckets.append(bucket)
        answer = self.answers.pop(0) if self.answers else version
        if isinstance(answer, BaseException):
            raise answer
        return version if answer is None else answer


def run(*engines: Engine) -> tuple[Trainer, list[str]]:
    trainer = Trainer()
    return trainer, send(WeightTransfer([TrainerClient(trainer)]), *engines)


def send(transfer: WeightTransfer, *engines: Engine) -> list[str]:
    return asyncio.run(transfer.send({i: EngineClient(engine) for i, engine in enumerate(engines)}, 7))


def test_all_buckets_to_all_engines():
    trainer, served = run(Engine("engine-0"), Engine("engine-1"))
    assert served == ["engine-0", "engine-1"]
    assert trainer.receivers == [Receivers(("engine-0", "engine-1"))]


def test_the_next_update_of_a_restarted_engine_needs_a_new_group():
    """Also if it slept when it was restarted, and got no weights then."""
    trainer, engines = Trainer(), [Engine("engine-0"), Engine("engine-1")]
    transfer = WeightTransfer([TrainerClient(trainer)])
    send(transfer, *engines)
    transfer.mark_dead("engine-1")
    for others in (engines[:1], engines, engines):
        send(transfer, *others)
    assert [receivers.restarted for receivers in trainer.receivers] == [False, False, True, False]


def test_a_restarted_engine_that_dies_again_needs_a_new_group_again():
    trainer, dead = Trainer(), Engine("engine-1", RoleDied("engine-1", "killed"))
    transfer = WeightTransfer([TrainerClient(trainer)])
    transfer.mark_dead("engine-1")
    assert send(transfer, Engine("engine-0"), dead) == ["engine-0"]
    send(transfer, Engine("engine-0"), Engine("engine-1"))
    assert [receivers.restarted for receivers in trainer.receivers] == [True, True]


@pytest.mark.parametrize("error", [BROKEN, asyncio.CancelledError()])
def test_the_update_after_a_failed_one_needs_a_new_group(error):
    """Broadcasts of the failed update may still be in progress in the old one."""
    trainer = Trainer()
    transfer = WeightTransfer([TrainerClient(trainer)])
    send(transfer, Engine("engine-0"))
    with pytest.raises(type(error)):
        send(transfer, Engine("engine-0", error, error, error))
    send(transfer, Engine("engine-0"))
    assert trainer.receivers[1] == Receivers(("engine-0",)) and trainer.receivers[-1].restarted


def test_the_plan_is_asked_for_once():
    trainer = Trainer()
    transfer = WeightTransfer([TrainerClient(trainer)])
    for version in (7, 8):
        assert asyncio.run(transfer.send({0: EngineClient(Engine("engine-0"))}, version)) == ["engine-0"]
    assert trainer.log.count("plan") == 1 and trainer.receivers == [Receivers(("engine-0",))] * 2


def test_an_engine_that_dies_is_left_out():
    trainer, served = run(Engine("engine-0"), Engine("engine-1", RoleDied("engine-1", "killed")))
    assert served == ["engine-0"] and len(trainer.receivers) == 1


def test_a_failed_broadcast_is_repeated_without_the_dead_engine():
    left, gone = Engine("engine-0", BROKEN), Engine("engine-1", RoleDied("engine-1", "killed"))
    trainer, served = run(left, gone)
    assert served == ["engine-0"] and left.buckets == [(0, 2), (0, 2), (1, 2)]
    first, again = (i for i, entry in enumerate(trainer.log) if isinstance(entry, Receivers))
    assert trainer.log[again] == Receivers(("engine-0",), restarted=True)
    assert "sent 1" in trainer.log[first:again]  # nothing of the first attempt is in flight in the second


def test_a_broadcast_that_fails_three_times_is_an_error():
    with pytest.raises(RoleError, match="the broadcast of weights failed"):
        run(Engine("engine-0", BROKEN, BROKEN, BROKEN))


def test_other_errors_are_not_retried():
    engine = Engine("engine-0", RoleError("engine-0", "ValueError: weights were damaged", ""))
    with pytest.raises(RoleError, match="damaged"):
        run(engine)
    assert engine.buckets == [(0, 2)]


def test_an_engine_that_serves_an_old_version_is_named():
    with pytest.raises(RuntimeError, match="engine-1 did not load the weights of version 7"):
        run(Engine("engine-0"), Engine("engine-1", None, 6))
