"""A user's advantage estimator and policy loss: `algorithm.adv_estimator` or `policy_loss` with the value `file.py:f`.

def f(group: GroupScores) -> advantages, or (advantages, {"name": number})                 preparation/advantages.py
def f(steps: Steps, algorithm: Algorithm) -> loss_S, or (loss_S, {"name": values_S})       training/objective.py
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gcore.config.tree import Config
from gcore.preparation.advantages import Scoring
from gcore.types import UserError
from gcore.user_functions import load_function


def make_scoring(config: Config) -> Scoring:
    """How rewards become advantages in this run."""
    algorithm = config.algorithm
    estimator = _load(algorithm.adv_estimator, "algorithm.adv_estimator", "group")
    return Scoring(algorithm, config.generation.max_response_length, config.rewards.weights, estimator)


def load_policy_loss(path: str) -> Callable[..., Any] | None:
    """None: `path` is the name of a built-in loss."""
    return _load(path, "algorithm.policy_loss", "steps", "algorithm")


def _load(path: str, key: str, *arguments: str) -> Callable[..., Any] | None:
    if ":" not in path:
        return None
    function = load_function(path, key=key)
    if len(inspect.signature(function).parameters) != len(arguments):
        name = path.rpartition(":")[2]
        raise UserError(f"{key}={path}: expected `def {name}({', '.join(arguments)})`")
    return function
