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


class _RunThread(threading.Thread):
    """A run in a notebook, whose thread has an event loop already."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name="gcore-run", daemon=True)
        self._function, self.done = function, Future[Any]()
        self.cancel: Callable[[], Any] | None = None  # the task of the run
        self.is_interrupted = False  # the run must end, also if it has no task yet

    def run(self) -> None:
        try:
            self.done.set_result(self._function())
        except BaseException as error:
            self.done.set_exception(error)


def outside_of_loops(function: Callable[[], Any]) -> Any:
    """Call the function, which runs an event loop. In a notebook this thread has one already: then use another."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    thread = _RunThread(function)
    try:
        thread.start()
        return thread.done.result()
    except KeyboardInterrupt:
        if not thread.done.done():
            thread.is_interrupted = True  # first: `end_at_signals` looks at it last
            if thread.cancel is not None:
                thread.cancel()
                wait([thread.done])  # until all processes are stopped
        raise


def end_at_signals() -> None:
    """SIGTERM cancels the current task like Ctrl-C. It does not raise SIGINT, which processes in the background
    ignore. In a thread, where signals do not arrive, `outside_of_loops` cancels it."""
    task, loop, thread = asyncio.current_task(), asyncio.get_running_loop(), threading.current_thread()
    assert task is not None
    if thread is threading.main_thread():
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    elif isinstance(thread, _RunThread):
        thread.cancel = partial(loop.call_soon_threadsafe, task.cancel)
        if thread.is_interrupted:  # during the checks before the run
            task.cancel()
