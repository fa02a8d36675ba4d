"""Child processes that serve calls through a socket, of reward functions and of environments.

    parent: Child ──setup, then (CALL, number, ...), (CANCEL, number)──> child: Connection, AsyncCalls
                  <──────(number, kind, value, traceback)──────

A child leads its own process group: its parent kills it with all that it started, and it does the same if its parent is
gone. A frame is a length and a pickle. This module imports neither torch nor ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from gcore.observe.logs import print_without_errors

HEADER = struct.Struct(">Q")
READY, ANSWER, BAD, REFUSED = "ready", "answer", "bad", "refused"  # kinds of replies: (number, kind, value, traceback)
CALL, CANCEL = "call", "cancel"  # kinds of requests: (CALL, number, *what), (CANCEL, number)
START_S = 300.0  # timeout for the imports of a child, which may load a model
PACKAGE_ROOT = str(Path(__file__).parents[1])
Failure = Callable[[BaseException], tuple[str, Any, str]]  # an error as a reply: kind, text, traceback


def frame(value: Any) -> bytes:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data


# ---- the parent's side ----------------------------------------------------------------------------------------------


class Child:
    """One child process, on the event loop of its caller. `module`: its main program, which calls `serve_calls`.

    `place`: working folder and sys.path; `output`: the file descriptor of its output; `living`: it is in this set while
    it lives.
    """

    def __init__(
        self, module: str, place: tuple[str, list[str]], output: int, living: set[subprocess.Popen[bytes]]
    ) -> None:
        self._module, self._place, self._output, self._living = module, place, output, living
        self.killed = False  # by us
        self.died = ""  # how the process ended
        self.process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, setup: Any, ready: Callable[[], None], take: Callable[..., None]) -> str:
        """Starts the process and takes its replies until it ends. Returns why it could not begin; else empty."""
        try:
            reader = await self._spawn()
            self.write((self._place[1], self._environment, setup))
            assert self.process and self._socket
            with shutdown_on_exit(self.process, self._socket):
                try:
                    async with asyncio.timeout(START_S):
                        _, kind, message, _ = await _receive(reader)
                except TimeoutError:
                    return f"TimeoutError: its imports were not done within {START_S:g} s"
                if kind != READY:
                    return str(message)
                ready()
                while True:
                    take(*await _receive(reader))
        except (EOFError, ConnectionError):
            return ""
        except Exception as error:  # the process did not start, or the stream is not a pickle
            return f"{type(error).__name__}: {error}"

    def write(self, value: Any) -> None:
        if self._writer and not self.killed and not self._writer.is_closing():  # else `serve` ends, or has ended
            self._writer.write(frame(value))

    def kill(self) -> None:
        """Kills the process group. `serve` then reads the end of the socket."""
        assert self.process and self._socket
        self.killed = True
        kill_group(self.process)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def end(self, at_once: bool = False) -> None:
        """Waits until the process and all that it started are gone. Records how a crashed process ended."""
        process = self.process
        if process is None:
            return
        until = time.monotonic() + (0 if self.killed or at_once else 1)
        while not has_exited(process) and time.monotonic() < until:
            await asyncio.sleep(0.002)
        kill_group(process)  # before its id can be reused
        while process.poll() is None:
            await asyncio.sleep(0.002)
        self._living.discard(process)
        self.died = exit_reason(process)

    def destroy(self) -> None:
        """Without an event loop that goes on."""
        if self.process:
            kill_all({self.process}, os.getpid())
            self._living.discard(self.process)

    def close(self) -> None:
        if self._writer:
            self._writer.close()
        elif self._socket:
            self._socket.close()

    async def _spawn(self) -> asyncio.StreamReader:
        old = os.environ.get("PYTHONPATH")
        self._environment = {} if old is None else {"PYTHONPATH": old}
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,  # prints go to the log; answers use the socket
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # its own process group, killed as a whole
                cwd=self._place[0],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (PACKAGE_ROOT, old)))},
            )
        self._living.add(self.process)
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        return reader


async def _receive(reader: asyncio.StreamReader) -> Any:
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return pickle.loads(await reader.readexactly(size))


# ---- the child's side -----------------------------------------------------------------------------------------------


class Connection:
    """The child's end of the socket. `failure`: for replies that do not pickle."""

    def __init__(self, fileno: int, failure: Failure):
        os.set_inheritable(fileno, False)  # processes started by a function must not keep the socket open
        self.socket = socket.socket(fileno=fileno)
        self.stream = self.socket.makefile("rb")
        self.pid, self.failure = os.getpid(), failure
        self._lock = threading.Lock()

    def receive(self) -> Any:
        (size,) = HEADER.unpack(self._read(HEADER.size))
        return pickle.loads(self._read(size))

    def reply(self, number: int, kind: str, value: Any, trace: str = "") -> None:
        if os.getpid() != self.pid:  # a function forked and the child returned here too: only the parent replies
            os._exit(0)
        try:
            data = frame((number, kind, value, trace))
        except Exception as error:  # extras under names that do not pickle
            data = frame((number, *self.failure(error)))
        with self._lock:
            self.socket.sendall(data)

    def begin(self) -> Any:
        """The setup frame; this process then has the parent's paths."""
        path, environment, setup = self.receive()
        sys.path[:] = path
        os.environ.pop("PYTHONPATH", None)  # it was set only to find this module
        os.environ.update(environment)
        print_without_errors()
        return setup

    def deliver_to(self, deliver: Callable[[Any], None]) -> None:
        """Requests are read in a thread. At the end of the socket the parent is gone: this process and all that it
        started are killed."""
        threading.Thread(target=self._watch, args=(deliver,), daemon=True).start()

    def _watch(self, deliver: Callable[[Any], None]) -> None:
        try:
            while True:
                deliver(self.receive())
        finally:
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)
            os._exit(1)

    def _read(self, size: int) -> bytes:
        data = self.stream.read(size)
        if len(data) < size:
            raise EOFError
        return data


