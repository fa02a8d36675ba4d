"""A controller's pool with scripted replicas: the line, drains and what goes on elsewhere, health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from bench.virtual_loop import VirtualLoop
from gcore.clients import EngineClient, ScorerClient
from gcore.content.tokens import Tokens
from gcore.controller.engine_weights import EngineWeights
from gcore.controller.replicas import ANSWER_S, CHECK_S, Replicas
from gcore.generation.pool import ClientPool, EnginePool, ScorerPool
from gcore.generation.routing import Router
from gcore.protocols import RoleDied, RoleError
from gcore.types import Completion, Request, SamplingParams
from tests.unit.pools import Outstanding, PoolState, observe

STOP = 2


def ask(*keys: int, most: int = 10, prompt: Sequence[int] = (5, 6, 7, 8)) -> list[Request]:
    params = SamplingParams(most, temperature=0.5, stop_tokens=(STOP,))
    return [Request(Tokens(np.array(prompt, np.int32)), params, key) for key in keys]


def piece(tokens: Sequence[int], finish: Any = "abort", version: int = 0) -> Completion:
    logprobs = -np.array(tokens, np.float32)
    return Completion(
        Tokens.steps(np.array(tokens, np.int32)), logprobs, np.full(len(tokens), version, np.int32), finish
    )


class Said(str):
    """A completion that is told by its name."""

    content = Tokens.steps(np.zeros(0, np.int32))
    nbytes = 0


class Replica:
    """Every call waits for its answer: `answer(n, ...)` says it to the n-th."""

    def __init__(self, name: str) -> None:
        self.name, self.generates, self.aborted = name, list[tuple[list[Request], str, asyncio.Future[Any]]](), []
        self.script: Callable[[str], Coroutine[Any, Any, Any]] | None = None

    async def call(self, method: str, *args: Any) -> Any:
        if method == "abort":
            self.aborted.append(args[0])
            return None
        if method == "generate":
            self.generates.append((*args, asyncio.get_running_loop().create_future()))
            return await self.generates[-1][2]
        assert self.script is not None, method
        return await self.script(method)

    @property
    def keys(self) -> list[list[int]]:
        return [[request.noise_key for request in requests] for requests, _, _ in self.generates]

    def ticket(self, n: int) -> str:
        return self.generates[n][1]

    def answer(self, n: int, *said: Any) -> None:
        self.generates[n][2].set_result([Said(word) if isinstance(word, str) else word for word in said])

    def die(self) -> None:
        for _, _, future in self.generates:
            if not future.done():
                future.set_exception(RoleDied(self.name, "gone"))


def engines(*replicas: Replica) -> list[EngineClient]:
    return [EngineClient(replica) for replica in replicas]


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(asyncio.wait_for(main(), 1000))


def begin(calls: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(calls)


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def idle(pool: ClientPool[Any]) -> bool:
    seen = observe(pool)
    return seen.waiting == 0 and all((r.requests, r.work) == (0, 0) for r in seen.replicas)


def same(found: Completion, expected: Completion) -> bool:
    arrays = ("logprobs_S", "versions_S")
    alike = all(np.array_equal(getattr(found, name), getattr(expected, name)) for name in arrays)
    steps = found.content.tokens_S.tolist() == expected.content.tokens_S.tolist()
    return alike and steps and found.finish == expected.finish


# ---- the line


def test_beyond_the_limit_calls_wait_by_priority_then_arrival():
    async def main() -> None:
        replica = Replica("a")
        pool = EnginePool(engines(replica), Router(1, limit=1))
        order = [(0, 5), (1, 7), (2, 5), (3, -1), (4, 7)]
        calls = [begin(pool.generate(ask(key), priority=priority)) for key, priority in order]
        await settle()
        assert replica.keys == [[0]]
        assert observe(pool) == PoolState(waiting=4, replicas=(Outstanding("a", 1, 14),))
        for n in range(5):
            replica.answer(n, f"answer {n}")
            await settle()
        assert replica.keys == [[0], [3], [2], [1], [4]]
        assert [request.priority for requests, _, _ in replica.generates for request in requests] == [5, -1, 5, 7, 7]
        assert [call.result() for call in calls] == [[f"answer {n}"] for n in (0, 3, 2, 1, 4)]
        assert idle(pool)

    run(main)


def test_no_call_overtakes_a_large_call_and_it_goes_through():
    async def main() -> None:
        replica = Replica("a")
        pool = EnginePool(engines(replica), Router(1, limit=2))
        for keys in ((0,), (1, 2, 3), (4,)):
            begin(pool.generate(ask(*keys)))
        await settle()
        assert replica.keys == [[0]] and observe(pool).waiting == 4  # 4 would fit, and waits behind the three
        replica.answer(0, "0")
        await settle()
        assert replica.keys == [[0], [1, 2, 3]]
        replica.answer(1, "1", "2", "3")
        await settle()
        assert replica.keys == [[0], [1, 2, 3], [4]]
        replica.answer(2, "4")
        await settle()
        assert idle(pool)

    run(main)


def test_who_gives_up_in_the_line_makes_room_for_who_stands_behind():
    async def main() -> None:
        replica = Replica("a")
        pool = EnginePool(engines(replica), Router(1, limit=2))
        calls = [begin(pool.generate(ask(*keys))) for keys in ((0,), (1, 2), (3,))]
        await settle()
        assert replica.keys == [[0]]
        calls[1].cancel()
        await settle()
        assert replica.keys == [[0], [3]] and replica.aborted == [] and observe(pool).waiting == 0
        assert observe(pool).replicas[0].requests == 2

    run(main)


def test_a_place_granted_to_a_cancelled_call_goes_to_the_next():
    async def main() -> None:
        replica = Replica("a")
        pool = EnginePool(engines(replica), Router(1, limit=1))
        calls = [begin(pool.generate(ask(key))) for key in range(3)]
        await settle()
        replica.answer(0, "0")
        while not calls[0].done():
            await asyncio.sleep(0)  # the first has its answer, and the second its turn, of which it has not heard yet
        assert calls[0].done() and replica.keys == [[0]] and observe(pool).replicas[0].requests == 1
        calls[1].cancel()
        await settle()
        assert replica.keys == [[0], [2]]
        replica.answer(1, "2")
        assert await calls[2] == ["2"] and idle(pool)

    run(main)


def test_siblings_and_later_turns_find_their_prefix():
    async def main() -> None:
        replicas = [Replica("a"), Replica("b")]
        pool = EnginePool(engines(*replicas))
        begin(pool.generate(ask(0), key=70))
        begin(pool.generate(ask(1), key=71))
        begin(pool.generate(ask(2), key=71))
        begin(pool.generate(ask(3)))
        await settle()
        assert [r.keys for r in replicas] == [[[0], [3]], [[1], [2]]]

    run(main)


def test_limits_of_a_controller():
    async def main() -> None:
        replicas = [Replica(str(i)) for i in range(4)]
        pool = EnginePool.for_controller(engines(*replicas), rank=1, size=2, max_concurrent=4)
        for key in range(30):
            begin(pool.generate(ask(key)))
        await settle()
        assert [r.requests for r in observe(pool).replicas] == [3, 6, 3, 6] and observe(pool).waiting == 12
        assert replicas[3].keys[0] == [0] and replicas[1].keys[0] == [1]
        shared = EnginePool.for_controller(engines(*replicas[:1]), rank=1, size=2, max_concurrent=1)
        for key in range(3):
            begin(shared.generate(ask(key)))
        await settle()
        assert observe(shared).replicas[0].requests == 2 and observe(shared).waiting == 1
        roaming = EnginePool.for_controller(engines(*replicas), rank=1, size=4, max_concurrent=3, roam=True)
        for key in range(30):
            begin(roaming.generate(ask(key)))
        await settle()
        assert [r.requests for r in observe(roaming).replicas] == [2, 2, 2, 2]  # a fourth of six, rounded up

    run(main)


# ---- death


def test_what_a_dead_replica_had_goes_elsewhere_and_waits_when_no_replica_is_left():
    async def main() -> None:
        replicas = [Replica("a"), Replica("b")]
        pool = EnginePool(engines(*replicas), Router(2, limit=1))
        calls = [begin(pool.generate(ask(key))) for key in range(3)]
        await settle()
        replicas[0].die()
        await settle()
        assert observe(pool) == PoolState(2, (Outstanding("a", 0, 0, ("dead",)), Outstanding("b", 1, 14)))
        assert pool.alive() == {1: EngineClient(replicas[1])}
        replicas[1].answer(0, "1")
        await settle()
        assert replicas[1].keys == [[1], [0]]  # it came before 2, and keeps its place
        pool.mark_dead("b")
        replicas[1].die()
        await settle()
        assert observe(pool).waiting == 2 and pool.alive() == {}
        pool.mark_alive("a")
        pool.mark_alive("unknown")
        await settle()
        assert replicas[0].keys == [[0], [0]]
        replicas[0].answer(1, "0")
        await settle()
        replicas[0].answer(2, "2")
        assert [await call for call in calls] == [["0"], ["1"], ["2"]] and idle(pool)

    run(main)


def test_scorers_are_asked_again_too():
    class Scorer(Replica):
        async def call(self, method: str, *args: Any) -> Any:
            if self.name == "a":
                raise RoleDied("a", "gone")
            return [float(len(tokens)) for tokens in args[0]]

    async def main() -> list[float]:
        pool = ScorerPool([ScorerClient(Scorer("a")), ScorerClient(Scorer("b"))])
        return await pool.score([np.zeros(3, np.int32), np.zeros(5, np.int32)])

    assert run(main) == [3.0, 5.0]


# ---- drains


def test_a_drain_moves_what_is_not_finished():
    async def main() -> None:
        a, b = Replica("a"), Replica("b")
        pool = EnginePool(engines(a, b))
        pool.mark_dead("b")
        call = begin(pool.generate(ask(0, 1, 2, 3, most=5), priority=4, key=9))
        await settle()
        pool.mark_alive("b")
        drained = begin(pool.drain("a"))
        await settle()
        assert a.aborted == [a.ticket(0)] and not drained.done()
        a.answer(0, piece([9, 2], "stop"), piece([3, 4]), piece([]), piece([5], version=1))
        await settle()
        assert drained.done() and observe(pool).replicas[0] == Outstanding("a", 0, 0, ("drained",))
        assert b.keys == [[1, 2, 3]] and b.ticket(0) != a.ticket(0)
        asked = [(r.content.tokens_T.tolist(), r.params.max_tokens, r.position, r.priority) for r in b.generates[0][0]]
        assert asked == [([5, 6, 7, 8, 3, 4], 3, 2, 4), ([5, 6, 7, 8], 5, 0, 4), ([5, 6, 7, 8, 5], 4, 1, 4)]
        assert {r.params.temperature for r in b.generates[0][0]} == {0.5}
        b.answer(0, piece([7, 7, 7], "length", 2), piece([2], "stop", 2), piece([6, 2], "stop", 2))
        found = await call
        lengthy = Completion(
            Tokens.steps(np.array([3, 4, 7, 7, 7], np.int32)),
            np.array([-3, -4, -7, -7, -7], np.float32),
            np.array([0, 0, 2, 2, 2], np.int32),
            "length",
        )
        assert (
            same(found[0], piece([9, 2], "stop")) and same(found[1], lengthy) and same(found[2], piece([2], "stop", 2))
        )
        assert found[3].content.tokens_S.tolist() == [5, 6, 2] and found[3].versions_S.tolist() == [1, 2, 2]
        assert idle(pool)

    run(main)


def test_a_drain_before_a_request_is_sent_keeps_it_here():
    """Its turn has come, and the call to the replica starts in the next turn of the event loop."""

    async def main() -> None:
        a, b = Replica("a"), Replica("b")
        pool = EnginePool(engines(a, b))
        pool.mark_dead("b")
        call = begin(pool.generate(ask(0, 1)))
        await asyncio.sleep(0)
        assert observe(pool).replicas[0].requests == 2 and a.keys == []
        pool.mark_alive("b")
        await pool.drain("a")
        await settle()
        assert a.keys == [] and b.keys == [[0, 1]]
        assert [(r.content.size, r.position) for r in b.generates[0][0]] == [(4, 0), (4, 0)]
        b.answer(0, piece([9, 2], "stop"), piece([3, 2], "stop"))
        found = await call
        assert same(found[0], piece([9, 2], "stop")) and same(found[1], piece([3, 2], "stop")) and idle(pool)

    run(main)


def test_an_abort_with_the_last_token_is_the_end():
    async def main() -> None:
        a, b = Replica("a"), Replica("b")
        pool = EnginePool(engines(a, b))
        call = begin(pool.generate(ask(0, 1, most=3)))
        await settle()
        begin(pool.drain("a"))
        await settle()
        a.answer(0, piece([4, 2]), piece([4, 5, 6]))
        assert [c.finish for c in await call] == ["stop", "length"] and b.keys == []

    run(main)


def test_an_abort_by_another_caller_is_an_abort():
    async def main() -> None:
        a, b = Replica("a"), Replica("b")
        pool = EnginePool(engines(a, b))
        call = begin(pool.generate(ask(0)))
        await settle()
        a.answer(0, piece([4]))
        assert same((await call)[0], piece([4])) and b.keys == []

    run(main)


def test_what_is_moved_waits_for_a_replica_and_keeps_its_place():
    async def main() -> None:
        a = Replica("a")
        pool = EnginePool(engines(a), Router(1, limit=2))
        calls = [begin(pool.generate(ask(*keys))) for keys in ((0, 1), (2,))]
        await settle()
        drained = begin(pool.drain("a"))
        await settle()
        a.answer(0, piece([3]), piece([4]))
        await settle()
        assert drained.done() and observe(pool) == PoolState(3, (Outstanding("a", 0, 0, ("drained",)),))
        pool.mark_alive("a")  # it is alive; that does not open what is drained
        await settle()
        assert a.keys == [[0, 1]]
        pool.reopen("a")
        await settle()
        assert a.keys == [[0, 1], [0, 1]]
        a.answer(1, piece([2], "stop"), piece([2], "stop"))
        await settle()
        a.answer(2, piece([2], "stop"))
        await calls[1]
        assert [c.content.tokens_S.tolist() for c in await calls[0]] == [[3, 2], [4, 2]] and idle(pool)

    run(main)


def test_moved_twice_and_then_its_replica_dies():
    """What it had before the death is not lost: the dead replica alone is asked again."""

    async def main() -> None:
        replicas = [Replica(name) for name in "abcd"]
        pool = EnginePool(engines(*replicas))
        call = begin(pool.generate(ask(0)))
        await settle()
        for n, said in ((0, [3]), (1, [4, 5])):
            begin(pool.drain("abcd"[n]))
            await settle()
            replicas[n].answer(0, piece(said))
            await settle()
        replicas[2].die()
        await settle()
        (request,) = replicas[3].generates[0][0]
        assert (request.content.tokens_T.tolist(), request.position) == ([5, 6, 7, 8, 3, 4, 5], 3)
        replicas[3].answer(0, piece([2], "stop"))
        assert (await call)[0].content.tokens_S.tolist() == [3, 4, 5, 2] and idle(pool)

    run(main)


def test_a_replica_that_dies_while_it_is_drained():
    async def main() -> None:
        a, b = Replica("a"), Replica("b")
        pool = EnginePool(engines(a, b))
        call = begin(pool.generate(ask(0)))
        await settle()
        drained = begin(pool.drain("a"))
        await settle()
        a.die()
        await settle()
        assert drained.done() and b.keys == [[0]]
        pool.mark_alive("a")
        assert observe(pool).replicas[0].closed == ("drained",)
        b.answer(0, piece([2], "stop"))
        assert (await call)[0].content.tokens_S.tolist() == [2] and idle(pool)

    run(main)


@pytest.mark.parametrize("when", ["before the answer", "between two replicas", "at the second"])
def test_a_caller_that_is_cancelled_while_it_is_moved_leaves_nothing(when):
    async def main() -> None:
        a, b = Replica("a"), Replica("b")
        pool = EnginePool(engines(a, b))
        pool.mark_dead("b")
        call = begin(pool.generate(ask(0)))
        await settle()
        drained = begin(pool.drain("a"))
        await settle()
        if when != "before the answer":
            a.answer(0, piece([3]))
            await settle()
        if when == "at the second":
            pool.mark_alive("b")
            await settle()
        call.cancel()
        await settle()
        assert call.cancelled() and idle(pool)
        if when == "before the answer":
            assert not drained.done()
            a.answer(0, piece([3]))
            await settle()
        assert drained.done()
        assert b.aborted == ([b.ticket(0)] if when == "at the second" else [])
        if when == "at the second":
            b.answer(0, piece([4]))
            await settle()
        assert pool._calls == [set(), set()]
        assert set(a.aborted) == {a.ticket(0)}

    run(main)


def test_an_abort_that_came_too_early_is_said_again():
    async def main() -> None:
        a, b = Replica("a"), Replica("b")
        pool = EnginePool(engines(a, b))
        begin(pool.generate(ask(0)))
        await settle()
        drained = begin(pool.drain("a"))
        await asyncio.sleep(0.5)
        assert len(a.aborted) == 1
        await asyncio.sleep(1.0)
        assert len(a.aborted) == 2 and not drained.done()
        a.answer(0, piece([3]))
        await drained
        await settle()
        assert b.keys == [[0]]

    run(main)


def test_the_abort_of_a_cancelled_caller_that_came_too_early_is_said_again():
    """Otherwise the replica would decode to the end for nobody, and the sleep of all engines would wait for it."""

    async def main() -> None:
        a = Replica("a")
        pool = EnginePool(engines(a))
        call = begin(pool.generate(ask(0)))
        await settle()
        call.cancel()
        await asyncio.sleep(0.5)
        assert a.aborted == [a.ticket(0)]
        await asyncio.sleep(1.0)
        assert a.aborted == [a.ticket(0)] * 2
        a.answer(0, piece([3]))
        await asyncio.sleep(5.0)
        assert a.aborted == [a.ticket(0)] * 2 and not pool._aborts

    run(main)


def test_a_paused_pool_has_nothing_on_the_way():
    """An engine that gets a request as it goes to sleep refuses to sleep, and the run ends."""

    async def main() -> None:
        a = Replica("a")
        pool = EnginePool(engines(a))
        call = begin(pool.generate(ask(0)))
        await settle()
        call.cancel()
        await settle()
        paused = begin(pool.pause())
        await asyncio.sleep(3.0)
        assert not paused.done()
        a.answer(0, piece([3]))
        await settle()
        assert paused.done() and pool._calls == [set()]

    run(main)


def test_a_drain_waits_for_every_call():
    async def main() -> None:
        a = Replica("a")
        pool = EnginePool(engines(a))
        calls = [begin(pool.generate(ask(key))) for key in range(2)]
        await settle()
        drained = begin(pool.drain("a"))
        await settle()
        a.answer(0, piece([2], "stop"))
        await settle()
        assert calls[0].done() and not drained.done() and sorted(a.aborted) == sorted([a.ticket(0), a.ticket(1)])
        a.answer(1, piece([2], "stop"))
        await drained
        pool.mark_dead("a")
        pool.reopen("a")
        assert observe(pool).replicas[0].closed == ("dead",)  # which is another matter

    run(main)


def test_a_drain_ends_when_the_replica_is_reopened():
    async def main() -> None:
        a = Replica("a")
        pool = EnginePool(engines(a))
        call = begin(pool.generate(ask(0)))
        await settle()
        drained = begin(pool.drain("a"))
        await settle()
        pool.reopen("a")
        a.answer(0, piece([3]))  # it was asked to: the rest is asked for again, at the same place
        await settle()
        assert a.keys == [[0], [0]]
        await asyncio.sleep(1.5)
        assert drained.done() and len(a.aborted) == 1
        a.answer(1, piece([2], "stop"))
        assert (await call)[0].content.tokens_S.tolist() == [3, 2]

    run(main)


def test_a_paused_pool_holds_what_it_has_and_continues_from_its_tokens():
    async def main() -> None:
        a = Replica("a")
        pool = EnginePool(engines(a))
        calls = [begin(pool.generate(ask(key))) for key in (0, 1)]
        await settle()
        paused = begin(pool.pause())
        await settle()
        assert not paused.done() and sorted(a.aborted) == [a.ticket(0), a.ticket(1)]
        a.answer(0, piece([3, 4]))
        a.answer(1, piece([2], "stop"))
        await paused
        late = begin(pool.generate(ask(2)))
        await settle()
        assert calls[1].done() and not calls[0].done() and a.keys == [[0], [1]]
        assert observe(pool).waiting == 2 and pool.take_aborted() == (0, 0)  # nothing was thrown away
        pool.resume()
        await settle()
        assert a.keys == [[0], [1], [0], [2]] and a.generates[2][0][0].position == 2
        a.answer(2, piece([2], "stop", version=1))
        assert (await calls[0])[0].versions_S.tolist() == [0, 0, 1]
        late.cancel()

    run(main)


def test_tokens_of_callers_that_give_up_are_counted():
    async def main() -> None:
        a = Replica("a")
        pool = EnginePool(engines(a))
        call = begin(pool.generate(ask(0)))
        await settle()
        call.cancel()
        await settle()
        assert a.aborted == [a.ticket(0)] and idle(pool)
        a.answer(0, piece([3, 4, 5]))
        await settle()
        assert pool.take_aborted() == (3, 1) and pool.take_aborted() == (0, 0)

    run(main)


def test_whose_turn_came_as_the_replica_was_closed_goes_elsewhere():
    async def main() -> None:
        a, b = Replica("a"), Replica("b")
        pool = EnginePool(engines(a, b), Router(2, limit=1))
        calls = [begin(pool.generate(ask(key))) for key in range(3)]
        await settle()
        a.answer(0, "0")
        while not calls[0].done():
            await asyncio.sleep(0)
        assert observe(pool).replicas[0].requests == 1 and a.keys == [[0]]  # 2 has its turn, and has not heard yet
        await pool.drain("a")
        assert a.keys == [[0]] and a.aborted == []
        b.answer(0, "1")
        await settle()
        assert b.keys == [[1], [2]]
        b.answer(1, "2")
        assert [await call for call in calls] == [["0"], ["1"], ["2"]] and idle(pool)

    run(main)


# ---- health


def test_who_keeps_silent_is_sent_nothing_new_until_it_answers():
    async def main() -> None:
        a, b, c = (Replica(name) for name in "abc")
        pool = EnginePool(engines(a, b, c))
        silent = {"a"}

        def stats_of(name: str) -> Callable[[str], Coroutine[Any, Any, Any]]:
            async def stats(method: str) -> dict[str, float]:
                assert method == "stats"
                await asyncio.sleep(100 if name in silent else 1)
                if name == "b":
                    raise RoleError("b", "out of order", "")
                if name == "c":
                    raise RoleDied("c", "gone")
                return {}

            return stats

        for replica in (a, b, c):
            replica.script = stats_of(replica.name)
        first = begin(pool.generate(ask(0)))
        await settle()
        assert await pool.check(5.0) == {"a": False}  # an error is an answer; deaths are told by others
        assert observe(pool).replicas[0] == Outstanding("a", 1, 14, ("suspect",))
        assert [r.closed for r in observe(pool).replicas[1:]] == [(), ()]
        for key in range(1, 4):
            begin(pool.generate(ask(key)))
        await settle()
        assert a.keys == [[0]]
        a.answer(0, "0")
        assert await first == ["0"]  # what it had stayed there
        assert await pool.check(5.0) == {}
        silent.clear()
        assert await pool.check(5.0) == {"a": True} and observe(pool).replicas[0].closed == ()
        begin(pool.generate(ask(4)))
        await settle()
        assert a.keys == [[0], [4]]

    run(main)


def test_the_dead_and_the_drained_are_not_asked():
    async def main() -> None:
        replicas = [Replica(name) for name in "abc"]
        pool = EnginePool(engines(*replicas))
        asked = []

        def stats_of(name: str) -> Callable[[str], Coroutine[Any, Any, Any]]:
            async def stats(method: str) -> None:
                asked.append(name)
                await asyncio.sleep(100)

            return stats

        for replica in replicas:
            replica.script = stats_of(replica.name)
        pool.mark_dead("a")
        await pool.drain("b")
        checked = begin(pool.check(5.0))
        await settle()
        pool.mark_dead("c")
        assert await checked == {} and asked == ["c"]  # c is dead by then, which says more
        pool.mark_alive("c")
        assert await pool.check(5.0) == {"c": False}
        pool.mark_alive("c")  # it is another process now
        assert observe(pool).replicas[2].closed == ()

    run(main)


def test_replicas_are_checked_until_the_run_ends():
    async def main() -> None:
        well, before, notes = asyncio.Event(), asyncio.all_tasks(), list[str]()
        engine, judge = Replica("engine-0"), Replica("judge-0")

        async def silent(method: str) -> None:
            await well.wait()

        async def at_once(method: str) -> None:
            pass

        engine.script, judge.script = silent, at_once
        pool = EnginePool(engines(engine))
        weights: Any = EngineWeights(None, pool, [])  # type: ignore[arg-type]
        with Replicas(pool, [EnginePool(engines(judge))], weights, notes.append).watched():
            await asyncio.sleep(CHECK_S + ANSWER_S + 1)
            assert notes == ["engine-0 has not answered for 20 s; it gets no new requests until it answers"]
            await asyncio.sleep(CHECK_S + ANSWER_S)
            assert len(notes) == 1
            well.set()
            await asyncio.sleep(2 * CHECK_S)
            assert notes[1:] == ["engine-0 answers again"]
            well.clear()
            await asyncio.sleep(CHECK_S + ANSWER_S / 2)  # in the middle of a check
        await settle()
        assert len(asyncio.all_tasks() - before) == 0

    run(main)
