"""Timing of one engine replica, for the emulated engine and the simulator: its requests, and when the next one ends.

    add ──> waiting (by priority) ──free slot──> prefill: decoding stops ──> decode, all at one speed ──> ended

All running requests make one token per step, so one *token clock* is enough for all: a request that began at clock 120
and makes 50 tokens ends when the clock reads 170, however often the speed changed in between. Prefill is serial and has
priority: the token clock stops while it runs. An arrival, an end and an abort cost O(log n). There is no work between
events.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from gcore.cost.replica_speed import ReplicaSpeed

WAITING, RUNNING, ENDED = 0, 1, 2  # states of a job
ROUNDING = 1e-9  # relative: a sum of floats may be a little less than the exact value


class DeviceJob:
    """One request. DeviceJob(tokens=200, prompt=512, tag=...): makes 200 tokens after a prefill of 512"""

    __slots__ = ("before", "began", "made", "priority", "prompt", "state", "tag", "tokens")

    def __init__(self, tokens: int, prompt: int, tag: Any = None, priority: float = 0.0, before: int = 0) -> None:
        self.tokens, self.prompt = tokens, prompt
        self.tag, self.priority = tag, priority
        self.before = before  # tokens made on another device
        self.began, self.made, self.state = 0.0, 0, WAITING


class Device:
    """The caller gives the time, in seconds, which only grows: call `advance` before reading or changing anything."""

    __slots__ = (
        "_base", "_began", "_cap", "_order", "_per", "_prefill", "_waiting", "at", "busy_s", "clock", "ending",
        "generated", "prefill_until", "prefilled", "running", "step_s", "waiting",
    )  # fmt: skip

    def __init__(self, speed: ReplicaSpeed, at: float = 0.0) -> None:
        self._base, self._per, self._cap = speed.base_s, speed.per_sequence_s, speed.max_concurrent
        self._prefill = speed.prefill_s_per_token
        self.at = self.prefill_until = at  # at: the current time
        self.clock, self.step_s = 0.0, speed.base_s
        self.running = self.waiting = self._order = 0
        self.ending: list[tuple[float, int, DeviceJob]] = []  # heap on the token clock; aborted jobs in it are skipped
        self._waiting: list[tuple[float, int, DeviceJob]] = []
        self._began = 0.0  # sum over running jobs: token clock at their start, less the tokens made elsewhere
        self.busy_s = self.generated = 0.0  # generated: tokens of all requests
        self.prefilled = 0

    def retime(self, speed: ReplicaSpeed) -> None:
        """Another speed from now on."""
        self._base, self._per, self._cap = speed.base_s, speed.per_sequence_s, speed.max_concurrent
        self._prefill = speed.prefill_s_per_token
        self.step_s = self._base + self._per * self.running

    def pause(self, seconds: float) -> None:
        """Decoding stops for a while: a weight update between two tokens."""
        self.prefill_until = max(self.at, self.prefill_until) + seconds

    def next_s(self) -> float:
        """When the next request ends, if no other event comes first."""
        ending = self.ending
        while ending:
            end, _, job = ending[0]
            if job.state == RUNNING:
                at, prefill_until, rest = self.at, self.prefill_until, end - self.clock
                begin = at if at > prefill_until else prefill_until
                return begin + rest * self.step_s if rest > 0.0 else begin
            heapq.heappop(ending)
        return math.inf

    def advance(self, to: float) -> list[DeviceJob]:
        """Advance to `to`, at most next_s(). Returns the jobs that end."""
        at, prefill_until, self.at = self.at, self.prefill_until, to
        if not self.running:
            return []
        self.busy_s += to - at
        decoding, clock = to - (at if at > prefill_until else prefill_until), self.clock
        if decoding > 0:
            steps = decoding / self.step_s
            self.clock = clock = clock + steps
            self.generated += steps * self.running
        ended: list[DeviceJob] = []
        ending, due = self.ending, clock + ROUNDING * (1.0 + clock)
        while ending and ending[0][0] <= due:
            job = heapq.heappop(ending)[2]
            if job.state == RUNNING:
                job.state, job.made = ENDED, job.tokens
                self._began -= job.began - job.before
                ended.append(job)
        if ended:
            self._removed(len(ended))
        return ended

    def add(self, jobs: Sequence[DeviceJob]) -> None:
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

    def remove(self, job: DeviceJob) -> int:
        """Abort. Returns the number of tokens made."""
        if job.state == RUNNING:
            job.made = self.progress(job)
            job.state = ENDED
            self._began -= job.began - job.before
            self._removed(1)
        elif job.state == WAITING:
            job.state = ENDED
            self.waiting -= 1
        return job.made

    def progress(self, job: DeviceJob) -> int:
        if job.state != RUNNING:
            return job.made
        return min(job.tokens, max(0, math.floor(self.clock - job.began + 1e-6)))

    def jobs(self) -> list[DeviceJob]:
        """All jobs: the running ones in the order of their start, then the waiting ones in the order of their queue."""
        entries = sorted(self.ending, key=itemgetter(1)) + sorted(self._waiting)
        return [job for _, _, job in entries if job.state != ENDED]

    def _removed(self, count: int) -> None:
        self.running -= count
        if self.waiting:
            self._admit()
        self.step_s = self._base + self._per * self.running
        if not self.running:  # reset the clock: floats are most exact near 0
            self.clock = self._began = 0.0
            self.ending.clear()

    def _admit(self) -> None:
        waiting, free, admitted = self._waiting, self._cap - self.running, list[DeviceJob]()
        while waiting and len(admitted) < free:
            job = heapq.heappop(waiting)[2]
            if job.state == WAITING:
                admitted.append(job)
        self.waiting -= len(admitted)
        self._begin(admitted)

    def _begin(self, jobs: Sequence[DeviceJob]) -> None:
        clock, ending = self.clock, self.ending
        self.running += len(jobs)
        for job in jobs:
            job.state, job.began = RUNNING, clock
            self._began += clock - job.before
            self._order += 1
            heapq.heappush(ending, (clock + job.tokens, self._order, job))
            if job.prompt and self._prefill:
                self.prefill_until = max(self.at, self.prefill_until) + self._prefill * job.prompt
                self.prefilled += job.prompt


def observe(blocks: Iterable[Sequence[Device]], now: float) -> tuple[list[int], int, float, float]:
    """Requests per block; and over all blocks: running requests, tokens that these have made, busy seconds. Changes
    nothing."""
    per_block, running, made, busy_s = list[int](), 0, 0.0, 0.0
    for block in blocks:
        requests = 0
        for device in block:
            if not (decoded := device.running):  # then none waits either
                busy_s += device.busy_s
                continue
            at, prefill_until, clock = device.at, device.prefill_until, device.clock
            decoding = now - (at if at > prefill_until else prefill_until)
            if decoding > 0.0:
                clock += decoding / device.step_s
            made += decoded * clock - device._began
            busy_s += device.busy_s + now - at
            running += decoded
            requests += decoded + device.waiting
        per_block.append(requests)
    return per_block, running, made, busy_s
