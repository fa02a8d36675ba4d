"""Broadcasts between processes: what arrives, missing members, and the next group after a broken one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gcore.weights import broadcast
from gcore.weights.broadcast import BroadcastError, BroadcastSender, BroadcastTicket, receive_broadcast
from tests.ranks import context, start_ranks

CPU = torch.device("cpu")


def numbers(count: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int64).to(torch.uint8)


def receiver(number: int, queues: list[tuple[Any, Any]]) -> None:
    """A process that receives the broadcasts of its tickets, each with the limit of the process that sent it."""
    tickets, answers = queues[number]
    answers.put("ready")
    while True:
        ticket, broadcast.TIMEOUT_S = tickets.get()
        try:
            answers.put(receive_broadcast(ticket).tolist())
        except BroadcastError as error:
            answers.put(str(error))


class Receiving:
    def __init__(self, count: int) -> None:
        make = context().Queue
        self.queues = [(make(), make()) for _ in range(count)]
        self.processes = start_ranks(count, receiver, self.queues)
        assert self.answers() == ["ready"] * count

    def tell(self, ticket: BroadcastTicket, *which: int) -> None:
        for i in which or range(len(self.queues)):
            self.queues[i][0].put((ticket, broadcast.TIMEOUT_S))

    def answers(self, *which: int) -> list[Any]:
        return [self.queues[i][1].get(timeout=60) for i in which or range(len(self.queues))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def start():
    made: list[Any] = []

    def make(count: int) -> Receiving:
        made.append(Receiving(count))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def sender():
    made = BroadcastSender(CPU, "127.0.0.1")
    yield made
    made.close()


def test_every_receiver_gets_every_block(start, sender, monkeypatch):
    receivers = start(2)
    sender.connect(["engine-0", "engine-1"])
    for block in (numbers(100), numbers(5000, first=7), numbers(1, first=9)):
        receivers.tell(sender.send(block))
        assert receivers.answers() == [block.tolist()] * 2
    sender.wait_sent()
    assert sender._in_flight == []  # their memory is free
    first = sender.send(numbers(100)).group
    sender.connect(["engine-0", "engine-1"])
    assert sender.send(numbers(100)).group == first  # the same receivers: the same group
    monkeypatch.setattr(broadcast, "TIMEOUT_S", 1.0)  # no receiver joins
    sender.connect(["engine-1"])
    assert sender.send(numbers(100)).group != first


def test_other_receivers_get_a_new_group(start, sender):
    receivers = start(2)
    sender.connect(["engine-0", "engine-1"])
    receivers.tell(sender.send(numbers(100)))
    receivers.answers()
    sender.connect(["engine-1"])
    receivers.tell(sender.send(numbers(2, first=4)), 1)
    assert receivers.answers(1) == [[4, 5]]
    sender.connect(["engine-0", "engine-1"])  # and back: no receiver uses an old group
    receivers.tell(sender.send(numbers(3)))
    assert receivers.answers() == [[0, 1, 2]] * 2


def test_a_dead_receiver_breaks_its_group_and_not_the_next(start, sender, monkeypatch):
    receivers, again = start(2), start(1)
    sender.connect(["engine-0", "engine-1"])
    receivers.tell(sender.send(numbers(100)))
    receivers.answers()
    receivers.processes[1].kill()
    receivers.processes[1].join()
    with monkeypatch.context() as soon:
        soon.setattr(broadcast, "TIMEOUT_S", 1.0)
        receivers.tell(sender.send(numbers(100)), 0)
        receivers.answers(0)  # gloo may have served it before it noticed
        sender.send(numbers(1_000_000))
        assert isinstance(sender._in_flight[-1][0].exception(timeout=60), BroadcastError)
    sender.wait_sent()  # raises nothing: the receivers report the error
    sender.connect(["engine-0", "engine-1"], restarted=True)
    ticket = sender.send(numbers(100))
    receivers.tell(ticket, 0)
    again.tell(ticket)
    assert [*receivers.answers(0), *again.answers()] == [numbers(100).tolist()] * 2


def test_a_ticket_without_a_sender(monkeypatch):
    monkeypatch.setattr(broadcast, "TIMEOUT_S", 1.0)
    with pytest.raises(BroadcastError, match="the sender does not respond"):
        receive_broadcast(BroadcastTicket("127.0.0.1:9", "group-0", 2, 0))


def test_members_that_never_join(sender, monkeypatch):
    monkeypatch.setattr(broadcast, "TIMEOUT_S", 1.0)
    sender.connect(["engine-0"])
    sender.send(numbers(100))
    assert "2 members did not connect within 1 s" in str(sender._group.exception(timeout=60))
    sender.connect(["engine-0"])
    assert sender.send(numbers(100)).group == "group-1"  # not the broken one
