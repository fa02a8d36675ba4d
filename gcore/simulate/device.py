"""One engine replica as the emulated engine and the simulator see it: what runs there, and when the next request ends.

    add ──> waiting (by priority) ──room──> prefill: the device stands ──> decode, all at one speed ──> ended

All running requests make a token a step, so one *token clock* serves them all: a request that began at 120 and makes 50
tokens is done when the clock shows 170, however often the speed changed in between. Prefill comes first and is serial:
the clock stands still meanwhile. An arrival, an end and an abort cost O(log n); between them nothing is done.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from gcore.placement.replica_speed import ReplicaSpeed

WAITING, RUNNING, ENDED = 0, 1, 2  # states of a job
EARLY = 1e-9  # sums of floats end a little before what they add up to


class Job:
    """One request. Job(tokens=200, prompt=512, tag=...): makes 200 tokens after a prefill of 512"""

    __slots__ = ("before", "began", "made", "priority", "prompt", "state", "tag", "tokens")

    def __init__(self, tokens: int, prompt: int, tag: Any = None, priority: float = 0.0, before: int = 0) -> None:
        self.tokens, self.prompt = tokens, prompt
        self.tag, self.priority = tag, priority
        self.before = before  # tokens it made elsewhere
        self.began, self.made, self.state = 0.0, 0, WAITING


class Device:
    """Time is the caller's, in seconds, and only goes forward: `advance`, then look or change."""

    __slots__ = (
        "_base", "_began", "_cap", "_order", "_per", "_prefill", "_waiting", "at", "busy_s", "clock", "ending",
        "prefilled", "running", "standing", "step_s", "waiting",
    )  # fmt: skip

    def __init__(self, speed: ReplicaSpeed, at: float = 0.0) -> None:
        self._base, self._per, self._cap = speed.base_s, speed.per_sequence_s, speed.max_concurrent
        self._prefill = speed.prefill_s_per_token
        self.at = self.standing = at  # standing: until then the device is in prefill
        self.clock, self.step_s = 0.0, speed.base_s
        self.running = self.waiting = self._order = 0
        self.ending: list[tuple[float, int, Job]] = []  # heap on the token clock; the gone among them are passed over
        self._waiting: list[tuple[float, int, Job]] = []
        self._began = 0.0  # on the token clock: the sum over the running, had they made all their tokens here
        self.busy_s = 0.0
        self.prefilled = 0

    def next_s(self) -> float:
        """When the next request ends, if nothing else happens before."""
        ending = self.ending
        while ending:
            end, _, job = ending[0]
            if job.state == RUNNING:
                at, standing, rest = self.at, self.standing, end - self.clock
                begin = at if at > standing else standing
                return begin + rest * self.step_s if rest > 0.0 else begin
            heapq.heappop(ending)
        return math.inf

    def advance(self, to: float) -> list[Job]:
        """Let time pass up to `to`, at most to next_s(); what ends by then."""
        at, standing, self.at = self.at, self.standing, to
        if not self.running:
            return []
        self.busy_s += to - at
        decoding, clock = to - (at if at > standing else standing), self.clock
        if decoding > 0:
            self.clock = clock = clock + decoding / self.step_s
        ended: list[Job] = []
        ending, due = self.ending, clock + EARLY * (1.0 + clock)
        while ending and ending[0][0] <= due:
            job = heapq.heappop(ending)[2]
            if job.state == RUNNING:
                job.state, job.made = ENDED, job.tokens
                self._began -= job.began - job.before
                ended.append(job)
        if ended:
            self._left(len(ended))
        return ended

    def add(self, jobs: Sequence[Job]) -> None:
        free = 0 if self.waiting else self._cap - self.running
        if len(jobs) <= free:
            self._begin(jobs)
        else:
            self._begin(jobs[:free])
            for job in jobs[free:]:
                self._order += 1
                heapq.heappush(self._waiting, (job.priority, self._order, job))
                self.waiting += 1
        self.step_s = self._base + self._per * self.running

    def remove(self, job: Job) -> int:
        """Abort. Returns how many tokens it made."""
        if job.state == RUNNING:
            job.made = self.progress(job)
            job.state = ENDED
            self._began -= job.began - job.before
            self._left(1)
        elif job.state == WAITING:
            job.state = ENDED
            self.waiting -= 1
        return job.made

    def progress(self, job: Job) -> int:
        if job.state != RUNNING:
            return job.made
        return min(job.tokens, max(0, math.floor(self.clock - job.began + 1e-6)))

    def jobs(self) -> list[Job]:
        """All that is here: the running, in the order in which they began, then the waiting in theirs."""
        entries = sorted(self.ending, key=itemgetter(1)) + sorted(self._waiting)
        return [job for _, _, job in entries if job.state != ENDED]

    def _left(self, count: int) -> None:
        self.running -= count
        if self.waiting:
            self._admit()
        self.step_s = self._base + self._per * self.running
        if not self.running:  # nobody reads the clock: begin anew, floats are exact near 0
            self.clock = self._began = 0.0
            self.ending.clear()

    def _admit(self) -> None:
        waiting, free, admitted = self._waiting, self._cap - self.running, list[Job]()
        while waiting and len(admitted) < free:
            job = heapq.heappop(waiting)[2]
            if job.state == WAITING:
                admitted.append(job)
        self.waiting -= len(admitted)
        self._begin(admitted)

    def _begin(self, jobs: Sequence[Job]) -> None:
        clock, ending = self.clock, self.ending
        self.running += len(jobs)
        for job in jobs:
            job.state, job.began = RUNNING, clock
            self._began += clock - job.before
            self._order += 1
            heapq.heappush(ending, (clock + job.tokens, self._order, job))
            if job.prompt and self._prefill:
                self.standing = (self.at if self.at > self.standing else self.standing) + self._prefill * job.prompt
                self.prefilled += job.prompt


def seen(blocks: Iterable[Sequence[Device]], now: float) -> tuple[list[int], int, float, float]:
    """What is there, as others see it: requests on each block; those that run, the tokens that these have made, and
    seconds with something to do, on all blocks together. Nothing changes."""
    there, running, made, busy_s = list[int](), 0, 0.0, 0.0
    for block in blocks:
        here = 0
        for device in block:
            if not (decoded := device.running):  # so nothing waits
                busy_s += device.busy_s
                continue
            at, standing, clock = device.at, device.standing, device.clock
            decoding = now - (at if at > standing else standing)
            if decoding > 0.0:
                clock += decoding / device.step_s
            made += decoded * clock - device._began
            busy_s += device.busy_s + now - at
            running += decoded
            here += decoded + device.waiting
        there.append(here)
    return there, running, made, busy_s
