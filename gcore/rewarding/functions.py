"""A user's reward function, imported by path and called with the signature that it has.

TRL        f(prompts, completions, **columns) -> list[float | None]            one call per group
pictures   f(images, prompts, **columns) -> list[float | None]                 the same, for diffusion models
verl       compute_score(data_source, solution_str, ground_truth, extra_info)  one call per sample
OpenRLHF   reward_func(queries, prompts, labels, **kw) -> {"rewards": ...}      one call per group

A path may also name a class (its instance is called) or a factory that returns such a function. See load_reward.

    group ──FunctionSource.answer──> arguments (Adapter.calls) ──> a worker (workers.py), or a thread of this process
    there: Adapter.invoke ──> the function ──> Adapter.read ──> Answer
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from gcore.content.media import ArrayRef
from gcore.rewarding.source import Answer, BadAnswer, is_finite, number, scalar, short
from gcore.types import RewardError, Rollout, UserError
from gcore.user_functions import load_function, one_line

if TYPE_CHECKING:
    from gcore.config.rewards import RewardFunction  # a worker starts without it

Function = Callable[..., Any]
Style = Literal["trl", "verl", "openrlhf"]
SIGNATURES = (
    "f(prompts, completions, **columns) [TRL], f(images, prompts, **columns) [pictures], "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None) [verl] or "
    "reward_func(queries, prompts, labels, **kwargs) [OpenRLHF]"
)
# parameters that G-Core fills, by style; all others come from the dataset's columns or from the recipe
OWN: dict[Style, frozenset[str]] = {
    "trl": frozenset({"prompts", "completions", "completion_ids", "images"}),
    "verl": frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
    "openrlhf": frozenset({"queries", "prompts", "labels"}),
}


class Caller(Protocol):
    """Calls functions in other processes. Implementation: workers.WorkerPool."""

    async def call(self, source: FunctionSource, calls: list[dict[str, Any]], siblings: int) -> Answer: ...

    def close(self) -> None: ...


class FunctionSource:
    """Implements source.Source. The function is imported and its signature checked here, before the run, wherever it is
    called: by `pool`, or without one in a thread of this process, for debuggers; there, a call that hangs cannot be
    killed. `index`, `timeout_s`: for the pool.

    A function may have its own check of this machine: `function.preflight(args)`.
    """

    def __init__(
        self,
        spec: RewardFunction,
        attempts: int,
        key: str,
        pool: Caller | None = None,
        index: int = 0,
        timeout_s: float = 0.0,
    ):
        self.name, self.weight, self.attempts = spec.name, spec.weight, attempts
        self.counts: Counter[str] = Counter()
        self.pool, self.index, self.timeout_s = pool, index, timeout_s
        self.origin = spec.path, spec.args, key  # for load_reward, in a worker
        self.adapter = load_reward(*self.origin)

    def check(self, columns: Collection[str]) -> None:
        if missing := self.adapter.missing(columns):
            raise UserError(
                f"rewards.functions: {self.name} needs {', '.join(missing)}; the dataset has "
                f"{', '.join(sorted(columns))} (change its columns, or set the function's args)"
            )
        if preflight := getattr(self.adapter.function, "preflight", None):
            preflight(self.adapter.args)

    async def answer(self, group: Sequence[Rollout], attempt: int) -> Answer:
        prompt = group[0].prompt
        if missing := self.adapter.missing(prompt.columns):  # a retry would not help
            raise RewardError(f"reward {self.name!r}, prompt {prompt.id}: the row has no column {', '.join(missing)}")
        if self.pool is None:
            return await self.adapter(group)
        return await self.pool.call(self, self.adapter.calls(group), len(group))

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def load_reward(path: str, args: Mapping[str, Any], key: str = "rewards.functions.0") -> Adapter:
    """The reward function that `path` names. The meaning of the recipe's `args` depends on what it names:

    a function with a reward signature    called directly; `args` are extra keyword arguments of every call
    a class                               `Class(**args)` is constructed once per worker and called
    any other function                    a factory: `factory(**args)` returns the function to call
    """
    found = load_function(path, f"{key}.path")
    if isinstance(found, type):
        return adapt(Instance(found, args, key), key=key)
    if _style(_by_name(found)) is not None:
        return adapt(found, args, key)
    return adapt(_from_factory(found, args, key), key=key)


class Instance:
    """An object of a user's class, constructed at the first call: in the worker, not in the controller.

    The controller only reads the signature. A constructor may load a large model, which the controller should not hold.
    """

    def __init__(self, kind: type, args: Mapping[str, Any], key: str):
        if not any("__call__" in vars(base) for base in kind.__mro__):
            raise UserError(
                f"{key}.path: {kind.__qualname__} is a class without __call__; expected one whose instances are "
                f"called as {SIGNATURES}"
            )
        _check_binding(kind, args, key)
        self.kind, self.args, self.key = kind, dict(args), key
        self.__qualname__ = kind.__qualname__
        method: Any = kind.__call__
        _, *parameters = inspect.signature(method).parameters.values()
        self.__signature__ = inspect.Signature(parameters)
        self.is_async = inspect.iscoroutinefunction(method)
        self._object: Any = None
        self._lock = threading.Lock()  # functions may be called in threads

    def make(self) -> Any:
        with self._lock:
            if self._object is None:
                self._object = _construct(self.kind, self.args, self.key)
        return self._object

    def __call__(self, **call: Any) -> Any:
        return self.make()(**call)


def _from_factory(factory: Function, args: Mapping[str, Any], key: str) -> Function:
    _check_binding(factory, args, key)
    made = _construct(factory, args, key)
    if inspect.iscoroutine(made):
        made.close()
    if not callable(made):
        raise UserError(
            f"{key}.path: {describe(factory)}{_signature(factory)} does not have a reward signature, so it was called "
            f"as a factory, but it returned {short(made)}; expected {SIGNATURES}, or a factory or class of such a "
            "function"
        )
    function: Function = made
    return function


def _check_binding(found: Function, args: Mapping[str, Any], key: str) -> None:
    try:
        inspect.signature(found).bind(**args)
    except TypeError as error:
        raise UserError(
            f"{key}.path: got the signature {describe(found)}{_signature(found)}; expected {SIGNATURES}, or a class or "
            f"factory that takes {key}.args ({error})"
        ) from None
    except ValueError:  # some builtins have no signature
        pass


def _construct(found: Function, args: Mapping[str, Any], key: str) -> Any:
    try:
        return found(**args)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{key}.args: {describe(found)}{_signature(found)} raised {one_line(error)} (got {short(dict(args))})"
        ) from error


@dataclass(frozen=True, slots=True)
class Adapter:
    """A function and how to call it. `await adapter(group)` raises BadAnswer if the result is not a reward."""

    function: Function
    style: Style
    named: frozenset[str]  # parameters that can be passed by name
    required: frozenset[str]  # those of them without a default that G-Core does not fill
    takes_any: bool  # has **kwargs
    args: Mapping[str, Any] = field(default_factory=dict)  # from the recipe; they override columns of the same name

    def missing(self, columns: Collection[str]) -> list[str]:
        """Required parameters that neither the dataset's columns nor the recipe provide."""
        return sorted(self.required - set(columns) - set(self.args))

    @property
    def is_async(self) -> bool:
        return _is_async(self.function)

    async def __call__(self, group: Sequence[Rollout]) -> Answer:
        return self.read(await self._run(self.calls(group)), len(group))

    def calls(self, group: Sequence[Rollout]) -> list[dict[str, Any]]:
        """The arguments of all calls for the group, to pass to `invoke`: one call, or with verl one per sample."""
        match self.style:
            case "verl":
                return [self._verl(rollout) for rollout in group]
            case "trl":
                return [self._trl(group)]
            case "openrlhf":
                return [self._openrlhf(group)]

    def invoke(self, call: Mapping[str, Any]) -> Any:
        """Token ids become lists only here: arrays are faster to send to another process. Pictures are read here."""
        call = {name: _resolved(value) for name, value in call.items()}
        if self.style == "trl" and "completion_ids" in call:
            call = {**call, "completion_ids": [ids.tolist() for ids in call["completion_ids"]]}
        return self.function(**call)

    def read(self, answers: list[Any], num: int) -> Answer:
        """Parses the results of the calls as the rewards of `num` siblings. Raises BadAnswer."""
        return _read_verl(answers) if self.style == "verl" else _read_batch(answers[0], num)

    async def _run(self, calls: list[dict[str, Any]]) -> list[Any]:
        """Async functions run on this event loop, all calls at once; sync ones in one thread, in order."""
        if self.is_async:
            return list(await asyncio.gather(*(_awaited(self.invoke(call)) for call in calls)))
        answers = await asyncio.to_thread(_without_exit, lambda: [self.invoke(call) for call in calls])
        return [await _awaited(answer) if inspect.isawaitable(answer) else answer for answer in answers]

    def _trl(self, group: Sequence[Rollout]) -> dict[str, Any]:
        """Columns become lists with one value per sibling. If prompts are messages, completions are messages too, as
        in TRL's conversational datasets."""
        raw = [_raw_prompt(rollout) for rollout in group]
        return self._accepted(
            _columns(group),
            prompts=raw,
            completions=[
                rollout.output if isinstance(prompt, str) else [{"role": "assistant", "content": rollout.output}]
                for rollout, prompt in zip(group, raw, strict=True)
            ],
            **_content_columns(group),
        )

    def _verl(self, rollout: Rollout) -> dict[str, Any]:
        """verl forwards no columns: its **kwargs receive only the recipe's arguments."""
        columns = rollout.prompt.columns
        return self._accepted(
            {name: value for name, value in columns.items() if name in self.named},
            data_source=columns.get("data_source"),
            solution_str=rollout.output,
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


def _without_exit(call: Callable[[], Any]) -> Any:
    """sys.exit() in a function of the user is a failed call. It must not end the process, as it would silently."""
    try:
        return call()
    except SystemExit as error:
        raise BadAnswer(f"raised {short(error)}") from error


async def _awaited(answer: Any) -> Any:
    try:
        return await answer
    except SystemExit as error:  # asyncio would end the event loop with it
        raise BadAnswer(f"raised {short(error)}") from error


def adapt(function: Function, args: Mapping[str, Any] | None = None, key: str = "rewards.functions") -> Adapter:
    """Recognise the signature by the names of its parameters."""
    by_name = _by_name(function)
    style = _style(by_name)
    if style is None:
        raise UserError(
            f"{key}.path: got the signature {describe(function)}{_signature(function)}; expected {SIGNATURES}"
        )
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _parameters(function).values())
    for name in args or {}:
        if name in OWN[style] or (name not in by_name and not takes_any):
            allowed = sorted(by_name.keys() - OWN[style])
            raise UserError(
                f"{key}.args.{name}: {describe(function)} takes no such argument; expected one of {allowed}"
            )
    required = frozenset(name for name, p in by_name.items() if p.default is p.empty and name not in OWN[style])
    return Adapter(function, style, frozenset(by_name), required, takes_any, dict(args or {}))


