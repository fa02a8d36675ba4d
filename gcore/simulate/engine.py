"""An engine whose device time is slept, not computed: real controllers meet it on any machine.

    requests ──> held while weights come or it sleeps ──> Device (device.py): queue, prefill, decoding ──> completions

The device is that of the simulator, so both have the same timing: prompts are read one after another; decoding stops
while one is read; all running requests make one token per step, and a step takes longer the more of them run. A prompt
that was read before, with the same weights, is not read again (siblings, repeated verdicts). Nothing runs between two
events.

Time is that of the event loop. In an ordinary loop, `speedup` emulated seconds pass per second. In a VirtualLoop
(gcore.simulate) there is no waiting: time jumps to the next event.
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

from gcore.config.base import EmulatedDevice, Model, Serving
from gcore.content.tokens import Tokens, tokens_of
from gcore.placement.replica_speed import ReplicaSpeed
from gcore.protocols import EngineStats, MemoryChange, Weights
from gcore.simulate.device import RUNNING, Device, Job
from gcore.types import Completion, Finish, Ints, Request, UserError

Lengths = Callable[[Request], int]
EARLY_S = 1e-6  # emulated: sums of floats end a little before what they add up to
EARLY_TOKENS = 1e-6
NORMAL = NormalDist()
REMEMBERED = 4096  # prompts whose KV cache is still there; the oldest goes first


def log_normal(median: float, sigma: float, shared: float = 0.0) -> Lengths:
    """Heavy-tailed lengths, at least 1: half of them at most `median`; the mean is median * exp(sigma ** 2 / 2).

    `shared` is the part of the variance that all responses to a prompt have in common. Where the turns of a sample end
    follows from its key: one that goes on elsewhere, from the tokens it has, ends where it would have ended.
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
    """Lengths of an engine without seeds: a request that is started again from its prompt gets fresh noise. One that
    continues from the tokens it has keeps its noise: the rest of a response is drawn given its beginning."""
    starts = Counter[int]()

    def length(request: Request) -> int:
        starts[request.noise_key] += request.position == 0
        mixed = _noise(request.noise_key, starts[request.noise_key], 1)
        return lengths(replace(request, noise_key=int(mixed[0])))

    return length


LENGTHS = log_normal(median=256, sigma=0.8)


@dataclass(slots=True, eq=False)
class _Call:
    """One `generate`: answered when its last request is."""

    ticket: str
    future: asyncio.Future[list[Completion]]
    asked: list[_Asked] = field(default_factory=list)
    left: int = 0


@dataclass(slots=True, eq=False)
class _Asked:
    call: _Call
    request: Request
    job: Job
    completion: Completion | None = None


