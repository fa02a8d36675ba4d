"""Blocks change their owner while replicas die, hang and restart, in virtual time.

Always true: every call is answered once, with the tokens of an undisturbed engine; requests go only to owners that are
awake and have the current weights; all controllers have the same split; no move is in progress at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from bench.virtual_loop import VirtualLoop
from gcore.clients import EngineClient, TrainerClient
from gcore.content.tokens import Tokens
from gcore.controller.engine_weights import EngineWeights
from gcore.controller.replicas import Replicas
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.emulate.engine import EmulatedEngine, _sampled
from gcore.generation.pool import EnginePool
from gcore.generation.routing import shared_limit
from gcore.placement.grid import POLICY, DeviceGrid, Move, Split
from gcore.placement.monitor import Monitor, RolloutProgress
from gcore.placement.placer import RETRY_S, Placer
from gcore.placement.replica_switch import ReplicaSwitch
from gcore.placement.rules import ClusterLoad, RoleSpeeds, request_limit
from gcore.protocols import Rendezvous, RoleDied, WeightPlan
from gcore.runtime.local import Hub, LocalGroup
from gcore.types import Request, SamplingParams
from gcore.weights.transfer import WeightTransfer
from tests.unit.pools import observe

JUDGE, SLOTS, STOP = "judge", 4, 2
LONG = 40
TIMEOUT_S = 4.0
TRAINING_S = 2.0
Script = Callable[[int, Split, ClusterLoad], list[Move]]  # number of the poll, split, view


def make_engine() -> EmulatedEngine:
    """The length of a sample depends only on its key, also if it continues elsewhere. Has weights of version 0."""
    speed = ReplicaSpeed(
        0.1, 0.03, prefill_s_per_token=0.01, max_concurrent=SLOTS, sleep_s=0.3, wake_s=0.2, weights_s=0.4
    )
    return EmulatedEngine(speed, lengths=lambda r: 1 + r.noise_key % LONG - r.position)


class Replica:
    """Calls arrive in order, with a small delay. A call that was sent is executed even if its caller is cancelled."""

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
    """The same script on every controller, by the number of the poll."""

    world: World
    rank: int
    script: Script
    poll: int = 0

    def begin(self, view: ClusterLoad, costs: RoleSpeeds, last: Split, took_s: float | None) -> Split:
        self.world.took[self.rank].append(took_s)
        return self.world.first or last

    def __call__(self, split: Split, view: ClusterLoad, costs: RoleSpeeds) -> list[Move]:
        self.poll += 1
        self.world.logs[self.rank].append((self.poll, split.check(costs.grid), view))
        return self.script(self.poll, split, view)


@dataclass
class World:
    script: Script = lambda poll, split, view: []
    grid: DeviceGrid = field(default_factory=lambda: DeviceGrid(4, {POLICY: 1, JUDGE: 1}))
    first: Split | None = None
    split: Split = field(default_factory=lambda: Split((POLICY, POLICY, JUDGE, JUDGE)))
    size: int = 2
    groups: int = 12  # per controller and step
    steps: int = 1
    sleeps: bool = True  # all replicas sleep between rollouts
    decides: bool = False  # False: as in an evaluation, no group is decided on
    keeps: bool = False  # the split, as in an evaluation
    seed: int = 0
    spread_s: float = 4.0  # over which the groups of a step begin
    poll_interval_s: float = 0.25
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    version: int = 0  # the trainer's
    trains: bool = False  # the trainer works

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
            pools = {
                role: EnginePool.for_controller(found, rank, self.size, SLOTS, roam=True)
                for role, found in clients.items()
            }
            weights = EngineWeights(self.groups_of, pools[POLICY], [TrainerClient(Trainer())])
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
            replicas = Replicas(pools[POLICY], [pools[JUDGE]], weights, self.notes.append, placer, shares_devices=True)
            self.members.append((self.groups_of, weights, replicas))

    # ---- invariants

    def block(self, replica: Replica) -> int:
        return replica.number // self.grid.per_block(replica.role)

    def check_sent(self, replica: Replica, ticket: str) -> None:
        """The caller's split has it as owner of its block; it is awake and has the current weights."""
        (rank,) = (n for n, pools in enumerate(self.pools) if ticket.startswith(pools[replica.role]._name))
        placer, block = self.placers[rank], self.block(replica)
        moving = placer._moving.get(block)
        if moving is None:
            assert placer.split[block] == replica.role, f"{replica.name} is not the owner"
        else:  # the move is decided, and the drain of the pool starts in the next turns of the event loop
            found = {seen.name: seen.closed for seen in observe(self.pools[rank][replica.role]).replicas}
            assert moving.move.source == replica.role and not found[replica.name]
        if not replica.gone.is_set():
            assert not replica.asleep, f"{replica.name} is asleep"
            assert replica.role == JUDGE or replica.engine.version == self.version, f"{replica.name} has old weights"
        self.counts[f"sent {replica.name}"] += 1

    def check_starts(self, replica: Replica) -> None:
        """A process that starts allocates memory, which the trainer needs while it works."""
        assert not self.trains, f"{replica.name} starts while the trainer works"

    def check_end(self) -> None:
        """Between two rollouts, with all replicas alive."""
        first = self.placers[0]
        assert all(log == self.logs[0] for log in self.logs)
        assert all(placer.split == first.split and not placer._moving for placer in self.placers)
        for replica in (r for found in self.replicas.values() for r in found):
            owns = first.split[self.block(replica)] == replica.role
            assert replica.asleep is not owns, replica.name
            assert self.switches[0][replica.role].replicas[replica.number].awake is owns
            for pools in self.pools:
                observed = observe(pools[replica.role]).replicas[replica.number]
                assert (observed.requests, observed.closed) == (0, () if owns else ("drained",)), replica.name

    # ---- controllers and faults

    async def run(self) -> None:
        await asyncio.gather(*map(self.controller, range(self.size)))

    async def controller(self, rank: int) -> None:
        group, weights, _ = self.members[rank]
        placer = self.placers[rank]
        for step in range(1, self.steps + 1):
            async with weights.training():
                if step > 1:
                    await group.all_gather("engines idle", None)
                    if rank == 0:
                        await self.train()
                    await group.all_gather("trained", None)
                await placer.begin(self.groups, 1.0, 2)
                if rank == 0:
                    self.version = weights.version = step
                    living = self.pools[0][POLICY].alive()
                    own = {i: r for i, r in placer.owners(POLICY).items() if i in living}
                    await WeightTransfer([TrainerClient(Trainer())]).send(own, step)
                await group.all_gather("weights", None)
            left = [self.groups]
            async with placer.during(
                lambda left=left: RolloutProgress(self.groups, 0, (self.groups - left[0]) * self.decides, left[0], 1.0),
                step,
                self.keeps,
            ):
                await asyncio.gather(*(self.sample(rank, n, left) for n in range(self.groups)))
            assert not placer._moving

    async def train(self) -> None:
        if self.sleeps:
            await self.placers[0].sleep_all()
        self.trains = True
        await asyncio.sleep(TRAINING_S)
        self.trains = False

    async def sample(self, rank: int, number: int, left: list[int]) -> None:
        rng = self.rng
        await asyncio.sleep(rng.random() ** 3 * self.spread_s)  # many at first
        pools = self.pools[rank]
        await self.request(pools[POLICY], rng.choice([1, 2, 4]), number)
        await asyncio.gather(*(self.request(pools[JUDGE], 1, number) for _ in range(rng.randint(1, 3))))
        left[0] -= 1

    async def request(self, pool: EnginePool, count: int, number: int) -> None:
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

    def kill(self, replica: Replica, restart_s: float = 3.0, notice_s: float = 0.1) -> None:
        """Kill a replica and restart it as driver/supervise.py does."""
        if replica.gone.is_set():
            return
        replica.gone.set()
        self.counts["deaths"] += 1
        members = [replicas for *_, replicas in self.members]

        async def restart() -> None:
            await asyncio.sleep(notice_s)
            await asyncio.gather(*(m.mark_dead(replica.name) for m in members))
            await members[0].begin_restart(replica.name)
            self.check_starts(replica)
            await asyncio.sleep(restart_s)
            self.check_starts(replica)
            replica.engine, replica.gone, replica.on = make_engine(), asyncio.Event(), {}
            if await members[0].restore(replica.name):
                await asyncio.gather(*(m.mark_alive(replica.name) for m in members))
                self.counts["returns"] += 1
            else:
                assert replica.gone.is_set(), replica.name
                self.counts["returns"] += 1  # it died again, which is handled separately

        self.tasks.add(asyncio.ensure_future(restart()))


