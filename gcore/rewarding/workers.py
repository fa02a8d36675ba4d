"""Reward functions in worker processes: a call that hangs is killed, and a crash ends only its worker.

    functions.FunctionSource ──arguments──> WorkerPool ──> dispatcher of sync functions:  workers with one call each
                                                  ──> dispatcher of async functions: workers with many calls each
    states of a worker: started for a queued call, ready, ended (timeout, crash, cancel, recycling); then replaced

The pool runs on the event loop of its caller, without threads. It serves one loop at a time. After that loop is closed
(asyncio.run ended), another loop may use the pool, with new workers.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore.config.rewards import Rewards
from gcore.observe.logs import Log
from gcore.rewarding.functions import FunctionSource
from gcore.rewarding.processes import exit_reason, has_exited, kill_all, kill_group, shutdown_on_exit
from gcore.rewarding.source import Answer, BadAnswer, TimedOut
from gcore.rewarding.worker import ANSWER, CALL, CANCEL, HEADER, READY, REFUSED, frame
from gcore.types import RewardError

ASYNC_CALLS = 64  # concurrent calls of async functions per worker
START_S = 300.0  # timeout for the import of the functions, which may load a model
GRACE_S = 5.0  # time for a cancelled async call to end before its worker is killed
Reply = tuple[str, Any, str]  # of a worker: kind, value, traceback
PACKAGE_ROOT = str(Path(__file__).parents[2])


@dataclass(eq=False, slots=True)
class _Call:
    number: int
    source: FunctionSource
    siblings: int
    arguments: bytes
    future: asyncio.Future[Reply]
    worker: _Worker | None = None
    deadline: asyncio.TimerHandle | None = None
    alone: bool = False  # its worker crashed with several calls; run alone, it shows whether it caused the crash

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def disarm(self) -> None:
        if self.deadline:
            self.deadline.cancel()


class WorkerPool:
    """Up to `num_workers` processes for sync functions, and as many, with `ASYNC_CALLS` calls each, for async ones.

    `sources`: one per entry of rewards.functions; they share the workers. Bad paths raise UserError here.
    """

    def __init__(self, rewards: Rewards, num_workers: int, log: Path | None = None):
        """`log`: the file for the workers' output; None: the stderr of this process."""
        self._log_path = log
        self._log: Log | None = None
        self.sources = [
            FunctionSource(spec, rewards.attempts, f"rewards.functions.{i}", self, spec.timeout_s or rewards.timeout_s)
            for i, spec in enumerate(rewards.functions)
        ]
        self.recycle_after = rewards.recycle_after
        self.closed = False
        self.place = os.getcwd(), list(sys.path)  # workers import the functions from the same places
        self.processes: set[subprocess.Popen[bytes]] = set()
        self._dispatchers = {is_async: _Dispatcher(self, is_async, num_workers) for is_async in (False, True)}
        self._numbers = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        # kills the workers at interpreter exit at the latest; a forked copy of this process is not the owner
        weakref.finalize(self, kill_all, self.processes, os.getpid())

    async def call(self, source: FunctionSource, calls: list[dict[str, Any]], siblings: int) -> Answer:
        self._attach()
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        arguments = pickle.dumps(calls, pickle.HIGHEST_PROTOCOL)
        call = _Call(next(self._numbers), source, siblings, arguments, future)
        dispatcher = self._dispatchers[source.loaded.is_async]
        dispatcher.queue.append(call)
        dispatcher.dispatch()
        try:
            kind, value, trace = await future
        except asyncio.CancelledError:
            if call.worker:
                call.worker.abandon(call)
            raise
        if kind == ANSWER:
            answer: Answer = value
            return answer
        if kind == REFUSED:
            raise RewardError(value)
        error = BadAnswer(value)
        if trace:
            error.add_note(trace)
        raise error

    def close(self) -> None:
        """Kills all workers and waits until they are gone. May be called twice, and from any thread."""
        self.closed = True
        kill_all(self.processes, os.getpid())
        if self._log is not None:
            self._log.close()
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._forget)

    def output(self) -> int:
        """The file descriptor for the workers' output. The log is opened with the first worker."""
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
            raise RuntimeError("a WorkerPool serves one event loop at a time, and its loop is still open; use another")
        kill_all(self.processes, os.getpid())  # workers of a loop that was closed without cancelling its tasks
        for dispatcher in self._dispatchers.values():
            dispatcher.queue.clear()
            dispatcher.workers.clear()
        self._loop = loop

    def _forget(self) -> None:
        for dispatcher in self._dispatchers.values():
            for call in [*dispatcher.queue, *(call for worker in dispatcher.workers for call in worker.calls.values())]:
                call.fail(RewardError("the reward workers were closed"))
            for worker in dispatcher.workers:
                worker.task.cancel()


