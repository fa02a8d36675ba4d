"""Metric rows: their kind, safe access to numbers, and formatting of numbers for display.

A row is flat: {"step": 12, "reward/mean": 0.43, "timing_s/training": 0.3, ...}. All but `step` may be missing or null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

Row = dict[str, Any]
Kind = Literal["warm_start", "train", "eval"]

STAGES = ("generation", "environment", "rewarding", "preparation", "training", "weights", "checkpoint", "eval")
BLOCKS = "▁▂▃▄▅▆▇█"


def kind(row: Mapping[str, Any]) -> Kind:
    """The kind of a row. Warm-start rows have their own step count and must not enter the reward curve."""
    if row.get("phase") == "warm_start":
        return "warm_start"
    return "train" if any(key.startswith(("reward/", "actor/")) for key in row) else "eval"


def number(row: Mapping[str, Any], key: str) -> float | None:
    """The finite number under `key`, else None: a missing metric is a gap in a chart, never an error."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(rows: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Those of the rows that have one."""
    return [value for row in rows if (value := number(row, key)) is not None]


def held_out_name(values: Iterable[float]) -> str:
    """What the means of `eval/accuracy` are. Outside of 0 to 1 they cannot be shares of right answers."""
    return "accuracy" if all(0 <= value <= 1 for value in values) else "reward"


def step_of(row: Mapping[str, Any]) -> int:
    return int(number(row, "step") or 0)


def stage_times(row: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by stage in a row; the step's time outside of its stages is `other`."""
    times = {stage: s for stage in STAGES if (s := number(row, f"timing_s/{stage}"))}
    rest = (number(row, "timing_s/step") or 0.0) - sum(times.values())
    return {**times, "other": rest} if times and rest > 1e-6 else times


def clean(value: Any) -> Any:
    """Converts to strict JSON: NaN and infinity become null, NumPy scalars numbers, other objects their text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return value if value is None or isinstance(value, str | int) else str(value)


def sparkline(values: Sequence[float], width: int) -> str:
    """The series in `width` blocks: each is the mean of an equal part, scaled between minimum and maximum.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8)
    '▁▂▃▄▅▆▇█'
    """
    if not values or width < 1:
        return ""
    points = np.asarray(values, dtype=float)
    if len(points) > width:
        points = np.array([part.mean() for part in np.array_split(points, width)])
    low, high = points.min(), points.max()
    if high <= low:
        return BLOCKS[0] * len(points)
    levels = np.rint((points - low) / (high - low) * (len(BLOCKS) - 1)).astype(int)
    return "".join(BLOCKS[level] for level in levels)


def count(value: float) -> str:
    """312 -> "312", 5230 -> "5.2k", 1_200_000 -> "1.2M"."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.1f}{unit}" if unit and abs(value) < 99.95 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.1f}T"


def small(value: float) -> str:
    """For losses, norms and KL: 0.0123, but 1.2e-05 instead of 0.0000."""
    return f"{value:.1e}" if value and abs(value) < 1e-3 else f"{value:.4f}" if abs(value) < 1 else f"{value:.2f}"


def duration(seconds: float) -> str:
    """0.31 -> "0.31 s", 42 -> "42 s", 75 -> "1 min 15 s", 7260 -> "2 h 1 min"."""
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
