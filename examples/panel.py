"""Trains a panel of three models that judge additions, for recipes/panel.yaml, in a few minutes on a laptop:

    python examples/panel.py runs/panel && gcore train recipes/panel.yaml

    scorer    reads 46+85=121 and returns a number                  (objective: reward_model)
    checker   reads 46+85=121? and writes 11y13n: wrong             (gcore sft, gcore export)
    referee   reads 46+85=131|121? and writes 11yy13yna: the first is right

The judges write their reasoning before the verdict: the sum of the units (6+5 is 11), y or n per answer for its last
digit, the sum of the tens with the carry (4+8+1 is 13), and y or n per answer for the whole answer. The last letter is
the verdict. All three are trained on the problems of recipes/quickstart.yaml, with the same held-out problems. Their
accuracy on held-out cases is printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pairs import SUMS, wrong_answers

from gcore.prompts.tasks import make_task

ALPHABET, MAX_ANSWER = "0123456789+=", 5  # characters and maximum length of the policy's answers
SCORER = Path(__file__).parents[1] / "recipes" / "reward_model.yaml"
Row = dict[str, str]
MakeRows = Callable[[int, int, np.random.Generator], list[Row]]


@dataclass(frozen=True)
class Settings:
    """Data and length of the panel's training."""

    sums: Mapping[str, Any] = field(default_factory=lambda: SUMS)  # arguments of the task arithmetic
    held_out: int = 2000  # cases
    layers: Mapping[str, int] = field(default_factory=lambda: {"checker": 3, "referee": 4})
    steps: Mapping[str, int] = field(default_factory=lambda: {"checker": 800, "referee": 1200, "scorer": 2000})
    batch_size: int = 64
    seed: int = 0


def checker_rows(a: int, b: int, random: np.random.Generator) -> list[Row]:
    """{"prompt": "46+85=121?", "answer": "11y13n"}"""
    answers = [sample_answer(a, b, random) for _ in range(12)]
    return [{"prompt": f"{a}+{b}={answer}?", "answer": reasoning(a, b, answer)} for answer in answers]


def referee_rows(a: int, b: int, random: np.random.Generator) -> list[Row]:
    """{"prompt": "46+85=131|121?", "answer": "11yy13yna"}; the last letter is t, a tie, if both are right or wrong."""
    rows = []
    for _ in range(12):
        first, second, right = sample_answer(a, b, random), sample_answer(a, b, random), str(a + b)
        verdict = "t" if (first == right) == (second == right) else "a" if first == right else "b"
        rows.append({"prompt": f"{a}+{b}={first}|{second}?", "answer": reasoning(a, b, first, second) + verdict})
    return rows


