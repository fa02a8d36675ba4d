"""The recipe of an agent: a tool of an environment, over several turns, and the same tool of an MCP server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gcore import train
from tests.e2e.helpers import steps

ROOT = Path(__file__).parents[2]
SMALL = [
    *("runtime=local", "run.steps=2", "observe.progress=none", "observe.trackers=[]", "data.eval.size=8"),
    *("training.warm_start.steps=40", "model.build.hidden_size=64", "sampling.prompts_per_step=8"),
]


FAULTY = """
import os, random, sys
sys.path.insert(0, {root!r})
from examples.prices import Shop

class Faulty(Shop):
    def step(self, action):
        chance = random.random()
        if chance < 0.01:
            os._exit(3)
        if chance < 0.06:
            raise ConnectionError("status 500")
        if chance < 0.1:
            return b"garbage"
        return super().step(action)
"""


def rows_of(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    return steps(train("recipes/agent.yaml", f"run.dir={folder}", *SMALL, *overrides).rows)


def test_a_tool_of_a_class_and_of_an_mcp_server_give_the_same_samples(tmp_path, monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.chdir(ROOT)
    own = rows_of(tmp_path / "own")
    assert all(row["environment/episodes"] >= 64 and row["environment/tool_calls"] > 0 for row in own)
    assert not any(name.startswith("environment/failed") for row in own for name in row if "context" not in name)
    served = rows_of(
        tmp_path / "mcp",
        "environment.source=mcp:python examples/prices.py",
        "environment.args.game=examples/prices.py:Shop",
    )
    for mine, theirs in zip(own, served, strict=True):
        assert mine["samples_digest"] == theirs["samples_digest"] and mine["reward/mean"] == theirs["reward/mean"]


def test_failing_calls_and_more_controllers_change_no_sample(tmp_path, monkeypatch):
    """One of ten calls fails: its episode begins again with the same noise. No sample is lost, and none is scored 0."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "faulty.py").write_text(FAULTY.format(root=str(ROOT)))
    own = rows_of(tmp_path / "own", "controllers=2")
    faults = [f"environment.source={tmp_path}/faulty.py:Faulty", "environment.retries=20", "controllers=1"]
    faulty = rows_of(tmp_path / "faulty", *faults, "environment.processes=2")
    assert sum(row.get("environment/cause_raised", 0) for row in faulty) > 0
    assert sum(row.get("environment/cause_bad_answer", 0) for row in faulty) > 0
    for mine, theirs in zip(own, faulty, strict=True):
        assert mine["samples_digest"] == theirs["samples_digest"] and mine["reward/mean"] == theirs["reward/mean"]
        assert theirs["environment/retried"] > 0