def play(world: World, *others: Any) -> World:
    """Run to the end, and then until all dead replicas are restarted."""

    async def main() -> None:
        extra = [asyncio.ensure_future(other) for other in others]
        await world.run()
        for task in extra:
            task.cancel()
        await asyncio.sleep(20)
        if not world.counts["hung"]:  # a replica that hung, also in the revert, gets its state at the next begin
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


def at(poll: int, *moves: Move) -> Script:
    return lambda now, split, view: list(moves) if now == poll else []


def to_judge(block: int = 1) -> Move:
    return Move(block, POLICY, JUDGE, "scripted")


def to_policy(block: int = 2) -> Move:
    return Move(block, JUDGE, POLICY, "scripted")


def moves_of(world: World) -> list[tuple[int, str, str]]:
    return [(m["slots"][0], m["to"], m["reason"]) for m in world.placers[0].timeline.moves]


# ---- moves


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_block_changes_hands(size):
    world = play(World(at(4, to_judge()), size=size))
    assert world.placers[0].split == Split((POLICY, JUDGE, JUDGE, JUDGE))
    assert moves_of(world) == [(1, JUDGE, "scripted")] and world.notes == []
    assert world.counts["sent judge-1"] > 0 and world.counts["sent judge-0"] == world.counts["sent engine-2"] == 0


