"""Tasks that need no file: arithmetic, needle, digits, keypad, and the generators of the package reasoning_gym."""

from __future__ import annotations

import inspect
import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gcore.prompts.digits import make_digits, make_draw_digits
from gcore.prompts.files import DatasetRows, Row, computed_rows
from gcore.prompts.keypad import make_keypad
from gcore.prompts.task_args import expect, nearest, split_of, task_args
from gcore.types import UserError
from gcore.user_files import load_function, one_line

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


def make_task(name: str, args: Mapping[str, Any], size: int | None = None, key: str = "data.train") -> DatasetRows:
    """Rows of a task, the same for the same arguments."""
    if name in TASKS:
        return TASKS[name](args, size, key)
    package, _, task = name.partition("/")
    if package == "reasoning_gym" and task:
        return _reasoning_gym(task, args, size, key)
    if ":" in name:
        return _of_function(name, args, size, key)
    raise UserError(
        f"{key}.task: unknown task {name!r}; expected {', '.join(TASKS)}, reasoning_gym/NAME or a function file.py:NAME"
    )


def _of_function(path: str, args: Mapping[str, Any], size: int | None, key: str) -> DatasetRows:
    """The rows that a user's function returns, such as those of an environment. It is called in every controller."""
    try:
        made = load_function(path, f"{key}.task")(**args)
        return computed_rows(len(made), lambda index: made[index], size)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{key}.task: {path} raised {one_line(error)} (got args {dict(args)})") from error


def _arithmetic_row(number: int, args: Row) -> Row:
    """The number of a problem encodes the operation, the left and the right operand."""
    low, span = args["min"], args["max"] - args["min"] + 1
    rest, right = divmod(number, span)
    sign, left = divmod(rest, span)
    a, b, name = left + low, right + low, args["operations"][sign]
    row = {"prompt": f"{a}{name}{b}=", "answer": str(OPERATIONS[name](a, b))}
    if args["sloppy"]:
        wrong = np.random.default_rng([args["seed"] % 2**64, number]).random() < args["sloppy"]
        row["demonstration"] = str(_without_carry(a, b)) if wrong else row["answer"]
    if args["pairs"]:
        forgotten = _without_carry(a, b)
        row |= {"chosen": row["answer"], "rejected": str(forgotten if forgotten != a + b else a + b + 10)}
    return row


def _without_carry(a: int, b: int) -> int:
    """46, 85 -> 121"""
    return a // 10 * 10 + b // 10 * 10 + (a + b) % 10


def _arithmetic(given: Mapping[str, Any], size: int | None, key: str) -> DatasetRows:
    """{"prompt": "27+58=", "answer": "85"}. One random order of the problems: the first are held out, the rest are
    for training.

    The splits are disjoint if their other arguments are the same."""
    args = task_args("arithmetic", given, ARITHMETIC, key)
    for name in ("sloppy", "pairs"):
        only_sums, expected = args["operations"] == ["+"], "operations: [+], because it omits a carry"
        expect(only_sums or not args[name], f"{key}.args.{name}", expected, args["operations"])
    operations, low, high, held_out = args["operations"], args["min"], args["max"], args["eval_size"]
    is_list = isinstance(operations, list | tuple) and len(operations) > 0
    known = is_list and all(operation in tuple(OPERATIONS) for operation in operations)
    expect(known, f"{key}.args.operations", f"a list of {', '.join(OPERATIONS)}", operations)
    expect(len(set(operations)) == len(operations), f"{key}.args.operations", "each operation once", operations)
    expect(low <= high, f"{key}.args.min", f"at most max={high}", low)
    num_problems = len(operations) * (high - low + 1) ** 2
    expect(num_problems < 2**62, f"{key}.args.max", "a number that gives less than 2**62 problems", high)
    fewer = "less than the number of problems"
    expect(0 <= held_out < num_problems, f"{key}.args.eval_size", f"{fewer}, {num_problems}", held_out)
    random = np.random.default_rng([args["seed"] % 2**64, num_problems])
    order = random.choice(num_problems, size=min(num_problems, held_out + MOST_TRAIN), replace=False)
    order = order[_selected(order, args)]
    expect(held_out < len(order), f"{key}.args.eval_size", f"{fewer}, {len(order)}", held_out)
    problems = order[:held_out] if args["split"] == "eval" else order[held_out:]
    return computed_rows(len(problems), lambda index: _arithmetic_row(int(problems[index]), args), size)


def _selected(numbers: np.ndarray, args: Row) -> np.ndarray:
    """Mask of the problems that pass `zeros` and `min_answer`."""
    if args["zeros"] and args["min_answer"] is None:
        return np.ones(len(numbers), bool)
    rows = (_arithmetic_row(number, args) for number in numbers.tolist())
    least = -float("inf") if args["min_answer"] is None else args["min_answer"]
    return np.array([int(r["answer"]) >= least and (args["zeros"] or "0" not in r["prompt"]) for r in rows], bool)


def _needle(given: Mapping[str, Any], size: int | None, key: str) -> DatasetRows:
    """{"prompt": "hbca7fdbeag?", "answer": "7"}: find the only digit among letters."""
    args = task_args("needle", given, NEEDLE, key)
    least, most = args["min_length"], args["max_length"]
    expect(2 <= least <= most, f"{key}.args.min_length", f"2 to max_length={most}", least)

    def row(index: int) -> Row:
        random = np.random.default_rng([args["seed"] % 2**64, args["split"] == "eval", index])
        length = round(least * (most / least) ** random.random())
        text = random.choice(list(HAY), length - 1)
        digit = str(random.integers(10))
        text[random.integers(length - 1)] = digit
        return {"prompt": "".join(text) + "?", "answer": digit}

    return computed_rows(size or args["size"], row)


def _reasoning_gym(task: str, given: Mapping[str, Any], size: int | None, key: str) -> DatasetRows:
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
    args["seed"] = args.get("seed", 0) + (GYM_EVAL_SEED if split_of(given, key) == "eval" else 0)
    args["size"] = size or args.get("size", GYM_SIZE)
    try:
        dataset = reasoning_gym.create_dataset(task, **args)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"{key}.args: reasoning_gym/{task} rejects {args}: {error}") from None
    scorer_args = json.dumps({k: v for k, v in given.items() if k not in ("split", "seed", "size")}, sort_keys=True)

    def row(index: int) -> Row:
        entry = dataset[index]
        about = {"task": task, "task_args": scorer_args, "entry_json": json.dumps(_tag(entry))}
        return {"prompt": entry["question"], "answer": entry["answer"], **about}

    return computed_rows(len(dataset), row)


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


TASKS: dict[str, Callable[[Mapping[str, Any], int | None, str], DatasetRows]] = {
    "arithmetic": _arithmetic,
    "needle": _needle,
    "digits": make_digits,
    "draw_digits": make_draw_digits,
    "keypad": make_keypad,
}
