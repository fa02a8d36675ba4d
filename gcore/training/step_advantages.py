"""Advantages of the steps, on a trainer rank: a pure function of the samples' advantages and the columns of the rank.

    advantage of a sample (of its controller) ──to every step──────────────────────> whitened ──> advantages_S
    or, with rewards per step: score at the last action, - kl_coef x KL at each one
        ──sum of the rewards to come (REINFORCE++, ReMax), or GAE with values_S──> whitened ──> advantages_S, returns_S

Estimators choose among them (config/algorithm.py: ESTIMATORS). Controllers compare siblings, so they compute one number
per sample. Values per step (logprobs, KL, values) exist only on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from gcore.config.algorithm import Algorithm
from gcore.types import Bools, Floats, Key, Sample

Array = npt.NDArray[np.float64]


EXPONENTS = 2100  # of float64, from -1074 to 1024
LOW = 2.0**27  # the lower half of a mantissa of 53 bits


@dataclass(frozen=True, slots=True)
class Moments:
    """Of the advantages of all actions: Moments(count=4, mean=1.25, squares=6.75). `squares`: of the deviations."""

    count: float
    mean: float
    squares: float

    @property
    def spread(self) -> float:
        """Standard deviation (n - 1). 1e-8 is added to the variance so that it is never 0."""
        return float(np.sqrt(self.squares / (self.count - 1) + 1e-8))


@dataclass(frozen=True, slots=True)
class Targets:
    """What the networks are trained towards, per step: Targets(advantages={(70, 3): [...]}, returns={})"""

    advantages: dict[Key, Floats]
    returns: dict[Key, Floats] = field(default_factory=dict)  # of the critic


@dataclass(frozen=True, slots=True)
class GlobalSums:
    """The data-parallel ranks. `sum`: a collective. `holders`: number of ranks that have a sample; default: 1. Sums
    count each sample once."""

    sum: Callable[[Array], Array] = lambda values: values
    holders: Mapping[Key, int] = field(default_factory=dict)

    def total(self, own: Mapping[Key, Array], width: int) -> Array:
        """The sum over the samples of all ranks."""
        shares = (values / self.holders.get(key, 1) for key, values in own.items())
        return self.sum(sum(shares, np.zeros(width)))

    def moments(self, own: Mapping[Key, Array]) -> Moments | None:
        """Of all values of the samples of all ranks, the same for any number of ranks. In two passes: the squares of
        values that are large beside their spread would cancel. None: fewer than two values."""
        values = np.concatenate([np.zeros(0), *own.values()])
        shares = np.concatenate([np.zeros(0), *(np.full(len(v), 1 / self.holders.get(k, 1)) for k, v in own.items())])
        count = float(self.total({key: np.array([float(len(v))]) for key, v in own.items()}, 1)[0])
        if count < 2:
            return None
        mean = float(self._exact(values, shares) / Fraction(count))
        return Moments(count, mean, float(self._exact((values - mean) ** 2, shares)))

    def _exact(self, values: Array, shares: Array) -> Fraction | float:
        """The sum of shares x values over all ranks, without rounding, so that their order does not matter; NaN if one
        is not finite. Mantissas of the same exponent add up as whole numbers. `shares`: 1, 1/2, 1/4, ..."""
        mantissas, exponents = np.frexp(values)
        whole = np.ldexp(mantissas, 53)
        high = np.floor(whole / LOW)
        halves = [np.bincount(exponents + 1074, part * shares, EXPONENTS) for part in (high, whole - high * LOW)]
        high_E, low_E = self.sum(np.concatenate(halves)).reshape(2, -1)
        if not np.isfinite(high_E).all():
            return float("nan")
        used = np.flatnonzero((high_E != 0) | (low_E != 0))
        parts = (Fraction(high_E[e]) * int(LOW) + Fraction(low_E[e]) for e in used)
        scales = (Fraction(2) ** (int(e) - 1074 - 53) for e in used)
        return sum((part * scale for part, scale in zip(parts, scales, strict=True)), Fraction(0))


def step_targets(
    samples: Mapping[Key, Sample],
    advantages: Mapping[Key, float],
    algorithm: Algorithm,
    sums: GlobalSums,
    penalties: Mapping[Key, Floats] | None = None,
    values: Mapping[Key, Floats] | None = None,
) -> Targets:
    """`advantages`: one per sample. `penalties`: of each step, kl_coef x KL to the reference model; only if the KL is
    part of the reward and the estimator charges it to each step. `values`: of the critic, per step."""
    estimator, returns = algorithm.estimator, dict[Key, Array]()
    if not estimator.step_rewards:
        found = {key: advantage + _of_teachers(samples[key]) for key, advantage in advantages.items()}
    else:
        masks = {key: samples[key].mask_S for key in advantages}
        rewards = {
            key: step_rewards(score, masks[key], penalties[key].astype(np.float64) if penalties is not None else None)
            + _of_teachers(samples[key])
            for key, score in advantages.items()
        }
        found = generalized(rewards, values, masks, algorithm.gamma, algorithm.gae_lambda if values else 1.0)
        if values is not None:
            returns = {key: found[key] + values[key] for key in found}
    if estimator.rescale:
        firsts = {key: a for key, a in advantages.items() if samples[key].trajectory in (None, key[1])}
        counted = sums.total({key: np.array([1.0, a != 0]) for key, a in firsts.items()}, 2)
        found = {key: each * (counted[0] / max(counted[1], 1.0)) for key, each in found.items()}
    if estimator.whiten:
        moments = sums.moments({key: each[samples[key].mask_S] for key, each in found.items()})
        found = {key: whiten(each, moments) for key, each in found.items()}
    return Targets(_float32(found), _float32(returns))


def _of_teachers(sample: Sample) -> Array:
    """Rewards of the steps, by teachers; 0 without them."""
    rewards_S = sample.step_rewards_S
    return np.zeros(sample.num_steps) if rewards_S is None else rewards_S.astype(np.float64)


def step_rewards(score: float, mask_S: Bools, penalty_S: Array | None = None) -> Array:
    """The score belongs to the last action. Each action loses its penalty."""
    rewards_S = np.zeros(len(mask_S)) if penalty_S is None else np.where(mask_S, -penalty_S, 0.0)
    if mask_S.any():
        rewards_S[np.flatnonzero(mask_S)[-1]] += score
    return rewards_S


def generalized(
    rewards: Mapping[Key, Array],
    values: Mapping[Key, Floats] | None,
    masks: Mapping[Key, Bools],
    gamma: float,
    lam: float,
) -> dict[Key, Array]:
    """Generalized advantage estimation (1506.02438). Without values and with lam = 1: the discounted rewards to come.

        delta_t = r_t + gamma V_t+1 - V_t        A_t = delta_t + gamma lam A_t+1

    t runs over the actions; steps between them (of tools) are no time. They get the advantage of the next action, and
    the return of theirs is not used. The value after the last action is 0. All samples are computed together, from
    their last action backwards.
    """
    keys = list(rewards)
    actions = [np.flatnonzero(masks[key]) for key in keys]
    longest = max(map(len, actions), default=0)

    def backwards(columns: Mapping[Key, npt.NDArray[np.floating]]) -> Array:
        rows = np.zeros((len(keys), longest))
        for row, key, at in zip(rows, keys, actions, strict=True):
            row[: len(at)] = columns[key][at][::-1]
        return rows

    rewards_NA = backwards(rewards)
    values_NA = backwards(values) if values is not None else np.zeros_like(rewards_NA)
    found_NA = np.zeros_like(rewards_NA)
    running_N, next_N = np.zeros(len(keys)), np.zeros(len(keys))
    for t in range(longest):
        running_N = rewards_NA[:, t] + gamma * next_N - values_NA[:, t] + gamma * lam * running_N
        next_N, found_NA[:, t] = values_NA[:, t], running_N
    return {key: _to_steps(found_NA[i], actions[i], len(masks[key])) for i, key in enumerate(keys)}


def _to_steps(backwards_A: Array, actions: npt.NDArray[np.int64], num_steps: int) -> Array:
    """Of each step, the value of its action or of the next one; 0 after the last one."""
    padded = np.append(backwards_A[: len(actions)][::-1], 0.0)
    return padded[np.searchsorted(actions, np.arange(num_steps))]


def whiten(values: Array, moments: Moments | None) -> Array:
    """Zero mean and unit variance (n - 1) over all actions of the global batch. A single action stays as it is."""
    return values if moments is None else (values - moments.mean) / moments.spread


def explained_variance(
    returns: Mapping[Key, Floats], values: Mapping[Key, Floats], masks: Mapping[Key, Bools], sums: GlobalSums
) -> float:
    """1 - var(returns - values) / var(returns) over the actions of the global batch: 1 for perfect values, 0 if they
    are no better than a constant."""
    targets, predicted = (
        {key: column[key][mask_S].astype(np.float64) for key, mask_S in masks.items()} for column in (returns, values)
    )
    target = sums.moments(targets)
    error = sums.moments({key: targets[key] - predicted[key] for key in masks})
    return 0.0 if target is None or error is None else 1.0 - error.spread**2 / target.spread**2


def _float32(columns: Mapping[Key, Array]) -> dict[Key, Floats]:
    return {key: values.astype(np.float32) for key, values in columns.items()}
