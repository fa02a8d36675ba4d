"""Advantages of the steps, on a trainer rank: a pure function of the samples' advantages and the columns of the rank.

    advantage of a sample (of its controller) ──to every step──> - kl_coef x (KL to come) ──> whitened ──> advantages_S

The last two only for estimators that ask for them (config/algorithm.py: ESTIMATORS). Controllers compare siblings, so
they compute one advantage per sample. Values per step (logprobs, KL) exist only on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gcore.config.tree import Algorithm
from gcore.types import Bools, Floats, Key, Sample

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, sum and sum of squares of the advantages of actions. They add up over ranks."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values: Array) -> Moments:
        return Moments(float(len(values)), float(values.sum()), float((values**2).sum()))

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


def step_advantages(
    samples: Mapping[Key, Sample],
    advantages: Mapping[Key, float],
    kl: Mapping[Key, Floats],
    algorithm: Algorithm,
    sum_over_ranks: Callable[[Array], Array],
    num_holders: Mapping[Key, int] | None = None,
) -> dict[Key, Floats]:
    """`advantages`: one per sample. `kl`: per step, to the reference model; used if the KL is part of the reward and
    the estimator charges it to each step. `sum_over_ranks`: a collective, for estimators that whiten. `num_holders`:
    data-parallel ranks that have the sample; default: 1. The sum counts each sample once."""
    found: dict[Key, Array] = {}
    for key, advantage in advantages.items():
        found[key] = np.full(samples[key].num_steps, advantage)
        if algorithm.kl_per_step:
            found[key] -= algorithm.kl_coef * kl_to_come(kl[key], samples[key].mask_S)
    if algorithm.estimator.whiten:
        own = np.zeros(3)
        for key, values in found.items():
            moments = Moments.of(values[samples[key].mask_S])
            own += np.array([moments.count, moments.total, moments.squares]) / (num_holders or {}).get(key, 1)
        moments = Moments(*sum_over_ranks(own))
        found = {key: whiten(values, moments) for key, values in found.items()}
    return {key: values.astype(np.float32) for key, values in found.items()}


def whiten(values: Array, moments: Moments) -> Array:
    """Zero mean and unit variance (n - 1) over all actions of the global batch."""
    return (values - moments.mean) / moments.spread


def kl_to_come(kl_S: Floats, mask_S: Bools) -> Array:
    """The KL of each action and of all later actions: [0.1, 0.2, 0.3], where the second is no action, gives
    [0.4, 0.3, 0.3]."""
    counted_S: Array = np.where(mask_S, kl_S.astype(np.float64), 0.0)
    return np.cumsum(counted_S[::-1])[::-1]
