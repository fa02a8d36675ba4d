"""The user's functions of a recipe, with the arguments that each must have. They are checked before the run, and loaded
again in the processes that call them. Reward functions: rewarding/functions.py.

    workflow                   async def f(ctx, prompt) -> list of Scored
    sampling.filter            def f(group) -> bool, or (bool, reason)
    algorithm.adv_estimator    def f(group: GroupScores) -> advantages, or (advantages, {"name": number})
    algorithm.policy_loss      def f(steps: Steps, algorithm: Algorithm) -> loss_S, or (loss_S, {"name": values_S})
    run.on_step                def f(metrics) -> True to end the run
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from gcore.config.tree import Config
from gcore.controller.collect import no_filter, spread
from gcore.controller.run_prompts import Filter
from gcore.observe.values import Row
from gcore.preparation.advantages import AdvantageSettings
from gcore.types import Scored, UserError
from gcore.user_files import load_function
from gcore.workflows.context import Workflow

OnStep = Callable[[Row], object]


def load_workflow(path: str) -> Workflow:
    return _load(path, "workflow", "ctx", "prompt", is_async=True)


def load_filter(path: str) -> Filter:
    """A built-in one by name, or a user's function, which may return only a bool."""
    if path in ("none", "spread"):
        return no_filter if path == "none" else spread
    function = load_function(path, key="sampling.filter")

    def keep(group: list[Scored]) -> tuple[bool, str]:
        match function(group):
            case bool() | np.bool_() as keep:
                return bool(keep), "filter"
            case (bool() | np.bool_() as keep, str(reason)):
                return bool(keep), reason or "filter"
            case other:
                raise UserError(f"sampling.filter={path} returned {other!r}; expected (keep, reason) or a bool")

    return keep


def make_advantage_settings(config: Config) -> AdvantageSettings:
    """How rewards become advantages in this run."""
    algorithm, path = config.algorithm, config.algorithm.adv_estimator
    estimator = _load(path, "algorithm.adv_estimator", "group") if ":" in path else None
    return AdvantageSettings(algorithm, config.generation.max_response_length, config.rewards.weights, estimator)


def load_policy_loss(path: str) -> Callable[..., Any] | None:
    """None: `path` is the name of a built-in loss."""
    return _load(path, "algorithm.policy_loss", "steps", "algorithm") if ":" in path else None


def load_on_step(path: str) -> OnStep:
    return _load(path, "run.on_step", "metrics")


def _load(path: str, key: str, *arguments: str, is_async: bool = False) -> Callable[..., Any]:
    """UserError if the function cannot be called with these arguments."""
    function = load_function(path, key)
    fits = inspect.iscoroutinefunction(function) == is_async
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        fits = False
    except ValueError:  # a built-in function, whose arguments are not known
        pass
    if not fits:
        name = path.rpartition(":")[2]
        raise UserError(f"{key}={path}: expected `{'async ' * is_async}def {name}({', '.join(arguments)})`")
    return function
