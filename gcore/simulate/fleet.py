"""The replicas of one role in the simulator: calls are queued, routed, run on devices, and migrate when a block moves.

send ──> the controller's queue (oldest group first) ──its Router──> Device ──> ended(fleet, group)

As in a run, every controller has its own queue and router, and does not know the others' (generation/pool.py). With
more than MAX_QUEUES controllers, some share a queue: faster to simulate, with nearly the same result.
When a block moves, its running requests continue on other replicas (`evict`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gcore.cost.replica_speed import ReplicaSpeed
from gcore.emulate.device import Device, DeviceJob
from gcore.generation.routing import Router, shared_limit
from gcore.placement.grid import POLICY, DeviceGrid
from gcore.placement.rules import Load, request_limit

MAX_QUEUES = 8  # with 64 queues, a simulation of 512 slots takes 25 % more time


class SimulatedGroup:
    """The siblings of one prompt. `unfinished`: requests of its current stage that have not ended."""

    __slots__ = ("draw", "number", "unfinished")

    def __init__(self, number: int, draw: Any, unfinished: int) -> None:
        self.number, self.draw, self.unfinished = number, draw, unfinished


class Call:
    """Requests that are routed together: the siblings of a group, or one response to a judge."""

    __slots__ = ("group", "jobs", "size", "unfinished", "work")

    def __init__(self, group: SimulatedGroup, jobs: Sequence[DeviceJob], work: int) -> None:
        self.group = group
        self.jobs = jobs  # empty once a replica has them: they refer to their call, and cycles are slow to free
        self.work = work  # tokens, as pools report them to the router: prompt and maximum response length
        self.size = self.unfinished = len(jobs)


class Replica(Device):
    """A device of a fleet. The tags of its jobs are their calls."""

    __slots__ = ("event_s", "index")

    def __init__(self, speed: ReplicaSpeed, index: int) -> None:
        super().__init__(speed)
        self.index = index
        self.event_s = math.inf  # time of its next event; events at other times are outdated


class ControllerQueue:
    """The waiting calls of one controller for a role, and its router."""

    __slots__ = ("calls", "router")

    def __init__(self, router: Router) -> None:
        self.router = router
        self.calls: list[tuple[int, int, Call]] = []  # a heap


class Clock:
    """Runs events in the order of their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self.order = 0
        self.events: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def at(self, when: float, action: Callable[[Any], None], argument: Any) -> None:
        self.order += 1
        heapq.heappush(self.events, (when, self.order, action, argument))

    def run(self) -> None:
        """Until an event sets `stopped`."""
        events, pop = self.events, heapq.heappop
        while not self.stopped:
            assert events, "no event is left, but the rollout has not ended"
            self.now, _, action, argument = pop(events)
            action(argument)


