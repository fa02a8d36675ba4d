"""A user's reward function, found by path and called in the signature it has.

TRL        f(prompts, completions, **columns) -> list[float | None]            one call for the siblings
verl       compute_score(data_source, solution_str, ground_truth, extra_info)  one call a sample
OpenRLHF   reward_func(queries, prompts, labels, **kw) -> {"rewards": ...}      one call for the siblings
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from gcore.types import Rollout, UserError

Function = Callable[..., Any]
Style = Literal["trl", "verl", "openrlhf"]
SIGNATURES = (
    "f(prompts, completions, **columns) [TRL], "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None) [verl] or "
    "reward_func(queries, prompts, labels, **kwargs) [OpenRLHF]"
)
# what G-Core fills in itself, by style; everything else comes from the dataset's columns or from the recipe
OWN: dict[Style, frozenset[str]] = {
    "trl": frozenset({"prompts", "completions", "completion_ids"}),
    "verl": frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
    "openrlhf": frozenset({"queries", "prompts", "labels"}),
}


def load_function(path: str, key: str = "rewards.functions.path") -> Function:
    """`package.module:function` or `file.py:function`. `key` is where the path stands in the recipe."""
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"{key}: expected package.module:function or file.py:function, got {path!r}")
    module = _import_file(place, key) if place.endswith(".py") else _import_module(place, key)
    try:
        function: Any = getattr(module, name)
    except AttributeError:
        close = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("__")], 1)
        raise UserError(f"{key}: {place} has no {name!r}" + (f"; did you mean {close[0]}?" if close else "")) from None
    if not callable(function):
        raise UserError(f"{key}: {path} is of type {type(function).__name__}; expected a function")
    loaded: Function = function
    return loaded


def _import_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UserError(f"{key}: {name} does not import: {_one_line(error)}") from error


def _import_file(name: str, key: str) -> ModuleType:
    """A file is a module under a name of its own, registered so that its classes pickle and its dataclasses resolve."""
    file = Path(name).expanduser().resolve()
    if not file.is_file():
        raise UserError(f"{key}: no such file: {name}")
    unique = f"gcore_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[unique]
        if isinstance(error, Exception):
            raise UserError(f"{key}: {name} does not import: {_one_line(error)}") from error
        raise
    return module


class BadAnswer(ValueError):
    """A function returned something that is not a reward; the message begins with what it returned."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a function said of each sibling. Answer(values=[1.0, None], extras=[{"acc": 1.0}, {}])"""

    values: list[float | None]
    extras: list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A function and how to call it. `await adapter(group)` raises BadAnswer when what came back is not a reward."""

    function: Function
    style: Style
    named: frozenset[str]  # parameters that may be given by name
    required: frozenset[str]  # those among them that are neither ours nor have a default
    takes_any: bool  # has **kwargs
    args: Mapping[str, Any] = field(default_factory=dict)  # from the recipe; they stand above columns of the same name

    def missing(self, columns: Collection[str]) -> list[str]:
        """Parameters that neither the dataset's columns nor the recipe fill."""
        return sorted(self.required - set(columns) - set(self.args))

    async def __call__(self, group: Sequence[Rollout]) -> Answer:
        if self.style == "verl":
            return _read_verl(await self._run([self._verl(rollout) for rollout in group]))
        call = self._trl(group) if self.style == "trl" else self._openrlhf(group)
        return _read_batch((await self._run([call]))[0], len(group))

    async def _run(self, calls: list[dict[str, Any]]) -> list[Any]:
        """Async functions run here, all calls at once; sync ones in one thread, in order, off the event loop."""
        if _is_async(self.function):
            return list(await asyncio.gather(*(self.function(**call) for call in calls)))
        answers = await asyncio.to_thread(lambda: [self.function(**call) for call in calls])
        return [await answer if inspect.isawaitable(answer) else answer for answer in answers]

    def _trl(self, group: Sequence[Rollout]) -> dict[str, Any]:
        """Columns become lists, one value a sibling. Messages in, messages out: as in TRL's conversational datasets."""
        raw = [_raw_prompt(rollout) for rollout in group]
        return self._accepted(
            _columns(group),
            prompts=raw,
            completions=[
                rollout.text if isinstance(prompt, str) else [{"role": "assistant", "content": rollout.text}]
                for rollout, prompt in zip(group, raw, strict=True)
            ],
            completion_ids=[rollout.tokens_S.tolist() for rollout in group],
        )

    def _verl(self, rollout: Rollout) -> dict[str, Any]:
        """verl forwards no columns: a **kwargs there receives the recipe's arguments alone."""
        columns = rollout.prompt.columns
        return self._accepted(
            {name: value for name, value in columns.items() if name in self.named},
            data_source=columns.get("data_source"),
            solution_str=rollout.text,
            ground_truth=columns.get("answer"),
            extra_info=columns.get("extra_info"),
        )

    def _openrlhf(self, group: Sequence[Rollout]) -> dict[str, Any]:
        return self._accepted(
            _columns(group),
            queries=[rollout.prompt.text + rollout.text for rollout in group],
            prompts=[rollout.prompt.text for rollout in group],
            labels=[rollout.prompt.columns.get("answer") for rollout in group],
        )

    def _accepted(self, columns: Mapping[str, Any], **own: Any) -> dict[str, Any]:
        given = {**columns, **self.args, **own}
        return {name: value for name, value in given.items() if self.takes_any or name in self.named}


