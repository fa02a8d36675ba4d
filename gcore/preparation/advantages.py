"""Rewards of a group (the siblings of one prompt) -> one advantage per sample. Pure functions.

What needs values per step or the whole batch (KL per step, whitening) follows on the trainer ranks:
training/step_advantages.py.
"""

from __future__ import annotations

from collections.abc import Callable

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


GROUP_ESTIMATORS: dict[str, Callable[[Array], Array]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def overlong_penalty(length: int, *, max_length: int, buffer: int, penalty: float) -> float:
    """Soft overlong punishment (DAPO): 0 up to max_length - buffer tokens, then linearly down to -penalty."""
    over = length - (max_length - buffer)
    return -penalty * min(over / buffer, 1.0) if buffer and over > 0 else 0.0
