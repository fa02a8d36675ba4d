"""Rewards -> advantages: one number per sample, which preparation/samples.py copies to its steps. Pure functions.

An estimator gets the rewards of one group (the siblings of one prompt). Estimators with whiten=True also normalize over
the whole batch: `whiten` needs three sums (`Moments`), which are gathered from all controllers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
EPSILON = 1e-6


def grpo(rewards: Array) -> Array:
    """(r - mean) / std within the group; std is the sample standard deviation (n - 1). Equal rewards give exactly 0."""
    if np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)


def dr_grpo(rewards: Array) -> Array:
    """r - mean: not divided by std, which gives very easy and very hard prompts more weight (Dr.GRPO)."""
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
    per_step: bool = False  # KL in the reward: each step is charged with its KL to come, not with the KL of the sample


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(grpo),
    "dr_grpo": Estimator(dr_grpo),
    "rloo": Estimator(rloo),
    "reinforce_pp": Estimator(reinforce_pp, whiten=True, per_step=True),
    "reinforce_pp_baseline": Estimator(reinforce_pp_baseline, whiten=True),
}


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, sum and sum of squares of the advantages of all actions. They add up over controllers."""

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
        """Of samples whose actions all have the advantage a, or a - kl_coef x (KL to come) if that is given."""
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
        """Standard deviation (n - 1). 1e-8 is added to the variance so that it is never 0."""
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