@pytest.mark.parametrize("size", [1, 3])
def test_the_requests_of_judges_are_limited(size):
    """As soon as their speed is known; each of three controllers has a third of the limit."""
    grid = DeviceGrid(2, {POLICY: 1, JUDGE: 1})
    world = World(grid=grid, split=Split((POLICY, JUDGE)), size=size, groups=30, spread_s=8.0)
    play(world)
    for placer, pools in zip(world.placers, world.pools, strict=True):
        assert placer.monitor.is_measured(JUDGE)
        limit = pools[JUDGE]._router._tiers[0].limit
        most = request_limit(placer.monitor.expected(1, 1.0, 1).loads[JUDGE], placer.monitor.costs.speeds[JUDGE])
        assert limit == (most if size == 1 else -(-most // 3)) < 2 * SLOTS
        assert pools[POLICY]._router._tiers[0].limit == shared_limit(SLOTS, size)


def test_an_engine_that_wakes_loads_weights_before_it_gets_requests():
    """World.check_sent checks the order; this test checks that it gets requests."""
    world = play(World(at(4, to_policy()), spread_s=8.0))
    assert world.placers[0].split == Split((POLICY, POLICY, POLICY, JUDGE))
    assert world.counts["sent engine-2"] > 0 and world.replicas[POLICY][2].engine.version == 1


def test_two_moves_at_once_and_back():
    script = {4: [to_judge(0), to_policy(2)], 30: [Move(0, JUDGE, POLICY), Move(2, POLICY, JUDGE)]}
    world = play(World(lambda poll, split, view: script.get(poll, []), spread_s=12.0, groups=30))
    assert world.placers[0].split == world.split and len(moves_of(world)) == 4


def test_a_block_that_moves_is_not_moved_again():
    """Even if the rule returns the move again."""
    world = play(World(lambda poll, split, view: [to_judge()] if 4 <= poll <= 5 else []))
    assert len(moves_of(world)) == 1


def test_a_role_may_lose_all_its_blocks_for_a_while():
    """Its calls wait."""
    all_blocks = [to_judge(0), to_judge(1)]
    script = {2: all_blocks, 40: [Move(0, JUDGE, POLICY)]}
    world = play(World(lambda poll, split, view: script.get(poll, [])))
    assert world.placers[0].split == Split((POLICY, JUDGE, JUDGE, JUDGE))


def test_blocks_of_several_replicas():
    """Two engines or one judge per block; and one engine or two judges per block."""
    for widths, first in (({POLICY: 1, JUDGE: 2}, "engine"), ({POLICY: 2, JUDGE: 1}, "judge")):
        split = Split((POLICY, POLICY, JUDGE))
        world = play(World(at(4, to_judge(), to_policy()), DeviceGrid(6, widths), split=split, spread_s=8.0))
        assert world.placers[0].split == Split((POLICY, JUDGE, POLICY))
        moved = ("engine-4", "engine-5", "judge-1") if first == "engine" else ("engine-2", "judge-2", "judge-3")
        assert all(world.counts[f"sent {name}"] for name in moved)


def test_the_next_rollout_begins_with_the_split_of_the_rule():
    for sleeps in (True, False):
        world = World(steps=3, first=Split((POLICY, JUDGE, POLICY, JUDGE)), sleeps=sleeps, groups=6)
        assert play(world).placers[0].split == world.first


@pytest.mark.parametrize("decides", [True, False])
def test_all_controllers_get_the_same_seconds_of_the_last_rollout(decides):
    """By controller 0's clock. After an evaluation: None."""
    world = play(World(steps=3, size=3, decides=decides))
    took = world.took[0]
    assert world.took == [took] * 3 and took[0] is None and len(took) == 4
    assert [seconds is not None and 1.0 < seconds < 600.0 for seconds in took[1:]] == [decides] * 3, took
    elapsed = [view.elapsed_s for _, _, view in world.logs[0]]
    assert elapsed == [view.elapsed_s for _, _, view in world.logs[2]] and 0.0 < elapsed[0] < elapsed[1]


def test_after_an_evaluation_the_next_rollout_has_the_split_that_was_chosen_for_it():
    world = play(World(at(4, to_judge(), to_policy()), keeps=True, spread_s=8.0))
    assert world.counts["sent judge-1"] and world.counts["sent engine-2"] and world.placers[0].split == world.split
    back = "the split of the next rollout"
    moves = [(1, JUDGE, "scripted"), (2, POLICY, "scripted"), (1, POLICY, back), (2, JUDGE, back)]
    assert sorted(moves_of(world)) == sorted(moves)


def test_a_block_that_cannot_move_back_after_an_evaluation_stays():
    world = World(at(4, to_judge()), keeps=True, spread_s=8.0)
    wakes = Counter[str]()

    def wake() -> Any:
        wakes["engine-1"] += world.placers[0].split[1] == POLICY
        return refuse() if world.placers[0]._moving else None

    async def refuse() -> None:
        raise RuntimeError("no memory")

    world.replicas[POLICY][1].on["wake"] = wake
    world.tasks = _IgnoredTasks()
    play(world)
    assert wakes["engine-1"] == 1 and world.notes == [f"block 1 stays with {JUDGE}: no memory"]


def test_polls_continue_until_all_controllers_are_done():
    """One controller is done long before the other, whose rollout needs a late move."""
    world = World(lambda poll, split, view: [to_judge()] if poll == 60 else [], split=Split((POLICY,) * 4), groups=3)
    rest = world.sample

    async def sample(rank: int, number: int, left: list[int]) -> None:
        if rank == 1:
            await rest(rank, number, left)

    world.sample = sample  # type: ignore[method-assign]
    play(world)
    assert world.counts["sent judge-1"] > 0 and len(world.logs[0]) > 60


def test_a_move_in_progress_at_the_end_is_completed():
    """The script always moves a block; `World.controller` checks that no move is left after the rollout."""

    def to_and_fro(poll: int, split: Split, view: ClusterLoad) -> list[Move]:
        if 1 in view.moving:
            return []
        return [to_judge()] if split[1] == POLICY else [to_policy(1)]

    world = play(World(to_and_fro, groups=4))
    assert len(moves_of(world)) > 2 and world.logs[0][-1][2].moving == {1}


def test_a_failure_in_a_rollout_ends_the_polls():
    world = World(at(1, to_judge()), size=1)

    async def fail(rank: int, number: int, left: list[int]) -> None:
        await asyncio.sleep(0.3)
        raise ValueError("broken")

    world.sample = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="broken"):
        play(world)


def test_a_rule_that_breaks_ends_the_rollout():
    """Without polls it might wait for ever."""

    def broken(poll: int, split: Split, view: ClusterLoad) -> list[Move]:
        raise ZeroDivisionError("no rule")

    with pytest.raises(ZeroDivisionError, match="no rule"):
        play(World(broken, split=Split((POLICY,) * 4)))  # no judge is awake


# ---- faults


def stays(world: World, block: int, owner: str, why: str) -> None:
    """The block stays with its owner, whose replica gets requests again, and the log has the reason."""
    assert world.placers[0].split[block] == owner
    assert world.notes[0] == f"block {block} stays with {owner}: {why}", world.notes
    assert moves_of(world)[0][2] == f"reverted: {why}"
    name = "engine" if owner == POLICY else owner
    assert world.counts[f"after {name}-{block}"] > 0


def faulty(move: Move, role: str, block: int, method: str, fault: Callable[[World, Replica], Any]) -> World:
    """The first call of `method` on the block's replica after the start of the move triggers the fault."""
    world = World(at(4, move), groups=40, spread_s=60.0)
    replica = world.replicas[role][block]
    armed = [True]

    def hit() -> Any:
        if armed[0] and world.placers[0]._moving:
            armed[0] = False
            return fault(world, replica)
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
    ("method", "restart_s"), [("abort", 3.0), ("stats", 3.0), ("sleep", 3.0), ("stats", 0.02), ("sleep", 0.02)]
)
def test_the_owner_dies_in_the_move(method, restart_s):
    """Also if it is restarted before all controllers know that the move is reverted."""
    world = play(faulty(to_judge(), POLICY, 1, method, lambda world, replica: world.kill(replica, restart_s, 0.01)))
    stays(world, 1, POLICY, "engine-1 died: gone")
    assert world.counts["deaths"] == 1


