"""Injected faults, for tests: when a role reaches a moment, its process is killed, stopped, delayed or gets an error.

    faults: {plan: [{kind: kill, role: trainer-0, at: update, nth: 3}]}

Moments are the calls that a role receives (`generate`, `update`, `weight_bucket`, ...), the stages of a controller
(`rollout`, `preparation`, `training`, `weights`, `checkpoint`), before and after each file of a checkpoint (`file`,
`written`), and the calls that a role makes (`reward:NAME`, `to:ROLE`, `to:ROLE:CALL`). Each fault occurs once per run.
It is written to events.jsonl before it acts, so that a test can check that it occurred, and a restarted process does
not repeat it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gcore.config.run import Fault
from gcore.observe.events import EventLog, read_events


class FaultPlan:
    """The faults of one role."""

    def __init__(self, faults: Sequence[Fault], role: str, folder: Path) -> None:
        self._faults = [(i, fault) for i, fault in enumerate(faults) if fault.role == role]
        self._role, self._folder = role, folder
        self._reached: Counter[str] = Counter()
        self._calls_left: Counter[int] = Counter()  # that fail, by index of the fault

    def reach(self, moment: str, path: Path | None) -> None:
        for _, fault in self._due(moment):
            _act(fault, path)

    def failing(self, moment: str) -> Fault | None:
        """The fault that applies to this call, if any."""
        for index, fault in self._due(moment):
            self._calls_left[index] = fault.calls
        for index, fault in self._faults:
            if fault.at == moment and self._calls_left[index]:
                self._calls_left[index] -= 1
                return fault
        return None

    def _due(self, moment: str) -> list[tuple[int, Fault]]:
        """The faults that begin now. They are recorded."""
        self._reached[moment] += 1
        beginning = []
        for index, fault in self._faults:
            if fault.at == moment and fault.nth == self._reached[moment] and not self._has_occurred(index):
                EventLog(self._folder).add("fault", index=index, kind=fault.kind, role=self._role, at=moment)
                beginning.append((index, fault))
        return beginning

    def _has_occurred(self, index: int) -> bool:
        return any(event["event"] == "fault" and event["index"] == index for event in read_events(self._folder))


def _act(fault: Fault, path: Path | None) -> None:
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "slow":
            time.sleep(fault.seconds)
        case "error":
            raise RuntimeError("injected error")
        case "disk_full":
            raise OSError(errno.ENOSPC, "injected: no space left on device")
        case "short_write":
            assert path is not None
            os.truncate(path, path.stat().st_size // 2)
        case "flip_byte":
            assert path is not None
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))


_plan = FaultPlan((), "", Path())  # without faults nothing happens at any moment


def arm(faults: Sequence[Fault], role: str, folder: Path) -> None:
    """Call when a role is built."""
    global _plan
    _plan = FaultPlan(faults, role, folder)


def reach(moment: str, path: Path | None = None) -> None:
    """`path`: the file that was written."""
    _plan.reach(moment, path)


async def reach_call(*moments: str) -> None:
    """Before a call that this process makes. Raises ConnectionError if the call must fail."""
    for moment in moments:
        if (fault := _plan.failing(moment)) is not None:
            await asyncio.sleep(fault.seconds)
            if fault.kind != "slow":
                raise ConnectionError(f"injected {fault.kind} of {moment}")
