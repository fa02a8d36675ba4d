"""A mixture of experts learns, with the experts that its engine used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.e2e.helpers import gcore, steps, train, write_recipe

LOCAL = ("runtime=local", "run.steps=3", "data.eval=null", "training.warm_start.steps=10", "algorithm.mini_batches=2")
MIXTURE = (
    "observe.trackers=[]",
    "model.build.architecture=qwen3_moe",
    "model.build.intermediate_size=32",
    "model.build.experts=4",
)


def run(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    return steps(train(folder, name, *LOCAL, *MIXTURE, *overrides))


def test_controllers_and_resume(tmp_path: Path):
    one = run(tmp_path, "one")
    two = run(tmp_path, "two", "controllers=2")
    run(tmp_path, "parts", "run.steps=2")
    parts = run(tmp_path, "parts", "run.resume=auto")
    assert one[0]["actor/grad_norm"] > 0.1 and max(row["rollout/logprob_diff_max"] for row in one) < 1e-5
    for found in (two, parts):
        assert [row["samples_digest"] for row in found] == [row["samples_digest"] for row in one]
        for name in ("actor/loss", "actor/grad_norm", "rollout/importance_mean"):
            assert [row[name] for row in found] == pytest.approx([row[name] for row in one], abs=1e-4), name


def test_groups_that_wait_keep_their_experts(tmp_path: Path):
    """In the checkpoint, and in the step that trains on them after a resume."""
    late = ("sampling.max_staleness=1", "sampling.surplus=keep")
    run(tmp_path, "late", *late, "run.steps=2")
    saved = load_file(tmp_path / "runs" / "late" / "step_2" / "pending-0.safetensors")
    per_token = 2 * 2  # layers, active experts
    assert len(saved["experts"]) > 0 and len(saved["experts"]) % per_token == 0 and saved["experts"].max() < 4
    assert len(run(tmp_path, "late", *late, "run.resume=auto")) == 3


def test_a_dense_model_is_refused(tmp_path: Path):
    done = gcore("train", str(write_recipe(tmp_path)), *LOCAL, "training.router_replay=true")
    assert done.returncode == 2 and "training.router_replay=true: the model is of type qwen3" in done.stderr
