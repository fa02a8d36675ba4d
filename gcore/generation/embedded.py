"""The embedded engine: continuous batching over any transformers decoder, on CPU or GPU.

    requests ──> waiting ──admit (prefill, shared by siblings)──> rows ──decode, a token a row a step──> completions

What it owns: the rows of the KV cache, admission, and sampling. The network itself is the library's.

The active rows always stand at the front of the cache, so a decoding step runs on a plain slice. A finished row is
replaced by the last one. Every prompt is prefilled up to its last token but one; the last token is the row's first
decoding step, so all logits come from one place.

On CPU a row's result is bitwise the same whoever shares the batch: matrix products treat rows alike from 8 rows on,
masked attention does from block to block of keys, and element-wise functions do when no remainder of a tensor falls
out of the vector loop. Rows and keys are rounded up for that, and a replica keeps to one thread.
`tests/contract/test_engine.py` holds it to that. On GPUs kernels differ in the last bits by batch size.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from gcore.generation.cache import RowCache
from gcore.generation.decoder import FusedDecoder
from gcore.generation.sampling import Rows, sample
from gcore.models import from_wire
from gcore.observe.trace import Tracer
from gcore.types import Completion, Finish, Request, UserError

ROW_BLOCK = 8
KEY_BLOCK = 32


def _round_up(value: int, block: int) -> int:
    return -(-value // block) * block


@dataclass(slots=True)
class _Job:
    request: Request
    future: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop
    tokens: list[int]
    logprobs: list[float]
    version: int = -1


class EmbeddedEngine:
    """Implements protocols.Engine. Decoding runs in a thread of its own; the event loop stays free."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_concurrent: int,
        max_length: int,
        threads: int = 1,
        tracer: Tracer | None = None,
    ) -> None:
        self._model, self._threads, self._tracer = model, threads, tracer or Tracer(None, "engine")
        self._device = model.device
        self._max_rows, self._max_length = max_concurrent, max_length
        self._cache = RowCache(model.config.num_hidden_layers)
        self._waiting: deque[_Job] = deque()
        self._jobs: list[_Job] = []  # row i of the cache belongs to _jobs[i]
        self._lengths = np.zeros(_round_up(max_concurrent, ROW_BLOCK), np.int64)  # tokens already in the cache, by row
        self._last = np.zeros_like(self._lengths)  # the token to feed next, by row
        self._rows = Rows(len(self._lengths))
        self._fused = FusedDecoder(model, max_length) if FusedDecoder.supports(model) else None
        self._orders: deque[tuple[int, Mapping[str, Any], asyncio.Future[None], asyncio.AbstractEventLoop]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        self.version = 0
        self._generated, self._busy_s = 0, 0.0
        self._parameters = dict(model.named_parameters())
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    # ---- protocol -------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        loop = asyncio.get_running_loop()
        for request in requests:
            self._check(request)
        jobs = [_Job(request, loop.create_future(), loop, [], []) for request in requests]
        with self._wake:
            self._check_running()
            self._waiting.extend(jobs)
            self._wake.notify()
        return list(await asyncio.gather(*(job.future for job in jobs)))

    async def load_weights(self, version: int, weights: Mapping[str, Any]) -> int:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        with self._wake:
            self._check_running()
            self._orders.append((version, weights, done, loop))
            self._wake.notify()
        await done
        return version

    async def stats(self) -> dict[str, float]:
        return {
            "generated_tokens": float(self._generated),
            "busy_s": self._busy_s,
            "running": float(len(self._jobs)),
            "waiting": float(len(self._waiting)),
        }

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout=10)

    def _check_running(self) -> None:
        if self._failure or self._closed:
            raise RuntimeError("the engine has stopped") from self._failure

    def _check(self, request: Request) -> None:
        total = len(request.tokens_P) + request.params.max_tokens
        if len(request.tokens_P) == 0:
            raise UserError(
                "an engine request has an empty prompt; expected at least one token (chat templates add some)"
            )
        if request.params.max_tokens < 1:
            raise UserError(f"an engine request asks for {request.params.max_tokens} tokens; expected at least 1")
        if total > self._max_length:
            raise UserError(
                f"prompt of {len(request.tokens_P)} tokens + max_tokens {request.params.max_tokens} = {total} exceeds "
                f"the engine's {self._max_length} (keys: data.max_prompt_length, generation.max_response_length)"
            )

    # ---- the decoding thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while True:
                    with self._wake:
                        while not (self._closed or self._waiting or self._jobs or self._orders):
                            self._wake.wait()
                    self._work()
        except BaseException as error:
            with self._wake:
                self._failure = error
                jobs, self._jobs, self._waiting = [*self._jobs, *self._waiting], [], deque()
                orders, self._orders = self._orders, deque()
            for job in jobs:
                job.loop.call_soon_threadsafe(_fail, job.future, error)
            for _, _, done, loop in orders:
                loop.call_soon_threadsafe(_fail, done, error)

    def _work(self) -> None:
        """Orders first, then decode until nothing is left or the next order comes."""
        started = time.perf_counter()
        while self._orders:
            with self._tracer.span("load weights"):
                self._load(*self._orders.popleft())
        if self._waiting or self._jobs:
            with self._tracer.span("generate"):
                while (self._waiting or self._jobs) and not (self._closed or self._orders):
                    self._admit()
                    self._decode()
                    now = time.perf_counter()  # counted step by step: who asks for stats asks while it is busy
                    self._busy_s, started = self._busy_s + now - started, now
        self._busy_s += time.perf_counter() - started
        self._tracer.flush()
        if self._closed:
            raise RuntimeError("the engine was closed")

    def _load(
        self, version: int, weights: Mapping[str, Any], done: asyncio.Future[None], loop: asyncio.AbstractEventLoop
    ) -> None:
        try:
            missing = self._parameters.keys() - weights.keys()
            if missing:
                raise ValueError(f"weights of version {version} lack {sorted(missing)[:3]} ({len(missing)} names)")
            for name, parameter in self._parameters.items():  # all or none: look first, then copy
                if tuple(weights[name].shape) != tuple(parameter.shape):
                    raise ValueError(
                        f"weights of version {version}: {name} has shape {tuple(weights[name].shape)}, "
                        f"expected {tuple(parameter.shape)}"
                    )
            for name, parameter in self._parameters.items():
                value = weights[name]
                parameter.copy_(from_wire(value))
            self.version = version
            loop.call_soon_threadsafe(_finish, done, None)
        except Exception as error:
            loop.call_soon_threadsafe(_fail, done, error)

    def _admit(self) -> None:
        """Move waiting requests into free rows; siblings with the same prompt share one prefill."""
        with self._wake:
            free = self._max_rows - len(self._jobs)
            new = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        if not new:
            return
        first = len(self._jobs)
        need = max(len(job.request.tokens_P) + job.request.params.max_tokens for job in new)
        rows = min(_round_up(first + len(new), 64), len(self._lengths))
        self._cache.reserve(rows, _round_up(need, KEY_BLOCK))
        prompts: dict[bytes, list[int]] = {}
        for i, job in enumerate(new, start=first):
            tokens_P = job.request.tokens_P
            job.version = self.version
            self._lengths[i], self._last[i] = len(tokens_P) - 1, tokens_P[-1]
            self._rows.put(i, job.request)
            if len(tokens_P) > 1:
                prompts.setdefault(tokens_P[:-1].tobytes(), []).append(i)
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
                tokens[i, :length] = self._jobs[rows[0]].request.tokens_P[:-1]
            position = torch.arange(width, device=self._device)
            mask = (position[None, :] <= position[:, None])[None, None].expand(len(part), 1, width, width)
            cache = self._cache
            cache.begin_prefill(torch.tensor([rows[0] for rows in part], device=self._device), width)
            self._forward(torch.from_numpy(tokens), position[None].expand(len(part), -1), mask)
            for rows in part:
                if len(rows) > 1:
                    cache.copy_row(rows[0], rows[1:], int(self._lengths[rows[0]]))

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        output = self._model(
            input_ids=tokens.to(self._device),
            position_ids=positions,
            attention_mask=mask,
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
        mask = (torch.arange(read_length, device=self._device)[None] <= positions_B[:, None])[:, None, None]
        self._cache.begin_step(positions_B, read_length)
        if self._fused is not None:
            logits = self._fused.step(tokens_B, positions_B, mask, self._cache)
        else:
            logits = self._forward(tokens_B[:, None], positions_B[:, None], mask)
        tokens, logprobs = sample(logits[:n], self._rows)
        self._lengths[:n] += 1
        self._last[:n] = tokens
        self._generated += n
        done: list[int] = []
        for i, (job, token, logprob) in enumerate(zip(self._jobs, tokens.tolist(), logprobs.tolist(), strict=True)):
            job.tokens.append(token)
            job.logprobs.append(logprob)
            if token in job.request.params.stop_tokens or len(job.tokens) == job.request.params.max_tokens:
                done.append(i)
        self._deliver(done)

    def _deliver(self, done: list[int]) -> None:
        finished: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Completion], Completion]]] = {}
        for i in reversed(done):
            job, last = self._jobs[i], len(self._jobs) - 1
            finish: Finish = "stop" if job.tokens[-1] in job.request.params.stop_tokens else "length"
            answer = Completion(np.array(job.tokens, np.int32), np.array(job.logprobs, np.float32), job.version, finish)
            finished.setdefault(job.loop, []).append((job.future, answer))
            if i != last:
                self._cache.copy_row(last, [i], int(self._lengths[last]))
                self._jobs[i], self._lengths[i], self._last[i] = self._jobs[last], self._lengths[last], self._last[last]
                self._rows.move(last, i)
            self._jobs.pop()
        for loop, answers in finished.items():
            loop.call_soon_threadsafe(_finish_all, answers)


def _finish(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _finish_all(answers: list[tuple[asyncio.Future[Completion], Completion]]) -> None:
    for future, answer in answers:
        _finish(future, answer)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(RuntimeError(f"the engine failed: {type(error).__name__}: {error}"))
