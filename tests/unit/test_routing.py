"""The router's rules, one by one and, in random worlds, against a scan over all replicas."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from gcore.generation import routing
from gcore.generation.routing import AFFINITY_TOKENS, Router, limits_of, own_replicas, shared_limit
from tests.seeds import seeds


def send(router: Router, work: int = 1, count: int = 1, key: Hashable = None) -> int | None:
    i = router.choose(key=key, count=count)
    if i is not None:
        router.sent(i, work, count)
    return i


def test_the_least_work_first_and_ties_from_our_turn_on():
    router = Router(3, controller=(1, 3))
    assert [send(router, work) for work in (30, 10, 10, 10, 10)] == [1, 2, 0, 2, 0]
    assert router.loads == [20, 30, 20] and router.counts == [2, 1, 2]
    router.done(1, 30)
    assert send(router) == 1


@pytest.mark.parametrize("opened", [range(12), (0, 1, 2, 7, 8, 9, 10, 11), (4, 5, 6)])
def test_controllers_that_know_nothing_of_each_other_send_alike_to_all(opened):
    """For any set of open replicas, 24 calls are shared equally."""
    routers = [Router(12, (rank, 4)) for rank in range(4)]
    for router in routers:
        router.close(*(i for i in range(12) if i not in opened))
        if len(opened) < 12:
            send(router, 0)  # places were given before these came
            router.close(*opened)
            router.open(*opened)
    sent = [send(router) for router in routers for _ in range(6)]
    assert {sent.count(i) for i in opened} == {24 // len(opened)}


def test_closed_replicas_get_nothing():
    router = Router(2)
    router.sent(1, 50)
    router.close(0)
    assert not router.is_open(0) and send(router) == 1
    router.close(1)
    assert send(router) is None and router.loads == [0, 51]
    router.done(1, 50)  # what it had is answered; that opens nothing
    assert send(router) is None
    router.open(1)
    assert send(router) == 1
    router.open(0)
    assert send(router) == 0


def test_beyond_the_limit_no_replica_is_chosen():
    router = Router(2, limit=3)
    assert [send(router, count=2) for _ in range(3)] == [0, 1, None]
    assert [send(router) for _ in range(3)] == [0, 1, None]  # smaller calls still fit
    router.done(1, 1, 2)
    assert [send(router, count=3), send(router, count=2), send(router)] == [None, 1, None]


def test_a_limit_that_changes():
    router = Router(2, own={0}, limit=4, guest_limit=2)
    router.limit(1)
    assert [send(router) for _ in range(3)] == [0, 1, None]
    router.limit(3)  # who was laid aside has room again
    assert [send(router) for _ in range(4)] == [0, 0, 1, None]
    router.limit(100)  # never more than at the start
    assert [send(router) for _ in range(2)] == [0, None]
    router.limit(2)
    router.done(0, 1, 2)
    assert send(router) is None  # it still has two
    endless = Router(1)
    endless.limit(1)
    assert [send(endless), send(endless)] == [0, None]


def test_a_limit_that_changes_when_some_have_just_opened():
    router = Router(4, limit=10, opened=range(3))
    for i in range(3):
        router.sent(i, 5)
    router.sent(0, 0, 10)
    assert router.choose() == 1  # the first is full
    router.open(3)
    router.limit(5)
    assert [send(router, 9) for _ in range(4)] == [3, 1, 2, 3]


def test_the_least_loaded_with_room_is_chosen():
    router = Router(2, limit=4)
    router.sent(0, 1, 4)
    router.sent(1, 1000, 1)
    assert [send(router, count=3), send(router)] == [1, None]


def test_a_call_larger_than_the_limit_goes_to_an_empty_replica():
    router = Router(2, limit=3)
    router.sent(0, 1, 1)
    assert [send(router, count=9), send(router, count=9), send(router, count=2)] == [1, None, 0]
    router.done(1, 1, 9)
    assert send(router, count=9) == 1


def test_limits_leave_room_for_a_second_call_and_for_skewed_shares():
    assert limits_of(64, per_call=8) == (96, 48)
    assert limits_of(8, per_call=8) == (16, 6)  # 12 would send the second call too late
    assert limits_of(1) == (2, 1)
    assert [shared_limit(64, size) for size in (1, 2, 4, 8, 64)] == [128, 64, 32, 32, 32]
    assert shared_limit(1, 100) == 1


def test_others_replicas_are_asked_when_no_own_one_has_room():
    router = Router(4, controller=(1, 2), own={1, 3}, limit=2, guest_limit=1)
    assert [send(router, 10) for _ in range(7)] == [3, 1, 3, 1, 2, 0, None]
    router.done(3, 10)
    router.done(2, 10)
    assert [send(router), send(router), send(router)] == [3, 2, None]  # though replica 2 has less
    router.done(1, 20, 2)
    router.close(1)
    router.done(0, 10)
    assert send(router) == 0  # a closed one of ours is no reason to wait


def test_without_a_limit_others_are_asked_when_all_own_are_closed():
    router = Router(4, own={0, 2})
    assert [send(router) for _ in range(4)] == [0, 2, 0, 2]
    router.close(0)
    router.close(2)
    assert [send(router), send(router)] == [1, 3]


def test_a_key_goes_where_it_went_before():
    router = Router(3)
    assert [send(router, 10, key="a"), send(router, 10, key="b")] == [0, 1]
    assert [send(router, 10, key="b"), send(router, 10, key="a"), send(router, 10)] == [1, 0, 2]
    assert send(router, 1, key="b") == 1  # 2 has less
    router.close(1)
    assert send(router, 1, key="b") == 2
    router.open(1)
    assert send(router, 1, key="b") == 2  # where it went last


def test_a_key_is_not_worth_more_than_the_margin():
    router = Router(2)
    assert send(router, AFFINITY_TOKENS, key="a") == 0
    assert send(router, 1, key="a") == 0  # just the margin above
    assert send(router, 0, key="a") == 1
    close, wide = Router(2, margin=0), Router(2, margin=10**9)
    assert [send(close, 1, key="a"), send(close, 1, key="a")] == [0, 1]
    assert [send(wide, 10**6, key="a"), send(wide, 1, key="a")] == [0, 0]


def test_a_key_finds_no_room_where_there_is_none():
    router = Router(2, limit=2)
    assert [send(router, count=2, key="a"), send(router, count=1, key="a")] == [0, 1]


def test_a_key_does_not_lead_to_strangers():
    router = Router(2, own={0}, limit=1)
    assert [send(router, key="a"), send(router, key="b")] == [0, 1]
    router.done(0, 1)
    assert send(router, key="b") == 0


def test_the_keys_that_were_not_asked_for_are_forgotten(monkeypatch):
    monkeypatch.setattr(routing, "MAX_KEYS", 2)
    router = Router(8)
    assert [send(router, 10, key=key) for key in "abac"] == [0, 1, 0, 2]  # b goes, a was asked for since
    assert [send(router, 10, key=key) for key in "ab"] == [0, 3] and len(router._replica_of) == 2


def test_own_replicas():
    assert [sorted(own_replicas(rank, 3, 7) or ()) for rank in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [own_replicas(rank, 3, 3) for rank in range(3)] == [{0}, {1}, {2}]
    assert [own_replicas(rank, 3, 2) for rank in range(3)] == [None] * 3


def test_own_replicas_are_on_the_node_of_their_controller():
    def owners(controllers, replicas):
        size = len(controllers)
        found = [own_replicas(rank, size, len(replicas), (controllers, replicas)) for rank in range(size)]
        return [sorted(own or ()) for own in found]

    assert owners([0, 1], [0, 0, 0, 1, 1, 1]) == [[0, 1, 2], [3, 4, 5]]
    assert owners([0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert owners([0, 1], [0, 0, 0, 1]) == [[0, 1], [2, 3]]  # the shares stay equal
    assert owners([0, 0], [0, 0, 1, 1]) == [[0, 2], [1, 3]]  # a node without controllers
    assert owners([0, 0], [0, 0, 0, 0]) == [[0, 2], [1, 3]]  # one node: as without nodes


class Scan:
    """The rules as they are written, over all replicas."""

    def __init__(
        self, n: int, turn: tuple[int, int], own: set[int] | None, limit: int | None, guest: int | None, margin: int
    ):
        self.n, self.turn, self.own = n, turn, set(range(n)) if own is None else own
        self.limit, self.guest, self.margin = limit, limit if guest is None else guest, margin
        self.loads, self.counts, self.open = [0] * n, [0] * n, set(range(n))
        self.memory: dict[Hashable, int] = {}
        self.places: dict[int, int] = {}
        self.new = set(range(n))

    def put(self, *numbers: int) -> None:
        self.open |= set(numbers)
        self.new |= set(numbers)

    def give_places(self, tier: set[int]) -> None:
        """When one of them is asked for the first time since some have opened."""
        if tier & self.new:
            circle = sorted(self.open & tier)
            start = self.turn[0] * len(circle) // self.turn[1]
            self.places |= {i: (k - start) % len(circle) for k, i in enumerate(circle)}
            self.new -= tier

    def room(self, i: int, count: int) -> bool:
        limit = self.limit if i in self.own else self.guest
        return limit is None or self.counts[i] == 0 or self.counts[i] + count <= limit

    def choose(self, key: Hashable, count: int) -> int | None:
        for tier in (self.own, set(range(self.n)) - self.own):
            self.give_places(tier)
            fit = [i for i in tier & self.open if self.room(i, count)]
            if fit:
                break
        else:
            return None
        best = min(fit, key=lambda i: (self.loads[i], self.places[i]))
        if key is not None:
            known = self.memory.get(key, best)
            if known in fit and self.loads[known] <= self.loads[best] + self.margin:
                best = known
            self.memory[key] = best
        return best


@seeds(40, 400)
def test_random_worlds_against_a_scan(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 12)
    own = None if rng.random() < 0.3 else set(rng.sample(range(n), rng.randint(0, n)))
    limit = None if rng.random() < 0.3 else rng.randint(1, 12)
    guest = None if limit is None or rng.random() < 0.3 else rng.randint(1, limit)
    size = rng.randint(1, 5)
    rules = (rng.randrange(size), size), own, limit, guest, rng.choice([0, 5, 50])
    router, scan = Router(n, *rules), Scan(n, *rules)
    out: list[tuple[int, int, int]] = []
    refused = chosen = 0
    for _ in range(1500):
        move = rng.random()
        if move < 0.55:
            key, count, work = rng.choice([None, *range(6)]), rng.choice([1, 1, 2, 4, 15]), rng.randint(0, 40)
            i = router.choose(key=key, count=count)
            assert i == scan.choose(key, count)
            if i is None:
                refused += 1
            elif rng.random() < 0.9:  # choosing alone binds to nothing
                chosen += 1
                router.sent(i, work, count)
                scan.loads[i] += work
                scan.counts[i] += count
                out.append((i, work, count))
                most = limit if own is None or i in own else scan.guest
                assert i in scan.open and (most is None or router.counts[i] <= most or router.counts[i] == count)
        elif move < 0.9 and out:
            i, work, count = out.pop(rng.randrange(len(out)))
            router.done(i, work, count)
            scan.loads[i] -= work
            scan.counts[i] -= count
        elif move < 0.95:
            i = rng.randrange(n)
            router.close(i)
            scan.open.discard(i)
        else:
            numbers = rng.sample(range(n), min(n, rng.randint(1, 2)))
            router.open(*numbers)
            scan.put(*numbers)
        assert router.loads == scan.loads and router.counts == scan.counts
    assert chosen > 30 and (refused > 0 or limit is None)
