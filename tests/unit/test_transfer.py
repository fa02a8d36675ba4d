"""Weights from trainers to engines, with engines that die and lines that break on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gcore.protocols import RoleDied, RoleError
from gcore.weights.transfer import transfer

BROKEN = RoleError("engine-1", "LineError: weights stopped on their way", "")


class Ref:
    def __init__(self, trainer: Trainer, part: int) -> None:
        self.trainer, self.part = trainer, part

    def __await__(self) -> Any:
        yield from asyncio.sleep(0.01).__await__()
        self.trainer.log.append(f"sent {self.part}")
        return {}


class Trainer:
    """Two parts, from rank 0 alone."""

    name = "trainer-0"

    def __init__(self) -> None:
        self.log: list[Any] = []

    async def call(self, method: str, takers: list[str], fresh: bool) -> Any:
        assert method == "weight_parts"
        self.log.append((tuple(takers), fresh))
        return 2, False

    def submit(self, method: str, part: int) -> Ref:
        assert method == "weights"
        return Ref(self, part)


class Engine:
    """Answers as it is told, call by call; after that it takes everything."""

    def __init__(self, name: str, *answers: Any) -> None:
        self.name, self.answers, self.parts = name, list(answers), list[tuple[int, int]]()

    async def call(self, method: str, version: int, weights: Ref, part: tuple[int, int]) -> int:
        assert method == "load_weights"
        await weights
        self.parts.append(part)
        answer = self.answers.pop(0) if self.answers else version
        if isinstance(answer, Exception):
            raise answer
        return version if answer is None else answer


def run(*engines: Engine, fresh: bool = False) -> tuple[Trainer, list[str]]:
    trainer = Trainer()
    served = asyncio.run(transfer([trainer], dict(enumerate(engines)), 7, fresh))
    return trainer, served


def test_all_parts_to_all():
    trainer, served = run(Engine("engine-0"), Engine("engine-1"), fresh=True)
    assert served == ["engine-0", "engine-1"]
    assert trainer.log[0] == (("engine-0", "engine-1"), True)


def test_who_dies_is_left_out():
    trainer, served = run(Engine("engine-0"), Engine("engine-1", RoleDied("engine-1", "killed")))
    assert served == ["engine-0"] and len([entry for entry in trainer.log if isinstance(entry, tuple)]) == 1


def test_a_broken_line_is_made_anew_without_the_dead():
    left, gone = Engine("engine-0", BROKEN), Engine("engine-1", RoleDied("engine-1", "killed"))
    trainer, served = run(left, gone)
    assert served == ["engine-0"] and left.parts == [(0, 2), (0, 2), (1, 2)]
    first, again = (i for i, entry in enumerate(trainer.log) if isinstance(entry, tuple))
    assert trainer.log[again] == (("engine-0",), True)
    assert "sent 1" in trainer.log[first:again]  # of the first try nothing is under way in the second


def test_a_line_that_breaks_again_and_again_is_an_error():
    with pytest.raises(RoleError, match="weights stopped on their way"):
        run(Engine("engine-0", BROKEN, BROKEN, BROKEN))


def test_another_error_is_not_tried_again():
    engine = Engine("engine-0", RoleError("engine-0", "ValueError: weights were damaged", ""))
    with pytest.raises(RoleError, match="damaged"):
        run(engine)
    assert engine.parts == [(0, 2)]


def test_an_engine_that_stays_behind_is_named():
    with pytest.raises(RuntimeError, match="engine-1 did not take the weights of version 7"):
        run(Engine("engine-0"), Engine("engine-1", None, 6))
