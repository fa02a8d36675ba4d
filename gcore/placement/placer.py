"""A controller's part in placement: look, decide with the others, and carry moves out.

    look ──> Report ──all_gather──> View ──policy──> moves              the same on every controller, at every look
    move ──> drain (everyone, its own requests) ──> sleep, wake, weights (controller 0) ──> reopen (everyone)

A block is nobody's while it moves. A move that fails or takes too long is taken back: the block stays with its owner.
Requests are never lost: what a drained replica had goes on elsewhere (generation/pool.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from gcore.clients import EngineClient
from gcore.placement.grid import POLICY, DeviceGrid, Move, Split
from gcore.placement.monitor import Monitor, Report, RolloutProgress
from gcore.placement.replica_switch import ReplicaSwitch
from gcore.placement.rules import Costs, View, room
from gcore.placement.timeline import PlacementTimeline
from gcore.protocols import EngineStats, Group, RoleDied, RoleError, RoleReport

ANSWER_S = 2.0  # a replica that does not tell its counters sooner is left out of a look
POLL_SHARE = 0.01  # least time between two looks, as a share of the last rollout
RETRY_S = 5.0  # a block whose move was taken back is left alone for so long


class Pool(Protocol):
    """What is asked of a role's pool of replicas (generation/pool.py)."""

    replicas: Sequence[EngineClient]

    async def drain(self, name: str) -> None: ...
    async def pause(self) -> None: ...
    def resume(self) -> None: ...
    def reopen(self, *names: str) -> None: ...
    def limit(self, requests: int) -> None: ...
    def report(self) -> RoleReport: ...


class Rule(Protocol):
    """How to place: see policy.py."""

    def begin(self, view: View, costs: Costs, last: Split, took_s: float | None) -> Split:
        """`took_s`: seconds of the last rollout, by controller 0's clock; None: there was none since the last call."""
        ...

    def __call__(self, split: Split, view: View, costs: Costs) -> list[Move]: ...


Progress = Callable[[], RolloutProgress]


