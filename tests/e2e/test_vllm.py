"""recipes/vllm_judge.yaml, a few steps of it: vLLM as policy and as judge, two controllers, Ray."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.e2e.helpers import gcore_process, rows, steps

RECIPE = Path(__file__).parents[2] / "recipes" / "vllm_judge.yaml"
SMALL = (
    "run.steps=3",
    "sampling.prompts_per_step=12",
    "sampling.samples_per_prompt=4",
    "training.warm_start.steps=40",
    "training.warm_start.batch_size=64",
    "data.eval.size=20",
    "observe.progress=plain",
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.release,  # three processes that import vLLM; test_lora.py has a shorter run with it
]


def test_policy_and_judge_on_vllm(tmp_path):
    done = gcore_process("train", str(RECIPE), f"run.dir={tmp_path}", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 x engine, 1 x judge-grader, 1 x trainer, 2 x controller ready" in done.stdout
    found = steps(rows(tmp_path / "vllm-judge"))
    assert [row["step"] for row in found] == [1, 2, 3]
    for row in found:
        dropped = sum(count for name, count in row.items() if name.startswith("sampling/dropped_"))
        assert row["sampling/drawn"] == row["sampling/trained"] + dropped and row["sampling/pending"] == 0
        assert row["sampling/trained"] == 12 and row["batch/samples"] == 48
        assert row["rollout/logprob_diff_mean"] < 1e-5  # 3e-7 was seen: float32 on both sides
        assert row["reward/errors"] == row["staleness/max"] == 0
        assert row["reward/verdicts"] >= 4 * row["sampling/drawn"] and 0 < row["reward/grader"] <= 0.9
        assert row["reward/mean"] == pytest.approx(row["reward/exact"] + 0.1 * row["reward/grader"])
