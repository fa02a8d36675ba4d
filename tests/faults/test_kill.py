"""Invariant 6: one process dies, the run ends with its name, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from gcore.observe.events import read_events
from tests.e2e.helpers import environment, write_recipe

LIMIT_S = 240  # for an event on a busy machine; no test asserts how fast it comes
# Where the fault is the subject nothing needs to be computed: engine and trainer start without torch.
EMULATED = (
    "generation.engine=emulated",
    "generation.emulated={base_s: 0.002, mean_tokens: 4}",
    "training.backend=emulated",
    "training.emulated={seconds_per_token: 1.0e-5}",
    "training.warm_start=null",
    "data.eval=null",
)


class Running:
    """A training run in a process of its own, with its output collected as it comes."""

    def __init__(self, folder: Path, *overrides: str, sigint: signal.Handlers = signal.SIG_DFL) -> None:
        """`sigint`: what the process finds as its answer to SIGINT; shells let what they start in the background ignore
        it."""
        command = [
            sys.executable,
            "-m",
            "gcore.cli",
            "train",
            str(write_recipe(folder)),
            "run.steps=100000",
            "run.max_restarts=0",
            *overrides,
        ]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            bufsize=1,
            preexec_fn=lambda: signal.signal(signal.SIGINT, sigint),
        )
        self.lines: list[str] = []
        self.family: dict[int, psutil.Process] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def _read_all(self) -> str:
        self._reader.join(timeout=30)
        return "".join(self.lines)

    def wait_for_steps(self) -> None:
        self.wait_for_line(r"step (?!.*eval).*reward")

    def wait_for_line(self, pattern: str) -> None:
        """A line that begins so."""
        deadline = time.monotonic() + LIMIT_S
        while not any(re.match(pattern, line) for line in self.lines):
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.1)
        self.family = {p.pid: p for p in psutil.Process(self.process.pid).children(recursive=True)}

    def find(self, role: str) -> psutil.Process:
        """By what the process is: the driver itself, one of Ray's own, or the actor whose command line names it."""
        if role == "driver":
            return psutil.Process(self.process.pid)
        if role in ("raylet", "gcs_server"):
            return next(p for p in self.family.values() if p.name().startswith(role))
        pids = [int(m.group(1)) for line in self.lines if (m := re.search(rf"{role} (\d+)", line))]
        return self.family[pids[0]]

    def end(self) -> str:
        """All that it printed."""
        self.process.wait(timeout=LIMIT_S)
        return self._read_all()

    def survivors(self) -> list[str]:
        """Processes of the run that do not end."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and any(alive(p) for p in self.family.values()):
            time.sleep(0.1)
        return [f"{p.pid} {p.name()}" for p in self.family.values() if alive(p)]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.fixture
def running(tmp_path, request):
    roles, sigint = getattr(request, "param", (EMULATED, signal.SIG_DFL))
    run = Running(tmp_path, "controllers=2", "placement.policy.replicas=1", *roles, sigint=sigint)
    yield run
    for process in run.family.values():
        if alive(process):
            process.kill()
    if run.process.poll() is None:
        run.process.kill()


COMPUTED = ((), signal.SIG_DFL)


def listening(processes: Iterable[psutil.Process]) -> set[str]:
    """Addresses, IPv4 also where it is mapped into IPv6."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            sockets = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            found |= {c.laddr.ip.removeprefix("::ffff:") for c in sockets}
    return found


