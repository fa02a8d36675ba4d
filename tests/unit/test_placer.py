"""Slots change hands among controllers whose replicas die, hang and come back, in virtual time.

Whatever happens: every call is answered once, with what an undisturbed engine says; only owners that are awake with
the current weights are asked; all controllers have the same split; nothing is left moving at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from gcore.clients import EngineClient, TrainerClient
from gcore.content.tokens import Tokens
from gcore.controller.replicas import CurrentWeights, Replicas
from gcore.generation.pool import EnginePool
from gcore.placement.grid import POLICY, DeviceGrid, Move, Split
from gcore.placement.monitor import Monitor, RolloutProgress
from gcore.placement.placer import RETRY_S, Placer
from gcore.placement.replica_speed import ReplicaSpeed
from gcore.placement.replica_switch import ReplicaSwitch
from gcore.placement.rules import Costs, View, room
from gcore.protocols import Rendezvous, RoleDied, WeightPlan
from gcore.runtime.local import Hub, LocalGroup
from gcore.simulate import VirtualLoop
from gcore.simulate.engine import EmulatedEngine, _sampled
from gcore.types import Request, SamplingParams
from gcore.weights.transfer import WeightTransfer

JUDGE, SLOTS, STOP = "judge", 4, 2
LONG = 40
TIMEOUT_S = 4.0
Script = Callable[[int, Split, View], list[Move]]  # look, split, view


def make_engine() -> EmulatedEngine:
    """A sample's whole length follows from its key, wherever it goes on. Built with the weights of version 0."""
    speed = ReplicaSpeed(
        0.1, 0.03, prefill_s_per_token=0.01, max_concurrent=SLOTS, sleep_s=0.3, wake_s=0.2, weights_s=0.4
    )
    return EmulatedEngine(speed, lengths=lambda r: 1 + r.noise_key % LONG - r.position)


class Replica:
    """Messages arrive in order and a little late; what was sent is done whether or not the caller still listens."""

    def __init__(self, world: World, role: str, number: int) -> None:
        self.world, self.role, self.number = world, role, number
        self.name = f"{'engine' if role == POLICY else role}-{number}"
        self.engine, self.gone = make_engine(), asyncio.Event()
        self.on: dict[str, Callable[[], Any]] = {}  # method -> what happens when it is called
        self._last = 0.0

    def submit(self, method: str, *args: Any) -> Any:
        raise NotImplementedError

    async def call(self, method: str, *args: Any) -> Any:
        loop, engine, gone = asyncio.get_running_loop(), self.engine, self.gone
        if method == "generate":
            self.world.check_sent(self, args[1])
        self._last = at = max(self._last, loop.time() + self.world.rng.random() * 0.02)

        async def work() -> Any:
            await asyncio.sleep(at - loop.time())
            if method in self.on and (instead := self.on[method]()) is not None:
                return await instead
            values = [await asyncio.shield(arg) if isinstance(arg, asyncio.Future) else arg for arg in args]
            return await getattr(engine, method)(*values)

        task, death = asyncio.ensure_future(work()), asyncio.ensure_future(gone.wait())
        self.world.tasks |= {task, death}
        await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
        if gone.is_set():
            task.cancel()
            raise RoleDied(self.name, "gone")
        death.cancel()
        return await task

    @property
    def asleep(self) -> bool:
        return self.engine._asleep


class Trainer:
    name = "trainer-0"

    def submit(self, method: str, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.call(method, *args))

    async def call(self, method: str, *args: Any) -> Any:
        await asyncio.sleep(0.01)
        return WeightPlan(2, every_rank=False) if method == "weight_plan" else {}


@dataclass
class Scripted:
    """The same script on every controller, by the number of the look."""

    world: World
    rank: int
    script: Script
    look: int = 0

    def begin(self, view: View, costs: Costs, last: Split, took_s: float | None) -> Split:
        self.world.took[self.rank].append(took_s)
        return self.world.first or last

    def __call__(self, split: Split, view: View, costs: Costs) -> list[Move]:
        self.look += 1
        self.world.logs[self.rank].append((self.look, split.check(costs.grid), view))
        return self.script(self.look, split, view)


