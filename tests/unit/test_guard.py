"""The guard of a run's processes, after a kill of their driver."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

DRIVER = """
import os, subprocess, sys, time
from gcore.runtime.guard import Guard
Guard()
logs = f"{sys.argv[1]}/ray/session_2026-11-19_01-38-21_180090_{os.getpid()}/logs"
os.makedirs(logs)
shell = subprocess.Popen(["sh", "-c", sys.argv[2], logs], stdout=subprocess.PIPE, text=True)
print(shell.stdout.readline(), flush=True)
time.sleep(1000)
"""
HIDDEN = {  # a child without the mark, as one that overwrote it
    "its parent lives": ("env -i sh -c 'echo '$$' $$; exec sleep 1000' & exec sleep 1000", 2),
    "its parent has ended": ("env -i sh -c 'echo $$; exec sleep 1000' 3>>$0/raylet.out &", 1),
}


@pytest.mark.parametrize("how", HIDDEN)
def test_processes_that_were_not_registered_end_with_the_driver(how: str, tmp_path: Path) -> None:
    """Also a child of one of them that does not have the mark in its environment."""
    shell, num = HIDDEN[how]
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path), shell], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    left = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    assert len(left) == num and all(process.is_running() for process in left)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 60
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [p.pid for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
