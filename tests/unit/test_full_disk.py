"""Files that only people and reports read: a full disk costs lines of them, not the run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gcore.config.run import Observe
from gcore.observe import files
from gcore.observe.events import EventLog, read_events
from gcore.observe.files import LineFile, problem, take_notes
from gcore.observe.metrics import MetricsWriter, read_rows
from gcore.observe.trace import Tracer


@pytest.fixture(autouse=True)
def nothing_told():
    files._problems.clear()
    take_notes()


@contextlib.contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """A disk that is full, for this process."""
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_lines_wait_until_there_is_space_and_the_user_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(tmp_path, Observe(trackers=[]), "run", {})
    with no_file_above(0):
        for step in (1, 2):
            writer.log({"step": step, "reward/mean": 0.5})
    why = f"{path} is not written ({os.strerror(errno.EFBIG)})"
    assert take_notes() == [f"{why}; the run goes on"] and take_notes() == []
    assert problem(tmp_path) == why and problem(tmp_path / "other") == ""
    writer.log({"step": 3, "reward/mean": 0.5})
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3] and problem(tmp_path) == ""


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """The disk has space for the first line of a call and for a part of the next one."""
    file = LineFile(tmp_path / "a")
    file.append(["first"])
    with no_file_above(16):
        file.append(["second", "third"])
    assert file.path.read_text() == "first\n" and len(take_notes()) == 1
    file.append(["fourth"])
    assert file.path.read_text().split() == ["first", "second", "third", "fourth"]


def test_what_waits_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_WAITING", 20)
    file = LineFile(tmp_path / "a")
    with no_file_above(0):
        file.append([f"line {i}" for i in range(9)])
    file.append(["last"])
    assert (tmp_path / "a").read_text().splitlines() == ["line 7", "line 8", "last"]


def test_events_and_spans(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path, "engine-0")
    with tracer.span("generation"):
        pass
    with no_file_above(0):
        EventLog(tmp_path).add("died", role="engine-0")
        tracer.flush()
    unwritten = tmp_path / "events.jsonl", tmp_path / "trace" / "engine-0.jsonl"
    assert [note.split(" is not")[0] for note in take_notes()] == list(map(str, unwritten))


def test_an_event_that_was_cut_off_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "died"}) + '\n{"event": "rollb')
    assert read_events(tmp_path) == [{"event": "died"}]


def test_a_rewind_needs_no_space(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1\n2\n3\n4")
    with no_file_above(0):
        files.replace_lines(path, [b"1", b"2"])
    assert path.read_bytes() == b"1\n2\n"


def test_a_print_into_a_full_log_does_not_raise() -> None:
    program = "from gcore.observe.logs import Log; from pathlib import Path; import sys, os\n"
    program += "said = os.dup(2); Log(Path('/dev/full')).take_over('reward')\n"
    program += "print('x' * 100000); print('y', file=sys.stderr); os.write(said, b'printed')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "printed")
