"""The learning rate as a pure function of the update number."""

from __future__ import annotations

import math


def learning_rate(
    update: int, *, peak: float, total: int, warmup: int = 0, schedule: str = "constant", min_ratio: float = 0.0
) -> float:
    """Linear warm-up, then constant, or linear or cosine down to `min_ratio * peak` at update `total`."""
    if update < warmup:
        return peak * (update + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    falling = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1 - min_ratio) * falling)
