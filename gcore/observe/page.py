"""A run or a simulation as one self-contained HTML page: `gcore report`.

    paths ──read_recording──> Recordings ──page_model──> {tiles, bars, timelines, charts} ──render──> report.html
    a run's samples ──page_samples──> samples.html in the same folder

The model holds every number that is shown. The template (page.html) writes the text; the scripts draw the Gantt chart
and the curves from the model's JSON, which is in the page, escaped. page.html forbids loading anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from gcore.observe import page_samples
from gcore.observe.files import replacing, told
from gcore.observe.histograms import histogram_charts
from gcore.observe.page_data import RecordedMove, Recording, Segment, has_data, read_recording
from gcore.observe.page_html import render, thinned_steps
from gcore.observe.page_samples import samples_page
from gcore.observe.pictures import before_and_after
from gcore.observe.report import failures_of, smooth
from gcore.observe.samples import FOLDER, read_samples
from gcore.observe.trace import merge_traces
from gcore.observe.values import STAGES, Row, count, duration, held_out_name, number, numbers
from gcore.types import UserError

PARTS = ("page.html", "page.css", "page_base.js", "page_gantt.js", "page_curves.js", "page_histograms.js", "page.js")
DRAWN = ("charts", "sources")  # of the model, by the scripts
MAX_SEGMENTS = 40_000  # per timeline; above this, whole steps are omitted at even intervals
MAX_MOVES = 3_000
MAX_POINTS = 600  # per curve: about what a screen can show
ROLES = ("policy", "judge", "scorer", "trainer", "switch", "controller")  # in the order of legends
LAST_ROLES = ("trainer", "switch", "controller")  # after judges and scorers of any name
CURVES = (  # title, keys (a key ending in / matches all keys with this prefix), unit, style
    ("Reward", ("reward", "accuracy"), "", "reward"),
    ("Rollout time", ("rollout_s",), "s", "line"),
    ("Idle share", ("idle",), "%", "line"),
    ("Busy share by role", ("busy/",), "%", "line"),
    ("Slots by role", ("split/",), "", "stack"),
    ("Time by stage", ("stage/",), "s", "stack"),
    ("Moves per step", ("moves",), "", "line"),
    ("Answer length", ("length",), "tokens", "line"),
    ("Per episode", ("episode/",), "", "line"),
    ("Accepted share", ("acceptance",), "%", "line"),
    ("Tokens per second", ("tokens_per_s",), "", "line"),
    ("Idle share of trainer ranks", ("trainer_idle/",), "%", "line"),
    ("Payloads through controllers, MB per step", ("link/",), "MB", "line"),
)
BARS = (("Rollout time", "rollout_s", "s"), ("Idle share", "idle", "%"))
Model = dict[str, Any]


def write_pages(paths: Sequence[Path], target: Path) -> list[Path]:
    """`gcore report`: the report and, of a run with samples and in its folder, the page of samples. Raises UserError if
    there is nothing to draw or the target cannot be written."""
    model, others = page_model([read_recording(path) for path in paths]), list[Path]()
    for path in paths:
        with told(path / "trace.json"):
            merge_traces(path)  # of a run that is in progress, or was killed
    in_run_folder = len(paths) == 1 and paths[0].is_dir() and target.parent.resolve() == paths[0].resolve()
    if in_run_folder and (samples := samples_page(paths[0], report=target.name)):
        others = [_write(target.with_name(page_samples.FILE), samples)]
        model["samples"] = others[0].name
        model["grids"] = before_and_after(read_samples(paths[0]), paths[0] / FOLDER)
        if model["grids"]:
            _name_denoising_steps(model)
    return [_write(target, render(PARTS, model, DRAWN)), *others]


def _name_denoising_steps(model: Model) -> None:
    """A run that makes pictures: its steps are denoising steps, and all samples have the same number of them."""
    model["charts"] = [
        chart for chart in model["charts"] if chart["title"] not in ("Answer length", "Response lengths")
    ]
    names = {"Tokens per second": "Denoising steps per second"}
    for chart in model["charts"]:
        chart["title"] = names.get(chart["title"], chart["title"])
    for recording in model["sources"]:
        recording["tiles"] = [(names.get(label, label), value, note) for label, value, note in recording["tiles"]]


def _write(target: Path, html: str) -> Path:
    try:
        with replacing(target) as file:
            file.write(html.encode("utf-8", "replace"))
    except OSError as error:
        expected = "" if type(error) is OSError else ", expected a file in a folder (-o)"  # a full disk
        raise UserError(f"{target}: cannot be written ({error.strerror}){expected}") from None
    return target


def page_path(paths: Sequence[Path]) -> Path:
    """runs/NAME -> runs/NAME/report.html, drift.json -> drift.html; several -> report.html in the working directory."""
    if len(paths) > 1:
        return Path("report.html")
    return paths[0] / "report.html" if paths[0].is_dir() else paths[0].with_suffix(".html")


def write_report(folder: Path) -> Path | None:
    """report.html in the run's folder; None if the run has no data to draw."""
    return write_pages([folder], page_path([folder]))[0] if has_data(folder) else None


