"""The replicas of one role in the simulator: calls queue, are routed, run on devices, and move when a block does.

send ──> the controller's line (oldest group first) ──its Router──> Device ──> ended(job)

As in a run, every controller has a line and a router of its own, and sees nothing of the others' (generation/pool.py);
beyond LINES of them, some share one: that changes little but the simulator's speed.
When a block moves, what runs there goes on elsewhere (`evict`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gcore.generation.routing import SENT_PER_SLOT, Router
from gcore.placement.grid import POLICY, DeviceGrid
from gcore.placement.replica_speed import ReplicaSpeed
from gcore.placement.rules import Load, room
from gcore.simulate.device import Device, Job

Memory = Mapping[str, Sequence[float]]  # lengths of requests that ended lately, by role: quantiles

LINES = 8  # at most so many controllers are told apart here; with 64, 512 slots take a quarter more time


class Group:
    """The siblings of one prompt. `left`: requests of its present stage that have not ended."""

    __slots__ = ("draw", "left", "number")

    def __init__(self, number: int, draw: Any, left: int) -> None:
        self.number, self.draw, self.left = number, draw, left


@dataclass(slots=True, eq=False)
class Call:
    """What travels as one: the siblings of a group, or one response to a judge."""

    group: Group
    jobs: Sequence[Job]  # until a replica has them: they know their call, and circles of references are slow garbage
    work: int  # tokens, as pools tell the router: those of the prompt, and as many more as are allowed
    size: int  # jobs that were sent
    left: int


class Replica(Device):
    """A device of a fleet. The tags of its jobs are their calls."""

    __slots__ = ("index", "rings")

    def __init__(self, speed: ReplicaSpeed, index: int) -> None:
        super().__init__(speed)
        self.index = index
        self.rings = math.inf  # when it is looked at next; events of other times are void


class Line:
    """What one controller has waiting for a role, and where its calls go."""

    __slots__ = ("queue", "router")

    def __init__(self, router: Router) -> None:
        self.router = router
        self.queue: list[tuple[int, int, Call]] = []  # a heap


class Clock:
    """Events in the order of their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.over = False
        self.order = 0
        self.events: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def at(self, when: float, what: Callable[[Any], None], about: Any) -> None:
        self.order += 1
        heapq.heappush(self.events, (when, self.order, what, about))

    def run(self) -> None:
        """Until something sets `over`."""
        events, pop = self.events, heapq.heappop
        while not self.over:
            assert events, "nothing happens any more"
            self.now, _, what, about = pop(events)
            what(about)


