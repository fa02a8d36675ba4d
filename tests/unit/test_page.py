"""The page of a run or a simulation: exact numbers in its model, one safe file of HTML, and clear words when there is
nothing to draw."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gcore import cli
from gcore.driver import supervise
from gcore.launch.gpu_memory import MemoryPlan
from gcore.launch.preflight import DatasetCheck, ReadyRun
from gcore.observe import page, page_samples
from gcore.observe.page import page_model, page_path, totals, write_pages, write_report
from gcore.observe.page_data import Segment, covered, read_recording
from gcore.observe.page_html import render
from gcore.observe.report import failures_of, summary_text
from gcore.observe.trace import Tracer, merge_traces
from gcore.types import UserError
from tests.unit.simulated import simulation
from tests.unit.spans import span_at
from tests.unit.test_full_disk import no_file_above

EVIL = "</script><script>alert(1)</script><!-- & \u2028 \"'"
VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps what is inside scripts and outside of them."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self.open[-1:] != ["style"]:
            self.text += data

    @property
    def model(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def small() -> dict[str, Any]:
    """Two steps on two slots; in the second, slot 0 turns from policy into judge."""
    return {
        "kind": "simulation", "name": "tiny", "rule": "dynamic", "slots": 2, "roles": ["policy", "judge"],
        "steps": [
            {"step": 1, "at_s": 0.0, "rollout_s": 10.0, "update_s": 5.0, "idle": 0.1, "moves": 0, "length": 512.0,
             "busy": {"policy": 0.9, "judge": 0.8}, "split": {"policy": 1, "judge": 1}, "acceptance": 0.9},
            {"step": 2, "at_s": 15.0, "rollout_s": 30.0, "update_s": 5.0, "idle": 0.3, "moves": 1, "length": 600.0,
             "busy": {"policy": 1.0, "judge": 0.7}, "split": {"policy": 1, "judge": 1}, "acceptance": 0.5},
        ],
        "timeline": [
            {"step": 1, "slot": 0, "role": "policy", "start": 0.0, "end": 9.0, "busy": 0.9},
            {"step": 1, "slot": 1, "role": "judge", "start": 1.0, "end": 10.0, "busy": 0.8},
            {"step": 1, "slot": 0, "role": "trainer", "start": 10.0, "end": 15.0},
            {"step": 1, "slot": 1, "role": "trainer", "start": 10.0, "end": 15.0},
            {"step": 2, "slot": 0, "role": "policy", "start": 15.0, "end": 30.0},
            {"step": 2, "slot": 0, "role": "switch", "start": 30.0, "end": 31.0},
            {"step": 2, "slot": 0, "role": "judge", "start": 31.0, "end": 44.0},
        ],
        "moves": [{"step": 2, "at_s": 30.0, "slots": [0], "from": "policy", "to": "judge", "reason": "judge behind"}],
        "summary": {"rollout_s": 40.0, "idle": 0.25, "moves": 1, "tokens_per_s": 1200.0, "note": "no number"},
        "compare": {"dynamic": {"rollout_s": 40.0, "idle": 0.25}, "static": {"rollout_s": 50.0, "idle": 0.4},
                    "oracle": {"rollout_s": 38.0, "idle": 0.2}},
    }  # fmt: skip


def saved(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


def model_of(tmp_path: Path, *simulations: dict[str, Any]) -> dict[str, Any]:
    return page_model([read_recording(saved(tmp_path / f"{i}.json", one)) for i, one in enumerate(simulations)])


def chart(model: dict[str, Any], title: str) -> dict[str, Any]:
    return next(one for one in model["charts"] if one["title"] == title)


def test_a_simulation_in_numbers(tmp_path: Path) -> None:
    model = model_of(tmp_path, small())
    assert (model["title"], model["kind"], model["lead"]) == (
        "tiny",
        "simulation",
        "dynamic placement · 2 steps · 2 slots",
    )
    (source,) = model["sources"]
    assert source["tiles"] == [
        ("Rollout time", "40 s", "20 s per step"),
        ("Idle share", "25.0 %", "of the slots, during rollouts"),
        ("Moves", "1", "0.5 per step"),
        ("Tokens per second", "1.2k", ""),
        ("Last split", "1 : 1", "from 1 : 1"),
    ]
    assert source["roles"] == ["policy", "judge", "trainer", "switch"]
    assert source["windows"] == [
        ["All", None, 0.0, 50.0, ["2 steps"]],
        ["Step 1", 1, 0.0, 15.0, ["rollout 10 s", "update 5.0 s", "idle 10.0 %", "0 moves"]],
        ["Step 2", 2, 15.0, 50.0, ["rollout 30 s", "update 5.0 s", "idle 30.0 %", "1 move"]],
    ]
    assert source["opens"] == "Step 2"  # where something moved
    assert source["segments"][:3] == [[0, 0, 0.0, 9.0, 0.9, 0], [1, 1, 1.0, 10.0, 0.8, 0], [0, 2, 10.0, 15.0, None, 0]]
    assert source["moves"] == [[2, 30.0, "0", "policy", "judge", "judge behind", 15.0]]
    assert source["directions"] == [["policy", "judge", 1]]
    assert source["numbers"] == [["rollout_s", "40"], ["idle", "0.25"], ["moves", "1"], ["tokens_per_s", "1,200"]]


def test_curves_of_a_simulation(tmp_path: Path) -> None:
    model = model_of(tmp_path, small())
    assert [one["title"] for one in model["charts"]] == [
        "Rollout time", "Idle share", "Busy share by role", "Slots by role", "Moves per step", "Answer length",
        "Accepted share",
    ]  # fmt: skip
    assert chart(model, "Idle share") == {
        "title": "Idle share",
        "unit": "%",
        "style": "line",
        "series": [{"name": "idle", "x": [1, 2], "y": [0.1, 0.3]}],
    }
    split = chart(model, "Slots by role")
    assert split["style"] == "stack" and [(s["name"], s["y"]) for s in split["series"]] == [
        ("policy", [1.0, 1.0]),
        ("judge", [1.0, 1.0]),
    ]
    calm = small()
    for step in calm["steps"]:
        step["moves"] = 0
    assert "Moves per step" not in [one["title"] for one in model_of(tmp_path, calm)["charts"]]


def test_bars_are_against_our_own_policy(tmp_path: Path) -> None:
    rollout, idle = model_of(tmp_path, small())["bars"]
    assert [(i["label"], i["own"], i["text"], i["difference"], round(i["share"], 3)) for i in rollout["items"]] == [
        ("oracle", False, "38 s", "−5.0 %", 0.76),
        ("dynamic", True, "40 s", "", 0.8),
        ("static", False, "50 s", "+25.0 %", 1.0),
    ]
    assert [(i["label"], i["text"], i["difference"]) for i in idle["items"]] == [
        ("oracle", "20.0 %", "−5.0 points"),
        ("dynamic", "25.0 %", ""),
        ("static", "40.0 %", "+15.0 points"),
    ]
    alone = {**small(), "compare": None}
    assert model_of(tmp_path, alone)["bars"] == []


def test_what_the_summary_does_not_say_comes_from_the_steps(tmp_path: Path) -> None:
    source = read_recording(saved(tmp_path / "a.json", {**small(), "summary": {}}))
    assert totals(source) == {"rollout_s": 40.0, "idle": (0.1 * 10 + 0.3 * 30) / 40, "moves": 1}


def test_idle_is_what_no_role_covers_before_training(tmp_path: Path) -> None:
    data = small()
    for step in data["steps"]:
        del step["idle"]
    steps = read_recording(saved(tmp_path / "a.json", data)).steps
    assert steps[0]["idle"] == 1 - 18 / 20  # two slots, 10 s, a second missing on each
    assert steps[1]["idle"] == 1 - 29 / 70  # no trainer in the timeline: the whole step counts, and slot 1 did nothing
    more = read_recording(saved(tmp_path / "a.json", {**data, "slots": 3}))
    assert more.rows == ("0", "1", "2") and more.steps[0]["idle"] == 1 - 18 / 30  # one that never had a role


def test_overlaps_count_once() -> None:
    parts = [
        Segment(0, "policy", 0, 4),
        Segment(0, "switch", 1, 2),
        Segment(0, "judge", 3, 6),
        Segment(1, "judge", 5, 9),
    ]
    assert covered(parts, 1, 6) == 5 + 1
    assert covered([], 1, 6) == 0


def test_the_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    target = write_pages([saved(tmp_path / "a.json", small())], tmp_path / "a.html")[0]
    html = target.read_text()
    parsed = Page(html)
    model = model_of(tmp_path, small())
    assert parsed.model == json.loads(json.dumps({"charts": model["charts"], "sources": model["sources"]}))
    for words in ("Compared", "Timeline", "dynamic placement · 2 steps · 2 slots", "Last split", "+15.0 points"):
        assert words in parsed.text
    assert "1 from policy to judge." in parsed.text
    fetching = [(t, n, v) for t, n, v in parsed.attributes if n in ("src", "href", "srcset", "action")]
    assert fetching == [("link", "href", "data:,")]
    assert set(re.findall(r"https?://[^\"'\s)]+", html)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|innerHTML", html)
    policies = [v for t, n, v in parsed.attributes if n == "content" and v and v.startswith("default-src 'none'")]
    assert len(policies) == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_text_from_files_stays_text(tmp_path: Path) -> None:
    data = small()
    data |= {"name": EVIL, "rule": EVIL, "compare": {EVIL: {"rollout_s": 1.0}, "b": {"rollout_s": 2.0}}}
    data["summary"][EVIL] = 3.0
    data["moves"][0] |= {"reason": EVIL, "from": EVIL, "to": EVIL}
    data["timeline"][0]["role"] = EVIL
    data["steps"][0]["busy"] = {EVIL: 0.5}
    for several in (False, True):
        paths = [saved(tmp_path / "a.json", data)] + [saved(tmp_path / "b.json", small())] * several
        parsed = Page(write_pages(paths, tmp_path / "a.html")[0].read_text())
        assert parsed.tags.count("script") == 2 and "alert(1)" not in parsed.scripts[1]
        assert not set("<>&\u2028") & set(parsed.scripts[0])
        assert parsed.model["sources"][0]["moves"][0][5] == EVIL
        assert EVIL in parsed.model["sources"][0]["roles"]
        assert parsed.text.count("alert(1)") >= 3
        assert not any(n.startswith("on") for _, n, _ in parsed.attributes)


def test_no_number_is_no_problem(tmp_path: Path) -> None:
    data = small()
    data["steps"][0] |= {"idle": float("nan"), "length": None, "busy": {"policy": float("inf")}}
    data["summary"]["idle"] = float("nan")
    data["compare"]["static"]["idle"] = float("inf")
    data["timeline"][0]["busy"] = float("nan")
    data["name"] = "\ud800"  # half of a character
    Page(write_pages([saved(tmp_path / "a.json", data)], tmp_path / "a.html")[0].read_text())


def test_several_lie_over_each_other(tmp_path: Path) -> None:
    static = {**small(), "rule": "static", "moves": [], "summary": {"rollout_s": 50.0, "idle": 0.5}}
    model = model_of(tmp_path, small(), static)
    assert (model["title"], model["lead"]) == ("tiny", "2 compared: dynamic, static")
    assert [source["label"] for source in model["sources"]] == ["dynamic", "static"]
    rollout = chart(model, "Rollout time")
    assert [(s["name"], s["y"]) for s in rollout["series"]] == [("dynamic", [10.0, 30.0]), ("static", [10.0, 30.0])]
    assert "Busy share by role" not in [one["title"] for one in model["charts"]]
    assert [(i["label"], i["own"], i["difference"]) for i in model["bars"][0]["items"]] == [
        ("dynamic", True, ""),
        ("static", False, "+25.0 %"),
    ]
    Page(render(page.PARTS, model, page.DRAWN))
    other = {**small(), "name": "drift", "rule": "static"}
    assert [s["label"] for s in model_of(tmp_path, small(), other)["sources"]] == ["tiny · dynamic", "drift · static"]
    assert [s["label"] for s in model_of(tmp_path, small(), small())["sources"]] == ["dynamic (1)", "dynamic (2)"]


def test_without_a_timeline(tmp_path: Path) -> None:
    model = model_of(tmp_path, {**small(), "timeline": [], "moves": []})
    (source,) = model["sources"]
    assert (source["windows"], source["segments"], source["opens"]) == ([], [], None)
    parsed = Page(render(page.PARTS, model, page.DRAWN))
    assert "from policy to judge" not in parsed.text and len(model["charts"]) == 7


def test_a_timeline_of_some_steps_has_no_view_of_all(tmp_path: Path) -> None:
    data = small()
    data["steps"][1]["step"] = 500
    for entry in data["timeline"]:
        entry["step"] = {1: 1, 2: 500}[entry["step"]]
    assert [window[0] for window in model_of(tmp_path, data)["sources"][0]["windows"]] == ["Step 1", "Step 500"]


def test_512_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = simulation(slots=512, steps=6)
    sizes = [sum(entry["step"] == step for entry in data["timeline"]) for step in range(1, 7)]
    (whole,) = model_of(tmp_path, data)["sources"]
    assert (len(whole["rows"]), len(whole["segments"]), whole["left_out"]) == (512, sum(sizes), 0)
    assert whole["num_moves"] == len(data["moves"]) == 6 * 64
    monkeypatch.setattr(page, "MAX_SEGMENTS", sum(sizes) // 2)
    monkeypatch.setattr(page, "MAX_MOVES", 100)
    (half,) = model_of(tmp_path, data)["sources"]
    assert [window[0] for window in half["windows"]] == ["Step 1", "Step 3", "Step 5"] and half["left_out"] == 3
    assert len(half["segments"]) == sizes[0] + sizes[2] + sizes[4]
    assert len(half["moves"]) == 100 and {move[0] for move in half["moves"]} <= {1, 3, 5} and half["num_moves"] == 384
    monkeypatch.setattr(page, "MAX_SEGMENTS", 10)
    (one,) = model_of(tmp_path, data)["sources"]
    assert [window[0] for window in one["windows"]] == ["Step 1"] and len(one["segments"]) == sizes[0]


def test_long_curves_are_means_of_equal_shares(tmp_path: Path) -> None:
    steps = [{"step": i + 1, "rollout_s": float(i)} for i in range(1200)]
    (series,) = chart(model_of(tmp_path, {"kind": "simulation", "steps": steps}), "Rollout time")["series"]
    assert len(series["x"]) == 600
    assert series["x"][:2] == [1.5, 3.5] and series["y"][-2:] == [1196.5, 1198.5]


# --- runs


def a_run(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [
        {"phase": "warm_start", "step": 7, "warm_start/loss": 2.0, "timing_s/step": 4.0},
        {"step": 0, "eval/accuracy": 0.25, "timing_s/eval": 1.0},
        {"step": 1, "reward/mean": 0.5, "timing_s/step": 10.0, "timing_s/rollout": 6.0, "timing_s/generation": 6.0,
         "timing_s/training": 3.0, "response_length/mean": 20.0, "perf/tokens_per_s": 100.0, "batch/samples": 64},
        {"step": 2, "reward/mean": 0.75, "timing_s/step": 10.0, "timing_s/rollout": 5.0, "timing_s/generation": 5.0,
         "timing_s/training": 4.0, "response_length/mean": 22.0, "perf/tokens_per_s": 300.0, "batch/samples": 64},
        {"step": 2, "eval/accuracy": 0.5, "timing_s/eval": 1.0},
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "rew')
    return folder


def a_trace(folder: Path) -> None:
    """Two steps of 10 s. In each an engine generates for 4 s, in two calls that overlap, and a trainer for 3 s."""
    spans: dict[str, Callable[[float], list[tuple[str, float, float, int | None]]]] = {
        "controller-0": lambda t: [("step", t, t + 10, int(t // 10)), ("rollout", t, t + 6, int(t // 10))],
        "engine-0": lambda t: [
            ("generate", t, t + 3, None),
            ("generate", t + 2, t + 4, None),
            ("sleep", t + 5, t + 6, None),
        ],
        "judge-critic-0": lambda t: [("generate", t + 1, t + 6, None)],
        "trainer-0": lambda t: [("update", t + 6, t + 9, None)],
        "driver": lambda t: [("watch", t, t + 10, None)],
    }
    for role, at in spans.items():
        tracer = Tracer(folder, role)
        if role == "trainer-0":
            span_at(tracer, "update", 1000.0, 1005.0)  # of the warm start
            span_at(tracer, "save", 1031.0, 1032.0)
        for step in (1, 2):
            for name, start, end, number in at(10.0 * step):
                span_at(tracer, name, 1000 + start, 1000 + end, **({} if number is None else {"step": number}))
        tracer.flush()


def test_a_run_in_numbers(tmp_path: Path) -> None:
    model = page_model([read_recording(a_run(tmp_path / "sums"))])
    assert (model["title"], model["kind"], model["lead"]) == ("sums", "run", "2 steps")
    assert model["sources"][0]["tiles"] == [
        ("Held-out accuracy", "0.500", "from 0.250"),
        ("Reward", "0.750", "from 0.500"),
        ("Total time", "26 s", "2 steps"),
        ("Rollout time", "11 s", "5.5 s per step"),
        ("Tokens per second", "200", ""),
    ]
    assert [row["step"] for row in read_recording(tmp_path / "sums").steps] == [0, 1, 2]
    raw, smoothed, accuracy = chart(model, "Reward")["series"]
    assert (raw["x"], raw["y"], raw["thin"]) == ([1, 2], [0.5, 0.75], True)
    assert smoothed["x"] == [1, 2] and 0.5 < smoothed["y"][0] < smoothed["y"][1] < 0.75
    assert (accuracy["name"], accuracy["x"], accuracy["y"], accuracy["dots"]) == (
        "held-out accuracy", [0, 2], [0.25, 0.5], True,
    )  # fmt: skip
    stages = chart(model, "Time by stage")
    assert stages["style"] == "stack"
    assert [(s["name"], s["y"]) for s in stages["series"]] == [
        ("generation", [6.0, 5.0]),
        ("training", [3.0, 4.0]),
        ("other", [1.0, 1.0]),
    ]
    Page(render(page.PARTS, model, page.DRAWN))


def test_a_run_with_a_trace_shows_its_processes(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "sums")
    a_trace(folder)
    merge_traces(folder)
    source = read_recording(folder)
    assert source.rows == ("controller-0", "engine-0", "trainer-0", "judge-critic-0") and source.unit == "processes"
    assert source.spans == {1: (10.0, 20.0), 2: (20.0, 30.0)}
    of_step = [(source.rows[s.row], s.role, s.name, s.start, s.end) for s in source.segments if s.step == 1]
    assert of_step == [
        ("controller-0", "controller", "rollout", 10.0, 16.0),
        ("engine-0", "policy", "generate", 10.0, 14.0),
        ("judge-critic-0", "critic", "generate", 11.0, 16.0),
        ("engine-0", "switch", "sleep", 15.0, 16.0),
        ("trainer-0", "trainer", "update", 16.0, 19.0),
    ]
    assert [(s.name, s.start, s.end) for s in source.segments if s.step is None] == [
        ("update", 0.0, 5.0),
        ("save", 31.0, 32.0),
    ]
    row = source.steps[1]
    assert (row["busy/policy"], row["busy/critic"], row["busy/trainer"]) == (0.5, 0.5, 0.3)
    assert "busy/controller" not in row and "idle" not in row
    (shown,) = page_model([source])["sources"]
    assert shown["workers"] == 3 and shown["windows"][0][:4] == ["All", None, 0.0, 32.0]


def test_two_judges_are_two_roles(tmp_path: Path) -> None:
    """And have two colours: the script gives one to each role that has none of its own."""
    folder = a_run(tmp_path / "sums")
    a_trace(folder)
    for name in ("judge-strict-0", "judge-strict-1", "scorer-style-0", "judge-trainer-0"):
        tracer = Tracer(folder, name)
        span_at(tracer, "generate", 1011.0, 1012.0)
        tracer.flush()
    (shown,) = page_model([read_recording(folder)])["sources"]
    assert shown["roles"] == ["policy", "critic", "judge trainer", "strict", "style", "trainer", "switch", "controller"]


def test_a_trace_that_grew_is_merged_anew(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "sums")
    a_trace(folder)
    assert len(read_recording(folder).spans) == 2  # not merged yet: the run is in progress
    tracer = Tracer(folder, "controller-0")
    span_at(tracer, "step", 1030.0, 1040.0, step=3)
    tracer.flush()
    assert len(read_recording(folder).spans) == 3


def test_a_run_with_a_record_of_placement(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "sums")
    a_trace(folder)
    data = small()
    lines = [{"kind": "timeline", **entry} for entry in data["timeline"]]
    lines += [{"kind": "move", **entry} for entry in data["moves"]]
    lines += [{"kind": "step", **data["steps"][0]}, {"kind": "other"}]
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "placement.jsonl").write_text(text + '\n{"kind": "timeline", "st')
    source = read_recording(folder)
    assert (source.rows, source.unit, len(source.segments)) == (("0", "1"), "slots", 7)
    assert source.spans[1] == (0.0, 15.0) and source.spans[2] == (15.0, 44.0)
    assert [move.reason for move in source.moves] == ["judge behind"]
    first, second = source.steps[1:]
    assert (first["reward"], first["idle"], first["split/judge"], first["rollout_s"]) == (0.5, 0.1, 1.0, 10.0)
    assert second["idle"] == 1 - 29 / 58 and second["rollout_s"] == 5.0
    (folder / "metrics.jsonl").unlink()
    assert read_recording(folder).steps[0]["step"] == 1  # the record alone is enough


def test_metrics_may_speak_of_placement(tmp_path: Path) -> None:
    row = {"reward/mean": 1.0, "placement/idle": 0.2, "placement/busy/judge": 0.9, "placement/sleep_s": 0.1}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": i, **row}) + "\n" for i in (1, 2)))
    model = page_model([read_recording(tmp_path)])
    assert [one["title"] for one in model["charts"]] == ["Reward", "Idle share", "Busy share by role"]


# --- the command


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "got no such file or folder, expected a run's folder"),
        ("{", "not JSON"),
        ("[]", 'got list, expected "kind": "simulation"'),
        ('{"kind": "plan"}', 'got "kind": "plan", expected "kind": "simulation"'),
        ('{"kind": "simulation"}', "got no steps and no timeline"),
        ('{"kind": "simulation", "steps": {}, "timeline": 3}', "timeline: expected a list of objects"),
        ('{"kind": "simulation", "steps": [{"step": 1}], "compare": 3}', "expected objects under compare and summary"),
        (
            '{"kind": "simulation", "timeline": [{"step": 1, "slot": 0, "role": "x", "start": 1}]}',
            'timeline[0]: got {"step": 1, "slot": 0, "role": "x", "start": 1}, expected step, slot, role, start',
        ),
        (
            '{"kind": "simulation", "timeline": [{"step": 1, "slot": 0, "role": "x", "start": 1, "end": 0}]}',
            "expected slot >= 0 and start <= end",
        ),
        (
            '{"kind": "simulation", "timeline": [{"step": 1, "slot": -1, "role": "x", "start": 1, "end": 2}]}',
            "expected slot >= 0 and start <= end",
        ),
        ('{"kind": "simulation", "steps": [{"step": 1}], "moves": [{"step": 1}]}', "moves[0]: got"),
    ],
)  # fmt: skip
def test_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    assert cli.main(["report", str(path)]) == 2
    said = capsys.readouterr().err
    assert words in said and str(path) in said and said.count("\n") == 1
    assert not (tmp_path / "a.html").exists()


def test_an_empty_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path}: got no rows in metrics.jsonl, expected the folder of a run" in capsys.readouterr().err
    assert write_report(tmp_path) is None


def test_where_the_page_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, one, two = a_run(tmp_path / "sums"), tmp_path / "a.json", saved(tmp_path / "b.json", small())
    saved(one, small())
    assert page_path([run]) == run / "report.html" and page_path([one, two]) == Path("report.html")
    assert cli.main(["report", str(one)]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'a.html'}\n"
    assert cli.main(["report", str(run), str(two), "-o", str(tmp_path / "both.html")]) == 0
    assert "sums and tiny" in Page((tmp_path / "both.html").read_text()).text
    assert cli.main(["report", str(one), "-o", str(tmp_path / "no" / "a.html")]) == 2
    assert "cannot be written (No such file or directory), expected a file in a folder (-o)" in capsys.readouterr().err
    with no_file_above(0), pytest.raises(UserError, match=r"cannot be written \(File too large\)$"):  # no advice
        write_report(run)


def test_every_run_ends_with_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that fails, and a page that cannot be made does not hide why."""
    folder = tmp_path / "sums"
    run = SimpleNamespace(folder=folder, max_restarts=0, resume="never")
    run_parts = {"model_dump": lambda mode: {}, "model_copy": lambda update: config}
    config = SimpleNamespace(run=run, objective="policy", **run_parts)
    monkeypatch.setattr(supervise, "pin", lambda config: config)
    monkeypatch.setattr(supervise, "open_on_step", lambda config: (config, None))
    monkeypatch.setattr(supervise, "with_steps", lambda config: (run, []))
    for name in ("see_cluster", "find_weights"):
        monkeypatch.setattr(supervise, name, lambda *args, **keys: None)
    train = DatasetCheck("data.train", 1, 1, (), 1, None)
    ready = ReadyRun(config, None, "", MemoryPlan(config), [], [train], None)  # type: ignore[arg-type]
    monkeypatch.setattr(supervise, "make_ready", lambda *args: ready)
    monkeypatch.setattr(supervise, "check_resume", lambda *args: None)
    monkeypatch.setattr(supervise, "NodeGate", lambda *args: None)
    monkeypatch.setattr(supervise, "see_cluster", lambda config: SimpleNamespace(nodes=()))
    monkeypatch.setattr(supervise, "open_folder", lambda config: a_run(folder))

    async def fails(*args: Any) -> None:
        raise RuntimeError("the run's own error")

    monkeypatch.setattr(supervise, "_run_plan", fails)
    with pytest.raises(RuntimeError, match="the run's own error"):
        supervise.run(config)  # type: ignore[arg-type]
    assert "Held-out accuracy" in Page((folder / "report.html").read_text()).text
    (folder / "placement.jsonl").write_text('{"kind": "timeline"}\n')
    with pytest.raises(RuntimeError, match="the run's own error"):
        supervise.run(config)  # type: ignore[arg-type]