def scorer_rows(a: int, b: int, random: np.random.Generator) -> list[Row]:
    """{"prompt": "46+85=", "chosen": "131", "rejected": "121"}"""
    wrong = [*wrong_answers(a, b), *(random_text(a, b, random) for _ in range(4))]
    return [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": one} for one in wrong]


def reasoning(a: int, b: int, *answers: str) -> str:
    """reasoning(46, 85, "131", "121") == "11yy13yn" """
    units, right = a % 10 + b % 10, str(a + b)
    tens = a // 10 + b // 10 + units // 10
    ends = ["y" if answer[-1:] == right[-1] else "n" for answer in answers]
    whole = ["y" if answer == right else "n" for answer in answers]
    return "".join([f"{units:02}", *ends, f"{tens:02}", *whole])


def sample_answer(a: int, b: int, random: np.random.Generator) -> str:
    """Right with probability 1/2. Wrong answers are of five kinds: no carry, off by one, one of `wrong_answers`, an
    extra digit, random text."""
    if random.random() < 0.5:
        return str(a + b)
    no_carry, off_by_one = a // 10 * 10 + b // 10 * 10 + (a + b) % 10, a + b + random.choice([-1, 1])
    plausible, extra_digit = random.choice(wrong_answers(a, b)), f"{a + b}{random.integers(10)}"
    return str(random.choice([str(no_carry), str(off_by_one), plausible, extra_digit, random_text(a, b, random)]))


def random_text(a: int, b: int, random: np.random.Generator) -> str:
    """Any text that the policy can write, also an empty one, except the sum."""
    text = "".join(random.choice(list(ALPHABET), size=random.integers(MAX_ANSWER + 1)))
    return text if text != str(a + b) else ""


JUDGES: dict[str, tuple[MakeRows, str]] = {  # training rows, and characters in addition to the policy's
    "referee": (referee_rows, "|?ynabt"),
    "checker": (checker_rows, "?yn"),
}


def prepare(folder: Path, settings: Settings) -> dict[str, float]:
    """Trains three models in `folder`, two at a time. Returns their accuracies on held-out cases."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty; expected an empty or new folder")
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        jobs = {name: pool.submit(train_judge, folder, name, settings) for name in JUDGES}
        jobs["scorer"] = pool.submit(train_scorer, folder, settings)
        for job in wait(jobs.values(), return_when=FIRST_EXCEPTION).not_done:
            job.cancel()
    return {name: job.result() for name, job in jobs.items() if not job.cancelled()}


def train_judge(folder: Path, name: str, settings: Settings) -> float:
    (rows, letters), recipe, start = JUDGES[name], folder / f"{name}.yaml", time.monotonic()
    train, held_out = write_data(folder, name, rows, settings)
    build = {"hidden_size": 64, "intermediate_size": 256, "layers": settings.layers[name], "heads": 4, "kv_heads": 4}
    tree = {
        "run": {"name": f"{name}-sft", "dir": str(folder), "seed": settings.seed},
        "model": {"build": {**build, "max_length": 32, "alphabet": ALPHABET + letters}},
        "data": {"train": {"path": str(train)}, "eval": {"path": str(held_out)}, "max_prompt_length": 20},
        "runtime": "local",
        "generation": {"max_response_length": 10},
        "rewards": {"functions": [{"name": "exact", "path": "gcore.rewarding.rules:exact_answer"}]},
        "training": {"warm_start": {"steps": settings.steps[name], "batch_size": settings.batch_size, "lr": 3e-3}},
        "placement": {"trainer": {"threads": 1}},
        "observe": {"progress": "none", "trace": False, "trackers": []},
    }
    recipe.write_text(yaml.safe_dump(tree, sort_keys=False))
    gcore("sft", str(recipe))
    gcore("export", str(folder / f"{name}-sft"), str(folder / name))
    right = last(folder / f"{name}-sft", "eval/accuracy")
    report(f"{name}: every letter right in {right:.1%} of held-out cases", start)
    return right


def train_scorer(folder: Path, settings: Settings) -> float:
    start = time.monotonic()
    train, held_out = write_data(folder, "scorer", scorer_rows, settings)
    gcore(
        *("train", str(SCORER), "run.name=scorer", f"run.dir={folder}", f"run.seed={settings.seed}"),
        *(f"data.train.path={train}", f"data.eval.path={held_out}"),
        *(
            f"run.steps={settings.steps['scorer']}",
            f"sampling.prompts_per_step={settings.batch_size}",
            "observe.progress=none",
        ),
    )
    right = last(folder / "scorer", "eval/accuracy")
    report(f"scorer: the right answer scores higher in {right:.1%} of held-out pairs", start)
    return right


def write_data(folder: Path, name: str, make_rows: MakeRows, settings: Settings) -> tuple[Path, Path]:
    """Writes training rows, and rows of held-out problems."""
    paths = folder / f"{name}.train.jsonl", folder / f"{name}.eval.jsonl"
    for path, split, most in zip(paths, ("train", "eval"), (None, settings.held_out), strict=True):
        random = np.random.default_rng([settings.seed, split == "eval"])
        lines = [json.dumps(row) for a, b in problems(settings, split) for row in make_rows(a, b, random)]
        random.shuffle(lines)
        path.write_text("\n".join(lines[:most]) + "\n")
    return paths


def problems(settings: Settings, split: str) -> Iterator[tuple[int, int]]:
    for row in make_task("arithmetic", {**settings.sums, "split": split}):
        a, b = row["prompt"].rstrip("=").split("+")
        yield int(a), int(b)


def gcore(*args: str) -> None:
    done = subprocess.run([sys.executable, "-m", "gcore.cli", *args], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"gcore {' '.join(args)}\n{done.stdout}{done.stderr}")


def last(run: Path, name: str) -> float:
    """A metric's last value."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([row[name] for row in found if name in row][-1])


def report(text: str, start: float) -> None:
    print(f"{text} ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    target, begin = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/panel"), time.monotonic()
    print(f"training a checker, a referee and a scorer in {target}, two at a time: a few minutes", flush=True)
    prepare(target, Settings())
    report("ready for: gcore train recipes/panel.yaml", begin)
