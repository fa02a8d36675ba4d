"""Response lengths: log-normal, cut at a maximum. The longest response decides how long a batch takes.

mean as observed (after the cut), sigma, longest ──> expected longest of n, expected rest of running responses
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
NORMAL = NormalDist()
SHARED = 0.5  # share of the variance that siblings have in common, because it depends on the prompt (as in scenarios)


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths in tokens. sigma 0: all equal.

    Lengths(mean=2048, sigma=0.8, longest=16384)
    """

    mean: float  # as observed, so after the cut
    sigma: float
    longest: int

    @cached_property
    def _mu(self) -> float:
        """The value that gives the mean after the cut, found by bisection: there is no closed form."""
        low, high = math.log(self.mean) - self.sigma**2 / 2, math.log(self.longest) + 6 * self.sigma
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_at(middle) < self.mean else (low, middle)
        return (low + high) / 2

    def _mean_at(self, mu: float) -> float:
        s, log_cut = self.sigma, math.log(self.longest)
        below = math.exp(mu + s * s / 2) * NORMAL.cdf((log_cut - mu - s * s) / s)
        return below + self.longest * (1 - NORMAL.cdf((log_cut - mu) / s))

    @cached_property
    def _grid(self) -> Array:
        """Points between 0 and the longest at which the survival is computed."""
        return np.linspace(0.0, self.longest, min(self.longest, 1024) + 1)

    @cached_property
    def _survival(self) -> Array:
        """Share of responses longer than each point."""
        if self.sigma == 0:
            return (self._grid < self.mean).astype(float)
        tail = [1.0 - NORMAL.cdf((math.log(x) - self._mu) / self.sigma) for x in self._grid[1:]]
        return np.array([1.0, *tail])

    @cached_property
    def mean_rest(self) -> float:
        """Expected remaining tokens of a running response (at any moment, long ones are more likely to be running).

        Its expected tokens so far are the same number.
        """
        if self.sigma == 0:
            return self.mean / 2
        return _area(self._grid * self._survival, self._grid) / self.mean

    def longest_of(self, num: float) -> float:
        """Expected length of the longest of `num` responses."""
        if self.sigma == 0:
            return self.mean
        return _expected_longest(self, max(1.0, num), rest=False)

    def longest_rest_of(self, num: float) -> float:
        """Expected maximum of the remaining tokens of `num` running responses."""
        if self.sigma == 0:
            return self.mean
        return _expected_longest(self, max(1.0, num), rest=True)

    def made(self, steps: Array) -> Array:
        """Expected tokens of a response this number of steps after its start."""
        made = np.concatenate([[0.0], np.cumsum(_slices(self._survival, self._grid))])
        return np.interp(steps, self._grid, made)

    def group_done(self, siblings: int, steps: Array) -> Array:
        """Share of groups whose last sibling has ended this number of steps after their common start."""
        if self.sigma == 0:
            return (steps >= self.mean).astype(float)
        done = _groups_done(self, siblings)
        return np.where(steps >= self.longest, 1.0, np.interp(steps, self._grid, done))


@lru_cache(maxsize=4096)
def _expected_longest(lengths: Lengths, num: float, rest: bool) -> float:
    grid, survival = lengths._grid, lengths._survival
    if rest:  # P(rest of a running response > x) = area of the survival beyond x / total area
        beyond = np.concatenate([np.cumsum(_slices(survival, grid)[::-1])[::-1], [0.0]])
        survival = beyond / beyond[0]
    return _area(1.0 - np.clip(1.0 - survival, 0.0, 1.0) ** num, grid)


def _slices(heights: Array, grid: Array) -> Array:
    return (heights[1:] + heights[:-1]) / 2 * np.diff(grid)


def _area(heights: Array, grid: Array) -> float:
    return float(_slices(heights, grid).sum())


@lru_cache(maxsize=256)
def _groups_done(lengths: Lengths, siblings: int) -> Array:
    """`group_done` at the points of the grid, averaged over the part of the length that siblings have in common."""
    own, common = lengths.sigma * math.sqrt(1 - SHARED), lengths.sigma * math.sqrt(SHARED)
    levels = [NORMAL.inv_cdf((k + 0.5) / 9) for k in range(9)]
    logs = [-math.inf, *(math.log(x) for x in lengths._grid[1:])]
    shares = [[NORMAL.cdf((log - lengths._mu - common * level) / own) ** siblings for log in logs] for level in levels]
    return np.asarray(shares).mean(axis=0)
