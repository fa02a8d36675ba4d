"""One opinion on a group of siblings: a rule, a scalar model, a judge, a server. The rewarder blends them.

group ──> Source.answer ──> Answer (a value a sibling) ──blend, weights──> Scored
"""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gcore.types import Rollout


class BadAnswer(ValueError):
    """What came back is no reward; the message begins with what it was."""


class TimedOut(TimeoutError):
    """No answer in time; the message says after how long and what was done about it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a source said of each sibling. Answer(values=[1.0, None], extras=[{"acc": 1.0}, {}])"""

    values: list[float | None]  # None: does not apply to this sample
    extras: list[dict[str, float]] = field(default_factory=list)  # logged beside it as reward/NAME/EXTRA
    notes: list[list[str]] = field(default_factory=list)  # in words, where it said any: shown beside the sample


class Source(Protocol):
    """Raises RewardError where asking again would not help; anything else is tried again, `attempts` times in all."""

    name: str
    weight: float
    attempts: int
    counts: Counter[str]  # what happened since it was last asked: "timeouts", "unparsed", ...

    async def answer(self, group: Sequence[Rollout], attempt: int) -> Answer:
        """`attempt` counts from 0: a source that samples must not draw the same noise again."""
        ...

    def check(self, columns: Collection[str]) -> None:
        """Before the run: does a prompt with these columns have what is needed? Raises UserError."""
        ...

    def close(self) -> None: ...


def number(value: Any, said: Any) -> float | None:
    """A value somebody returned as a reward: finite, or None. `said` is the whole answer, for the message."""
    value = scalar(value)
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise BadAnswer(f"returned {short(value)} in {short(said)}; expected numbers")
    if not math.isfinite(value):
        raise BadAnswer(f"returned {value} in {short(said)}; expected finite numbers")
    return float(value)


def scalar(value: Any) -> Any:
    """Numbers of numpy and torch as Python's own."""
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
