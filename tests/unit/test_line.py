"""Weights over a line between processes: what arrives, who is missing, and the next line after a broken one."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from gcore import line
from gcore.line import LineError, Note, Sender, receive

CPU = torch.device("cpu")


def numbers(count: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int64).to(torch.uint8)


def taker(notes: Any, answers: Any, timeout_s: float) -> None:
    """A process that receives what it is told of."""
    line.TIMEOUT_S = timeout_s
    answers.put("ready")
    while (note := notes.get()) is not None:
        try:
            answers.put(receive(note).tolist())
        except LineError as error:
            answers.put(str(error))


class Takers:
    def __init__(self, count: int, timeout_s: float = 30.0) -> None:
        context = multiprocessing.get_context("spawn")
        self.queues = [(context.Queue(), context.Queue()) for _ in range(count)]
        self.processes = [context.Process(target=taker, args=(*q, timeout_s), daemon=True) for q in self.queues]
        for process in self.processes:
            process.start()
        assert self.answers() == ["ready"] * count

    def tell(self, note: Note, *which: int) -> None:
        for i in which or range(len(self.queues)):
            self.queues[i][0].put(note)

    def answers(self, *which: int) -> list[Any]:
        return [self.queues[i][1].get(timeout=60) for i in which or range(len(self.queues))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def start():
    made: list[Any] = []

    def make(count: int, **more: Any) -> Takers:
        made.append(Takers(count, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def sender():
    made = Sender(CPU, "127.0.0.1")
    yield made
    made.close()


def test_every_taker_has_every_part(start, sender, monkeypatch):
    takers = start(2)
    sender.open(["engine-0", "engine-1"])
    for part in (numbers(100), numbers(5000, first=7), numbers(1, first=9)):
        takers.tell(sender.send(part))
        assert takers.answers() == [part.tolist()] * 2
    sender.settle()
    assert sender._under_way == []  # nothing is held on to
    first = sender.send(numbers(100)).line
    sender.open(["engine-0", "engine-1"])
    assert sender.send(numbers(100)).line == first  # the same takers: the same line
    monkeypatch.setattr(line, "TIMEOUT_S", 1.0)  # nobody comes
    sender.open(["engine-1"])
    assert sender.send(numbers(100)).line != first


def test_other_takers_get_a_line_of_their_own(start, sender):
    takers = start(2)
    sender.open(["engine-0", "engine-1"])
    takers.tell(sender.send(numbers(100)))
    takers.answers()
    sender.open(["engine-1"])
    takers.tell(sender.send(numbers(2, first=4)), 1)
    assert takers.answers(1) == [[4, 5]]
    sender.open(["engine-0", "engine-1"])  # and back: nobody is on a line that is gone
    takers.tell(sender.send(numbers(3)))
    assert takers.answers() == [[0, 1, 2]] * 2


def test_a_taker_that_is_gone_breaks_the_line_and_not_the_next(start, sender, monkeypatch):
    monkeypatch.setattr(line, "TIMEOUT_S", 8.0)
    takers, again = start(2, timeout_s=8.0), start(1)
    sender.open(["engine-0", "engine-1"])
    takers.tell(sender.send(numbers(100)))
    takers.answers()
    takers.processes[1].kill()
    takers.processes[1].join()
    takers.tell(sender.send(numbers(100)), 0)
    takers.queues[0][1].get(timeout=60)  # gloo may have served it before it noticed
    sender.send(numbers(1_000_000))
    assert isinstance(sender._under_way[-1][0].exception(timeout=60), LineError)
    sender.settle()  # the takers tell, not the sender
    sender.open(["engine-0", "engine-1"], fresh=True)
    note = sender.send(numbers(100))
    takers.tell(note, 0)
    again.tell(note)
    assert [*takers.answers(0), *again.answers()] == [numbers(100).tolist()] * 2


def test_a_line_without_a_sender(monkeypatch):
    monkeypatch.setattr(line, "TIMEOUT_S", 1.0)
    with pytest.raises(LineError, match="the sender is not there"):
        receive(Note("127.0.0.1:9", "line-0", 2, 0))


def test_members_that_never_come(sender, monkeypatch):
    monkeypatch.setattr(line, "TIMEOUT_S", 1.0)
    sender.open(["engine-0"])
    sender.send(numbers(100))
    assert "2 members did not meet within 1 s" in str(sender._line.exception(timeout=60))
    sender.open(["engine-0"])
    assert sender.send(numbers(100)).line == "line-1"  # not the broken one