def page_model(recordings: Sequence[Recording]) -> Model:
    labels = _labels(recordings)
    single = len(recordings) == 1
    charts = _charts(recordings[0]) if single else _overlaid(recordings, labels)
    charts += histogram_charts({label: one.rows_of_metrics for label, one in zip(labels, recordings, strict=True)})
    return {
        "title": " and ".join(dict.fromkeys(recording.name for recording in recordings)),
        "kind": " and ".join(dict.fromkeys(recording.kind for recording in recordings)),
        "lead": _lead(recordings[0]) if single else f"{len(recordings)} compared: {', '.join(labels)}",
        "bars": _bars(recordings, labels),
        "charts": charts,
        "sources": [_source(recording, label) for recording, label in zip(recordings, labels, strict=True)],
    }


def _labels(recordings: Sequence[Recording]) -> list[str]:
    """The placement rule if the names are equal; numbered if labels repeat."""
    same = len({recording.name for recording in recordings}) == 1
    labels = [s.rule if same and s.rule else " · ".join(filter(None, (s.name, s.rule))) for s in recordings]
    repeated = {label for label, times in Counter(labels).items() if times > 1}
    return [f"{label} ({i})" if label in repeated else label for i, label in enumerate(labels, start=1)]


def _lead(recording: Recording) -> str:
    parts = [f"{recording.rule} placement" if recording.rule else "", f"{_num_steps(recording)} steps"]
    if recording.rows:
        parts.append(f"{len(recording.rows)} {recording.unit}")
    return " · ".join(filter(None, parts))


def _num_steps(recording: Recording) -> int:
    """Steps without an evaluation before the first step."""
    return sum(bool(row.keys() - {"step", "accuracy"}) for row in recording.steps)


def totals(recording: Recording) -> Row:
    """The summary. Missing numbers are computed from the steps. Idle shares are weighted by the steps' time."""
    rows = [row for row in recording.steps if number(row, "rollout_s")]
    idle = [(row["idle"], row["rollout_s"]) for row in rows if "idle" in row]
    from_steps: Row = {"rollout_s": sum(row["rollout_s"] for row in rows)} if rows else {}
    if idle:
        from_steps["idle"] = sum(share * s for share, s in idle) / sum(s for _, s in idle)
    if recording.moves or any("moves" in row for row in recording.steps):
        counted = sum(number(row, "moves") or 0 for row in recording.steps)
        from_steps["moves"] = counted or len(recording.moves)
    return {**from_steps, **{key: n for key in recording.summary if (n := number(recording.summary, key)) is not None}}


def _tiles(recording: Recording) -> list[tuple[str, str, str]]:
    """(label, value, note)"""
    facts, steps = totals(recording), max(_num_steps(recording), 1)
    tiles: list[tuple[str, str, str]] = []
    held_out = f"Held-out {held_out_name(numbers(recording.steps, 'accuracy'))}"
    for name, label in (("accuracy", held_out), ("reward", "Reward")):
        if f"{name}_last" in facts:
            tiles.append((label, f"{facts[f'{name}_last']:.3f}", f"from {facts[f'{name}_first']:.3f}"))
    if "total_s" in facts:
        tiles.append(("Total time", duration(facts["total_s"]), f"{_num_steps(recording)} steps"))
    if "rollout_s" in facts:
        tiles.append(("Rollout time", duration(facts["rollout_s"]), f"{duration(facts['rollout_s'] / steps)} per step"))
    if "idle" in facts:
        tiles.append(("Idle share", _percent(facts["idle"]), "of the slots, during rollouts"))
    if "moves" in facts:
        tiles.append(("Moves", f"{facts['moves']:,.0f}", f"{facts['moves'] / steps:.1f} per step"))
    if "tokens_per_s" in facts:
        tiles.append(("Tokens per second", count(facts["tokens_per_s"]), ""))
    if splits := [row for row in recording.steps if any(key.startswith("split/") for key in row)]:
        first, last = (_split(row) for row in (splits[0], splits[-1]))
        tiles.append(("Last split", last, f"from {first}"))
    return tiles


