"""The embedded engine: continuous batching over any transformers decoder, on CPU or GPU.

    requests ──> waiting ──admit (prefill, shared by siblings)──> rows ──decode: a token per row per step──> completions

What it owns: the rows of the KV cache, admission, and sampling. The network itself is the library's.

The active rows always stand at the front of the cache, so a decoding step runs on a plain slice. A finished row is
replaced by the last one. Every prompt is prefilled up to its last token but one; the last token is the row's first
decoding step, so all logits come from one place.

On CPU a row's result is bitwise the same in any batch: matrix products treat rows alike from 8 rows on,
masked attention does from block to block of keys, and element-wise functions do when no remainder of a tensor falls
out of the vector loop. Rows and keys are rounded up for that, and a replica keeps to one thread.
`tests/contract/test_engine.py` holds it to that. Mixtures of experts and eager attention (docs/engines.md) differ in
the last bits by batch, and so do all models on GPUs.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from gcore.content.tokens import SamplingMask, Tokens, tokens_of
from gcore.decoders import as_argument, traits_of
from gcore.generation.cache import RowCache
from gcore.generation.common import check
from gcore.generation.decoder import FusedDecoder
from gcore.generation.futures import fail, finish, finish_all, post
from gcore.generation.sampling import Rows, sample
from gcore.models import Adapters
from gcore.observe.trace import Tracer
from gcore.protocols import EngineStats, MemoryChange, Weights
from gcore.types import Completion, Finish, Ints, Request
from gcore.weights.receiver import Base, WeightReceiver

ROW_BLOCK = 8
KEY_BLOCK = 32


def _round_up(value: int, block: int) -> int:
    return -(-value // block) * block


@dataclass(slots=True)
class _Job:
    request: Request
    tokens_T: Ints  # the request's: prompt and earlier steps
    future: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop
    ticket: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[Ints] = field(default_factory=list)  # of each token, where it was asked for

    def completion(self, finish: Finish) -> Completion:
        counts = np.array([len(ids) for ids in self.kept], np.int32)
        mask = SamplingMask(np.concatenate(self.kept), counts) if self.kept else None
        content = Tokens.steps(np.array(self.tokens, np.int32), mask)
        return Completion(content, np.array(self.logprobs, np.float32), np.array(self.versions, np.int32), finish)


class EmbeddedEngine:
    """Implements protocols.Engine. Decoding runs in a thread of its own; the event loop stays free."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_concurrent: int,
        max_length: int,
        threads: int = 1,
        min_step_s: float = 0.0,
        adapters: Adapters | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._model, self._threads, self._tracer = model, threads, tracer or Tracer(None, "engine")
        self._min_step_s = min_step_s
        self._device = model.device
        self._traits = traits_of(model.config)
        self._max_rows, self._max_length = max_concurrent, max_length
        self._cache = RowCache(model.config.num_hidden_layers)
        self._waiting: list[tuple[int, int, _Job]] = []  # heap: priority, arrival
        self._arrivals = itertools.count()
        self._jobs: list[_Job] = []  # row i of the cache belongs to _jobs[i]
        self._lengths = np.zeros(_round_up(max_concurrent, ROW_BLOCK), np.int64)  # tokens already in the cache, by row
        self._last = np.zeros_like(self._lengths)  # the token to feed next, by row
        self._rows = Rows(len(self._lengths))
        self._fused = FusedDecoder(model, max_length) if FusedDecoder.supports(model) else None
        self._orders: deque[tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]] = deque()
        self._aborted: set[str] = set()
        self._wake = threading.Condition()
        self._closed = self._asleep = False
        self._failure: BaseException | None = None
        self.version = 0
        self._generated, self._busy_s = 0, 0.0
        self._parameters = dict(model.named_parameters())
        embedding: Any = model.get_input_embeddings()
        self._vocabulary = len(embedding.weight)
        self._receiver = self._make_receiver(adapters)
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    def _make_receiver(self, adapters: Adapters | None) -> WeightReceiver:
        """With adapters, only their factors arrive: keep a copy of the matrices that they are added to."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if adapters is None:
            return WeightReceiver(shapes)
        names = [f"{layer}.weight" for layer in adapters.layers]
        kept = {name: self._parameters[name].detach().to("cpu", copy=True) for name in names}
        return WeightReceiver(shapes, Base(adapters, kept, self._device, self._model.dtype))

    # ---- protocol -------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        loop = asyncio.get_running_loop()
        for request in requests:
            check(request, self._max_length, self._vocabulary)
        jobs = [_Job(r, tokens_of(r.content).tokens_T, loop.create_future(), loop, ticket) for r in requests]
        with self._wake:
            self._check_running()
            for job in jobs:
                heapq.heappush(self._waiting, (job.request.priority, next(self._arrivals), job))
            self._wake.notify()
        return list(await asyncio.gather(*(job.future for job in jobs)))

    async def abort(self, ticket: str) -> None:
        with self._wake:
            if any(job.ticket == ticket for job in (*self._in_line(), *self._jobs)):
                self._aborted.add(ticket)
                self._wake.notify()

    async def load_weights(self, version: int, weights: Weights, bucket: tuple[int, int] = (0, 1)) -> int:
        served: int = await self._order(lambda: self._load(version, weights, bucket))
        return served

    async def sleep(self, level: int) -> MemoryChange:
        """Gives back the KV cache; the weights of the embedded engine stay where they are."""
        found: MemoryChange = await self._order(self._sleep)
        return found

    async def wake(self, *tags: str) -> MemoryChange:
        """The cache grows again with the first request."""
        self._asleep = bool(tags) and "kv_cache" not in tags
        with self._wake:
            self._wake.notify()
        return MemoryChange(0.0, 0.0)

    async def _order(self, work: Callable[[], Any]) -> Any:
        """Have something done between two decoding steps."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        with self._wake:
            self._check_running()
            self._orders.append((work, done, loop))
            self._wake.notify()
        return await done

    async def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._jobs),
            waiting=len(self._waiting),
            busy_s=self._busy_s,
            generated_tokens=self._generated,
            running_tokens=sum(len(job.tokens) for job in list(self._jobs)),
        )

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout=10)

    def _check_running(self) -> None:
        if self._failure or self._closed:
            raise RuntimeError("the engine has stopped") from self._failure

    # ---- the decoding thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while True:
                    with self._wake:
                        while not (self._closed or self._orders or self._can_decode()):
                            self._wake.wait()
                    self._work()
        except BaseException as error:
            with self._wake:
                self._failure = error
                jobs, self._jobs, self._waiting = [*self._jobs, *self._in_line()], [], []
                orders, self._orders = self._orders, deque()
            for job in jobs:
                post(job.loop, fail, job.future, error)
            for _, done, loop in orders:
                post(loop, fail, done, error)

    def _work(self) -> None:
        """Orders first, then decode until nothing is left or the next order comes."""
        started = time.perf_counter()
        while self._orders:
            work, done, loop = self._orders.popleft()
            try:
                post(loop, finish, done, work())
            except Exception as error:
                post(loop, fail, done, error)
        if self._can_decode():
            with self._tracer.span("generate"):
                while self._can_decode() and not (self._closed or self._orders):
                    self._drop_aborted()
                    self._admit()
                    if self._jobs:
                        self._decode()
                    if self._min_step_s:  # a slower device, emulated
                        time.sleep(max(0.0, started + self._min_step_s - time.perf_counter()))
                    now = time.perf_counter()  # counted per step: stats are read while the engine is busy
                    self._busy_s, started = self._busy_s + now - started, now
        self._busy_s += time.perf_counter() - started
        self._tracer.flush()
        if self._closed:
            raise RuntimeError("the engine was closed")

    def _can_decode(self) -> bool:
        return bool(self._waiting or self._jobs) and not (self._receiver.incomplete or self._asleep)

    def _in_line(self) -> list[_Job]:
        return [job for _, _, job in self._waiting]

    def _sleep(self) -> MemoryChange:
        if self._jobs or self._waiting:
            raise RuntimeError(f"asked to sleep with {len(self._jobs) + len(self._waiting)} requests under way")
        started, freed = time.perf_counter(), self._cache.nbytes
        self._cache = RowCache(self._model.config.num_hidden_layers)
        self._asleep = True
        return MemoryChange(time.perf_counter() - started, freed / 2**30)

    def _load(self, version: int, weights: Weights, bucket: tuple[int, int]) -> int:
        with (
            self._receiver.receive(version, weights, bucket) as loads,
            self._tracer.span("load weights", bucket=bucket[0]),
        ):
            for tensors, _ in loads:
                for name, tensor in tensors.items():
                    self._parameters[name].copy_(tensor)
        if not self._receiver.incomplete:
            self.version = version
        return self.version

    def _drop_aborted(self) -> None:
        with self._wake:
            tickets, self._aborted = self._aborted, set()
            if not tickets:
                return
            gone = [job for job in self._in_line() if job.ticket in tickets]
            self._waiting = [entry for entry in self._waiting if entry[2].ticket not in tickets]
            heapq.heapify(self._waiting)
        for job in gone:
            post(job.loop, finish, job.future, job.completion("abort"))
        self._deliver([i for i, job in enumerate(self._jobs) if job.ticket in tickets], "abort")

    def _admit(self) -> None:
        """Move waiting requests into free rows; siblings with the same prompt share one prefill."""
        with self._wake:
            free = self._max_rows - len(self._jobs)
            new = [heapq.heappop(self._waiting)[2] for _ in range(min(free, len(self._waiting)))]
        if not new:
            return
        first = len(self._jobs)
        need = max(len(job.tokens_T) + job.request.params.max_tokens for job in new)
        rows = min(_round_up(first + len(new), 64), len(self._lengths))
        self._cache.reserve(rows, _round_up(need, KEY_BLOCK))
        prompts: dict[bytes, list[int]] = {}
        for i, job in enumerate(new, start=first):
            tokens_T = job.tokens_T
            self._lengths[i], self._last[i] = len(tokens_T) - 1, tokens_T[-1]
            self._rows.put(i, job.request)
            if len(tokens_T) > 1:
                prompts.setdefault(tokens_T[:-1].tobytes(), []).append(i)
        self._jobs.extend(new)
        if prompts:
            self._prefill(list(prompts.values()))

    def _prefill(self, groups: list[list[int]]) -> None:
        """Fill the cache for the prompts of these groups of rows, in slices of bounded size."""
        groups = sorted(groups, key=lambda rows: self._lengths[rows[0]])
        start = 0
        while start < len(groups):
            stop = start + 1
            while stop < len(groups) and (stop + 1 - start) * self._lengths[groups[stop][0]] <= 16384:
                stop += 1
            part, start = groups[start:stop], stop
            width = _round_up(int(max(self._lengths[rows[0]] for rows in part)), KEY_BLOCK)
            tokens = np.zeros((len(part), width), np.int64)
            for i, rows in enumerate(part):
                length = self._lengths[rows[0]]
                tokens[i, :length] = self._jobs[rows[0]].tokens_T[:-1]
            position = torch.arange(width, device=self._device)
            masks = self._traits.masks(position <= position[:, None], position[:, None], self._model.dtype)
            masks = {kind: mask.expand(len(part), 1, width, width) for kind, mask in masks.items()}
            cache = self._cache
            cache.begin_prefill(torch.tensor([rows[0] for rows in part], device=self._device), width)
            self._forward(torch.from_numpy(tokens), position[None].expand(len(part), -1), masks)
            for rows in part:
                if len(rows) > 1:
                    cache.copy_row(rows[0], rows[1:], int(self._lengths[rows[0]]))

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
        output = self._model(
            input_ids=tokens.to(self._device),
            position_ids=positions,
            attention_mask=as_argument(masks),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _decode(self) -> None:
        """One token for every active row; deliver and remove the rows that are done."""
        n = len(self._jobs)
        padded = _round_up(n, ROW_BLOCK)
        self._lengths[n:padded] = 0
        read_length = _round_up(int(self._lengths[:n].max()) + 1, KEY_BLOCK)
        positions_B = torch.from_numpy(self._lengths[:padded].copy()).to(self._device)
        tokens_B = torch.from_numpy(self._last[:padded].copy()).to(self._device)
        at_B111 = positions_B[:, None, None, None]
        seen = torch.arange(read_length, device=self._device) <= at_B111
        masks = self._traits.masks(seen, at_B111, self._model.dtype)
        self._cache.begin_step(positions_B, read_length)
        if self._fused is not None:
            logits = self._fused.step(tokens_B, positions_B, [masks[kind] for kind in self._traits.kinds], self._cache)
        else:
            logits = self._forward(tokens_B[:, None], positions_B[:, None], masks)
        tokens, logprobs, kept = sample(logits[:n], self._rows)
        self._lengths[:n] += 1
        self._last[:n] = tokens
        self._generated += n
        done: list[int] = []
        for i, (job, token, logprob) in enumerate(zip(self._jobs, tokens.tolist(), logprobs.tolist(), strict=True)):
            job.tokens.append(token)
            job.logprobs.append(logprob)
            job.versions.append(self.version)
            if i in kept:
                job.kept.append(kept[i])
            if token in job.request.params.stop_tokens or len(job.tokens) == job.request.params.max_tokens:
                done.append(i)
        self._deliver(done)

    def _deliver(self, done: list[int], why: Finish | None = None) -> None:
        finished: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Completion], Completion]]] = {}
        for i in reversed(done):
            job, last = self._jobs[i], len(self._jobs) - 1
            finish: Finish = why or ("stop" if job.tokens[-1] in job.request.params.stop_tokens else "length")
            finished.setdefault(job.loop, []).append((job.future, job.completion(finish)))
            if i != last:
                self._cache.copy_row(last, [i], int(self._lengths[last]))
                self._jobs[i], self._lengths[i], self._last[i] = self._jobs[last], self._lengths[last], self._last[last]
                self._rows.move(last, i)
            self._jobs.pop()
        for loop, answers in finished.items():
            post(loop, finish_all, answers)
