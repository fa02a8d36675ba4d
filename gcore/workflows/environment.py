"""Environments in the style of the library verifiers, by the names of their methods; the library is not needed.

    env.dataset ──environment_rows──> rows to train on
    env, prompt ──environment_workflow──> conversation between policy and env ──env.rubric──> Scored

An environment is any object with

    dataset (or get_dataset())            rows with `prompt` (messages) or `question`, and `answer`, `info`, `task`
    system_prompt, few_shot               optional, before a `question`
    env_response(messages, state)         optional: the messages after a turn of the policy, or (messages, state)
    is_completed(messages, state)         optional: True ends the conversation; without it, one turn (max_turns)
    setup_state(state)                    optional
    rollout(...)                          optional, instead of env_response: it calls an OpenAI client itself
    rubric                                `score_rollout(...)`, or functions and weights (`funcs`/`reward_funcs`,
                                          `weights`/`reward_weights`)

Methods may be sync or async, and take only those of the arguments that they name.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from gcore.protocols import Context
from gcore.types import Message, Prompt, Rollout, Scored, UserError

REWARD = "rubric"  # name of the reward in the recipe: rewards.by_workflow
MAX_TURNS = 10
State = dict[str, Any]


def environment_rows(env: Any, split: str = "train") -> list[dict[str, Any]]:
    """The rows of an environment, with `prompt` as messages."""
    names = ("get_dataset", "dataset") if split == "train" else ("get_eval_dataset", "eval_dataset")
    dataset = next((value for name in names if (value := getattr(env, name, None)) is not None), None)
    rows = dataset() if callable(dataset) else dataset
    if rows is None:
        raise UserError(f"{type(env).__name__} has no {names[1]}; expected rows with prompt or question")
    return [_row(env, dict(rows[i])) for i in range(len(rows))]


def _row(env: Any, row: dict[str, Any]) -> dict[str, Any]:
    if "prompt" in row:
        return row
    if "question" not in row:
        raise UserError(f"{type(env).__name__}: a row has {', '.join(row)}; expected prompt or question")
    system = getattr(env, "system_prompt", None)
    before = [{"role": "system", "content": system}] if system else []
    few_shot = list(getattr(env, "few_shot", None) or [])
    prompt = [*before, *few_shot, {"role": "user", "content": row["question"]}]
    return {**{name: value for name, value in row.items() if name != "question"}, "prompt": prompt}


def environment_workflow(env: Any, **params: Any) -> Callable[[Context, Prompt], Awaitable[list[Scored]]]:
    """A workflow whose samples are scored by the rubric of `env`; the recipe has `rewards: {by_workflow: [rubric]}`."""

    async def workflow(ctx: Context, prompt: Prompt) -> list[Scored]:
        if not hasattr(env, "env_response") and hasattr(env, "rollout"):
            return await _by_client(env, ctx, prompt, params)
        group = await ctx.generate(prompt, **params)
        return list(await asyncio.gather(*(_converse(env, ctx, prompt, rollout, params) for rollout in group)))

    return workflow


async def _converse(env: Any, ctx: Context, prompt: Prompt, rollout: Rollout, params: Mapping[str, Any]) -> Scored:
    state = _new_state(prompt)
    state = await _call(getattr(env, "setup_state", None), state=state) or state
    completion: list[Message] = []
    while True:
        completion.append({"role": "assistant", "content": rollout.turn})
        state |= {"completion": completion, "turn": state["turn"] + 1, "responses": [*state["responses"], rollout.turn]}
        messages = [*state["prompt"], *completion]
        if rollout.finish != "stop" or await _is_completed(env, messages, state):
            break
        answer = await _call(env.env_response, messages=messages, state=state)
        new, state = answer if isinstance(answer, tuple) else (answer, state)
        if not new:
            break
        before, rollout = rollout, await ctx.proceed(rollout, [dict(message) for message in new], **params)
        if rollout.num_steps == before.num_steps:  # no room for another turn: the sample ends before this answer
            break
        completion += [dict(message) for message in new]
    return await _scored(env, rollout, {**state, "completion": completion})


async def _is_completed(env: Any, messages: Sequence[Message], state: State) -> bool:
    if not hasattr(env, "env_response"):
        return True
    limit = getattr(env, "max_turns", MAX_TURNS)
    if limit > 0 and state["turn"] >= limit:
        return True
    return bool(await _call(getattr(env, "is_completed", None), messages=messages, state=state))


async def _by_client(env: Any, ctx: Context, prompt: Prompt, params: Mapping[str, Any]) -> list[Scored]:
    """The environment runs the conversation with a client. Its requests are recorded by a session."""

    async def one(session: Any) -> Scored:
        row = {"prompt": list(prompt.messages), **prompt.columns}
        given = {**row, "input": row, "client": session.client, "model": session.model, "sampling_args": dict(params)}
        answer = await _call(env.rollout, **given)
        state = _new_state(prompt)
        match answer:
            case (completion, dict() as told):
                state |= {**told, "completion": completion}
            case dict():
                state |= answer
        return await _scored(env, session.rollout, state)

    async with ctx.serve(prompt) as sessions:
        return list(await asyncio.gather(*map(one, sessions)))


def _new_state(prompt: Prompt) -> State:
    columns = prompt.columns
    return {
        "prompt": [dict(message) for message in prompt.messages],
        "completion": [],
        "answer": columns.get("answer", ""),
        "info": columns.get("info") or {},
        "task": columns.get("task", "default"),
        "turn": 0,
        "responses": [],
    }


async def _scored(env: Any, rollout: Rollout, state: State) -> Scored:
    """The reward of the rubric; its metrics are logged as reward/NAME."""
    rubric = env.rubric
    given = {name: state[name] for name in ("prompt", "completion", "answer", "info", "task")} | {"state": state}
    if hasattr(rubric, "score_rollout"):
        score = await _call(rubric.score_rollout, **given)
        score = state if score is None else score  # newer versions write the reward into the state
        reward, metrics = _field(score, "reward"), _field(score, "metrics") or {}
    else:
        functions = getattr(rubric, "reward_funcs", None) or rubric.funcs
        weights = getattr(rubric, "reward_weights", None) or getattr(rubric, "weights", None) or [1.0] * len(functions)
        values = [float(await _call(function, **given)) for function in functions]
        metrics = {function.__name__: value for function, value in zip(functions, values, strict=True)}
        reward = sum(value * weight for value, weight in zip(values, weights, strict=True))
    if not isinstance(reward, int | float):
        raise UserError(f"{type(rubric).__name__}.score_rollout gave the reward {reward!r}; expected a number")
    parts = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return Scored(rollout, float(reward), {REWARD: float(reward), **parts})


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


async def _call(function: Callable[..., Any] | None, **given: Any) -> Any:
    """With those of the arguments that the function names, or all if it has **kwargs."""
    if function is None:
        return None
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        given = {p.name: given[p.name] for p in parameters if p.name in given}
    answer = function(**given)
    return await answer if inspect.isawaitable(answer) else answer
