"""The task `digits`: pictures of handwritten digits (scikit-learn's, 1,797 of 8 x 8), to read or to add.

{"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "="}]}],
 "images": [array, array], "answer": "12"}

The pictures of the held-out split are never in a training problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore.prompts.generated import Generated, Row, nearest, split_of
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


class Digits(Generated):
    def __init__(self, args: Row) -> None:
        self.args = args
        self.pictures, self.labels = _pictures(args["edge"])
        order = np.random.default_rng([args["seed"] % 2**64]).permutation(len(self.labels))
        held_out = args["eval_pictures"]
        self.mine = order[:held_out] if args["split"] == "eval" else order[held_out:]

    def __len__(self) -> int:
        return int(self.args["size"])

    def _row(self, index: int) -> Row:
        args = self.args
        random = np.random.default_rng([args["seed"] % 2**64, args["split"] == "eval", index])
        chosen = self.mine[random.integers(len(self.mine), size=args["count"])]
        digits = [int(d) for d in self.labels[chosen]]
        parts = [{"type": "image"}] * args["count"] + [{"type": "text", "text": "="}]
        row = {
            "prompt": [{"role": "user", "content": parts}],
            "images": [self.pictures[i] for i in chosen],
            "answer": _answer(digits, args["answer"]),
        }
        if args["sloppy"]:
            right = random.random() >= args["sloppy"]
            row["demonstration"] = (
                _answer(digits, args["answer"]) if right else _mistaken(digits, args["answer"], random)
            )
        return row


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


def make_digits(given: Mapping[str, Any], size: int | None, key: str) -> Sequence[Row]:
    for name, value in given.items():
        if name not in DIGITS:
            raise UserError(f"{key}.args.{name}: digits has no such argument{nearest(name, DIGITS)}")
        if name not in ("split", "answer", "sloppy") and (not isinstance(value, int) or isinstance(value, bool)):
            raise UserError(f"{key}.args.{name}: expected a whole number, got {value!r}")
    args = DIGITS | dict(given)
    for name, least, most in (("count", 1, 8), ("eval_pictures", 1, 1796), ("edge", 8, 512), ("size", 1, 2**31)):
        if not least <= args[name] <= most:
            raise UserError(f"{key}.args.{name}: expected {least} to {most}, got {args[name]}")
    if args["answer"] not in ("read", "sum", "steps"):
        raise UserError(f"{key}.args.answer: expected read, sum or steps, got {args['answer']!r}")
    if not isinstance(args["sloppy"], int | float) or not 0 <= args["sloppy"] <= 1:
        raise UserError(f"{key}.args.sloppy: expected a number between 0 and 1, got {args['sloppy']!r}")
    try:
        return Digits(args | {"split": split_of(args, key), "size": size or args["size"]})
    except ImportError:
        raise UserError(f"{key}.task: digits needs scikit-learn: pip install 'gcore-rl[vision]'") from None
