"""The main program of a reward worker: a child process that calls users' functions. Its parent can kill it.

    socket ──reader thread──> sync functions:  a queue ──> main thread, one call at a time (signal.alarm works there)
                              async functions: the event loop of the main thread, many calls at once
    end of the socket: the parent is gone. The reader kills this process and all processes that it started.

A frame is a length and a pickle. The parent sends one setup frame, then calls; answers contain the calls' numbers.
This module imports neither torch nor ray; users' functions may.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from gcore.observe.logs import print_without_errors
from gcore.rewarding.functions import Adapter, Instance, load_reward
from gcore.rewarding.source import BadAnswer, short
from gcore.types import RewardError, UserError

HEADER = struct.Struct(">Q")
READY, ANSWER, BAD, REFUSED = "ready", "answer", "bad", "refused"  # kinds of replies: (number, kind, value, traceback)
CALL, CANCEL = "call", "cancel"  # kinds of requests: (CALL, number, function, siblings, arguments), (CANCEL, number)


def frame(value: Any) -> bytes:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(data)) + data


class Connection:
    """The child's end of the socket."""

    def __init__(self, fileno: int):
        os.set_inheritable(fileno, False)  # processes started by a function must not keep the socket open
        self.socket = socket.socket(fileno=fileno)
        self.stream = self.socket.makefile("rb")
        self.pid = os.getpid()

    def receive(self) -> Any:
        (size,) = HEADER.unpack(self._read(HEADER.size))
        return pickle.loads(self._read(size))

    def send(self, value: Any) -> None:
        if os.getpid() != self.pid:  # a function forked and the child returned here too: only the parent answers
            os._exit(0)
        self.socket.sendall(frame(value))

    def _read(self, size: int) -> bytes:
        data = self.stream.read(size)
        if len(data) < size:
            raise EOFError
        return data


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    path, environment, functions, is_async = connection.receive()
    sys.path[:] = path
    os.environ.pop("PYTHONPATH", None)  # it was set only to find this module
    os.environ.update(environment)
    print_without_errors()
    serve = _Async(connection) if is_async else _Sync(connection)
    threading.Thread(target=_watch, args=(connection, serve.deliver), daemon=True).start()
    try:
        adapters = {index: load_reward(*what) for index, what in functions.items()}
        for adapter in adapters.values():
            if isinstance(adapter.function, Instance):
                adapter.function.make()  # counts in the start timeout, not in the first call's timeout
    except BaseException as error:
        message = str(error) if isinstance(error, UserError) else _failure(error)[1]
        connection.send((0, BAD, message, ""))
        return
    connection.send((0, READY, None, ""))
    serve.forever(adapters)


def _watch(connection: Connection, deliver: Callable[[Any], None]) -> None:
    try:
        while True:
            deliver(connection.receive())
    finally:
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


class _Sync:
    def __init__(self, connection: Connection):
        self.connection = connection
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.deliver = self.requests.put

    def forever(self, adapters: Mapping[int, Adapter]) -> None:
        while True:
            _, number, function, siblings, arguments = self.requests.get()
            _reply(self.connection, number, self._run(adapters[function], siblings, arguments))
            signal.alarm(0)  # an alarm left by a function would fire in the next call

    def _run(self, adapter: Adapter, siblings: int, arguments: bytes) -> tuple[str, Any, str]:
        try:
            answers = [adapter.invoke(call) for call in pickle.loads(arguments)]
            if any(inspect.isawaitable(answer) for answer in answers):
                answers = asyncio.run(_await_all(answers))
            answer = adapter.read(answers, siblings)
            return ANSWER, (answer.values, answer.extras), ""
        except BaseException as error:  # includes SystemExit: sys.exit() in a function is a failed call
            return _failure(error)


class _Async:
    def __init__(self, connection: Connection):
        self.connection = connection
        self.loop = asyncio.new_event_loop()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.adapters: Mapping[int, Adapter] = {}

    def deliver(self, request: Any) -> None:
        self.loop.call_soon_threadsafe(self._take, request)

    def forever(self, adapters: Mapping[int, Adapter]) -> None:
        self.adapters = adapters
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _take(self, request: Any) -> None:
        match request:
            case (str(kind), int(number), *what) if kind == CALL:
                self.tasks[number] = self.loop.create_task(self._run(number, *what))
            case (str(kind), int(number)) if kind == CANCEL and number in self.tasks:
                self.tasks[number].cancel()

    async def _run(self, number: int, function: int, siblings: int, arguments: bytes) -> None:
        adapter = self.adapters[function]
        try:
            answers = await _await_all([adapter.invoke(call) for call in pickle.loads(arguments)])
            answer = adapter.read(answers, siblings)
            reply = ANSWER, (answer.values, answer.extras), ""
        except BaseException as error:  # a cancelled call answers too: the parent waits for its end
            reply = _failure(error)
        del self.tasks[number]
        _reply(self.connection, number, reply)


async def _await_all(answers: list[Any]) -> list[Any]:
    async def same(value: Any) -> Any:
        return value

    return list(await asyncio.gather(*(a if inspect.isawaitable(a) else same(a) for a in answers)))


def _reply(connection: Connection, number: int, reply: tuple[str, Any, str]) -> None:
    try:
        connection.send((number, *reply))
    except OSError:
        raise
    except Exception as error:  # extras under names that do not pickle
        connection.send((number, *_failure(error)))


def _failure(error: BaseException) -> tuple[str, Any, str]:
    """The error as text: an exception may not pickle, and its class may not exist in the parent."""
    if isinstance(error, RewardError):
        return REFUSED, str(error), ""
    if isinstance(error, BadAnswer):
        return BAD, str(error), ""
    try:
        text = short(error)
    except BaseException:  # a user's __repr__ may raise
        text = type(error).__name__
    try:
        trace = "".join(traceback.format_exception(error))[-4000:]
    except BaseException:
        trace = ""
    return BAD, f"raised {text}", trace


if __name__ == "__main__":
    main()
