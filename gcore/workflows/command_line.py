"""Agents of the command line, unchanged: each sample is one run of a program in a sandbox, which reaches the policy by
its OpenAI-compatible endpoint and nothing else of any network.

    ctx.serve ──address, key──> environment of the agent ──HTTP──> address inside ──sandbox.reach──> Session
    ctx.sandbox ──files of the task──> agent ──exit code, output, files──> score(run), or the rewards of the recipe

A run that fails has a cause and no score: it is tried again if the sandbox failed, else its sample is dropped. If too
few samples are left, the group is dropped and counted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from gcore.protocols import Context
from gcore.sandbox.base import KILLED, START, Command, Result, Sandbox, SandboxError
from gcore.types import EnvironmentFailure, Prompt, Rollout, Scored, UserError
from gcore.workflows.session import Session

SILENT, EXIT = "silent", "exit"  # causes, beside those of sandboxes
RETRIED = (START, KILLED, SILENT)
SAID = 300  # characters of the output of an agent, in messages


class AgentFailure(EnvironmentFailure):
    """A run of an agent without a score. `cause`: exit, silent (no request to the policy), or one of a sandbox."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(cause, f"agent: {cause}: {detail}")


@dataclasses.dataclass(frozen=True, slots=True)
class AgentRun:
    """A run that has ended. Its sandbox is still there: `await run.box.read("answer.txt")`, or tests with `run`."""

    prompt: Prompt
    result: Result
    box: Sandbox
    rollout: Rollout  # all its conversations


Score = Callable[[AgentRun], Awaitable[float]]


def command_line_agent(
    command: Command,
    *,
    folder: str | Callable[[Prompt], str] | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float | None = None,
    codes: Collection[int] | None = (0,),
    attempts: int = 2,
    answer: str | None = None,
    score: Score | None = None,
    name: str = "agent",
) -> Callable[[Context, Prompt], Awaitable[list[Scored]]]:
    """A workflow for recipes with a section `sandbox`. `command`: its environment has PROMPT, the text of the last
    message of the prompt, and address and key of the policy, see `agent_environment`.

    `folder`: its files are copied into the working folder; `codes`: exit codes that are no failure (None: all).
    `answer`: a file whose text the rewards of the recipe judge, instead of the policy's text; "" if there is none.
    `score`: scores a run itself, as the reward `name` (rewards.by_workflow).
    """

    async def sample(ctx: Any, prompt: Prompt, session: Session) -> Scored:
        place = folder(prompt) if callable(folder) else folder
        async with ctx.sandbox(place) as box:
            variables = {**agent_environment(*await _inside(box, session), prompt), **(env or {})}
            result = await box.run(command, seconds=seconds, env=variables)
            if result.cause:
                raise AgentFailure(result.cause, _said(result))
            if codes is not None and result.code not in codes:
                raise AgentFailure(EXIT, f"code {result.code}: {_said(result)}")
            if not session.rollouts:
                raise AgentFailure(SILENT, f"it ended without a request to the policy: {_said(result)}")
            rollout = session.rollout
            if answer is not None:
                rollout = dataclasses.replace(rollout, output=await _text_of(box, answer))
            if score is None:
                return Scored(rollout, 0.0)  # the rewards of the recipe replace it
            reward = float(await score(AgentRun(prompt, result, box, rollout)))
            if not math.isfinite(reward):
                raise UserError(f"the score of an agent is {reward}; expected a finite number (key: workflow)")
            return Scored(rollout, reward, {name: reward})

    async def tried(ctx: Any, prompt: Prompt, session: Session) -> Scored | AgentFailure:
        for left in reversed(range(attempts)):
            try:
                if left < attempts - 1:  # an attempt has failed: the next one has tokens of its own
                    async with ctx.serve(prompt, 1) as (fresh,):
                        return await sample(ctx, prompt, fresh)
                return await sample(ctx, prompt, session)
            except (AgentFailure, SandboxError) as error:
                failure = error if isinstance(error, AgentFailure) else AgentFailure(error.cause, str(error))
                if not left or failure.cause not in RETRIED:
                    return failure
        raise ValueError(f"attempts={attempts}; expected at least 1")

    async def workflow(ctx: Context, prompt: Prompt) -> list[Scored]:
        async with ctx.serve(prompt) as sessions:
            runs = await asyncio.gather(*(tried(ctx, prompt, session) for session in sessions))
        group = [run for run in runs if not isinstance(run, AgentFailure)]
        failures = [run for run in runs if isinstance(run, AgentFailure)]
        if failures and len(group) < min(2, len(sessions)):
            raise failures[0]
        return group if score is not None else await ctx.reward([scored.rollout for scored in group])

    return workflow


def agent_environment(base_url: str, api_key: str, model: str, prompt: Prompt) -> dict[str, str]:
    """The variables by which agents and their libraries find a server, and the task."""
    said = [message["content"] for message in prompt.messages] or [prompt.text]
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,  # of LiteLLM
        "OPENAI_API_KEY": api_key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        "PROMPT": said[-1] if isinstance(said[-1], str) else prompt.text,
    }


async def _inside(box: Sandbox, session: Session) -> tuple[str, str, str]:
    """Address, key and model, as an agent in the sandbox reaches them."""
    url = urlsplit(session.base_url)
    host, port = await box.reach(url.hostname or "", url.port or (443 if url.scheme == "https" else 80))
    return url._replace(netloc=f"{host}:{port}").geturl(), session.api_key, session.model


async def _text_of(box: Sandbox, path: str) -> str:
    try:
        return (await box.read(path)).decode(errors="replace")
    except OSError:
        return ""


def _said(result: Result) -> str:
    return result.text.strip()[-SAID:] or "no output"