class _Dispatcher:
    """The queue of calls of one kind of functions (sync or async), and their workers."""

    def __init__(self, pool: WorkerPool, is_async: bool, num_workers: int):
        self.pool, self.is_async, self.num_workers = pool, is_async, num_workers
        self.sources = [source for source in pool.sources if source.loaded.is_async == is_async]
        self.capacity = ASYNC_CALLS if is_async else 1
        self.queue: deque[_Call] = deque()
        self.workers: list[_Worker] = []

    def dispatch(self) -> None:
        """Sends queued calls to free workers, in order. Starts workers for the remaining calls."""
        while self.queue:
            call = self.queue[0]
            if call.future.done():  # cancelled in the queue
                self.queue.popleft()
            elif worker := next((worker for worker in self.workers if worker.takes(call)), None):
                self.queue.popleft()
                worker.send(call)
            else:
                break
        if self.queue and not self.pool.closed:
            starting = sum(not worker.ready for worker in self.workers)
            staying = sum(worker.left > 0 for worker in self.workers)
            num = min(-(-len(self.queue) // self.capacity) - starting, self.num_workers - staying)
            self.workers += [_Worker(self) for _ in range(num)]

    def worker_ended(self, worker: _Worker) -> None:
        """Puts the calls of an ended worker back in the queue. A call that was alone on a crashed worker fails."""
        self.workers.remove(worker)
        calls = [call for call in worker.calls.values() if not call.future.done()]
        if not worker.killed:
            next((call.source for call in calls), self.sources[0]).counts["worker_restarts"] += 1
        if not worker.ready:
            # If the functions do not import, no call can succeed. If the process died, the next worker may start.
            for call in [*self.queue] if worker.failure else [*self.queue][:1]:
                call.fail(BadAnswer(f"its worker did not start: {worker.failure or worker.died}"))
        elif not worker.killed and len(calls) == 1:
            calls.pop().fail(BadAnswer(f"its worker {worker.failure or worker.died}"))
        for call in reversed(calls):
            call.alone = call.alone or not worker.killed
            call.worker = None
            self.queue.appendleft(call)
        self.dispatch()


@dataclass(eq=False, slots=True)
class _Worker:
    """One child process and its calls in progress. A task runs as long as the child process does."""

    dispatcher: _Dispatcher
    ready: bool = False
    killed: bool = False  # by us
    failure: str = ""  # why the worker could not import the functions
    died: str = ""  # how the process ended
    calls: dict[int, _Call] = field(default_factory=dict)
    left: int = field(init=False)  # calls until it is replaced; 0 also of one that is killed or has ended
    process: subprocess.Popen[bytes] | None = None
    socket: socket.socket | None = None
    writer: asyncio.StreamWriter | None = None
    task: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.dispatcher.pool.recycle_after
        self.task = asyncio.get_running_loop().create_task(self._live())

    def takes(self, call: _Call) -> bool:
        alone = call.alone or any(other.alone for other in self.calls.values())
        return self.ready and self.left > 0 and len(self.calls) < (1 if alone else self.dispatcher.capacity)

    def send(self, call: _Call) -> None:
        self.left -= 1
        self.calls[call.number] = call
        call.worker = self
        loop = asyncio.get_running_loop()
        call.deadline = loop.call_later(call.source.timeout_s, self._expire, call)
        self._write((CALL, call.number, call.source.key, call.siblings, call.arguments))

    def abandon(self, call: _Call) -> None:
        """Stops a call whose caller is gone. Sync: kills the worker. Async: cancels the call, and kills the worker
        only if the call does not end."""
        if call.number not in self.calls:
            return
        call.disarm()
        if self.dispatcher.is_async:
            self._write((CANCEL, call.number))
            asyncio.get_running_loop().call_later(GRACE_S, self._kill_for, call)
        else:
            self._kill_for(call)

    def _expire(self, call: _Call) -> None:
        stopped = "it was cancelled" if self.dispatcher.is_async else "its worker was killed"
        call.fail(TimedOut(f"no answer within {call.source.timeout_s:g} s; {stopped}"))
        self.abandon(call)

    def _kill_for(self, call: _Call) -> None:
        if call.number in self.calls and not self.killed:
            call.source.counts["worker_restarts"] += 1
            self._kill()

    def _kill(self) -> None:
        """Kills the process group. The task then reads the end of the socket and cleans up."""
        assert self.process and self.socket
        self.killed, self.left = True, 0
        kill_group(self.process)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _write(self, value: Any) -> None:
        if self.writer and not self.killed:
            self.writer.write(frame(value))

    async def _live(self) -> None:
        try:
            try:
                await self._serve(await self._spawn())
            except (EOFError, ConnectionError):
                pass
            except Exception as error:  # the process did not start, the start timed out, the stream is not a pickle
                self.failure = f"{type(error).__name__}: {error}"
            self.left = 0
            await self._end()
        except asyncio.CancelledError:  # the loop or the pool closes
            if self.process:
                kill_all({self.process}, os.getpid())
                self.dispatcher.pool.processes.discard(self.process)
            self.dispatcher.workers.remove(self)
            raise
        finally:
            for call in self.calls.values():
                call.disarm()
            if self.writer:
                self.writer.close()
            elif self.socket:
                self.socket.close()
        self.dispatcher.worker_ended(self)

    async def _spawn(self) -> asyncio.StreamReader:
        pool = self.dispatcher.pool
        cwd, path = pool.place
        old = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (PACKAGE_ROOT, old)))}
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gcore.rewarding.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=pool.output(),  # prints go to the log; answers use the socket
                stderr=pool.output(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # its own process group, killed as a whole
                cwd=cwd,
                env=environment,
            )
        pool.processes.add(self.process)
        reader, self.writer = await asyncio.open_unix_connection(sock=self.socket)
        functions = {source.key: source.origin for source in self.dispatcher.sources}
        self._write((path, {} if old is None else {"PYTHONPATH": old}, functions, self.dispatcher.is_async))
        return reader

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        assert self.process and self.socket
        with shutdown_on_exit(self.process, self.socket):
            try:
                async with asyncio.timeout(START_S):
                    _, kind, message, _ = await _receive(reader)
            except TimeoutError:
                raise TimeoutError(f"the functions were not imported within {START_S:g} s") from None
            if kind != READY:
                self.failure = message
                return
            self.ready = True
            self.dispatcher.dispatch()
            while True:
                self._take(*await _receive(reader))

    def _take(self, number: int, kind: str, value: Any, trace: str) -> None:
        call = self.calls.pop(number)
        call.disarm()
        if not call.future.done():
            call.future.set_result((kind, value, trace))
        if not self.left and not self.calls:
            self._kill()
        self.dispatcher.dispatch()

    async def _end(self) -> None:
        """Waits until the process and all that it started are gone. Records how a crashed process ended."""
        process = self.process
        if process is None:
            return
        until = time.monotonic() + (0 if self.killed or self.failure else 1)
        while not has_exited(process) and time.monotonic() < until:
            await asyncio.sleep(0.002)
        kill_group(process)  # before its id can be reused
        while process.poll() is None:
            await asyncio.sleep(0.002)
        self.dispatcher.pool.processes.discard(process)
        self.died = exit_reason(process)


async def _receive(reader: asyncio.StreamReader) -> Any:
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return pickle.loads(await reader.readexactly(size))
