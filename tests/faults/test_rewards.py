"""Rewards that fail in every way they can, under dynamic sampling and two controllers.

Nothing is lost, nothing becomes a 0, and the counts add up: drawn = trained + dropped by reason + pending.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from gcore.config.base import Model
from gcore.config.judges import ServedJudge
from gcore.config.rewards import HttpReward, Rewards
from gcore.config.tree import Config
from gcore.content.text import TextModality
from gcore.content.tokens import Tokens
from gcore.controller.collect import Collector, spread
from gcore.controller.prompt_ledger import Collected
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.protocols import Rendezvous
from gcore.rewarding.http import HttpSource
from gcore.rewarding.judge import JudgeSource
from gcore.rewarding.judge_backend import EngineBackend
from gcore.rewarding.rewarder import WeightedRewarder
from gcore.rewarding.workers import WorkerPool
from gcore.runtime.local import Hub, LocalGroup
from gcore.types import Completion, Prompt
from gcore.workflows.context import SharedContext, generate_and_reward
from tests.e2e.helpers import RECIPE

TOKENIZER = build_char_tokenizer("0123456789+=")
STEPS, CONTROLLERS = 3, 2
# good(n): a reward of at least 1 for each sibling, with spread; `unlucky` is which prompts meet the fault
COMMON = """
import os, random, time, math
def good(completions):
    return [1.0 + (i % 2) for i, _ in enumerate(completions)]
def unlucky(answer):
    return int(answer[0]) % 8 == 3