@pytest.mark.parametrize("method", ["wake", "load_weights"])
def test_the_new_owner_dies_in_the_move(method):
    world = play(faulty(to_policy(), POLICY, 2, method, die))
    stays(world, 2, JUDGE, "engine-2 died: " + ("gone" if method == "wake" else "it did not load the weights"))


def test_the_old_owner_gets_weights_when_the_new_one_dies():
    """A policy engine that slept without its weights gets requests again; check_sent checks the version."""
    stays(play(faulty(to_judge(), JUDGE, 1, "wake", die)), 1, POLICY, "judge-1 died: gone")


def test_the_old_owner_dies_asleep_and_the_new_one_does_not_wake():
    """Both get their state: the old owner when it is restarted."""

    def fault(world: World, replica: Replica) -> Any:
        world.kill(world.replicas[POLICY][1])
        return hang(world, replica)

    stays(play(faulty(to_judge(), JUDGE, 1, "wake", fault)), 1, POLICY, f"took longer than {TIMEOUT_S:g} s")


def test_the_old_owner_dies_asleep_and_the_move_succeeds():
    def fault(world: World, replica: Replica) -> None:
        world.kill(world.replicas[POLICY][1])

    world = play(faulty(to_judge(), JUDGE, 1, "wake", fault))
    assert world.placers[0].split[1] == JUDGE and world.notes == []


