"""The guard of a run's processes, after a kill of their driver."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil

DRIVER = """
import os, subprocess, time
from gcore.runtime.guard import Guard
Guard()
hidden = "env -i sleep 1000 & echo $!; exec sleep 1000"  # a child without the mark, as one that overwrote it
shell = subprocess.Popen(["sh", "-c", hidden], stdout=subprocess.PIPE, text=True)
print(shell.pid, shell.stdout.readline(), flush=True)
time.sleep(1000)
"""


def test_processes_that_were_not_registered_end_with_the_driver():
    """Also a child of one of them that does not have the mark in its environment."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    left = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    assert len(left) == 2 and all(process.is_running() for process in left)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 60
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [p.pid for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