def _split(row: Row) -> str:
    return " : ".join(f"{row[key]:.0f}" for key in row if key.startswith("split/"))


def _source(recording: Recording, label: str) -> Model:
    segments, thinned = _thinned(recording)
    roles = sorted(in_order({s.role for s in segments}, ROLES), key=lambda role: role in LAST_ROLES)
    names = sorted({s.name for s in segments})
    shown = {s.step for s in segments}
    spans = {step: span for step, span in recording.spans.items() if step in shown}
    rows, moved = {row["step"]: row for row in recording.steps}, Counter(m.step for m in recording.moves)
    windows = [
        [f"Step {step}", step, *span, _facts(rows.get(step, {"step": step}), moved)] for step, span in spans.items()
    ]
    if len(spans) > 1 and not thinned and max(spans) - min(spans) + 1 == len(spans):
        ends = [min(s.start for s in segments), max(max(s.end for s in segments), *(end for _, end in spans.values()))]
        windows.insert(0, ["All", None, *ends, [f"{len(spans)} steps"]])
    if not spans and segments:
        windows = [["All", None, min(s.start for s in segments), max(s.end for s in segments), []]]
    moves = _some_moves(recording.moves, shown)
    return {
        "label": label,
        "rows": list(recording.rows),
        "unit": recording.unit,
        "roles": roles,
        "names": names,
        "windows": windows,
        "opens": _first_window(windows, moved),
        "segments": [_packed(s, roles, names) for s in segments],
        "left_out": len(recording.spans) - len(spans),
        "workers": sum(not name.startswith("controller-") for name in recording.rows),
        "moves": [_move_row(m, recording.spans) for m in moves],
        "num_moves": len(recording.moves),
        "directions": [[a, b, n] for (a, b), n in Counter((m.source, m.target) for m in recording.moves).most_common()],
        "tiles": _tiles(recording),
        "failures": [astuple(failures) for failures in failures_of(recording.rows_of_metrics)],
        "numbers": [[key, f"{value:,.6g}"] for key, value in totals(recording).items()],
    }


def _move_row(m: RecordedMove, spans: Mapping[int, tuple[float, float]]) -> list[Any]:
    since = round(m.at_s - spans[m.step][0], 4) if m.step in spans else None  # seconds since the step's beginning
    return [m.step, m.at_s, _slot_text(m.slots), m.source, m.target, m.reason, since]


def _packed(s: Segment, roles: Sequence[str], names: Sequence[str]) -> list[float | None]:
    busy = None if s.busy is None else round(s.busy, 3)
    return [s.row, roles.index(s.role), round(s.start, 4), round(s.end, 4), busy, names.index(s.name)]


def _thinned(recording: Recording) -> tuple[list[Segment], bool]:
    """At most MAX_SEGMENTS (but at least one step): a longer timeline keeps every n-th step, complete."""
    if len(recording.segments) <= MAX_SEGMENTS:
        return recording.segments, False
    sizes = Counter(s.step for s in recording.segments if s.step is not None)
    kept = thinned_steps(sizes, MAX_SEGMENTS)
    return [s for s in recording.segments if s.step in kept], True


def _facts(row: Row, moved: Counter[int]) -> list[str]:
    lengths = (("rollout", "rollout_s"), ("update", "update_s"))
    facts = [f"{name} {duration(row[key])}" for name, key in lengths if key in row]
    if "idle" in row:
        facts.append(f"idle {_percent(row['idle'])}")
    if moved:
        facts.append("1 move" if moved[row["step"]] == 1 else f"{moved[row['step']]} moves")
    return facts


def _first_window(windows: Sequence[Sequence[Any]], moved: Counter[int]) -> str | None:
    """The window shown first: the step with most moves. Without moves: all steps if there are few, else the last."""
    steps = [window for window in windows if window[1] is not None]
    if any(moved[window[1]] for window in steps):
        return str(max(steps, key=lambda window: (moved[window[1]], window[1]))[0])
    return str((windows[0] if len(steps) <= 6 else steps[-1])[0]) if windows else None


def _some_moves(moves: Sequence[RecordedMove], shown: set[int | None]) -> list[RecordedMove]:
    """At most MAX_MOVES, preferably those in the shown timeline; sorted by time."""
    first = sorted(moves, key=lambda m: m.step not in shown)[:MAX_MOVES]
    return sorted(first, key=lambda m: (m.step, m.at_s))


