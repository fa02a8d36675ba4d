"""The length of a run: a function that ends it after a step, and epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gcore import UserError, train
from tests.e2e.helpers import RECIPE, gcore_process, rows, steps, untimed, write_recipe

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(9)]  # 27: 3 steps of 12
COUNTS = """import json
from pathlib import Path

def on_step(metrics):
    with Path(__file__).with_suffix(".jsonl").open("a") as file:
        file.write(json.dumps([metrics["step"], metrics["reward/mean"], "eval/accuracy" in metrics]) + "\\n")
    return metrics["step"] == 3
"""


def recipe(folder: Path, **run: Any) -> dict[str, Any]:
    return {
        **RECIPE,
        "run": {"name": "python", "dir": str(folder), "seed": 3, **run},
        "runtime": "local",
        "controllers": 2,
        "observe": {"progress": "none", "trackers": []},
        "training": {"lr": 3e-3},
    }


def test_a_run_that_is_ended_by_the_function_ends_as_any_other(tmp_path: Path) -> None:
    seen = []

    def on_step(metrics: dict[str, Any]) -> bool:
        seen.append(metrics)  # a list of this process: nothing of the function is copied
        return metrics["step"] == 2

    ended = train(recipe(tmp_path, steps=9), on_step=on_step)
    trained = [row for row in ended.rows if "samples_digest" in row]
    assert [row["step"] for row in seen] == [1, 2] and [untimed(row) for row in trained] == [*map(untimed, seen)]
    assert [row["step"] for row in ended.rows if "eval/accuracy" in row] == [0, 2]  # before, and at its end
    assert [path.name for path in ended.checkpoints] == ["step_2"]
    assert "steps              2, " in str(ended) and ended.report.is_file()

    whole = train(recipe(tmp_path, steps=3, name="whole"))
    resumed = train(recipe(tmp_path, steps=3), "run.resume=auto", on_step=seen.append)
    assert [row["step"] for row in seen] == [1, 2, 3]
    assert [untimed(row) for row in steps(resumed.rows)] == [untimed(row) for row in steps(whole.rows)]
    assert seen[-1]["eval/accuracy"] == whole.metrics["eval/accuracy"]  # the evaluation of the step comes before


def test_an_error_of_the_function_ends_the_run_with_its_line(tmp_path: Path) -> None:
    def on_step(metrics: dict[str, Any]) -> None:
        raise KeyError("reward/best")

    with pytest.raises(UserError) as error:
        train(recipe(tmp_path, steps=3), on_step=on_step)
    line = on_step.__code__.co_firstlineno + 1
    expected = f"run.on_step: test_on_step.py:{line} in on_step: KeyError: 'reward/best' (after step 1)"
    assert str(error.value) == expected


def test_with_several_controllers_it_is_called_once_per_step(tmp_path: Path) -> None:
    """From a recipe, with a process per role."""
    (tmp_path / "mine.py").write_text(COUNTS)
    on_step = f"run.on_step={tmp_path / 'mine.py'}:on_step"
    where = write_recipe(tmp_path)
    done = gcore_process("train", str(where), on_step, "run.name=ray", "controllers=2", "observe.eval_every=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run.on_step ended the run after step 3" in done.stdout
    seen = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    trained = steps(rows(tmp_path / "runs" / "ray"))
    assert seen == [[row["step"], row["reward/mean"], row["step"] == 2] for row in trained] and len(seen) == 3
    assert (tmp_path / "runs" / "ray" / "step_3" / "manifest.json").is_file()


def test_epochs_and_more_of_them_at_a_resume(tmp_path: Path) -> None:
    whole = train(recipe(tmp_path, epochs=2, name="whole"), data=ROWS)  # 54 prompts: 5 steps
    drawn = [group["row"] for group in whole.samples if group["phase"] == "train"]
    assert len(steps(whole.rows)) == 5 and set(drawn) <= set(range(27))
    first = train(recipe(tmp_path, epochs=1), data=ROWS)
    assert len(steps(first.rows)) == 3 and [path.name for path in first.checkpoints] == ["step_3"]
    config = tmp_path / "python" / "config.yaml"
    assert "\n  steps: auto\n  epochs: 1.0\n" in config.read_text()
    more = train(str(config), "run.resume=auto", "run.epochs=2", data=ROWS)
    assert [untimed(row) for row in steps(more.rows)] == [untimed(row) for row in steps(whole.rows)]