@pytest.mark.parametrize("method", ["wake", "load_weights", "sleep"])
def test_a_switch_that_takes_too_long(method):
    """A wake or a sleep that never returns; the replica is alive."""
    move, owner, block = (to_judge(), POLICY, 1) if method == "sleep" else (to_policy(), JUDGE, 2)
    world = play(faulty(move, POLICY, block, method, hang))
    stays(world, block, owner, f"took longer than {TIMEOUT_S:g} s")


def test_a_drain_that_takes_too_long():
    """An engine that ignores aborts, with a request that is longer than the timeout."""

    async def ignore() -> None:
        return None

    world = faulty(to_judge(), POLICY, 1, "abort", lambda world, replica: ignore())
    world.replicas[POLICY][1].on["abort"] = lambda: ignore()
    world.replicas[POLICY][1].engine = EmulatedEngine(
        ReplicaSpeed(2.0, 0.0, 0.0, SLOTS, 0.3, 0.2, 0.4), lengths=lambda r: 1 + r.noise_key % LONG - r.position
    )
    stays(play(world), 1, POLICY, f"not drained after {TIMEOUT_S:g} s")


def test_a_switch_that_fails_with_an_unknown_error():
    """The controllers do not wait for ever."""

    async def broken() -> None:
        raise KeyError("unknown")

    world = faulty(to_policy(), POLICY, 2, "wake", lambda world, replica: broken())
    world.tasks = _IgnoredTasks()
    stays(play(world), 2, JUDGE, "'unknown'")


