"""The learning rate as a pure function of the update, and the parameter groups for weight decay."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor


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


def decay_groups(parameters: Iterable[Tensor], weight_decay: float, norms: bool) -> list[dict[str, Any]]:
    """Parameter groups for AdamW. Parameters with fewer than two dimensions (norms, biases) decay only with `norms`."""
    found = list(parameters)
    matrices = [p for p in found if p.ndim >= 2 or norms]
    others = [p for p in found if p.ndim < 2 and not norms]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
