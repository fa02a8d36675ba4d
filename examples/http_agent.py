"""An agent that only knows HTTP: a program of its own, with an OpenAI-compatible address and a key, nothing of G-Core.

`ctx.serve` opens one address per sample. The agent adds two numbers, looks at the answer of the policy, and asks once
more if it is wrong. Everything that the policy sampled is recorded with its logprobs, and trained on.

gcore train recipes/quickstart.yaml workflow=examples/http_agent.py:workflow model.build.alphabet='0123456789+=?' \
    generation.max_response_length=12 rewards.functions.0.path=examples/http_agent.py:last_answer
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

from gcore.protocols import Context
from gcore.types import Prompt, Scored


def agent(base_url: str, api_key: str, question: str, answer: str) -> str:
    """With the package openai it would be OpenAI(base_url=base_url, api_key=api_key).chat.completions.create(...)."""

    def ask(messages: list[dict[str, Any]]) -> str:
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 5}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as found:
            text: str = json.load(found)["choices"][0]["message"]["content"]
            return text

    messages = [{"role": "user", "content": question}]
    said = ask(messages)
    if said != answer:
        said = ask([*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "?"}])
    return said


async def workflow(ctx: Context, prompt: Prompt) -> list[Scored]:
    question, answer = prompt.columns["prompt"], prompt.columns["answer"]
    async with ctx.serve(prompt) as sessions:
        agents = (asyncio.to_thread(agent, s.base_url, s.api_key, question, answer) for s in sessions)
        await asyncio.gather(*agents)
        group = [session.rollout for session in sessions]
    return await ctx.reward(group)


def last_answer(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 if the last answer is right, minus 0.2 if it took two."""
    said = zip((text.rpartition("?") for text in completions), answer, strict=True)
    return [float(last == wanted) * (0.8 if asked else 1.0) for (_, asked, last), wanted in said]
