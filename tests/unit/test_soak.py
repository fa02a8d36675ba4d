"""What bench/soak.py calls lost, doubled, left behind or grown."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.soak import EXPERIMENTS, RECIPES, Scene, growth_table, lost_samples, write_recipe
from bench.soak_run import Run, theil_sen
from gcore.config.load import load_config


@pytest.fixture
def scene(tmp_path):
    return Scene(EXPERIMENTS[0], tmp_path, random.Random(0), lambda *_: [], 1.0)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "judged"])  # that one needs a saved model
def test_recipes_are_valid(tmp_path, name):
    assert load_config(write_recipe(name, tmp_path), []).controllers == 2


def written(folder: Path, prompts: list[int], **row: int) -> list[dict[str, Any]]:
    """A run of one step that has trained these prompts."""
    (folder / "samples").mkdir()
    lines = [json.dumps({"step": 1, "phase": "train", "prompt": prompt, "samples": []}) for prompt in prompts]
    (folder / "samples" / "controller-0.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text("{observe: {samples_per_step: 3}, sampling: {prompts_per_step: 3}}")
    return [{"step": 1, "sampling/drawn": 4, "sampling/trained": 3, "sampling/dropped_reward_error": 1, **row}]


@pytest.mark.parametrize(
    ("prompts", "row", "problem"),
    [
        ([0, 1, 3], {}, None),
        ([0, 1, 1], {}, "trained twice"),
        ([0, 1, 4], {}, "from 4 drawn"),
        ([0, 1], {}, "2 prompts of 3"),
        ([0, 1, 3], {"sampling/drawn": 5}, "5 prompts drawn, 3 trained, 1 dropped"),
    ],
)
def test_lost_and_doubled_samples(tmp_path, prompts, row, problem):
    found = lost_samples(tmp_path, written(tmp_path, prompts, **row))
    assert problem in found[0] if problem else found == []


def test_growth_is_the_slope_of_the_later_steps_and_not_a_jump(scene):
    steps = range(0, 3000, 30)
    sizes = {
        "leaks": [50 + 0.0011 * step for step in steps],
        "jumps": [50 + 9 * (step > 2700) for step in steps],
        "fills a cache": [50 + min(step, 1000) * 0.01 for step in steps],
    }
    points = {(name, 1): list(zip(steps, found, strict=True)) for name, found in sizes.items()}
    points |= {("replaced", pid): [(step, 7.0 + step % 2) for step in range(pid, pid + 90, 30)] for pid in steps[::3]}
    points["brief", 1] = [(2000, 1.0), (2030, 2.0), (2060, 3.0)]
    table = growth_table(scene, points, 3000)
    assert "| leaks | 51.1 | 53.3 | +1.10 |" in table and "| replaced (34 processes) | 7.0 | 7.0 | +0.00 |" in table
    assert scene.notes == ["too short-lived to be judged: brief"]
    assert scene.problems == ["leaks grows by 1.10 MB per 1,000 steps, the limit is 1"]


def test_an_outlier_does_not_move_the_slope():
    assert theil_sen([0, 1, 2, 3, 4], [0, 2, 4, 99, 8]) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gcore: trainer-0 died: killed\n", None),
        ("gcore: /r/reward.png is not written (full)\ngcore: trainer-0 died: killed\n", None),
        ("gcore: engine-0 died: killed\n", "does not name"),
        ("gcore: trainer-0: RayActorError\n", "Ray's own"),
        ("gcore: trainer-0 died\ngcore: trainer-0 died\n", "2 lines"),
        ("Traceback (most recent call last)\ngcore: trainer-0 died\n", "a traceback"),
    ],
)
def test_a_cause_is_one_line(scene, text, problem):
    scene._judge_cause(SimpleNamespace(text=text, output="0.out"), "trainer-0", "")
    assert (problem in scene.problems[0]) if problem else scene.problems == []


def test_a_process_that_outlives_its_driver_is_seen_and_ended(tmp_path):
    run = Run(tmp_path / "missing.yaml", tmp_path, tmp_path / "runs" / "a")
    orphan = subprocess.Popen(["sleep", "1000"], env=run.environment, start_new_session=True)
    try:
        assert run.wait(240) == 2, run.text
        assert run.left(limit_s=0.0) == ["sleep 1000"]
        assert orphan.wait(60) == -signal.SIGKILL
    finally:
        orphan.kill()
