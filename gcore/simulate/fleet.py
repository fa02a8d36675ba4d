"""The replicas of one role in the simulator: calls queue, are routed, run on devices, and move when a block does.

send ──> queue (oldest group first) ──Router──> Device ──> ended(job)        evict: what runs goes on elsewhere
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gcore.generation.routing import Router
from gcore.placement.pace import Pace
from gcore.placement.plan import POLICY, Ground
from gcore.placement.policy import Load, room
from gcore.simulate.device import ENDED, Device, Job

Memory = Mapping[str, Sequence[float]]  # lengths of requests that ended lately, by role: quantiles

SENT = 2  # times as many requests as it decodes at once: so many are sent to a replica (generation/pool.py)


class Group:
    """The siblings of one prompt. `left`: requests of its present stage that have not ended."""

    __slots__ = ("draw", "left", "number")

    def __init__(self, number: int, draw: Any, left: int) -> None:
        self.number, self.draw, self.left = number, draw, left


@dataclass(slots=True, eq=False)
class Call:
    """What travels as one: the siblings of a group, or one response to a judge."""

    group: Group
    jobs: list[Job]
    work: int  # tokens, as the router counts them
    left: int


class Clock:
    """Events in the order of their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.over = False
        self.order = 0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def at(self, when: float, what: Callable[[Any], None], about: Any) -> None:
        self.order += 1
        heapq.heappush(self._events, (when, self.order, what, about))

    def run(self) -> None:
        """Until something sets `over`."""
        events = self._events
        while not self.over:
            assert events, "nothing happens any more"
            self.now, _, what, about = heapq.heappop(events)
            what(about)


class Fleet:
    """All replicas of a role. Those whose block another role has are closed."""

    def __init__(
        self,
        name: str,
        ground: Ground,
        pace: Pace,
        memory: Memory,
        clock: Clock,
        ended: Callable[[Fleet, Group], None],
        *,
        prompt: float,
        repeats: int = 1,
    ) -> None:
        self.name, self.pace, self.clock, self.prompt, self.repeats = name, pace, clock, prompt, repeats
        self.per_block = ground.per_block(name)
        self.places = [ground.replicas(name, block) for block in range(ground.num_blocks)]
        self.lengths, self.longest = memory[name], memory.get(f"{name}/longest", ())
        self.mean = sum(self.lengths) / len(self.lengths)
        count = ground.num_blocks * self.per_block
        self.devices = [Device(pace) for _ in range(count)]
        load = Load(lengths=self.lengths, prompt=prompt)
        limit = SENT * pace.max_concurrent if name == POLICY else room(load, pace)
        self.router = Router(count, limit=limit)  # the rest waits here, for whoever is free first
        for i in range(count):
            self.router.close(i)
        self.seen: list[int] = []  # lengths of requests that ended
        self.seen_longest: list[int] = []  # of groups
        self.under_way = 0  # requests, waiting or running
        self.queued = 0  # those of them that no replica has room for
        self._ended = ended
        self._queue: list[tuple[int, int, Call]] = []
        self._calls: list[dict[Call, None]] = [{} for _ in range(count)]
        self._rings = [math.inf] * count  # when each device is looked at next; events of other times are void

    def send(self, call: Call) -> None:
        self.under_way += len(call.jobs)
        for job in call.jobs:
            job.tag = call
        if self._queue or not self._place(call):
            self.clock.order += 1
            self.queued += len(call.jobs)
            heapq.heappush(self._queue, (call.group.number, self.clock.order, call))

    def dispatch(self) -> None:
        while self._queue and self._place(self._queue[0][2]):
            self.queued -= len(heapq.heappop(self._queue)[2].jobs)

    def sync(self, index: int) -> None:
        """Bring a device to the present; what ends at this very moment has ended."""
        device = self.devices[index]
        if device.at < self.clock.now:
            for job in device.advance(self.clock.now):  # at most those that end now: the next look is not past
                self._end(index, job)

    def evict(self, index: int, prompt_length: int) -> None:
        """What runs there goes on elsewhere, from the tokens it has; it is read once more for that."""
        self.sync(index)
        device, calls = self.devices[index], self._calls[index]
        self._calls[index] = {}
        self._rings[index] = math.inf
        for call in calls:
            self.router.done(index, call.work, len(call.jobs))
            left = []
            for job in call.jobs:
                if job.state != ENDED:
                    made = device.remove(job)
                    read = (job.prompt or prompt_length) + made if made else job.prompt
                    left.append(Job(job.tokens - made, read, before=job.before + made))
            self.under_way -= len(left)
            self.send(Call(call.group, left, call.work, len(left)))
        device.standing = device.at

    def wasted(self) -> int:
        """Tokens of requests that did not end."""
        return sum(device.progress(job) + job.before for device in self.devices for job in device.jobs()) + sum(
            job.before for _, _, call in self._queue for job in call.jobs
        )

    def _place(self, call: Call) -> bool:
        index = self.router.choose(count=len(call.jobs))
        if index is None:
            return False
        self.router.sent(index, call.work, len(call.jobs))
        self._calls[index][call] = None
        self.sync(index)
        self.devices[index].add(call.jobs)
        self._schedule(index)
        return True

    def _schedule(self, index: int) -> None:
        """Look when the next request ends. A look that comes too early, since others came, only looks again."""
        when = self.devices[index].next_s()
        if when < self._rings[index]:
            self._rings[index] = when
            self.clock.at(when, self._ring, (index, when))

    def _ring(self, about: tuple[int, float]) -> None:
        index, when = about
        if self._rings[index] != when:
            return
        self._rings[index] = math.inf
        for job in self.devices[index].advance(when):
            self._end(index, job)
        self._schedule(index)

    def _end(self, index: int, job: Job) -> None:
        call: Call = job.tag
        job.tag = None  # no circle of references: garbage goes at once
        self.seen.append(job.tokens + job.before)
        self.under_way -= 1
        call.left -= 1
        if not call.left:
            del self._calls[index][call]
            self.router.done(index, call.work, len(call.jobs))
            if self._queue:
                self.dispatch()
        group = call.group
        group.left -= 1
        if not group.left:
            self._ended(self, group)
