"""The part of one controller in placement: poll the replicas, decide on moves, carry them out.

    poll ──> Report ──all_gather──> ClusterLoad ──rule──> moves           the same on every controller, at every poll
    move ──> drain (all controllers, their own requests) ──> sleep, wake, weights (controller 0) ──> reopen (all)

A move takes at least three polls: it is decided and the drain starts; all controllers have drained and controller 0
switches the engines; the engines of the new owner are awake and all controllers reopen them.

No role owns a block while it moves. A move that fails or exceeds its timeout is reverted: the block stays with its
owner. No request is lost: requests of a drained replica continue on another one (generation/pool.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from gcore.clients import EngineClient
from gcore.placement.forecast import POLL_INTERVAL_S
from gcore.placement.grid import POLICY, DeviceGrid, Move, Split
from gcore.placement.monitor import Monitor, Report, RolloutProgress
from gcore.placement.replica_switch import ReplicaSwitch
from gcore.placement.rules import ClusterLoad, Rule, request_limit
from gcore.placement.timeline import PlacementTimeline
from gcore.protocols import ControllerGroup, EngineStats, RoleDied, RoleError, RoleReport

STATS_TIMEOUT_S = 2.0  # a replica whose counters take longer is left out of this poll
POLL_SHARE = 0.01  # minimum time between two polls, as a share of the last rollout
RETRY_S = 5.0  # seconds without another move of a block whose move was reverted


class PlacedPool(Protocol):
    """What the placer needs of a role's pool of replicas (generation/pool.py)."""

    replicas: Sequence[EngineClient]

    async def drain(self, name: str) -> None: ...
    async def pause(self) -> None: ...
    def resume(self) -> None: ...
    def reopen(self, *names: str) -> None: ...
    def limit(self, requests: int) -> None: ...
    def mark_dead(self, name: str) -> None: ...
    def report(self) -> RoleReport: ...


Progress = Callable[[], RolloutProgress]


class _Place(NamedTuple):
    role: str
    number: int
    block: int


