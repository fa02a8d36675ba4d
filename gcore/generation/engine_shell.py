"""The shell of engines that decode step by step in this process: embedded and vLLM.

    requests ──> JobQueue ──admit──> DecodeBackend ──step: one token per job──> completions
                    commands, between two steps: abort, load weights, sleep, wake

The shell owns the thread, the queue, the commands, the sleep state and the clean-up after a failure. A backend owns
the model and the batch. Weights change only between two steps, so every token has exactly one version.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from gcore.generation.jobs import Job, JobQueue, engine_failed, post, scored, stats_of
from gcore.generation.sleep import SleepState
from gcore.observe.trace import Tracer
from gcore.protocols import EngineStats, MemoryChange, Weights
from gcore.types import Completion, Finish, Floats, Request
from gcore.weights.receiver import WeightReceiver

T = TypeVar("T")
Ended = tuple[Job, Finish | Exception]


class Step(NamedTuple):
    """Result of one decoding step. The tokens themselves are appended to the jobs."""

    num_tokens: int
    ended: Sequence[Ended]  # no longer in the batch


class DecodeBackend(Protocol):
    """A model and its batch. All methods except `check` run in the engine's thread."""

    compute_lock: AbstractContextManager[Any]  # held while computing; engines that share process state share it

    @property
    def jobs(self) -> Collection[Job]:
        """The batch. Empty after `close`."""

    def open(self) -> tuple[WeightReceiver, SleepState]: ...

    def check(self, request: Request) -> None:
        """Raises UserError for a request that cannot be served."""

    def room(self, waiting: int) -> int:
        """How many of `waiting` jobs to admit before the next step."""

    def admit(self, jobs: Sequence[Job]) -> Sequence[Ended]:
        """Add them to the batch. Returns those that the library refuses."""

    def step(self) -> Step:
        """One token per job of the batch, or several. If steps are computed ahead, returns the oldest in flight."""

    def score(self, requests: Sequence[Request]) -> list[Floats]:
        """The logprobs of the steps that the requests have, for requests with max_tokens=0 that `check` accepts."""

    def flush_steps(self) -> Iterable[Step]:
        """The steps in flight (computed ahead). No new step starts until all of them have been returned."""

    def remove(self, jobs: Collection[Job]) -> None:
        """Remove them from the batch."""

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write some of the weights. No step is in flight."""

    def finish_load(self) -> Collection[Job]:
        """All weights of an update are written: drop what older weights computed. Returns the jobs that were removed
        from the batch because they must start again."""

    def free(self, level: int) -> float:
        """Sleep. Returns the GiB that were freed."""

    def allocate(self, tags: Sequence[str]) -> float:
        """Wake. Returns the GiB that were allocated."""

    def close(self) -> None:
        """Called once, also after a failed `open`."""


class SteppedEngine:
    """Implements protocols.Engine with a backend. `min_step_s` emulates a slower device. `make_job`: the kind of jobs
    that the backend knows."""

    def __init__(
        self,
        backend: DecodeBackend,
        tracer: Tracer | None = None,
        min_step_s: float = 0.0,
        make_job: type[Job] = Job,
    ) -> None:
        self.backend, self._tracer, self._min_step_s = backend, tracer or Tracer(None, "engine"), min_step_s
        self.version = 0
        self._queue, self._admitting = JobQueue(make_job), list[Job]()
        self._commands: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._to_score: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._changed = threading.Condition()  # guards the queue, the commands and the two states below
        self._failure: BaseException | None = None
        self._closed = False
        self._generated, self._busy_s = 0, 0.0
        self._receiver: WeightReceiver
        self._memory: SleepState
        opened = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="engine", daemon=True)
        self._thread.start()
        opened.wait()
        if self._failure is not None:
            raise self._failure

    # ---- protocol -------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        for request in requests:
            self.backend.check(request)
        if requests and all(request.params.max_tokens == 0 for request in requests):
            return await self._score(requests)
        with self._changed:
            self._check_running()
            jobs = self._queue.add(requests, ticket)
            self._changed.notify()
        return list(await asyncio.gather(*(job.future for job in jobs)))

    async def _score(self, requests: Sequence[Request]) -> list[Completion]:
        """Logprobs of given steps. The requests of all callers that wait for the same moment are computed together."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Completion]] = [loop.create_future() for _ in requests]
        with self._changed:
            self._to_score += zip(requests, futures, strict=True)
        await self._between_steps(self._score_waiting)
        return list(await asyncio.gather(*futures))

    async def abort(self, ticket: str) -> None:
        if not (self._failure or self._closed):  # else nothing is in progress
            await self._between_steps(lambda: self._abort(ticket))

    async def load_weights(self, version: int, weights: Weights, bucket: tuple[int, int] = (0, 1)) -> int:
        """A bucket that does not fit raises: repeat it, or start again with bucket 0."""
        return await self._between_steps(lambda: self._load(version, weights, bucket))

    async def sleep(self, level: int) -> MemoryChange:
        """If the backend cannot sleep, no memory is freed and nothing is lost."""
        return await self._between_steps(lambda: self._sleep(level))

    async def wake(self, *tags: str) -> MemoryChange:
        return await self._between_steps(lambda: self._wake(tags))

    async def reset(self) -> None:
        await self._between_steps(self._reset)

    async def stats(self) -> EngineStats:
        return stats_of(self.backend.jobs, self._queue, self._busy_s, self._generated)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=30)

    async def _between_steps(self, command: Callable[[], T]) -> T:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._check_running()
            self._commands.append((command, done))
            self._changed.notify()
        return await done

    def _check_running(self) -> None:
        if self._failure or self._closed:
            raise RuntimeError("the engine has stopped") from self._failure

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def _run(self, opened: threading.Event) -> None:
        try:
            with self.backend.compute_lock:
                self._receiver, self._memory = self.backend.open()
            opened.set()
            while True:
                with self._changed:
                    while not (self._closed or self._commands or self._can_step()):
                        self._changed.wait()
                if self._closed:
                    raise RuntimeError("the engine was closed")
                self._run_commands()
                self._decode()
                self._tracer.flush()
        except BaseException as error:
            with self._changed:
                self._failure = error
                pending = [job.future for job in (*self.backend.jobs, *self._admitting, *self._queue.clear())]
                pending += [done for _, done in self._commands]
                self._commands.clear()
            post((future, engine_failed(error)) for future in pending)
            try:
                with self.backend.compute_lock:
                    self.backend.close()
            finally:
                opened.set()

    def _can_step(self) -> bool:
        return bool(self.backend.jobs or self._queue) and self._memory.awake and not self._receiver.incomplete

    def _run_commands(self) -> None:
        while self._commands:
            command, done = self._commands.popleft()
            try:
                with self.backend.compute_lock:
                    post([(done, command())])
            except Exception as error:
                post([(done, error)])

    def _decode(self) -> None:
        """Step until there is nothing to decode or a command arrives."""
        if not self._can_step():
            return
        with self._tracer.span("generate"):
            while self._can_step() and not (self._closed or self._commands):
                started = time.perf_counter()
                self._admit()
                if self.backend.jobs:
                    with self.backend.compute_lock:
                        step = self.backend.step()
                    self._record(step)
                if self._min_step_s:
                    time.sleep(max(0.0, started + self._min_step_s - time.perf_counter()))
                self._busy_s += time.perf_counter() - started  # per step: stats are read while the engine is busy

    def _admit(self) -> None:
        with self._changed:
            self._admitting = [self._queue.pop() for _ in range(self.backend.room(len(self._queue)))]
        for job in self._admitting:
            job.stamp(self.version)
        if self._admitting:
            self._deliver(self.backend.admit(self._admitting))
            self._admitting = []

    def _record(self, step: Step) -> None:
        self._generated += step.num_tokens
        self._deliver(step.ended)

    def _deliver(self, ended: Iterable[Ended]) -> None:
        post((job.future, end if isinstance(end, Exception) else job.completion(end)) for job, end in ended)

    def _flush_steps(self) -> None:
        for step in self.backend.flush_steps():
            self._record(step)

    # ---- commands -------------------------------------------------------------------------------------------------

    def _score_waiting(self) -> None:
        with self._changed:
            waiting, self._to_score = self._to_score, []
        if not waiting:  # the command of another caller computed them
            return
        started = time.perf_counter()
        try:
            with self._tracer.span("score", requests=len(waiting)):
                found = self.backend.score([request for request, _ in waiting])
        except Exception as error:  # for every caller: the commands of the others find nothing to compute
            post((future, error) for _, future in waiting)
            return
        self._busy_s += time.perf_counter() - started
        post((future, scored(logprobs_S, self.version)) for (_, future), logprobs_S in zip(waiting, found, strict=True))

    def _abort(self, ticket: str) -> None:
        with self._changed:
            waiting = self._queue.remove(ticket)
        running = [job for job in self.backend.jobs if job.ticket == ticket]
        self.backend.remove(running)
        self._deliver((job, "abort") for job in (*running, *waiting))

    def _reset(self) -> None:
        with self._changed:
            waiting = self._queue.clear()
        running = list(self.backend.jobs)
        self.backend.remove(running)
        self._deliver((job, "abort") for job in (*running, *waiting))
        self._wake(())
        if self._receiver.forget_update():
            self._memory.lose_weights()

    def _load(self, version: int, weights: Weights, bucket: tuple[int, int]) -> int:
        self._memory.check_load(version)
        with (
            self._receiver.receive(version, weights, bucket) as loads,
            self._tracer.span("load weights", bucket=bucket[0]),
        ):
            self._flush_steps()
            for tensors, _ in loads:
                self.backend.load(tensors)
        if not self._receiver.incomplete:
            self.version = version
            self._memory.loaded()
            restarted = self.backend.finish_load()
            with self._changed:
                for job in restarted:
                    self._queue.push(job)
            for job in self.backend.jobs:
                job.stamp(version)
        return self.version

    def _sleep(self, level: int) -> MemoryChange:
        in_progress = len(self.backend.jobs) + len(self._queue)
        if not self._memory.may_sleep(level, in_progress, self._receiver.incomplete):
            return MemoryChange(0.0, 0.0)
        started = time.perf_counter()
        with self._tracer.span("sleep", level=level):
            self._flush_steps()
            gigabytes = self.backend.free(level)
        self._memory.sleep(level)
        return MemoryChange(time.perf_counter() - started, gigabytes)

    def _wake(self, tags: Sequence[str]) -> MemoryChange:
        due, started = self._memory.due(tags), time.perf_counter()
        with self._tracer.span("wake", tags=due):
            gigabytes = self.backend.allocate(due) if due else 0.0
        self._memory.wake(due)
        return MemoryChange(time.perf_counter() - started, gigabytes)
