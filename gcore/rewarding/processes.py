"""Child processes that lead a group of their own: watched, killed with all they started, and named in their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def exit_ends(process: subprocess.Popen[bytes], ours: socket.socket) -> Iterator[None]:
    """A child's exit ends the socket, even if something that it forked still holds the other end of it."""
    if not hasattr(os, "pidfd_open"):
        yield
        return
    loop = asyncio.get_running_loop()
    watch = os.pidfd_open(process.pid)

    def end() -> None:
        loop.remove_reader(watch)
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RD)  # what has arrived can still be read

    loop.add_reader(watch, end)
    try:
        yield
    finally:
        loop.remove_reader(watch)
        os.close(watch)


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Without reaping it: its group can still be killed by its number."""
    if process.returncode is not None:
        return True
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return True


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """A process started with start_new_session, and what it started."""
    if process.returncode is None:  # not reaped: the number is still its own
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def kill_all(processes: set[subprocess.Popen[bytes]], owner: int) -> None:
    """Kill these groups and wait until they are gone. A forked copy of the owner does nothing."""
    if os.getpid() != owner:
        return
    for process in processes:
        kill_group(process)
    while processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes.pop().wait(timeout=10)


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """exited with code 3, or died of SIGSEGV"""
    code = process.returncode
    if code >= 0:
        return f"exited with code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"died of {known.get(-code, f'signal {-code}')}"
