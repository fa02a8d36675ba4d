"""What a run tells: files read back exactly, pictures drawn, and nothing that a missing metric could break."""

from __future__ import annotations

import asyncio
import io
import json
import math
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import defaultdict
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gcore.config.run import Observe
from gcore.observe import trace as trace_module
from gcore.observe.files import take_notes
from gcore.observe.metrics import MetricsWriter, read_rows, rewind
from gcore.observe.placement_log import PlacementLog
from gcore.observe.progress import Progress, RunView, Status, plain_line, resolve_mode, round_stride
from gcore.observe.report import plot_reward, smooth, summarize, summary_text
from gcore.observe.trace import Tracer, lowest_free_lanes, merge_traces
from gcore.observe.values import count, duration, small, sparkline, stage_times
from gcore.types import UserError
from tests.unit.spans import span_at

QUIET = Observe(trackers=[])


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    with closing(MetricsWriter(folder, QUIET, "run", {})) as writer:
        for row in rows:
            writer.log(row)
    return folder


# metrics


def test_rows_are_on_disk_at_once_and_strict_json(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, QUIET, "run", {})
    writer.log(
        {"step": 1, "a": math.nan, "b": -math.inf, "c": np.float32(0.5), "n": np.int64(3), "samples_digest": "ab"}
    )
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "a": null, "b": null, "c": 0.5, "n": 3, "samples_digest": "ab"}\n'
    )
    writer.close()


