"""What one controller is doing now, as the progress view shows it, and the seconds that its stages take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from gcore.observe.trace import Tracer
from gcore.observe.values import Row
from gcore.protocols import ControllerStatus

MAX_ROWS = 51  # kept for a driver that has not asked for a while


class LiveStatus:
    """Exists from the start of the process. Rows and notes are shown by controller 0 alone."""

    def __init__(self, rank: int, tracer: Tracer) -> None:
        self._rank, self._tracer = rank, tracer
        self._stage, self._detail, self._step = "starting", "", 0
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._seconds: dict[str, float] = {}

    def show(self, stage: str, detail: str = "") -> None:
        self._stage, self._detail = stage, detail

    def report(self, detail: str) -> None:
        """How far the current stage is: "31/64 prompts"."""
        self._detail = detail

    def finished(self, step: int) -> None:
        """The last step that is done."""
        self._step = step

    def note(self, text: str) -> None:
        if self._rank == 0:
            self._notes.append(text)

    def add_row(self, row: Row) -> None:
        if self._rank == 0:
            self._rows = [*self._rows[1 - MAX_ROWS :], row]

    @contextlib.contextmanager
    def timed(self, name: str, step: int) -> Iterator[None]:
        """A stage: shown, traced and measured. The whole step is measured too, but its stages are shown."""
        if name != "step":
            self.show(name)
        started = time.perf_counter()
        with self._tracer.span(name, step=step):
            yield
        self._seconds[name] = time.perf_counter() - started

    def take_seconds(self, name: str) -> float:
        """Of one stage, which then is in no later row of metrics."""
        return self._seconds.pop(name)

    def take_all_seconds(self) -> dict[str, float]:
        """Of all stages since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    async def take(self) -> ControllerStatus:
        """The current status; rows and notes since the last call."""
        rows, self._rows = self._rows, []
        notes, self._notes = self._notes, []
        return ControllerStatus(f"controller-{self._rank}", self._stage, self._detail, self._step, rows, notes)
