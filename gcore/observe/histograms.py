"""Histograms of the responses of a step: in a row of metrics, and on the report page.

    values of all samples of a step ──counted──> {"values": [...], "counts": [...]} in metrics.jsonl
    rows of a run ──histogram_charts──> shares in the first and in the last steps, in the same bins

Up to MAX_VALUES distinct values are counted exactly; more of them in equal bins, by the middle of each bin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gcore.observe.values import Row, kind, step_of

PREFIX = "histogram/"
TITLES = {"response_length": "Response lengths", "reward": "Rewards"}
UNITS = {"response_length": "tokens", "reward": ""}
MAX_VALUES = 24
SHARE = 0.1  # of the steps, at each end of a run


def counted(values: Sequence[float]) -> Row | None:
    """counted([1, 1, 3]) == {"values": [1, 3], "counts": [2, 1]}; None without values."""
    if not len(values):
        return None
    distinct, counts = np.unique(np.asarray(values, float), return_counts=True)
    if len(distinct) > MAX_VALUES:
        counts, edges = np.histogram(np.asarray(values, float), MAX_VALUES)
        distinct, counts = ((edges[:-1] + edges[1:]) / 2)[counts > 0], counts[counts > 0]
    return {"values": [_short(value) for value in distinct.tolist()], "counts": counts.tolist()}


def histogram_charts(runs: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """Charts of the report page. `runs`: rows of metrics by label. One run: its first and last steps are compared."""
    charts = []
    for name, title in TITLES.items():
        all_rows = {label: [r for r in rows if _is_histogram(r, name)] for label, rows in runs.items()}
        recorded = {label: rows for label, rows in all_rows.items() if rows}
        if len(runs) == 1 and recorded:
            (rows,) = recorded.values()
            part = max(1, round(len(rows) * SHARE))
            parts = {_steps(rows[:part]): rows[:part], _steps(rows[-part:]): rows[-part:]}
        else:
            parts = {label: rows[-max(1, round(len(rows) * SHARE)) :] for label, rows in recorded.items()}
        if parts:
            charts.append({"title": title, "unit": UNITS[name], "style": "histogram", **_bars(parts, name)})
    return charts


def _is_histogram(row: Row, name: str) -> bool:
    value = row.get(PREFIX + name)
    return kind(row) == "train" and isinstance(value, dict) and {"values", "counts"} <= value.keys()


def _steps(rows: Sequence[Row]) -> str:
    first, last = step_of(rows[0]), step_of(rows[-1])
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _bars(parts: Mapping[str, Sequence[Row]], name: str) -> dict[str, Any]:
    """`edges`: of the bars; `series`: the share of the samples in each bar."""
    counts = {label: _added(row[PREFIX + name] for row in rows) for label, rows in parts.items()}
    edges = _edges(sorted({value for counter in counts.values() for value in counter}))
    series = []
    for label, counter in counts.items():
        values, weights = np.array(list(counter)), np.array(list(counter.values()), float)
        shares = np.histogram(values, edges, weights=weights)[0] / max(weights.sum(), 1)
        series.append({"name": label, "y": [round(float(share), 6) for share in shares]})
    return {"edges": [round(float(edge), 6) for edge in edges], "series": series}


def _added(histograms: Iterable[Row]) -> Counter[float]:
    total: Counter[float] = Counter()
    for one in histograms:
        total.update(dict(zip(one["values"], one["counts"], strict=True)))
    return total


def _edges(values: Sequence[float]) -> np.ndarray:
    """Bars in whose middle the values are, if these are few and evenly spaced (0 and 1, or 5, 6, 7); else MAX_VALUES
    equal bars."""
    low, high = values[0], values[-1]
    if low == high:
        return np.array([low - 0.5, low + 0.5])
    step = float(np.diff(values).min())
    number = round((high - low) / step) + 1
    if number <= MAX_VALUES and np.allclose(np.remainder(np.array(values) - low + step / 2, step), step / 2):
        return low - step / 2 + step * np.arange(number + 1)
    return np.linspace(low, np.nextafter(high, np.inf), MAX_VALUES + 1)


def _short(value: float) -> float | int:
    return int(value) if value == int(value) else float(f"{value:.6g}")
