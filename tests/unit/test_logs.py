"""Logs of bounded size: what stays, what is cut, and the few lines that reach the screen."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from gcore.config.rewards import Rewards
from gcore.config.secrets import learn
from gcore.observe import logs
from gcore.observe.logs import NOT_USERS, Log, OutputPreview, blocking_line, last_lines, trim
from gcore.rewarding.workers import WorkerPool
from tests.unit.rollouts import scored


def lines(first: int, last: int) -> bytes:
    return b"".join(b"%08d\n" % i for i in range(first, last))


def test_the_middle_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(lines(0, 100))
    assert not trim(log, 900) and log.read_bytes() == lines(0, 100)
    log.write_bytes(lines(0, 1000))
    assert trim(log, 900)
    # 90 bytes of the beginning are 10 lines; of the last 450 bytes the first line may be a part of one
    cut = b"--- 8,469 bytes were cut here: a log holds at most 900 ---\n"
    assert log.read_bytes() == lines(0, 10) + cut + lines(951, 1000)


def test_cuts_add_up(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(lines(0, 1000))
    trim(log, 900)
    with log.open("ab") as file:
        file.write(lines(1000, 2000))
    trim(log, 900)
    kept = lines(0, 10) + b"--- 17,528 bytes were cut here: a log holds at most 900 ---\n" + lines(1951, 2000)
    assert log.read_bytes() == kept


def test_a_line_without_end_is_cut_too(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * 10_000)
    assert trim(log, 1000) and log.stat().st_size < 1000


def test_children_of_a_process_that_took_a_log_over_print_there(tmp_path: Path) -> None:
    """Also what they print to the file descriptors past Python, and while the log is being cut."""
    log = tmp_path / "logs" / "engine-0.log"
    code = f"""
