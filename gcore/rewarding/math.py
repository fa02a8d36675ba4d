"""Compares a completion's final answer with a reference as mathematics: 0.5 is 1/2, {1,2} is {2,1}, x+1 is 1+x.

    completion ──last <answer>, last \\boxed, else the last formula or number──> sympy ──equal?──> 1 or 0

math-verify parses and compares, without its own time limits: signal.alarm works only in the main thread, and wall time
depends on the load of the machine. Our limit is CPU time. Other threads have no limit; hanging workers are killed.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from gcore.rewarding.rules import ANSWER_TAG, text_of
from gcore.types import UserError

T = TypeVar("T")
BETWEEN_BOXES = re.compile(r"[\s$,;]*(?:and|or)?[\s$,;]*")  # boxes joined like this are one answer


def math_answer(
    prompts: Any, completions: Sequence[Any], answer: Sequence[Any], limit_s: float = 2.0, **_: Any
) -> list[float]:
    """1 if the completion's final answer equals the reference. Raises if the reference does not parse.

    `limit_s` is the CPU time limit per completion; a completion that needs more gets 0.
    """
    _library()  # the import must not count in a completion's time
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

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that timeouts are disabled
    return math_verify


def _reference(answer: Any, limit_s: float) -> list[Any]:
    """Parses an answer, a solution with a box in it, or GSM8K's "#### 18"."""
    if answer is None:
        raise ValueError("no reference answer (set data.train.answer_column)")
    text = str(answer).rpartition("####")[2].strip()
    boxed = _last_boxes(text) or text
    parsed = _in_time(limit_s, lambda: _parse(rf"\boxed{{{boxed}}}"))
    if parsed is None or all(isinstance(value, str) for value in parsed):
        raise ValueError(f"cannot parse the reference answer {answer!r} as mathematics (set data.train.answer_column)")
    return parsed


def _equals(wanted: list[Any], completion: str, limit_s: float) -> bool:
    tagged = ANSWER_TAG.findall(completion)
    text = tagged[-1].strip() if tagged else completion
    boxed = _last_boxes(text) or (text if tagged else "")
    readings = [rf"\boxed{{{boxed}}}"] if boxed else []
    if tagged or not boxed:  # a tag may hold a formula or a sentence with one
        readings.append(text)
    verify = _library().verify
    return bool(_in_time(limit_s, lambda: any(verify(wanted, _parse(r), timeout_seconds=None) for r in readings)))


def _parse(text: str) -> list[Any]:
    library = _library()
    targets = [library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig()]
    parsed: list[Any] = library.parse(text, targets, parsing_timeout=None)
    return parsed


def _last_boxes(text: str) -> str:
    r"""The content of the last \boxed{...}, or of the last several if only "and" or a comma is between them."""
    boxes: list[str] = []
    end, right = len(text), len(text)
    while (start := text.rfind(r"\boxed{", 0, end)) >= 0:
        depth, stop = 0, -1
        for at in range(start + len(r"\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                stop = at
                break
        if stop >= 0:
            if boxes and not BETWEEN_BOXES.fullmatch(text[stop + 1 : right]):
                break
            boxes.insert(0, text[start + len(r"\boxed{") : stop].strip())
            right = start
        end = start
    return ", ".join(boxes)


class _OutOfTime(BaseException):
    """Not an Exception, because sympy and math-verify catch those."""


def _in_time(limit_s: float, call: Callable[[], T]) -> T | None:
    """None: the call took more CPU time."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set signal handlers
        return call()

    def stop(*_: Any) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        return call()
    except _OutOfTime:
        return None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
