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


AGENT = """
import re, sys
from types import SimpleNamespace
sys.path.insert(0, {root!r})
from examples.prices import Shop, price

class TooLong(Exception):
    code = "context_length_exceeded"

class Agent:
    rubric = SimpleNamespace(funcs=[lambda completion, answer: float(completion == answer)])
    def get_dataset(self): return Shop().rows("train", 8000)
    def get_eval_dataset(self): return Shop().rows("eval", 8)
    async def rollout(self, client, model, prompt, **_):
        messages = list(prompt)
        for _ in range(4):
            made = await client.chat.completions.create(model=model, messages=messages, stop=["?"])
            (choice,) = made.choices
            if choice.finish_reason == "length":
                raise TooLong("no room")
            messages.append({{"role": "assistant", "content": choice.message.content}})
            if (asked := re.fullmatch(r"(\\w+)[?]", choice.message.content)) is None:
                break
            messages.append({{"role": "tool", "tool_call_id": "1", "content": price(asked[1])}})
        return choice.message.content, {{}}
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


def test_an_agent_with_a_client_of_openai_gives_the_same_samples(tmp_path, monkeypatch):
    """The prices are asked for by an agent that runs in the process of environments and only knows HTTP."""
    pytest.importorskip("openai")
    monkeypatch.chdir(ROOT)
    (tmp_path / "agent.py").write_text(AGENT.format(root=str(ROOT)))
    own = rows_of(tmp_path / "own")
    by_http = rows_of(tmp_path / "http", f"environment.source={tmp_path}/agent.py:Agent")
    for mine, theirs in zip(own, by_http, strict=True):
        assert mine["samples_digest"] == theirs["samples_digest"] and mine["reward/mean"] == theirs["reward/mean"]
        assert mine["environment/turns"] > 1