class Fleet:
    """All replicas of a role. Replicas whose block another role owns are closed."""

    def __init__(
        self,
        name: str,
        grid: DeviceGrid,
        speed: ReplicaSpeed,
        load: Load,
        clock: Clock,
        ended: Callable[[Fleet, SimulatedGroup], None],
        controllers: int,
        relative: Callable[[int], float],
    ) -> None:
        """`load`: expected before the rollout. `relative`: the relative speed of a replica, by number."""
        self.name, self.clock, self._relative = name, clock, relative
        self.per_block = grid.per_block(name)
        count = grid.num_blocks * self.per_block
        self.devices = [Replica(speed.scaled(relative(i)), i) for i in range(count)]
        self.by_block = [self.devices[i : i + self.per_block] for i in range(0, count, self.per_block)]
        num_queues = min(controllers, MAX_QUEUES)
        ranks = [(rank, num_queues) for rank in range(num_queues)]
        self.queues = [ControllerQueue(Router(count, rank, opened=())) for rank in ranks]
        self.expect(load, speed)
        self.blocks: list[int] = []  # that the role owns, sorted
        self.ended_lengths: list[int] = []  # of requests
        self.ended_calls: list[tuple[int, ...]] = []  # lengths of siblings
        self.queued = 0  # requests that no replica has yet
        self.ended = ended

    def expect(self, load: Load, speed: ReplicaSpeed) -> None:
        """`load`: expected in the next step, which decides how many requests a replica gets."""
        self.load = load
        if self.name == POLICY:
            part = shared_limit(speed.max_concurrent, len(self.queues))
        else:
            part = -(-request_limit(load, speed) // len(self.queues))
        for queue in self.queues:
            queue.router.limit(part)

    def retime(self, speed: ReplicaSpeed) -> None:
        """Longer contexts: all replicas have another speed from now on."""
        for replica in self.devices:
            self.sync(replica)
            replica.retime(speed.scaled(self._relative(replica.index)))
            self._schedule(replica)

    def pause(self, replica: Replica, seconds: float) -> None:
        self.sync(replica)
        replica.pause(seconds)

    def open(self, replicas: Iterable[Replica]) -> None:
        """These replicas get requests from the next call on."""
        numbers = [replica.index for replica in replicas]
        for queue in self.queues:
            queue.router.open(*numbers)

    def close(self, replicas: Iterable[Replica]) -> None:
        numbers = [replica.index for replica in replicas]
        for queue in self.queues:
            queue.router.close(*numbers)

    def send(self, call: Call) -> None:
        queue = self._queue_of(call)
        if queue.calls or not self._place(call, queue):
            self.clock.order += 1
            self.queued += call.size
            heapq.heappush(queue.calls, (call.group.number, self.clock.order, call))

    def dispatch(self) -> None:
        for queue in self.queues:
            self._dispatch(queue)

    def _dispatch(self, queue: ControllerQueue) -> None:
        calls = queue.calls
        while calls and self._place(calls[0][2], queue):
            self.queued -= heapq.heappop(calls)[2].size

    def _queue_of(self, call: Call) -> ControllerQueue:
        return self.queues[call.group.number % len(self.queues)]

    def sync(self, replica: Replica) -> None:
        """Advance a device to the current time, including requests that end exactly now."""
        now = self.clock.now
        if replica.at < now:
            for job in replica.advance(now):  # none should have ended earlier: its event is not in the past
                self._end(replica, job)

    def evict(self, replica: Replica, prompt_length: int) -> None:
        """Migrate the requests of a replica. They continue from the tokens they have, which are prefilled again."""
        self.sync(replica)
        replica.event_s = math.inf
        calls: dict[Call, list[DeviceJob]] = {}
        for job in replica.jobs():
            calls.setdefault(job.tag, []).append(job)
        for call, jobs in calls.items():
            self._queue_of(call).router.done(replica.index, call.work, call.size)
            rest = []
            for job in jobs:
                made = replica.remove(job)
                prefill = (job.prompt or prompt_length) + made if made else job.prompt
                rest.append(DeviceJob(job.tokens - made, prefill, before=job.before + made))
            self.send(Call(call.group, rest, call.work))
        replica.prefill_until = replica.at

    def wasted(self) -> int:
        """Tokens of unfinished requests."""
        return sum(device.progress(job) + job.before for device in self.devices for job in device.jobs()) + sum(
            job.before for queue in self.queues for _, _, call in queue.calls for job in call.jobs
        )

    def _place(self, call: Call, queue: ControllerQueue) -> bool:
        """Send a call to a replica. False: none has room."""
        key = None if self.name == POLICY else call.group.number  # verdicts on siblings prefer the same replica
        index = queue.router.choose(key=key, count=call.size)
        if index is None:
            return False
        queue.router.sent(index, call.work, call.size)
        replica, jobs, call.jobs = self.devices[index], call.jobs, ()
        for job in jobs:
            job.tag = call
        self.sync(replica)
        replica.add(jobs)
        self._schedule(replica)
        return True

    def _schedule(self, replica: Replica) -> None:
        """Add an event for the end of the next request. If later arrivals slow the replica down, the event comes too
        early and only schedules the next one."""
        when = replica.next_s()
        if when < replica.event_s:
            replica.event_s = when
            self.clock.at(when, self._on_event, replica)

    def _on_event(self, replica: Replica) -> None:
        now = self.clock.now
        if replica.event_s != now:
            return
        replica.event_s = math.inf
        for job in replica.advance(now):
            self._end(replica, job)
        self._schedule(replica)

    def _end(self, replica: Replica, job: DeviceJob) -> None:
        call: Call = job.tag
        self.ended_lengths.append(job.tokens + job.before)
        call.unfinished -= 1
        if not call.unfinished:
            queue = self._queue_of(call)
            queue.router.done(replica.index, call.work, call.size)
            if queue.calls:
                self._dispatch(queue)
        group = call.group
        group.unfinished -= 1
        if not group.unfinished:
            self.ended(self, group)
