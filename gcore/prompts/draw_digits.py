"""The task `draw_digits`: a diffusion model draws digits. Pictures: scikit-learn's 1,797 of 8 x 8 pixels.

Training rows have a picture as demonstration; a share of them is labelled with another digit, so that imitation alone
does not learn to draw what is asked for. Held-out rows repeat the ten digits in order, without pictures.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore.types import UserError

Row = dict[str, Any]
DRAW_DIGITS: Row = {"wrong": 0.0, "split": "train", "seed": 0}
EVAL_SIZE = 100


def make_draw_digits(given: Mapping[str, Any], size: int | None, key: str) -> Sequence[Row]:
    """{"prompt": "7", "answer": "7", "demonstration": [[0, 0, 80, ...], ...]}"""
    for name in given:
        if name not in DRAW_DIGITS:
            raise UserError(
                f"{key}.args.{name}: draw_digits has no such argument; expected some of {', '.join(DRAW_DIGITS)}"
            )
    args = DRAW_DIGITS | dict(given)
    if not isinstance(args["wrong"], int | float) or not 0 <= args["wrong"] <= 1:
        raise UserError(f"{key}.args.wrong: expected a share between 0 and 1, got {args['wrong']!r}")
    if not isinstance(args["seed"], int):
        raise UserError(f"{key}.args.seed: expected a whole number, got {args['seed']!r}")
    if args["split"] not in ("train", "eval"):
        raise UserError(f"{key}.args.split: expected train or eval, got {args['split']!r}")
    if args["split"] == "eval":
        return [{"prompt": str(i % 10), "answer": str(i % 10)} for i in range(size or EVAL_SIZE)]
    pictures, digits = load(key)
    random = np.random.default_rng([args["seed"] % 2**64, 18])
    wrong = random.random(len(digits)) < args["wrong"]
    labels = np.where(wrong, (digits + random.integers(1, 10, len(digits))) % 10, digits)
    rows = zip(labels.tolist(), pictures.tolist(), strict=True)
    return [{"prompt": str(label), "answer": str(label), "demonstration": picture} for label, picture in rows][:size]


@functools.lru_cache(maxsize=1)
def load(key: str = "data.train") -> tuple[np.ndarray, np.ndarray]:
    """Pictures, uint8: number x 8 x 8, and their digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(f"{key}.task: draw_digits needs scikit-learn: pip install 'gcore-rl[diffusion]'") from None
    found = load_digits()
    return np.round(found.images * (255 / 16)).astype(np.uint8), found.target.astype(np.int64)
