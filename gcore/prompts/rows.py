"""Dataset -> rows: .jsonl, .parquet, Hugging Face folders, tasks; and which of a row's columns mean what.

Rows are read when asked for: every controller opens the dataset, none holds it as Python objects.
"""

from __future__ import annotations

import json
import mmap
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from gcore.config.tree import Dataset
from gcore.prompts.tasks import make_task
from gcore.types import Message, UserError

Row = dict[str, Any]
PROMPTS = ("prompt", "question", "input", "messages")
ANSWERS = ("answer", "ground_truth", "label", "solution", "reward_model.ground_truth")


class Rows(Sequence[Row]):
    """A sequence of rows behind a function. Rows(3, read, ["prompt", "answer"])[1] -> {"prompt": ..., "answer": ...}"""

    def __init__(self, num_rows: int, read: Callable[[int], Row], columns: Iterable[str]):
        self._num_rows, self._read, self.columns = num_rows, read, tuple(columns)

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self._read(i) for i in range(*index.indices(self._num_rows))]
        if not -self._num_rows <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        return self._read(index % self._num_rows)


def load_rows(spec: Dataset, key: str = "data.train") -> Sequence[Row]:
    """The rows of a dataset, at most `spec.size`. `key` is where `spec` stands in the recipe, for the messages."""
    if spec.task is not None:
        made = make_task(spec.task, spec.args, spec.size, key=key)
        rows = Rows(len(made), made.__getitem__, made[0] if len(made) else ())
    else:
        rows = read_path(Path(spec.path or ""), spec.size, key)
    if not len(rows):
        raise UserError(f"{key}: no rows in {spec.path or spec.task}; expected at least one")
    _check_columns(rows, spec, key)
    return rows


def prompt_of(row: Mapping[str, Any], spec: Dataset, key: str = "data.train") -> str | list[Message]:
    """A string, or messages that end before the assistant speaks. Message fields that are null are left out."""
    column = prompt_column(row, spec, key)
    value = row[column]
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not value:
        raise UserError(
            f"{key}: column {column!r} holds {_short(value)}; expected a string or messages (set {key}.prompt_column)"
        )
    messages: list[Message] = []
    for message in value:
        if not isinstance(message, Mapping) or message.get("role") is None:
            raise UserError(f"{key}: column {column!r} holds {_short(message)}; expected messages with a role")
        messages.append({name: field for name, field in message.items() if field is not None})
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{key}: the messages in column {column!r} end with the assistant's; expected the prompt alone "
            f"(set {key}.prompt_column)"
        )
    return messages


def answer_of(row: Mapping[str, Any], spec: Dataset) -> Any:
    """The reference answer as the dataset has it (a string, a number, verl's ground_truth); None if there is none."""
    for name in ANSWERS if spec.answer_column == "auto" else (spec.answer_column,):
        value = _lookup(row, name)
        if value is not None:
            return value
    return None


def prompt_column(row: Mapping[str, Any], spec: Dataset, key: str = "data.train") -> str:
    """Name of the column with the prompt. `auto` takes the first known one that is filled."""
    names = PROMPTS if spec.prompt_column == "auto" else (spec.prompt_column,)
    for name in names:
        if row.get(name) is not None:
            return name
    raise _no_prompt(row, spec, key)


def _check_columns(rows: Rows, spec: Dataset, key: str) -> None:
    names = PROMPTS if spec.prompt_column == "auto" else (spec.prompt_column,)
    if not any(name in rows.columns for name in names):
        raise _no_prompt(rows.columns, spec, key)
    top = spec.answer_column.partition(".")[0]
    if spec.answer_column != "auto" and not {spec.answer_column, top} & set(rows.columns):
        raise UserError(
            f"{key}.answer_column: no column {spec.answer_column!r}; the dataset has {', '.join(sorted(rows.columns))}"
        )


def _no_prompt(columns: Iterable[str], spec: Dataset, key: str) -> UserError:
    wanted = "one of " + ", ".join(PROMPTS) if spec.prompt_column == "auto" else repr(spec.prompt_column)
    return UserError(
        f"{key}: no prompt column: expected {wanted}, got {', '.join(sorted(columns))} (set {key}.prompt_column)"
    )


def _lookup(row: Mapping[str, Any], name: str) -> Any:
    """A column, or a field inside one: `reward_model.ground_truth`."""
    if name in row:
        return row[name]
    top, dot, rest = name.partition(".")
    inner = row.get(top)
    return _lookup(inner, rest) if dot and isinstance(inner, Mapping) else None


def read_path(path: Path, size: int | None, key: str) -> Rows:
    if not path.exists():
        raise UserError(f"{key}.path: no such file or folder: {path}")
    if path.is_dir():
        return _read_folder(path, size, key)
    match path.suffix:
        case ".jsonl":
            return _read_jsonl(path, size, key)
        case ".parquet":
            return _read_parquet(path, size, key)
        case other:
            raise UserError(f"{key}.path: {path} ends in {other!r}; expected .jsonl, .parquet or a dataset's folder")


def _read_jsonl(path: Path, size: int | None, key: str) -> Rows:
    """Every line is parsed once, to report a bad one now; later a row is parsed from the mapped file when asked for."""
    starts, columns = array("q"), dict[str, None]()
    with path.open("rb") as file:
        start = 0
        for number, line in enumerate(file, 1):
            if len(starts) == size:
                break
            if line.strip():
                columns |= dict.fromkeys(_parse_line(line, path, number, key))
                starts.append(start)
            start += len(line)
        if not starts:
            return Rows(0, lambda _: {}, ())
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(index: int) -> Row:
        end = content.find(b"\n", starts[index])
        row: Row = json.loads(content[starts[index] : end if end >= 0 else len(content)])
        return row

    return Rows(len(starts), read, columns)


def _parse_line(line: bytes, path: Path, number: int, key: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{key}.path: {path}, line {number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{key}.path: {path}, line {number}: expected an object, got {_short(row)}")
    return row


def _read_parquet(path: Path, size: int | None, key: str) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{key}.path: {path} is not a readable parquet file: {' '.join(str(error).split())}") from None
    num_rows = table.num_rows if size is None else min(size, table.num_rows)
    return Rows(num_rows, lambda i: table.slice(i, 1).to_pylist()[0], table.column_names)


def _read_folder(path: Path, size: int | None, key: str) -> Rows:
    try:
        import datasets
    except ModuleNotFoundError:
        raise UserError(
            f"{key}.path: {path} is a folder, which the package datasets reads; pip install 'gcore-rl[datasets]'"
        ) from None
    try:
        loaded = datasets.load_from_disk(str(path))
    except FileNotFoundError:
        raise UserError(f"{key}.path: {path} is not a dataset folder; expected what save_to_disk wrote") from None
    if isinstance(loaded, datasets.DatasetDict):
        # a held-out set must not turn out to be the training split
        if "train" not in loaded or not key.endswith("train"):
            splits = ", ".join(loaded)
            raise UserError(f"{key}.path: {path} has the splits {splits}; expected one: set {key}.path to {path}/SPLIT")
        loaded = loaded["train"]
    num_rows = len(loaded) if size is None else min(size, len(loaded))
    return Rows(num_rows, loaded.with_format(None).__getitem__, loaded.column_names)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
