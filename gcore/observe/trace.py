"""Timelines: each role writes its spans, the driver merges them into one file for Perfetto (ui.perfetto.dev).

    Tracer ──> trace/engine-0.jsonl, trace/controller-1.jsonl, ... ──merge_traces──> trace.json

A role only appends its spans. The merge assigns spans to rows, when the end of each span is known: overlapping spans
(a controller has thousands of samples in progress) then never share a row, at no cost for the roles.
"""

from __future__ import annotations

import heapq
import io
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gcore.observe.files import LineFile, parsed_line, replacing
from gcore.observe.values import clean

FLUSH_EVENTS = 1000
FLUSH_SECONDS = 5.0  # a killed role loses at most this time
MAIN = "main"
ORDER = ("driver", "controller", "engine", "trainer", "critic")
Event = dict[str, Any]


class Tracer:
    """`with Tracer(folder, "controller-1").span("generation", step=3): ...`. With folder=None it does nothing."""

    def __init__(self, folder: Path | None, role: str):
        self._file = None if folder is None else LineFile(folder / "trace" / f"{role.replace('/', '_')}.jsonl")
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._flushed = time.monotonic()

    @contextmanager
    def span(self, name: str, *, lane: str = MAIN, **args: Any) -> Iterator[None]:
        """Safe in any thread or task. A span that ends by an exception records its type."""
        if self._file is None:
            yield
            return
        start, started = time.time_ns(), time.perf_counter_ns()
        try:
            yield
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            # The length is measured by the monotonic clock, because the system clock may be adjusted.
            self._add(name, start, start + time.perf_counter_ns() - started, lane, args)

    def _add(self, name: str, start_ns: int, end_ns: int, lane: str, args: dict[str, Any]) -> None:
        if self._file is None:
            return
        event: Event = {"name": name, "lane": lane, "start": start_ns // 1000, "end": max(start_ns, end_ns) // 1000}
        if args:
            event["args"] = clean(args)
        with self._lock:
            self._lines.append(json.dumps(event))
            due = len(self._lines) >= FLUSH_EVENTS or time.monotonic() - self._flushed > FLUSH_SECONDS
        if due:
            self.flush()

    def flush(self) -> None:
        if self._file is None:
            return
        with self._lock:
            lines, self._lines = self._lines, []
            self._flushed = time.monotonic()
            if lines:
                self._file.append(lines)


def merge_traces(folder: Path) -> Path | None:
    """Writes folder/trace.json in Chrome's format, one process per role, unless it has all spans; None if there are no
    spans.

    One role is in memory at a time. The files of the roles stay, so that a resumed run appends to them.
    """
    paths, target = _files(folder), folder / "trace.json"
    earliest = _earliest(paths)
    if earliest is None:
        return None
    if target.exists() and all(path.stat().st_mtime_ns < target.stat().st_mtime_ns for path in paths):
        return target
    with replacing(target) as binary, io.TextIOWrapper(binary, "utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for pid, path in enumerate(paths, start=1):
            for event in _chrome(path.stem, pid, list(_read(path)), earliest):
                file.write(separator + json.dumps(event))
                separator = ",\n"
        file.write("\n]}\n")
    return target


def spans_of(folder: Path) -> Iterator[tuple[str, Event]]:
    """(role, span) of a run; `start` and `end` are seconds since the earliest start."""
    paths = _files(folder)
    if (earliest := _earliest(paths)) is not None:
        for path in paths:
            for event in _read(path):
                times = {name: (event[name] - earliest) / 1e6 for name in ("start", "end")}
                yield path.stem, {**event, **times}


def _files(folder: Path) -> list[Path]:
    found = (path for path in (folder / "trace").glob("*.jsonl") if path.is_file())
    return sorted(found, key=lambda path: _rank(path.stem))


def _earliest(paths: Sequence[Path]) -> int | None:
    return min((event["start"] for path in paths for event in _read(path)), default=None)


def lowest_free_lanes(spans: Sequence[tuple[int, int]]) -> list[int]:
    """For spans (start, end) ordered by start: the lowest lane that is free at the start, from 0.

    >>> lowest_free_lanes([(0, 10), (2, 4), (3, 8), (4, 6), (10, 12)])
    [0, 1, 2, 1, 0]
    """
    lanes: list[int] = []
    busy: list[tuple[int, int]] = []  # (end, lane)
    free: list[int] = []
    for start, end in spans:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes


def _chrome(role: str, pid: int, events: list[Event], earliest: int) -> Iterator[Event]:
    def about(tid: int, what: str, **args: Any) -> Event:
        return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}

    def span(event: Event, tid: int) -> Event:
        times = {"ts": event["start"] - earliest, "dur": event["end"] - event["start"]}
        return {"ph": "X", "pid": pid, "tid": tid, "name": event["name"], **times, "args": event.get("args", {})}

    yield about(0, "process_name", name=role)
    yield about(0, "process_sort_index", sort_index=pid)
    spans = sorted(events, key=lambda e: (e["start"], -e["end"]))
    tid = 1
    for lane in sorted({e["lane"] for e in spans}, key=lambda lane: (lane != MAIN, lane)):
        members = [e for e in spans if e["lane"] == lane]
        rows = lowest_free_lanes([(e["start"], e["end"]) for e in members])
        for row in range(max(rows) + 1):
            yield about(tid + row, "thread_name", name=lane if row == 0 else f"{lane} {row + 1}")
            yield about(tid + row, "thread_sort_index", sort_index=tid + row)
        for event, row in zip(members, rows, strict=True):
            yield span(event, tid + row)
        tid += max(rows) + 1


def _read(path: Path) -> Iterator[Event]:
    """Spans of a role. Incomplete lines (a kill during a write) are skipped."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            event = parsed_line(line)
            if event is not None and event.keys() >= {"name", "lane", "start", "end"}:
                yield event


def _rank(role: str) -> tuple[int, str, int]:
    """Sort key: driver, controllers, engines, trainers, others; engine-10 after engine-2."""
    name, digits = re.fullmatch(r"(.*?)-?(\d*)", role, re.DOTALL).groups()  # type: ignore[union-attr]
    return (ORDER.index(name) if name in ORDER else len(ORDER), name, int(digits or 0))