class EmulatedEngine:
    """Implements protocols.Engine. Tokens and their number follow from the request's noise key alone.

    `lengths` says how many tokens a request would make; max_tokens cuts it, and without a stop token nothing else ends
    a response. Logprobs are all -1.
    """

    def __init__(
        self,
        speed: ReplicaSpeed,
        *,
        max_length: int | None = None,  # of prompt and response together
        lengths: Lengths = LENGTHS,
        tokens: range = range(4, 1000),
        speedup: float = 1.0,
    ) -> None:
        if speed.step_s(1) <= 0 or speedup <= 0:
            raise ValueError(
                f"{speed}, speedup {speedup}: expected a decoding step that takes some time, and a speedup above 0"
            )
        self.speed, self.max_length, self.speedup = speed, max_length, speedup
        self.version = 0
        self._lengths, self._tokens = lengths, tokens
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.Handle | None = None
        self._rings = math.inf  # when it does; not every loop's timers tell
        self._at = 0.0  # the loop's time up to which all has happened
        self._device = Device(speed)  # its time stands still while weights come, and in sleep
        self._held: list[_Asked] = []  # came while it stood still
        self._calls: dict[str, dict[_Call, None]] = {}  # by ticket
        self._num_loads = 0
        self._incomplete = self._asleep = self._bare = False  # more buckets to come; memory given back; weights dropped
        self._changes: list[tuple[float, int]] = [(0.0, 0)]  # token clock, version from then on
        self._read: dict[bytes, None] = {}  # digests of the prompts in the cache
        self._generated, self._loading_s = 0, 0.0

    # ---- protocol -------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        for request in requests:
            _check(request, self.max_length)
        if not requests:
            return []
        loop = self._catch_up()
        call = _Call(ticket, loop.create_future(), left=len(requests))
        call.asked = [_Asked(call, request, self._job(request)) for request in requests]
        for asked in call.asked:
            asked.job.tag = asked
        self._calls.setdefault(ticket, {})[call] = None
        self._held += call.asked
        self._go_on()
        return await call.future

    async def abort(self, ticket: str) -> None:
        self._catch_up()
        mine = [asked for call in self._calls.get(ticket, ()) for asked in call.asked if asked.completion is None]
        for asked in sorted(mine, key=lambda asked: asked.job.state):  # first those that wait: none takes a free place
            self._take_back(asked)
        self._rest_if_idle()
        self._go_on()

    async def load_weights(self, version: int, weights: Weights, bucket: tuple[int, int] = (0, 1)) -> int:
        self._catch_up()
        self._num_loads += 1
        index, count = bucket
        try:
            await self._pass(self.speed.weights_s / count)
            self._incomplete = index + 1 < count
            if not self._incomplete:
                self.version, self._bare = version, False
                self._changes.append((self._device.clock, version))
                self._read.clear()
        finally:
            self._num_loads -= 1
            self._go_on()
        return self.version

    async def sleep(self, level: int) -> MemoryChange:
        self._catch_up()
        if under_way := self._device.running + self._device.waiting + len(self._held):
            raise RuntimeError(f"asked to sleep with {under_way} requests under way")
        self._asleep, self._bare = True, self._bare or level > 1
        self._read.clear()
        await self._pass(self.speed.sleep_s)
        return MemoryChange(self.speed.sleep_s, 0.0)

    async def wake(self, *tags: str) -> MemoryChange:
        self._catch_up()
        await self._pass(self.speed.wake_s)
        self._asleep = bool(tags) and "kv_cache" not in tags
        self._go_on()
        return MemoryChange(self.speed.wake_s, 0.0)

    async def stats(self) -> EngineStats:
        """Seconds are emulated ones. Taking new weights counts as busy, sleep does not."""
        self._catch_up()
        device = self._device
        under_way = float(sum(device.progress(job) for job in device.jobs()))
        return EngineStats(
            running=device.running,
            waiting=device.waiting + len(self._held),
            busy_s=device.busy_s + self._loading_s,
            generated_tokens=self._generated + under_way,
            running_tokens=under_way,
        )

    # ---- time -----------------------------------------------------------------------------------------------------

    def _catch_up(self) -> asyncio.AbstractEventLoop:
        """Let everything happen that is due by now, each at its own time: a loop that is late delays no request."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._timer, self._at = loop, None, loop.time()
        now = loop.time()
        passed_s = (now - self._at) * self.speedup
        self._at = now
        if self._stands_still:
            self._loading_s += passed_s if self._num_loads or self._incomplete else 0.0
            return loop
        device = self._device
        until = device.at + passed_s
        while (due := device.next_s()) <= until + EARLY_S:
            self._advance(due)
        if until > device.at:
            self._answer(device.advance(until))
        else:  # what was due came a little early
            self._at += (device.at - until) / self.speedup
        return loop

    def _advance(self, due: float) -> None:
        """To the moment in which the next request ends."""
        ended = self._device.advance(due)
        if not ended:  # the last bits of a float: its time has come all the same
            self._device.clock = self._device.ending[0][0]
            ended = self._device.advance(due)
        self._answer(ended)

    def _answer(self, ended: Sequence[Job]) -> None:
        for job in ended:
            enough = job.tokens == job.tag.request.params.max_tokens
            self._end(job.tag, job.tokens, "length" if enough else "stop", job.began)
        self._rest_if_idle()

    async def _pass(self, emulated_s: float) -> None:
        try:
            if emulated_s:
                await asyncio.sleep(emulated_s / self.speedup)
        finally:
            self._catch_up()

    @property
    def _stands_still(self) -> bool:
        return bool(self._num_loads) or self._incomplete or self._asleep or self._bare

    def _go_on(self) -> None:
        if self._stands_still:
            return
        if self._held:
            self._device.add(sorted((asked.job for asked in self._held), key=lambda job: job.priority))
            self._held.clear()
        self._arm()

    def _arm(self) -> None:
        """One timer, for what happens next. One that rings early does no harm, so it is left alone."""
        assert self._loop is not None
        due = self._device.next_s()
        if due == math.inf:
            return
        when = self._at + (due - self._device.at) / self.speedup
        if self._timer is not None:
            if self._rings <= when:
                return
            self._timer.cancel()
        self._timer, self._rings = self._loop.call_at(when, self._ring), when

    def _ring(self) -> None:
        self._timer = None
        self._catch_up()
        self._go_on()

    # ---- requests -------------------------------------------------------------------------------------------------

    def _job(self, request: Request) -> Job:
        most, prompt = request.params.max_tokens, _digest(request)
        length = min(self._lengths(request), most) if request.params.stop_tokens else most
        known = prompt in self._read
        self._read[prompt] = None
        if len(self._read) > REMEMBERED:
            del self._read[next(iter(self._read))]
        return Job(length, 0 if known else request.content.size, priority=request.priority)

    def _take_back(self, asked: _Asked) -> None:
        job = asked.job
        began = job.began if job.state == RUNNING else None
        if began is None and job.prompt:
            self._read.pop(_digest(asked.request), None)  # it never was
        if asked in self._held:
            self._held.remove(asked)
        else:
            self._device.remove(job)
        self._end(asked, job.made, "abort", began)

    def _end(self, asked: _Asked, num: int, finish: Finish, began: float | None) -> None:
        asked.completion = Completion(
            Tokens.steps(_sampled(asked.request, num, finish, self._tokens)),
            np.full(num, -1.0, np.float32),
            self._versions(began, num),
            finish,
        )
        self._generated += num
        call = asked.call
        call.left -= 1
        if not call.left:
            calls = self._calls[call.ticket]
            del calls[call]
            if not calls:
                del self._calls[call.ticket]
            if not call.future.done():  # its caller may have gone
                call.future.set_result([one.completion for one in call.asked if one.completion is not None])

    def _rest_if_idle(self) -> None:
        """Nobody reads the token clock, and prompts that were aborted are not read to their end."""
        if not self._device.running:
            self._changes = [(self._device.clock, self.version)]
            self._device.standing = self._device.at

    def _versions(self, began: float | None, num: int) -> Ints:
        if began is None:
            return np.zeros(0, np.int32)
        first = bisect_right(self._changes, began, key=lambda change: change[0]) - 1
        versions = np.full(num, self._changes[first][1], np.int32)
        for clock, version in self._changes[first + 1 :]:
            versions[math.floor(clock - began + EARLY_TOKENS) :] = version
        return versions


def engine_of(serving: Serving, device: EmulatedDevice, model: Model, max_length: int) -> EmulatedEngine:
    """As configured. Needs neither network nor tokenizer nor torch: a hundred such processes fit a laptop."""
    names = ("base_s", "per_sequence_s", "prefill_s_per_token", "sleep_s", "wake_s", "weights_s")
    lengths = log_normal(device.mean_tokens / math.exp(device.sigma**2 / 2), device.sigma, device.shared)
    return EmulatedEngine(
        ReplicaSpeed(max_concurrent=serving.max_concurrent, **{name: getattr(device, name) for name in names}),
        max_length=max_length,
        lengths=lengths if serving.seeds else unseeded(lengths),
        tokens=range(4, 4 + len(model.build.alphabet)) if model.build else range(4, 1000),  # after the special ones
        speedup=device.speed,
    )


def _check(request: Request, max_length: int | None) -> None:
    content = tokens_of(request.content)
    if content.size == 0:
        raise UserError("an engine request has an empty prompt; expected at least one token (chat templates add some)")
    if request.params.max_tokens < 1:
        raise UserError(f"an engine request asks for {request.params.max_tokens} tokens; expected at least 1")
    if content.images:
        raise UserError(
            f"an engine request has {len(content.images)} images, expected none: the emulated engine serves text alone "
            "(key: generation.engine=vllm)"
        )
    total = content.size + request.params.max_tokens
    if max_length is not None and total > max_length:
        raise UserError(
            f"prompt of {content.size} tokens + max_tokens {request.params.max_tokens} = {total} exceeds the "
            f"engine's {max_length} (keys: data.max_prompt_length, generation.max_response_length)"
        )


def _sampled(request: Request, num: int, finish: Finish, tokens: range) -> Ints:
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


def _digest(request: Request) -> bytes:
    return hashlib.blake2b(tokens_of(request.content).tokens_T.tobytes(), digest_size=8).digest()


def _normal(key: int, place: int) -> float:
    bits = _noise(~key, place, 1)  # ~: another stream than that of the tokens
    return NORMAL.inv_cdf((float(bits[0]) + 0.5) * 2.0**-64)
