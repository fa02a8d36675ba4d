"""The task `keypad`: clips of telephone keys. A key is two tones at once, of its row and of its column (DTMF)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gcore.prompts.digits import answer_text, check_answer, with_demonstration
from gcore.prompts.files import DatasetRows, Row, computed_rows
from gcore.prompts.task_args import expect, task_args

RATE = 16_000
ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)  # Hz
KEYS = [(ROWS[3], COLUMNS[1]), *itertools.product(ROWS[:3], COLUMNS)]  # of 0, 1, ... 9
TONE, GAP = (0.05, 0.1), (0.02, 0.06)  # seconds, shortest and longest
KEYPAD: Row = {
    "least": 2,  # keys of a clip
    "most": 2,
    "answer": "steps",  # as in `digits`: "read", "sum" or "steps"
    "noise": 0.05,  # its standard deviation; that of a key is 0.35
    "size": 4000,  # problems of the split
    "sloppy": 0.0,  # fraction of demonstrations (not answers) that are wrong, as in `digits`
    "split": "train",
    "seed": 0,
}


def make_keypad(given: Mapping[str, Any], size: int | None, key: str) -> DatasetRows:
    """{"prompt": [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "="}]}],
    "audio": {"array": array, "sampling_rate": 16000}, "answer": "3+9=12"}"""
    args = task_args("keypad", given, KEYPAD, key)
    for name, least, most in (("least", 1, args["most"]), ("most", 1, 8), ("size", 1, 2**31)):
        expect(least <= args[name] <= most, f"{key}.args.{name}", f"{least} to {most}", args[name])
    kind, seed, is_eval = check_answer(args, key), args["seed"] % 2**64, args["split"] == "eval"

    def row(index: int) -> Row:
        random = np.random.default_rng([seed, is_eval, index])
        digits = random.integers(10, size=random.integers(args["least"], args["most"] + 1)).tolist()
        parts = [part for digit in digits for part in (_tones((), GAP, random), _tones(KEYS[digit], TONE, random))]
        clip = np.concatenate([*parts, _tones((), GAP, random)])
        clip = (clip + args["noise"] * random.standard_normal(len(clip))).clip(-1, 1).astype(np.float32)
        content = [{"type": "audio"}, {"type": "text", "text": "="}]
        problem = {
            "prompt": [{"role": "user", "content": content}],
            "audio": {"array": clip, "sampling_rate": RATE},
            "answer": answer_text(digits, kind),
        }
        return with_demonstration(problem, digits, args, random)

    return computed_rows(size or args["size"], row)


def _tones(frequencies: Sequence[int], lengths: tuple[float, float], random: np.random.Generator) -> np.ndarray:
    """The sum of sines with random phases, for a random time; none: silence."""
    at = np.arange(round(random.uniform(*lengths) * RATE)) / RATE
    return sum((0.35 * np.sin(2 * np.pi * (f * at + random.random())) for f in frequencies), start=np.zeros(len(at)))
