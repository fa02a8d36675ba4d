"""The promise of the quickstart, in short: under Ray, as it is shipped, the pupil outgrows the teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.helpers import gcore_process, rows, steps

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


MEGATRON = ("training.backend=megatron", "placement.trainer={ranks: 2, pipeline_parallel: 2}")


@pytest.mark.parametrize("changes", [(), pytest.param(MEGATRON, marks=pytest.mark.release)], ids=["fsdp", "megatron"])
def test_quickstart_learns(tmp_path, changes):
    if changes:
        pytest.importorskip("megatron.core")
    shorter = ("run.steps=30", "training.warm_start.steps=200", *changes)
    done = gcore_process("train", str(RECIPE), f"run.dir={tmp_path}", *shorter)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(tmp_path / "quickstart")
    accuracy = [row["eval/accuracy"] for row in found if "eval/accuracy" in row]
    rewards = [row["reward/mean"] for row in steps(found)]
    assert accuracy[0] <= 0.5 and accuracy[-1] >= 0.85, accuracy
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
    assert max(row["rollout/logprob_diff_mean"] for row in steps(found)) < 1e-4
