"""Data of a report page, read from a simulation's file or from a run's folder.

    simulation.json ─────────────────────────────────┐
    RUN/metrics.jsonl ── steps ──────────────────────┤
    RUN/placement.jsonl ── timeline, moves, steps ───┼──> Recording ──> page.py
    RUN/trace/*.jsonl ── spans (without placement) ──┘

Both give the same Recording: rows of a Gantt chart with segments, moves, and one flat row of numbers per step
({"step": 3, "rollout_s": 41.2, "idle": 0.05, "busy/policy": 0.9, "split/judge": 16, ...}). Missing numbers are omitted.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from gcore.observe.files import whole_lines
from gcore.observe.metrics import FILE, read_rows
from gcore.observe.placement_log import FILE as PLACEMENT
from gcore.observe.report import summarize
from gcore.observe.trace import spans_of
from gcore.observe.values import Row, clean, kind, number, stage_times, step_of
from gcore.types import UserError

TRAINER = "trainer"  # also the ranks of PPO's critic
PROCESSES = {"controller": "controller", "engine": "policy", "judge": "judge", "scorer": "scorer"}
PROCESSES |= {"trainer": TRAINER, "critic": TRAINER}
FIXED_ROLES = ("policy", "trainer", "switch", "controller")
SWITCHES = ("sleep", "wake", "load weights")  # spans in which an engine serves no requests
OF_METRICS = {
    "reward/mean": "reward",
    "eval/accuracy": "accuracy",
    "timing_s/rollout": "rollout_s",
    "timing_s/training": "update_s",
    "response_length/mean": "length",
    "perf/tokens_per_s": "tokens_per_s",
    "perf/idle_predicted": "trainer_idle/predicted",
    "perf/idle_measured": "trainer_idle/measured",
    "environment/turns": "episode/turns",
    "environment/tool_calls": "episode/tool calls",
    "environment/tool_errors": "episode/tool errors",
    "link/requests_within_mb": "link/to engines, in a node",
    "link/requests_between_mb": "link/to engines, between nodes",
    "link/responses_within_mb": "link/from engines, in a node",
    "link/responses_between_mb": "link/from engines, between nodes",
    "link/samples_within_mb": "link/to ranks, in a node",
    "link/samples_between_mb": "link/to ranks, between nodes",
}
EXPECTED = "expected a run's folder (runs/NAME) or a file of `gcore simulate ... --json FILE`"


@dataclass(frozen=True, slots=True)
class Segment:
    """Segment(row=0, role="policy", start=0.0, end=31.0, busy=0.98, step=1): the role of a slot or process over time"""

    row: int
    role: str
    start: float  # seconds since the beginning of the run
    end: float
    busy: float | None = None
    step: int | None = None
    name: str = ""  # of the span, if it came from a trace


@dataclass(frozen=True, slots=True)
class RecordedMove:
    """RecordedMove(step=1, at_s=31.0, slots=(0, 1), source="policy", target="judge", reason="judge 12.0 s behind")"""

    step: int
    at_s: float
    slots: tuple[int, ...]
    source: str
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class Recording:
    """Recording(name="drift-64", kind="simulation", rule="dynamic", rows=("0", "1", ...), segments=[...], ...)"""

    name: str
    kind: Literal["simulation", "run"]
    rows: tuple[str, ...]  # names of the Gantt rows
    segments: list[Segment]
    moves: list[RecordedMove]
    steps: list[Row]  # flat, ordered by step
    summary: Row
    rule: str = ""  # the placement rule; empty without one
    unit: Literal["slots", "processes"] = "slots"  # what a row is
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)  # step -> from, to
    compare: dict[str, Row] = field(default_factory=dict)
    rows_of_metrics: Sequence[Row] = ()  # of a run: metrics.jsonl


def read_recording(path: Path) -> Recording:
    """Raises UserError if there is nothing to draw."""
    if path.is_dir():
        return _run(path)
    if not path.is_file():
        raise UserError(f"{path}: got no such file or folder, {EXPECTED}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}), {EXPECTED}") from None
    if not isinstance(data, dict) or data.get("kind") != "simulation":
        got = f'"kind": {json.dumps(data.get("kind"))}' if isinstance(data, dict) else type(data).__name__
        raise UserError(f'{path}: got {got}, expected "kind": "simulation"; {EXPECTED}')
    return _simulation(data, path)


def _simulation(data: Mapping[str, Any], path: Path) -> Recording:
    steps = [_flat(raw) for raw in _objects(data, "steps", path)]
    segments = [_segment(raw, f"{path}: timeline[{i}]") for i, raw in enumerate(_objects(data, "timeline", path))]
    moves = [_move(raw, f"{path}: moves[{i}]") for i, raw in enumerate(_objects(data, "moves", path))]
    if not steps and not segments:
        raise UserError(f"{path}: got no steps and no timeline, expected at least one of them")
    compare, summary = data.get("compare") or {}, data.get("summary") or {}
    if not isinstance(compare, dict) or not isinstance(summary, dict):
        raise UserError(f"{path}: expected objects under compare and summary")
    recording = Recording(
        name=str(data.get("name") or path.stem),
        kind="simulation",
        rule=str(data.get("rule") or ""),
        rows=_slots(int(number(data, "slots") or 0), segments),
        segments=segments,
        moves=moves,
        steps=steps,
        summary=clean(summary),
        compare={str(name): clean(numbers) for name, numbers in compare.items() if isinstance(numbers, dict)},
    )
    return _with_idle(recording)


def _run(folder: Path) -> Recording:
    rows, placed = read_rows(folder), _placed(folder)
    if not rows and not placed:
        raise UserError(f"{folder}: got no rows in {FILE}, expected the folder of a run that has made a step")
    steps: dict[int, Row] = {}
    for row in rows:
        if kind(row) != "warm_start":
            steps.setdefault(step_of(row), {}).update(_flat_metrics(row))
    for raw in placed:
        if raw.get("kind") == "step":
            steps.setdefault(step_of(raw), {}).update(_flat(raw))
    where = str(folder / PLACEMENT)
    segments = [_segment(raw, where) for raw in placed if raw.get("kind") == "timeline"]
    recording = Recording(
        name=folder.resolve().name,
        kind="run",
        rows=_slots(0, segments),
        segments=segments,
        moves=[_move(raw, where) for raw in placed if raw.get("kind") == "move"],
        steps=[steps[step] for step in sorted(steps)],
        summary=_run_summary(folder),
        rows_of_metrics=rows,
    )
    return _with_idle(recording) if segments else _with_trace(recording, folder)


def _run_summary(folder: Path) -> Row:
    facts = summarize(folder)
    row: Row = {"samples": facts.samples, "total_s": facts.total_s, "tokens_per_s": facts.tokens_per_s}
    for name, ends in (("reward", facts.reward), ("accuracy", facts.accuracy)):
        if ends:
            row |= {f"{name}_first": ends[0], f"{name}_last": ends[-1]}
    return {key: value for key, value in row.items() if value is not None}


def has_data(folder: Path) -> bool:
    return bool(read_rows(folder) or _placed(folder))


def _placed(folder: Path) -> list[Row]:
    return [row for _, row in whole_lines(folder / PLACEMENT)]


def _objects(data: Mapping[str, Any], key: str, path: Path) -> list[Row]:
    value = data.get(key) or []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise UserError(f"{path}: {key}: expected a list of objects")
    return value


def _segment(raw: Row, where: str) -> Segment:
    slot, start, end = (number(raw, key) for key in ("slot", "start", "end"))
    step, role = number(raw, "step"), raw.get("role")
    if step is None or slot is None or start is None or end is None or not isinstance(role, str):
        raise UserError(f"{where}: got {json.dumps(raw)[:120]}, expected step, slot, role, start and end")
    if slot < 0 or end < start:
        raise UserError(f"{where}: got {json.dumps(raw)[:120]}, expected slot >= 0 and start <= end")
    return Segment(int(slot), role, start, end, number(raw, "busy"), int(step))


def _move(raw: Row, where: str) -> RecordedMove:
    slots = raw.get("slots") or []
    if not isinstance(slots, list) or not isinstance(raw.get("from"), str) or not isinstance(raw.get("to"), str):
        raise UserError(f"{where}: got {json.dumps(raw)[:120]}, expected step, at_s, slots, from, to and reason")
    return RecordedMove(
        step_of(raw),
        number(raw, "at_s") or 0.0,
        tuple(int(slot) for slot in slots),
        raw["from"],
        raw["to"],
        str(raw.get("reason") or ""),
    )


def _flat(raw: Mapping[str, Any]) -> Row:
    """{"step": 1, "busy": {"policy": 0.9}} -> {"step": 1, "busy/policy": 0.9}; only finite numbers stay."""
    flat: Row = {}
    for key, value in raw.items():
        inner = {f"{key}/{name}": value[name] for name in value} if isinstance(value, dict) else {key: value}
        flat |= {name: n for name in inner if (n := number(inner, name)) is not None}
    return {**flat, "step": step_of(raw)}


def _flat_metrics(row: Row) -> Row:
    flat: Row = {"step": step_of(row)}
    flat |= {name: value for key, name in OF_METRICS.items() if (value := number(row, key)) is not None}
    if kind(row) == "train":
        flat |= {f"stage/{stage}": seconds for stage, seconds in stage_times(row).items()}
    placed = (key for key in row if key.startswith("placement/"))
    return flat | {key.removeprefix("placement/"): n for key in placed if (n := number(row, key)) is not None}


def _slots(count: int, segments: Sequence[Segment]) -> tuple[str, ...]:
    return tuple(str(slot) for slot in range(max(count, 1 + max((s.row for s in segments), default=-1))))


def _spans(steps: Sequence[Row], segments: Sequence[Segment]) -> dict[int, tuple[float, float]]:
    """Start and end of each step of the timeline: the range of its segments and of the step's own times."""
    spans: dict[int, tuple[float, float]] = {}
    for s in segments:
        if s.step is not None:
            start, end = spans.get(s.step, (s.start, s.end))
            spans[s.step] = (min(start, s.start), max(end, s.end))
    for row in steps:
        begin, length = number(row, "at_s"), (number(row, "rollout_s") or 0.0) + (number(row, "update_s") or 0.0)
        if begin is not None and row["step"] in spans:
            start, end = spans[row["step"]]
            spans[row["step"]] = (min(start, begin), max(end, begin + length))
    return dict(sorted(spans.items()))


