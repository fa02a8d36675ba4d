"""A folder of a run that is training: what else may use it, and that no secret is in it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gcore.checkpoint import store
from gcore.driver.run_folder import WRITTEN
from tests.e2e.helpers import RECIPE, environment, gcore, gcore_process, held, rows, steps, train, write_recipe

KEEP = ("runtime=local", "run.steps=6", "checkpoint.every=1", "checkpoint.keep_last=9")


@contextlib.contextmanager
def training(folder: Path, *overrides: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run that is in step 4 until the end of the block."""
    hold, go = held(folder, first=3 * RECIPE["sampling"]["prompts_per_step"])
    command = ["train", str(write_recipe(folder)), "run.name=live", hold, *KEEP, *overrides]
    process = subprocess.Popen(
        [sys.executable, "-m", "gcore.cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )
    run, deadline = folder / "runs" / "live", time.monotonic() + 300
    try:
        while not (run / "step_3").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield process, run
    finally:
        go.touch()
        try:
            process.communicate(timeout=300)
        finally:
            process.kill()


def test_two_runs_in_one_folder(tmp_path):
    with training(tmp_path) as (first, run):
        for more in ((), ("run.resume=auto",), (f"run.resume={run / 'step_2'}",)):
            second = gcore("train", str(write_recipe(tmp_path)), "run.name=live", *KEEP, *more)
            assert second.returncode == 2 and len(second.stderr.splitlines()) == 1, second.stderr
            assert f"{run}: in use by process {first.pid} on " in second.stderr and "run.name" in second.stderr
        sft = gcore("sft", str(write_recipe(tmp_path)), "run.name=live", *KEEP)
        assert sft.returncode == 2 and "in use by" in sft.stderr
        before = sorted(path.name for path in run.iterdir())
        evaluated = gcore("eval", str(run))
        assert evaluated.returncode == 0 and "eval/accuracy" in evaluated.stdout, evaluated.stderr
        exported = gcore("export", str(run), str(tmp_path / "out"))
        assert exported.returncode == 0, exported.stderr
        reported = gcore("report", str(run))
        assert reported.returncode == 0, reported.stderr
        assert {path.name for path in run.iterdir()} - set(before) <= {
            "eval",
            "report.html",
            "samples.html",
            "trace.json",
        }
    assert first.returncode == 0
    assert [row["step"] for row in steps(rows(run))] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in tmp_path.glob("runs/*")) == ["live"]  # no lock, and no folder that was renamed
    assert not list(tmp_path.glob("runs/.*"))
    written = {path.name for path in run.iterdir()} - {path.name for path in store.complete_checkpoints(run)}
    assert written <= set(WRITTEN)


def test_a_killed_run_is_taken_over_at_once(tmp_path):
    with training(tmp_path) as (first, run):
        first.kill()
        first.wait()
        (tmp_path / "go").touch()
        hold, _ = held(tmp_path, first=0)
        again = gcore("train", str(write_recipe(tmp_path)), "run.name=live", hold, *KEEP, "run.resume=auto")
        assert again.returncode == 0, again.stdout + again.stderr
        assert f"{run} was in use by process {first.pid} on " in again.stdout and "it is taken over" in again.stdout
    assert [row["step"] for row in steps(rows(run))] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=9", "run.seed: 3 -> 9"),
        ("model.build.layers=1", "model.build.layers: 2 -> 1"),
        ("data.train.size=50", "data.train now has 50"),
        ("data.train.args.max=8", "data.train now has 61 rows, before 80"),
    ],
)
def test_a_changed_run_is_refused_before_it_starts(finished, override, message):
    folder, run = finished
    before = (run / "config.yaml").read_text()
    more = ("run.name=done", "runtime=local", "run.steps=2", "run.resume=auto", override)
    refused = gcore("train", str(write_recipe(folder)), *more)
    assert refused.returncode == 2 and message in refused.stderr and "starting" not in refused.stdout, refused.stderr
    assert (run / "config.yaml").read_text() == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    train(folder, "done", "runtime=local", "run.steps=1")
    return folder, folder / "runs" / "done"


# ---- secrets --------------------------------------------------------------------------------------------------------

REWARD = """
def reward(completions, openai_key, endpoint, **columns):
    print("asking with", openai_key, "at", endpoint, flush=True)
    return [float(len(text)) for text in completions]

def explain(completions, **columns):
    raise RuntimeError("refused Bearer planted-bearer-1234")
"""
SECRETS = (
    "rewards.functions.0.args.openai_key=planted-key-1234",
    "rewards.functions.0.args.endpoint=http://me:planted-pass-1234@host/?sig=planted-sig-1234",
)


def with_reward(folder: Path) -> Path:
    (folder / "mine.py").write_text(REWARD)
    return write_recipe(folder, rewards={"functions": [{"name": "mine", "path": f"{folder / 'mine.py'}:reward"}]})


def planted(folder: Path) -> dict[str, int]:
    """Files with a secret in them."""
    return {
        str(path.relative_to(folder)): path.read_bytes().count(b"planted")
        for path in folder.rglob("*")
        if path.is_file() and b"planted" in path.read_bytes()
    }


@pytest.mark.parametrize("how", ["local", "ray"])
def test_no_secret_is_in_the_folder_of_a_run(tmp_path, how):
    command = ["train", str(with_reward(tmp_path)), "run.name=mine", f"runtime={how}", *SECRETS]
    start = gcore_process if how == "ray" else gcore
    done = start(*command, "run.steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "mine"
    assert planted(run) == {}
    assert (run / "config.yaml").stat().st_mode & 0o777 == 0o600
    if how == "ray":
        (log,) = (run / "logs").glob("rewards-*.log")
        assert "asking with ****************" in log.read_text() and "planted" not in done.stdout
        return
    resumed = gcore(*command, "run.steps=3", "run.resume=auto")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    refused = gcore("eval", str(run))
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, refused.stderr
    assert "rewards.functions.0.args.openai_key, rewards.functions.0.args.endpoint" in refused.stderr
    assert gcore("eval", str(run), *SECRETS).returncode == 0
    assert gcore("export", str(run), str(tmp_path / "out")).returncode == 0
    assert planted(run) == {} and os.path.isdir(tmp_path / "out")
