"""Writes pairs of answers to sums, right and wrong, for a reward model that checks additions:

    python examples/pairs.py runs/pairs && gcore train recipes/reward_model.yaml

{"prompt": "46+85=", "chosen": "131", "rejected": "121"}. The problems and the held-out problems are those of
recipes/quickstart.yaml: a policy trained with this reward is evaluated on sums that neither model was trained on.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from gcore.prompts.tasks import make_task

SUMS = {"min": 11, "max": 99, "zeros": False, "min_answer": 110}


def wrong_answers(a: int, b: int) -> list[str]:
    """Plausible wrong answers to a + b: 46+85 -> 121 (no carry), 130, 132, 141, 13, 11, 31, 831, ..."""
    right = str(a + b)
    found = {str(a // 10 * 10 + b // 10 * 10 + (a + b) % 10)}  # no carry
    found |= {str(a + b + wrong) for wrong in (-10, -1, 1, 10)}  # off by one, or by ten
    for i in range(len(right)):
        found.add(right[:i] + right[i + 1 :])  # a digit missing
        found |= {right[:i] + digit + right[i + 1 :] for digit in "0123456789"}  # a digit wrong
    return sorted(found - {right})


def write(file: Path, split: str, most: int | None = None) -> int:
    """Writes pairs of every problem with its wrong answers, at most `most` of them, at random. Returns their number."""
    pairs = []
    for row in make_task("arithmetic", {**SUMS, "split": split}):
        a, b = map(int, row["prompt"].rstrip("=").split("+"))
        pairs += [
            {"prompt": row["prompt"], "chosen": row["answer"], "rejected": wrong} for wrong in wrong_answers(a, b)
        ]
    random.Random(0).shuffle(pairs)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs[:most]))
    return len(pairs[:most])


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/pairs")
    for split, most in (("train", None), ("eval", 2000)):
        print(f"{folder / split}.jsonl: {write(folder / f'{split}.jsonl', split, most)} pairs")
