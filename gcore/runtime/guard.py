"""A small process that ends a private Ray cluster if its driver dies without clean-up (kill -9).

It reads lines `PID CREATED` from a pipe. The pipe closes when the driver ends for any reason. Then the guard kills the
processes of these lines that are still running.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterable

import psutil

GRACE_S = 1.0


class Guard:
    """The driver's side: starts the guard process and sends it the processes to kill."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gcore.runtime.guard"], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        self._registered: set[int] = set()
        self.pid = self._process.pid

    def register(self, processes: Iterable[psutil.Process]) -> None:
        new = [p for p in processes if p.pid not in self._registered and p.pid != self.pid]
        if new and self._process.stdin is not None:
            self._registered |= {p.pid for p in new}
            with contextlib.suppress(OSError):
                self._process.stdin.write("".join(f"{p.pid} {p.create_time()}\n" for p in new))
                self._process.stdin.flush()

    def dismiss(self) -> None:
        """End the guard process: all registered processes have ended."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    known: dict[int, float] = {}
    for line in sys.stdin:
        pid, created = line.split()
        known[int(pid)] = float(created)
    time.sleep(GRACE_S)
    for pid, created_at in known.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(process.create_time() - created_at) < 1:
                process.kill()


if __name__ == "__main__":
    main()
