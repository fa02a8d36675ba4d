"""The task `digits`: pictures of handwritten digits (scikit-learn's, 1,797 of 8 x 8), to read or to add.

{"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "="}]}],
 "images": [array, array], "answer": "12"}

The pictures of the held-out split are never in a training problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore.prompts.files import DatasetRows, computed_rows
from gcore.prompts.task_args import Row, task_args
from gcore.types import UserError

DIGITS: Row = {
    "count": 2,  # pictures per problem
    "answer": "sum",  # "read": the digits; "sum": their sum; "steps": the digits, then their sum: 3+9=12
    "size": 10_000,  # problems of the split
    "eval_pictures": 360,  # held out: in no training problem
    "edge": 16,  # pixels of a side
    "sloppy": 0.0,  # fraction of demonstrations (not answers) that are wrong: one too many; when reading, a look-alike
    "split": "train",
    "seed": 0,
}
LOOK_ALIKES = {0: 6, 1: 7, 2: 3, 3: 8, 4: 9, 5: 6, 6: 5, 7: 1, 8: 3, 9: 4}


def _answer(digits: Sequence[int], kind: str) -> str:
    if kind == "read":
        return "".join(map(str, digits))
    return str(sum(digits)) if kind == "sum" else "+".join(map(str, digits)) + "=" + str(sum(digits))


def _mistaken(digits: Sequence[int], kind: str, random: np.random.Generator) -> str:
    if kind == "read":
        wrong = random.integers(len(digits))
        return _answer([LOOK_ALIKES[d] if i == wrong else d for i, d in enumerate(digits)], kind)
    total = sum(digits) + 1
    return str(total) if kind == "sum" else "+".join(map(str, digits)) + "=" + str(total)


def _pictures(edge: int) -> tuple[np.ndarray, np.ndarray]:
    """All pictures, enlarged to edge x edge x 3, and the digits that they show."""
    from sklearn.datasets import load_digits

    found = load_digits()
    small = (found.images * (255 / 16)).astype(np.uint8)
    at = np.arange(edge) * 8 // edge
    large = small[:, at][:, :, at]
    return np.repeat(large[..., None], 3, -1), found.target


def make_digits(given: Mapping[str, Any], size: int | None, key: str) -> DatasetRows:
    args = task_args("digits", given, DIGITS, key)
    for name, least, most in (("count", 1, 8), ("eval_pictures", 1, 1796), ("edge", 8, 512), ("size", 1, 2**31)):
        if not least <= args[name] <= most:
            raise UserError(f"{key}.args.{name}: expected {least} to {most}, got {args[name]}")
    if (kind := args["answer"]) not in ("read", "sum", "steps"):
        raise UserError(f"{key}.args.answer: expected read, sum or steps, got {kind!r}")
    try:
        pictures, labels = _pictures(args["edge"])
    except ImportError:
        raise UserError(f"{key}.task: digits needs scikit-learn: pip install 'gcore-rl[vision]'") from None
    seed, is_eval, held_out = args["seed"] % 2**64, args["split"] == "eval", args["eval_pictures"]
    order = np.random.default_rng([seed]).permutation(len(labels))
    of_split = order[:held_out] if is_eval else order[held_out:]

    def row(index: int) -> Row:
        random = np.random.default_rng([seed, is_eval, index])
        chosen = of_split[random.integers(len(of_split), size=args["count"])]
        digits = [int(d) for d in labels[chosen]]
        parts = [{"type": "image"}] * args["count"] + [{"type": "text", "text": "="}]
        problem = {
            "prompt": [{"role": "user", "content": parts}],
            "images": [pictures[i] for i in chosen],
            "answer": _answer(digits, kind),
        }
        if args["sloppy"]:
            right = random.random() >= args["sloppy"]
            problem["demonstration"] = _answer(digits, kind) if right else _mistaken(digits, kind, random)
        return problem

    return computed_rows(size or args["size"], row)
