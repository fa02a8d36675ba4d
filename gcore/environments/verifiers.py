"""Environments of the library verifiers (0.1), and others in its style, by the names of their methods.

    verifiers:NAME       `verifiers.load_environment(NAME, **environment.args)` of an installed package
    file.py:NAME         a class or factory of an environment: of the library, or any object with

    dataset (or get_dataset())            rows with `prompt` (messages) or `question`, and `answer`, `info`, `task`
    system_prompt, few_shot               optional, before a `question`
    env_response(messages, state)         optional: the messages after a turn of the policy, or (messages, state)
    is_completed(messages, state)         optional: True ends the conversation; without it, one turn (max_turns)
    setup_state(state)                    optional
    rollout(...)                          optional, instead of env_response: it calls an OpenAI client itself
    rubric                                `score_rollout(...)`, or functions and weights (`funcs`/`reward_funcs`,
                                          `weights`/`reward_weights`)

Methods may be sync or async, and take only those of the arguments that they name. One object serves all episodes of a
process. An environment of the library runs its own conversation and its rubric (`run_rollout`), with its own client of
the policy's endpoint.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gcore.environments.base import BadAnswer, Call, Observation, Opening, Policy, Row, Trouble
from gcore.environments.own import numbers_of, short
from gcore.types import Message, UserError
from gcore.user_files import one_line

MAX_TURNS = 10
State = dict[str, Any]


def load(name: str, args: dict[str, Any]) -> Any:
    import verifiers

    if not hasattr(verifiers, "load_environment"):  # since 0.2
        from gcore.environments.verifiers_v1 import load as load_v1

        return load_v1(name, args)
    try:
        return VerifiersEnvironment(verifiers.load_environment(name, **args))
    except Exception as error:
        raise UserError(f"environment.source=verifiers:{name}: {one_line(error)} (got args {args})") from error


class VerifiersEnvironment:
    def __init__(self, env: Any) -> None:
        self.env = env
        self.runs = hasattr(env, "run_rollout") or (not hasattr(env, "env_response") and hasattr(env, "rollout"))

    def rows(self, split: str, size: int | None) -> Sequence[Row]:
        rows = environment_rows(self.env, split)
        return rows if size is None else rows[:size]

    def episode(self) -> VerifiersEpisode:
        return VerifiersEpisode(self.env)


class VerifiersEpisode:
    def __init__(self, env: Any) -> None:
        self.env = env
        self.state: State = {}

    async def reset(self, row: Row, seed: int) -> Opening:
        state = new_state(row)
        self.state = await _call(getattr(self.env, "setup_state", None), state=state) or state
        return Opening()

    async def step(self, text: str, calls: Sequence[Call]) -> Observation:
        state = self.state
        completion = [*state["completion"], {"role": "assistant", "content": text}]
        state |= {"completion": completion, "turn": state["turn"] + 1, "responses": [*state["responses"], text]}
        messages = [*state["prompt"], *completion]
        if not await self._is_completed(messages):
            answer = await _call(self.env.env_response, messages=messages, state=state)
            new, self.state = answer if isinstance(answer, tuple) else (answer, state)
            if new:
                self.state["completion"] = [*completion, *(dict(message) for message in new)]
                return Observation([dict(message) for message in new])
        return await scored(self.env, self.state)

    async def run(self, row: Row, seed: int, policy: Policy) -> Observation:
        """The environment runs the conversation with a client, whose requests are recorded."""
        from openai import AsyncOpenAI

        row = {**row, "prompt": messages_of(row)}
        if hasattr(self.env, "run_rollout"):
            return await self._by_library(row, policy)
        async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0) as client:
            state = new_state(row)
            given = {"input": dict(row), "client": client, "model": policy.model, "sampling_args": {**policy.sampling}}
            answer = await _call(self.env.rollout, **{**row, **given})
        match answer:
            case (completion, dict() as told):
                state |= {**told, "completion": completion}
            case dict():
                state |= answer
        return await scored(self.env, state)

    async def _by_library(self, row: Row, policy: Policy) -> Observation:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0) as client:
            given = OpenAIChatCompletionsClient(client)
            made = await self.env.run_rollout({"example_id": 0, **row}, given, policy.model, dict(policy.sampling))
        if error := made.get("error"):
            raise Trouble("raised", f"{type(self.env).__name__}: {short(error)}")
        return Observation(None, _reward(made.get("reward"), self.env), True, numbers_of(made.get("metrics") or {}))

    async def close(self) -> None:
        pass

    async def _is_completed(self, messages: Sequence[Message]) -> bool:
        if not hasattr(self.env, "env_response"):
            return True
        limit = getattr(self.env, "max_turns", MAX_TURNS)
        if limit > 0 and self.state["turn"] >= limit:
            return True
        return bool(await _call(getattr(self.env, "is_completed", None), messages=messages, state=self.state))


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


def messages_of(row: Row) -> list[Message]:
    prompt = row["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]


def new_state(row: Row) -> State:
    return {
        "prompt": messages_of(row),
        "completion": [],
        "answer": row.get("answer", ""),
        "info": row.get("info") or {},
        "task": row.get("task", "default"),
        "turn": 0,
        "responses": [],
    }


async def scored(env: Any, state: State) -> Observation:
    """The reward of the rubric, and its metrics."""
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
    return Observation(None, _reward(reward, rubric), True, numbers_of(metrics))


def _reward(value: Any, maker: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise BadAnswer(f"{type(maker).__name__} gave the reward {short(value)}; expected a finite number")
    return float(value)


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