def _slot_text(slots: Sequence[int]) -> str:
    """Consecutive slots are written as ranges.

    >>> _slot_text([0, 1, 2, 7])
    '0–2, 7'
    """
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and slot == runs[-1][-1] + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def in_order(names: set[str], order: Sequence[str]) -> list[str]:
    """Known names first, in the given order; then the others, sorted by name."""
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def _charts(recording: Recording) -> list[Model]:
    """The curves of one recording. Several keys of one title share a chart."""
    charts = []
    for title, keys, unit, style in CURVES:
        recorded = {key for row in recording.steps for key in row}
        names = [key for key in keys if key in recorded]
        if keys[0].endswith("/"):
            ordered = [keys[0] + name for name in (*ROLES, *STAGES)]
            names = in_order({key for key in recorded if key.startswith(keys[0])}, ordered)
        series = [_series(recording, key, key.rpartition("/")[2]) for key in names]
        if style == "reward":
            series = list(_reward(series))
        if style == "stack" and len({tuple(one["x"]) for one in series}) > 1:
            style = "line"  # parts measured at different steps cannot be stacked
        if any(len(one["x"]) > 1 for one in series) and not (keys == ("moves",) and not any(series[0]["y"])):
            charts.append({"title": title, "unit": unit, "style": style, "series": series})
    return charts


def _overlaid(recordings: Sequence[Recording], labels: Sequence[str]) -> list[Model]:
    """One curve per recording, for keys with a single number per step."""
    charts = []
    for title, keys, unit, style in CURVES:
        if not keys[0].endswith("/"):
            series = [_series(recording, keys[0], label) for recording, label in zip(recordings, labels, strict=True)]
            if style == "reward":
                series = [{**one, "y": smooth(one["y"])} for one in series]
            if any(len(one["x"]) > 1 and any(one["y"]) for one in series):
                charts.append({"title": title, "unit": unit, "style": "line", "series": series})
    return charts


def _series(recording: Recording, key: str, name: str) -> Model:
    """The points of a curve; for long runs the means of MAX_POINTS equal parts."""
    points = [(row["step"], row[key]) for row in recording.steps if key in row]
    chunks = np.array_split(np.asarray(points, dtype=float), MAX_POINTS) if len(points) > MAX_POINTS else None
    if chunks is not None:
        points = [(float(x), float(y)) for x, y in (chunk.mean(axis=0) for chunk in chunks)]
    return {"name": name, "x": [x for x, _ in points], "y": [round(float(y), 6) for _, y in points]}


def _reward(series: Sequence[Model]) -> Iterator[Model]:
    """The reward of each step as a thin curve, and smoothed; accuracy, measured only at some steps, as dots."""
    for one in series:
        if one["name"] == "accuracy":
            yield {**one, "name": f"held-out {held_out_name(one['y'])}", "dots": True}
        else:
            yield {**one, "name": "each step", "thin": True}
            yield {**one, "y": [round(y, 6) for y in smooth(one["y"])]}


def _bars(recordings: Sequence[Recording], labels: Sequence[str]) -> list[Model]:
    """One bar per placement rule: those that a simulation compared, or the recordings. The first is the baseline."""
    rows: dict[str, Mapping[str, Any]] = {}
    if len(recordings) > 1:
        rows = {label: totals(recording) for label, recording in zip(labels, recordings, strict=True)}
        own = labels[0]
    else:
        own = recordings[0].rule or "this"
        rows = {own: totals(recordings[0]), **recordings[0].compare} if recordings[0].compare else {}
    bars = []
    for title, key, unit in BARS:
        values = {name: n for name, row in rows.items() if (n := number(row, key)) is not None}
        if len(values) > 1 and own in values:
            top = max(values.values()) or 1.0
            items = [
                {"label": name, "own": name == own, "share": max(value, 0) / top, "text": _amount(value, unit),
                 "difference": "" if name == own else _difference(value, values[own], unit)}
                for name, value in sorted(values.items(), key=lambda item: item[1])
            ]  # fmt: skip
            bars.append({"title": title, "items": items, "own": own})
    return bars


def _amount(value: float, unit: str) -> str:
    return duration(value) if unit == "s" else _percent(value)


def _percent(share: float, sign: str = "") -> str:
    return f"{share * 100:{sign}.1f} %".replace("-", "−")


def _difference(value: float, own: float, unit: str) -> str:
    """Difference from the baseline: in percentage points for shares, else in percent."""
    if unit == "%":
        return _percent(value - own, "+").replace("%", "points")
    return _percent(value / own - 1, "+") if own else ""
