"""Child processes that lead their own process group: watch them, kill the whole group, describe how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator


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