def test_blocks_move_while_an_engine_starts_and_the_trainer_waits_for_it():
    """A move to the policy sends weights, also while another engine starts for longer than a move may take."""
    world = World(at(4, to_policy()), groups=4, steps=2)
    seen: list[object] = []

    async def death() -> None:
        engine = world.replicas[POLICY][0]
        await asyncio.sleep(0.3)
        world.kill(engine, restart_s=20 * TIMEOUT_S)
        while not world.placers[0].timeline.moves:
            await asyncio.sleep(0.1)
        seen.append((moves_of(world)[0], engine.gone.is_set()))
        while not world.counts["returns"]:
            await asyncio.sleep(0.1)
        seen.append(world.version)

    play(world, death())
    assert seen == [((2, POLICY, "scripted"), True), 1] and world.notes == []


class _IgnoredTasks(set[Any]):
    """Tasks whose errors are expected."""

    def __ior__(self, other: Any) -> Any:
        return self


def test_an_owner_that_does_not_wake_again_gets_no_requests_until_the_next_rollout():
    world = World(at(4, to_judge()), groups=20, spread_s=30.0, steps=2)
    wakes = Counter[str]()
    for role in (POLICY, JUDGE):
        replica = world.replicas[role][1]

        def wake(role: str = role) -> Any:
            wakes[role] += 1
            return asyncio.Event().wait() if world.version == 1 and world.placers[0]._moving else None

        replica.on["wake"] = wake
    play(world)
    assert world.notes == [f"block 1 stays with {POLICY}: took longer than {TIMEOUT_S:g} s"]
    assert wakes[POLICY] >= 2  # in the second rollout it serves: check_end finds it open and awake


def test_an_owner_that_does_not_wake_again_serves_after_a_restart():
    """In the same rollout."""
    world = faulty(to_judge(), JUDGE, 1, "wake", hang)
    world.replicas[POLICY][1].on["wake"] = lambda: hang(world, world.replicas[POLICY][1])

    async def death() -> None:
        while not world.notes:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        assert world.counts["after engine-1"] == 0
        world.kill(world.replicas[POLICY][1])

    stays(play(world, death()), 1, POLICY, f"took longer than {TIMEOUT_S:g} s")


def test_a_failed_move_is_not_tried_again_at_once():
    """The rule wants the move at every poll; the new owner is dead for 20 s."""

    def script(poll: int, split: Split, view: ClusterLoad) -> list[Move]:
        return [to_judge()] if split[1] == POLICY and 1 not in view.moving else []

    world = World(script, groups=30, spread_s=40.0)

    async def death() -> None:
        await asyncio.sleep(0.1)
        world.kill(world.replicas[JUDGE][1], restart_s=20.0)

    play(world, death())
    tries = [m["at_s"] for m in world.placers[0].timeline.moves]
    assert 3 <= len(tries) <= 20 / RETRY_S + 2 and world.placers[0].split[1] == JUDGE


