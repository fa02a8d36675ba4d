"""An engine whose device time is slept, not computed: real controllers meet it on any machine.

    requests ──> waiting ──a slot is free──> prefill ──> decode, all at one pace ──> completions
                                                            └── a step lasts longer the more requests run

All running requests make a token a step, so one *token clock* serves them all: a request that began at 120 and makes 50
tokens is done when the clock shows 170, however often the pace changed in between. An arrival, an end and an abort cost
O(log n); between them nothing happens, and nothing is done.

Time is that of the event loop. Under an ordinary one, `speed` emulated seconds pass in a second. Under a VirtualLoop
(gcore.simulate) nobody waits: its time jumps to the next thing that happens.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from gcore.protocols import Stats, Weights
from gcore.types import Completion, Finish, Ints, Request, UserError

Lengths = Callable[[Request], int]
EARLY_S = 1e-6  # emulated: sums of floats end a little before what they add up to
EARLY_TOKENS = 1e-6


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a device. Timing(base_s=0.01, per_sequence_s=0.0001): a decoding step of 100 requests takes 20 ms"""

    base_s: float
    per_sequence_s: float = 0.0
    prefill_s_per_token: float = 0.0
    weights_s: float = 0.0  # new weights, all parts together; decoding stands still
    sleep_s: float = 0.0
    wake_s: float = 0.0

    def __post_init__(self) -> None:
        if min(astuple(self)) < 0 or self.step_s(1) <= 0:
            raise ValueError(f"{self}: expected no time below 0, and a decoding step that takes some")

    def step_s(self, running: int) -> float:
        """A token of each of the running requests; one in its prefill counts among them."""
        return self.base_s + self.per_sequence_s * running


def log_normal(median: float, sigma: float) -> Lengths:
    """Heavy-tailed lengths, at least 1: half of them at most `median`; the mean is median * exp(sigma ** 2 / 2)."""
    normal = NormalDist()

    def length(request: Request) -> int:
        bits = _noise(~request.noise_key, request.position, 1)  # ~: another stream than that of the tokens
        return max(1, round(median * math.exp(sigma * normal.inv_cdf((float(bits[0]) + 0.5) * 2.0**-64))))

    return length


LENGTHS = log_normal(median=256, sigma=0.8)


@dataclass(slots=True, eq=False)
class _Call:
    """One `generate`: answered when its last request is."""

    ticket: str
    future: asyncio.Future[list[Completion]]
    jobs: list[_Job] = field(default_factory=list)
    left: int = 0


@dataclass(slots=True, eq=False)
class _Job:
    call: _Call
    request: Request
    length: int
    admitted: bool = False
    began: float | None = None  # on the token clock; None before and in the prefill
    completion: Completion | None = None


