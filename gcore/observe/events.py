"""The events of a run that are not steps: deaths, restarts, rollbacks, injected faults. One JSON object per line.

{"time": 1790000000.0, "event": "died", "role": "engine-0"}
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from gcore.config.secrets import hide
from gcore.observe.files import own_file, told, whole_lines

FILE = "events.jsonl"


class EventLog:
    """Appends to the file `events.jsonl` of a run. Several processes may append at the same time. Without a folder it
    does nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE

    def add(self, event: str, **values: Any) -> None:
        """The line is on disk when this returns: the process may be killed next. A full disk costs the line."""
        if self._path is None:
            return
        line = hide(json.dumps({"time": time.time(), "event": event, **values})) + "\n"
        with told(self._path):
            descriptor = own_file(str(self._path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(descriptor, line.encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """A line that a full disk cut off is skipped."""
    return [row for _, row in whole_lines(folder / FILE)]
