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
