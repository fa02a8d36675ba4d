"""A user's reward function, found by path and called in the signature it has.

TRL        f(prompts, completions, **columns) -> list[float | None]            one call for the siblings
verl       compute_score(data_source, solution_str, ground_truth, extra_info)  one call a sample
OpenRLHF   reward_func(queries, prompts, labels, **kw) -> {"rewards": ...}      one call for the siblings
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from gcore.rewarding.source import Answer, BadAnswer, is_finite, number, scalar, short
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

    @property
    def is_async(self) -> bool:
        return _is_async(self.function)

    async def __call__(self, group: Sequence[Rollout]) -> Answer:
        return self.read(await self._run(self.calls(group)), len(group))

    def calls(self, group: Sequence[Rollout]) -> list[dict[str, Any]]:
        """The arguments of every call that the group takes, for `invoke`: one, or in verl's style one a sample."""
        match self.style:
            case "verl":
                return [self._verl(rollout) for rollout in group]
            case "trl":
                return [self._trl(group)]
            case "openrlhf":
                return [self._openrlhf(group)]

    def invoke(self, call: Mapping[str, Any]) -> Any:
        """Token ids become lists only here: as arrays they travel fast to another process."""
        if self.style == "trl" and "completion_ids" in call:
            call = {**call, "completion_ids": [tokens_S.tolist() for tokens_S in call["completion_ids"]]}
        return self.function(**call)

    def read(self, answers: list[Any], num: int) -> Answer:
        """What these calls returned, as the rewards of `num` siblings. Raises BadAnswer."""
        return _read_verl(answers) if self.style == "verl" else _read_batch(answers[0], num)

    async def _run(self, calls: list[dict[str, Any]]) -> list[Any]:
        """Async functions run here, all calls at once; sync ones in one thread, in order, off the event loop."""
        if self.is_async:
            return list(await asyncio.gather(*(self.invoke(call) for call in calls)))
        answers = await asyncio.to_thread(lambda: [self.invoke(call) for call in calls])
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
            completion_ids=[rollout.tokens_S for rollout in group],
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
            others = {name: scalar(value) for name, value in answer.items() if name != "score"}
            extras.append({name: float(value) for name, value in others.items() if is_finite(value)})
            values.append(number(answer["score"], answer))
        else:
            extras.append({})
            values.append(number(answer, answer))
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
                for extra, value in zip(extras, map(scalar, values), strict=True):
                    if is_finite(value):
                        extra[name] = float(value)
    listed = _listed(rewards)
    if listed is None:
        raise BadAnswer(f"returned {short(answer)}; expected a list of {num} numbers")
    if len(listed) != num:
        raise BadAnswer(f"returned {len(listed)} rewards for {num} completions: {short(answer)}")
    return Answer([number(value, answer) for value in listed], extras)


def _listed(value: Any) -> list[Any] | None:
    """Lists, tuples, arrays and tensors as a list; None for anything else (a string, a number, a generator)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
