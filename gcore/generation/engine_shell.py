"""The shell of engines: what all of them do in the same way, and the engines that decode step by step in this process.

    requests ──> JobQueue ──admit──> DecodeBackend ──step: one token per job──> completions
                    commands, between two steps: abort, load weights, sleep, wake

`EngineShell` has the calls of an engine, its queue, its sleep state and the order of its commands. `SteppedEngine` adds
the thread that decodes, for the embedded engine, vLLM and diffusion; a backend owns the model and the batch. Weights
change only between two steps, so every token has exactly one version. SGLang (sglang.py) has a loop of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from gcore.generation.jobs import Job, JobQueue, engine_failed, post, scored
from gcore.generation.sleep import SleepState
from gcore.observe.trace import Tracer
from gcore.protocols import EngineStats, MemoryChange, Weights
from gcore.types import Completion, Finish, Floats, Request
from gcore.weights.receiver import Loads, WeightReceiver

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


class EngineShell(ABC):
    """The calls of protocols.Engine. A command is a coroutine that runs in the engine's thread, one at a time."""

    def __init__(self, tracer: Tracer | None, make_job: type[Job] = Job) -> None:
        self._tracer = tracer or Tracer(None, "engine")
        self.version = 0
        self._queue = JobQueue(make_job)
        self._changed = threading.Condition()  # guards the queue, the commands and the two states below
        self._failure: BaseException | None = None
        self._closed = False
        self._generated, self._busy_s = 0, 0.0
        self._receiver: WeightReceiver  # set by `_run` when the engine is open, like the next one
        self._memory: SleepState

    def _start(self) -> None:
        """Start the engine's thread. Returns when the engine is open; raises what prevented it."""
        opened = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="engine", daemon=True)
        self._thread.start()
        opened.wait()
        if self._failure is not None:
            raise self._failure

    async def abort(self, ticket: str) -> None:
        if not (self._failure or self._closed):  # else nothing is in progress
            await self._command(lambda: self._abort(ticket))

    async def load_weights(self, version: int, weights: Weights, bucket: tuple[int, int] = (0, 1)) -> int:
        """A bucket that does not fit raises: repeat it, or start again with bucket 0."""
        return await self._command(lambda: self._load(version, weights, bucket))

    async def sleep(self, level: int) -> MemoryChange:
        """If the engine cannot sleep, no memory is freed and nothing is lost."""
        return await self._command(lambda: self._sleep(level))

    async def wake(self, *tags: str) -> MemoryChange:
        return await self._command(lambda: self._wake(tags))

    async def reset(self) -> None:
        await self._command(self._reset)

    async def stats(self) -> EngineStats:
        jobs = list(self._batch)  # a copy: the engine's thread changes the batch
        tokens = sum(job.num_steps for job in jobs)
        return EngineStats(len(jobs), len(self._queue), self._busy(), self._generated, tokens)

    def _busy(self) -> float:
        return self._busy_s

    def _check_running(self) -> None:
        if self._failure or self._closed:
            raise RuntimeError("the engine has stopped") from self._failure

    # ---- what each engine does in its own way ---------------------------------------------------------------------

    @property
    @abstractmethod
    def _batch(self) -> Collection[Job]:
        """The jobs that have left the queue and have not ended."""

    @abstractmethod
    def _run(self, opened: threading.Event) -> None:
        """The engine's thread. Sets `opened` when the engine is open, or has failed."""

    @abstractmethod
    async def _command(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work()`, which runs in the engine's thread after the commands before it."""

    @abstractmethod
    async def _drop(self, waiting: Sequence[Job], running: Sequence[Job]) -> None: ...  # end them as aborted

    @abstractmethod
    async def _write(self, loads: Loads) -> None: ...  # some of the weights

    @abstractmethod
    async def _end_load(self) -> None: ...  # all weights of `self.version` are written

    @abstractmethod
    async def _free(self, level: int) -> float: ...  # sleep; the GiB that were freed

    @abstractmethod
    async def _allocate(self, tags: Sequence[str]) -> float: ...  # wake; the GiB that were allocated

    # ---- commands -------------------------------------------------------------------------------------------------

    async def _abort(self, ticket: str) -> None:
        with self._changed:
            waiting = self._queue.remove(ticket)
        await self._drop(waiting, [job for job in self._batch if job.ticket == ticket])

    async def _reset(self) -> None:
        with self._changed:
            waiting = self._queue.clear()
        await self._drop(waiting, list(self._batch))
        await self._wake(())
        if self._receiver.forget_update():
            self._memory.lose_weights()

    async def _load(self, version: int, weights: Weights, bucket: tuple[int, int]) -> int:
        self._memory.check_load(version)
        with (
            self._receiver.receive(version, weights, bucket) as loads,
            self._tracer.span("load weights", bucket=bucket[0]),
        ):
            await self._write(loads)
        if not self._receiver.incomplete:
            self.version = version
            self._memory.loaded()
            await self._end_load()
        return self.version

    async def _sleep(self, level: int) -> MemoryChange:
        in_progress = len(self._batch) + len(self._queue)
        if not self._memory.may_sleep(level, in_progress, self._receiver.incomplete):
            return MemoryChange(0.0, 0.0)
        started = time.perf_counter()
        with self._tracer.span("sleep", level=level):
            gigabytes = await self._free(level)
        return MemoryChange(time.perf_counter() - started, gigabytes)

    async def _wake(self, tags: Sequence[str]) -> MemoryChange:
        due, started = self._memory.due(tags), time.perf_counter()
        with self._tracer.span("wake", tags=due):
            gigabytes = await self._allocate(due) if due else 0.0
        self._memory.wake(due)
        return MemoryChange(time.perf_counter() - started, gigabytes)


class SteppedEngine(EngineShell):
    """An engine with a backend. `min_step_s` emulates a slower device. `make_job`: the kind of jobs that the backend
    knows."""

    def __init__(
        self,
        backend: DecodeBackend,
        tracer: Tracer | None = None,
        min_step_s: float = 0.0,
        make_job: type[Job] = Job,
    ) -> None:
        super().__init__(tracer, make_job)
        self.backend, self._min_step_s = backend, min_step_s
        self._admitting = list[Job]()
        self._commands: deque[tuple[Callable[[], Coroutine[Any, Any, Any]], asyncio.Future[Any]]] = deque()
        self._to_score: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._start()

    @property
    def _batch(self) -> Collection[Job]:
        return self.backend.jobs

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
        await self._command(self._score_waiting)
        return list(await asyncio.gather(*futures))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=30)

    async def _command(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._check_running()
            self._commands.append((work, done))
            self._changed.notify()
        return await done

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
                    post([(done, _at_once(command()))])
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

    async def _score_waiting(self) -> None:
        with self._changed:
            waiting, self._to_score = self._to_score, []
        if not waiting:  # the command of another caller computed them
            return
        started = time.perf_counter()
        try:
            with self._tracer.span("score", requests=len(waiting)):
                logprobs = self.backend.score([request for request, _ in waiting])
        except Exception as error:  # for every caller: the commands of the others find nothing to compute
            post((future, error) for _, future in waiting)
            return
        self._busy_s += time.perf_counter() - started
        post(
            (future, scored(logprobs_S, self.version))
            for (_, future), logprobs_S in zip(waiting, logprobs, strict=True)
        )

    async def _drop(self, waiting: Sequence[Job], running: Sequence[Job]) -> None:
        self.backend.remove(running)
        self._deliver((job, "abort") for job in (*running, *waiting))

    async def _write(self, loads: Loads) -> None:
        self._flush_steps()
        for tensors, _ in loads:
            self.backend.load(tensors)

    async def _end_load(self) -> None:
        restarted = self.backend.finish_load()
        with self._changed:
            for job in restarted:
                self._queue.push(job)
        for job in self.backend.jobs:
            job.stamp(self.version)

    async def _free(self, level: int) -> float:
        self._flush_steps()
        gigabytes = self.backend.free(level)
        self._memory.sleep(level)
        return gigabytes

    async def _allocate(self, tags: Sequence[str]) -> float:
        return self.backend.allocate(tags)


def _at_once(command: Coroutine[Any, Any, T]) -> T:
    """The result of a command of a stepped engine: it never waits, so it runs to its end without an event loop."""
    try:
        command.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a command of a stepped engine has waited; expected one that computes without waiting")
