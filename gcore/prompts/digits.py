"""Tasks of handwritten digits (scikit-learn's, 1,797 pictures of 8 x 8): `digits` to read or to add, `draw_digits`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore.prompts.files import DatasetRows, Row, computed_rows
from gcore.prompts.task_args import expect, task_args
from gcore.types import UserError

EVAL_DRAWINGS = 100
DRAW_DIGITS: Row = {"wrong": 0.0, "split": "train", "seed": 0}
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


def answer_text(digits: Sequence[int], kind: str, off: int = 0) -> str:
    """ "39", "12" or "3+9=12". `off`: a mistake in the sum."""
    shown, total = [str(digit) for digit in digits], str(sum(digits) + off)
    return {"read": "".join(shown), "sum": total, "steps": f"{'+'.join(shown)}={total}"}[kind]


def check_answer(args: Row, key: str) -> str:
    kind = str(args["answer"])
    expect(kind in ("read", "sum", "steps"), f"{key}.args.answer", "read, sum or steps", kind)
    return kind


def with_demonstration(problem: Row, digits: Sequence[int], args: Row, random: np.random.Generator) -> Row:
    """With the column `demonstration`, if some are wrong."""
    if args["sloppy"]:
        right, kind = random.random() >= args["sloppy"], args["answer"]
        problem["demonstration"] = answer_text(digits, kind) if right else _mistaken(digits, kind, random)
    return problem


def _mistaken(digits: Sequence[int], kind: str, random: np.random.Generator) -> str:
    if kind != "read":
        return answer_text(digits, kind, off=1)
    wrong = random.integers(len(digits))
    return answer_text([LOOK_ALIKES[d] if i == wrong else d for i, d in enumerate(digits)], kind)


def _scans(key: str, task: str, extra: str) -> tuple[np.ndarray, np.ndarray]:
    """All pictures, from 0 to 255, and the digits that they show."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(f"{key}.task: {task} needs scikit-learn: pip install 'gcore-rl[{extra}]'") from None
    scans = load_digits()
    return scans.images * (255 / 16), scans.target.astype(np.int64)


def make_digits(given: Mapping[str, Any], size: int | None, key: str) -> DatasetRows:
    """{"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "="}]}],
    "images": [array, array], "answer": "12"}

    The pictures of the held-out split are never in a training problem."""
    args = task_args("digits", given, DIGITS, key)
    for name, least, most in (("count", 1, 8), ("eval_pictures", 1, 1796), ("edge", 8, 512), ("size", 1, 2**31)):
        expect(least <= args[name] <= most, f"{key}.args.{name}", f"{least} to {most}", args[name])
    kind = check_answer(args, key)
    scans, labels = _scans(key, "digits", "vision")
    nearest = np.arange(args["edge"]) * 8 // args["edge"]
    pictures = np.repeat(scans.astype(np.uint8)[:, nearest][:, :, nearest][..., None], 3, -1)
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
            "answer": answer_text(digits, kind),
        }
        return with_demonstration(problem, digits, args, random)

    return computed_rows(size or args["size"], row)


def make_draw_digits(given: Mapping[str, Any], size: int | None, key: str) -> DatasetRows:
    """{"prompt": "7", "answer": "7", "demonstration": [[0, 0, 80, ...], ...]}: a diffusion model draws digits.

    Training rows have a picture as demonstration; a share of them is labelled with another digit, so that imitation
    alone does not learn to draw what is asked for. Held-out rows repeat the ten digits in order, without pictures."""
    args = task_args("draw_digits", given, DRAW_DIGITS, key)
    if args["split"] == "eval":
        return computed_rows(size or EVAL_DRAWINGS, lambda i: {"prompt": str(i % 10), "answer": str(i % 10)})
    scans, digits = _scans(key, "draw_digits", "diffusion")
    pictures = np.round(scans).astype(np.uint8)
    random = np.random.default_rng([args["seed"] % 2**64, 18])
    wrong = random.random(len(digits)) < args["wrong"]
    labels = np.where(wrong, (digits + random.integers(1, 10, len(digits))) % 10, digits)

    def row(index: int) -> Row:
        label = str(labels[index])
        return {"prompt": label, "answer": label, "demonstration": pictures[index].tolist()}

    return computed_rows(len(digits), row, size)
