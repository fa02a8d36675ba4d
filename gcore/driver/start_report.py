"""What the driver shows while the processes of a run start: how many of each kind are ready, and how long each took."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping
from typing import Any, TypeVar

from gcore.observe.progress import Progress, Status
from gcore.runtime.protocol import Runtime

START_POLL_S = 0.5  # between two polls of the processes
START_LINES_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # between two lines about the start, if the view is not live
C = TypeVar("C")


async def reporting_start(
    starting: Coroutine[Any, Any, C], runtime: Runtime, wanted: Mapping[str, int], progress: Progress
) -> C:
    """Await `starting` and return its result. Until then, show how many processes of each kind are ready; at the end,
    after how many seconds each kind was."""
    task = asyncio.ensure_future(starting)
    pauses, began = itertools.chain(START_LINES_S, itertools.repeat(START_LINES_S[-1])), time.monotonic()
    due, seconds = next(pauses), dict[str, float]()
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=START_POLL_S)
            waited, ready = time.monotonic() - began, runtime.ready()
            seconds |= dict.fromkeys(set(ready_kinds(wanted, ready)) - set(seconds), waited)
            if done:
                break
            statuses = starting_statuses(wanted, runtime.processes(), ready)
            if progress.mode == "live":
                progress.update(statuses)
            elif waited >= due:
                due = waited + next(pauses)
                lines = "; ".join(f"{status.role} {status.detail}" for status in statuses)
                progress.note(f"starting, {waited:.0f} s: {lines}")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    result = task.result()
    if seconds:
        slowest_first = sorted(seconds.items(), key=lambda item: -item[1])
        progress.note("seconds until ready: " + ", ".join(f"{kind} {s:.0f}" for kind, s in slowest_first))
    return result


def starting_statuses(wanted: Mapping[str, int], up: Collection[str], ready: Collection[str]) -> list[Status]:
    """One per kind of process: Status("engine", "starting", "2 of 8 ready, 3 loading", 0)"""
    running, built = (Counter(name.rpartition("-")[0] for name in names) for names in (up, ready))
    found = []
    for kind, count in wanted.items():
        more = max(0, running[kind] - built[kind])  # processes of the last start may end in between
        detail = f"{built[kind]} of {count} ready" + (f", {more} loading" if more else "")
        found.append(Status(kind, "starting", detail, 0))
    return [status for status in found if wanted[status.role]]


def ready_kinds(wanted: Mapping[str, int], ready: Collection[str]) -> list[str]:
    """The kinds of which all processes are ready."""
    built = Counter(name.rpartition("-")[0] for name in ready)
    return [kind for kind, count in wanted.items() if count and built[kind] >= count]
