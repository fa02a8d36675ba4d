"""The log of samples in a run: the same for any number of controllers and after a resume, and training knows nothing of
it."""

from __future__ import annotations

import shutil

from gcore.observe.samples import read_samples
from tests.e2e.helpers import gcore, steps, train, untimed, write_recipe


def test_samples_of_a_run(tmp_path):
    overrides = ("runtime=local", "run.steps=4", "checkpoint.every=2", "observe.eval_every=2")
    one = train(tmp_path, "one", *overrides, "controllers=1")
    three = train(tmp_path, "three", *overrides, "controllers=3")
    without = train(tmp_path, "none", *overrides, "controllers=3", "observe.samples_per_step=0")
    runs = tmp_path / "runs"
    found = read_samples(runs / "one")
    assert found == read_samples(runs / "three")
    assert [(row["step"], row["phase"]) for row in found] == [
        (0, "eval"), (0, "eval"), (1, "train"), (1, "train"), (2, "eval"), (2, "eval"), (2, "train"), (2, "train"),
        (3, "train"), (3, "train"), (4, "eval"), (4, "eval"), (4, "train"), (4, "train"),
    ]  # fmt: skip
    first = next(row for row in found if row["phase"] == "train")
    assert len(first["samples"]) == 4 and first["samples"][0]["parts"].keys() == {"exact"}
    assert first["messages"][0][1].endswith("=") and first["answer"].isdigit()
    assert [untimed(row) for row in steps(one)] == [untimed(row) for row in steps(without)]
    assert [untimed(row) for row in steps(three)] == [untimed(row) for row in steps(without)]
    assert not (runs / "none" / "samples").exists() and not (runs / "none" / "samples.html").exists()
    assert 'href="samples.html"' in (runs / "one" / "report.html").read_text()
    assert 'href="report.html"' in (runs / "one" / "samples.html").read_text()
    # a resume forgets what came after its checkpoint, and writes it again
    shutil.rmtree(runs / "three" / "step_4")
    recipe = str(write_recipe(tmp_path))
    done = gcore("train", recipe, "run.name=three", *overrides, "controllers=2", "run.resume=auto")
    assert done.returncode == 0 and "at step 2" in done.stdout, done.stdout + done.stderr
    assert read_samples(runs / "three") == found