def _parameters(function: Function) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return {}


def _by_name(function: Function) -> dict[str, inspect.Parameter]:
    """The parameters that can be passed by name."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in _parameters(function).items() if parameter.kind in kinds}


def _style(names: Collection[str]) -> Style | None:
    """The framework whose reward signature this is; None if it is not a reward signature."""
    if "completions" in names or "images" in names:
        return "trl"
    if "solution_str" in names and "ground_truth" in names:
        return "verl"
    return "openrlhf" if "queries" in names else None


def _signature(function: Function) -> str:
    return f"({', '.join(map(str, _parameters(function).values()))})"


def describe(function: Function) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


def _raw_prompt(rollout: Rollout) -> Any:
    """The prompt as in the dataset. A Prompt without that column is a string if it has a single user message."""
    if "prompt" in rollout.prompt.columns:
        return rollout.prompt.columns["prompt"]
    match rollout.prompt.messages:
        case ({"role": "user", "content": str(content)},):
            return content
    return list(rollout.prompt.messages)


def _content_columns(group: Sequence[Rollout]) -> dict[str, list[Any]]:
    """For language models `completion_ids`, TRL's name."""
    columns: dict[str, list[Any]] = {}
    for rollout in group:
        for name, value in rollout.content.reward_columns().items():
            columns.setdefault(name, []).append(value)
    return columns


