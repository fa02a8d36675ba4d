"""Reward functions in worker processes: a call that hangs is killed, and a crash ends only its worker.

    functions.FunctionSource ──arguments──> WorkerPool ──> dispatcher of sync functions:  workers with one call each
                                                  ──> dispatcher of async functions: workers with many calls each
    states of a worker: started for a queued call, ready, ended (timeout, crash, cancel, recycling); then replaced

The pool runs on the event loop of its caller, without threads. It serves one loop at a time. After that loop is closed
(asyncio.run ended), another loop may use the pool, with new workers.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import subprocess
import sys
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore.config.rewards import Rewards
from gcore.observe.logs import Log
from gcore.processes import ANSWER, CALL, CANCEL, REFUSED, Child, kill_all
from gcore.rewarding.functions import FunctionSource
from gcore.rewarding.source import Answer, BadAnswer, TimedOut
from gcore.types import RewardError

ASYNC_CALLS = 64  # concurrent calls of async functions per worker
GRACE_S = 5.0  # time for a cancelled async call to end before its worker is killed
Reply = tuple[str, Any, str]  # of a worker: kind, value, traceback


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
        if not worker.child.killed:
            next((call.source for call in calls), self.sources[0]).counts["worker_restarts"] += 1
        if not worker.ready:
            # If the functions do not import, no call can succeed. If the process died, the next worker may start.
            for call in [*self.queue] if worker.failure else [*self.queue][:1]:
                call.fail(BadAnswer(f"its worker did not start: {worker.failure or worker.child.died}"))
        elif not worker.child.killed and len(calls) == 1:
            calls.pop().fail(BadAnswer(f"its worker {worker.failure or worker.child.died}"))
        for call in reversed(calls):
            call.alone = call.alone or not worker.child.killed
            call.worker = None
            self.queue.appendleft(call)
        self.dispatch()


@dataclass(eq=False, slots=True)
class _Worker:
    """One child process and its calls in progress. A task runs as long as the child process does."""

    dispatcher: _Dispatcher
    ready: bool = False
    failure: str = ""  # why the worker could not import the functions
    calls: dict[int, _Call] = field(default_factory=dict)
    left: int = field(init=False)  # calls until it is replaced; 0 also of one that is killed or has ended
    child: Child = field(init=False)
    task: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        pool = self.dispatcher.pool
        self.left = pool.recycle_after
        self.child = Child("gcore.rewarding.worker", pool.place, pool.output(), pool.processes)
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
        self.child.write((CALL, call.number, call.source.key, call.siblings, call.arguments))

    def abandon(self, call: _Call) -> None:
        """Stops a call whose caller is gone. Sync: kills the worker. Async: cancels the call, and kills the worker
        only if the call does not end."""
        if call.number not in self.calls:
            return
        call.disarm()
        if self.dispatcher.is_async:
            self.child.write((CANCEL, call.number))
            asyncio.get_running_loop().call_later(GRACE_S, self._kill_for, call)
        else:
            self._kill_for(call)

    def _expire(self, call: _Call) -> None:
        stopped = "it was cancelled" if self.dispatcher.is_async else "its worker was killed"
        call.fail(TimedOut(f"no answer within {call.source.timeout_s:g} s; {stopped}"))
        self.abandon(call)

    def _kill_for(self, call: _Call) -> None:
        if call.number in self.calls and not self.child.killed:
            call.source.counts["worker_restarts"] += 1
            self._kill()

    def _kill(self) -> None:
        self.left = 0
        self.child.kill()

    async def _live(self) -> None:
        child = self.child
        functions = {source.key: source.origin for source in self.dispatcher.sources}
        try:
            self.failure = await child.serve((functions, self.dispatcher.is_async), self._begin, self._take)
            self.left = 0
            await child.end(at_once=bool(self.failure))
        except asyncio.CancelledError:  # the loop or the pool closes
            child.destroy()
            self.dispatcher.workers.remove(self)
            raise
        finally:
            for call in self.calls.values():
                call.disarm()
            child.close()
        self.dispatcher.worker_ended(self)

    def _begin(self) -> None:
        self.ready = True
        self.dispatcher.dispatch()

    def _take(self, number: int, kind: str, value: Any, trace: str) -> None:
        call = self.calls.pop(number)
        call.disarm()
        if not call.future.done():
            call.future.set_result((kind, value, trace))
        if not self.left and not self.calls:
            self._kill()
        self.dispatcher.dispatch()