import os, subprocess, sys, time
from pathlib import Path
from gcore.observe import logs
logs.CHECK_S = 0.01
logs.Log(Path({str(log)!r}), 100_000).take_over("engine-0")
print("first")
subprocess.run([sys.executable, "-c", "for i in range(100_000): print('flood', i)"])
time.sleep(0.1)
os.write(2, b"last\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = log.read_text().splitlines()
    assert found[0].startswith("--- engine-0, process ") and found[1] == "first"
    assert found[-2:] == ["flood 99999", "last"]
    assert log.stat().st_size <= 100_000 and sum("bytes were cut here" in line for line in found) == 1


def test_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    assert last_lines(log) == []
    log.write_bytes(b"--- engine-0, process 1\none\n\n\x1b[31mred\n" + b"y" * 300 + b"\n")
    assert last_lines(log) == ["one", "\N{REPLACEMENT CHARACTER}[31mred", "y" * 200 + " ..."]
    assert last_lines(log, 1) == ["y" * 200 + " ..."]


def test_the_screen_gets_the_first_lines_once(tmp_path: Path) -> None:
    (tmp_path / "rewards-0.log").write_text("before the resume\n")
    (tmp_path / "engine-0.log").write_text("")
    preview = OutputPreview(tmp_path)
    (tmp_path / "engine-0.log").write_text("engines are not shown\n")
    (tmp_path / "controller-1.log").write_text("--- controller-1, process 7\n")
    assert preview.poll() == []
    with (tmp_path / "rewards-0.log").open("a") as file:
        file.write("one\ntwo\nthree\nfour\nunfin")
    log = tmp_path / "rewards-0.log"
    assert preview.poll() == [f"rewards print to {log}:", "  one", "  two", "  three", "  ..."]
    (tmp_path / "rewards-1.log").write_text("other\n")
    assert preview.poll() == []
    assert OutputPreview(None).poll() == []


def test_rewards_print_to_their_log(tmp_path: Path, capfd) -> None:
    (tmp_path / "loud.py").write_text(
        "import sys\ndef loud(prompts, completions, **_):\n"
        "    print('out')\n    print('err', file=sys.stderr)\n    return [1.0] * len(completions)\n"
    )
    rewards = Rewards.model_validate({"functions": [{"name": "loud", "path": f"{tmp_path / 'loud.py'}:loud"}]})
    pool = WorkerPool(rewards, 1, tmp_path / "logs" / "rewards-0.log")
    assert not (tmp_path / "logs").exists()  # a check before the run starts no worker and opens no log
    answer = asyncio.run(pool.sources[0].answer([scored(5, 0).rollout]))
    pool.close()
    assert answer.values == [1.0]
    assert (tmp_path / "logs" / "rewards-0.log").read_text() == "out\nerr\n"
    assert capfd.readouterr() == ("", "")


def test_a_closed_log_is_cut_a_last_time(tmp_path: Path) -> None:
    log = Log(tmp_path / "a.log", 900)
    (tmp_path / "a.log").write_bytes(lines(0, 1000))
    log.close()
    log.close()
    assert (tmp_path / "a.log").stat().st_size < 900


def test_the_autoscalers_complaint_stays_off_the_screen(tmp_path: Path, capsys) -> None:
    from ray._private import worker

    from gcore.runtime.ray_cluster import quiet_ray

    say = worker.print_to_stdstream
    try:
        quiet_ray(tmp_path / "ray.log")
        quiet_ray(tmp_path / "ray.log")  # two runs in one process
        said = {"pid": "raylet", "is_err": False}
        complaint = "The autoscaler failed with the following error:\nTerminated with signal 15\n  File ..."
        worker.print_to_stdstream({**said, "lines": [complaint]}, ignore_prefix=False)
        worker.print_to_stdstream({**said, "lines": ["a node ran out of memory"]}, ignore_prefix=False)
    finally:
        worker.print_to_stdstream = say
    screen = "".join(capsys.readouterr())
    assert "autoscaler" not in screen and screen.count("a node ran out of memory") == 1
    assert (tmp_path / "ray.log").read_text() == f"{complaint}\na node ran out of memory\n"


def test_secrets_are_overwritten_in_place(tmp_path: Path, monkeypatch) -> None:
    """While a process appends, and after the middle of the log was removed. The terminal does not show them either."""
    learn({"args": {"api_key": "planted-key"}})
    log = tmp_path / "rewards-0.log"
    log.write_text("of the run before: planted-key\n")
    preview = OutputPreview(tmp_path)
    with log.open("ab", buffering=0) as file:
        file.write(b"with planted-key\nand Bearer abcdefgh12345678, pla")
        assert preview.poll() == [f"rewards print to {log}:", "  with ***********"]
        file.write(b"nted-key *** not a secret\n")
        preview.mask_all()
    expected = f"of the run before: {11 * '*'}\nwith {11 * '*'}\nand Bearer {16 * '*'}, {11 * '*'} *** not a secret\n"
    assert log.read_text() == expected
    log.write_text("planted-key\n")  # shorter, as `trim` leaves it
    preview.mask_all()
    assert log.read_text() == 11 * "*" + "\n"
    monkeypatch.setattr(logs, "MASK_BYTES", 64)
    monkeypatch.setattr(logs, "MASK_OVERLAP", 32)
    log.write_text("a line with planted-key\n" * 100)
    preview.mask_all()
    assert log.read_text() == f"a line with {11 * '*'}\n" * 100


def test_the_line_that_blocks_an_event_loop(tmp_path: Path) -> None:
    """Written by a process whose event loop is blocked, with another thread beside it."""
    flow = tmp_path / "flow.py"
    flow.write_text(
        "import asyncio, faulthandler, os, signal, threading, time\n"
        "async def workflow():\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    time.sleep(0)\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "faulthandler.register(signal.SIGUSR1, file=2)\n"
        "asyncio.run(workflow())\n"
    )
    log = tmp_path / "controller-0.log"
    with log.open("wb") as file:
        file.write(b"an older line\n")
        file.flush()
        subprocess.run([sys.executable, str(flow)], stderr=file, check=True)
    assert blocking_line(log) == "flow.py:3 in workflow"
    other = NOT_USERS[0] / "controller" / "run_prompts.py"  # with uvloop, as in Ray
    log.write_text(log.read_text().replace(asyncio.base_events.__file__, str(other)))
    assert blocking_line(log) == "flow.py:3 in workflow"
    stacks = log.read_text().replace(str(flow), str(Path(asyncio.__file__)))  # no line of a user
    log.write_text(stacks)
    assert blocking_line(log) == ""
    log.write_text("nothing\n")
    assert blocking_line(log) == blocking_line(tmp_path / "none.log") == ""