def adapt(function: Function, args: Mapping[str, Any] | None = None, key: str = "rewards.functions") -> Adapter:
    """Recognise the signature by the names of its parameters."""
    kinds = inspect.Parameter
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = {}
    by_name = {n: p for n, p in parameters.items() if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    style: Style
    if "completions" in by_name:
        style = "trl"
    elif {"solution_str", "ground_truth"} <= by_name.keys():
        style = "verl"
    elif "queries" in by_name:
        style = "openrlhf"
    else:
        shown = ", ".join(map(str, parameters.values()))
        raise UserError(f"{key}.path: got the signature {describe(function)}({shown}); expected {SIGNATURES}")
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    for name in args or {}:
        if name in OWN[style] or (name not in by_name and not takes_any):
            free = sorted(by_name.keys() - OWN[style])
            raise UserError(f"{key}.args.{name}: {describe(function)} takes no such argument; expected one of {free}")
    required = frozenset(name for name, p in by_name.items() if p.default is kinds.empty and name not in OWN[style])
    return Adapter(function, style, frozenset(by_name), required, takes_any, dict(args or {}))


def describe(function: Function) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


def _raw_prompt(rollout: Rollout) -> Any:
    """The prompt as the dataset has it; a Prompt made by hand, without that column, is a string if one user spoke."""
    if "prompt" in rollout.prompt.columns:
        return rollout.prompt.columns["prompt"]
    match rollout.prompt.messages:
        case ({"role": "user", "content": str(content)},):
            return content
    return list(rollout.prompt.messages)


def _columns(group: Sequence[Rollout]) -> dict[str, list[Any]]:
    """The siblings share a prompt; its columns, one value a sibling."""
    columns = group[0].prompt.columns
    return {name: [value] * len(group) for name, value in columns.items() if name not in ("prompt", "completion")}


def _is_async(function: Function) -> bool:
    call = getattr(function, "func", function)  # functools.partial
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def _read_verl(answers: list[Any]) -> Answer:
    values, extras = [], []
    for answer in answers:
        if isinstance(answer, Mapping):
            if "score" not in answer:
                raise BadAnswer(f"returned {short(answer)}; expected a number or a dict with 'score'")
            others = {name: _scalar(value) for name, value in answer.items() if name != "score"}
            extras.append({name: float(value) for name, value in others.items() if _is_finite(value)})
            values.append(_value(answer["score"], answer))
        else:
            extras.append({})
            values.append(_value(answer, answer))
    return Answer(values, extras)


def _read_batch(answer: Any, num: int) -> Answer:
    """A list of rewards, or OpenRLHF's dict: `rewards`, other lists of numbers beside it or under `extra_logs`."""
    extras: list[dict[str, float]] = [{} for _ in range(num)]
    rewards = answer
    if isinstance(answer, Mapping):
        if "rewards" not in answer:
            raise BadAnswer(f"returned {short(answer)}; expected a list, or a dict with 'rewards'")
        rewards = answer["rewards"]
        logs = answer.get("extra_logs")
        others = {k: v for k, v in answer.items() if k not in ("rewards", "extra_logs")}
        for name, column in {**others, **(logs if isinstance(logs, Mapping) else {})}.items():
            values = _listed(column)
            if values is not None and len(values) == num:
                for extra, value in zip(extras, map(_scalar, values), strict=True):
                    if _is_finite(value):
                        extra[name] = float(value)
    listed = _listed(rewards)
    if listed is None:
        raise BadAnswer(f"returned {short(answer)}; expected a list of {num} numbers")
    if len(listed) != num:
        raise BadAnswer(f"returned {len(listed)} rewards for {num} completions: {short(answer)}")
    return Answer([_value(value, answer) for value in listed], extras)


def _value(value: Any, answer: Any) -> float | None:
    value = _scalar(value)
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise BadAnswer(f"returned {short(value)} in {short(answer)}; expected numbers")
    if not math.isfinite(value):
        raise BadAnswer(f"returned {value} in {short(answer)}; expected finite numbers")
    return float(value)


def _listed(value: Any) -> list[Any] | None:
    """Lists, tuples, arrays and tensors as a list; None for anything else (a string, a number, a generator)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


def _scalar(value: Any) -> Any:
    """Numbers of numpy and torch as Python's own."""
    if hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError):  # more than one element
            return value.item()
    return value


def _is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else text[:117] + "..."


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
