"""Coefficients that adapt to what was measured in a training step: of the KL, and of the entropy bonus. Pure functions.

Every rank computes them from sums over all ranks, so they are equal everywhere. They are part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gcore.config.algorithm import AdaptiveEntropy, AdaptiveKl, Algorithm

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

    def after_kl(self, control: AdaptiveKl, kl: float, num_samples: float) -> Coefficients:
        """The proportional controller of 1909.08593. `kl`: the mean of the step; `num_samples`: of the step. A step
        changes the coefficient by at most 20 %: if it has five times the samples of the horizon, it would become
        negative."""
        error = min(max(kl / control.target - 1, -MAX_ERROR), MAX_ERROR)
        return replace(self, kl=self.kl * (1 + error * min(num_samples / control.horizon, 1.0)))

    def after_entropy(self, control: AdaptiveEntropy, entropy: float) -> Coefficients:
        """The coefficient applies only while the entropy is not above its target (2505.22312)."""
        low = entropy <= control.target
        return replace(self, entropy=max(0.0, self.entropy + (control.change if low else -control.change)), bonus=low)

    def counters(self) -> dict[str, float]:
        return {"kl_coef": self.kl, "entropy_coef": self.entropy, "entropy_bonus": float(self.bonus)}

    @staticmethod
    def restored(counters: Mapping[str, float], algorithm: Algorithm) -> Coefficients:
        start = Coefficients.of(algorithm)
        kl = counters.get("kl_coef", start.kl) if algorithm.adaptive_kl is not None else start.kl
        if algorithm.adaptive_entropy is None:
            return Coefficients(kl, start.entropy)
        return Coefficients(kl, counters.get("entropy_coef", start.entropy), bool(counters.get("entropy_bonus", 1)))