class Fleet:
    """All replicas of a role. Those whose block another role has are closed."""

    def __init__(
        self,
        name: str,
        grid: DeviceGrid,
        speed: ReplicaSpeed,
        memory: Memory,
        clock: Clock,
        ended: Callable[[Fleet, Group], None],
        *,
        prompt: float,
        longest_allowed: int,
        controllers: int = 1,
        repeats: int = 1,
    ) -> None:
        self.name, self.speed, self.clock, self.prompt, self.repeats = name, speed, clock, prompt, repeats
        self.longest_allowed = longest_allowed
        self.per_block = grid.per_block(name)
        self.lengths, self.longest = memory[name], memory.get(f"{name}/longest", ())
        count = grid.num_blocks * self.per_block
        self.devices = [Replica(speed, i) for i in range(count)]
        self.places = [self.devices[i : i + self.per_block] for i in range(0, count, self.per_block)]  # by block
        load = Load(lengths=self.lengths, prompt=prompt)
        limit = SENT_PER_SLOT * speed.max_concurrent if name == POLICY else room(load, speed)
        lines = min(controllers, LINES)
        part = -(-limit // lines)
        turns = [(rank, lines) for rank in range(lines)]
        self.lines = [Line(Router(count, turn, limit=part, opened=())) for turn in turns]
        self.blocks: list[int] = []  # those it has, in order
        self.seen: list[int] = []  # lengths of requests that ended
        self.seen_longest: list[int] = []  # of groups
        self.under_way = 0  # requests, waiting or running
        self.queued = 0  # those of them that no replica has room for
        self.ended = ended

    def open(self, replicas: Iterable[Replica]) -> None:
        """They are sent something from the next call on."""
        numbers = [replica.index for replica in replicas]
        for line in self.lines:
            line.router.open(*numbers)

    def close(self, replicas: Iterable[Replica]) -> None:
        numbers = [replica.index for replica in replicas]
        for line in self.lines:
            line.router.close(*numbers)

    def send(self, call: Call) -> None:
        self.under_way += call.size
        line = self._line(call)
        if line.queue or not self._place(call, line):
            self.clock.order += 1
            self.queued += call.size
            heapq.heappush(line.queue, (call.group.number, self.clock.order, call))

    def dispatch(self) -> None:
        for line in self.lines:
            self._dispatch(line)

    def _dispatch(self, line: Line) -> None:
        queue = line.queue
        while queue and self._place(queue[0][2], line):
            self.queued -= heapq.heappop(queue)[2].size

    def _line(self, call: Call) -> Line:
        return self.lines[call.group.number % len(self.lines)]

    def sync(self, replica: Replica) -> None:
        """Bring a device to the present; what ends at this very moment has ended."""
        now = self.clock.now
        if replica.at < now:
            for job in replica.advance(now):  # at most those that end now: the next look is not past
                self._end(replica, job)

    def evict(self, replica: Replica, prompt_length: int) -> None:
        """What runs there goes on elsewhere, from the tokens it has; it is read once more for that."""
        self.sync(replica)
        replica.rings = math.inf
        calls: dict[Call, list[Job]] = {}
        for job in replica.jobs():
            calls.setdefault(job.tag, []).append(job)
        for call, jobs in calls.items():
            self._line(call).router.done(replica.index, call.work, call.size)
            left = []
            for job in jobs:
                made = replica.remove(job)
                read = (job.prompt or prompt_length) + made if made else job.prompt
                left.append(Job(job.tokens - made, read, before=job.before + made))
            self.under_way -= len(left)
            self.send(Call(call.group, left, call.work, len(left), len(left)))
        replica.standing = replica.at

    def wasted(self) -> int:
        """Tokens of requests that did not end."""
        return sum(device.progress(job) + job.before for device in self.devices for job in device.jobs()) + sum(
            job.before for line in self.lines for _, _, call in line.queue for job in call.jobs
        )

    def _place(self, call: Call, line: Line) -> bool:
        key = None if self.name == POLICY else call.group.number  # verdicts on siblings stay near each other
        index = line.router.choose(key=key, count=call.size)
        if index is None:
            return False
        line.router.sent(index, call.work, call.size)
        replica, jobs, call.jobs = self.devices[index], call.jobs, ()
        for job in jobs:
            job.tag = call
        self.sync(replica)
        replica.add(jobs)
        self._schedule(replica)
        return True

    def _schedule(self, replica: Replica) -> None:
        """Look when the next request ends. A look that comes too early, since others came, only looks again."""
        when = replica.next_s()
        if when < replica.rings:
            replica.rings = when
            self.clock.at(when, self._ring, replica)

    def _ring(self, replica: Replica) -> None:
        now = self.clock.now
        if replica.rings != now:
            return
        replica.rings = math.inf
        for job in replica.advance(now):
            self._end(replica, job)
        self._schedule(replica)

    def _end(self, replica: Replica, job: Job) -> None:
        call: Call = job.tag
        self.seen.append(job.tokens + job.before)
        self.under_way -= 1
        call.left -= 1
        if not call.left:
            line = self._line(call)
            line.router.done(replica.index, call.work, call.size)
            if line.queue:
                self._dispatch(line)
        group = call.group
        group.left -= 1
        if not group.left:
            self.ended(self, group)
