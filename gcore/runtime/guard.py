"""A small process that ends a private Ray cluster if its driver dies without clean-up (kill -9).

It reads lines `PID CREATED` from a pipe. The pipe closes when the driver ends for any reason. Then the guard kills the
processes of these lines that are still running, those whose environment has the mark of this guard, and those that have
a log file of the driver's Ray session open: processes that the driver did not see before it died, because they had just
been started. Ray's agents overwrite their environment with a title, and the raylet, their parent, dies with the driver.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

GRACE_S = 1.0  # for processes that end by themselves
CHECK_S = 0.2
CHECKS = 5  # without a process that is left: one that is starting has its mark from its parent
LIMIT_S = 60.0
MARK = "GCORE_GUARD"  # environment variable


class Guard:
    """The driver's side: starts the guard process and sends it the processes to kill. Create it before all of these:
    they must inherit the mark."""

    def __init__(self, lock: Sequence[int] = ()) -> None:
        """`lock`: descriptors of a lock that the guard holds as long as it lives: no other run starts before that."""
        os.environ[MARK] = secrets.token_hex(16)
        command = [sys.executable, "-m", "gcore.runtime.guard", str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, start_new_session=True, pass_fds=lock
        )
        self._registered: set[int] = set()
        self.pid = self._process.pid

    def register(self, processes: Iterable[psutil.Process]) -> None:
        new = [p for p in processes if p.pid not in self._registered]
        if new and self._process.stdin is not None:
            self._registered |= {p.pid for p in new}
            with contextlib.suppress(OSError):
                self._process.stdin.write("".join(f"{p.pid} {p.create_time()}\n" for p in new))
                self._process.stdin.flush()

    def dismiss(self) -> None:
        """End the guard process: all registered processes have ended."""
        self._process.kill()
        self._process.wait()


def _left(known: dict[int, float], mark: bytes, log: re.Pattern[str]) -> list[psutil.Process]:
    """Processes to kill. Those that are seen here, and their children, are known from then on: one that changes its
    title may overwrite the mark in its environment."""
    left = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            is_known = pid in known and abs(process.create_time() - known[pid]) < 1
            if is_known or _has_mark(pid, mark) or _has_open(pid, log):
                left.append(process)
                for seen in (process, *process.children(recursive=True)):
                    known.setdefault(seen.pid, seen.create_time())
    return left


def _has_mark(pid: int, mark: bytes) -> bool:
    """Where there is /proc. The bytes themselves: programs that change their title overwrite a part of it."""
    with contextlib.suppress(OSError):
        return mark in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _has_open(pid: int, log: re.Pattern[str]) -> bool:
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if log.search(os.readlink(file)):
                return True
    return False


def main() -> None:
    log = re.compile(rf"/session_[\d_-]+_{sys.argv[1]}/logs/")  # Ray names a session after its driver
    known: dict[int, float] = {}
    for line in sys.stdin:
        pid, created = line.split()
        known[int(pid)] = float(created)
    mark, checks, began = f"{MARK}={os.environ[MARK]}".encode(), 0, time.monotonic()
    while checks < CHECKS and time.monotonic() < began + LIMIT_S:
        left = _left(known, mark, log)
        if time.monotonic() > began + GRACE_S:
            checks = 0 if left else checks + 1
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        time.sleep(CHECK_S)


if __name__ == "__main__":
    main()
