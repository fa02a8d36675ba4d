"""How a run is ended from outside: by SIGTERM, or by Ctrl-C where the caller has an event loop of its own.

command line, script   run ──> event loop in the main thread          SIGTERM, Ctrl-C ──> task.cancel
notebook               run ──> thread ──> its own event loop          Ctrl-C in the main thread ──> task.cancel
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

_cancel_of: dict[int, Callable[[], Any]] = {}  # thread -> how to cancel the run in it
_interrupted: set[int] = set()  # threads whose run must end, also if it has no event loop yet


def outside_of_loops(function: Callable[[], Any]) -> Any:
    """Call the function, which runs an event loop. In a notebook this thread has one already: then use another."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    done: Future[Any] = Future()

    def work() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)
        finally:
            _cancel_of.pop(threading.get_ident(), None)
            _interrupted.discard(threading.get_ident())

    thread = threading.Thread(target=work, name="gcore-run", daemon=True)
    try:
        thread.start()
        return done.result()
    except KeyboardInterrupt:
        if not done.done():
            _interrupted.add(thread.ident or 0)  # first: `end_at_signals` looks at it last
            if cancel := _cancel_of.get(thread.ident or 0):
                cancel()
                wait([done])  # until all processes are stopped
        raise


def end_at_signals() -> None:
    """SIGTERM cancels the current task like Ctrl-C. It does not raise SIGINT, which processes in the background
    ignore. In a thread, where signals do not arrive, `outside_of_loops` cancels it."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    else:
        _cancel_of[threading.get_ident()] = partial(loop.call_soon_threadsafe, task.cancel)
        if threading.get_ident() in _interrupted:  # during the checks before the run
            task.cancel()
