"""Dataset -> rows: files, folders, hub ids, tasks; and which columns of a row hold the prompt and the answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gcore import user_files
from gcore.config.base import non_finite
from gcore.config.data import Dataset, Stored
from gcore.config.objects import is_object, object_of
from gcore.content.families import KINDS
from gcore.hub import is_id
from gcore.prompts.files import READERS, DatasetRows, Row, computed_rows, read_file, short
from gcore.prompts.media import COLUMNS, has_media, media_parts
from gcore.prompts.tasks import make_task
from gcore.types import Message, UserError

AnyStored = TypeVar("AnyStored", bound=Stored)
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
    if spec.task is not None:
        rows = make_task(spec.task, spec.args, spec.size, key)
    else:
        rows = read_rows(spec, spec.size, key, media)
    if not len(rows):
        raise UserError(f"{key}: no rows in {spec.path or spec.task}; expected at least one")
    if not media:
        check_media(rows[0], key)
    return rows


def media_folder(spec: Dataset) -> Path | None:
    """The folder that paths of images in the dataset are relative to; None for tasks and hub ids."""
    if spec.path is None or is_hub_dataset(spec):
        return None
    path = user_files.find(spec.path)
    return path if path.is_dir() else path.parent


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
    if all(not _text_of(message.get("content")) for message in messages) and not has_media(row, messages):
        raise _empty_prompt(column, key)
    return messages


def _text_of(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content


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


def reward_columns(row: Mapping[str, Any], spec: Dataset, key: str) -> frozenset[str]:
    """The columns that rewards receive for a row: see Templater.prompt."""
    answer = {"answer"} if answer_of(row, spec) is not None else set()
    return frozenset({name for name in row if name != prompt_column(row, spec, key)} | {"prompt"} | answer)


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
                f"{KINDS[COLUMNS[name]].plural} (use a model that does, or remove or rename the column)"
            )
    for name in PROMPTS:
        messages = row.get(name)
        for message in messages if isinstance(messages, list | tuple) else ():
            if isinstance(message, Mapping) and (kinds := media_parts(message.get("content"))):
                raise UserError(
                    f"{key}: column {name!r} has a message part of type {kinds[0]!r}; expected text only, because the "
                    "model takes no media (use a model that does)"
                )


# ---- where rows are stored ----


def read_rows(spec: Stored, size: int | None, key: str, media: Collection[str] = ()) -> DatasetRows:
    """Rows of a file, a folder or a hub id, or those that a Python program passed. `media`: columns of images
    are allowed, and are not decoded."""
    if spec.path is not None and is_object(spec.path):
        return _given_rows(object_of(spec.path, f"{key}.path"), size, key)
    path = user_files.find(spec.path or "")
    if is_hub_dataset(spec) and spec.revision is not None:  # the driver has pinned it
        from gcore.prompts.stored import read_id

        return read_id(spec, size, key, media)
    if not path.exists():
        raise UserError(f"{key}.path: no such file or folder: {path} (expected one on this machine, or a hub id)")
    if spec.revision is not None:
        raise UserError(f"{key}.revision={spec.revision}: {path} is on this machine; expected a hub id")
    if path.is_dir():
        from gcore.prompts.stored import read_folder

        return read_folder(spec, size, key, media)
    if unused := [name for name in ("subset", "split") if getattr(spec, name) is not None]:
        raise UserError(f"{key}.{unused[0]}: {path} is a file; expected a dataset's folder or a hub id")
    return read_file(path, size, key, media)


def _given_rows(rows: Any, size: int | None, key: str) -> DatasetRows:
    if len(rows) and not isinstance(rows[0], Mapping):
        raise UserError(f"{key}: the first row is {short(rows[0])}; expected a mapping from column to value")
    return computed_rows(len(rows), lambda index: dict(rows[index]), size)


def is_hub_dataset(spec: Stored) -> bool:
    return spec.path is not None and is_id(spec.path) and not spec.path.endswith(tuple(READERS))


def pin_rows(spec: AnyStored, key: str) -> AnyStored:
    """A hub dataset with its commit, subset and split filled in; other datasets unchanged."""
    if not is_hub_dataset(spec):
        return spec
    from gcore.prompts.stored import pin_dataset

    return pin_dataset(spec, key)
