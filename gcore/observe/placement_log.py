"""The log of placement: runs/NAME/placement.jsonl, which role had which slots, and the moves. `gcore report` draws it.

Times are seconds since the start of the run. A run that is resumed continues after the last time in the file: the
report shows the steps one after another.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gcore.observe.files import LineFile, whole_lines
from gcore.observe.values import number

FILE = "placement.jsonl"
TIMES = ("start", "end", "at_s")


class PlacementLog:
    """PlacementLog(Path("runs/a")).write([{"kind": "move", "step": 3, "at_s": time.monotonic(), ...}])"""

    def __init__(self, folder: Path) -> None:
        self._path, self._started = folder / FILE, time.monotonic()
        self._file = LineFile(self._path)
        self._last_s: float | None = None  # time of the last line of the run that is continued

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Times in `lines`: of time.monotonic(). Call after `metrics.rewind`."""
        if self._last_s is None:
            times = (number(row, key) for _, row in whole_lines(self._path) for key in TIMES)
            self._last_s = max((at for at in times if at is not None), default=0.0)
        origin = self._started - self._last_s

        def written(line: Mapping[str, Any]) -> str:
            return json.dumps({**line, **{key: round(line[key] - origin, 4) for key in TIMES if key in line}})

        self._file.append(map(written, lines))
