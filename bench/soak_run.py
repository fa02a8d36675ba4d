"""A run of `gcore train` for bench/soak.py: its processes, signals to them, their memory, and what they leave behind.

Linux only: processes are read from /proc. A start of a run has a mark in its environment and a folder of its own for
Ray's session, so that all of its processes are found, whatever session, group or parent they have.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gcore.checkpoint import memory, store
from gcore.observe.files import whole_lines
from gcore.observe.metrics import FILE

ROOT = Path(__file__).resolve().parents[1]
MARK = "GCORE_SOAK"
TAIL_BYTES = 32768  # of metrics.jsonl: more than one row
GONE_S = 30.0  # after the end of the driver: a process that is left then is an orphan
RAY = {  # part of the first words of a command line -> what it is
    "dashboard/dashboard.py": "dashboard",
    "autoscaler/_private/monitor.py": "autoscaler",
    "log_monitor.py": "log monitor",
    "ray::DashboardAgent": "dashboard agent",
    "dashboard/agent.py": "dashboard agent",
    "ray::RuntimeEnvAgent": "runtime env agent",
    "runtime_env/agent": "runtime env agent",
    "gcore.runtime.guard": "guard",
    "gcore.cli": "driver",
}


class Run:
    """One start of `gcore train`. Output goes to a file beside the folder of the run."""

    def __init__(self, recipe: Path, scratch: Path, folder: Path, *overrides: str) -> None:
        """`scratch`: for the output and Ray's session. `folder`: of the run; it may exist, and be on another disk."""
        number = len(list(scratch.glob("*.out")))
        self.folder, self.output = folder, scratch / f"{number}.out"
        self._ray = scratch / f"r{number}"  # short: the path of a socket has at most 107 bytes
        self._mark = f"{MARK}={secrets.token_hex(8)}".encode()
        places = f"run.dir={folder.parent}", f"run.name={folder.name}"
        self.environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self.environment |= {MARK: self._mark.decode().partition("=")[2], "RAY_TMPDIR": str(self._ray)}
        self.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gcore.cli", "train", str(recipe), *places, *overrides],
                cwd=ROOT,
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    # ---- what it does -----------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def last_line(self) -> str:
        return next((line for line in reversed(self.text.splitlines()) if line.strip()), "")

    def steps(self) -> int:
        """Steps whose metrics are written."""
        with contextlib.suppress(OSError), (self.folder / FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            for line in reversed(file.read().split(b"\n")[:-1]):
                if b'"samples_digest"' in line and line.startswith(b"{"):
                    with contextlib.suppress(ValueError):
                        return int(json.loads(line)["step"])
        return 0

    def wait_for(self, event: Any, limit_s: float) -> bool:
        """Until `event()` is true. False: the run ended before, or it took too long."""
        deadline = time.monotonic() + limit_s
        while not self.ended and time.monotonic() < deadline:
            if event():
                return True
            time.sleep(0.02)
        return False

    def wait(self, limit_s: float) -> int | None:
        """The exit code; None: it has not ended within this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(limit_s)
        return None

    # ---- its processes ----------------------------------------------------------------------------------------------

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Those that are alive, by name: `engine-0`, `driver`, `gcs_server`; `rewards-0` are the reward workers of
        controller 0."""
        found = defaultdict(list)
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                words = process.cmdline()
                if self._is_own(process.pid, words) and process.status() != psutil.STATUS_ZOMBIE:
                    found[self._name(process, " ".join(words[:4]))].append(process)
        return dict(found)

    def _is_own(self, pid: int, words: list[str]) -> bool:
        with contextlib.suppress(OSError):
            if self._mark in Path(f"/proc/{pid}/environ").read_bytes():  # titles of Ray overwrite a part of it
                return True
        return any(f"{self._ray}/ray" in word for word in words)

    def _name(self, process: psutil.Process, words: str) -> str:
        with contextlib.suppress(OSError):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            if log.parent == self.folder.resolve() / "logs" and log.suffix == ".log":
                return log.stem
        if (name := process.name()) in ("gcs_server", "raylet"):
            return name
        return next((name for part, name in RAY.items() if part in words), words[:40])

    def announced(self) -> dict[str, psutil.Process]:
        """The roles that the run has called ready and that are alive and not stopped: later lines replace earlier ones.
        With the reward workers of each controller."""
        pids: dict[str, int] = {}
        for line in self.text.splitlines():
            if line.startswith("process ids: "):
                pids |= {role: int(pid) for role, pid in re.findall(r"(\S+) (\d+)(?:,|$)", line)}
            elif match := re.match(r"(\S+) is restarted, .* process (\d+)", line):
                pids[match[1]] = int(match[2])
        found = {}
        for role, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                found[role] = psutil.Process(pid)
                for number, child in enumerate(found[role].children() if role.startswith("controller-") else ()):
                    if "gcore.rewarding.worker" in child.cmdline():
                        found[f"worker-{role.rpartition('-')[2]}-{number}"] = child
        return {role: process for role, process in found.items() if _runs(process)}

    def left(self, limit_s: float = GONE_S) -> list[str]:
        """After the end of the driver: names of the processes that do not end. They are killed."""
        assert self.ended
        deadline = time.monotonic() + limit_s
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.kill()
        return [name for name, processes in found.items() for _ in processes]

    def kill(self) -> None:
        """All of its processes."""
        for processes in self.processes().values():
            for process in processes:
                signalled(process, "kill")
        self.process.kill()
        self.process.wait()


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED, psutil.STATUS_DEAD)
    return False


