"""Rows with answers to train on: demonstrations and pairs, in the formats of TRL.

    row ──answered──> {"prompt": ..., "answers": [...], other columns}

`prompt` is a string or messages, as a policy would get it; it ends before the first message of the assistant to train
on. `answers` are strings, or the messages after the prompt: one demonstration, the chosen and the rejected answer, or a
labelled answer and that of the next row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gcore.config.data import Dataset
from gcore.config.preference import Needs
from gcore.prompts.files import DatasetRows, Row, short
from gcore.prompts.media import media_parts
from gcore.prompts.rows import answer_of, open_rows
from gcore.types import Message, UserError

PROMPTS = ("prompt", "question", "input")
CONVERSATIONS = ("messages", "conversations", "conversation")
COMPLETIONS = ("completion", "demonstration")
ANSWERS = "answers"  # the column of the result
LABEL = "label"  # of labelled answers (KTO): good or bad


def load_answered(spec: Dataset, needs: Needs, key: str) -> DatasetRows:
    """The rows of a dataset with the columns of its prompt and `answers`, made on access."""
    rows = open_rows(spec, key)
    make: Callable[[Row, Dataset, str], Row] = pair_row if needs.pairs and not needs.labels else demonstration_row

    def answered(index: int) -> Row:
        """Without the label: it is no answer, and in rows of pairs such a column has another meaning."""
        row = rows[index]
        if needs.pairs:
            row = {name: value for name, value in row.items() if name != LABEL}
        return make(row, spec, key)

    def read(index: int) -> Row:
        try:
            row = answered(index)
            if needs.labels:
                other, label = answered((index + 1) % len(rows)), _label(rows[index], key)
                row |= {ANSWERS: [*row[ANSWERS], *other[ANSWERS]], LABEL: label}
            return row
        except ValueError as error:
            raise UserError(f"{key}: row {index}: {error}") from None

    read(0)
    return DatasetRows(len(rows), read, (_column(spec), ANSWERS))


def demonstration_row(row: Row, spec: Dataset, key: str) -> Row:
    """A whole conversation in `messages`, or a prompt and an answer: `completion`, `demonstration` or the reference
    answer."""
    column = _prompt_column(row, spec.prompt_column, (*PROMPTS, *CONVERSATIONS))
    if column is None:
        raise ValueError(f"no prompt; the row has {', '.join(sorted(row))} (set {key}.prompt_column)")
    value = row[column]
    if not isinstance(value, str):
        conversation = messages_of(value, "user", column)
        if conversation[-1]["role"] == "assistant":
            prompt, answer = _split(conversation, column)
            return {**row, _column(spec): prompt, ANSWERS: [answer]}
        value = conversation
    given = next((row[name] for name in COMPLETIONS if row.get(name) is not None), None)
    if given is None:
        given = answer_of(row, spec)
    if given is None:
        raise ValueError(f"no answer to demonstrate (set {key}.answer_column)")
    given = messages_of(given, "assistant", "completion") if _is_list(given) else str(given)
    return {**row, _column(spec): value, ANSWERS: [given]}


def pair_row(row: Row, spec: Dataset, key: str) -> Row:
    """A prompt and two answers, or two whole conversations that share their first messages."""
    column, both = _prompt_column(row, spec.prompt_column, PROMPTS), [spec.chosen_column, spec.rejected_column]
    if column is not None and all(isinstance(row.get(name), str) for name in (column, *both)):
        return {**row, _column(spec): row[column], ANSWERS: [row[name] for name in both]}
    chosen, rejected = pair_of(row, spec, key)
    shared = next(
        (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected))
    )
    while shared > 1 and chosen[shared - 1]["role"] == "assistant":
        shared -= 1
    prompt: str | list[Message] = chosen[:shared]
    if column is not None:
        shared = len(messages_of(row[column], "user", column))
        prompt = row[column] if isinstance(row[column], str) else chosen[:shared]  # data.system_prompt is for strings
    return {**row, _column(spec): prompt, ANSWERS: [chosen[shared:], rejected[shared:]]}


def pair_of(row: Mapping[str, Any], spec: Dataset, key: str) -> tuple[list[Message], list[Message]]:
    """The two conversations of a row. TRL's formats: a prompt and two answers, or two whole conversations."""
    column = _prompt_column(row, spec.prompt_column, PROMPTS)
    if column is None and spec.prompt_column != "auto":
        raise ValueError(
            f"no column {spec.prompt_column!r}; the row has {', '.join(sorted(row))} (set {key}.prompt_column)"
        )
    prompt = [] if column is None else messages_of(row[column], "user", column)
    both = []
    for name in (spec.chosen_column, spec.rejected_column):
        if row.get(name) is None:
            what = "is empty (null)" if name in row else f"is not there; the row has {', '.join(sorted(row))}"
            raise ValueError(
                f"column {name!r} {what}; expected two answers, a better and a worse one (set {key}.chosen_column and "
                "rejected_column, or another objective)"
            )
        answer = messages_of(row.get(name), "assistant", name)
        if answer[0]["role"] == "assistant":
            if not prompt:
                raise ValueError(f"no prompt for the answer in column {name!r} (set {key}.prompt_column)")
            answer = [*prompt, *answer]
        elif prompt and answer[: len(prompt)] != prompt:
            raise ValueError(
                f"the conversation in column {name!r} does not start with the prompt (set {key}.prompt_column)"
            )
        if answer[-1]["role"] != "assistant":
            raise ValueError(f"column {name!r} ends with a message of {answer[-1]['role']!r}; expected the assistant's")
        both.append(answer)
    chosen, rejected = both
    if chosen[0] != rejected[0]:
        raise ValueError(
            f"the conversations in {spec.chosen_column!r} and {spec.rejected_column!r} start with different messages"
        )
    return chosen, rejected


def messages_of(value: Any, role: str, column: str) -> list[Message]:
    """A string is one message of `role`. Fields that are null are left out: parquet adds them."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Sequence) and value and all(isinstance(m, Mapping) and m.get("role") for m in value):
        if kinds := [kind for message in value for kind in media_parts(message.get("content"))]:
            raise ValueError(f"column {column!r} has a message part of type {kinds[0]!r}; only text is scored so far")
        return [{name: field for name, field in message.items() if field is not None} for message in value]
    raise ValueError(f"column {column!r} holds {short(value)}; expected a string or messages with a role")


def _label(row: Row, key: str) -> bool:
    value = row.get(LABEL)
    if not isinstance(value, bool | int) or value not in (0, 1):
        raise ValueError(f"column {LABEL!r} holds {short(value)}; expected true or false")
    return bool(value)


def _column(spec: Dataset) -> str:
    """Of the prompt in the result, where prompts.rows.prompt_of finds it."""
    return "prompt" if spec.prompt_column == "auto" else spec.prompt_column


def _prompt_column(row: Mapping[str, Any], given: str, names: Sequence[str]) -> str | None:
    """The first column with a value."""
    return next((name for name in (names if given == "auto" else (given,)) if row.get(name) is not None), None)


def _split(conversation: list[Message], column: str) -> tuple[list[Message], list[Message]]:
    """Before and from the first message of the assistant."""
    first = next(i for i, message in enumerate(conversation) if message["role"] == "assistant")
    if first == 0:
        raise ValueError(f"column {column!r} starts with a message of 'assistant'; expected a prompt before it")
    return conversation[:first], conversation[first:]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
