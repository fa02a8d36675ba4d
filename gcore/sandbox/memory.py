"""The memory of all processes of a sandbox together: a cgroup where one can be made, else a watch of the processes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
_numbers = itertools.count()


@functools.cache
def group_folder() -> Path | None:
    """A folder where this process may make memory cgroups: of version 1, or delegated ones of version 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, kinds, own = line.split(":", 2)
        if kinds == "":
            roots = [CGROUPS, CGROUPS / "unified"]
            folders = [folder for root in roots for folder in (root / own.strip("/"), (root / own.strip("/")).parent)]
        elif "memory" in kinds.split(","):
            folders = [CGROUPS / "memory" / own.strip("/"), CGROUPS / "memory"]
        else:
            continue
        for folder in folders:
            if CGROUPS in (folder, *folder.parents) and (group := make_group(folder, 1 << 30)) is not None:
                remove_group(group)
                remove_stale_groups(folder)
                return folder
    return None


def remove_stale_groups(folder: Path) -> None:
    """Groups of workers that were killed. Only empty ones can be removed."""
    for group in folder.glob("gcore-sandbox-*-*"):
        if not Path("/proc", group.name.split("-")[2]).exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def new_group(memory_bytes: int) -> Path | None:
    folder = group_folder()
    return None if folder is None else make_group(folder, memory_bytes)


def has_killed(group: Path) -> bool:
    return num_killed(group) > 0


def num_killed(group: Path) -> int:
    """Processes of the group that the kernel has killed because of its memory."""
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(OSError):
            counts = (line.split() for line in (group / name).read_text().splitlines())
            return sum(int(count) for name, count in counts if name == "oom_kill")
    return 0


def make_group(folder: Path, memory_bytes: int) -> Path | None:
    group = folder / f"gcore-sandbox-{os.getpid()}-{next(_numbers)}"
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / name).write_text(str(memory_bytes))
        for name, value in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", memory_bytes)):
            with contextlib.suppress(OSError):
                (group / name).write_text(str(value))
        with (group / "cgroup.procs").open("a"):  # may processes be moved into it?
            return group
    except OSError:
        remove_group(group)
        return None


def remove_group(group: Path) -> None:
    """Kills what is left in it: also processes that have left the process group."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.005)


def memory_of(root: int, enough: int) -> int:
    """Bytes of the process and of all processes that it started. Pages that several share are counted once, if their
    sum would be above `enough`."""
    pids = _tree(root)
    resident = sum(resident_bytes(pid) for pid in pids)
    return resident if resident <= enough else sum(share_bytes(pid) for pid in pids)


def _tree(root: int) -> list[int]:
    pids, waiting = list[int](), [root]
    while waiting:
        pids.append(pid := waiting.pop())
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                waiting += map(int, task.read_text().split())
    return pids


def resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def share_bytes(pid: int) -> int:
    """Its part of the pages that it shares; all of them, if it hides its pages."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return resident_bytes(pid)
