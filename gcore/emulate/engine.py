"""An emulated engine: it sleeps for the device time instead of computing, so that real runs work on any machine.

    requests ──> held during weight updates and sleep ──> Device (device.py): queue, prefill, decoding ──> completions

The simulator uses the same device, so both have the same timing: prompts are prefilled one after another; decoding
stops during a prefill; all running requests make one token per step, and a step takes longer with more of them. A
prompt that was prefilled before with the same weights is cached (siblings, repeated verdicts). There is no work between
events.

Time is that of the event loop. In the VirtualLoop of bench/virtual_loop.py there is no waiting: time jumps to the next
event.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from gcore.config.engines import engines_taking
from gcore.content.tokens import Tokens, tokens_of
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.emulate.device import RUNNING, Device, DeviceJob
from gcore.generation.noise import bits
from gcore.generation.spec import EngineSpec
from gcore.protocols import EngineStats, MemoryChange, Weights
from gcore.types import Completion, Finish, Ints, Request, UserError

Lengths = Callable[[Request], int]
TOLERANCE_S = 1e-6  # emulated seconds: a sum of floats may be a little less than the exact value
TOLERANCE_TOKENS = 1e-6
NORMAL = NormalDist()
MAX_CACHED_PROMPTS = 4096  # the oldest is evicted first


def log_normal(median: float, sigma: float, shared: float = 0.0) -> Lengths:
    """Heavy-tailed lengths, at least 1; the mean is median * exp(sigma ** 2 / 2).

    `shared` is the share of the variance that all responses to a prompt have in common. The end of each turn of a
    sample depends only on its noise key: a request that continues on another replica ends at the same token.
    """
    of_prompt, own = sigma * math.sqrt(shared), sigma * math.sqrt(1.0 - shared)

    def length(request: Request) -> int:
        common = 0.0
        if of_prompt:
            prompt = tokens_of(request.content).tokens_P
            common = of_prompt * _normal(zlib.crc32(prompt.tobytes()), 0)
        end = 0
        while end <= request.position:
            end += max(1, round(median * math.exp(common + own * _normal(request.noise_key, end))))
        return end - request.position

    return length


def unseeded(lengths: Lengths) -> Lengths:
    """Lengths of an engine without seeds. A request that starts again from its prompt gets new noise. A request that
    continues from its tokens keeps its noise: the rest of a response depends on its beginning."""
    starts = Counter[int]()

    def length(request: Request) -> int:
        starts[request.noise_key] += request.position == 0
        mixed = _noise(request.noise_key, starts[request.noise_key], 1)
        return lengths(replace(request, noise_key=int(mixed[0])))

    return length


LENGTHS = log_normal(median=256, sigma=0.8)


@dataclass(slots=True, eq=False)
class _Call:
    """One call of `generate`. Its future is set when its last request has ended."""

    ticket: str
    future: asyncio.Future[list[Completion]]
    requests: list[_PendingRequest] = field(default_factory=list)
    unfinished: int = 0


@dataclass(slots=True, eq=False)
class _PendingRequest:
    call: _Call
    request: Request
    job: DeviceJob
    completion: Completion | None = None


class EmulatedEngine:
    """Implements protocols.Engine. Tokens and their number depend only on the noise key of the request.

    `lengths` returns the number of tokens of a request; max_tokens cuts it. Without a stop token, every response has
    max_tokens. Logprobs are all -1.
    """

    def __init__(
        self,
        speed: ReplicaSpeed,
        *,
        max_length: int | None = None,  # of prompt + response
        lengths: Lengths = LENGTHS,
        tokens: range = range(4, 1000),
    ) -> None:
        if speed.step_s(1) <= 0:
            raise ValueError(f"{speed}: expected a decoding step of more than 0 s")
        self.speed, self.max_length = speed, max_length
        self.version = 0
        self._lengths, self._tokens = lengths, tokens
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_at = math.inf  # its time; not every event loop's handle has it
        self._at = 0.0  # loop time up to which all events are processed
        self._device = Device(speed)  # its time stops during weight updates and sleep
        self._held: list[_PendingRequest] = []  # arrived while the device was stopped
        self._calls: dict[str, dict[_Call, None]] = {}  # by ticket
        self._num_loads = 0
        self._incomplete = False  # a weight update has more buckets to come
        self._asleep = self._weights_dropped = False
        self._changes: list[tuple[float, int]] = [(0.0, 0)]  # token clock, version from then on
        self._cached: dict[bytes, None] = {}  # digests of the prompts in the cache
        self._generated, self._loading_s = 0, 0.0

    # ---- protocol -------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        for request in requests:
            _check(request, self.max_length)
        if not requests:
            return []
        loop = self._catch_up()
        call = _Call(ticket, loop.create_future(), unfinished=len(requests))
        call.requests = [_PendingRequest(call, request, self._job(request)) for request in requests]
        for pending in call.requests:
            pending.job.tag = pending
        self._calls.setdefault(ticket, {})[call] = None
        self._held += call.requests
        self._resume()
        return await call.future

    async def abort(self, ticket: str) -> None:
        self._catch_up()
        calls = self._calls.get(ticket, ())
        unfinished = [pending for call in calls for pending in call.requests if pending.completion is None]
        for pending in sorted(unfinished, key=lambda pending: pending.job.state):  # waiting ones first: none may start
            self._abort_request(pending)
        self._reset_if_idle()
        self._resume()

    async def load_weights(self, version: int, weights: Weights, bucket: tuple[int, int] = (0, 1)) -> int:
        self._catch_up()
        self._num_loads += 1
        index, count = bucket
        try:
            await self._pass(self.speed.weights_s / count)
            self._incomplete = index + 1 < count
            if not self._incomplete:
                self.version, self._weights_dropped = version, False
                self._changes.append((self._device.clock, version))
                self._cached.clear()
        finally:
            self._num_loads -= 1
            self._resume()
        return self.version

    async def sleep(self, level: int) -> MemoryChange:
        self._catch_up()
        if in_progress := self._device.running + self._device.waiting + len(self._held):
            raise RuntimeError(f"sleep called with {in_progress} requests in progress; abort them first")
        self._asleep, self._weights_dropped = True, self._weights_dropped or level > 1
        self._cached.clear()
        await self._pass(self.speed.sleep_s)
        return MemoryChange(self.speed.sleep_s, 0.0)

    async def wake(self, *tags: str) -> MemoryChange:
        self._catch_up()
        await self._pass(self.speed.wake_s)
        self._asleep = bool(tags) and "kv_cache" not in tags
        self._resume()
        return MemoryChange(self.speed.wake_s, 0.0)

    async def reset(self) -> None:
        for ticket in list(self._calls):
            await self.abort(ticket)
        await self.wake()
        self._weights_dropped, self._incomplete = self._weights_dropped or self._incomplete, False

    async def stats(self) -> EngineStats:
        """Seconds are emulated. Weight updates count as busy, sleep does not."""
        self._catch_up()
        device = self._device
        running_tokens = float(sum(device.progress(job) for job in device.jobs()))
        return EngineStats(
            running=device.running,
            waiting=device.waiting + len(self._held),
            busy_s=device.busy_s + self._loading_s,
            generated_tokens=self._generated + running_tokens,
            running_tokens=running_tokens,
        )

    # ---- time -----------------------------------------------------------------------------------------------------

    def _catch_up(self) -> asyncio.AbstractEventLoop:
        """Process all events up to now, each at its own time: a late event loop delays no request."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._timer, self._at = loop, None, loop.time()
        now = loop.time()
        passed_s = now - self._at
        self._at = now
        if self._is_stopped:
            self._loading_s += passed_s if self._num_loads or self._incomplete else 0.0
            return loop
        device = self._device
        until = device.at + passed_s
        while (due := device.next_s()) <= until + TOLERANCE_S:
            self._advance(due)
        if until > device.at:
            self._complete(device.advance(until))
        else:  # the last event was a little after `until`, within the tolerance
            self._at += device.at - until
        return loop

    def _advance(self, due: float) -> None:
        """Advance to the end of the next request."""
        ended = self._device.advance(due)
        if not ended:  # float rounding: the clock is a little before the end
            self._device.clock = self._device.ending[0][0]
            ended = self._device.advance(due)
        self._complete(ended)

    def _complete(self, ended: Sequence[DeviceJob]) -> None:
        for job in ended:
            is_cut = job.tokens == job.tag.request.params.max_tokens
            self._end(job.tag, job.tokens, "length" if is_cut else "stop", job.began)
        self._reset_if_idle()

    async def _pass(self, seconds: float) -> None:
        try:
            if seconds:
                await asyncio.sleep(seconds)
        finally:
            self._catch_up()

    @property
    def _is_stopped(self) -> bool:
        return bool(self._num_loads) or self._incomplete or self._asleep or self._weights_dropped

    def _resume(self) -> None:
        if self._is_stopped:
            return
        if self._held:
            self._device.add(sorted((pending.job for pending in self._held), key=lambda job: job.priority))
            self._held.clear()
        self._set_timer()

    def _set_timer(self) -> None:
        """One timer, for the next event. An earlier timer is kept: it does no harm."""
        assert self._loop is not None
        due = self._device.next_s()
        if due == math.inf:
            return
        when = self._at + due - self._device.at
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(when, self._on_timer), when

    def _on_timer(self) -> None:
        self._timer = None
        self._catch_up()
        self._resume()

    # ---- requests -------------------------------------------------------------------------------------------------

    def _job(self, request: Request) -> DeviceJob:
        most, prompt = request.params.max_tokens, _digest(request)
        length = min(self._lengths(request), most) if request.params.stop_tokens else most
        is_cached = prompt in self._cached
        self._cached[prompt] = None
        if len(self._cached) > MAX_CACHED_PROMPTS:
            del self._cached[next(iter(self._cached))]
        return DeviceJob(length, 0 if is_cached else request.content.size, priority=request.priority)

    def _abort_request(self, pending: _PendingRequest) -> None:
        job = pending.job
        began = job.began if job.state == RUNNING else None
        if began is None and job.prompt:
            self._cached.pop(_digest(pending.request), None)  # its prefill has not started
        if pending in self._held:
            self._held.remove(pending)
        else:
            self._device.remove(job)
        self._end(pending, job.made, "abort", began)

    def _end(self, pending: _PendingRequest, num: int, finish: Finish, began: float | None) -> None:
        pending.completion = Completion(
            Tokens.steps(_sampled(pending.request, num, finish, self._tokens)),
            np.full(num, -1.0, np.float32),
            self._versions(began, num),
            finish,
        )
        self._generated += num
        call = pending.call
        call.unfinished -= 1
        if not call.unfinished:
            calls = self._calls[call.ticket]
            del calls[call]
            if not calls:
                del self._calls[call.ticket]
            if not call.future.done():  # the caller may have been cancelled
                call.future.set_result([one.completion for one in call.requests if one.completion is not None])

    def _reset_if_idle(self) -> None:
        """Without running requests, older versions are not needed any more, and a prefill that was aborted ends now."""
        if not self._device.running:
            self._changes = [(self._device.clock, self.version)]
            self._device.prefill_until = self._device.at

    def _versions(self, began: float | None, num: int) -> Ints:
        if began is None:
            return np.zeros(0, np.int32)
        first = bisect_right(self._changes, began, key=lambda change: change[0]) - 1
        versions = np.full(num, self._changes[first][1], np.int32)
        for clock, version in self._changes[first + 1 :]:
            versions[math.floor(clock - began + TOLERANCE_TOKENS) :] = version
        return versions


