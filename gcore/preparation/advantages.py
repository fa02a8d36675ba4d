"""Rewards -> advantages. Pure functions over numpy arrays; one scalar a sample, later spread over its steps.

Each estimator sees one group (the siblings of one prompt) at a time; what needs the whole batch says so and is
finished by `whiten`, whose three sums are gathered from all controllers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
EPSILON = 1e-6


def grpo(rewards: Array) -> Array:
    """(r - mean) / std within the group; the spread is that of a sample (n - 1). Equal rewards give exactly 0."""
    if np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)


def dr_grpo(rewards: Array) -> Array:
    """r - mean: without the division that weighs easy and hard prompts more (Dr.GRPO)."""
    return rewards - rewards.mean()


def rloo(rewards: Array) -> Array:
    """r minus the mean of the *other* siblings: the unbiased baseline (REINFORCE leave-one-out)."""
    n = len(rewards)
    return rewards - (rewards.sum() - rewards) / (n - 1)


def reinforce_pp(rewards: Array) -> Array:
    """r - group mean, whitened over the whole batch afterwards (REINFORCE++ with baseline)."""
    return rewards - rewards.mean() if len(rewards) > 1 else rewards.copy()


@dataclass(frozen=True, slots=True)
class Estimator:
    group: Callable[[Array], Array]
    whiten: bool = False


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(grpo),
    "dr_grpo": Estimator(dr_grpo),
    "rloo": Estimator(rloo),
    "reinforce_pp": Estimator(reinforce_pp, whiten=True),
}


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over actions, weighted by how many steps each advantage covers. They add up over controllers."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(advantages: Array, num_actions: Array) -> Moments:
        return Moments(
            float(num_actions.sum()),
            float((advantages * num_actions).sum()),
            float((advantages**2 * num_actions).sum()),
        )

    @staticmethod
    def sum(parts: Sequence[Moments]) -> Moments:
        return Moments(sum(p.count for p in parts), sum(p.total for p in parts), sum(p.squares for p in parts))


def whiten(advantages: Array, moments: Moments) -> Array:
    """Zero mean and unit variance (n - 1) over all actions of the global batch."""
    if moments.count < 2:
        return advantages
    mean = moments.total / moments.count
    variance = (moments.squares - moments.count * mean**2) / (moments.count - 1)
    return (advantages - mean) / np.sqrt(max(variance, 0.0) + 1e-8)
