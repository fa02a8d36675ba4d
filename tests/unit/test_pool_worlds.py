"""Pools of several controllers over emulated replicas that die, hang, drain and come back, in virtual time.

Whatever happens, a call is answered once, with what an undisturbed engine would have said, or was cancelled; in the end
nothing is outstanding anywhere. And the same with real engines: a sample that was moved is the one that was not.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from bench.virtual_loop import VirtualLoop
from gcore.clients import EngineClient
from gcore.content.tokens import Tokens
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.emulate.engine import EmulatedEngine
from gcore.generation.noise import noise_key
from gcore.generation.pool import EnginePool
from gcore.generation.routing import Router
from gcore.protocols import RoleDied
from gcore.runtime.local import LocalHandle
from gcore.types import Completion, Request, SamplingParams
from tests.contract.test_engine import embedded, network_of
from tests.unit.pools import observe

STOP, SLOTS, CALLS = 2, 4, 30


def make_engine() -> EmulatedEngine:
    """A sample's whole length follows from its key, wherever it goes on."""
    speed = ReplicaSpeed(
        0.1, 0.03, prefill_s_per_token=0.011, max_concurrent=SLOTS, sleep_s=0.0, wake_s=0.0, weights_s=0.0
    )
    return EmulatedEngine(speed, lengths=lambda r: 1 + r.noise_key % 97 - r.position)