def test_rewind_drops_later_rows_and_a_torn_line_but_keeps_the_warm_start(tmp_path: Path) -> None:
    warm: dict[str, Any] = {"phase": "warm_start", "step": 9, "warm_start/loss": 1.0}
    rows = [warm, {"step": 0, "eval/accuracy": 0.1}, {"step": 1, "reward/mean": 0.2}, {"step": 2, "reward/mean": 0.3}]
    written(tmp_path, *rows, {"step": 2, "eval/accuracy": 0.4}, {"step": 3, "reward/mean": 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert len(read_rows(tmp_path)) == 6
    assert rewind(tmp_path, 2) == 1
    assert read_rows(tmp_path) == [*rows, {"step": 2, "eval/accuracy": 0.4}]
    assert rewind(tmp_path, 1) == 2
    assert read_rows(tmp_path) == rows[:3]
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rewind_that_is_killed_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, {"step": 2}, {"step": 1})  # the rows that stay are not the first ones, which are cut off at once
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        rewind(tmp_path, 1)
    assert read_rows(tmp_path) == [{"step": 2}, {"step": 1}]


def test_rewind_without_metrics_is_nothing(tmp_path: Path) -> None:
    assert rewind(tmp_path, 5) == 0 and read_rows(tmp_path) == []


def test_writer_does_not_continue_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    written(tmp_path, {"step": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(e.step, round(e.value, 6)) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_has_the_scalars_and_forgets_what_was_rewound(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path, Observe(), "run", {})) as writer:
        writer.log({"phase": "warm_start", "step": 7, "warm_start/loss": 2.5})
        writer.log({"step": 1, "reward/mean": 0.25, "actor/kl": math.nan, "samples_digest": "ab"})
        writer.log({"step": 2, "reward/mean": 0.5})
        writer.log({"step": 3, "reward/mean": 0.75})
    assert events(tmp_path / "tensorboard") == {"reward/mean": [(1, 0.25), (2, 0.5), (3, 0.75)]}
    assert events(tmp_path / "tensorboard" / "warm_start") == {"warm_start/loss": [(7, 2.5)]}
    first = next((tmp_path / "tensorboard").glob("events*"))
    first.rename(first.with_name("events.out.tfevents.0000000001.first"))  # files are read in the order of their names
    rewind(tmp_path, 1)
    with closing(MetricsWriter(tmp_path, Observe(), "run", {})) as writer:
        writer.log({"step": 2, "reward/mean": 0.6})
    assert events(tmp_path / "tensorboard") == {"reward/mean": [(1, 0.25), (2, 0.6)]}


def test_the_log_of_placement_continues_after_the_steps_that_stay(tmp_path: Path, monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr("gcore.observe.placement_log.time.monotonic", lambda: now)
    log = PlacementLog(tmp_path)
    for step in (0, 1, 2):
        start = 100.0 + 10 * step
        log.write([{"kind": "timeline", "step": step, "start": start, "end": start + 8}])
        log.write([{"kind": "move", "step": step, "at_s": start + 2}])
    with (tmp_path / "placement.jsonl").open("a") as file:
        file.write('{"kind": "timeline", "st')  # cut off by a kill
    now = 5000.0
    log = PlacementLog(tmp_path)  # before the files are rewound
    rewind(tmp_path, 1)
    log.write([{"kind": "timeline", "step": 2, "start": 5001.0, "end": 5004.5}])
    lines = [json.loads(line) for line in (tmp_path / "placement.jsonl").read_text().splitlines()]
    pieces = [(row["step"], row["start"], row["end"]) for row in lines if row["kind"] == "timeline"]
    assert pieces == [(0, 0.0, 8.0), (1, 10.0, 18.0), (2, 19.0, 22.5)]
    assert [(row["step"], row["at_s"]) for row in lines if row["kind"] == "move"] == [(0, 2.0), (1, 12.0)]
    rewind(tmp_path, 0, warm_start=0)
    assert (tmp_path / "placement.jsonl").read_bytes() == b""


def test_a_run_without_slots_has_no_log_of_placement(tmp_path: Path) -> None:
    rewind(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


class Recorder(ModuleType):
    """A package whose every function notes how it was called."""

    def __init__(self, name: str, answers: dict[str, Any]):
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers = answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return function


def test_wandb_gets_rows_and_a_resumed_run_goes_on_in_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    run = Recorder("run", {})
    run.id = "abc"  # type: ignore[attr-defined]
    wandb = Recorder("wandb", {"init": run})
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for _ in range(2):
        with closing(MetricsWriter(tmp_path, Observe(trackers=["wandb"]), "run", {"lr": 1})) as writer:
            writer.log({"step": 1, "reward/mean": 0.5, "samples_digest": "ab"})
    assert [call[2]["id"] for call in wandb.calls] == [None, "abc"]
    assert wandb.calls[0][2] | {"id": 0} == {
        "project": "gcore", "name": "run", "config": {"lr": 1}, "dir": str(tmp_path), "id": 0, "resume": "allow",
    }  # fmt: skip
    assert run.calls[:3] == [
        ("define_metric", ("*",), {"step_metric": "step"}),
        ("log", ({"step": 1, "reward/mean": 0.5},), {}),
        ("finish", (), {"exit_code": 0}),
    ]


def test_mlflow_gets_parameters_once_metrics_and_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Recorder("mlflow", {"start_run": SimpleNamespace(info=SimpleNamespace(run_id="r1"))})
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for _ in range(2):
        writer = MetricsWriter(tmp_path, Observe(trackers=["mlflow"]), "run", {"training": {"lr": 1}, "x": None})
        writer.log({"step": 4, "reward/mean": 0.5})
        writer.close()
    assert mlflow.calls == [
        ("start_run", (), {"run_name": "run"}),
        ("log_params", ({"training.lr": "1", "x": "None"},), {}),
        ("log_metrics", ({"reward/mean": 0.5},), {"step": 4}),
        ("end_run", (), {"status": "FINISHED"}),
        ("start_run", (), {"run_id": "r1"}),
        ("log_metrics", ({"reward/mean": 0.5},), {"step": 4}),
        ("end_run", (), {"status": "FINISHED"}),
    ]


def test_a_tracker_that_fails_is_reported_once_and_the_file_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_notes()
    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    mlflow = Recorder("mlflow", {"start_run": run, "log_metrics": OSError("server is gone")})
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    with closing(MetricsWriter(tmp_path, Observe(trackers=["mlflow"]), "run", {})) as writer:
        writer.log({"step": 1, "reward/mean": 0.5})
        writer.log({"step": 2, "reward/mean": 0.5})
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2]
    assert take_notes() == ["MLflow failed at step 1 and is disabled: OSError('server is gone')"]


def test_prometheus_reads_the_latest_values(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for wrong in (port, f"127.0.0.1:{port}", "nowhere", 70_000):
            with pytest.raises(UserError, match=f"observe.prometheus={wrong}: "):
                MetricsWriter(tmp_path, Observe(trackers=[], prometheus=wrong), "run", {})
    with closing(MetricsWriter(tmp_path, Observe(trackers=[], prometheus=port), "a run", {})) as writer:
        for step in (1, 2):
            writer.log({"step": step, "reward/mean": step / 4, "samples_digest": "x"})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        assert lines[:2] == ['gcore_step{run="a run"} 2', 'gcore_reward_mean{run="a run"} 0.5'] and len(lines) == 3
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10)
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_names_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    observe = QUIET.model_copy(update={"trackers": [name]})
    with pytest.raises(ValueError, match=rf"observe\.trackers: {name} .*pip install {name}") as error:
        MetricsWriter(tmp_path, observe, "run", {})
    assert type(error.value).__name__ == "UserError"


# trace


def chrome(folder: Path) -> list[dict[str, Any]]:
    path = merge_traces(folder)
    assert path is not None
    return json.loads(path.read_text())["traceEvents"]


def test_lowest_free_lanes() -> None:
    assert lowest_free_lanes([(0, 10), (2, 4), (3, 8), (4, 6), (10, 12)]) == [0, 1, 2, 1, 0]
    assert lowest_free_lanes([(5, 5), (5, 7), (6, 6)]) == [0, 0, 1]


def test_merged_spans_never_overlap_within_a_lane(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tracer = Tracer(tmp_path, "controller-0")
    for start, length in zip(rng.uniform(0, 10, 300), rng.uniform(0, 1, 300), strict=True):
        span_at(tracer, "sample", 1000 + start, 1000 + start + length, lane="samples")
    tracer.flush()
    lanes = defaultdict(list)
    for event in chrome(tmp_path):
        if event["ph"] == "X":
            lanes[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    spans = sorted(span for lane in lanes.values() for span in lane)
    assert len(spans) == 300 and spans[0][0] == 0
    for lane in lanes.values():
        lane.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(lane))
    edges = sorted([(s, 1) for s, _ in spans] + [(e, -1) for _, e in spans])
    assert len(lanes) == max(np.cumsum([step for _, step in edges]))  # as few lanes as were ever needed


def test_concurrent_tasks_and_threads_each_leave_their_span(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path, "controller-0")

    async def task(i: int) -> None:
        with tracer.span("generation", step=i):
            await asyncio.sleep(0.02)

    async def tasks() -> None:
        await asyncio.gather(*(task(i) for i in range(5)))

    thread = threading.Thread(target=lambda: asyncio.run(tasks()))
    thread.start()
    asyncio.run(tasks())
    thread.join()
    tracer.flush()
    spans = [e for e in chrome(tmp_path) if e["ph"] == "X"]
    assert sorted(e["args"]["step"] for e in spans) == sorted([0, 1, 2, 3, 4] * 2)
    assert min(e["dur"] for e in spans) >= 15_000 and max(e["dur"] for e in spans) < 2_000_000
    assert len({e["tid"] for e in spans}) >= 5


def test_processes_are_ordered_named_and_relative_to_the_earliest(tmp_path: Path) -> None:
    for i, role in enumerate(["trainer-0", "engine-10", "engine-2", "controller-0", "driver", "reward-0"]):
        tracer = Tracer(tmp_path, role)
        span_at(tracer, "work", 50 + i, 50.5 + i, tokens=math.nan)
        tracer.flush()
    merged = chrome(tmp_path)
    names = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in merged if e["name"] == "process_sort_index"}
    assert [names[pid] for pid in sorted(order, key=order.__getitem__)] == [
        "driver", "controller-0", "engine-2", "engine-10", "trainer-0", "reward-0",
    ]  # fmt: skip
    work = {names[e["pid"]]: e for e in merged if e["ph"] == "X"}
    assert work["trainer-0"]["ts"] == 0 and work["driver"]["ts"] == 4_000_000 and work["driver"]["dur"] == 500_000
    assert work["driver"]["args"] == {"tokens": None}


def test_torn_lines_do_not_hurt_a_restarted_role(tmp_path: Path) -> None:
    before = Tracer(tmp_path, "engine-0")
    span_at(before, "a", 1, 2)
    before.flush()
    with (tmp_path / "trace" / "engine-0.jsonl").open("a") as file:
        file.write('{"name": "torn", "la')
    after = Tracer(tmp_path, "engine-0")
    with pytest.raises(RuntimeError), after.span("b"):
        raise RuntimeError
    span_at(after, "moved", 3, 4, slot=3)
    after.flush()
    found = {e["name"]: e for e in chrome(tmp_path) if e["ph"] == "X"}
    assert set(found) == {"a", "b", "moved"}
    assert found["b"]["args"] == {"error": "RuntimeError"} and found["moved"]["args"] == {"slot": 3}


def test_tracer_keeps_memory_bounded_and_can_be_off(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path, "driver")
    for _ in range(trace_module.FLUSH_EVENTS + 1):
        span_at(tracer, "tick", 1, 2)
    assert len((tmp_path / "trace" / "driver.jsonl").read_text().splitlines()) == trace_module.FLUSH_EVENTS
    off = Tracer(None, "driver")
    with off.span("nothing"):
        span_at(off, "nothing", 1, 2)
    off.flush()
    assert merge_traces(tmp_path / "empty") is None


# values and progress


def test_sparkline_exact() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 4, 4, 8, 8], 3) == "▁▅█"
    assert sparkline([3, 3], 10) == "▁▁" and sparkline([], 10) == "" and sparkline([1], 0) == ""


def test_numbers_for_people() -> None:
    assert [count(v) for v in (0, 312, 5230, 999_600, 1.2e6)] == ["0", "312", "5.2k", "1.0M", "1.2M"]
    assert [duration(v) for v in (0.31, 1.06, 42, 75, 7260)] == ["0.31 s", "1.1 s", "42 s", "1 min 15 s", "2 h 1 min"]
    assert [small(v) for v in (0, 1.2e-5, 0.0123, 3.14159)] == ["0.0000", "1.2e-05", "0.0123", "3.14"]
    row = {"timing_s/step": 2.0, "timing_s/training": 1.5, "timing_s/weights": None}
    assert stage_times(row) == {"training": 1.5, "other": 0.5} and stage_times({"timing_s/step": 2.0}) == {}


TRAIN = {"step": 12, "reward/mean": 0.43, "response_length/mean": 3.1, "actor/kl": 0.0012, "perf/tokens_per_s": 5230.0}


def test_plain_line() -> None:
    view = RunView("run", 150, warm_steps=100)
    assert plain_line(view, TRAIN | {"timing_s/step": 1.1}) == (
        "step  12/150  reward 0.430  len 3.1  kl 0.0012  tok/s 5.2k  1.1 s"
    )
    assert plain_line(view, {"step": 0, "eval/accuracy": 0.41}) == "step   0/150  eval accuracy 0.410"
    assert plain_line(view, {"step": 150, "reward/mean": None}) == "step 150/150"
    assert (
        plain_line(view, {"phase": "warm_start", "step": 20, "warm_start/loss": 1.234})
        == "warm start  20/100  loss 1.23"
    )


def plain_output(seconds_a_step: float, rows: list[dict[str, Any]], total: int) -> list[str]:
    now, stream = [0.0], io.StringIO()
    with Progress("plain", "run", total, stream=stream, clock=lambda: now[0]) as progress:
        for row in rows:
            now[0] += seconds_a_step
            for _ in range(3):  # as the driver does: the newest row, again and again
                progress.update([], dict(row))
        progress.note("checkpoint step_9 saved")
    return stream.getvalue().splitlines()


def test_plain_prints_each_slow_step_once() -> None:
    lines = plain_output(2.0, [{"step": s, "reward/mean": 0.5} for s in range(1, 5)], 4)
    assert lines == [*(f"step {s}/4  reward 0.500" for s in range(1, 5)), "checkpoint step_9 saved"]


def test_plain_thins_fast_steps_but_keeps_evaluations_and_the_last() -> None:
    rows: list[dict[str, Any]] = [{"step": s, "reward/mean": 0.5, "timing_s/step": 0.25} for s in range(1, 14)]
    rows.insert(7, {"step": 7, "eval/accuracy": 0.5})
    lines = plain_output(0.25, rows, 13)
    assert [int(line.split()[1].split("/")[0]) for line in lines[:-1]] == [1, 5, 7, 10, 13]
    assert [round_stride(x) for x in (0.2, 1.5, 4, 51, 1e9)] == [1, 2, 5, 100, 1000]


def test_plain_says_what_a_long_step_waits_for() -> None:
    now, stream = [0.0], io.StringIO()
    with Progress("plain", "run", 9, stream=stream, clock=lambda: now[0]) as progress:
        for _ in range(100):
            now[0] += 1
            progress.update([Status("controller-1", "generation", "31/64 samples", 1)])
    assert stream.getvalue() == "step 0/9 done  now: controller-1 generation 31/64 samples\n"


def test_none_prints_nothing_and_auto_depends_on_the_terminal() -> None:
    stream = io.StringIO()
    with Progress("none", "run", 9, stream=stream) as progress:
        progress.update([], {"step": 9, "reward/mean": 1.0})
        progress.note("text")
    assert stream.getvalue() == "" and resolve_mode("auto", stream) == "plain"


def test_auto_is_live_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal: Any = SimpleNamespace(isatty=lambda: True, encoding="utf-8")
    assert resolve_mode("auto", terminal) == "live"
    assert resolve_mode("auto", SimpleNamespace(isatty=lambda: True, encoding="ascii")) == "plain"  # type: ignore[arg-type]
    monkeypatch.setenv("TERM", "dumb")
    assert resolve_mode("auto", terminal) == "plain"


def test_view_pace_time_left_and_going_back() -> None:
    view = RunView("run", 10)
    for step in (1, 2, 3):
        assert view.add({"step": step, "reward/mean": step / 10}, now=step * 2.0) == "train"
    assert view.step_s == 2.0 and view.seconds_left(6.0) == 14.0 and view.seconds_left(7.0) == 13.0
    assert view.add({"step": 3, "reward/mean": 0.3}, now=7.0) is None
    view.add({"step": 2, "reward/mean": 0.9}, now=9.0)
    assert view.rewards == {1: 0.1, 2: 0.9} and view.step == 2


def shown(view: RunView, width: int = 80, height: int = 24) -> list[str]:
    from rich.console import Console

    from gcore.observe.live import panel

    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(panel(view, 0.0, width, height))
    return console.export_text().splitlines()


def test_live_panel_shows_the_run_and_fits() -> None:
    view = RunView("sums", 150, warm_steps=40)
    view.add({"step": 0, "eval/accuracy": 0.118}, None)
    for step in range(1, 9):
        view.add({"step": step, "reward/mean": float(step), "timing_s/step": 1.0, "timing_s/training": 0.75}, None)
    view.add({"step": 8, "eval/accuracy": 0.5, "timing_s/eval": 1.0}, None)
    view.statuses = [Status(f"controller-{i}", "generation", "31/64 samples", 8) for i in range(30)]
    lines = shown(view)
    text = "\n".join(lines)
    for part in ("sums", "step 8/150", "▁▂▃▄▅▆▇█", "8.000", "0.118 → 0.500", "2 min 22 s left"):
        assert part in text
    assert "■ training 0.75 s  ■ other 0.25 s" in text and "controller-0  ● generation  31/64 samples" in text
    assert "+ 21 more" in text and "21 generation" in text and "warm start" not in text
    assert all(len(line) == 80 for line in lines) and len(lines) < 24
    assert all(len(line) == 40 for line in shown(view, 40))
    view.add({"phase": "warm_start", "step": 20, "warm_start/loss": 1.05}, None)
    assert any("warm start 20/40" in line and "loss 1.05" in line for line in shown(view))


@pytest.mark.parametrize(
    "row", [{"step": 1}, {"step": 1, "reward/mean": None, "actor/kl": "x"}, {"phase": "warm_start"}, {}]
)
def test_no_view_raises_for_missing_metrics(row: dict[str, Any]) -> None:
    for total in (0, 5):
        for mode in ("live", "plain"):
            with Progress(mode, "run", total, stream=io.StringIO()) as progress:  # type: ignore[arg-type]
                progress.update([Status("controller-0", "unknown stage", "", 0)], row)
                progress.note("[not markup]")


# report


def a_run(folder: Path) -> Path:
    return written(
        folder,
        {"phase": "warm_start", "step": 1, "warm_start/loss": 2.0, "timing_s/step": 4.0},
        {"step": 0, "eval/accuracy": 0.125, "timing_s/eval": 2.0},
        {"step": 1, "reward/mean": 0.25, "batch/samples": 512, "timing_s/step": 10.0, "timing_s/generation": 6.0,
         "timing_s/training": 3.0, "perf/tokens_per_s": 1000.0, "perf/peak_memory_gb": 1.5},
        {"step": 2, "reward/mean": math.nan, "timing_s/step": 10.0, "timing_s/generation": 10.0, "batch/samples": 512},
        {"step": 3, "reward/mean": 0.75, "timing_s/step": 30.0, "timing_s/generation": 20.0, "timing_s/training": 10.0,
         "perf/tokens_per_s": 2000.0, "perf/mfu": 0.41, "perf/peak_memory_gb": 1.25, "batch/samples": 512},
        {"step": 3, "eval/accuracy": 0.875, "timing_s/eval": 2.0},
    )  # fmt: skip


def test_summary_numbers(tmp_path: Path) -> None:
    facts = summarize(a_run(tmp_path / "sums"))
    assert (facts.steps, facts.samples) == (3, 1536)
    assert facts.accuracy == (0.125, 0.875) and facts.reward == (0.25, 0.75)
    assert facts.total_s == 58.0
    assert facts.stages == {"warm start": 4.0, "eval": 4.0, "generation": 36.0, "training": 13.0, "other": 1.0}
    assert facts.tokens_per_s == (1000 * 10 + 2000 * 30) / 40 and facts.peak_memory_gb == 1.5


def test_a_mean_reward_is_no_accuracy(tmp_path: Path) -> None:
    folder = tmp_path / "scores"
    folder.mkdir()
    lines = [json.dumps({"step": step, "eval/accuracy": value}) for step, value in ((0, -0.2), (1, 0.5))]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "  held-out reward  -0.200 -> 0.500" in summary_text(folder).splitlines()


def test_summary_text_and_panel(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "sums")
    assert summary_text(folder).splitlines()[-1] == f"  run                {folder}"  # it has no other file
    plot_reward(folder)
    assert summary_text(folder).splitlines() == [
        "G-Core: sums",
        "  held-out accuracy  0.125 -> 0.875",
        "  reward             0.250 -> 0.750",
        "  steps              3, 1,536 samples trained",
        "  total time         58 s, without the start of processes",
        "  tokens/s           1.8k",
        "  training MFU       41.0% of the published dense bfloat16 rate",
        "  peak memory        1.50 GB",
        "  time by stage      generation 36 s, training 13 s, warm start 4.0 s, eval 4.0 s, other 1.0 s",
        f"  run                {folder}",
        f"  reward curve       {folder / 'reward.png'}",
    ]


def test_summary_of_tokens_that_siblings_share(tmp_path: Path) -> None:
    rows = [{"step": 1, "perf/tokens_trained": 3000.0, "perf/tokens_shared": share} for share in (0.5, 0.25)]
    folder = written(tmp_path, *rows, {"step": 2, "perf/tokens_trained": 1000.0})
    assert summarize(folder).trained_tokens == (3750.0, 2250.0)
    assert "  training tokens  3.8k computed, 2.2k (38%) saved: siblings have them in common" in summary_text(folder)
    assert summarize(written(tmp_path / "none", {"step": 1, "perf/tokens_shared": 0.0})).trained_tokens is None


def test_summary_of_an_empty_run(tmp_path: Path) -> None:
    assert "steps  " in summary_text(tmp_path) and plot_reward(tmp_path) is None
    assert summarize(written(tmp_path, {"step": 0, "eval/accuracy": 0.5})).accuracy == (0.5,)


def test_plot_is_a_picture_without_the_warm_start(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = plot_reward(a_run(tmp_path))
    assert path == tmp_path / "reward.png"
    image = imread(path)
    assert image.shape[:2] == (675, 1200) and image[..., :3].std() > 0.02
    before = path.read_bytes()
    written(tmp_path, {"phase": "warm_start", "step": 3, "reward/mean": 9.0, "eval/accuracy": 9.0})
    assert plot_reward(tmp_path) == path and path.read_bytes() == before
    written(tmp_path, {"step": 4, "reward/mean": 0.9})
    assert plot_reward(tmp_path) == path and path.read_bytes() != before


def test_smooth_keeps_constants_and_straight_middles() -> None:
    assert smooth([0.5] * 100) == pytest.approx([0.5] * 100)
    line = smooth([float(i) for i in range(101)])
    assert line[50] == pytest.approx(50) and line[0] > 0 and line[-1] < 100


def test_importing_the_room_is_cheap() -> None:
    heavy = "{'torch', 'ray', 'rich', 'matplotlib', 'tensorboard', 'wandb', 'mlflow', 'pydantic'}"
    code = f"import sys, gcore.observe; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
