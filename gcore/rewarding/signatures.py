"""What a recipe's `path` names: a user's reward function, recognised by the names of its parameters.

TRL        f(prompts, completions, **columns) -> list[float | None]            one call per group
pictures   f(images, prompts, **columns) -> list[float | None]                 the same, for diffusion models
verl       compute_score(data_source, solution_str, ground_truth, extra_info)  one call per sample
OpenRLHF   reward_func(queries, prompts, labels, **kw) -> {"rewards": ...}      one call per group

A path may also name a class (its instance is called) or a factory that returns such a function. See load_reward.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gcore.rewarding.source import short
from gcore.types import UserError
from gcore.user_files import load_function, one_line

Function = Callable[..., Any]
Style = Literal["trl", "verl", "openrlhf"]
EXPECTED = (
    "f(prompts, completions, **columns) [TRL], f(images, prompts, **columns) [pictures], "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None) [verl] or "
    "reward_func(queries, prompts, labels, **kwargs) [OpenRLHF]"
)
# parameters that G-Core fills, by style; all others come from the dataset's columns or from the recipe
OWN: dict[Style, frozenset[str]] = {
    "trl": frozenset({"prompts", "completions", "completion_ids", "images", "audios"}),
    "verl": frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
    "openrlhf": frozenset({"queries", "prompts", "labels"}),
}


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A function, and how it is called."""

    function: Function
    style: Style
    named: frozenset[str]  # parameters that can be passed by name
    required: frozenset[str]  # those of them without a default that G-Core does not fill
    takes_any: bool  # has **kwargs
    args: Mapping[str, Any]  # from the recipe; they override columns of the same name

    def missing(self, columns: Collection[str]) -> list[str]:
        """Required parameters that neither the dataset's columns nor the recipe provide."""
        return sorted(self.required - set(columns) - set(self.args))

    @property
    def is_async(self) -> bool:
        if isinstance(self.function, Instance):
            return inspect.iscoroutinefunction(self.function.method)
        call = getattr(self.function, "func", self.function)  # functools.partial
        return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def load_reward(path: str, args: Mapping[str, Any], key: str = "rewards.functions.0") -> LoadedReward:
    """The reward function that `path` names. The meaning of the recipe's `args` depends on what it names:

    a function with a reward signature    called directly; `args` are extra keyword arguments of every call
    a class                               `Class(**args)` is constructed once per worker and called
    any other function                    a factory: `factory(**args)` returns the function to call
    """
    named = load_function(path, f"{key}.path")
    if isinstance(named, type):
        return recognise(Instance(named, args, key), {}, key)
    if _style(_by_name(named)) is not None:
        return recognise(named, args, key)
    return recognise(_from_factory(named, args, key), {}, key)


def recognise(function: Function, args: Mapping[str, Any], key: str) -> LoadedReward:
    by_name = _by_name(function)
    style = _style(by_name)
    if style is None:
        raise UserError(f"{key}.path: got the signature {_signature(function)}; expected {EXPECTED}")
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _parameters(function).values())
    for name in args:
        if name in OWN[style] or (name not in by_name and not takes_any):
            allowed = sorted(by_name.keys() - OWN[style])
            raise UserError(f"{key}.args.{name}: {_name(function)} takes no such argument; expected one of {allowed}")
    required = frozenset(name for name, p in by_name.items() if p.default is p.empty and name not in OWN[style])
    return LoadedReward(function, style, frozenset(by_name), required, takes_any, dict(args))


class Instance:
    """An object of a user's class, constructed at the first call: in the worker, not in the controller.

    The controller only reads the signature. A constructor may load a large model, which the controller should not hold.
    """

    def __init__(self, kind: type, args: Mapping[str, Any], key: str):
        if not any("__call__" in vars(base) for base in kind.__mro__):
            raise UserError(
                f"{key}.path: {kind.__qualname__} is a class without __call__; expected one whose instances are "
                f"called as {EXPECTED}"
            )
        _check_binding(kind, args, key)
        self.kind, self.args, self.key = kind, dict(args), key
        self.__qualname__ = kind.__qualname__
        self.method: Any = kind.__call__
        _, *parameters = inspect.signature(self.method).parameters.values()
        self.__signature__ = inspect.Signature(parameters)
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
            f"{key}.path: {_signature(factory)} does not have a reward signature, so it was called as a factory, but "
            f"it returned {short(made)}; expected {EXPECTED}, or a factory or class of such a function"
        )
    function: Function = made
    return function


def _check_binding(maker: Function, args: Mapping[str, Any], key: str) -> None:
    try:
        inspect.signature(maker).bind(**args)
    except TypeError as error:
        raise UserError(
            f"{key}.path: got the signature {_signature(maker)}; expected {EXPECTED}, or a class or factory that "
            f"takes {key}.args ({error})"
        ) from None
    except ValueError:  # some builtins have no signature
        pass


def _construct(maker: Function, args: Mapping[str, Any], key: str) -> Any:
    try:
        return maker(**args)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{key}.args: {_signature(maker)} raised {one_line(error)} (got {short(dict(args))})"
        ) from error


def _parameters(function: Function) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
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


def _name(function: Function) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


def _signature(function: Function) -> str:
    return f"{_name(function)}({', '.join(map(str, _parameters(function).values()))})"
