"""The processes of an environment, beside one controller: many episodes in each, killed when they hang, and replaced.

    workflow ──episode()──> a process with a free place ──reset, step, run, close──> worker.py in that process
    states of a process: started for an episode, ready, ended (killed for a call that hung, or died by itself)

What goes wrong is an EnvironmentFailure with a name of base.CAUSES. The workflow begins the episode again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore.config.environments import EnvironmentSettings
from gcore.environments.base import CAUSES, Call, Observation, Opening, Policy, Row
from gcore.observe.logs import Log
from gcore.processes import ANSWER, CALL, CANCEL, Child, kill_all
from gcore.types import EnvironmentFailure, UserError

GRACE_S = 2.0  # time for a cancelled call to end before its process is killed
CLOSE_S = 10.0


@dataclass(eq=False, slots=True)
class _Pending:
    episode: int
    future: asyncio.Future[Any]
    method: str
    limit_s: float
    late: str  # the cause if it takes too long
    deadline: asyncio.TimerHandle | None = None
    expired: bool = False


class Hosts:
    """Up to `num_processes` processes with `concurrency` episodes each. It serves one event loop."""

    def __init__(self, spec: EnvironmentSettings, num_processes: int, log: Path | None = None) -> None:
        """`log`: the file for the output of the processes; None: the stderr of this process."""
        self.spec, self.num_processes = spec, num_processes
        self.counts: Counter[str] = Counter()  # since they were last taken
        self.place = os.getcwd(), list(sys.path)
        self.living: set[subprocess.Popen[bytes]] = set()
        self.closed = False
        self._log_path, self._log = log, None if log is None else Log(log)
        self._hosts: list[_Host] = []
        self._waiting: deque[tuple[bool, asyncio.Future[_Host]]] = deque()  # for a place; whether alone
        self._numbers = itertools.count(1)
        self._closing: set[asyncio.Task[None]] = set()
        weakref.finalize(self, kill_all, self.living, os.getpid())

    @contextlib.asynccontextmanager
    async def episode(self, alone: bool = False) -> AsyncIterator[EpisodeClient]:
        """A place for one episode. `alone`: no other episode is in its process, which shows whether it ends it."""
        if self.closed:
            raise EnvironmentFailure("not_started", "the processes of environments are closed")
        waiting: asyncio.Future[_Host] = asyncio.get_running_loop().create_future()
        self._waiting.append((alone, waiting))
        self._assign()
        number = next(self._numbers)
        try:
            host = await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._free(waiting.result())
            raise
        try:
            yield EpisodeClient(host, number)
        finally:
            task = asyncio.ensure_future(self._release(host, number))  # not awaited: it may take a while
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """A question to the environment itself."""
        async with self.episode() as episode:
            return await episode.host.call(0, method, arguments, self.spec.reset_s, "timeout")

    def take_counts(self) -> dict[str, int]:
        counts, self.counts = dict(self.counts), Counter()
        return counts

    def output(self) -> int:
        return 2 if self._log is None else self._log.descriptor

    def close(self) -> None:
        """Kills all processes and waits until they are gone."""
        self.closed = True
        kill_all(self.living, os.getpid())
        for host in self._hosts:
            host.task.cancel()
        if self._log is not None:
            self._log.close()

    # ---- places -----------------------------------------------------------------------------------------------------

    def _assign(self) -> None:
        """In the order of the requests: one that must be alone waits for an empty process, and others behind it."""
        while self._waiting:
            alone, waiting = self._waiting[0]
            if not waiting.done():
                if (host := self._place(alone)) is None:
                    return
                host.places += 1
                host.exclusive = alone
                waiting.set_result(host)
            self._waiting.popleft()

    def _place(self, alone: bool) -> _Host | None:
        usable = [host for host in self._hosts if host.usable and not host.exclusive]
        most = 0 if alone else self.spec.concurrency - 1
        host = min(usable, key=lambda h: h.places, default=None)
        if (host is None or host.places) and len(self._hosts) < self.num_processes and not self.closed:
            host = _Host(self)
            self._hosts.append(host)
        return host if host is not None and host.places <= most else None

    def _free(self, host: _Host) -> None:
        host.places -= 1
        if not host.places:
            host.exclusive = False
        self._assign()

    async def _release(self, host: _Host, number: int) -> None:
        for pending in [p for p in host.pending.values() if p.episode == number]:
            host.expire(pending)  # its workflow was cancelled
        with contextlib.suppress(EnvironmentFailure, UserError):
            if host.usable and host.ready.done():
                await host.call(number, "close", (), CLOSE_S, "timeout")
        self._free(host)

    def ended(self, host: _Host) -> None:
        self._hosts.remove(host)
        if not self.closed:
            self._assign()


@dataclass(eq=False, slots=True)
class EpisodeClient:
    """The controller's end of an episode."""

    host: _Host
    number: int

    async def runs(self) -> bool:
        """The environment talks to the policy itself."""
        host = self.host
        if host.runs is None:
            host.runs = bool(await host.call(0, "runs", (), host.hosts.spec.reset_s, "timeout"))
        return host.runs

    async def reset(self, row: Row, seed: int) -> Opening:
        spec = self.host.hosts.spec
        opening: Opening = await self.host.call(self.number, "reset", (row, seed), spec.reset_s, "timeout")
        return opening

    async def step(self, text: str, calls: list[Call]) -> Observation:
        spec, late = self.host.hosts.spec, "tool_timeout" if calls else "timeout"
        made: Observation = await self.host.call(self.number, "step", (text, calls), spec.step_s, late)
        return made

    async def run(self, row: Row, seed: int, policy: Policy) -> Observation:
        spec = self.host.hosts.spec
        made: Observation = await self.host.call(self.number, "run", (row, seed, policy), spec.episode_s, "timeout")
        return made