@dataclass
class _MoveInProgress:
    move: Move
    since: float
    draining: bool = True  # on some controller
    task: asyncio.Task[None] | None = None
    drained: bool = False  # here
    arrived: bool = False  # controller 0: the new owner is awake
    failure: str | None = None  # controller 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Placer:
    """Each controller has one. All controllers call the same methods in the same order. `switches`: one per role; only
    controller 0 uses them."""

    def __init__(
        self,
        grid: DeviceGrid,
        rule: Rule,
        split: Split,
        pools: Mapping[str, PlacedPool],
        switches: Mapping[str, ReplicaSwitch],
        group: ControllerGroup,
        monitor: Monitor,
        *,
        timeout_s: float,
        note: Callable[[str], None],
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        self.grid, self.split, self.monitor = grid, split.check(grid), monitor
        self._rule, self._pools, self._switches, self._note = rule, pools, switches, note
        self._group, self._rank, self._size = group.subgroup(), group.rank, group.size
        self._poll_interval_s, self._timeout_s = poll_interval_s, timeout_s
        self._places = {
            replica.name: _Place(role, i, i // grid.per_block(role))
            for role, pool in pools.items()
            for i, replica in enumerate(pool.replicas)
        }
        self._moving: dict[int, _MoveInProgress] = {}  # by block
        self._last_move = -1e9
        self._rollout_s = 0.0
        self._began_s = self._ended_s = 0.0  # the rollout, by controller 0's clock: the same on all controllers
        self._took_s: float | None = None
        self._begin_arguments: tuple[Split, float | None] = self.split, None  # of the last call of the rule's `begin`
        self._no_move_until: dict[int, float] = {}  # blocks whose move was reverted
        self._changed = asyncio.Event()
        self.timeline = PlacementTimeline(grid, self.split, monitor.busy_of, 0, 0.0)

    # ---- between rollouts -----------------------------------------------------------------------------------------

    async def begin(self, groups: int, rate: float, samples: int) -> None:
        """Choose the split of the next rollout and put it in place. No request is in progress, so a change of owners
        costs only the waking."""
        view = self.monitor.expected(groups, rate, samples)
        self._begin_arguments = self.split, self._took_s
        self.split = self._rule.begin(view, self.monitor.costs, *self._begin_arguments).check(self.grid)
        self._took_s = None
        if self._rank == 0:
            await self._sleep_and_wake()
        await self._group.barrier("engines in place")
        for role, pool in self._pools.items():
            own = self.owners(role)
            for i, replica in enumerate(pool.replicas):
                if i in own:
                    pool.reopen(replica.name)
                else:
                    await pool.drain(replica.name)

    def saved(self) -> dict[str, Any]:
        """For a checkpoint: what the last call of `begin` was made with. A resumed run calls it again."""
        split, took_s = self._begin_arguments
        return {"split": list(split.owners), "took_s": took_s, "monitor": self.monitor.saved()}

    def restore(self, saved: Mapping[str, Any], same_blocks: bool) -> None:
        """`same_blocks`: the number of blocks is that of the saved run. Without it, only what was measured is used."""
        self.monitor.restore(saved["monitor"])
        if same_blocks:
            self.split, self._took_s = Split(tuple(saved["split"])).check(self.grid), saved["took_s"]

    def owners(self, role: str) -> dict[int, EngineClient]:
        """The replicas of a role whose block the role owns."""
        numbers = [i for b in self.split.blocks(role) for i in self.grid.replicas(role, b)]
        return {i: self._pools[role].replicas[i] for i in numbers}

    async def sleep_all(self) -> None:
        """Controller 0: put all replicas to sleep, so that the trainer has the devices."""
        if self._rank == 0:
            switches = self._switches.values()
            await asyncio.gather(*(switch.sleep(switch.maybe_awake(), skip_dead=True) for switch in switches))

    async def _sleep_and_wake(self) -> None:
        """Put replicas to sleep whose block another role owns, then wake the owners. The caller loads the policy's
        weights. The driver restarts a replica that dies; this method does not wait for it."""
        roles = [(switch, self.owners(role).keys()) for role, switch in self._switches.items()]
        await asyncio.gather(*(switch.sleep(switch.maybe_awake() - own, skip_dead=True) for switch, own in roles))
        await asyncio.gather(*(switch.wake(switch.maybe_asleep() & own, skip_dead=True) for switch, own in roles))

    # ---- during a rollout -----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def during(self, progress: Progress, step: int, keep_split: bool = False) -> AsyncIterator[None]:
        """Poll while the `with` body runs, until it has ended on every controller and no move is in progress.
        `keep_split`: of an evaluation, between `begin` and its rollout: blocks that have moved go back at the end."""
        done = asyncio.Event()
        self.timeline = PlacementTimeline(self.grid, self.split, self.monitor.busy_of, step, _now())
        try:
            async with asyncio.TaskGroup() as tasks:  # if polling fails, the body is cancelled: it may wait for a move
                tasks.create_task(self._poll_loop(progress, done, step, self.split if keep_split else None))
                yield
                done.set()
                self._changed.set()
        except BaseExceptionGroup as errors:
            for moving in self._moving.values():
                if moving.task is not None:
                    moving.task.cancel()
            raise errors.exceptions[0] from None
        self.timeline.close(_now())
        if self.monitor.end_rollout():
            self._rollout_s = self.timeline.seconds
            self._took_s = self._ended_s - self._began_s

    async def _poll_loop(self, progress: Progress, done: asyncio.Event, step: int, last: Split | None) -> None:
        """`last`: the split to return to."""
        self._began_s = (await self._group.all_gather(f"placement begins at step {step}", _now()))[0]
        while True:
            wait_s = max(self._poll_interval_s, POLL_SHARE * self._rollout_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            self._changed.clear()
            report = await self._report(progress, done.is_set())
            reports: list[Report] = await self._group.all_gather(f"placement at step {step}", report)
            now = reports[0].at_s
            moving = {block: m.move for block, m in self._moving.items()}
            view = self.monitor.add(reports, self.split, moving, now - self._last_move)
            self._limit_judge_requests(view)
            self._advance_moves(reports, now)
            if all(report.done for report in reports):
                self._ended_s = now
                if not self._moving and last is not None:
                    self._move_back(last, now)
                    last = None  # a move that fails is not tried again
                if not self._moving:
                    return
                continue
            self._no_move_until = {block: until for block, until in self._no_move_until.items() if now < until}
            view = replace(view, moving=view.moving | self._no_move_until.keys(), elapsed_s=now - self._began_s)
            for move in self._rule(self.split, view, self.monitor.costs):
                if move.block not in self._moving and move.block not in self._no_move_until:
                    self._start_move(move, now)

    def _limit_judge_requests(self, view: ClusterLoad) -> None:
        """Limit the requests at each judge replica, in equal parts for all controllers."""
        for role, pool in self._pools.items():
            if role != POLICY and self.monitor.is_measured(role):
                pool.limit(-(-request_limit(view.loads[role], self.monitor.costs.speeds[role]) // self._size))

    async def _report(self, progress: Progress, done: bool) -> Report:
        roles = {}
        for role, pool in self._pools.items():
            polled = {i: engine for i, engine in self.owners(role).items() if i % self._size == self._rank}
            counters = await asyncio.gather(*(_counters(engine) for engine in polled.values()))
            received = {i: c for i, c in zip(polled, counters, strict=True) if c is not None}
            roles[role] = replace(pool.report(), replicas=received)
        failed = {block: m.failure for block, m in self._moving.items() if m.failure is not None}
        sources = {block: self._moving[block].move.source for block in failed}
        stuck = frozenset(
            (role, i)
            for block, role in sources.items()
            for i in self._switches[role].maybe_asleep().intersection(self.grid.replicas(role, block))
        )
        drained = frozenset(block for block, m in self._moving.items() if m.drained)
        arrived = frozenset(block for block, m in self._moving.items() if m.arrived)
        return Report(_now(), progress(), roles, drained, arrived, failed, stuck, done)

    def _start_move(self, move: Move, now: float) -> None:
        self.timeline.move_started(move, now)
        self._moving[move.block] = moving = _MoveInProgress(move, now)
        self._last_move = now
        self.split = self.split.after([move])
        moving.task = asyncio.ensure_future(self._drain(moving))

    def _move_back(self, last: Split, now: float) -> None:
        for block, owner in enumerate(last.owners):
            if self.split[block] != owner:
                self._start_move(Move(block, self.split[block], owner, "the split of the next rollout"), now)

    async def _drain(self, moving: _MoveInProgress) -> None:
        pool, replicas = self._pools[moving.move.source], self.grid.replicas(moving.move.source, moving.move.block)
        await asyncio.gather(*(pool.drain(pool.replicas[i].name) for i in replicas))
        moving.drained = True
        self._changed.set()

    def _advance_moves(self, reports: Sequence[Report], now: float) -> None:
        """Advance every move by one stage. Every controller has the same reports, so all do this at the same poll.
        Replicas of blocks that arrive at the same poll are reopened in one call."""
        to_reopen: dict[str, list[str]] = {}
        for block, moving in list(self._moving.items()):
            failure = reports[0].failed.get(block)
            if moving.draining and all(block in report.drained for report in reports):
                moving.draining = False
                if self._rank == 0:
                    moving.task = asyncio.ensure_future(self._switch(moving))
            elif moving.draining and now - moving.since > self._timeout_s:
                failure = f"not drained after {self._timeout_s:g} s"
            if failure is not None or block in reports[0].arrived:
                self._end_move(moving, now, failure)
                owner = self.split[block]  # a stuck replica is woken for the next rollout, or dies and is restarted
                serving = [i for i in self.grid.replicas(owner, block) if (owner, i) not in reports[0].stuck]
                to_reopen.setdefault(owner, []).extend(self._pools[owner].replicas[i].name for i in serving)
        for role, names in to_reopen.items():
            self._pools[role].reopen(*names)

    def _end_move(self, moving: _MoveInProgress, now: float, failure: str | None) -> None:
        move = moving.move
        del self._moving[move.block]
        moving.ended.set()
        if failure is not None:
            if moving.task is not None:
                moving.task.cancel()
            self.split = self.split.after([Move(move.block, move.target, move.source)])
            self._no_move_until[move.block] = now + RETRY_S
            self._note(f"block {move.block} stays with {move.source}: {failure}")
        else:
            self.monitor.switch_s[move.target] = now - moving.since
        self.timeline.move_ended(move.block, now, failure)

    async def _switch(self, moving: _MoveInProgress) -> None:
        """Controller 0: put the source's replicas to sleep, wake the target's, load weights."""
        move = moving.move
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._switches[move.source].sleep(self.grid.replicas(move.source, move.block))
                await self._switches[move.target].wake_with_weights(self.grid.replicas(move.target, move.block))
            moving.arrived = True
        except Exception as error:  # must be reported: all controllers wait for the end of the move
            await self._revert(move)
            moving.failure = str(error) or f"took longer than {self._timeout_s:g} s"
        self._changed.set()

    async def _revert(self, move: Move) -> None:
        """Put the target's replicas to sleep and wake the source's, each on its own. Errors are ignored: a dead replica
        gets its state when it is restarted."""

        async def one(command: Callable[[Collection[int]], Awaitable[None]], i: int) -> None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(self._timeout_s):
                    await command([i])

        source, target = self._switches[move.source], self._switches[move.target]
        numbers = target.maybe_awake().intersection(self.grid.replicas(move.target, move.block))
        await asyncio.gather(*(one(target.sleep, i) for i in sorted(numbers)))
        numbers = source.maybe_asleep().intersection(self.grid.replicas(move.source, move.block))
        await asyncio.gather(*(one(source.wake_with_weights, i) for i in sorted(numbers)))

    # ---- replicas that die ----------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        return name in self._places

    def mark_dead(self, name: str) -> None:
        """A replica died. The driver restarts it, awake."""
        if (place := self._places.get(name)) is not None:
            self._switches[place.role].mark_dead(place.number)

    async def wait_for_move(self, name: str) -> None:
        """Wait until no move of the replica's block is in progress."""
        if (place := self._places.get(name)) is not None:
            while (moving := self._moving.get(place.block)) is not None:
                await moving.ended.wait()

    @contextlib.asynccontextmanager
    async def restarted(self, name: str) -> AsyncIterator[bool | None]:
        """Controller 0: a replica that died is restarted. Yields whether it serves now, and so needs current weights.
        If its role does not own its block, it is put to sleep. Yields None while the block moves: call `wait_for_move`
        and try again. No other sleep command reaches the replica before this context ends. Raises RoleDied if the
        replica does not follow the command in time."""
        if (place := self._places.get(name)) is None:
            yield True
            return
        replica = self._switches[place.role].replicas[place.number]
        async with replica.lock:
            if place.block in self._moving:
                yield None
                return
            serves = self.split[place.block] == place.role
            if replica.awake is None or (replica.awake and not serves):
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await (replica.wake() if serves else replica.sleep())
                except TimeoutError:
                    raise RoleDied(name, "it neither sleeps nor wakes") from None
            yield serves and replica.awake is True  # after a rollout all replicas sleep, also those of the owner

    def mark_alive(self, name: str) -> None:
        """Send requests to a replica again, if its role owns its block."""
        place = self._places.get(name)
        if place is not None and self.split[place.block] == place.role and place.block not in self._moving:
            self._pools[place.role].reopen(name)


async def _counters(engine: EngineClient) -> EngineStats | None:
    try:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            return await engine.stats()
    except (RoleDied, RoleError, TimeoutError):
        return None


def _now() -> float:
    return asyncio.get_running_loop().time()
