"""vLLM as an engine: its core in this process, stepped by a thread of ours.

    requests ──> inbox ──admit──> vLLM's core ──step: a token a request──> completions
                   orders, between two steps: weights, sleep, wake, abort

The core lives in this process, so that new weights are handed to its model directly. Its answers are read where they
leave the scheduler: no text, no objects per token.

Traps that this file knows of (more in vllm_core.py):
- On CUDA a batch is computed ahead. It lands before weights change or memory goes, so every token has its true stamp.
- Cached prefixes belong to the weights that computed them: each load has a salt of its own, and requests that have no
  token yet start over.
- Forward passes use state of the process: engines that share one take turns.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

from gcore.content.tokens import Tokens, tokens_of
from gcore.generation.common import GIB, MEMORY, check, free_gpu
from gcore.generation.futures import fail, finish, finish_all, post
from gcore.generation.noise import noise_key
from gcore.generation.vllm_core import (
    VllmOptions,
    is_cpu,
    keep_logprobs_untruncated,
    load_in_place,
    open_core,
    reload_packed,
    shut_core,
    with_images,
)
from gcore.observe.trace import Tracer
from gcore.protocols import EngineStats, MemoryChange, Weights
from gcore.types import Completion, Finish, Request, UserError
from gcore.weights.receiver import WeightReceiver, base_of, shapes_of

ENDINGS: dict[str, Finish] = {"stop": "stop", "length": "length"}
GATHER_STEPS, GATHER_SHARE = 16, 1 / 8  # places that become free are kept for so long, or until they are so many
_ONE_AT_A_TIME = threading.RLock()


@dataclass(slots=True)
class _Job:
    request: Request
    future: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop
    ticket: str
    arrival: int
    name: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __lt__(self, other: _Job) -> bool:
        """Lower priority goes first; of equals, the earlier arrival."""
        return (self.request.priority, self.arrival) < (other.request.priority, other.arrival)

    def completion(self, finish: Finish) -> Completion:
        steps = np.array(self.logprobs, np.float32), np.array(self.versions, np.int32)
        return Completion(Tokens.steps(np.array(self.tokens, np.int32)), *steps, finish)


class VllmEngine:
    """Implements protocols.Engine."""

    def __init__(self, folder: Path, options: VllmOptions, tracer: Tracer | None = None) -> None:
        self._folder, self._options, self._tracer = folder, options, tracer or Tracer(None, "engine")
        self._inbox: list[_Job] = []  # a heap
        self._arrivals = itertools.count()
        self._jobs: dict[str, _Job] = {}  # those that the core has, by the name it knows them by
        self._orders: deque[tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]] = deque()
        self._wake = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False
        self._count, self._generated, self._busy_s = 0, 0, 0.0
        self._gathering = 0  # steps since the last admission
        self.version, self._loads = 0, 0
        self._receiver: WeightReceiver
        self._asleep: set[str] = set()
        self._hollow = False  # woken from a sleep that dropped the weights: they must come before anything is decoded
        self._core: Any = None
        opened = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="vllm-engine", daemon=True)
        self._thread.start()
        opened.wait()
        if self._failure is not None:
            raise self._failure

    # ---- protocol -------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        loop = asyncio.get_running_loop()
        for request in requests:
            check(request, self._options.max_length, self._vocabulary, self._sees)
            if (request.params.top_k or request.params.top_p < 1) and not self._can_truncate:
                raise UserError(
                    "this version of vLLM has a sampler that gives no logprobs of the untruncated policy; "
                    "set generation.top_p to 1 and generation.top_k to 0"
                )
        jobs = [_Job(request, loop.create_future(), loop, ticket, next(self._arrivals)) for request in requests]
        with self._wake:
            self._check_running()
            for job in jobs:
                heappush(self._inbox, job)
            self._wake.notify()
        return list(await asyncio.gather(*(job.future for job in jobs)))

    async def abort(self, ticket: str) -> None:
        if not (self._failure or self._closed):  # else there is nothing to abort
            await self._order(lambda: self._abort(ticket))

    async def load_weights(self, version: int, weights: Weights, bucket: tuple[int, int] = (0, 1)) -> int:
        """Bucket (i, n) of the weights, in order; after the last one `version` is served. Nothing is decoded from the
        first bucket to the last. A bucket that does not fit is refused: repeat it, or start again with bucket 0."""
        return int(await self._order(lambda: self._load(version, weights, bucket)))

    async def sleep(self, level: int) -> MemoryChange:
        """Give memory back: level 1 keeps the weights in host memory; 2 drops them, and requests wait for new ones.
        Refused while requests are under way; those that come later wait. On CPU, or without options.sleep, no memory
        is given back and nothing is lost."""
        found: MemoryChange = await self._order(lambda: self._sleep(level))
        return found

    async def wake(self, *tags: str) -> MemoryChange:
        """Take memory again, all of it or what `tags` name: "weights", "kv_cache"."""
        found: MemoryChange = await self._order(lambda: self._wake_up(tags))
        return found

    async def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._jobs),
            waiting=len(self._inbox),
            busy_s=self._busy_s,
            generated_tokens=self._generated,
            running_tokens=sum(len(job.tokens) for job in list(self._jobs.values())),
        )

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout=30)

    async def _order(self, work: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        with self._wake:
            self._check_running()
            self._orders.append((work, done, loop))
            self._wake.notify()
        return await done

    def _check_running(self) -> None:
        if self._failure or self._closed:
            raise RuntimeError("the engine has stopped") from self._failure

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def _run(self, opened: threading.Event) -> None:
        try:
            with _ONE_AT_A_TIME:
                self._core = open_core(self._folder, self._options)
                self._can_truncate = all(self._core.collective_rpc(keep_logprobs_untruncated))
                self._vocabulary = self._core.model_config.get_vocab_size()
                self._sees = bool(getattr(self._core.model_config, "is_multimodal_model", False))
                self._frees = self._options.sleep and not is_cpu()
                self._receiver = self._make_receiver()
            opened.set()
            while True:
                with self._wake:
                    while not (self._closed or self._orders or self._can_step()):
                        self._wake.wait()
                if self._closed:
                    raise RuntimeError("the engine was closed")
                self._work()
        except BaseException as error:
            with self._wake:
                self._failure = error
                jobs, orders = [*self._jobs.values(), *self._inbox], list(self._orders)
                self._jobs, self._inbox, self._orders = {}, [], deque()
            for job in jobs:
                post(job.loop, fail, job.future, error)
            for _, done, loop in orders:
                post(loop, fail, done, error)
            try:
                self._shut()  # a call of its own: the failure remembers what this one names
            finally:
                opened.set()

    def _make_receiver(self) -> WeightReceiver:
        config, whole = self._core.model_config, is_cpu()  # packing wants all weights
        shapes, device = shapes_of(self._folder, config.hf_text_config), "cpu" if whole else "cuda"
        return WeightReceiver(
            shapes, base_of(self._folder, shapes, self._options.adapters, device, config.dtype, whole), whole
        )

    def _shut(self) -> None:
        with _ONE_AT_A_TIME:
            core, self._core = self._core, None
            if core is not None:
                shut_core(core)

    def _can_step(self) -> bool:
        return bool(self._jobs or self._inbox) and not (self._receiver.incomplete or self._asleep or self._hollow)

    def _work(self) -> None:
        """Orders first, then decode until nothing is left or the next order comes."""
        while self._orders:
            work, done, loop = self._orders.popleft()
            try:
                with _ONE_AT_A_TIME:
                    post(loop, finish, done, work())
            except Exception as error:
                post(loop, fail, done, error)
        if self._can_step():
            with self._tracer.span("generate"):
                while self._can_step() and not (self._closed or self._orders):
                    started = time.perf_counter()
                    self._admit()
                    self._step()
                    self._busy_s += time.perf_counter() - started
        self._tracer.flush()

    def _admit(self) -> None:
        """Hand the core as many as it can run. The others wait here, where new weights and aborts find them.

        When all places are taken, those that become free are given away several at a time: a step that also reads
        prompts takes as long as three that do not."""
        most = self._options.max_concurrent
        with self._wake:
            free = most - len(self._jobs)
            self._gathering += 1
            if len(self._inbox) > free and free < GATHER_SHARE * most and self._jobs and self._gathering < GATHER_STEPS:
                return
            new = [heappop(self._inbox) for _ in range(min(free, len(self._inbox)))]
            self._gathering = 0 if new else self._gathering
        for job in new:
            try:
                self._add(job)
            except ValueError as error:  # sampling parameters or images that vLLM does not take
                post(job.loop, fail, job.future, UserError(f"vLLM refuses an engine request: {error}"))
                if tokens_of(job.request.content).images:  # vLLM believes that its core has them
                    self._core.reset_mm_cache()

    def _add(self, job: _Job) -> None:
        from vllm import SamplingParams

        request, params, content = job.request, job.request.params, tokens_of(job.request.content)
        seed = noise_key(request.noise_key, request.position) >> 1 if self._options.seeds else None
        sampling = SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            seed=seed if params.temperature else None,
            stop_token_ids=list(params.stop_tokens),
            ignore_eos=True,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )
        self._count += 1
        job.name = f"{self._count}"
        prompt = {"prompt_token_ids": content.tokens_T.tolist(), "cache_salt": f"{self._loads}"}
        rest = {"supported_tasks": self._core.get_supported_tasks(), "priority": request.priority}
        process = self._core.input_processor.process_inputs
        if content.images:
            process = partial(with_images, process, request, self._options.max_length)
        self._core.engine_core.add_request(process(job.name, prompt, sampling, **rest))
        self._jobs[job.name] = job

    def _step(self) -> None:
        """One step of the core; deliver those that are done."""
        with _ONE_AT_A_TIME:
            outputs = self._core.engine_core.get_output().outputs
        answers: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Completion], Completion]]] = {}
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is None:  # aborted while this step was computed
                continue
            tokens = output.new_token_ids
            if tokens:
                job.tokens += tokens
                job.logprobs += output.new_logprobs.logprobs[: len(tokens), 0].tolist()
                job.versions += [self.version] * len(tokens)
                self._generated += len(tokens)
            if output.finish_reason is not None:
                del self._jobs[job.name]
                ending = ENDINGS.get(str(output.finish_reason))
                if ending:
                    answers.setdefault(job.loop, []).append((job.future, job.completion(ending)))
                else:
                    said = f"vLLM ended a request: {output.finish_reason}"
                    post(job.loop, fail, job.future, RuntimeError(said))
        for loop, done in answers.items():
            post(loop, finish_all, done)

    def _land(self) -> None:
        """Let the batches that are computed ahead arrive, and schedule no new ones until then."""
        from vllm.v1.core.sched.interface import PauseState

        core = self._core.engine_core.engine_core
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                self._step()
        finally:
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    # ---- orders ---------------------------------------------------------------------------------------------------

    def _abort(self, ticket: str) -> None:
        with self._wake:
            gone = [job for job in self._inbox if job.ticket == ticket]
            self._inbox = [job for job in self._inbox if job.ticket != ticket]
            heapify(self._inbox)
        running = [job for job in self._jobs.values() if job.ticket == ticket]
        self._core.engine_core.abort_requests([job.name for job in running])
        for job in running:
            del self._jobs[job.name]
        for job in (*running, *gone):
            post(job.loop, finish, job.future, job.completion("abort"))

    def _load(self, version: int, weights: Weights, bucket: tuple[int, int]) -> int:
        if "weights" in self._asleep:
            raise RuntimeError(f"weights of version {version} for an engine that sleeps; wake 'weights' first")
        load = reload_packed if is_cpu() else load_in_place
        with (
            self._receiver.receive(version, weights, bucket) as loads,
            self._tracer.span("load weights", bucket=bucket[0]),
        ):
            self._land()
            for tensors, _ in loads:
                self._core.collective_rpc(load, args=(list(tensors.items()),))
        if not self._receiver.incomplete:
            self._hollow, self.version, self._loads = False, version, self._loads + 1
            if self._sees:  # what was made of images is of the weights before
                self._core.engine_core.reset_encoder_cache()
            self._start_over()
        return self.version

    def _start_over(self) -> None:
        """What the core has of requests without a token was computed by the weights before."""
        back = [job for job in self._jobs.values() if not job.tokens]
        self._core.engine_core.abort_requests([job.name for job in back])
        with self._wake:
            for job in back:
                del self._jobs[job.name]
                heappush(self._inbox, job)

    def _sleep(self, level: int) -> MemoryChange:
        if self._asleep == set(MEMORY):
            return MemoryChange(0.0, 0.0)
        if busy := len(self._jobs) + len(self._inbox):
            raise RuntimeError(f"asked to sleep with {busy} requests under way")
        if self._receiver.incomplete or self._asleep:
            raise RuntimeError(
                "asked to sleep " + ("while weights arrive" if self._receiver.incomplete else "when half awake")
            )
        if level == 2 and self._frees and self._options.adapters is not None:
            raise UserError(
                "generation.sleep=2 drops the weights, of which adapters (model.lora) bring a part alone; use 1"
            )
        before, started = free_gpu(), time.perf_counter()
        with self._tracer.span("sleep", level=level):
            self._land()
            if self._frees:
                self._core.sleep(level)  # forgets the cached prefixes too
        self._asleep, self._hollow = set(MEMORY), level == 2 and self._frees
        return MemoryChange(time.perf_counter() - started, (free_gpu() - before) / GIB)

    def _wake_up(self, tags: Sequence[str]) -> MemoryChange:
        if unknown := set(tags) - set(MEMORY):
            raise ValueError(f"asked to wake {sorted(unknown)}, expected some of {list(MEMORY)}")
        due = [tag for tag in MEMORY if tag in self._asleep and tag in (tags or MEMORY)]
        before, started = free_gpu(), time.perf_counter()
        with self._tracer.span("wake", tags=due):
            if due and self._frees:
                self._core.wake_up(due)
        self._asleep -= set(due)
        return MemoryChange(time.perf_counter() - started, (before - free_gpu()) / GIB)
