"""One source of rewards for a group of siblings: a rule, a scalar model, a judge or a server.

group ──> Source.answer ──> Answer (one value per sibling) ──rewarder: weighted sum──> Scored
"""

from __future__ import annotations

import math
import numbers
import re
import traceback
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore.observe.logs import NOT_USERS
from gcore.types import Floats, Rollout


class BadAnswer(ValueError):
    """The answer is not a reward. The message begins with what was returned."""


class TimedOut(TimeoutError):
    """No answer in time. The message gives the time limit and how the call was stopped."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A source's result per sibling. Answer(values=[1.0, None], extras=[{"acc": 1.0}, {}])"""

    values: list[float | None]  # None: does not apply to this sample
    extras: list[dict[str, float]] = field(default_factory=list)  # logged as reward/NAME/EXTRA
    notes: list[list[str]] = field(default_factory=list)  # texts of judges, shown with the sample
    steps: list[Floats] = field(default_factory=list)  # of a teacher: rewards of the steps


class Source:
    """`answer` raises RewardError if a retry would not help. Other errors are retried, up to `attempts` in total."""

    def __init__(self, name: str, weight: float, attempts: int = 1) -> None:
        self.name, self.weight, self.attempts = name, weight, attempts
        self.counts: Counter[str] = Counter()  # events since the counters were last read: "timeouts", "unparsed", ...

    async def answer(self, group: Sequence[Rollout]) -> Answer:
        raise NotImplementedError

    def check(self, columns: Collection[str]) -> None:
        """Before the run: raises UserError if a prompt with these columns lacks a column that the source needs."""

    def close(self) -> None:
        """Ends what the source has started."""


def number(value: Any, answer: Any) -> float | None:
    """Checks a returned reward: a finite number, or None. `answer` is the whole answer, for the message."""
    value = scalar(value)
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise BadAnswer(f"returned {short(value)} in {short(answer)}; expected numbers")
    if not math.isfinite(value):
        raise BadAnswer(f"returned {value} in {short(answer)}; expected finite numbers")
    return float(value)


def scalar(value: Any) -> Any:
    """Converts numpy and torch numbers to Python numbers."""
    if hasattr(value, "item"):
        try:
            return value.item()
        except (ValueError, RuntimeError):  # more than one element
            return value
    return value


def is_finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 120 else text[:117] + "..."


def line_of(error: BaseException) -> str:
    """Where a user's function raised, as ` at rewards.py:12 in right`. Empty: not in a file of the user. An error of a
    worker has the traceback as a note."""
    text = "".join(getattr(error, "__notes__", [])) or "".join(traceback.format_tb(error.__traceback__))
    for file, line, name in reversed(re.findall(r'File "([^"<]+)", line (\d+), in (\S+)', text)):
        if "site-packages" not in file and not any(Path(file).is_relative_to(folder) for folder in NOT_USERS):
            return f" at {Path(file).name}:{line} in {name}"
    return ""