class _Host:
    """One process and the calls to it. A task runs as long as the process does."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.places = 0  # that are taken
        self.exclusive = False
        self.usable = True
        self.runs: bool | None = None  # not asked yet
        self.pending: dict[int, _Pending] = {}
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count(1)
        self._guilty = 0  # the episode for which the process was killed
        self._child = Child("gcore.environments.worker", hosts.place, hosts.output(), hosts.living)
        self.task = asyncio.get_running_loop().create_task(self._live())

    async def call(self, episode: int, method: str, arguments: tuple[Any, ...], limit_s: float, late: str) -> Any:
        await asyncio.shield(self.ready)
        if not self.usable:
            raise self._gone(episode, was_asked=False)
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        pending = _Pending(episode, loop.create_future(), method, limit_s, late)
        self.pending[number] = pending
        pending.deadline = loop.call_later(limit_s, self.expire, pending)
        self._child.write((CALL, number, episode, method, arguments))
        return await pending.future

    def expire(self, pending: _Pending) -> None:
        """Cancels the call. If it does not end, its process is killed."""
        number = next((n for n, other in self.pending.items() if other is pending), None)
        if number is None or pending.expired:
            return
        pending.expired = True
        if pending.deadline is not None:
            pending.deadline.cancel()
        self._child.write((CANCEL, number))
        pending.deadline = asyncio.get_running_loop().call_later(GRACE_S, self._kill_for, number)

    def _kill_for(self, number: int) -> None:
        if (pending := self.pending.get(number)) is not None and not self._child.killed:
            self._guilty, self.usable = pending.episode, False
            self._child.kill()

    def _take(self, number: int, kind: str, value: Any, trace: str) -> None:
        pending = self.pending.pop(number)
        if pending.deadline is not None:
            pending.deadline.cancel()
        if pending.future.done():
            return
        if pending.expired:
            text = f"{pending.method} gave no answer within {pending.limit_s:g} s"
            pending.future.set_exception(self._failure(pending.late, text))
        elif kind == ANSWER:
            pending.future.set_result(value)
        else:
            cause, _, text = str(value).partition(": ")
            where = f"{pending.method} " if cause == "raised" else ""
            pending.future.set_exception(self._failure(cause, where + text, trace))

    async def _live(self) -> None:
        child, hosts = self._child, self.hosts
        failure = ""
        try:
            failure = await child.serve((hosts.spec.source, hosts.spec.args), self._begin, self._take)
            self.usable = False
            await child.end(at_once=bool(failure))
        except asyncio.CancelledError:
            child.destroy()
            raise
        finally:
            self.usable = False
            child.close()
            self._finish(failure)
        hosts.counts["restarts"] += not failure
        hosts.ended(self)

    def _begin(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def _finish(self, failure: str) -> None:
        """Fails the calls of a process that has ended."""
        if not self.ready.done():
            if failure and not self.hosts.closed:  # no other process would load it
                named = failure if failure.startswith("environment") else f"environment: {failure}"
                self.ready.set_exception(UserError(named))
            else:
                self.ready.set_exception(self._failure("not_started", f"its process {self._child.died}"))
            self.ready.exception()  # it may be that nobody waits
        for pending in self.pending.values():
            if pending.deadline is not None:
                pending.deadline.cancel()
            if not pending.future.done():
                pending.future.set_exception(self._gone(pending.episode, was_asked=True))
                pending.future.exception()
        self.pending.clear()

    def _gone(self, episode: int, was_asked: bool) -> EnvironmentFailure:
        if self._guilty:
            hung = episode == self._guilty
            return self._failure("hung" if hung else "evicted", CAUSES["hung"] if hung else CAUSES["evicted"])
        asked = sum(p.episode != episode for p in self.pending.values()) if was_asked else 1
        failure = self._failure("died" if was_asked else "evicted", f"its process {self._child.died or 'ended'}")
        failure.suspect = was_asked and asked > 0  # others had calls too: alone, it shows whether it was the cause
        return failure

    def _failure(self, cause: str, text: str, trace: str = "") -> EnvironmentFailure:
        failure = EnvironmentFailure(cause, f"environment {self.hosts.spec.source}: {text} ({cause})")
        if trace:
            failure.add_note(trace)
        return failure