@dataclass
class World:
    script: Script = lambda look, split, view: []
    grid: DeviceGrid = field(default_factory=lambda: DeviceGrid(4, {POLICY: 1, JUDGE: 1}))
    first: Split | None = None
    split: Split = field(default_factory=lambda: Split((POLICY, POLICY, JUDGE, JUDGE)))
    size: int = 2
    groups: int = 12  # of each controller and step
    steps: int = 1
    rests: bool = True
    decides: bool = False  # else as in an evaluation: no group is decided on
    seed: int = 0
    spread_s: float = 4.0  # over which the groups of a step begin
    poll_interval_s: float = 0.25
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    version: int = 0  # the trainer's

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.logs: list[list[Any]] = [[] for _ in range(self.size)]
        self.took: list[list[float | None]] = [[] for _ in range(self.size)]
        self.replicas = {
            role: [Replica(self, role, i) for i in range(self.grid.num_blocks * self.grid.per_block(role))]
            for role in self.grid.roles
        }
        clients = {role: [EngineClient(replica) for replica in found] for role, found in self.replicas.items()}
        hub, self.placers, self.pools, self.members = Hub(self.size), list[Placer](), [], []
        self.switches: list[dict[str, ReplicaSwitch]] = []
        for rank in range(self.size):
            self.groups_of = LocalGroup(Rendezvous(rank, self.size, None, hub))
            pools = {role: EnginePool.for_controller(found, rank, self.size, SLOTS) for role, found in clients.items()}
            weights = CurrentWeights([TrainerClient(Trainer())], lambda: self.version)
            switches = {
                POLICY: ReplicaSwitch(clients[POLICY], 2, weights.load),
                JUDGE: ReplicaSwitch(clients[JUDGE], 1),
            }
            placer = Placer(
                self.grid,
                Scripted(self, rank, self.script),
                self.split,
                pools,
                switches,
                self.groups_of,
                Monitor(self.grid, dict.fromkeys(self.grid.roles, SLOTS)),
                poll_interval_s=self.poll_interval_s,
                timeout_s=TIMEOUT_S,
                note=self.notes.append if rank == 0 else lambda text: None,
            )
            self.placers.append(placer)
            self.pools.append(pools)
            self.switches.append(switches)
            replicas = Replicas(pools[POLICY], [pools[JUDGE]], weights, self.notes.append, placer)
            self.members.append((self.groups_of, weights, replicas))

    # ---- what must hold

    def block(self, replica: Replica) -> int:
        return replica.number // self.grid.per_block(replica.role)

    def check_sent(self, replica: Replica, ticket: str) -> None:
        """The caller believes that it has its block; it is awake and has current weights."""
        (rank,) = (n for n, pools in enumerate(self.pools) if ticket.startswith(pools[replica.role]._name))
        placer, block = self.placers[rank], self.block(replica)
        moving = placer._moving.get(block)
        if moving is None:
            assert placer.split[block] == replica.role, f"{replica.name} is not the owner"
        else:  # the drain was ordered, and begins in this very moment
            drain = inspect.getcoroutinestate(moving.task.get_coro())
            assert moving.move.source == replica.role and drain == inspect.CORO_CREATED
        if not replica.gone.is_set():
            assert not replica.asleep, f"{replica.name} sleeps"
            assert replica.role == JUDGE or replica.engine.version == self.version, f"{replica.name} is not up to date"
        self.counts[f"sent {replica.name}"] += 1

    def check_end(self) -> None:
        """Between two rollouts, with everyone alive."""
        first = self.placers[0]
        assert all(log == self.logs[0] for log in self.logs)
        assert all(placer.split == first.split and not placer._moving for placer in self.placers)
        for replica in (r for found in self.replicas.values() for r in found):
            owns = first.split[self.block(replica)] == replica.role
            assert replica.asleep is not owns, replica.name
            assert self.switches[0][replica.role].replicas[replica.number].awake is owns
            for pools in self.pools:
                seen = pools[replica.role].observe().replicas[replica.number]
                assert (seen.requests, seen.closed) == (0, () if owns else ("drained",)), replica.name

    # ---- what happens

    async def run(self) -> None:
        await asyncio.gather(*map(self.controller, range(self.size)))

    async def controller(self, rank: int) -> None:
        group, weights, _ = self.members[rank]
        placer = self.placers[rank]
        for step in range(1, self.steps + 1):
            async with weights.trainers_in_use:
                await placer.begin(self.groups, 1.0, 2)
                if rank == 0:
                    self.version = step
                    living = self.pools[0][POLICY].alive()
                    own = {i: r for i, r in placer.owners(POLICY).items() if i in living}
                    await WeightTransfer([TrainerClient(Trainer())]).send(own, step)
                await group.all_gather("weights", None)
            left = [self.groups]
            async with placer.during(
                lambda left=left: RolloutProgress(self.groups, 0, (self.groups - left[0]) * self.decides, left[0], 1.0),
                step,
            ):
                await asyncio.gather(*(self.sample(rank, n, left) for n in range(self.groups)))
            assert not placer._moving
            await group.all_gather("end", None)
            if rank == 0 and self.rests and step < self.steps:
                await placer.rest()

    async def sample(self, rank: int, number: int, left: list[int]) -> None:
        rng = self.rng
        await asyncio.sleep(rng.random() ** 3 * self.spread_s)  # many at first
        pools = self.pools[rank]
        await self.ask(pools[POLICY], rng.choice([1, 2, 4]), number)
        await asyncio.gather(*(self.ask(pools[JUDGE], 1, number) for _ in range(rng.randint(1, 3))))
        left[0] -= 1

    async def ask(self, pool: EnginePool, count: int, number: int) -> None:
        prompt = np.arange(1, self.rng.randint(2, 9), dtype=np.int32)
        requests = [
            Request(Tokens(prompt), SamplingParams(LONG, stop_tokens=(STOP,)), self.rng.getrandbits(60))
            for _ in range(count)
        ]
        found = await pool.generate(requests, priority=number)
        for request, answer in zip(requests, found, strict=True):
            length = 1 + request.noise_key % LONG
            assert answer.finish == ("stop" if length < LONG else "length")
            assert np.array_equal(answer.content.tokens_S, _sampled(request, length, answer.finish, range(4, 1000)))
        self.counts["answered"] += 1

    def kill(self, replica: Replica, back_s: float = 3.0, told_s: float = 0.1) -> None:
        """As controller/supervise.py brings it back."""
        if replica.gone.is_set():
            return
        replica.gone.set()
        self.counts["deaths"] += 1
        members = [replicas for *_, replicas in self.members]

        async def bring_back() -> None:
            await asyncio.sleep(told_s)
            await asyncio.gather(*(m.mark_dead(replica.name) for m in members))
            await asyncio.sleep(back_s)
            replica.engine, replica.gone, replica.on = make_engine(), asyncio.Event(), {}
            if await members[0].restore(replica.name):
                await asyncio.gather(*(m.mark_alive(replica.name) for m in members))
                self.counts["returns"] += 1
            else:
                assert replica.gone.is_set(), replica.name
                self.counts["returns"] += 1  # another death, which is told once more

        self.tasks.add(asyncio.ensure_future(bring_back()))


