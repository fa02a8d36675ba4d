"""Metrics: one JSON object a line in metrics.jsonl, copied to the trackers that were asked for.

    driver ──row──> MetricsWriter ──> metrics.jsonl          the record: progress, report and resume read this
                                 └──> TensorBoard, W&B, MLflow   copies: one that fails is reported, the run goes on

The file is the only thing a run needs to be looked at later; every other place can be lost.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gcore.observe.trackers import Tracker, open_trackers
from gcore.observe.values import Row, clean, kind, number, step_of

if TYPE_CHECKING:
    from gcore.config.tree import Observe

FILE = "metrics.jsonl"
log = logging.getLogger(__name__)


class MetricsWriter:
    """MetricsWriter(folder, config.observe, "run", config).log({"step": 12, "reward/mean": 0.43})"""

    def __init__(self, folder: Path, observe: Observe, run_name: str, config: dict[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        _mend(path)
        past = [step_of(row) for row in read_rows(folder) if kind(row) != "warm_start"]
        self._trackers: list[Tracker] = open_trackers(folder, observe, run_name, config, max(past, default=None))
        self._file = path.open("a", encoding="utf-8")

    def log(self, row: Row) -> None:
        """Write the row and let it reach the file before returning: a killed run keeps what it reported."""
        row = clean(row)
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        scalars = {key: value for key in row if key != "step" and (value := number(row, key)) is not None}
        for tracker in list(self._trackers):
            try:
                tracker.log(step_of(row), scalars, warm_start=kind(row) == "warm_start")
            except Exception as error:  # a tracker is a copy: an unreachable server must not end the training
                log.warning("%s stopped at step %s: %r; metrics.jsonl goes on", tracker.name, row.get("step"), error)
                self._trackers.remove(tracker)

    def close(self, ok: bool = True) -> None:
        """`ok=False` marks the run as failed where a tracker can say so."""
        self._file.close()
        for tracker in self._trackers:
            try:
                tracker.close(ok)
            except Exception as error:
                log.warning("%s could not be closed: %r", tracker.name, error)
        self._trackers = []

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(ok=error is None)


def read_rows(folder: Path) -> list[Row]:
    """The rows written so far; a line that was cut off by a kill is left out."""
    return [row for _, row in whole_lines(folder / FILE)]


def rewind(folder: Path, step: int, warm_start: int | None = None) -> int:
    """Forget what came after `step`, before a resume writes it anew. Returns how many rows were dropped.

    Rows of the warm start count their own steps. They all stay, unless the run resumes within the warm start, after
    `warm_start` steps of it: then later ones are dropped, and all that came after the warm start.
    """
    path = folder / FILE
    if not path.exists():
        return 0
    lines = list(whole_lines(path))

    def stays(row: Row) -> bool:
        if warm_start is not None:
            return kind(row) == "warm_start" and step_of(row) <= warm_start
        return kind(row) == "warm_start" or step_of(row) <= step

    kept = [line for line, row in lines if stays(row)]
    replace_lines(path, kept)
    return len(lines) - len(kept)


def whole_lines(path: Path) -> Iterator[tuple[bytes, Row]]:
    """The lines of a file that are objects, as they are and as read."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield line, row


def _mend(path: Path) -> None:
    """Drop a torn last line, so that the next row does not continue it."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        replace_lines(path, [line for line, _ in whole_lines(path)])


def replace_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Whole or not at all: a kill in between leaves the old file."""
    temp = path.with_name(path.name + ".tmp")
    with temp.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    temp.replace(path)
