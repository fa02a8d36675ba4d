"""Metrics: one JSON object per line in metrics.jsonl, copied to the configured trackers.

    driver ──row──> MetricsWriter ──> metrics.jsonl              source of truth: read by progress, report and resume
                                 └──> TensorBoard, W&B, MLflow   copies: a failure is logged, the run continues

The file alone is enough to inspect a run later; the copies can be lost.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore.observe.files import LineFile, keep_lines, tell, told, whole_lines
from gcore.observe.placement_log import FILE as PLACEMENT
from gcore.observe.samples import sample_files
from gcore.observe.trackers import Tracker, open_trackers
from gcore.observe.values import Row, clean, kind, number, step_of

if TYPE_CHECKING:
    from gcore.config.run import Observe

FILE = "metrics.jsonl"
log = logging.getLogger(__name__)


class MetricsWriter:
    """MetricsWriter(folder, config.observe, "run", config).log({"step": 12, "reward/mean": 0.43})"""

    def __init__(self, folder: Path, observe: Observe, run_name: str, config: dict[str, Any]):
        with told(folder / FILE):
            folder.mkdir(parents=True, exist_ok=True)
            keep_lines(folder / FILE, lambda row: True)  # without a last line that was cut off: no row continues it
        past = [step_of(row) for row in read_rows(folder) if kind(row) != "warm_start"]
        self._file = LineFile(folder / FILE)
        self._trackers: list[Tracker] = []
        with told(folder / "trackers"):
            self._trackers = open_trackers(folder, observe, run_name, config, max(past, default=None))

    def log(self, row: Row) -> None:
        """The row is in the file when this returns: a killed run keeps all reported rows."""
        row = clean(row)
        self._file.append([json.dumps(row, allow_nan=False)])
        scalars = {key: value for key in row if key != "step" and (value := number(row, key)) is not None}
        for tracker in list(self._trackers):
            try:
                tracker.log(step_of(row), scalars, warm_start=kind(row) == "warm_start")
            except Exception as error:  # a tracker is a copy: an unreachable server must not end the training
                tell(f"{tracker.name} failed at step {row.get('step')} and is disabled: {error!r}")
                self._trackers.remove(tracker)

    def close(self) -> None:
        self._file.append([])  # what still waits
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                log.warning("%s could not be closed: %r", tracker.name, error)
        self._trackers = []


def read_rows(folder: Path) -> list[Row]:
    """The rows written so far. A line cut off by a kill is skipped."""
    return [row for _, row in whole_lines(folder / FILE)]


def rewind(folder: Path, step: int, warm_start: int | None = None) -> int:
    """Drops what was written after `step`, before a resume writes it again. Returns the number of dropped rows.

    Rows of the warm start have their own step count. They all stay, unless the run resumes within the warm start,
    after `warm_start` steps of it: then its later rows and everything after the warm start are dropped.
    """
    for path in (*sample_files(folder), folder / PLACEMENT):
        keep_lines(path, lambda row: warm_start is None and step_of(row) <= step)

    def stays(row: Row) -> bool:
        if warm_start is not None:
            return kind(row) == "warm_start" and step_of(row) <= warm_start
        return kind(row) == "warm_start" or step_of(row) <= step

    return keep_lines(folder / FILE, stays)
