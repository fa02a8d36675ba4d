"""Numbers that change during a run, as pure functions: the learning rate, of the update; the coefficients of the KL and
of the entropy bonus, of what was measured in a training step.

Every rank computes the coefficients from sums over all ranks, so they are equal everywhere. They are part of a
checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gcore.config.algorithm import AdaptiveEntropy, AdaptiveKl, Algorithm
from gcore.config.training import WarmStart
from gcore.config.tree import Config
from gcore.training.state import TrainedName
from gcore.types import TrainBatch

MAX_ERROR = 0.2  # 1909.08593: a KL that is far off counts as 20 % off


def learning_rate(
    update: int,
    *,
    peak: float,
    total: int,
    warmup: int = 0,
    schedule: str = "constant",
    min_ratio: float = 0.0,
    position: float | None = None,
) -> float:
    """Linear warm-up over updates, then constant, or linear or cosine decay to `min_ratio * peak` at `total`.

    `update` counts the updates that were done. `position` counts planned updates, up to `total`: a step with fewer
    mini-batches, or none, advances it as far as any other step. Default: same as `update`.
    """
    rate = peak * (update + 1) / warmup if update < warmup else peak
    place = update if position is None else position
    if schedule == "constant" or place < warmup:
        return rate
    progress = min(1.0, (place - warmup) / max(1, total - warmup))
    decay = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return rate * (min_ratio + (1 - min_ratio) * decay)


def peak_of(config: Config, batch: TrainBatch, network: TrainedName) -> tuple[str, float]:
    """The key of the learning rate, and its value."""
    if (warm := _warm_start(config, batch)) is not None:
        return "training.warm_start.lr", warm.lr
    return ("critic.lr", config.critic.lr) if network == "critic" else ("training.lr", config.training.lr)


def learning_rate_of(config: Config, batch: TrainBatch, number: int, network: TrainedName, updates: int) -> float:
    """For update `number` of a step. Progress counts steps: a step may have fewer mini-batches, or none."""
    training, algorithm, (_, peak) = config.training, config.algorithm, peak_of(config, batch, network)
    if (warm := _warm_start(config, batch)) is not None:
        warmup, position = max(1, warm.steps // 10), batch.step - 1
        return learning_rate(updates, peak=peak, total=warm.steps, warmup=warmup, schedule="linear", position=position)
    planned, actual = algorithm.mini_batches * algorithm.epochs, len(batch.mini_batches) * algorithm.epochs
    return learning_rate(
        updates,
        peak=peak,
        total=config.run.total_steps * planned,
        warmup=training.warmup_steps,
        schedule=training.schedule,
        min_ratio=training.min_lr_ratio,
        position=(batch.step - 1) * planned + number * planned / actual,
    )


def _warm_start(config: Config, batch: TrainBatch) -> WarmStart | None:
    """The settings of the update, if it is one of the warm start."""
    return config.training.warm_start if batch.objective == "warm_start" else None


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
