"""Routing to replicas: the least loaded first; who is cancelled takes its requests back."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from gcore.clients import EngineClient
from gcore.content.tokens import Tokens
from gcore.cost.workload import CostModel
from gcore.generation.pool import EnginePool
from gcore.generation.routing import Router
from gcore.types import Request, SamplingParams


def requests(n: int, tokens: int = 10) -> list[Request]:
    return [Request(Tokens(np.zeros(4, np.int32)), SamplingParams(tokens), i) for i in range(n)]


class Said(str):
    """A completion that is told by its name."""

    content = Tokens.steps(np.zeros(0, np.int32))
    nbytes = 0


class Replica:
    """Answers when it is told to."""

    def __init__(self, name: str) -> None:
        self.name, self.calls, self.go = name, list[tuple[Any, ...]](), asyncio.Event()

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        if method == "generate":
            await self.go.wait()
            return [Said(f"{self.name} {r.noise_key}") for r in args[0]]
        return None


def engines(*replicas: Replica) -> list[EngineClient]:
    return [EngineClient(replica) for replica in replicas]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_work_goes_where_the_least_is_outstanding():
    async def main() -> None:
        replicas = [Replica("a"), Replica("b"), Replica("c")]
        pool = EnginePool(engines(*replicas), Router(len(replicas), (1, 2)))
        calls = []
        for n in (3, 1, 1, 1):  # to b, c, a in turn; then c and a are equally loaded, and c comes before a
            calls.append(asyncio.ensure_future(pool.generate(requests(n))))
            await settle()
        assert [len(r.calls) for r in replicas] == [1, 1, 2]
        for replica in replicas:
            replica.go.set()
        assert await calls[0] == ["b 0", "b 1", "b 2"] and await calls[3] == ["c 0"]
        await asyncio.gather(*calls)
        calls.append(asyncio.ensure_future(pool.generate(requests(1))))
        await calls[-1]
        assert [len(r.calls) for r in replicas] == [1, 2, 2]  # all idle again: ties start at our turn

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(("crossover", "least"), [(None, "a"), (100.0, "b")])
def test_the_work_of_a_long_sequence_has_its_attention(crossover, least):
    """Replica a has one sequence of 1,000 tokens, b has two of 520. In tokens b has more work, in FLOPs a has."""

    async def main() -> str:
        replicas = [Replica("a"), Replica("b")]
        pool = EnginePool(engines(*replicas))
        if crossover:
            pool.cost_of = CostModel(crossover).of
        calls = [asyncio.ensure_future(pool.generate(requests(1, 996)))]
        await settle()
        calls += [asyncio.ensure_future(pool.generate(requests(2, 516)))]
        await settle()
        last = asyncio.ensure_future(pool.generate(requests(1)))
        await settle()
        for replica in replicas:
            replica.go.set()
        await asyncio.gather(*calls)
        return (await last)[0]

    assert asyncio.run(asyncio.wait_for(main(), 60)) == f"{least} 0"


def test_who_is_cancelled_takes_its_requests_back():
    async def main() -> None:
        replicas = [Replica("a"), Replica("b")]
        pool = EnginePool(engines(*replicas))
        doomed, other = (asyncio.ensure_future(pool.generate(requests(n))) for n in (5, 1))
        await settle()
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        await settle()
        (_, _, ticket), abort = replicas[0].calls
        assert abort == ("abort", ticket)  # at the replica that has them, and of these alone
        assert [call[0] for call in replicas[1].calls] == ["generate"] and replicas[1].calls[0][2] != ticket
        third = asyncio.ensure_future(pool.generate(requests(1)))
        await settle()
        assert replicas[0].calls[-1][0] == "generate"  # what was taken back is no load any more
        for replica in replicas:
            replica.go.set()
        assert await other == ["b 0"] and await third == ["a 0"]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_tickets_of_different_pools_differ():
    async def main() -> set[str]:
        replica = Replica("a")
        replica.go.set()
        pools = [EnginePool(engines(replica)) for _ in range(3)]  # of three controllers
        for _ in range(3):
            await asyncio.gather(*(pool.generate(requests(1)) for pool in pools))
        return {ticket for _, _, ticket in replica.calls}

    assert len(asyncio.run(main())) == 9