@dataclass
class _Moving:
    move: Move
    since: float
    draining: bool = True
    task: asyncio.Task[None] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Placer:
    """One on every controller. All of them call the same methods in the same order. `switches`: one per role; used by
    controller 0 alone."""

    def __init__(
        self,
        grid: DeviceGrid,
        rule: Rule,
        split: Split,
        pools: Mapping[str, Pool],
        switches: Mapping[str, ReplicaSwitch],
        group: Group,
        monitor: Monitor,
        *,
        poll_interval_s: float,
        timeout_s: float,
        note: Callable[[str], None],
    ) -> None:
        self.grid, self.split, self.monitor = grid, split.check(grid), monitor
        self._rule, self._pools, self._switches, self._note = rule, pools, switches, note
        self._group, self._rank, self._size = group.subgroup(), group.rank, group.size
        self._poll_interval_s, self._timeout_s = poll_interval_s, timeout_s
        self._moving: dict[int, _Moving] = {}
        self._drained: set[int] = set()
        self._arrived: set[int] = set()
        self._failed: dict[int, str] = {}
        self._last_move = -1e9
        self._rollout_s = 0.0
        self._began_s = self._ended_s = 0.0  # the rollout, by controller 0's clock: the same on all
        self._took_s: float | None = None
        self._alone: dict[int, float] = {}  # blocks that are left alone, until when
        self._changed = asyncio.Event()
        self.timeline = PlacementTimeline(grid, self.split, monitor.latest, 0, 0.0)

    # ---- between rollouts -----------------------------------------------------------------------------------------

    async def begin(self, groups: int, rate: float, samples: int) -> None:
        """Choose the split of the next rollout. Nothing is under way, so owners may change at no cost but waking."""
        view = self.monitor.expected(groups, rate, samples)
        self.split = self._rule.begin(view, self.monitor.costs, self.split, self._took_s).check(self.grid)
        self._took_s = None
        if self._rank == 0:
            await self._settle()
        await self._group.all_gather("engines in place", None)
        for role, pool in self._pools.items():
            own = self.owners(role)
            for i, replica in enumerate(pool.replicas):
                if i in own:
                    pool.reopen(replica.name)
                else:
                    await pool.drain(replica.name)

    def owners(self, role: str) -> dict[int, EngineClient]:
        """The replicas of a role that have their block."""
        numbers = [i for b in self.split.blocks(role) for i in self.grid.replicas(role, b)]
        return {i: self._pools[role].replicas[i] for i in numbers}

    async def rest(self) -> None:
        """Controller 0: all replicas sleep, the devices are the trainer's."""
        if self._rank == 0:
            switches = self._switches.values()
            await asyncio.gather(*(switch.sleep(switch.maybe_awake(), skip_dead=True) for switch in switches))

    async def _settle(self) -> None:
        """Replicas without their block sleep, then those with their block wake; the policy's weights come from the
        caller. A replica that dies is started again by the supervisor, and nothing else waits for it."""
        roles = [(switch, self.owners(role).keys()) for role, switch in self._switches.items()]
        await asyncio.gather(*(switch.sleep(switch.maybe_awake() - own, skip_dead=True) for switch, own in roles))
        await asyncio.gather(*(switch.wake(switch.maybe_asleep() & own, skip_dead=True) for switch, own in roles))

    # ---- during a rollout -----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def during(self, progress: Progress, step: int) -> AsyncIterator[None]:
        """Looks go on while the block runs, and end when it has ended on every controller and no move is under way."""
        done = asyncio.Event()
        self.timeline = PlacementTimeline(self.grid, self.split, self.monitor.latest, step, _now())
        try:
            async with asyncio.TaskGroup() as tasks:  # without looks the block might wait for a move for ever
                tasks.create_task(self._poll_loop(progress, done, step))
                yield
                done.set()
                self._changed.set()
        except BaseExceptionGroup as errors:
            for moving in self._moving.values():
                if moving.task is not None:
                    moving.task.cancel()
            raise errors.exceptions[0] from None
        self.timeline.close(_now())
        self._rollout_s = self.timeline.seconds
        if self.monitor.ended_rollout():
            self._took_s = self._ended_s - self._began_s

    async def _poll_loop(self, progress: Progress, done: asyncio.Event, step: int) -> None:
        self._began_s = (await self._group.all_gather(f"placement begins at step {step}", _now()))[0]
        while True:
            wait_s = max(self._poll_interval_s, POLL_SHARE * self._rollout_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            self._changed.clear()
            report = await self._report(progress, done.is_set())
            parts: list[Report] = await self._group.all_gather(f"placement at step {step}", report)
            now = parts[0].at_s
            moving = {block: m.move for block, m in self._moving.items()}
            view = self.monitor.add(parts, self.split, moving, now - self._last_move)
            self._make_room(view)
            self._go_on(parts, now)
            if all(part.done for part in parts):
                self._ended_s = now
                if not self._moving:
                    return
                continue
            self._alone = {block: until for block, until in self._alone.items() if now < until}
            view = replace(view, moving=view.moving | self._alone.keys(), elapsed_s=now - self._began_s)
            for move in self._rule(self.split, view, self.monitor.costs):
                if move.block not in self._moving and move.block not in self._alone:
                    self._start(move, now)

    def _make_room(self, view: View) -> None:
        """Judges get what they can use, in equal parts from all controllers."""
        for role, pool in self._pools.items():
            if role != POLICY and self.monitor.knows(role):
                pool.limit(-(-room(view.loads[role], self.monitor.costs.speeds[role]) // self._size))

    async def _report(self, progress: Progress, done: bool) -> Report:
        roles = {}
        for role, pool in self._pools.items():
            mine = {i: engine for i, engine in self.owners(role).items() if i % self._size == self._rank}
            counters = await asyncio.gather(*(_counters(engine) for engine in mine.values()))
            found = {i: c for i, c in zip(mine, counters, strict=True) if c is not None}
            roles[role] = replace(pool.report(), replicas=found)
        failed = {block: self._moving[block].move.source for block in self._failed}
        stuck = frozenset(
            (role, i)
            for block, role in failed.items()
            for i in self._switches[role].maybe_asleep().intersection(self.grid.replicas(role, block))
        )
        drained, arrived = frozenset(self._drained), frozenset(self._arrived)
        return Report(_now(), progress(), roles, drained, arrived, dict(self._failed), stuck, done)

    def _start(self, move: Move, now: float) -> None:
        self.timeline.began(move, now)
        self._moving[move.block] = _Moving(move, now)
        self._last_move = now
        self.split = self.split.after([move])
        pool = self._pools[move.source]
        names = [pool.replicas[i].name for i in self.grid.replicas(move.source, move.block)]
        self._moving[move.block].task = asyncio.ensure_future(self._drain(move, names))

    async def _drain(self, move: Move, names: Sequence[str]) -> None:
        await asyncio.gather(*(self._pools[move.source].drain(name) for name in names))
        self._drained.add(move.block)
        self._changed.set()

    def _go_on(self, parts: Sequence[Report], now: float) -> None:
        """Every controller sees the same reports, and so takes every move one step further at the same look. Blocks
        that arrive together are opened together."""
        back: dict[str, list[str]] = {}
        for block, moving in list(self._moving.items()):
            late = now - moving.since > self._timeout_s
            if moving.draining and all(block in part.drained for part in parts):
                moving.draining = False
                if self._rank == 0:
                    moving.task = asyncio.ensure_future(self._change(moving.move))
            elif moving.draining and late:
                self._end(moving, now, f"not drained after {self._timeout_s:g} s", (), back)
            elif block in parts[0].arrived:
                self._end(moving, now, None, (), back)
            elif block in parts[0].failed:
                self._end(moving, now, parts[0].failed[block], parts[0].stuck, back)
        for role, names in back.items():
            self._pools[role].reopen(*names)

    def _end(
        self,
        moving: _Moving,
        now: float,
        failure: str | None,
        stuck: Collection[tuple[str, int]],
        back: dict[str, list[str]],
    ) -> None:
        """`back`: who is asked again, by role, for the caller to reopen."""
        move = moving.move
        del self._moving[move.block]
        moving.over.set()
        for marks in (self._drained, self._arrived):
            marks.discard(move.block)
        self._failed.pop(move.block, None)
        if failure is not None:
            if moving.task is not None:
                moving.task.cancel()
            self.split = self.split.after([Move(move.block, move.target, move.source)])
            self._alone[move.block] = now + RETRY_S
            self._note(f"block {move.block} stays with {move.source}: {failure}")
        else:
            self.monitor.moved(move.target, now - moving.since)
        owner = self.split[move.block]
        for i in self.grid.replicas(owner, move.block):
            if (owner, i) not in stuck:  # those are woken again for the next rollout, or die and return
                back.setdefault(owner, []).append(self._pools[owner].replicas[i].name)
        self.timeline.ended(move, moving.since, now, failure)

    async def _change(self, move: Move) -> None:
        """Controller 0: sleep, wake, weights."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._switches[move.source].sleep(self.grid.replicas(move.source, move.block))
                await self._switches[move.target].serve(self.grid.replicas(move.target, move.block))
            self._arrived.add(move.block)
        except Exception as error:  # else nobody would hear of it, and all would wait for the move
            await self._take_back(move)
            self._failed[move.block] = str(error) or f"took longer than {self._timeout_s:g} s"
        self._changed.set()

    async def _take_back(self, move: Move) -> None:
        """The other way round, replica by replica and as far as it goes: who is dead is mended when it returns."""

        async def one(command: Callable[[Collection[int]], Awaitable[None]], i: int) -> None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(self._timeout_s):
                    await command([i])

        source, target = self._switches[move.source], self._switches[move.target]
        numbers = target.maybe_awake().intersection(self.grid.replicas(move.target, move.block))
        await asyncio.gather(*(one(target.sleep, i) for i in sorted(numbers)))
        numbers = source.maybe_asleep().intersection(self.grid.replicas(move.source, move.block))
        await asyncio.gather(*(one(source.serve, i) for i in sorted(numbers)))

    # ---- replicas that die ----------------------------------------------------------------------------------------

    def mark_dead(self, name: str) -> None:
        """A replica died. It will be back, awake as it is built."""
        if (found := self._find(name)) is not None:
            role, i = found
            self._switches[role].mark_dead(i)

    async def arrived(self, name: str) -> None:
        """Wait while the block of a replica moves."""
        if (found := self._find(name)) is not None:
            while (moving := self._moving.get(self._block(*found))) is not None:
                await moving.over.wait()

    @contextlib.asynccontextmanager
    async def returning(self, name: str) -> AsyncIterator[bool | None]:
        """Controller 0: a replica that died is back. Does it serve, and so need current weights? Where it does not have
        its block, it goes to sleep. None: the block moves just now, see `arrived`. Until this ends, nobody else tells
        the replica to sleep. Raises RoleDied when it does not do as it is told."""
        if (found := self._find(name)) is None:
            yield True
            return
        role, i = found
        replica = self._switches[role].replicas[i]
        async with replica.lock:
            if (block := self._block(role, i)) in self._moving:
                yield None
                return
            serves = self.split[block] == role
            if replica.awake is None or (replica.awake and not serves):
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await (replica.wake() if serves else replica.sleep())
                except TimeoutError:
                    raise RoleDied(name, "it neither sleeps nor wakes") from None
            yield serves and replica.awake is True  # after a rollout it may sleep on its own block, as all do

    def mark_alive(self, name: str) -> None:
        """A replica is asked again, if it has its block."""
        if (found := self._find(name)) is not None:
            role, block = found[0], self._block(*found)
            if self.split[block] == role and block not in self._moving:
                self._pools[role].reopen(name)

    def _find(self, name: str) -> tuple[str, int] | None:
        pools = self._pools.items()
        found = ((role, i) for role, pool in pools for i, replica in enumerate(pool.replicas) if replica.name == name)
        return next(found, None)

    def _block(self, role: str, i: int) -> int:
        return i // self.grid.per_block(role)


async def _counters(engine: EngineClient) -> EngineStats | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await engine.stats()
    except (RoleDied, RoleError, TimeoutError):
        return None


def _now() -> float:
    return asyncio.get_running_loop().time()