def marked(mark: str) -> list[psutil.Process]:
    """Processes that have inherited this environment variable, under any parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError, psutil.Error):
            if f"{mark}=".encode() in path.read_bytes() and alive(process := psutil.Process(int(path.parent.name))):
                found.append(process)
    return found


@pytest.mark.parametrize(
    ("running", "role"),
    [
        (COMPUTED, "trainer-0"),
        ((EMULATED, signal.SIG_DFL), "controller-1"),
        pytest.param((EMULATED, signal.SIG_DFL), "gcs_server", marks=pytest.mark.release),
        pytest.param((EMULATED, signal.SIG_DFL), "raylet", marks=pytest.mark.release),
        pytest.param(COMPUTED, "controller-1", marks=pytest.mark.release),
    ],
    indirect=["running"],
    ids=["trainer", "controller", "gcs", "raylet", "controller-computed"],
)
def test_kill_minus_nine(running, role, tmp_path):
    running.wait_for_steps()
    time.sleep(random.random())
    running.find(role).send_signal(signal.SIGKILL)
    output = running.end()
    assert running.process.returncode == 1, output
    name = "ray" if role in ("raylet", "gcs_server") else role
    assert re.search(rf"gcore: {name} died", output), output
    gave_up = [event["cause"] for event in read_events(tmp_path / "runs" / "tiny") if event["event"] == "gave_up"]
    if name == "ray":
        assert gave_up == []
    else:
        assert output.splitlines()[-1].endswith("at most run.max_restarts=0 times per hour")
        assert len(gave_up) == 1 and gave_up[0].startswith(f"{role} died")
    assert running.survivors() == []


@pytest.mark.parametrize("role", ["raylet", pytest.param("gcs_server", marks=pytest.mark.release)])
def test_a_daemon_of_ray_that_is_stopped(running, role):
    """No role is blamed, and nothing waits for it. A role that dies then cannot be started again."""
    running.wait_for_steps()
    daemon = running.find(role)
    daemon.send_signal(signal.SIGSTOP)
    output = running.end()
    assert running.process.returncode == 1, output
    assert f"gcore: ray died: its process {role} ({daemon.pid}) is stopped (SIGSTOP)" in output
    assert running.survivors() == []


def test_kill_a_role_while_it_starts(running, tmp_path):
    """One line with its name and its log, and not Ray's text."""
    log, deadline = tmp_path / "runs" / "tiny" / "logs" / "controller-0.log", time.monotonic() + LIMIT_S
    while not (log.exists() and (started := re.search(r"controller-0, process (\d+)", log.read_text()))):
        assert running.process.poll() is None and time.monotonic() < deadline, "".join(running.lines)
        time.sleep(0.05)
    running.family = {p.pid: p for p in psutil.Process(running.process.pid).children(recursive=True)}
    os.kill(int(started[1]), signal.SIGKILL)
    output = running.end()
    line = next(line for line in output.splitlines() if line.startswith("gcore: "))
    assert running.process.returncode == 1 and "ready in" not in output, output
    assert re.match(r"gcore: controller-0 died: (its process|process \d+) is gone \(killed, crashed, or out of", line)
    assert f"its output is in {log}" in line and "class_name" not in output
    assert running.survivors() == []


@pytest.mark.parametrize("delay_s", [0.05, pytest.param(0.5, marks=pytest.mark.release)])
def test_kill_the_driver_while_ray_starts(tmp_path, monkeypatch, delay_s):
    """Agents that the raylet has just started do not see that it is gone."""
    monkeypatch.setenv(mark := f"GCORE_TEST_{os.getpid()}_{time.monotonic_ns()}", "1")
    run, deadline = Running(tmp_path, *EMULATED), time.monotonic() + LIMIT_S
    driver = psutil.Process(run.process.pid)
    while not any(p.name().startswith("raylet") for p in driver.children(recursive=True)):
        assert run.process.poll() is None and time.monotonic() < deadline, "".join(run.lines)
        time.sleep(0.01)
    time.sleep(delay_s)
    assert len(marked(mark)) > 2
    driver.kill()
    run.process.wait(timeout=LIMIT_S)
    deadline = time.monotonic() + 60
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        process.kill()
    assert left == []


def test_one_machine_listens_on_loopback_only(running):
    running.wait_for_steps()
    assert listening([psutil.Process(running.process.pid), *running.family.values()]) == {"127.0.0.1"}


def test_kill_the_driver(running):
    running.wait_for_steps()
    time.sleep(random.random())
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait(timeout=LIMIT_S)
    assert running.survivors() == []


@pytest.mark.parametrize(
    ("running", "sent"),
    [
        ((EMULATED, signal.SIG_DFL), signal.SIGINT),
        pytest.param((EMULATED, signal.SIG_IGN), signal.SIGTERM, marks=pytest.mark.release),  # nohup gcore train ... &
    ],
    indirect=["running"],
    ids=["SIGINT", "SIGTERM"],
)
def test_interrupted(running, sent):
    running.wait_for_steps()
    running.process.send_signal(sent)
    output = running.end()
    assert running.process.returncode == 130, output
    assert "interrupted" in output and "Traceback" not in output
    assert running.survivors() == []


def test_a_role_that_raises_names_itself(tmp_path):
    """A filter that breaks in the third step: the first traceback and the role, not a chorus. A workflow that raises
    costs its prompt instead, and ends the run as the user's error when too many do."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        "def keep(group):\n    if group[0].rollout.prompt.id > 30: raise KeyError('lost')\n    return True\n"
    )
    run = Running(tmp_path, "controllers=2", *EMULATED, f"sampling.filter={broken}:keep")
    output = run.end()
    assert run.process.returncode == 1, output
    assert re.search(r"first traceback, from controller-\d:\n", output) and output.count("Traceback (most recent") == 1
    assert "KeyError: 'lost'" in output
