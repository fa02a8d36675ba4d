"""A run whose judge is a server on this machine that stumbles now and then: every verdict is accounted for."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.e2e.helpers import RECIPE, gcore, rows, steps, write_recipe

TOKEN = "s3cr3t-s3cr3t"
TEMPLATE = "{{ prompt }}{{ response }} ({{ answer }})"


class Chat:
    """Says how near the answer is; of some seeds it is broken at first, of some it says nothing of use."""

    def __init__(self) -> None:
        self.happened: Counter[str] = Counter()
        self.turns: Counter[str] = Counter()

    async def models(self, request: web.Request) -> web.Response:
        self.happened["models"] += 1
        return web.json_response({"data": []})

    async def chat(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.happened["strangers"] += 1
            return web.Response(status=401)
        body = await request.json()
        text = json.dumps(body, sort_keys=True)
        self.turns[text] += 1
        if body["seed"] % 10 == 0 and self.turns[text] == 1:
            self.happened["broken"] += 1
            return web.Response(status=503)
        said = self.verdict(body)
        self.happened["unread" if said == "hm" else "read"] += 1
        return web.json_response({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]})

    def verdict(self, body: dict[str, Any]) -> str:
        if body["seed"] % 7 == 0:
            return "hm"
        content = body["messages"][0]["content"]
        response, answer = content.partition("=")[2].removesuffix(")").split(" (")
        return str(sum(a == b for a, b in zip(response, answer, strict=False)))


@pytest.fixture
def server() -> Iterator[tuple[str, Chat]]:
    """Its address. It has a thread of its own: the run is another process, and the test waits for that."""
    chat, started, address = Chat(), threading.Event(), list[str]()
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", chat.models), web.post("/v1/chat/completions", chat.chat)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        started.set()
        await done.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(60)
        yield address[0], chat
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()


def recipe(folder: Path, url: str) -> Path:
    judge = {"name": "near", "url": url, "token_env": "JUDGE_TOKEN", "template": TEMPLATE, "repeats": 2, "attempts": 4}
    data = {name: value for name, value in RECIPE["data"].items() if name != "eval"}
    return write_recipe(folder, rewards={"judges": [judge]}, data=data, runtime="local")


def test_every_verdict_is_accounted_for(tmp_path, server, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)
    url, chat = server
    done = gcore("train", str(recipe(tmp_path, url)), "run.steps=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert TOKEN not in done.stdout + done.stderr
    found = steps(rows(tmp_path / "runs" / "tiny"))
    assert len(found) == 3
    for row in found:
        assert row["sampling/drawn"] == row["sampling/trained"] == 12 and row["reward/errors"] == 0
        assert row["reward/verdicts"] - row.get("reward/unparsed", 0) == 12 * 4 * 2  # prompts, siblings, repeats
    total = {name: sum(row.get(f"reward/{name}", 0) for row in found) for name in ("unparsed", "http_retries")}
    assert chat.happened == {
        "models": 1,  # one look at the start
        "read": 3 * 12 * 4 * 2,
        "unread": total["unparsed"],
        "broken": total["http_retries"],
    }
    assert total["unparsed"] > 0 and total["http_retries"] > 0
    assert len({row["reward/mean"] for row in found}) > 1
    written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert any(path.name == "config.yaml" for path in written)
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]


def test_a_judge_annotates_pairs(tmp_path, server, monkeypatch):
    """Online DPO: a pairwise judge, which prefers longer answers, decides which of the policy's own answers are chosen.
    The policy learns to answer at length."""
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)
    url, chat = server

    def longer(body: dict[str, Any]) -> str:
        first, second = body["messages"][0]["content"].split("|")
        return "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"

    monkeypatch.setattr(chat, "verdict", longer)
    judge = {"name": "longer", "url": url, "token_env": "JUDGE_TOKEN", "mode": "pairwise", "opponents": 3}
    judge |= {"template": "{{ response_a }}|{{ response_b }}", "verdict": "(A|B|tie)"}
    judge["values"] = {"A": 1.0, "B": 0.0, "tie": 0.5}
    data = {name: value for name, value in RECIPE["data"].items() if name != "eval"}
    tree = {"rewards": {"judges": [judge]}, "data": data, "runtime": "local", "objective": "dpo"}
    preference = {"pairs": "rollouts", "beta": 1.0}
    path = write_recipe(tmp_path, **tree, preference=preference, training={"lr": 3e-3})
    done = gcore("train", str(path), "run.steps=8", "observe.trackers=[]")
    assert done.returncode == 0, done.stdout + done.stderr
    found = steps(rows(tmp_path / "runs" / "tiny"))
    assert all(row["reward/zero_spread_frac"] == 0 and row["preference/loss"] > 0 for row in found)
    lengths = [row["response_length/mean"] for row in found]
    assert lengths[-1] > lengths[0] + 0.5


def test_a_missing_server_is_found_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)
    done = gcore("train", str(recipe(tmp_path, "http://127.0.0.1:1/v1")))
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and "rewards.judges.0.url: no server answers at http://127.0.0.1:1/v1/models" in lines[0]
    assert not (tmp_path / "runs" / "tiny").exists()
