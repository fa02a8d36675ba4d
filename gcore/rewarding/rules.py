"""Reward functions included in G-Core, with TRL's signature. They raise if they cannot judge; this is not a 0."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from gcore.types import Message, UserError

# a minus after a digit, a letter or a bracket is an operator
NUMBER = re.compile(r"(?:(?<![\w)\]])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)", re.ASCII)
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# scorers that pass the answer to eval, directly or through sympy; the task generator rejects the same ones
EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\((?!entry|metadata)")


def exact_answer(prompts: Any, completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 if the completion equals the answer. Leading and trailing spaces are ignored."""
    return [float(text_of(c).strip() == _reference(a).strip()) for c, a in zip(completions, answer, strict=True)]


def last_number(prompts: Any, completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1 if the last number of the completion equals that of the answer: 1,234.50 is 1234.5, and "#### 18" is 18."""
    wanted = [_last_number(_reference(a)) for a in answer]
    if None in wanted:
        bad = answer[wanted.index(None)]
        raise ValueError(f"no number in the reference answer {bad!r} (set data.train.answer_column)")
    return [float(_last_number(text_of(c)) == number) for c, number in zip(completions, wanted, strict=True)]


def reasoning_gym(
    prompts: Any,
    completions: Sequence[Any],
    task: Sequence[str],
    entry_json: Sequence[str],
    task_args: Sequence[str] | None = None,
    **_: Any,
) -> list[float]:
    """The package's own score of the text in <answer>...</answer>, or of the whole completion if there is no tag."""
    scores = []
    args_json = task_args or ["{}"] * len(task)
    for name, entry, args, completion in zip(task, entry_json, args_json, completions, strict=True):
        text = text_of(completion)
        tagged = ANSWER_TAG.findall(text)
        scores.append(_gym_score(_gym_scorer(name, args), (tagged[-1] if tagged else text).strip(), _untag(entry)))
    return scores


def _gym_score(score: Callable[[str, dict[str, Any]], float], text: str, entry: dict[str, Any]) -> float:
    """Some scorers raise for a text that is no answer at all. It is worth 0 if the same scorer accepts the reference
    answer; otherwise the scorer itself is broken."""
    try:
        return float(score(text, entry))
    except Exception:
        if not entry.get("answer") or float(score(entry["answer"], entry)) < 1:
            raise
        return 0.0


def text_of(completion: Any) -> str:
    """TRL completions are strings, or messages if the prompt is messages."""
    if isinstance(completion, str):
        return completion
    messages: Sequence[Message] = completion
    return "".join(str(m.get("content") or "") for m in messages)


def _reference(answer: Any) -> str:
    if answer is None:
        raise ValueError("no reference answer (set data.train.answer_column)")
    return str(answer)


def _last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("\u2212", "-")) if numbers else None


@functools.lru_cache(maxsize=64)
def _gym_scorer(task: str, args_json: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        from reasoning_gym.factory import create_dataset
    except ImportError:
        raise UserError("the reward reasoning_gym needs its package: pip install 'gcore-rl[reasoning-gym]'") from None
    args = json.loads(args_json)
    allowed = args.pop("allow_eval", False) is True
    dataset = create_dataset(task, **args)
    if not allowed and EVALUATES.search(inspect.getsource(type(dataset).score_answer)):
        raise UserError(
            f"the scorer of reasoning_gym/{task} runs the model's answer as Python code without a sandbox; "
            "set data.train.args.allow_eval=true to allow this"
        )
    scorer: Callable[[str, dict[str, Any]], float] = dataset.score_answer
    return scorer


def _untag(entry_json: str) -> dict[str, Any]:
    """Restores tuples and non-string keys, which JSON does not have, from the form that prompts/tasks.py wrote."""

    def restore(value: dict[str, Any]) -> Any:
        match value:
            case {"$tuple": items} if len(value) == 1:
                return tuple(items)
            case {"$items": pairs} if len(value) == 1:
                return dict(pairs)
        return value

    entry: dict[str, Any] = json.loads(entry_json, object_hook=restore)
    return entry
