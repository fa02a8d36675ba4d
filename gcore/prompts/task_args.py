"""Arguments of built-in tasks: `data.*.args`, checked against the defaults of the task."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from gcore.prompts.files import Row
from gcore.types import UserError


def task_args(task: str, given: Mapping[str, Any], defaults: Row, key: str) -> Row:
    """All arguments. Each has the type of its default: a float is a share from 0 to 1, None is anything."""
    for name in given:
        if name not in defaults:
            raise UserError(f"{key}.args.{name}: {task} has no such argument{nearest(name, defaults)}")
    for name, value in given.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        match defaults[name]:
            case bool():
                right, expected = isinstance(value, bool), "true or false"
            case int():
                right, expected = is_number and isinstance(value, int), "a whole number"
            case float():
                right, expected = is_number and 0 <= value <= 1, "a number between 0 and 1"
            case _:
                continue
        expect(right, f"{key}.args.{name}", expected, value)
    split_of(given, key)
    return defaults | dict(given)


def split_of(given: Mapping[str, Any], key: str) -> str:
    split = given.get("split", "train")
    expect(split in ("train", "eval"), f"{key}.args.split", "train or eval", split)
    return str(split)


def expect(holds: bool, key: str, expected: str, got: Any) -> None:
    """Raises UserError if the condition on an argument does not hold."""
    if not holds:
        raise UserError(f"{key}: expected {expected}, got {got!r}")


def nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else f"; expected one of {', '.join(known)}"