"""
ALWAYS = {  # what an unlucky prompt does every time: it is dropped, and counted
    "raises": "raise RuntimeError('not today')",
    "hangs": "time.sleep(1000)",
    "spins": "\n        while True: pass",
    "dies": "os._exit(7)",
    "None": "return [None] * len(completions)",
    "NaN": "return [math.nan] * len(completions)",
    "inf": "return [1.0, math.inf] * (len(completions) // 2)",
    "strings": "return ['1.0'] * len(completions)",
    "wrong length": "return [1.0]",
}


class Engine:
    """Any tokens at all, from the noise of the request."""

    async def generate(self, requests: list[Any], **line: Any) -> list[Completion]:
        await asyncio.sleep(0)
        return [self._one(request.noise_key) for request in requests]

    def _one(self, key: int) -> Completion:
        tokens = np.random.default_rng(key).integers(4, 14, 4).astype(np.int32)
        return Completion(Tokens.steps(tokens), np.zeros(4, np.float32), np.zeros(4, np.int32), "stop")


class Source:
    def at(self, number: int) -> Prompt:
        message = {"role": "user", "content": f"{number}="}
        return Prompt(
            number, number, (message,), f"{number}=", Tokens(np.array([1], np.int32)), {"answer": str(number)}
        )


async def run(rewarders: list[WeightedRewarder], per_step: int = 8) -> list[list[Collected]]:
    config = Config.model_validate(
        {**RECIPE, "sampling": {"filter": "spread", "prompts_per_step": per_step, "samples_per_prompt": 4}}
    )
    hub = Hub(CONTROLLERS)

    async def controller(rank: int) -> list[Collected]:
        shared = SharedContext(config, Engine(), rewarders[rank], TextModality(config.generation, TOKENIZER, (2,)))  # type: ignore[arg-type]
        group = LocalGroup(Rendezvous(rank, CONTROLLERS, None, hub))
        source: Any = Source()
        rest = config.sampling, spread, lambda _: None, source, lambda: 0
        collector = Collector(generate_and_reward, shared, group, *rest)
        return [await collector.step(step) for step in range(1, STEPS + 1)]

    try:
        return list(await asyncio.wait_for(asyncio.gather(*map(controller, range(CONTROLLERS))), 300))
    finally:
        for rewarder in rewarders:
            rewarder.close()


def assert_nothing_is_lost(found: list[list[Collected]], per_step: int = 8) -> Counter[str]:
    steps = [part for controller in found for part in controller]
    trained = [group for part in steps for group in part.groups]
    dropped = sum((part.dropped for part in steps), Counter[str]())
    assert sum(part.drawn for part in steps) == len(trained) + dropped.total()  # strict order: nothing is pending
    assert len(trained) == len({group[0].rollout.prompt.id for group in trained}) == STEPS * per_step
    assert all(s.reward >= 1.0 for group in trained for s in group)  # no failure became a 0
    return dropped


SLOW = pytest.mark.release  # several time limits


def write(tmp_path: Any, body: str, timeout_s: float = 30) -> Rewards:
    file = tmp_path / "f.py"
    file.write_text(COMMON + body)
    spec = {"name": "f", "path": f"{file}:f", "timeout_s": timeout_s}
    return Rewards.model_validate({"functions": [spec], "attempts": 2})


def with_workers(rewards: Rewards) -> list[WeightedRewarder]:
    return [WeightedRewarder(WorkerPool(rewards, 1).sources, backoff_s=0.01) for _ in range(CONTROLLERS)]


@pytest.mark.parametrize("fault", [pytest.param(f, marks=SLOW) if f in ("hangs", "spins") else f for f in ALWAYS])
def test_a_function_that_fails_some_prompts(tmp_path, fault):
    """The unlucky prompts among those drawn, and no others, are dropped, each after two tries."""
    head = "def f(completions, answer, **_):\n"
    body = f"{head}    if unlucky(answer): {ALWAYS[fault]}\n    return good(completions)\n"
    # A worker that is well answers within this time, also on a busy machine.
    rewarders = with_workers(write(tmp_path, body, 4 if fault in ("hangs", "spins") else 30))
    found = asyncio.run(run(rewarders))
    dropped = assert_nothing_is_lost(found)
    drawn = sum(part.drawn for controller in found for part in controller)
    assert dropped == {"reward_error": sum(n % 8 == 3 for n in range(drawn))}


def test_a_function_that_raises_now_and_then(tmp_path):
    """20 % of all calls; three tries are nearly always enough, and what is left is counted."""
    body = (
        "here = random.Random(5)\n"
        "def f(completions, **_):\n"
        "    if here.random() < 0.2: raise OSError('flaky')\n"
        "    return good(completions)\n"
    )
    rewards = write(tmp_path, body).model_copy(update={"attempts": 3})
    rewarders = with_workers(rewards)
    dropped = assert_nothing_is_lost(asyncio.run(run(rewarders)))
    retries = sum(rewarder.take_counts().get("retries", 0) for rewarder in rewarders)
    assert retries > 2 * dropped.total() and retries > 0


@pytest.mark.parametrize("fault", ["500", "429", "garbage", "slow", "404"])
def test_a_server_that_fails(fault):
    """Trouble that passes is waited out; a request it will never take costs its prompt, at once."""
    seen: Counter[str] = Counter()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        number = body["answer"][0]
        seen[number] += 1
        if random.Random(number).random() < 0.3 and (seen[number] == 1 or fault == "404"):
            match fault:
                case "500" | "404":
                    return web.Response(status=int(fault), text="no")
                case "429":
                    return web.Response(status=429, headers={"Retry-After": "0"})
                case "garbage":
                    return web.Response(text="<html>")
                case "slow":
                    await asyncio.sleep(1000)
        return web.json_response({"rewards": [1.0 + (i % 2) for i in range(len(body["completions"]))]})

    async def main() -> tuple[list[list[Collected]], list[WeightedRewarder]]:
        app = web.Application()
        app.router.add_post("/", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        spec = HttpReward(
            name="server", url=f"http://127.0.0.1:{port}/", timeout_s=3 if fault == "slow" else 30, attempts=3
        )
        sources = [HttpSource(spec) for _ in range(CONTROLLERS)]
        for source in sources:
            source.client.first_delay_s = 0.01
        rewarders = [WeightedRewarder([source]) for source in sources]
        try:
            return await run(rewarders), rewarders
        finally:
            await runner.cleanup()

    found, rewarders = asyncio.run(main())
    dropped = assert_nothing_is_lost(found)
    drawn = sum(part.drawn for controller in found for part in controller)
    unlucky = sum(random.Random(str(n)).random() < 0.3 for n in range(drawn))
    counts = sum((Counter(rewarder.take_counts()) for rewarder in rewarders), Counter[str]())
    assert unlucky
    if fault == "404":
        assert dropped == {"reward_error": unlucky} and not counts["http_retries"]
    else:
        # A prompt that was aborted after its fault is drawn again, and then the server answers without a retry.
        assert not dropped and counts["http_retries"] > 0


def test_a_judge_that_never_answers_in_format():
    """It is asked again, and again; then its prompt is dropped, and every unreadable verdict is counted."""

    def ask_for(seen: Counter[str]) -> Any:
        async def ask(tokens_P: Any, params: Any, key: tuple[Any, ...]) -> Completion:
            number = key[1]
            text = "=" if random.Random(number).random() < 0.3 else str(1 + key[2] % 2)
            seen["unreadable"] += text == "="
            tokens = np.asarray(TOKENIZER(text, add_special_tokens=False)["input_ids"] + [2], np.int32)
            return Completion(
                Tokens.steps(tokens), np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop"
            )

        return ask

    seen: Counter[str] = Counter()
    spec = ServedJudge(
        name="judge", model=Model(path="x"), template="{{ prompt }}{{ response }}", verdict=r"(\d)", attempts=3
    )
    voices = [EngineBackend(spec, TOKENIZER, (2,), ask_for(seen), "rewards.judges.0") for _ in range(CONTROLLERS)]
    rewarders = [WeightedRewarder([JudgeSource(spec, backend)]) for backend in voices]
    found = asyncio.run(run(rewarders))
    dropped = assert_nothing_is_lost(found)
    drawn = sum(part.drawn for controller in found for part in controller)
    unlucky = sum(random.Random(n).random() < 0.3 for n in range(drawn))
    assert dropped == {"reward_error": unlucky} and unlucky
    counted = sum(rewarder.take_counts()["unparsed"] for rewarder in rewarders)
    assert 0 < counted <= seen["unreadable"]  # when a group is dropped, verdicts about its other samples are not read
