"""A run that draws prompts by pass rate: the same for any number of controllers, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.helpers import steps, train, untimed

LOCAL = ("runtime=local", "run.steps=4", "data.eval=null", "training.warm_start.steps=25", "observe.trackers=[]")


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(("sampling.curriculum={}", "sampling.filter=spread"), marks=pytest.mark.release),
        ("sampling.curriculum.order=easy_first",),
    ],
    ids=["near_half", "easy_first"],
)
def test_controllers_and_resume(tmp_path: Path, keys: tuple[str, ...]):
    one = [untimed(row) for row in steps(train(tmp_path, "one", *LOCAL, *keys))]
    assert 0 < one[-1]["curriculum/pass_rate"] < 1 and one[-1]["curriculum/seen_frac"] > 0.5
    for controllers in (2, 4):
        found = steps(train(tmp_path, f"of{controllers}", *LOCAL, *keys, f"controllers={controllers}"))
        assert [untimed(row) for row in found] == one
    train(tmp_path, "parts", *LOCAL, *keys, "run.steps=2")
    parts = steps(train(tmp_path, "parts", *LOCAL, *keys, "run.resume=auto", "controllers=2"))
    assert [untimed(row) for row in parts] == one
    plain = steps(train(tmp_path, "plain", *LOCAL))
    assert [row["samples_digest"] for row in plain] != [row["samples_digest"] for row in one]
    state = json.loads((tmp_path / "runs" / "one" / "step_4" / "state.json").read_text())["curriculum"]
    assert len(state["rows"]) == len(state["rates"]) > 12