def play(world: World, *others: Any) -> World:
    """To the end, and then until all who died are back."""

    async def main() -> None:
        extra = [asyncio.ensure_future(other) for other in others]
        await world.run()
        for task in extra:
            task.cancel()
        await asyncio.sleep(20)
        if not world.counts["hung"]:  # who did not do as told, not even to take it back, is seen to at the next start
            world.check_end()
        for replica in (r for found in world.replicas.values() for r in found):
            replica.on.clear()
        await asyncio.gather(*(placer.begin(1, 1.0, 1) for placer in world.placers))
        world.check_end()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(asyncio.wait_for(main(), 900))
    failed = [task for task in world.tasks if task.done() and not task.cancelled() and task.exception()]
    assert [task.exception() for task in failed if not isinstance(task.exception(), RoleDied)] == []
    assert world.counts["returns"] == world.counts["deaths"]
    return world


def at(look: int, *moves: Move) -> Script:
    return lambda now, split, view: list(moves) if now == look else []


def give(block: int = 1) -> Move:
    return Move(block, POLICY, JUDGE, "as told")


def take(block: int = 2) -> Move:
    return Move(block, JUDGE, POLICY, "as told")


def moves_of(world: World) -> list[tuple[int, str, str]]:
    return [(m["slots"][0], m["to"], m["reason"]) for m in world.placers[0].timeline.moves]


