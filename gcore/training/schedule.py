"""The learning rate as a pure function of the update."""

from __future__ import annotations

import math

from gcore.config.training import WarmStart
from gcore.config.tree import Config
from gcore.training.state import TrainedName
from gcore.types import TrainBatch


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
