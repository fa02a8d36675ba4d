"""What the driver learns of a controller: what it is doing now, for the progress view, and the end of each step.

stages: timed, show, report ──> LiveStatus.take ──> driver ──> observe/progress.py
        └──take_all_seconds──> timing_s/... in the row of metrics
step:   StepGate.wait ──finished_step──> driver: run.on_step ──go_on──> the next step
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping

from gcore import faults
from gcore.observe.files import take_notes
from gcore.observe.trace import Tracer
from gcore.observe.values import Row, clean
from gcore.protocols import ControllerStatus

MAX_ROWS = 51  # kept if the driver does not poll


class LiveStatus:
    """Exists from the start of the process. Only controller 0 keeps rows and notes."""

    def __init__(self, rank: int, tracer: Tracer) -> None:
        self._rank, self.tracer = rank, tracer
        self._stage, self._detail, self._step = "starting", "", 0
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._seconds: dict[str, float] = {}
        self._metrics: dict[str, float] = {}

    def show(self, stage: str, detail: str = "") -> None:
        self._stage, self._detail = stage, detail

    def report(self, detail: str) -> None:
        """Progress in the current stage: "31/64 prompts"."""
        self._detail = detail

    def finished(self, step: int) -> None:
        """Set the last completed step."""
        self._step = step

    def note(self, text: str) -> None:
        if self._rank == 0:
            self._notes.append(text)

    def add_row(self, row: Row) -> None:
        if self._rank == 0:
            self._rows = [*self._rows[1 - MAX_ROWS :], row]

    @contextlib.contextmanager
    def timed(self, name: str, step: int) -> Iterator[None]:
        """Context of a stage, which is shown, traced and measured. A whole "step" is not shown: its stages are."""
        if name != "step":
            self.show(name)
            faults.reach(name)
        started = time.perf_counter()
        with self.tracer.span(name, step=step):
            yield
        self._seconds[name] = time.perf_counter() - started

    def take_seconds(self, name: str) -> float:
        """Seconds of one stage. They are removed, so no later row of metrics has them."""
        return self._seconds.pop(name)

    def take_all_seconds(self) -> dict[str, float]:
        """Seconds of all stages since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Metrics for the next row, of something that has ended since the last."""
        self._metrics |= metrics

    def take_metrics(self) -> dict[str, float]:
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def take(self) -> ControllerStatus:
        """The current status, with rows and notes since the last call."""
        rows, self._rows = self._rows, []
        notes, self._notes = [*self._notes, *take_notes()], []
        return ControllerStatus(f"controller-{self._rank}", self._stage, self._detail, self._step, rows, notes)


class StepGate:
    """With run.on_step: the controller waits here after a step, until the driver has called the function."""

    def __init__(self) -> None:
        self._rows: asyncio.Queue[Row] = asyncio.Queue()
        self._answers: asyncio.Queue[bool] = asyncio.Queue()

    async def wait(self, row: Row | None) -> bool:
        """Whether the run ends. `row`: the metrics of the step, on controller 0."""
        if row is not None:
            self._rows.put_nowait(clean(row))
        return await self._answers.get()

    async def finished_step(self) -> Row:
        """For the driver: the metrics of the next step that is finished."""
        return await self._rows.get()

    async def go_on(self, stop: bool) -> None:
        self._answers.put_nowait(stop)