def make_engine(spec: EngineSpec) -> EmulatedEngine:
    """An engine as configured. Needs no model, no tokenizer and no torch: a laptop can run a hundred such processes."""
    serving, model, device = spec.serving, spec.model, spec.serving.emulated
    assert device is not None
    names = ("base_s", "per_sequence_s", "prefill_s_per_token", "sleep_s", "wake_s", "weights_s")
    lengths = log_normal(device.mean_tokens / math.exp(device.sigma**2 / 2), device.sigma, device.shared)
    return EmulatedEngine(
        ReplicaSpeed(max_concurrent=serving.max_concurrent, **{name: getattr(device, name) for name in names}),
        max_length=spec.max_length,
        lengths=lengths if serving.seeds else unseeded(lengths),
        tokens=range(4, 4 + len(model.build.alphabet)) if model.build else range(4, 1000),  # after the special tokens
    )


def _check(request: Request, max_length: int | None) -> None:
    content = tokens_of(request.content)
    if content.size == 0:
        raise UserError("an engine request has an empty prompt; expected at least one token (chat templates add some)")
    if request.params.max_tokens < 1:
        raise UserError(f"an engine request asks for {request.params.max_tokens} tokens; expected at least 1")
    if content.media:
        raise UserError(
            f"an engine request has {len(content.media)} images, expected none: the emulated engine serves only text "
            f"(key: generation.engine={engines_taking('image')})"
        )
    total = content.size + request.params.max_tokens
    if max_length is not None and total > max_length:
        raise UserError(
            f"prompt of {content.size} tokens + max_tokens {request.params.max_tokens} = {total} exceeds the "
            f"engine's {max_length} (keys: data.max_prompt_length, generation.max_response_length)"
        )


def _sampled(request: Request, num: int, finish: Finish, tokens: range) -> Ints:
    """The first `num` tokens of the request's stream: an aborted request has the beginning of the full response."""
    table = _table(tokens, request.params.stop_tokens)
    found: Ints = table[_noise(request.noise_key, request.position, num) % np.uint64(len(table))]
    if finish == "stop":
        found[-1] = request.params.stop_tokens[0]
    return found


@functools.lru_cache(maxsize=16)
def _table(tokens: range, stops: tuple[int, ...]) -> Ints:
    """The tokens to choose from, without the stop tokens."""
    return np.array([token for token in tokens if token not in stops], np.int32)


def _noise(key: int, start: int, num: int) -> npt.NDArray[np.uint64]:
    """Outputs `start`, `start + 1`, ... of the key's stream."""
    return bits(np.uint64(key & (2**64 - 1)), np.arange(start, start + num))


def _digest(request: Request) -> bytes:
    return hashlib.blake2b(tokens_of(request.content).tokens_T.tobytes(), digest_size=8).digest()


def _normal(key: int, place: int) -> float:
    number = float(_noise(~key, place, 1)[0])  # ~: not the stream of the tokens
    return NORMAL.inv_cdf((number + 0.5) * 2.0**-64)
