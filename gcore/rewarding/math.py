"""The final answer of a completion against a reference, as mathematics: 0.5 is 1/2, {1,2} is {2,1}, x+1 is 1+x.

    completion ──last <answer>, last \\boxed, else the last formula or number──> sympy ──equal?──> 1 or 0

Parsing and comparing are math-verify's, without its time limits: signal.alarm works in a main thread alone, and depends
on how busy the machine is. Ours is of processor time. In other threads there is none; a worker is killed from outside.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from gcore.rewarding.rules import ANSWER_TAG, text_of
from gcore.types import UserError

BETWEEN_BOXES = re.compile(r"[\s$,;]*(?:and|or)?[\s$,;]*")  # boxes joined like this are one answer


def math_answer(
    prompts: Any, completions: Sequence[Any], answer: Sequence[Any], limit_s: float = 2.0, **_: Any
) -> list[float]:
    """1 if the completion's final answer equals the reference. A reference that does not parse raises.

    `limit_s` is processor time a completion may cost; one that needs more is no other way to write the reference: 0.
    """
    _library()  # its import must not count as somebody's time
    known = {str(a): _reference(a, limit_s) for a in answer}
    return [float(_equals(known[str(a)], text_of(c), limit_s)) for c, a in zip(completions, answer, strict=True)]


def _preflight(args: Mapping[str, Any]) -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("the reward math_answer needs its package: pip install 'gcore-rl[math]'")


cast(Any, math_answer).preflight = _preflight


@functools.cache
def _library() -> Any:
    _preflight({})
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of what is done here on purpose
    return math_verify


def _reference(answer: Any, limit_s: float) -> list[Any]:
    """A bare answer, a solution with a box in it, or GSM8K's "#### 18"."""
    if answer is None:
        raise ValueError("no reference answer (set data.train.answer_column)")
    text = str(answer).rpartition("####")[2].strip()
    boxed = _last_boxes(text) or text
    with _processor_time(limit_s) as in_time:
        parsed = _parse(rf"\boxed{{{boxed}}}")
    if not in_time() or all(isinstance(value, str) for value in parsed):
        raise ValueError(f"cannot read the reference answer {answer!r} as mathematics (set data.train.answer_column)")
    return parsed


def _equals(wanted: list[Any], completion: str, limit_s: float) -> bool:
    tagged = ANSWER_TAG.findall(completion)
    text = tagged[-1].strip() if tagged else completion
    boxed = _last_boxes(text) or (text if tagged else "")
    with _processor_time(limit_s):
        readings = [rf"\boxed{{{boxed}}}"] if boxed else []
        if tagged or not boxed:  # a tag may hold a formula or a sentence with one
            readings.append(text)
        return any(_library().verify(wanted, _parse(reading), timeout_seconds=None) for reading in readings)
    return False


def _parse(text: str) -> list[Any]:
    library = _library()
    targets = [library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig()]
    parsed: list[Any] = library.parse(text, targets, parsing_timeout=None)
    return parsed


def _last_boxes(text: str) -> str:
    r"""What stands in the last \boxed{...}, or in the last few if only "and" or a comma is between them."""
    found: list[str] = []
    end, right = len(text), len(text)
    while (start := text.rfind(r"\boxed{", 0, end)) >= 0:
        depth, stop = 0, -1
        for at in range(start + len(r"\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                stop = at
                break
        if stop >= 0:
            if found and not BETWEEN_BOXES.fullmatch(text[stop + 1 : right]):
                break
            found.insert(0, text[start + len(r"\boxed{") : stop].strip())
            right = start
        end = start
    return ", ".join(found)


class _TooLong(BaseException):
    """Not an Exception: sympy and math-verify catch those."""


@contextlib.contextmanager
def _processor_time(limit_s: float) -> Iterator[Any]:
    """Leaves the block when it took more; what it gives tells afterwards whether the block was in time."""
    in_time = [True]
    if threading.current_thread() is not threading.main_thread():  # signals are for the main thread
        yield lambda: True
        return

    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield lambda: in_time[0]
    except _TooLong:
        in_time[0] = False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
