"""A run that is killed and resumed gives the metrics of a run that was not: bit by bit, clocks and memory aside."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.e2e.helpers import RECIPE, environment, gcore, gcore_process, held, rows, train, untimed, write_recipe

EVERY_STEP = ("checkpoint.every=1", "observe.eval_every=3", "algorithm.kl_coef=0.05", "algorithm.mini_batches=2")
RAY = ("runtime=ray", "controllers=2")
HOW = [("runtime=local",), pytest.param(RAY, marks=pytest.mark.release)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    found = train(tmp_path_factory.mktemp("whole"), "whole", "runtime=local", "run.steps=8", *EVERY_STEP)
    return [untimed(row) for row in found]


@pytest.mark.parametrize("how", HOW, ids=["local", "ray"])
def test_kill_and_resume(tmp_path, uninterrupted, how):
    recipe = write_recipe(tmp_path)
    hold, go = held(tmp_path, first=4 * RECIPE["sampling"]["prompts_per_step"])  # step 5: step_3 is not deleted yet
    command = ["train", str(recipe), "run.name=part", "run.steps=8", hold, *EVERY_STEP, *how]
    process = subprocess.Popen(
        [sys.executable, "-m", "gcore.cli", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    run = tmp_path / "runs" / "part"
    deadline = time.monotonic() + 300
    while not (run / "step_3").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len([row for row in rows(run) if "samples_digest" in row]) < 8  # it did not get to the end
    go.touch()
    resumed = (gcore if how != RAY else gcore_process)(*command, "run.resume=auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed from" in resumed.stdout
    assert [untimed(row) for row in rows(run)] == uninterrupted


SAVED = ("checkpoint.every=3", "checkpoint.keep_last=9")
WARM = ("training.warm_start.steps=8", "run.steps=4", "algorithm.kl_coef=0.05", *SAVED)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("warmed")
    train(folder, "whole", "runtime=local", *WARM)
    return folder / "runs" / "whole"


@pytest.mark.parametrize("how", HOW, ids=["local", "ray"])
@pytest.mark.parametrize("last", ["warm_3", "warm_8"])
def test_a_warm_start_goes_on_from_its_checkpoint(tmp_path, warmed, last, how):
    """As a kill leaves it: rows that came later than the last checkpoint are there, and are written again."""
    run = tmp_path / "runs" / "part"
    shutil.copytree(warmed, run)
    order = ["warm_3", "warm_6", "warm_8", "step_3", "step_4"]
    assert sorted(path.name for path in run.glob("*_[0-9]")) == sorted(order)
    for later in order[order.index(last) + 1 :]:
        shutil.rmtree(run / later)
    command = ["train", str(write_recipe(tmp_path)), "run.name=part", *WARM, "run.resume=auto", *how]
    done = (gcore if how != RAY else gcore_process)(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{last} at step {last[5:]} of the warm start" in done.stdout
    assert [untimed(row) for row in rows(run)] == [untimed(row) for row in rows(warmed)]


def test_a_kill_in_the_warm_start_is_resumed(tmp_path):
    hold, go = held(tmp_path, first=0)
    command = ["train", str(write_recipe(tmp_path)), "run.name=part", "runtime=local", "run.steps=1", hold]
    command += ["checkpoint.every=20", "training.warm_start.steps=200"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gcore.cli", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    run = tmp_path / "runs" / "part"
    deadline = time.monotonic() + 300
    while not list(run.glob("warm_*[0-9]")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    go.touch()
    resumed = gcore(*command, "run.resume=auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "of the warm start" in resumed.stdout
    assert [row["step"] for row in rows(run) if row.get("phase") == "warm_start"] == list(range(1, 201))
    whole = gcore(*command, "run.name=whole", "checkpoint.every=0")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert [untimed(row) for row in rows(run)] == [untimed(row) for row in rows(tmp_path / "runs" / "whole")]


def test_resume_of_a_finished_run_trains_on_when_asked_for_more(tmp_path):
    first = train(tmp_path, "more", "runtime=local", "run.steps=2")
    again = train(tmp_path, "more", "runtime=local", "run.steps=4", "run.resume=auto", "controllers=3")
    whole = train(tmp_path, "whole", "runtime=local", "run.steps=4")
    digests = {row["step"]: row["samples_digest"] for row in whole if "samples_digest" in row}
    assert {row["step"]: row["samples_digest"] for row in again if "samples_digest" in row} == digests
    assert len(first) < len(again)


def test_auto_without_a_checkpoint_starts_anew_and_says_so(tmp_path):
    recipe = write_recipe(tmp_path)
    train(tmp_path, "none", "runtime=local", "run.steps=1")
    for checkpoint in ("step_1", "warm_6"):
        shutil.rmtree(tmp_path / "runs" / "none" / checkpoint)
    done = gcore("train", str(recipe), "run.name=none", "runtime=local", "run.steps=2", "run.resume=auto")
    assert done.returncode == 0, done.stderr
    assert "no complete checkpoint; starting from the beginning, with the warm start" in done.stdout
    assert [row["step"] for row in rows(tmp_path / "runs" / "none") if "samples_digest" in row] == [1, 2]


def test_other_data_is_refused(tmp_path):
    train(tmp_path, "data", "runtime=local", "run.steps=1")
    recipe = write_recipe(tmp_path)
    more = ("run.name=data", "runtime=local", "run.steps=2", "run.resume=auto", "data.train.size=50")
    done = gcore("train", str(recipe), *more)
    assert done.returncode == 2 and "data.train now has 50" in done.stderr, done.stderr


def test_never_keeps_the_earlier_run(tmp_path):
    train(tmp_path, "twice", "runtime=local", "run.steps=1")
    train(tmp_path, "twice", "runtime=local", "run.steps=2")
    assert (tmp_path / "runs" / "twice.1" / "step_1").is_dir() and (tmp_path / "runs" / "twice" / "step_2").is_dir()
