"""Tasks that need no file: built-in arithmetic, needle and digits, and the generators of the package reasoning_gym."""

from __future__ import annotations

import inspect
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gcore.prompts.digits import make_digits
from gcore.prompts.draw_digits import make_draw_digits
from gcore.prompts.generated import Generated, Row, nearest, split_of
from gcore.types import UserError
from gcore.user_functions import load_function, one_line

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ARITHMETIC: Row = {
    "operations": ["+"],
    "min": 0,
    "max": 99,
    "min_answer": None,  # remove problems with a smaller answer
    "zeros": True,  # False: remove problems with the digit 0 in an operand
    "sloppy": 0.0,  # fraction of demonstrations (not answers) without the carry of the last digit
    "pairs": False,  # True: columns `chosen` (the answer) and `rejected` (with a carry forgotten, or one too many)
    "split": "train",
    "eval_size": 500,
    "seed": 0,
}
NEEDLE: Row = {
    "min_length": 32,  # of the prompt, in characters; lengths are log-uniform
    "max_length": 4000,
    "size": 10_000,  # problems of the split
    "split": "train",
    "seed": 0,
}
HAY = "abcdefgh"
MOST_TRAIN = 2**18  # limit of training problems for large operands, where not all pairs are enumerated
GYM_SIZE = 1000
GYM_EVAL_SEED = 10**9  # reasoning_gym seeds row i with seed + i: nearby seeds would share rows
# scorers that pass the answer to eval, directly or through sympy; the reward function rejects the same ones
EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\((?!entry|metadata)")


def make_task(
    name: str, args: Mapping[str, Any], size: int | None = None, seed: int = 0, key: str = "data.train"
) -> Sequence[Row]:
    """Rows of a task, the same for the same arguments. `args["seed"]` overrides `seed`."""
    if name == "arithmetic":
        return _arithmetic({"seed": seed, **args}, size, key)
    if name == "needle":
        return _needle({"seed": seed, **args}, size, key)
    if name == "digits":
        return make_digits({"seed": seed, **args}, size, key)
    if name == "draw_digits":
        return make_draw_digits({"seed": seed, **args}, size, key)
    package, _, task = name.partition("/")
    if package == "reasoning_gym" and task:
        return _reasoning_gym(task, {"seed": seed, **args}, size, key)
    if ":" in name:
        return _of_function(name, args, size, key)
    raise UserError(
        f"{key}.task: unknown task {name!r}; expected arithmetic, needle, digits, draw_digits, reasoning_gym/NAME or a "
        "function file.py:NAME"
    )


def _of_function(path: str, args: Mapping[str, Any], size: int | None, key: str) -> Sequence[Row]:
    """The rows that a user's function returns, such as those of an environment. It is called in every controller."""
    try:
        made = load_function(path, f"{key}.task")(**args)
        rows = made if isinstance(made, Sequence) else [made[i] for i in range(len(made))]
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{key}.task: {path} raised {one_line(error)} (got args {dict(args)})") from error
    return rows if size is None else rows[:size]


class _Arithmetic(Generated):
    """Problem number -> row. The number encodes the operation, the left and the right operand."""

    def __init__(self, problems: Sequence[int], args: Row):
        self.problems, self.operations, self.low = problems, args["operations"], args["min"]
        self.span = args["max"] - args["min"] + 1
        self.sloppy, self.seed, self.pairs = args["sloppy"], args["seed"], args["pairs"]

    def __len__(self) -> int:
        return len(self.problems)

    def _row(self, index: int) -> Row:
        number = int(self.problems[index])
        rest, right = divmod(number, self.span)
        sign, left = divmod(rest, self.span)
        a, b, name = left + self.low, right + self.low, self.operations[sign]
        row = {"prompt": f"{a}{name}{b}=", "answer": str(OPERATIONS[name](a, b))}
        if self.sloppy:
            wrong = np.random.default_rng([self.seed % 2**64, number]).random() < self.sloppy
            row["demonstration"] = str(_without_carry(a, b)) if wrong else row["answer"]
        if self.pairs:
            forgotten = _without_carry(a, b)
            row |= {"chosen": row["answer"], "rejected": str(forgotten if forgotten != a + b else a + b + 10)}
        return row


def _without_carry(a: int, b: int) -> int:
    """46, 85 -> 121"""
    return a // 10 * 10 + b // 10 * 10 + (a + b) % 10


def _arithmetic(given: Mapping[str, Any], size: int | None, key: str) -> Sequence[Row]:
    """{"prompt": "27+58=", "answer": "85"}. One random order of the problems: the first are held out, the rest are
    for training.

    The splits are disjoint if their other arguments are the same."""
    for name in given:
        if name not in ARITHMETIC:
            raise UserError(f"{key}.args.{name}: arithmetic has no such argument{nearest(name, ARITHMETIC)}")
    args = ARITHMETIC | dict(given)
    for name in ("min", "max", "eval_size", "seed"):
        if not isinstance(args[name], int) or isinstance(args[name], bool):
            raise UserError(f"{key}.args.{name}: expected a whole number, got {args[name]!r}")
    if not isinstance(args["sloppy"], int | float) or not 0 <= args["sloppy"] <= 1:
        raise UserError(f"{key}.args.sloppy: expected a number between 0 and 1, got {args['sloppy']!r}")
    if not isinstance(args["pairs"], bool):
        raise UserError(f"{key}.args.pairs: expected true or false, got {args['pairs']!r}")
    for name in ("sloppy", "pairs"):
        if args[name] and args["operations"] != ["+"]:
            got = args["operations"]
            raise UserError(f"{key}.args.{name}: got operations {got}; expected only + (it omits a carry)")
    operations, low, high, held_out = args["operations"], args["min"], args["max"], args["eval_size"]
    if (
        not isinstance(operations, list | tuple)
        or not operations
        or any(o not in tuple(OPERATIONS) for o in operations)
    ):
        raise UserError(f"{key}.args.operations: expected a list of {', '.join(OPERATIONS)}, got {operations!r}")
    if len(set(operations)) < len(operations):
        raise UserError(f"{key}.args.operations: expected each operation once, got {operations!r}")
    if low > high:
        raise UserError(f"{key}.args.min: expected at most max={high}, got {low}")
    split = split_of(args, key)
    num_problems = len(operations) * (high - low + 1) ** 2
    if not 0 <= held_out < num_problems:
        raise UserError(
            f"{key}.args.eval_size: expected less than the number of problems, {num_problems}, got {held_out}"
        )
    if num_problems >= 2**62:
        raise UserError(f"{key}.args.max: got {high}, which gives 2**62 problems or more; expected less")
    random = np.random.default_rng([args["seed"] % 2**64, num_problems])
    order = random.choice(num_problems, size=min(num_problems, held_out + MOST_TRAIN), replace=False)
    order = order[_selected(order, args)]
    if len(order) <= held_out:
        raise UserError(
            f"{key}.args.eval_size: expected less than the number of problems, {len(order)}, got {held_out}"
        )
    problems = order[:held_out] if split == "eval" else order[held_out:]
    return _Arithmetic(problems[:size], args)


def _selected(numbers: np.ndarray, args: Row) -> np.ndarray:
    """Mask of the problems that pass `zeros` and `min_answer`."""
    if args["zeros"] and args["min_answer"] is None:
        return np.ones(len(numbers), bool)
    rows = _Arithmetic(numbers.tolist(), args)
    least = -float("inf") if args["min_answer"] is None else args["min_answer"]
    return np.array([int(r["answer"]) >= least and (args["zeros"] or "0" not in r["prompt"]) for r in rows], bool)


class _Needle(Generated):
    """{"prompt": "hbca7fdbeag?", "answer": "7"}: find the only digit among letters."""

    def __init__(self, args: Row):
        self.args = args

    def __len__(self) -> int:
        return int(self.args["size"])

    def _row(self, index: int) -> Row:
        args = self.args
        random = np.random.default_rng([args["seed"] % 2**64, args["split"] == "eval", index])
        length = round(args["min_length"] * (args["max_length"] / args["min_length"]) ** random.random())
        text = random.choice(list(HAY), length - 1)
        digit = str(random.integers(10))
        text[random.integers(length - 1)] = digit
        return {"prompt": "".join(text) + "?", "answer": digit}


def _needle(given: Mapping[str, Any], size: int | None, key: str) -> Sequence[Row]:
    for name, value in given.items():
        if name not in NEEDLE:
            raise UserError(f"{key}.args.{name}: needle has no such argument{nearest(name, NEEDLE)}")
        if name != "split" and (not isinstance(value, int) or isinstance(value, bool)):
            raise UserError(f"{key}.args.{name}: expected a whole number, got {value!r}")
    args = NEEDLE | dict(given)
    if not 2 <= args["min_length"] <= args["max_length"]:
        raise UserError(
            f"{key}.args.min_length: expected 2 to max_length={args['max_length']}, got {args['min_length']}"
        )
    return _Needle(args | {"split": split_of(args, key), "size": size or args["size"]})


class _Gym(Generated):
    """Rows of a reasoning_gym dataset, generated on access."""

    def __init__(self, task: str, dataset: Any, args: Row):
        self.task, self.dataset, self.args_json = task, dataset, json.dumps(args, sort_keys=True)

    def __len__(self) -> int:
        return len(self.dataset)

    def _row(self, index: int) -> Row:
        entry = self.dataset[index]
        return {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "task": self.task,
            "task_args": self.args_json,
            "entry_json": json.dumps(_tag(entry)),
        }


def _reasoning_gym(task: str, given: Mapping[str, Any], size: int | None, key: str) -> Sequence[Row]:
    """The scorer needs the whole entry and, for some tasks, the arguments of its generator: both are in the row."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError(
            f"{key}.task: reasoning_gym/{task} needs the package reasoning_gym: pip install 'gcore-rl[reasoning-gym]'"
        ) from None
    if task not in DATASETS:
        raise UserError(f"{key}.task: reasoning_gym has no task {task!r}{nearest(task, DATASETS)}")
    kind, settings = DATASETS[task]
    args = {name: value for name, value in given.items() if name not in ("split", "allow_eval")}
    if EVALUATES.search(inspect.getsource(kind.score_answer)) and given.get("allow_eval") is not True:
        raise UserError(
            f"{key}.task: the scorer of reasoning_gym/{task} runs the model's answer as Python code without a sandbox; "
            f"choose another task, or set {key}.args.allow_eval=true"
        )
    fields = settings.__dataclass_fields__
    for name in args:
        if name not in fields:
            raise UserError(f"{key}.args.{name}: reasoning_gym/{task} has no such argument{nearest(name, fields)}")
    if split_of(given, key) == "eval":
        args["seed"] += GYM_EVAL_SEED
    args["size"] = size or args.get("size", GYM_SIZE)
    try:
        dataset = reasoning_gym.create_dataset(task, **args)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"{key}.args: reasoning_gym/{task} rejects {args}: {error}") from None
    return _Gym(task, dataset, {k: v for k, v in given.items() if k not in ("split", "seed", "size")})


def _tag(value: Any) -> Any:
    """Marks tuples and non-string keys, which JSON does not have. The reward function `reasoning_gym` restores them."""
    if isinstance(value, tuple):
        return {"$tuple": [_tag(item) for item in value]}
    if isinstance(value, list):
        return [_tag(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(name, str) for name in value):
            return {name: _tag(item) for name, item in value.items()}
        return {"$items": [[_tag(name), _tag(item)] for name, item in value.items()]}
    return value