class EmulatedEngine:
    """Implements protocols.Engine. Tokens and their number follow from the request's noise key alone.

    `lengths` says how many tokens a request would make; max_tokens cuts it, and without a stop token nothing else ends
    a response. Logprobs are all -1.
    """

    def __init__(
        self,
        timing: Timing,
        *,
        max_concurrent: int,
        lengths: Lengths = LENGTHS,
        tokens: range = range(4, 1000),
        speed: float = 1.0,
    ) -> None:
        self.timing, self.max_concurrent, self.speed = timing, max_concurrent, speed
        self.version = 0
        self._lengths, self._tokens = lengths, tokens
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0  # the loop's time up to which all has happened
        self._device_s = 0.0  # emulated seconds the device was free to work; stands still while weights come
        self._clock = 0.0  # token clock
        self._order = itertools.count()
        self._waiting: deque[_Job] = deque()  # in order of arrival; the aborted ones among them are passed over
        self._prefilling: list[tuple[float, int, _Job]] = []  # heap: done at, in device seconds
        self._decoding: list[tuple[float, int, _Job]] = []  # heap: done at, on the token clock
        self._calls: dict[str, dict[_Call, None]] = {}  # by ticket
        self._num_running = self._num_waiting = self._num_loads = 0
        self._in_parts = self._asleep = self._bare = False  # more weights to come; memory given back; weights dropped
        self._changes: list[tuple[float, int]] = [(0.0, 0)]  # token clock, version from then on
        self._generated, self._busy_s = 0, 0.0

    # ---- protocol -------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        for request in requests:
            _check(request)
        if not requests:
            return []
        loop = self._catch_up()
        call = _Call(ticket, loop.create_future(), left=len(requests))
        call.jobs = [_Job(call, request, self._length(request)) for request in requests]
        self._calls.setdefault(ticket, {})[call] = None
        self._waiting.extend(call.jobs)
        self._num_waiting += len(call.jobs)
        self._go_on()
        return await call.future

    async def abort(self, ticket: str) -> None:
        self._catch_up()
        for call in list(self._calls.get(ticket, ())):
            for job in call.jobs:
                if job.completion is None:
                    self._end(job, self._progress(job), "abort")
        self._go_on()

    async def load_weights(self, version: int, weights: Weights, part: tuple[int, int] = (0, 1)) -> int:
        self._catch_up()
        self._num_loads += 1
        index, count = part
        try:
            await self._pass(self.timing.weights_s / count)
            self._in_parts = index + 1 < count
            if not self._in_parts:
                self.version, self._bare = version, False
                self._changes.append((self._clock, version))
        finally:
            self._num_loads -= 1
            self._go_on()
        return self.version

    async def sleep(self, level: int) -> Stats:
        self._catch_up()
        if self._num_running or self._num_waiting:
            raise RuntimeError(f"asked to sleep with {self._num_running + self._num_waiting} requests under way")
        self._asleep, self._bare = True, self._bare or level > 1
        await self._pass(self.timing.sleep_s)
        return {"seconds": self.timing.sleep_s, "freed_gb": 0.0}

    async def wake(self, *tags: str) -> Stats:
        self._catch_up()
        await self._pass(self.timing.wake_s)
        self._asleep = bool(tags) and "kv_cache" not in tags
        self._go_on()
        return {"seconds": self.timing.wake_s, "taken_gb": 0.0}

    async def stats(self) -> Stats:
        """Seconds are emulated ones. Taking new weights counts as busy, sleep does not."""
        self._catch_up()
        underway = sum(self._progress(job) for _, _, job in self._decoding if job.completion is None)
        return {
            "generated_tokens": float(self._generated + underway),
            "busy_s": self._busy_s,
            "running": float(self._num_running),
            "waiting": float(self._num_waiting),
        }

    # ---- time -----------------------------------------------------------------------------------------------------

    def _catch_up(self) -> asyncio.AbstractEventLoop:
        """Let everything happen that is due by now, each at its own time: a loop that is late delays no request."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._timer, self._at = loop, None, loop.time()
        now = loop.time()
        passed_s = (now - self._at) * self.speed
        self._at = now
        if self._stands_still:
            self._busy_s += passed_s if self._num_loads or self._in_parts else 0.0
            return loop
        until = self._device_s + passed_s
        while True:
            due, heap = self._next()
            if due > until + EARLY_S:
                break
            self._move(due)
            self._happen(heap)
        if until > self._device_s:
            self._move(until)
        else:  # what was due came a little early
            self._at += (self._device_s - until) / self.speed
        return loop

    async def _pass(self, emulated_s: float) -> None:
        try:
            if emulated_s:
                await asyncio.sleep(emulated_s / self.speed)
        finally:
            self._catch_up()

    @property
    def _stands_still(self) -> bool:
        return bool(self._num_loads) or self._in_parts or self._asleep or self._bare

    def _go_on(self) -> None:
        if not self._stands_still:
            self._admit()
            self._arm()

    def _next(self) -> tuple[float, list[tuple[float, int, _Job]]]:
        """When, in device seconds, something happens next, and to the first of which heap."""
        for heap in (self._prefilling, self._decoding):
            while heap and heap[0][2].completion is not None:  # aborted
                heapq.heappop(heap)
        due, first = math.inf, self._prefilling
        if self._prefilling:
            due = max(self._prefilling[0][0], self._device_s)
        if self._decoding:
            left = max(0.0, self._decoding[0][0] - self._clock)
            end = self._device_s + left * self.timing.step_s(self._num_running)
            if end < due:
                due, first = end, self._decoding
        return due, first

    def _move(self, device_s: float) -> None:
        if self._num_running:
            passed_s = device_s - self._device_s
            self._clock += passed_s / self.timing.step_s(self._num_running)
            self._busy_s += passed_s
        self._device_s = device_s

    def _happen(self, heap: list[tuple[float, int, _Job]]) -> None:
        end, _, job = heapq.heappop(heap)
        if heap is self._prefilling:
            self._decode(job)
            return
        self._clock = end
        enough = job.length == job.request.params.max_tokens
        self._end(job, job.length, "length" if enough else "stop")
        self._admit()

    def _arm(self) -> None:
        """One timer, for what happens next. One that rings early does no harm, so it is left alone."""
        assert self._loop is not None
        due, _ = self._next()
        if due == math.inf:
            return
        when = self._at + (due - self._device_s) / self.speed
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._catch_up()
        self._go_on()

    # ---- requests -------------------------------------------------------------------------------------------------

    def _length(self, request: Request) -> int:
        most = request.params.max_tokens
        return min(self._lengths(request), most) if request.params.stop_tokens else most

    def _admit(self) -> None:
        while self._waiting and self._num_running < self.max_concurrent:
            job = self._waiting.popleft()
            if job.completion is not None:  # aborted
                continue
            job.admitted = True
            self._num_waiting -= 1
            self._num_running += 1
            prefill_s = self.timing.prefill_s_per_token * len(job.request.tokens_P)
            if prefill_s:
                heapq.heappush(self._prefilling, (self._device_s + prefill_s, next(self._order), job))
            else:
                self._decode(job)

    def _decode(self, job: _Job) -> None:
        job.began = self._clock
        heapq.heappush(self._decoding, (self._clock + job.length, next(self._order), job))

    def _progress(self, job: _Job) -> int:
        if job.began is None:
            return 0
        return min(job.length, math.floor(self._clock - job.began + EARLY_TOKENS))

    def _end(self, job: _Job, num: int, finish: Finish) -> None:
        job.completion = Completion(
            _tokens_of(job.request, num, finish, self._tokens),
            np.full(num, -1.0, np.float32),
            self._versions_of(job, num),
            finish,
        )
        self._generated += num
        if job.admitted:
            self._num_running -= 1
        else:
            self._num_waiting -= 1
        call = job.call
        call.left -= 1
        if not call.left:
            calls = self._calls[call.ticket]
            del calls[call]
            if not calls:
                del self._calls[call.ticket]
            if not call.future.done():  # its caller may have gone
                call.future.set_result([job.completion for job in call.jobs if job.completion is not None])
        if not self._num_running:  # nobody reads the clock: begin anew, floats are exact near 0
            self._clock, self._changes = 0.0, [(0.0, self.version)]
            self._decoding.clear()
            self._prefilling.clear()

    def _versions_of(self, job: _Job, num: int) -> Ints:
        began = self._clock if job.began is None else job.began
        first = bisect_right(self._changes, began, key=lambda change: change[0]) - 1
        versions = np.full(num, self._changes[first][1], np.int32)
        for clock, version in self._changes[first + 1 :]:
            versions[math.floor(clock - began + EARLY_TOKENS) :] = version
        return versions


def _check(request: Request) -> None:
    if len(request.tokens_P) == 0:
        raise UserError("an engine request has an empty prompt; expected at least one token (chat templates add some)")
    if request.params.max_tokens < 1:
        raise UserError(f"an engine request asks for {request.params.max_tokens} tokens; expected at least 1")


def _tokens_of(request: Request, num: int, finish: Finish, tokens: range) -> Ints:
    """What an aborted request has is the beginning of what it would have had."""
    table = _table(tokens, request.params.stop_tokens)
    found: Ints = table[_noise(request.noise_key, request.position, num) % np.uint64(len(table))]
    if finish == "stop":
        found[-1] = request.params.stop_tokens[0]
    return found


@functools.lru_cache(maxsize=16)
def _table(tokens: range, stops: tuple[int, ...]) -> Ints:
    """The tokens to choose from: none of those that would end the response."""
    return np.array([token for token in tokens if token not in stops], np.int32)


def _noise(key: int, start: int, num: int) -> npt.NDArray[np.uint64]:
    """SplitMix64: outputs `start`, `start + 1`, ... of the key's stream, as generation/noise.py draws them."""
    z = np.arange(start + 1, start + num + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(key & (2**64 - 1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
