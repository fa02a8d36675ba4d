"""A run in which nothing is computed: emulated engines, judge and trainer under real controllers. Its books balance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.helpers import gcore, rows, steps

ALPHABET = "0123456789+-*/= "
RECIPE: dict[str, Any] = {
    "run": {"name": "emulated", "steps": 3, "seed": 1},
    "runtime": "local",
    "controllers": 2,
    "model": {"build": {"alphabet": ALPHABET, "max_length": 200}},
    "data": {"train": {"task": "arithmetic"}, "max_prompt_length": 32},
    "generation": {
        "engine": "emulated",
        "emulated": {"base_s": 1e-4, "prefill_s_per_token": 5e-7, "mean_tokens": 40},
        "max_response_length": 120,
        "max_concurrent": 8,
    },
    "rewards": {
        "judges": [
            {
                "name": "judge",
                "model": {"build": {"alphabet": ALPHABET, "max_length": 400}},
                "template": "{{ prompt }}{{ response }}",
                "verdict": r"(\d)",
                "engine": "emulated",
                "emulated": {"base_s": 1e-4, "mean_tokens": 30, "sigma": 0.2},
                "replicas": 2,
                "max_prompt_length": 200,
                "max_response_length": 60,
            }
        ]
    },
    "sampling": {
        "prompts_per_step": 8,
        "samples_per_prompt": 4,
        "filter": "FILTER",
        "deterministic": False,
    },
    "training": {"backend": "emulated", "emulated": {"seconds_per_token": 5e-6}},
    "placement": {"policy": {"replicas": 2}, "trainer": {"ranks": 1}},
    "observe": {"progress": "plain"},
}
FILTER = """
def keep(group):
    return group[0].rollout.prompt.id % 3 > 0, "third"
"""


PLACED = "placement={mode: dynamic, slots: 4, trainer: {ranks: 1}}"


@pytest.mark.parametrize(
    ("mode", "oldest"),
    [
        (["sampling.surplus=abort"], 0),
        (["sampling.surplus=keep", "generation.sleep=2"], 1),  # unfinished groups continue after engines have slept
        (["sampling.surplus=keep", PLACED, "generation.sleep=2"], 1),
    ],
    ids=["abort", "keep", "keep, placed"],
)
def test_an_emulated_run_trains_saves_resumes_and_loses_nothing(tmp_path: Path, mode: list[str], oldest: int):
    (tmp_path / "keep.py").write_text(FILTER)
    recipe = tmp_path / "emulated.yaml"
    sampling = {**RECIPE["sampling"], "filter": f"{tmp_path / 'keep.py'}:keep"}
    recipe.write_text(yaml.safe_dump({**RECIPE, "run": {**RECIPE["run"], "dir": str(tmp_path)}, "sampling": sampling}))
    folder = tmp_path / "emulated"
    for total in (3, 5):
        done = gcore("train", str(recipe), f"run.steps={total}", "run.resume=auto", *mode)
        assert done.returncode == 0, done.stdout + done.stderr
        found = steps(rows(folder))
        assert [row["step"] for row in found] == list(range(1, total + 1))
        assert {row["batch/samples"] for row in found} == {32}
        assert {row["sampling/trained"] for row in found} == {8}
        drawn, trained, dropped = (
            sum(row.get(f"sampling/{name}", 0) for row in found) for name in ("drawn", "trained", "dropped_third")
        )
        assert drawn == trained + dropped + found[-1]["sampling/pending"]
        assert dropped > 0
        assert {row["reward/errors"] for row in found} == {0}
        assert max(row["staleness/max"] for row in found) == oldest
        saved = json.loads((folder / f"step_{total}" / "emulated_trainer.json").read_text())
        assert saved == {"updates": total}