def signalled(process: psutil.Process, kind: str) -> bool:
    """`kill` or `stop`. False: it is gone."""
    with contextlib.suppress(psutil.Error):
        process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        return True
    return False


# ---- memory ---------------------------------------------------------------------------------------------------------


def anonymous_mb(process: psutil.Process) -> float | None:
    """Memory that belongs to this process alone, resident or swapped: RssAnon + VmSwap. Without files and shared
    memory, whose pages become resident when they are first read."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process.pid}/status").read_text()
        if found := re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", text, re.MULTILINE):
            return sum(map(int, found)) / 1024
    return None


def theil_sen(xs: Any, ys: Any) -> float:
    """The median of the slopes between all pairs of points."""
    xs, ys = np.asarray(xs, float), np.asarray(ys, float)
    left, right = np.triu_indices(len(xs), 1)
    apart = xs[right] > xs[left]
    return float(np.median((ys[right] - ys[left])[apart] / (xs[right] - xs[left])[apart]))


# ---- files ----------------------------------------------------------------------------------------------------------


def damaged_files(folder: Path, steps: int) -> list[str]:
    """What is wrong with the files of a run that has ended after this step."""
    problems = []
    for path in [folder / FILE, folder / "events.jsonl", *folder.glob("samples/*.jsonl")]:
        if path.exists() and (torn := len(path.read_bytes().splitlines()) - len(list(whole_lines(path)))):
            problems.append(f"{path.name} has {torn} torn lines")
    try:
        json.loads((folder / "trace.json").read_bytes())
    except (OSError, ValueError) as error:
        problems.append(f"trace.json: {error}")
    if not (folder / "report.html").is_file():
        problems.append("there is no report.html")
    checkpoints = memory.complete_checkpoints(folder)
    if not checkpoints or checkpoints[-1].name != f"step_{steps}":
        problems.append(f"there is no checkpoint of step {steps}")
    problems += [f"{path.name}: {name} is damaged" for path in checkpoints if (name := store.first_damaged_file(path))]
    problems += [f"{path.name} is left" for path in folder.glob("*.partial")]
    return problems


def left_in_memory(folder: Path) -> list[str]:
    """Checkpoints in shared memory that belong to runs in this folder."""
    owners = memory.SHARED_MEMORY.glob(f"{memory.PREFIX}*/{memory.OWNER}")
    return [owner.parent.name for owner in owners if str(folder) in owner.read_text()]


if __name__ == "__main__":  # a part of other benches
    print(__doc__)