class AsyncCalls:
    """Many calls at once, on the event loop of this thread."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.loop = asyncio.new_event_loop()
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def deliver(self, request: Any) -> None:
        self.loop.call_soon_threadsafe(self._take, request)

    def serve(self, answer: Callable[..., Awaitable[Any]]) -> None:
        """`answer`: called with what a request has after its number."""
        self.answer = answer
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _take(self, request: Any) -> None:
        match request:
            case (str(kind), int(number), *what) if kind == CALL:
                self.tasks[number] = self.loop.create_task(self._run(number, *what))
            case (str(kind), int(number)) if kind == CANCEL and number in self.tasks:
                self.tasks[number].cancel()

    async def _run(self, number: int, *what: Any) -> None:
        try:
            reply = ANSWER, await self.answer(*what), ""
        except BaseException as error:  # a cancelled call replies too: the parent waits for its end
            reply = self.connection.failure(error)
        del self.tasks[number]
        self.connection.reply(number, *reply)


# ---- process groups -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shutdown_on_exit(process: subprocess.Popen[bytes], ours: socket.socket) -> Iterator[None]:
    """Shuts the socket down when the child exits, even if a process that it forked still holds the other end."""
    if not hasattr(os, "pidfd_open"):
        yield
        return
    loop = asyncio.get_running_loop()
    watch = os.pidfd_open(process.pid)

    def end() -> None:
        loop.remove_reader(watch)
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RD)  # received data can still be read

    loop.add_reader(watch, end)
    try:
        yield
    finally:
        loop.remove_reader(watch)
        os.close(watch)


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Checks without reaping the process, so that its group can still be killed by its id."""
    if process.returncode is not None:
        return True
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process started with start_new_session, and all processes that it started."""
    if process.returncode is None:  # not reaped: the id still belongs to it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def kill_all(processes: set[subprocess.Popen[bytes]], owner: int) -> None:
    """Kills these groups and waits until they are gone. Does nothing in a forked copy of the owner."""
    if os.getpid() != owner:
        return
    for process in processes:
        kill_group(process)
    while processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes.pop().wait(timeout=10)


def exit_reason(process: subprocess.Popen[bytes]) -> str:
    """exited with code 3, or died of SIGSEGV"""
    code = process.returncode
    if code >= 0:
        return f"exited with code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"died of {known.get(-code, f'signal {-code}')}"
