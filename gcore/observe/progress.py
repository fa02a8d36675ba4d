"""Terminal output during training: a live panel, one line per step, or nothing.

    driver ──statuses, newest row──> Progress ──> RunView (state of the run) ──> live.panel | plain_line

This module does not depend on which metrics a recipe writes: missing metrics are omitted.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TextIO

from gcore.config.secrets import hide
from gcore.observe.values import Kind, Row, count, duration, held_out_name, kind, number, small, step_of

Mode = Literal["auto", "live", "plain", "none"]
LINE_SECONDS = 1.0  # plain: approximate minimum time between lines
SILENCE_SECONDS = 60.0  # plain: after this time without a line, the current stages are printed
REFRESH_SECONDS = 0.1  # live: minimum time between redraws
PACE_ROWS = 30  # number of rows used to estimate the remaining time


@dataclass(frozen=True, slots=True)
class Status:
    """The current work of a role. Status("controller-1", "generation", "31/64 samples", 12)"""

    role: str
    stage: str
    detail: str
    step: int


@dataclass
class RunView:
    """The state of the run so far, built from rows. The panel and the lines are drawn from it. It does no I/O."""

    run_name: str
    total_steps: int
    warm_steps: int = 0
    step: int = 0
    warm_step: int = 0
    warm_loss: float | None = None
    warming: bool = False
    latest: Row = field(default_factory=dict)  # newest training row
    rewards: dict[int, float] = field(default_factory=dict)  # by step
    evals: dict[int, float] = field(default_factory=dict)  # accuracy by step
    statuses: Sequence[Status] = ()
    arrivals: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=PACE_ROWS))
    seen: tuple[Any, ...] | None = None

    def add(self, row: Row, now: float | None) -> Kind | None:
        """Adds a row; returns None if it is the last one again. `now` is None for rows from before a resume."""
        what, step = kind(row), step_of(row)
        key = (what, step, *sorted(row))
        if key == self.seen:
            return None
        self.seen = key
        self.warming = what == "warm_start"
        if self.warming:
            self.warm_step, self.warm_loss = step, number(row, "warm_start/loss")
            return what
        if step < self.step:  # the run went back to a checkpoint: drop later steps
            self.rewards = {s: r for s, r in self.rewards.items() if s <= step}
            self.evals = {s: a for s, a in self.evals.items() if s <= step}
            self.arrivals.clear()
        self.step = step
        if (accuracy := number(row, "eval/accuracy")) is not None:
            self.evals[step] = accuracy
        if what == "train":
            self.latest = row
            if (reward := number(row, "reward/mean")) is not None:
                self.rewards[step] = reward
            if now is not None:
                self.arrivals.append((step, now))
        return what

    @property
    def step_s(self) -> float | None:
        """Recent seconds per step, including the time between steps."""
        if len(self.arrivals) > 1:
            (first, start), (last, end) = self.arrivals[0], self.arrivals[-1]
            if last > first:
                return (end - start) / (last - first)
        return number(self.latest, "timing_s/step")

    def seconds_left(self, now: float) -> float | None:
        if self.step_s is None or self.warming:
            return None
        since = now - self.arrivals[-1][1] if self.arrivals else 0.0
        return max(0.0, (self.total_steps - self.step) * self.step_s - since)


class Progress:
    """`with Progress("auto", "run", 150) as progress: progress.update(statuses, row)`"""

    def __init__(
        self,
        mode: Mode,
        run_name: str,
        total_steps: int,
        *,
        warm_steps: int = 0,
        history: Iterable[Row] = (),
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`history`: rows from before a resume, so that the curve shows the whole run."""
        self._stream = stream or sys.stdout
        self.mode = resolve_mode(mode, self._stream)
        self.view = RunView(run_name, total_steps, warm_steps)
        for row in history:
            self.view.add(row, None)
        self._clock = clock
        self._live: Any = None
        self._console: Any = None
        self._drawn = -REFRESH_SECONDS
        self._printed = clock()
        self._shown: dict[Kind, int] = {}  # step of the last printed line

    def __enter__(self) -> Progress:
        if self.mode == "live":
            from rich.console import Console
            from rich.live import Live

            self._console = Console(file=self._stream)
            # Only update() draws: no thread is needed, and a frozen panel shows that the driver hangs.
            self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._draw)
            self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._live.stop()  # draws once more and leaves the panel on the screen
            self._live = None

    def update(self, statuses: Sequence[Status], row: Row | None = None) -> None:
        """Called several times per second and at each new row. A repeated row counts once."""
        now = self._clock()
        self.view.statuses = tuple(statuses)
        new = self.view.add(row, now) if row is not None else None
        if self._live and (new or now - self._drawn >= REFRESH_SECONDS):
            self._drawn = now
            self._live.refresh()
        elif self.mode == "plain":
            if row is not None and new and self._due(row, new):
                self._print(plain_line(self.view, row))
            elif now - self._printed >= SILENCE_SECONDS and statuses:
                at = ", ".join(f"{s.role} {s.stage} {s.detail}".rstrip() for s in statuses[:4])
                self._print(f"step {self.view.step}/{self.view.total_steps} done  now: {at}")

    def note(self, text: str) -> None:
        """Prints a permanent line, such as "checkpoint step_50 saved"."""
        text = hide(text)
        if self._live:
            self._console.print(text, markup=False)
        elif self.mode != "none":
            self._print(text)

    def _draw(self) -> Any:
        from gcore.observe.live import panel

        return panel(self.view, self._clock(), self._console.width, self._console.height)

    def _due(self, row: Row, what: Kind) -> bool:
        """True for evaluations and last steps; for fast steps every 2nd, 5th, 10th, ..., about one line per second."""
        step, view = step_of(row), self.view
        stride = 1
        if what == "train" and view.step_s is not None:
            stride = round_stride(LINE_SECONDS / max(view.step_s, 1e-9))
        elif what == "warm_start":
            stride = max(1, view.warm_steps // 10)
        total = view.warm_steps if what == "warm_start" else view.total_steps
        due = what == "eval" or "eval/accuracy" in row or step == total or what not in self._shown
        if due or step // stride != self._shown[what] // stride:
            self._shown[what] = step
            return True
        return False

    def _print(self, line: str) -> None:
        self._printed = self._clock()
        print(line, file=self._stream, flush=True)


def resolve_mode(mode: Mode, stream: TextIO) -> Mode:
    """`auto`: live on a terminal that can move its cursor and show Unicode blocks, else plain."""
    if mode != "auto":
        return mode
    capable = os.environ.get("TERM") != "dumb" and "utf" in (getattr(stream, "encoding", None) or "").lower()
    return "live" if stream.isatty() and capable else "plain"


def round_stride(least: float) -> int:
    """The first of 1, 2, 5, 10, 20, 50, ... that is at least `least`, up to 1000."""
    return next((k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500) if k >= least), 1000)


