"""Dataset -> rows, and which columns of a row hold the prompt and the answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from gcore.config.base import non_finite
from gcore.config.data import Dataset
from gcore.content.families import KINDS
from gcore.prompts.files import DatasetRows, Row, short
from gcore.prompts.media import COLUMNS, has_media, media_parts
from gcore.prompts.stored import read_rows
from gcore.prompts.tasks import make_task
from gcore.types import Message, UserError

PROMPTS = ("prompt", "question", "input", "messages")
ANSWERS = ("answer", "ground_truth", "label", "solution", "reward_model.ground_truth")


def load_rows(spec: Dataset, key: str = "data.train", media: Collection[str] = ()) -> Sequence[Row]:
    """The rows of a dataset, at most `spec.size`. `key` is the config key of `spec`, for messages. `media`: the model
    takes images; else rows with images are refused."""
    rows = open_rows(spec, key, media)
    _check_columns(rows, spec, key)
    return rows


def open_rows(spec: Dataset, key: str, media: Collection[str] = ()) -> DatasetRows:
    """Without a check of the columns."""
    rows = make_task(spec.task, spec.args, spec.size, key) if spec.task is not None else read_rows(spec, key, media)
    if not len(rows):
        raise UserError(f"{key}: no rows in {spec.path or spec.task}; expected at least one")
    if not media:
        check_media(rows[0], key)
    return rows


def prompt_of(row: Mapping[str, Any], spec: Dataset, key: str = "data.train") -> str | list[Message]:
    """A string, or messages that do not end with the assistant's. Null fields of messages are removed."""
    column = prompt_column(row, spec, key)
    value = row[column]
    if isinstance(value, str):
        if not value.strip() and not has_media(row):
            raise _empty_prompt(column, key)
        return value
    if not isinstance(value, Sequence) or not value:
        raise UserError(
            f"{key}: column {column!r} holds {short(value)}; expected a string or messages (set {key}.prompt_column)"
        )
    messages: list[Message] = []
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") is None:
            raise UserError(f"{key}: column {column!r} holds {short(message)}; expected messages with a role")
        messages.append({name: field for name, field in message.items() if field is not None})
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{key}: the messages in column {column!r} end with an assistant message; expected only the prompt "
            f"(set {key}.prompt_column)"
        )
    texts = (message.get("content") for message in messages)
    if not any(text.strip() if isinstance(text, str) else text for text in texts) and not has_media(row, messages):
        raise _empty_prompt(column, key)
    return messages


def _empty_prompt(column: str, key: str) -> UserError:
    return UserError(f"{key}: column {column!r} holds an empty prompt; expected text (set {key}.prompt_column)")


def answer_of(row: Mapping[str, Any], spec: Dataset) -> Any:
    """The reference answer as in the dataset (a string, a number, verl's ground_truth); None if there is none."""
    for name in ANSWERS if spec.answer_column == "auto" else (spec.answer_column,):
        value = _lookup(row, name)
        if value is not None:
            return value
    return None


def prompt_column(row: Mapping[str, Any], spec: Dataset, key: str = "data.train") -> str:
    """Name of the column with the prompt. `auto` takes the first known column with a value."""
    names = PROMPTS if spec.prompt_column == "auto" else (spec.prompt_column,)
    for name in names:
        if row.get(name) is not None:
            return name
    raise _no_prompt(row, spec, key)


def reward_columns(row: Mapping[str, Any], spec: Dataset, key: str) -> dict[str, Any]:
    """What rewards receive of a row: the prompt and the answer under these names, and all other columns."""
    column = prompt_column(row, spec, key)
    columns = {name: value for name, value in row.items() if name != column}
    columns["prompt"] = prompt_of(row, spec, key)
    if (answer := answer_of(row, spec)) is not None:
        columns["answer"] = answer
    return columns


def check_numbers(row: Mapping[str, Any], key: str) -> None:
    """Raises UserError for NaN and infinity, which a reward would return or compare with."""
    if place := non_finite(row):
        raise UserError(f"{key}: column {place}; expected a finite number (null for a missing one)")


def _check_columns(rows: DatasetRows, spec: Dataset, key: str) -> None:
    names = PROMPTS if spec.prompt_column == "auto" else (spec.prompt_column,)
    if not any(name in rows.columns for name in names):
        raise _no_prompt(rows.columns, spec, key)
    top = spec.answer_column.partition(".")[0]
    if spec.answer_column != "auto" and not {spec.answer_column, top} & set(rows.columns):
        raise UserError(
            f"{key}.answer_column: no column {spec.answer_column!r}; the dataset has {', '.join(sorted(rows.columns))}"
        )


def _no_prompt(columns: Iterable[str], spec: Dataset, key: str) -> UserError:
    expected = "one of " + ", ".join(PROMPTS) if spec.prompt_column == "auto" else repr(spec.prompt_column)
    return UserError(
        f"{key}: no prompt column: expected {expected}, got {', '.join(sorted(columns))} (set {key}.prompt_column)"
    )


def _lookup(row: Mapping[str, Any], name: str) -> Any:
    """A column, or a field inside one: `reward_model.ground_truth`."""
    if name in row:
        return row[name]
    top, dot, rest = name.partition(".")
    inner = row.get(top)
    return _lookup(inner, rest) if dot and isinstance(inner, Mapping) else None


def check_media(row: Mapping[str, Any], key: str) -> None:
    """Raises UserError if a row has media and the model takes only text: it must not silently train on the text."""
    for name in COLUMNS:
        value = row.get(name)
        if value is not None and not (isinstance(value, Sequence | Mapping) and not value):
            raise UserError(
                f"{key}: column {name!r} holds {short(value)}; expected text only, because the model takes no "
                f"{KINDS[COLUMNS[name]].plural}, or learns stored answers (remove or rename the column, or use a model "
                "that does)"
            )
    for name in PROMPTS:
        messages = row.get(name)
        for message in messages if isinstance(messages, list | tuple) else ():
            if isinstance(message, Mapping) and (kinds := media_parts(message.get("content"))):
                raise UserError(
                    f"{key}: column {name!r} has a message part of type {kinds[0]!r}; expected text only, because the "
                    "model takes no media (use a model that does)"
                )
