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
    """r itself, whitened over the whole batch afterwards (REINFORCE++)."""
    return rewards.copy()


def reinforce_pp_baseline(rewards: Array) -> Array:
    """r - group mean, whitened over the whole batch afterwards (REINFORCE++ with baseline)."""
    return rewards - rewards.mean()


@dataclass(frozen=True, slots=True)
class Estimator:
    group: Callable[[Array], Array]
    whiten: bool = False
    per_step: bool = False  # KL in the reward: a step is charged with its own KL and what comes after it, not with all


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(grpo),
    "dr_grpo": Estimator(dr_grpo),
    "rloo": Estimator(rloo),
    "reinforce_pp": Estimator(reinforce_pp, whiten=True, per_step=True),
    "reinforce_pp_baseline": Estimator(reinforce_pp_baseline, whiten=True),
}


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over actions of their advantages. They add up over controllers."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(
        advantages: Array,
        num_actions: Array,
        to_come: Array | None = None,
        to_come_squares: Array | None = None,
        kl_coef: float = 0.0,
    ) -> Moments:
        """Of samples with one advantage a for all of their actions; or with a - kl_coef x (KL to come) for each."""
        total = advantages * num_actions
        squares = advantages**2 * num_actions
        if to_come is not None and to_come_squares is not None:
            total = total - kl_coef * to_come
            squares = squares - 2 * kl_coef * advantages * to_come + kl_coef**2 * to_come_squares
        return Moments(float(num_actions.sum()), float(total.sum()), float(squares.sum()))

    @staticmethod
    def sum(parts: Sequence[Moments]) -> Moments:
        return Moments(sum(p.count for p in parts), sum(p.total for p in parts), sum(p.squares for p in parts))

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count >= 2 else 0.0

    @property
    def spread(self) -> float:
        """Standard deviation (n - 1), and a little more so that it is never 0."""
        if self.count < 2:
            return 1.0
        variance = (self.squares - self.count * self.mean**2) / (self.count - 1)
        return float(np.sqrt(max(variance, 0.0) + 1e-8))


def whiten(advantages: Array, moments: Moments) -> Array:
    """Zero mean and unit variance (n - 1) over all actions of the global batch."""
    return (advantages - moments.mean) / moments.spread


def overlong_penalty(length: int, *, max_length: int, buffer: int, penalty: float) -> float:
    """Soft overlong punishment (DAPO): 0 up to max_length - buffer tokens, then linearly down to -penalty."""
    over = length - (max_length - buffer)
    return -penalty * min(over / buffer, 1.0) if buffer and over > 0 else 0.0