def plain_line(view: RunView, row: Row) -> str:
    """step 12/150  reward 0.430  len 3.1  tok/s 5.2k  1.1 s"""
    step, what = step_of(row), kind(row)
    if what == "warm_start":
        total = f"/{view.warm_steps}" if view.warm_steps else ""
        loss = number(row, "warm_start/loss")
        tail = "" if loss is None else f"  loss {small(loss)}"
        return f"warm start {step:>{max(0, len(total) - 1)}}{total}{tail}"
    parts = [f"step {step:>{len(str(view.total_steps))}}/{view.total_steps}"]
    is_share = held_out_name(view.evals.values()) == "accuracy"  # else the mean reward says the same
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("reward", "reward/mean", "{:.3f}".format),
        ("loss", "sft/loss", small),
        ("loss", "preference/loss", small),
        ("pairs right", "preference/accuracy", "{:.3f}".format),
        ("len", "response_length/mean", "{:.1f}".format),
        ("kl", "actor/kl", small),
        ("grad", "actor/grad_norm", small),
        ("tok/s", "perf/tokens_per_s", count),
        ("", "timing_s/step", duration),
        ("eval loss", "eval/loss", small),
        *([("eval accuracy", "eval/accuracy", "{:.3f}".format)] if is_share else []),
        ("eval reward", "eval/reward_mean", "{:.3f}".format),
    ]
    for name, key, show in columns:
        if (value := number(row, key)) is not None:
            parts.append(f"{name} {show(value)}".lstrip())
    return "  ".join(parts)
