"""The task `draw_digits`: a diffusion model draws digits. Pictures: scikit-learn's 1,797 of 8 x 8 pixels.

Training rows have a picture as demonstration; a share of them is labelled with another digit, so that imitation alone
does not learn to draw what is asked for. Held-out rows repeat the ten digits in order, without pictures.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from gcore.prompts.files import DatasetRows, computed_rows
from gcore.prompts.task_args import Row, task_args
from gcore.types import UserError

DRAW_DIGITS: Row = {"wrong": 0.0, "split": "train", "seed": 0}
EVAL_SIZE = 100


def make_draw_digits(given: Mapping[str, Any], size: int | None, key: str) -> DatasetRows:
    """{"prompt": "7", "answer": "7", "demonstration": [[0, 0, 80, ...], ...]}"""
    args = task_args("draw_digits", given, DRAW_DIGITS, key)
    if args["split"] == "eval":
        return computed_rows(size or EVAL_SIZE, lambda index: {"prompt": str(index % 10), "answer": str(index % 10)})
    pictures, digits = load(key)
    random = np.random.default_rng([args["seed"] % 2**64, 18])
    wrong = random.random(len(digits)) < args["wrong"]
    labels = np.where(wrong, (digits + random.integers(1, 10, len(digits))) % 10, digits)

    def row(index: int) -> Row:
        label = str(labels[index])
        return {"prompt": label, "answer": label, "demonstration": pictures[index].tolist()}

    return computed_rows(len(digits), row, size)


@functools.lru_cache(maxsize=1)
def load(key: str = "data.train") -> tuple[np.ndarray, np.ndarray]:
    """Pictures, uint8: number x 8 x 8, and their digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(f"{key}.task: draw_digits needs scikit-learn: pip install 'gcore-rl[diffusion]'") from None
    found = load_digits()
    return np.round(found.images * (255 / 16)).astype(np.uint8), found.target.astype(np.int64)