def _columns(group: Sequence[Rollout]) -> dict[str, list[Any]]:
    """The columns of the siblings' prompt, one value per sibling."""
    columns = group[0].prompt.columns
    return {name: [value] * len(group) for name, value in columns.items() if name not in ("prompt", "completion")}


def _resolved(value: Any) -> Any:
    """A list of references to pictures as arrays; anything else unchanged."""
    if isinstance(value, list) and any(isinstance(item, ArrayRef) for item in value):
        return [np.array(item.read()) if isinstance(item, ArrayRef) else item for item in value]
    return value


def _is_async(function: Function) -> bool:
    if isinstance(function, Instance):
        return function.is_async
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
    """A list of rewards, or OpenRLHF's dict: `rewards`, and other lists of numbers next to it or in `extra_logs`."""
    extras: list[dict[str, float]] = [{} for _ in range(num)]
    rewards = answer
    if isinstance(answer, Mapping):
        if "rewards" not in answer:
            raise BadAnswer(f"returned {short(answer)}; expected a list, or a dict with 'rewards'")
        rewards = answer["rewards"]
        logs = answer.get("extra_logs")
        others = {k: v for k, v in answer.items() if k not in ("rewards", "extra_logs")}
        for name, column in {**others, **(logs if isinstance(logs, Mapping) else {})}.items():
            values = _as_list(column)
            if values is not None and len(values) == num:
                for extra, value in zip(extras, map(scalar, values), strict=True):
                    if is_finite(value):
                        extra[name] = float(value)
    listed = _as_list(rewards)
    if listed is None:
        raise BadAnswer(f"returned {short(answer)}; expected a list of {num} numbers")
    if len(listed) != num:
        raise BadAnswer(f"returned {len(listed)} rewards for {num} completions: {short(answer)}")
    return Answer([number(value, answer) for value in listed], extras)


def _as_list(value: Any) -> list[Any] | None:
    """Lists, tuples, arrays and tensors as a list; None for anything else (a string, a number, a generator)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None
