"""Section `environment`: what the policy acts in, over several turns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from gcore.config.base import Arguments, Auto, Count, Fraction, PositiveInt, Seconds, Section
from gcore.config.objects import FunctionPath

WORKFLOW = "gcore.workflows.environment:episodes"
ROWS = "gcore.environments.rows:rows_of"
TURN_CREDIT = {"grpo": True, "dr_grpo": False}  # estimators that can compare turns; whether they divide by the spread
REWARD = "environment"  # name of the reward that an environment gives


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"got {text!r}, which is no regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class EnvironmentSettings(Section):
    source: FunctionPath
    """What it is: a class or factory `file.py:NAME` or `package.module:NAME`, or `gym:ID`, see docs/environments.md."""
    args: Arguments = {}
    """Its arguments."""
    processes: PositiveInt | Auto = "auto"
    """Processes of environments per controller. `auto`: CPU cores divided by controllers, at most 4."""
    concurrency: PositiveInt = 64
    """Episodes at once in each process; further ones wait. 1: each has a process alone."""
    max_turns: PositiveInt = 16
    """The episode ends after this many turns of the policy, with the rewards that it has."""
    max_turn_tokens: PositiveInt | None = None
    """A turn of the policy that reaches this length goes to the environment as it is. The whole conversation after its
    first messages has at most `generation.max_response_length` tokens."""
    calls: dict[str, Pattern] = {}
    """How the policy calls tools, if not as its chat template says: name of a tool -> a regular expression, whose named
    groups are its arguments, `{price: '(?P<code>\\w+)\\?'}`."""
    stop: list[str] = []
    """Tokens that end a turn, beside those of the model."""
    credit: Literal["episode", "turn"] = "episode"
    """What the tokens of a turn are credited with. `episode`: the reward of the whole episode; `turn`: what the turn
    and those after it have earned, compared with the same turn of the siblings, see docs/environments.md."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With `credit: turn`: a reward counts so much less for each turn that lies between."""
    reset_s: Seconds = 60.0
    """Time for the begin of an episode."""
    step_s: Seconds = 30.0
    """Time for the environment's answer to a turn. What does not end then is killed, with its process."""
    episode_s: Seconds = 3600.0
    """Time for a whole episode, with the turns of the policy."""
    retries: Count = 2
    """An episode that failed begins again, at most this many times. Then its sample is dropped and counted in
    `environment/failed_CAUSE`; a failure is never a reward of 0."""
    on_failure: Literal["drop_sample", "drop_group"] = "drop_sample"
    """What is dropped if an episode still fails after its retries. `drop_sample`: its siblings stay, if the estimator
    can compare those that are left; `drop_group`: the whole group."""
    on_context: Literal["drop", "score"] = "drop"
    """Of a conversation that is longer than `generation.max_response_length`: `drop`: it is a failure
    (`context_exceeded`); `score`: it ends there, with the rewards that it has."""
    max_failed_frac: Annotated[Fraction, Field(gt=0)] = 0.5
    """Stop the run if more than this fraction of a step's episodes still failed after their retries."""


def implied_by_environment(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """With `environment`, its workflow, its reward and, if it has no other, its dataset. `tree`: a parsed recipe. A
    dataset `{task: environment}` gets the arguments that the rows of the environment need."""
    match tree:
        case {"environment": {"source": source, **more}}:
            pass
        case _:
            return tree
    filled = {"workflow": WORKFLOW, **tree}
    rewards = filled.get("rewards") or {}
    others = ("functions", "models", "judges", "http")
    if isinstance(rewards, Mapping) and not any(rewards.get(kind) for kind in others):
        filled["rewards"] = {"by_workflow": [REWARD], **rewards}
    data = filled.get("data") or {}
    if isinstance(data, Mapping):
        sets = {"train": {"task": "environment"}, **data}
        filled["data"] = {
            name: _with_rows(value, source, more.get("args") or {}, name) if name in ("train", "eval") else value
            for name, value in sets.items()
        }
    return filled


def _with_rows(dataset: Any, source: str, args: Any, split: str) -> Any:
    if not isinstance(dataset, Mapping):
        return dataset
    if dataset.get("task") == "environment":
        given = {"source": source, "args": args, "split": split, "size": dataset.get("size")}
        return {**dataset, "task": ROWS, "args": {**given, **(dataset.get("args") or {})}}
    if all(isinstance(value, Mapping) for value in dataset.values()):  # several sets, by name
        return {name: _with_rows(value, source, args, split) for name, value in dataset.items()}
    return dataset