# ---- moves


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_block_changes_hands(size):
    world = play(World(at(4, give()), size=size))
    assert world.placers[0].split == Split((POLICY, JUDGE, JUDGE, JUDGE))
    assert moves_of(world) == [(1, JUDGE, "as told")] and world.notes == []
    assert world.counts["sent judge-1"] > 0 and world.counts["sent judge-0"] == world.counts["sent engine-2"] == 0


@pytest.mark.parametrize("size", [1, 3])
def test_judges_are_sent_what_they_can_use(size):
    """As soon as their speed is known; three controllers share two judges' replicas each by a third."""
    grid = DeviceGrid(2, {POLICY: 1, JUDGE: 1})
    world = World(grid=grid, split=Split((POLICY, JUDGE)), size=size, groups=30, spread_s=8.0)
    play(world)
    for placer, pools in zip(world.placers, world.pools, strict=True):
        assert placer.monitor.knows(JUDGE)
        asked = pools[JUDGE]._router._own._limit
        most = room(placer.monitor.expected(1, 1.0, 1).loads[JUDGE], placer.monitor.costs.speeds[JUDGE])
        assert asked == (most if size == 1 else -(-most // 3)) < 2 * SLOTS
        assert pools[POLICY]._router._own._limit == 2 * SLOTS


def test_an_engine_that_wakes_takes_weights_before_it_is_asked():
    """World.check_sent sees to the order; here, that it was asked at all."""
    world = play(World(at(4, take()), spread_s=8.0))
    assert world.placers[0].split == Split((POLICY, POLICY, POLICY, JUDGE))
    assert world.counts["sent engine-2"] > 0 and world.replicas[POLICY][2].engine.version == 1


def test_two_moves_at_once_and_back():
    script = {4: [give(0), take(2)], 30: [Move(0, JUDGE, POLICY), Move(2, POLICY, JUDGE)]}
    world = play(World(lambda look, split, view: script.get(look, []), spread_s=12.0, groups=30))
    assert world.placers[0].split == world.split and len(moves_of(world)) == 4


def test_a_block_that_moves_is_not_moved_again():
    """Whatever the rule says."""
    world = play(World(lambda look, split, view: [give()] if 4 <= look <= 5 else []))
    assert len(moves_of(world)) == 1


def test_a_role_may_lose_all_its_blocks_for_a_while():
    """Its calls wait."""
    everything = [give(0), give(1)]
    script = {2: everything, 40: [Move(0, JUDGE, POLICY)]}
    world = play(World(lambda look, split, view: script.get(look, [])))
    assert world.placers[0].split == Split((POLICY, JUDGE, JUDGE, JUDGE))


def test_blocks_of_several_replicas():
    """Two engines or one judge a block; and judges of half a block."""
    for widths, first in (({POLICY: 1, JUDGE: 2}, "engine"), ({POLICY: 2, JUDGE: 1}, "judge")):
        split = Split((POLICY, POLICY, JUDGE))
        world = play(World(at(4, give(), take()), DeviceGrid(6, widths), split=split, spread_s=8.0))
        assert world.placers[0].split == Split((POLICY, JUDGE, POLICY))
        news = ("engine-4", "engine-5", "judge-1") if first == "engine" else ("engine-2", "judge-2", "judge-3")
        assert all(world.counts[f"sent {name}"] for name in news)


def test_the_next_rollout_begins_as_the_rule_says():
    for rests in (True, False):
        world = World(steps=3, first=Split((POLICY, JUDGE, POLICY, JUDGE)), rests=rests, groups=6)
        assert play(world).placers[0].split == world.first


@pytest.mark.parametrize("decides", [True, False])
def test_all_controllers_hear_the_same_of_how_long_a_rollout_took(decides):
    """By controller 0's clock. An evaluation tells nothing."""
    world = play(World(steps=3, size=3, decides=decides))
    took = world.took[0]
    assert world.took == [took] * 3 and took[0] is None and len(took) == 4
    assert [seconds is not None and 1.0 < seconds < 600.0 for seconds in took[1:]] == [decides] * 3, took
    elapsed = [view.elapsed_s for _, _, view in world.logs[0]]
    assert elapsed == [view.elapsed_s for _, _, view in world.logs[2]] and 0.0 < elapsed[0] < elapsed[1]


def test_looks_go_on_until_all_controllers_are_done():
    """One is done long before the other, whose rollout needs a move that comes late."""
    world = World(lambda look, split, view: [give()] if look == 60 else [], split=Split((POLICY,) * 4), groups=3)
    rest = world.sample

    async def sample(rank: int, number: int, left: list[int]) -> None:
        if rank == 1:
            await rest(rank, number, left)

    world.sample = sample  # type: ignore[method-assign]
    play(world)
    assert world.counts["sent judge-1"] > 0 and len(world.logs[0]) > 60


def test_a_move_under_way_at_the_end_is_ended():
    """One always is; `controller` finds none when the rollout is over."""

    def to_and_fro(look: int, split: Split, view: View) -> list[Move]:
        if 1 in view.moving:
            return []
        return [give()] if split[1] == POLICY else [take(1)]

    world = play(World(to_and_fro, groups=4))
    assert len(moves_of(world)) > 2 and world.logs[0][-1][2].moving == {1}


def test_a_failure_in_a_rollout_ends_the_looks():
    world = World(at(1, give()), size=1)

    async def fail(rank: int, number: int, left: list[int]) -> None:
        await asyncio.sleep(0.3)
        raise ValueError("broken")

    world.sample = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="broken"):
        play(world)


def test_a_rule_that_breaks_ends_the_rollout():
    """Without looks it might wait for ever."""

    def broken(look: int, split: Split, view: View) -> list[Move]:
        raise ZeroDivisionError("no rule")

    with pytest.raises(ZeroDivisionError, match="no rule"):
        play(World(broken, split=Split((POLICY,) * 4)))  # nobody judges


# ---- faults


def stays(world: World, block: int, owner: str, why: str) -> None:
    """The block is its owner's, whose replica was asked again afterwards, and a note says why it is."""
    assert world.placers[0].split[block] == owner
    assert world.notes[0] == f"block {block} stays with {owner}: {why}", world.notes
    assert moves_of(world)[0][2] == f"taken back: {why}"
    name = "engine" if owner == POLICY else owner
    assert world.counts[f"after {name}-{block}"] > 0


def faulty(move: Move, role: str, block: int, method: str, happens: Callable[[World, Replica], Any]) -> World:
    """At `method` of the replica on the block (only once the move has begun) something happens to it."""
    world = World(at(4, move), groups=40, spread_s=60.0)
    replica = world.replicas[role][block]
    armed = [True]

    def hit() -> Any:
        if armed[0] and world.placers[0]._moving:
            armed[0] = False
            return happens(world, replica)
        return None

    replica.on[method] = hit
    check = world.check_sent

    def check_sent(sent: Replica, ticket: str) -> None:
        check(sent, ticket)
        if world.notes:
            world.counts[f"after {sent.name}"] += 1

    world.check_sent = check_sent  # type: ignore[method-assign]
    return world


def die(world: World, replica: Replica) -> None:
    world.kill(replica)


def hang(world: World, replica: Replica) -> Any:
    return asyncio.Event().wait()


@pytest.mark.parametrize(
    ("method", "back_s"), [("abort", 3.0), ("stats", 3.0), ("sleep", 3.0), ("stats", 0.02), ("sleep", 0.02)]
)
def test_the_owner_dies_in_the_move(method, back_s):
    """Also when it is back before all have heard that the move is taken back."""
    world = play(faulty(give(), POLICY, 1, method, lambda world, replica: world.kill(replica, back_s, 0.01)))
    stays(world, 1, POLICY, "engine-1 died: gone")
    assert world.counts["deaths"] == 1


@pytest.mark.parametrize("method", ["wake", "load_weights"])
def test_the_new_owner_dies_in_the_move(method):
    world = play(faulty(take(), POLICY, 2, method, die))
    stays(world, 2, JUDGE, "engine-2 died: " + ("gone" if method == "wake" else "it took no weights"))


def test_the_old_owner_gets_weights_when_the_new_one_dies():
    """A policy engine that slept without its weights is asked again; check_sent sees to the version."""
    stays(play(faulty(give(), JUDGE, 1, "wake", die)), 1, POLICY, "judge-1 died: gone")


def test_the_old_owner_dies_asleep_and_the_new_one_does_not_wake():
    """Both are seen to: the old owner when it is back."""

    def happens(world: World, replica: Replica) -> Any:
        world.kill(world.replicas[POLICY][1])
        return hang(world, replica)

    stays(play(faulty(give(), JUDGE, 1, "wake", happens)), 1, POLICY, f"took longer than {TIMEOUT_S:g} s")


def test_the_old_owner_dies_asleep_and_the_move_is_made():
    def happens(world: World, replica: Replica) -> None:
        world.kill(world.replicas[POLICY][1])

    world = play(faulty(give(), JUDGE, 1, "wake", happens))
    assert world.placers[0].split[1] == JUDGE and world.notes == []


@pytest.mark.parametrize("method", ["wake", "load_weights", "sleep"])
def test_a_change_that_takes_too_long(method):
    """A wake or a sleep that nobody answers; the replica itself is well."""
    move, owner, block = (give(), POLICY, 1) if method == "sleep" else (take(), JUDGE, 2)
    world = play(faulty(move, POLICY, block, method, hang))
    stays(world, block, owner, f"took longer than {TIMEOUT_S:g} s")


def test_a_drain_that_takes_too_long():
    """An engine that does not hear of aborts, with a request that is longer than the patience."""

    async def deaf() -> None:
        return None

    world = faulty(give(), POLICY, 1, "abort", lambda world, replica: deaf())
    world.replicas[POLICY][1].on["abort"] = lambda: deaf()
    world.replicas[POLICY][1].engine = EmulatedEngine(
        ReplicaSpeed(2.0, 0.0, 0.0, SLOTS, 0.3, 0.2, 0.4), lengths=lambda r: 1 + r.noise_key % LONG - r.position
    )
    stays(play(world), 1, POLICY, f"not drained after {TIMEOUT_S:g} s")


def test_a_change_that_breaks_in_an_unknown_way():
    """Nobody waits for it for ever."""

    async def broken() -> None:
        raise KeyError("strange")

    world = faulty(take(), POLICY, 2, "wake", lambda world, replica: broken())
    world.tasks = _Unheard()
    stays(play(world), 2, JUDGE, "'strange'")


class _Unheard(set[Any]):
    """Tasks whose errors are expected."""

    def __ior__(self, other: Any) -> Any:
        return self


def test_an_owner_that_cannot_be_woken_again_is_not_asked_until_the_next_rollout():
    world = World(at(4, give()), groups=20, spread_s=30.0, steps=2)
    wakes = Counter[str]()
    for role in (POLICY, JUDGE):
        replica = world.replicas[role][1]

        def wake(role: str = role) -> Any:
            wakes[role] += 1
            return asyncio.Event().wait() if world.version == 1 and world.placers[0]._moving else None

        replica.on["wake"] = wake
    play(world)
    assert world.notes == [f"block 1 stays with {POLICY}: took longer than {TIMEOUT_S:g} s"]
    assert wakes[POLICY] >= 2  # and in the second rollout it is asked, as check_end finds it open and awake


def test_an_owner_that_cannot_be_woken_again_is_asked_when_it_died_and_returned():
    """In the same rollout."""
    world = faulty(give(), JUDGE, 1, "wake", hang)
    world.replicas[POLICY][1].on["wake"] = lambda: hang(world, world.replicas[POLICY][1])

    async def death() -> None:
        while not world.notes:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        assert world.counts["after engine-1"] == 0
        world.kill(world.replicas[POLICY][1])

    stays(play(world, death()), 1, POLICY, f"took longer than {TIMEOUT_S:g} s")


def test_a_failed_move_is_not_tried_again_at_once():
    """The rule insists; the new owner is dead for good as long as this lasts."""
    world = World(lambda look, split, view: [give()] if split[1] == POLICY and 1 not in view.moving else [], groups=30)
    world.spread_s = 40.0

    async def death() -> None:
        await asyncio.sleep(0.1)
        world.kill(world.replicas[JUDGE][1], back_s=20.0)

    play(world, death())
    tries = [m["at_s"] for m in world.placers[0].timeline.moves]
    assert 3 <= len(tries) <= 20 / RETRY_S + 2 and world.placers[0].split[1] == JUDGE


def test_all_judges_die():
    """Their questions wait until one is admitted again."""
    world = World(groups=10, spread_s=2.0)

    async def deaths() -> None:
        await asyncio.sleep(1.5)
        for replica in world.replicas[JUDGE][2:]:
            world.kill(replica, back_s=30.0)

    play(world, deaths())
    assert world.counts["deaths"] == 2 and world.placers[0].timeline.seconds > 30


def test_who_returns_without_a_place_sleeps():
    world = World(groups=20, spread_s=30.0)

    async def death() -> None:
        await asyncio.sleep(2)
        world.kill(world.replicas[JUDGE][0])
        world.kill(world.replicas[POLICY][3])

    play(world, death())
    assert world.replicas[JUDGE][0].asleep and world.replicas[POLICY][3].asleep and world.counts["deaths"] == 2


# ---- random worlds


def at_random(seed: int, grid: DeviceGrid, often: float) -> Script:
    """Any moves that leave every role a block; in the same way on all controllers."""

    def script(look: int, split: Split, view: View) -> list[Move]:
        dice = random.Random(f"{seed}/{look}")
        found, counts = list[Move](), Counter(split.owners)
        free = [block for block in range(grid.num_blocks) if block not in view.moving]
        dice.shuffle(free)
        while free and dice.random() < often:
            block = free.pop()
            if counts[split[block]] > 1:
                target = JUDGE if split[block] == POLICY else POLICY
                counts[split[block]] -= 1
                counts[target] += 1
                found.append(Move(block, split[block], target, "chance"))
        return found

    return script


def worlds(count: int) -> Iterator[tuple[World, Any]]:
    for seed in range(count):
        dice = random.Random(seed)
        grid = DeviceGrid(
            2 * dice.randint(1, 4), dice.choice([{POLICY: 1, JUDGE: 1}, {POLICY: 1, JUDGE: 2}, {POLICY: 2, JUDGE: 1}])
        )
        if grid.num_blocks < 2:
            grid = DeviceGrid(4, grid.widths)
        owners = [dice.choice([POLICY, JUDGE]) for _ in range(grid.num_blocks)]
        owners[0], owners[-1] = POLICY, JUDGE
        world = World(
            at_random(seed, grid, dice.choice([0.02, 0.1, 0.3])),
            grid,
            split=Split(tuple(owners)),
            size=dice.randint(1, 3),
            groups=4,
            steps=2,
            poll_interval_s=0.5,
            rests=dice.random() < 0.5,
            seed=seed,
        )
        yield world, trouble(world, dice)


async def trouble(world: World, dice: random.Random) -> None:
    """Deaths at any time, and now and then a call that nobody answers."""
    while True:
        await asyncio.sleep(dice.random() * 4)
        replica = dice.choice(world.replicas[dice.choice([POLICY, JUDGE])])
        kind = dice.random()
        if kind < 0.6 and world.counts["deaths"] < 6:
            world.kill(replica, dice.random() * 4, dice.random() * 0.3)
        elif kind < 0.75:
            method = dice.choice(["sleep", "wake", "load_weights"])

            def once(replica: Replica = replica, method: str = method) -> Any:
                del replica.on[method]
                if world.placers[0]._moving:
                    world.counts["hung"] += 1
                    world.kill(replica) if dice.random() < 0.5 else None
                    return asyncio.Event().wait() if world.block(replica) in world.placers[0]._moving else None
                return None

            replica.on[method] = once


def test_random_worlds():
    """GCORE_WORLDS=2000 for more of them."""
    counts: Counter[str] = Counter()
    for world, happens in worlds(int(os.environ.get("GCORE_WORLDS", 40))):
        with contextlib.closing(happens):
            play(world, happens)
        asked = world.size * world.groups * world.steps
        assert world.counts["answered"] >= 2 * asked
        counts += world.counts
        counts["taken back"] += len(world.notes)
        counts["moves"] += sum(len(placer.timeline.moves) for placer in world.placers[:1])
    assert counts["moves"] > 100 and counts["deaths"] > 60 and counts["taken back"] > 20 and counts["hung"] > 5, counts
