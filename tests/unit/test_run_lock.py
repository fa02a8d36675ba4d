"""The lock of a run folder: of two runs one is refused, and what a killed one has left is taken over."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gcore.driver import run_lock
from gcore.driver.run_lock import Owner, hold, owner
from gcore.types import UserError
from tests.unit.test_full_disk import no_file_above

HOLDER = """
import sys
from pathlib import Path
from gcore.driver.run_lock import hold
from gcore.types import UserError
try:
    with hold(Path(sys.argv[1]), print):
        print("held", flush=True)
        sys.stdin.read()
except UserError as error:
    print(error, flush=True)
"""


@contextlib.contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that tries to hold the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "demo"


def test_a_second_run_is_refused_and_told_who_has_the_folder(folder):
    with started(folder) as first:
        assert line(first) == "held" and not folder.exists()
        who = owner(folder)
        assert who is not None and who.pid == first.pid
        with pytest.raises(UserError, match=rf"in use by process {first.pid} on {who.host} since 20.*run\.name"):
            hold(folder, print).__enter__()
    with hold(folder, print):
        assert owner(folder).pid == os.getpid()
        with started(folder) as second:
            assert f"in use by process {os.getpid()}" in line(second)
    assert owner(folder) is None and not list(folder.parent.iterdir())


def test_of_many_that_start_at_once_one_has_it(folder):
    with contextlib.ExitStack() as stack:
        all_of_them = [stack.enter_context(started(folder)) for _ in range(4)]
        lines = [line(process) for process in all_of_them]
        assert sorted(text == "held" for text in lines) == [False, False, False, True]
        assert all("in use by" in text for text in lines if text != "held")


def test_threads_of_one_process_exclude_each_other(folder):
    with hold(folder, print), pytest.raises(UserError, match="in use by"), hold(folder, print):
        pass
    with hold(folder, print):  # the refused one has not deleted or freed it
        pass


def test_what_a_killed_run_leaves_is_taken_over_at_once(folder, capsys):
    with started(folder) as first:
        assert line(first) == "held"
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert lock_file(folder).exists() and owner(folder) is None
    with hold(folder, print):
        assert owner(folder).pid == os.getpid()
    said = capsys.readouterr().out
    assert f"process {first.pid} on" in said and "it is taken over" in said and "waiting" not in said


def test_the_guard_keeps_it_until_the_processes_have_ended(folder, monkeypatch):
    """The driver is killed; its guard still has the descriptor."""
    code = HOLDER.replace("print):", "print) as fds:")
    code = code.replace('print("held"', "import subprocess; subprocess.Popen(['cat'], pass_fds=fds); print(\"held\"")
    code = code.replace("sys.stdin.read()", "import time; time.sleep(600)")
    read, write = os.pipe()
    driver = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=read, stdout=subprocess.PIPE, text=True)
    try:
        assert line(driver) == "held"
        os.close(read)
        driver.kill()
        driver.wait()
        taken = threading.Event()

        def take() -> None:
            with hold(folder, lambda text: None):
                taken.set()

        thread = threading.Thread(target=take)
        thread.start()
        assert not taken.wait(1.0)
        monkeypatch.setattr(run_lock, "ENDING_S", 0.1)
        with pytest.raises(
            UserError, match=rf"process {driver.pid} on .* was killed, and its processes have not ended"
        ):
            hold(folder, print).__enter__()
    finally:
        os.close(write)  # the guard ends
    thread.join()
    assert taken.is_set()


def test_a_child_that_is_forked_does_not_keep_it(folder):
    with hold(folder, print):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        os.close(read)
    try:
        with hold(folder, print):
            pass
    finally:
        os.close(write)
        os.waitpid(child, 0)


def leave(folder: Path, **changes: object) -> Owner:
    """What a driver on another machine has written."""
    last = Owner("node7", 4711, since=1.79e9, boot="of node7", started=1.0)
    last = replace(last, **changes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock_file(folder).write_text(json.dumps(asdict(last)))
    return last


def test_another_machine_without_a_sign_of_life(folder, monkeypatch, capsys):
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.5)
    last = leave(folder)
    assert owner(folder) == last  # a reader cannot know
    with hold(folder, print):
        assert owner(folder).pid == os.getpid()
    waiting, taken = capsys.readouterr().out.splitlines()
    assert "process 4711 on node7" in waiting and "sign of life" in waiting and "it is taken over" in taken


def test_another_machine_that_lives_keeps_it(folder, monkeypatch):
    """On a file system whose locks do not reach other machines: only the time of the file changes."""
    monkeypatch.setattr(run_lock, "PATIENCE_S", 60.0)
    last = leave(folder)
    beat = threading.Timer(0.3, os.utime, (lock_file(folder),))
    beat.start()
    with pytest.raises(UserError, match="in use by process 4711 on node7"):
        hold(folder, print).__enter__()
    beat.join()
    assert owner(folder) == last


def test_an_owner_gives_signs_of_life(folder, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    with hold(folder, print):
        os.utime(lock_file(folder), (1.0, 1.0))
        while lock_file(folder).stat().st_mtime == 1.0:
            pass


def test_a_file_system_without_locks(folder, monkeypatch, capsys):
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    monkeypatch.setattr(run_lock, "SETTLE_S", 0.01)
    with hold(folder, print), pytest.raises(UserError, match="in use by"), hold(folder, print):
        pass
    leave(folder, boot=run_lock._boot())  # here, and dead
    with hold(folder, print):
        pass
    assert "taken over" in capsys.readouterr().out and not lock_file(folder).exists()


def test_a_process_id_that_is_used_again_is_no_owner(folder):
    leave(folder, boot=run_lock._boot(), pid=os.getpid(), started=1.0)
    assert owner(folder) is None


def test_both_names_of_a_linked_folder_are_locked(folder, tmp_path):
    real = tmp_path / "disk" / "data"
    real.mkdir(parents=True)
    folder.parent.mkdir()
    folder.symlink_to(real)
    with hold(folder, print), pytest.raises(UserError, match="in use by"), hold(real, print):
        pass
    with hold(real, print), pytest.raises(UserError, match="in use by"), hold(folder, print):
        pass
    with hold(folder.parent / ".." / "runs" / "demo", print), pytest.raises(UserError), hold(folder, print):
        pass


def test_a_full_disk_is_named(folder):
    with (
        no_file_above(0),
        pytest.raises(UserError, match=rf"run\.dir={folder.parent}: cannot write to it: File too large"),
    ):
        hold(folder, print).__enter__()
    assert not list(folder.parent.iterdir())
    with hold(folder, print):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.dir=.*file: cannot write to it"):
        hold(tmp_path / "file" / "demo", print).__enter__()
    (tmp_path / ".demo.lock").symlink_to(tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot write to it"):
        hold(tmp_path / "demo", print).__enter__()


@pytest.mark.parametrize("nested", ["trace", "samples/deep", "../demo/logs"])
def test_a_run_inside_the_folder_of_another_one_is_refused(folder, nested):
    """It would rename `trace` of the live run, which is no older run."""
    inside = folder / nested
    with started(folder) as first:
        assert line(first) == "held"
        with pytest.raises(UserError, match=rf"runs/demo: in use by process {first.pid} on .*run\.dir"):
            hold(inside, print).__enter__()
    with hold(inside, print):
        pass


def test_a_run_around_the_folder_of_another_one_is_refused(folder):
    for around in (folder.parent, folder.parent.parent):
        with hold(folder, print), pytest.raises(UserError, match="runs/demo: in use by"), hold(around, print):
            pass
        with hold(around, print):
            pass


def test_a_file_of_something_else_is_no_lock(folder, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("text")
    folder.parent.mkdir()
    os.link(precious, lock_file(folder))
    for got in ("with hard links", "of something else"):
        with pytest.raises(UserError, match=rf"\.demo\.lock: got a file {got}; expected the lock of a run"):
            hold(folder, print).__enter__()
        assert lock_file(folder).read_text() == precious.read_text() == "text"
        lock_file(folder).unlink()
        lock_file(folder).write_text("text")