def _with_idle(recording: Recording) -> Recording:
    """Fills in missing idle shares: the share of slot time without a role, until training starts."""
    segments, slots = recording.segments, len(recording.rows)
    spans = _spans(recording.steps, segments)
    known = {row["step"]: row for row in recording.steps}
    by_step: dict[int, list[Segment]] = {}
    for s in segments:
        if s.step is not None:
            by_step.setdefault(s.step, []).append(s)
    for step, (start, end) in spans.items():
        row = known.setdefault(step, {"step": step})
        until = min((s.start for s in by_step[step] if s.role == "trainer"), default=end)
        if "idle" not in row and until > start:
            row["idle"] = 1 - covered(by_step[step], start, until) / (slots * (until - start))
    return replace(recording, spans=spans, steps=[known[step] for step in sorted(known)])


def covered(segments: Iterable[Segment], start: float, end: float) -> float:
    """Seconds between start and end covered by segments, summed over rows. Overlaps on a row count once.

    >>> covered([Segment(0, "policy", 0, 4), Segment(0, "switch", 3, 5), Segment(1, "judge", 4, 9)], 1, 6)
    6.0
    """
    total = 0.0
    until: dict[int, float] = {}
    for s in sorted(segments, key=lambda s: s.start):
        a, b = max(s.start, start, until.get(s.row, start)), min(s.end, end)
        total += max(b - a, 0)
        until[s.row] = max(until.get(s.row, start), b)
    return total