def test_the_parts_of_the_page_are_shipped() -> None:
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "gcore.observe"
    ]
    for part in {*page.PARTS, *page_samples.PARTS}:
        assert (root / "gcore" / "observe" / part).exists() and any(fnmatch.fnmatch(part, p) for p in patterns)


def test_failed_episodes_are_a_table_by_environment_and_cause(tmp_path: Path) -> None:
    rows = [
        {
            "step": step,
            "reward/mean": 0.5,
            "environment/source": f"game.py:{EVIL}",
            "environment/episodes": 10 * step,
            "environment/turns": float(step),
            "environment/cause_hung": 2,
            "environment/cause_died": 1,
            "environment/failed_hung": step - 1,
        }
        for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = failures_of(rows)
    assert [(f.cause, f.attempts, f.dropped) for f in found] == [("hung", 4, 1), ("died", 2, 0)]
    text = summary_text(tmp_path)
    assert "hung 4 times, 1 sample(s) dropped" in text and "30, 1.7 turns each" in text
    (html,) = (path.read_text() for path in write_pages([tmp_path], tmp_path / "report.html"))
    shown = Page(html).text
    assert "Failed episodes" in shown and "hung" in shown and "Samples dropped" in shown
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert "Failed episodes" not in Page(write_pages([tmp_path], tmp_path / "report.html")[0].read_text()).text
