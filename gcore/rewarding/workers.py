"""Reward functions in worker processes: what hangs is killed, what crashes takes nothing with it.

    WorkerSource.answer ──arguments──> WorkerPool ──> lane of sync functions:  workers with one call each
                                                  ──> lane of async functions: workers with many calls each
    a worker's life: started when a call waits, ready, calls, ended (time-out, crash, cancel, recycling); then the next

All of it runs on the event loop of its caller, without threads. A pool serves one loop at a time; when that loop is
closed (asyncio.run ended), the next one may use it, with fresh workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gcore.config.tree import RewardFunction, Rewards
from gcore.observe.logs import Log
from gcore.rewarding.processes import exit_ends, has_exited, how_it_ended, kill_all, kill_group
from gcore.rewarding.source import Answer, BadAnswer, Source, TimedOut
from gcore.rewarding.threads import FunctionSource
from gcore.rewarding.worker import ANSWER, CALL, CANCEL, HEADER, READY, REFUSED, frame
from gcore.types import RewardError, Rollout, UserError

ASYNC_CALLS = 64  # of async functions in one worker
START_S = 300.0  # to import the functions: they may load a model
GRACE_S = 5.0  # for an async function to obey its cancellation
PACKAGE_ROOT = str(Path(__file__).parents[2])


def sources_of(rewards: Rewards, num_workers: int, log: Path | None = None) -> list[Source]:
    """One source for each of rewards.functions; they share the workers. Bad paths raise UserError here."""
    return list(WorkerPool(rewards, num_workers, log).sources)


class WorkerSource(FunctionSource):
    """Implements source.Source. Imports the function here too: what is wrong with it is found before the run."""

    def __init__(self, pool: WorkerPool, index: int, spec: RewardFunction, rewards: Rewards):
        super().__init__(spec, rewards.attempts, f"rewards.functions.{index}")
        self.pool, self.index = pool, index
        self.origin = spec.path, spec.args, f"rewards.functions.{index}"  # for load_reward, in the worker
        self.timeout_s = rewards.timeout_s if spec.timeout_s is None else spec.timeout_s

    async def _ask(self, group: Sequence[Rollout]) -> Answer:
        return await self.pool.call(self, self.adapter.calls(group), len(group))

    def close(self) -> None:
        self.pool.close()


@dataclass(eq=False, slots=True)
class _Call:
    number: int
    source: WorkerSource
    siblings: int
    arguments: bytes
    future: asyncio.Future[Answer]
    worker: _Worker | None = None
    deadline: asyncio.TimerHandle | None = None
    alone: bool = False  # it was among many when their worker crashed; by itself it will show whether it did that

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class WorkerPool:
    """`num_workers` processes for sync functions, and up to as many, of `ASYNC_CALLS` calls each, for async ones."""

    def __init__(self, rewards: Rewards, num_workers: int, log: Path | None = None):
        """`log`: where the workers print to; None: to the stderr of this process."""
        self._log_path = log
        self._log: Log | None = None
        self.sources = [WorkerSource(self, i, spec, rewards) for i, spec in enumerate(rewards.functions)]
        self.recycle_after = rewards.recycle_after
        self.closed = False
        self.place = os.getcwd(), list(sys.path)  # where the functions were found: workers find them there
        self.processes: set[subprocess.Popen[bytes]] = set()
        kinds = [(is_async, [s for s in self.sources if s.adapter.is_async == is_async]) for is_async in (False, True)]
        self._lanes = {is_async: _Lane(self, sources, is_async, num_workers) for is_async, sources in kinds if sources}
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        # at the latest when the interpreter ends; a forked copy of it is not the owner
        weakref.finalize(self, kill_all, self.processes, os.getpid())

    async def start(self) -> None:
        """Start the workers now, not with the first calls. Raises UserError if the functions do not import there."""
        self._attach()
        workers = [worker for lane in self._lanes.values() for worker in lane.fill()]
        await asyncio.gather(*(worker.started.wait() for worker in workers))
        if failed := [worker.failure or worker.died for worker in workers if not worker.ready]:
            raise UserError(f"rewards.functions: a worker did not start: {failed[0]}")

    async def call(self, source: WorkerSource, calls: list[dict[str, Any]], siblings: int) -> Answer:
        self._attach()
        future = asyncio.get_running_loop().create_future()
        arguments = pickle.dumps(calls, pickle.HIGHEST_PROTOCOL)
        call = _Call(next(self._numbers), source, siblings, arguments, future)
        lane = self._lanes[source.adapter.is_async]
        lane.queue.append(call)
        lane.dispatch()
        try:
            return await future
        except asyncio.CancelledError:
            if call.worker:
                call.worker.abandon(call)
            raise

    def close(self) -> None:
        """Kill all workers and wait until they are gone. May be called twice, and from anywhere."""
        self.closed = True
        kill_all(self.processes, os.getpid())
        if self._log is not None:
            self._log.close()
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._forget)

    def output(self) -> int:
        """The file descriptor that workers print to. The log is opened with the first worker."""
        if self._log is None and self._log_path is not None:
            self._log = Log(self._log_path)
        return 2 if self._log is None else self._log.descriptor

    def _attach(self) -> None:
        if self.closed:
            raise RewardError("the reward workers are closed")
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop and not self._loop.is_closed():
            raise RuntimeError("a WorkerPool serves one event loop at a time, and its loop is still open; make another")
        kill_all(self.processes, os.getpid())  # of a loop that was closed without cancelling its tasks
        for lane in self._lanes.values():
            lane.queue.clear()
            lane.workers.clear()
        self._loop = loop

    def _forget(self) -> None:
        for lane in self._lanes.values():
            for call in [*lane.queue, *(call for worker in lane.workers for call in worker.calls.values())]:
                call.fail(RewardError("the reward workers were closed"))
            for worker in lane.workers:
                worker.task.cancel()


class _Lane:
    """The waiting calls of one kind of functions, and the workers for them."""

    def __init__(self, pool: WorkerPool, sources: list[WorkerSource], is_async: bool, num_workers: int):
        self.pool, self.sources, self.is_async, self.num_workers = pool, sources, is_async, num_workers
        self.capacity = ASYNC_CALLS if is_async else 1
        self.queue: deque[_Call] = deque()
        self.workers: list[_Worker] = []

    def dispatch(self) -> None:
        """Hand out what waits, in order; start workers for what is left."""
        while self.queue:
            call = self.queue[0]
            if call.future.done():  # cancelled while it waited
                self.queue.popleft()
            elif worker := next((worker for worker in self.workers if worker.takes(call)), None):
                self.queue.popleft()
                worker.send(call)
            else:
                break
        if self.queue and not self.pool.closed:
            starting = sum(not worker.ready for worker in self.workers)
            self._start(-(-len(self.queue) // self.capacity) - starting)

    def fill(self) -> list[_Worker]:
        """All the workers that sync functions may have; one for async functions, which share it."""
        self._start(1 - len(self.workers) if self.is_async else self.num_workers)
        return self.workers.copy()

    def _start(self, num: int) -> None:
        staying = sum(worker.stays for worker in self.workers)
        self.workers += [_Worker(self) for _ in range(min(num, self.num_workers - staying))]

    def lost(self, worker: _Worker) -> None:
        """A worker ended. Its calls begin again elsewhere, unless it is clear that one of them did it."""
        self.workers.remove(worker)
        calls = [call for call in worker.calls.values() if not call.future.done()]
        if worker.ending is None:
            next((call.source for call in calls), self.sources[0]).counts["worker_restarts"] += 1
        if not worker.ready:
            # the functions do not import there: nobody need wait; one that died tells only that somebody must not
            for call in [*self.queue] if worker.failure else [*self.queue][:1]:
                call.fail(BadAnswer(f"its worker did not start: {worker.failure or worker.died}"))
        elif worker.ending is None and len(calls) == 1:
            calls.pop().fail(BadAnswer(f"its worker {worker.failure or worker.died}"))
        for call in reversed(calls):
            call.alone = call.alone or worker.ending is None
            call.worker = None
            self.queue.appendleft(call)
        self.dispatch()


@dataclass(eq=False, slots=True)
class _Worker:
    """One child process and the calls it has in hand. Its life is a task; the child's death ends it."""

    lane: _Lane
    ready: bool = False
    ending: Literal["abandoned", "recycled"] | None = None  # why we killed it; None also if it died by itself
    ended: bool = False  # the child answers no more
    failure: str = ""  # why the functions do not import there
    died: str = ""  # how the process ended
    calls: dict[int, _Call] = field(default_factory=dict)
    started: asyncio.Event = field(default_factory=asyncio.Event)  # or failed to
    left: int = field(init=False)  # calls until it is replaced
    process: subprocess.Popen[bytes] | None = None
    socket: socket.socket | None = None
    writer: asyncio.StreamWriter | None = None
    task: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.lane.pool.recycle_after
        self.task = asyncio.get_running_loop().create_task(self._live())

    @property
    def stays(self) -> bool:
        return self.left > 0 and self.ending is None and not self.ended

    def takes(self, call: _Call) -> bool:
        alone = call.alone or any(other.alone for other in self.calls.values())
        return self.ready and self.stays and len(self.calls) < (1 if alone else self.lane.capacity)

    def send(self, call: _Call) -> None:
        self.left -= 1
        self.calls[call.number] = call
        call.worker = self
        loop = asyncio.get_running_loop()
        call.deadline = loop.call_later(call.source.timeout_s, self._expire, call)
        self._write((CALL, call.number, call.source.index, call.siblings, call.arguments))

    def abandon(self, call: _Call) -> None:
        """Nobody waits for it any more. A sync function ends with its worker; an async one is told to, first."""
        if call.number not in self.calls:
            return
        self._disarm(call)
        if self.lane.is_async:
            self._write((CANCEL, call.number))
            asyncio.get_running_loop().call_later(GRACE_S, self._give_up, call)
        else:
            self._give_up(call)

    def _expire(self, call: _Call) -> None:
        done = "it was cancelled" if self.lane.is_async else "its worker was killed"
        call.fail(TimedOut(f"no answer within {call.source.timeout_s:g} s; {done}"))
        self.abandon(call)

    def _give_up(self, call: _Call) -> None:
        if call.number in self.calls and not self.ending:
            call.source.counts["worker_restarts"] += 1
            self._kill("abandoned")

    def _kill(self, why: Literal["abandoned", "recycled"]) -> None:
        """The task sees the end of the socket and does the rest."""
        assert self.process and self.socket
        self.ending = why
        kill_group(self.process)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _write(self, value: Any) -> None:
        if self.writer and not self.ending:
            self.writer.write(frame(value))

    async def _live(self) -> None:
        try:
            try:
                await self._serve(await self._spawn())
            except (EOFError, ConnectionError):
                pass
            except Exception as error:  # no process, a start that takes forever, a stream that is no pickle
                self.failure = f"{type(error).__name__}: {error}"
            self.ended = True
            await self._end()
        except asyncio.CancelledError:  # the loop or the pool closes
            if self.process:
                kill_all({self.process}, os.getpid())
                self.lane.pool.processes.discard(self.process)
            self.lane.workers.remove(self)
            raise
        finally:
            for call in self.calls.values():
                self._disarm(call)
            if self.writer:
                self.writer.close()
            elif self.socket:
                self.socket.close()
            self.started.set()
        self.lane.lost(self)

    async def _spawn(self) -> asyncio.StreamReader:
        pool = self.lane.pool
        cwd, path = pool.place
        old = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (PACKAGE_ROOT, old)))}
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gcore.rewarding.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=pool.output(),  # prints are for people; answers have a socket of their own
                stderr=pool.output(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a group of its own, killed as one
                cwd=cwd,
                env=environment,
            )
        pool.processes.add(self.process)
        reader, self.writer = await asyncio.open_unix_connection(sock=self.socket)
        functions = {source.index: source.origin for source in self.lane.sources}
        self._write((path, {} if old is None else {"PYTHONPATH": old}, functions, self.lane.is_async))
        return reader

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        assert self.process and self.socket
        with exit_ends(self.process, self.socket):
            try:
                async with asyncio.timeout(START_S):
                    _, kind, said, _ = await _receive(reader)
            except TimeoutError:
                raise TimeoutError(f"the functions were not imported within {START_S:g} s") from None
            if kind != READY:
                self.failure = said
                return
            self.ready = True
            self.started.set()
            self.lane.dispatch()
            while True:
                self._take(*await _receive(reader))

    def _take(self, number: int, kind: str, value: Any, trace: str) -> None:
        call = self.calls.pop(number)
        self._disarm(call)
        if kind == ANSWER and not call.future.done():
            call.future.set_result(Answer(*value))
        elif kind == REFUSED:
            call.fail(RewardError(value))
        elif kind != ANSWER:
            error = BadAnswer(value)
            if trace:
                error.add_note(trace)
            call.fail(error)
        if not self.left and not self.calls:
            self._kill("recycled")
        self.lane.dispatch()

    @staticmethod
    def _disarm(call: _Call) -> None:
        if call.deadline:
            call.deadline.cancel()

    async def _end(self) -> None:
        """Until the process is gone, and what it started with it. One that died by itself says how."""
        process = self.process
        if process is None:
            return
        until = time.monotonic() + (0 if self.ending or self.failure else 1)
        while not has_exited(process) and time.monotonic() < until:
            await asyncio.sleep(0.002)
        kill_group(process)  # before its number is free for another
        while process.poll() is None:
            await asyncio.sleep(0.002)
        self.lane.pool.processes.discard(process)
        self.died = how_it_ended(process)


async def _receive(reader: asyncio.StreamReader) -> Any:
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return pickle.loads(await reader.readexactly(size))
