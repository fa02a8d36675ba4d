"""Coefficients that adapt to what was measured in a training step: of the KL, and of the entropy bonus. Pure functions.

Every rank computes them from sums over all ranks, so they are equal everywhere. They are part of a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from gcore.config.algorithm import Algorithm

MAX_ERROR = 0.2  # 1909.08593: a KL that is far off counts as 20 % off


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The current values of algorithm.kl_coef and entropy_coef. Coefficients(kl=0.02, entropy=0.0, bonus=True)"""

    kl: float
    entropy: float
    bonus: bool = True  # entropy control: the entropy was below its target

    @staticmethod
    def of(algorithm: Algorithm) -> Coefficients:
        return Coefficients(algorithm.kl_coef, algorithm.entropy_coef)

    def applied(self, algorithm: Algorithm) -> Algorithm:
        """The section with the current values."""
        entropy = self.entropy if self.bonus else 0.0
        return algorithm.model_copy(update={"kl_coef": self.kl, "entropy_coef": entropy})

    def counters(self) -> dict[str, float]:
        return {"kl_coef": self.kl, "entropy_coef": self.entropy, "entropy_bonus": float(self.bonus)}

    @staticmethod
    def restored(counters: dict[str, float], algorithm: Algorithm) -> Coefficients:
        start = Coefficients.of(algorithm)
        kl = counters.get("kl_coef", start.kl) if algorithm.adaptive_kl is not None else start.kl
        if algorithm.adaptive_entropy is None:
            return Coefficients(kl, start.entropy)
        return Coefficients(kl, counters.get("entropy_coef", start.entropy), bool(counters.get("entropy_bonus", 1)))


def next_kl_coef(current: float, kl: float, num_samples: float, target: float, horizon: int) -> float:
    """The proportional controller of 1909.08593. `kl`: the mean of the step; `num_samples`: of the step. A step changes
    the coefficient by at most 20 %: if it has five times the samples of the horizon, it would become negative."""
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return current * (1 + error * min(num_samples / horizon, 1.0))


def next_entropy_coef(current: float, entropy: float, target: float, change: float) -> tuple[float, bool]:
    """The coefficient and whether it applies: only while the entropy is not above its target (2505.22312)."""
    low = entropy <= target
    return max(0.0, current + (change if low else -change)), low