def test_all_judges_die():
    """Their requests wait until one is restarted."""
    world = World(groups=10, spread_s=2.0)

    async def deaths() -> None:
        await asyncio.sleep(1.5)
        for replica in world.replicas[JUDGE][2:]:
            world.kill(replica, restart_s=30.0)

    play(world, deaths())
    assert world.counts["deaths"] == 2 and world.placers[0].timeline.seconds > 30


def test_a_restarted_replica_without_its_block_sleeps():
    world = World(groups=20, spread_s=30.0)

    async def death() -> None:
        await asyncio.sleep(2)
        world.kill(world.replicas[JUDGE][0])
        world.kill(world.replicas[POLICY][3])

    play(world, death())
    assert world.replicas[JUDGE][0].asleep and world.replicas[POLICY][3].asleep and world.counts["deaths"] == 2


# ---- random worlds


def at_random(seed: int, grid: DeviceGrid, often: float) -> Script:
    """Random moves that leave every role at least one block; the same on all controllers."""

    def script(poll: int, split: Split, view: ClusterLoad) -> list[Move]:
        rng = random.Random(f"{seed}/{poll}")
        found, counts = list[Move](), Counter(split.owners)
        free = [block for block in range(grid.num_blocks) if block not in view.moving]
        rng.shuffle(free)
        while free and rng.random() < often:
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
        rng = random.Random(seed)
        grid = DeviceGrid(
            2 * rng.randint(1, 4), rng.choice([{POLICY: 1, JUDGE: 1}, {POLICY: 1, JUDGE: 2}, {POLICY: 2, JUDGE: 1}])
        )
        if grid.num_blocks < 2:
            grid = DeviceGrid(4, grid.widths)
        owners = [rng.choice([POLICY, JUDGE]) for _ in range(grid.num_blocks)]
        owners[0], owners[-1] = POLICY, JUDGE
        world = World(
            at_random(seed, grid, rng.choice([0.02, 0.1, 0.3])),
            grid,
            split=Split(tuple(owners)),
            size=rng.randint(1, 3),
            groups=4,
            steps=2,
            poll_interval_s=0.5,
            sleeps=rng.random() < 0.5,
            seed=seed,
            keeps=rng.random() < 0.3,
        )
        yield world, trouble(world, rng)


async def trouble(world: World, rng: random.Random) -> None:
    """Deaths at any time, and sometimes a call that never returns."""
    while True:
        await asyncio.sleep(rng.random() * 4)
        replica = rng.choice(world.replicas[rng.choice([POLICY, JUDGE])])
        kind = rng.random()
        if kind < 0.6 and world.counts["deaths"] < 6:
            world.kill(replica, rng.random() * 4, rng.random() * 0.3)
        elif kind < 0.75:
            method = rng.choice(["sleep", "wake", "load_weights"])

            def once(replica: Replica = replica, method: str = method) -> Any:
                del replica.on[method]
                if world.placers[0]._moving:
                    world.counts["hung"] += 1
                    world.kill(replica) if rng.random() < 0.5 else None
                    return asyncio.Event().wait() if world.block(replica) in world.placers[0]._moving else None
                return None

            replica.on[method] = once


def test_random_worlds():
    """Set GCORE_WORLDS=2000 for more."""
    counts: Counter[str] = Counter()
    for world, faults in worlds(int(os.environ.get("GCORE_WORLDS", 40))):
        with contextlib.closing(faults):
            play(world, faults)
        groups = world.size * world.groups * world.steps
        assert world.counts["answered"] >= 2 * groups
        counts += world.counts
        counts["reverted"] += len(world.notes)
        counts["moves"] += sum(len(placer.timeline.moves) for placer in world.placers[:1])
    assert counts["moves"] > 100 and counts["deaths"] > 60 and counts["reverted"] > 20 and counts["hung"] > 5, counts
