"""The task `keypad`: clips of telephone keys. A key is two tones at once, of its row and of its column (DTMF)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gcore.prompts.digits import answer_text, mistaken
from gcore.prompts.files import DatasetRows, Row, computed_rows
from gcore.prompts.task_args import expect, task_args

RATE = 16_000
ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)  # Hz
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
    for name, least, most in (("least", 1, args["most"]), ("most", 1, 8), ("noise", 0, 9), ("size", 1, 2**31)):
        expect(least <= args[name] <= most, f"{key}.args.{name}", f"{least} to {most}", args[name])
    kind, seed, is_eval = args["answer"], args["seed"] % 2**64, args["split"] == "eval"
    expect(kind in ("read", "sum", "steps"), f"{key}.args.answer", "read, sum or steps", kind)

    def row(index: int) -> Row:
        random = np.random.default_rng([seed, is_eval, index])
        digits = random.integers(10, size=random.integers(args["least"], args["most"] + 1)).tolist()
        parts = [part for digit in digits for part in (_silence(random), _tones(digit, random))]
        clip = np.concatenate([*parts, _silence(random)])
        clip = (clip + args["noise"] * random.standard_normal(len(clip))).clip(-1, 1).astype(np.float32)
        problem = {
            "prompt": [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "="}]}],
            "audio": {"array": clip, "sampling_rate": RATE},
            "answer": answer_text(digits, kind),
        }
        if args["sloppy"]:
            right = random.random() >= args["sloppy"]
            problem["demonstration"] = answer_text(digits, kind) if right else mistaken(digits, kind, random)
        return problem

    return computed_rows(size or args["size"], row)


def _tones(digit: int, random: np.random.Generator) -> np.ndarray:
    row, column = divmod(digit - 1, 3) if digit else (3, 1)
    seconds = np.arange(round(random.uniform(*TONE) * RATE)) / RATE
    phases = random.uniform(0, 2 * np.pi, 2)
    tones = (np.sin(2 * np.pi * f * seconds + p) for f, p in zip((ROWS[row], COLUMNS[column]), phases, strict=True))
    return 0.35 * sum(tones, start=np.zeros(1))


def _silence(random: np.random.Generator) -> np.ndarray:
    return np.zeros(round(random.uniform(*GAP) * RATE))