class Replica:
    """Messages arrive in order and a little late; what was sent is done whether or not the caller still listens."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.name = world, number, f"engine-{number}"
        self.engine, self.gone = make_engine(), asyncio.Event()
        self.well = asyncio.Event()
        self.well.set()
        self._last = 0.0

    async def call(self, method: str, *args: Any) -> Any:
        """Of the process that lives now; if it dies, the caller hears of it."""
        loop, engine, gone = asyncio.get_running_loop(), self.engine, self.gone
        if method == "generate":
            self.world.check_sent(self, args)
        self._last = at = max(self._last, loop.time() + self.world.rng.random() * 0.05)

        async def work() -> Any:
            await asyncio.sleep(at - loop.time())
            await self.well.wait()
            return await getattr(engine, method)(*args)

        task, death = asyncio.ensure_future(work()), asyncio.ensure_future(gone.wait())
        self.world.tasks |= {task, death}
        await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
        if gone.is_set():
            task.cancel()
            raise RoleDied(self.name, "gone")
        death.cancel()
        return await task

    def die(self) -> None:
        self.gone.set()

    def return_anew(self) -> None:
        self.engine, self.gone = make_engine(), asyncio.Event()


def engines(*replicas: Replica) -> list[EngineClient]:
    return [EngineClient(replica) for replica in replicas]


@dataclass
class World:
    seed: int
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.replicas = [Replica(self, i) for i in range(rng.randint(1, 4))]
        size = rng.randint(1, 3)
        self.pools = [EnginePool.for_controller(engines(*self.replicas), rank, size, SLOTS) for rank in range(size)]
        if rng.random() < 0.3:
            self.pools = [
                EnginePool(engines(*self.replicas), Router(len(self.replicas), (rank, size))) for rank in range(size)
            ]
        self.busy = set[int]()  # replicas something is happening to

    def check_sent(self, replica: Replica, args: Any) -> None:
        requests, ticket = args
        (pool,) = (pool for pool in self.pools if ticket.startswith(pool._name))
        seen = observe(pool).replicas[replica.number]
        assert seen.closed == ()
        tier = pool._router._tier_of[replica.number]
        assert seen.requests <= max(tier.limit, len(requests))
        self.happened["moved"] += any(request.position for request in requests)

    async def run(self) -> None:
        troubles = [asyncio.ensure_future(c) for c in (self.trouble(), *map(self.watch, self.pools))]
        calls = [self.caller(pool, i) for pool in self.pools for i in range(CALLS)]
        await asyncio.gather(*calls)
        await asyncio.sleep(30)  # what is happening ends, and aborts of those who gave up arrive
        assert all(task.exception() is None for task in troubles if task.done())
        for task in troubles:
            task.cancel()
        for pool in self.pools:
            seen = observe(pool)
            assert seen.waiting == 0 and all((r.requests, r.work) == (0, 0) for r in seen.replicas)
            assert not any(pool._calls) and not pool._aborts and not pool._waiting
        for replica in self.replicas:
            stats = await replica.engine.stats()
            assert (stats.running, stats.waiting) == (0, 0)

    async def caller(self, pool: EnginePool, number: int) -> None:
        rng = self.rng
        await asyncio.sleep(rng.random() * 30)
        prompt = np.arange(1, rng.randint(2, 9), dtype=np.int32)
        params = SamplingParams(rng.randint(1, 100), stop_tokens=(STOP,))
        keys = [rng.getrandbits(60) for _ in range(rng.choice([1, 1, 3, 4, 12]))]
        requests = [Request(Tokens(prompt), params, key) for key in keys]
        call = asyncio.ensure_future(pool.generate(requests, priority=number, key=rng.choice([None, number % 7])))
        if rng.random() < 0.25:
            await asyncio.sleep(rng.random() * 20)
            call.cancel()
        await asyncio.wait({call})
        if call.cancelled():
            self.happened["cancelled"] += 1
            return
        self.happened["answered"] += 1
        expected = await make_engine().generate(requests)
        for found, right in zip(call.result(), expected, strict=True):
            assert found.finish == right.finish
            assert np.array_equal(found.content.tokens_S, right.content.tokens_S)
            assert len(found.logprobs_S) == len(found.versions_S) == len(found.content.tokens_S)

    async def trouble(self) -> None:
        while asyncio.get_running_loop().time() < 80:  # else some would never come to an end
            await asyncio.sleep(self.rng.random() * 4)
            free = [replica for replica in self.replicas if replica.number not in self.busy]
            if free:
                kind = self.rng.choice([self.death, self.drain, self.drain, self.hang])
                self.tasks.add(asyncio.ensure_future(self.happen(kind, self.rng.choice(free))))

    async def happen(self, kind: Any, replica: Replica) -> None:
        self.busy.add(replica.number)
        self.happened[kind.__name__] += 1
        await kind(replica)
        self.busy.discard(replica.number)

    async def death(self, replica: Replica) -> None:
        replica.die()
        await asyncio.sleep(self.rng.random())  # calls may find out before they are told
        for pool in self.pools:
            pool.mark_dead(replica.name)
        await asyncio.sleep(self.rng.random() * 5)
        replica.return_anew()
        for pool in self.pools:
            pool.mark_alive(replica.name)

    async def drain(self, replica: Replica) -> None:
        pools = self.rng.sample(self.pools, self.rng.randint(1, len(self.pools)))
        drains = [asyncio.ensure_future(pool.drain(replica.name)) for pool in pools]
        if self.rng.random() < 0.2:  # it dies of it
            await self.death(replica)
        await asyncio.gather(*drains)
        left = [ticket for ticket in replica.engine._calls if any(ticket.startswith(pool._name) for pool in pools)]
        assert left == []
        await asyncio.sleep(self.rng.random() * 5)
        for pool in pools:
            pool.reopen(replica.name)

    async def hang(self, replica: Replica) -> None:
        replica.well.clear()
        await asyncio.sleep(self.rng.random() * 8)
        replica.well.set()

    async def watch(self, pool: EnginePool) -> None:
        while True:
            await asyncio.sleep(2)
            for name, answers in (await pool.check(1.0)).items():
                self.happened["answers again" if answers else "silent"] += 1
                seen = next(r for r in observe(pool).replicas if r.name == name)
                assert ("suspect" in seen.closed) is not answers


def test_random_worlds():
    happened: Counter[str] = Counter()
    for seed in range(10):
        world = World(seed)
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(asyncio.wait_for(world.run(), 1e5))
        failed = [task for task in world.tasks if task.done() and not task.cancelled() and task.exception()]
        assert failed == []
        assert world.happened["answered"] + world.happened["cancelled"] == CALLS * len(world.pools)
        happened += world.happened
    assert min(happened[kind] for kind in ("moved", "cancelled", "death", "drain", "silent", "answers again")) > 20


# ---- real engines


@pytest.mark.parametrize("moves", [1, 3])
def test_a_moved_sample_is_the_undisturbed_one(moves):
    """Tokens to the last, logprobs to 1e-5: the second replica computes what the first one had in its cache."""

    async def main(network: Any) -> tuple[list[Completion], list[Completion], int]:
        engines = [embedded(network, max_concurrent=6) for _ in range(2)]
        clients = [EngineClient(LocalHandle(f"engine-{i}", engine)) for i, engine in enumerate(engines)]
        pool = EnginePool(clients, Router(len(clients), limit=12))
        params = SamplingParams(56, temperature=0.8, top_p=0.95, stop_tokens=(5,))
        prompts = [np.arange(1, 4 + n % 3, dtype=np.int32) + n for n in range(4)]
        groups = [[Request(Tokens(p), params, noise_key(7, n, s)) for s in range(4)] for n, p in enumerate(prompts)]
        calm = [await engines[0].generate(group) for group in groups]
        asked: list[int] = []
        calls = [asyncio.ensure_future(pool.generate(group, priority=n, key=n)) for n, group in enumerate(groups)]
        for engine in engines:

            async def listen(requests: Any, ticket: str = "", generate: Any = engine.generate) -> Any:
                asked.extend(request.position for request in requests)
                return await generate(requests, ticket)

            engine.generate = listen  # type: ignore[method-assign]
        for move in range(moves):
            begun = [(await engine.stats()).generated_tokens for engine in engines]
            while (await engines[move % 2].stats()).generated_tokens < begun[move % 2] + 20:
                await asyncio.sleep(0.001)
            await pool.drain(f"engine-{move % 2}")
            stats = await engines[move % 2].stats()
            assert (stats.running, stats.waiting) == (0, 0)
            pool.reopen(f"engine-{move % 2}")
        found = await asyncio.gather(*calls)
        for engine in engines:
            engine.close()
        return [c for group in calm for c in group], [c for group in found for c in group], sum(p > 0 for p in asked)

    calm, found, moved = asyncio.run(asyncio.wait_for(main(network_of()), 60))
    assert moved > 0 and {c.finish for c in calm} == {"stop", "length"}
    for one, other in zip(calm, found, strict=True):
        assert one.content.tokens_S.tolist() == other.content.tokens_S.tolist() and one.finish == other.finish
        np.testing.assert_allclose(one.logprobs_S, other.logprobs_S, atol=1e-5, rtol=0)
        assert len(other.versions_S) == len(other.content.tokens_S)