def role_of(process: str) -> str | None:
    """The role of a process. Each judge and scorer is a separate role with its own name.

    >>> role_of("engine-3"), role_of("judge-strict-0"), role_of("scorer-my-model-1"), role_of("driver")
    ('policy', 'strict', 'my-model', None)
    """
    kind, _, rest = process.partition("-")
    role, name = PROCESSES.get(kind), rest.rpartition("-")[0]
    if role in ("judge", "scorer") and name:
        return f"{role} {name}" if name in FIXED_ROLES else name
    return role


def _with_trace(recording: Recording, folder: Path) -> Recording:
    """Without a placement log, the Gantt chart shows the spans of the processes."""
    rows: dict[str, tuple[int, str]] = {}  # process -> row, role
    recorded: list[Segment] = []
    spans: dict[int, tuple[float, float]] = {}
    clock = None  # the controller whose steps are used
    for name, event in spans_of(folder):
        role, span, start, end = role_of(name), str(event["name"]), event["start"], event["end"]
        if role is None:
            continue
        row, _ = rows.setdefault(name, (len(rows), role))
        if role == "controller":
            clock = clock or name
            if span == "step":
                if name == clock:
                    spans[step_of(event.get("args", {}))] = (start, end)
                continue
        recorded.append(Segment(row, "switch" if span in SWITCHES else role, start, end, name=span))
    if not rows:
        return recording
    segments = _in_steps(_joined(recorded), spans)
    steps = {row["step"]: row for row in recording.steps}
    for step, busy in _busy(segments, spans, [role for _, role in rows.values()]).items():
        steps.setdefault(step, {"step": step}).update({k: v for k, v in busy.items() if k not in steps[step]})
    return replace(
        recording,
        rows=tuple(rows),
        unit="processes",
        segments=segments,
        spans=dict(sorted(spans.items())),
        steps=[steps[step] for step in sorted(steps)],
    )


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Merges overlapping spans of one name on one row. Sorted by start; an outer span comes before its parts."""
    last: dict[tuple[int, str], int] = {}
    joined: list[Segment] = []
    for s in sorted(segments, key=lambda s: (s.start, -s.end)):
        at = last.get((s.row, s.name))
        if at is not None and s.start <= joined[at].end:
            joined[at] = replace(joined[at], end=max(joined[at].end, s.end))
        else:
            last[(s.row, s.name)] = len(joined)
            joined.append(s)
    return joined


def _in_steps(segments: Sequence[Segment], spans: Mapping[int, tuple[float, float]]) -> list[Segment]:
    """Assigns each segment to the step that contains its middle; start-up, warm start and evaluations have no step."""
    ordered = sorted(spans.items(), key=lambda item: item[1])
    starts = [start for _, (start, _) in ordered]

    def step(s: Segment) -> int | None:
        middle = (s.start + s.end) / 2
        at = bisect_right(starts, middle) - 1
        return ordered[at][0] if at >= 0 and middle <= ordered[at][1][1] else None

    return [replace(s, step=step(s)) for s in segments]


def _busy(
    segments: Sequence[Segment], spans: Mapping[int, tuple[float, float]], roles: Sequence[str]
) -> dict[int, Row]:
    """step -> {"busy/policy": 0.4, ...}: the share of the step's time in which a role's processes were busy."""
    by_step: dict[tuple[int | None, str], list[Segment]] = {}
    for s in segments:
        by_step.setdefault((s.step, roles[s.row]), []).append(s)
    kinds = [role for role in dict.fromkeys(roles) if role != "controller"]  # controllers mostly wait for other roles
    return {
        step: {
            f"busy/{role}": covered(by_step.get((step, role), []), start, end) / (roles.count(role) * (end - start))
            for role in kinds
        }
        for step, (start, end) in spans.items()
        if end > start
    }
