"""Files -> rows: .jsonl, .json (an array, or one object per line), .csv, .tsv, .parquet.

Rows are read on access: every controller opens the dataset, but none holds it as Python objects.
"""

from __future__ import annotations

import csv
import json
import mmap
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from gcore.types import UserError

Row = dict[str, Any]
SPACE = re.compile(r"[ \t\r\n]*")
MEDIA_FEATURES = ("Image", "Video", "Audio", "Pdf", "Nifti")  # types of the package `datasets`


class DatasetRows(Sequence[Row]):
    """Rows read by a function. DatasetRows(3, read, ["prompt", "answer"])[1] -> {"prompt": ..., "answer": ...}"""

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


def computed_rows(num_rows: int, read: Callable[[int], Row], size: int | None = None) -> DatasetRows:
    """At most `size` rows with the columns of the first one."""
    num_rows = num_rows if size is None else min(size, num_rows)
    return DatasetRows(num_rows, read, read(0) if num_rows else ())


def read_file(path: Path, size: int | None, key: str, media: Collection[str] = ()) -> DatasetRows:
    """The first `size` rows. UserError names the file and the line. `media`: columns of images are allowed."""
    try:
        return READERS[path.suffix](path, size, key) if path.suffix != ".parquet" else _parquet(path, size, key, media)
    except KeyError:
        raise UserError(
            f"{key}.path: {path} ends in {path.suffix!r}; expected {', '.join(READERS)} or a dataset's folder"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{key}.path: {path} is not UTF-8 text: {error}") from None


def _jsonl(path: Path, size: int | None, key: str) -> DatasetRows:
    """Parses every line once, to report bad lines early. Later a row is parsed from the mapped file on access."""
    starts, start, columns = array("q"), 0, dict[str, None]()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if len(starts) == size:
                break
            if line.strip(b" \t\r\n"):
                columns |= dict.fromkeys(_parse_line(line, path, number, key))
                starts.append(start)
            start += len(line)
        if not starts:
            return DatasetRows(0, lambda _: {}, ())
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    starts.append(start)  # the end of the last row; a row may be followed by empty lines
    return DatasetRows(len(starts) - 1, lambda i: json.loads(content[starts[i] : starts[i + 1]]), columns)


def _parse_line(line: bytes, path: Path, number: int, key: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        expected = " (expected an array of objects, or one object per line)" if path.suffix == ".json" else ""
        raise UserError(f"{key}.path: {path}, line {number}: not JSON: {error}{expected}") from None
    if not isinstance(row, dict):
        raise UserError(f"{key}.path: {path}, line {number}: expected an object, got {short(row)}")
    return row


def _json(path: Path, size: int | None, key: str) -> DatasetRows:
    """An array of objects is kept as text, with the positions of the objects; other files are read line by line."""
    with path.open("rb") as file:
        start = next((line.lstrip() for line in file if line.strip()), b"")
    if not start.startswith(b"["):
        return _jsonl(path, size, key)
    text, columns, spans = path.read_text("utf-8"), dict[str, None](), list[tuple[int, int]]()
    for row, begin, end in _elements(text, path, key):
        if len(spans) == size:
            break
        columns |= dict.fromkeys(row)
        spans.append((begin, end))
    return DatasetRows(len(spans), lambda i: json.loads(text[slice(*spans[i])]), columns)


def _elements(text: str, path: Path, key: str) -> Iterator[tuple[Row, int, int]]:
    """The objects of an array, each with the span of its text."""

    def fail(place: int, what: str) -> UserError:
        return UserError(f"{key}.path: {path}, line {text.count(chr(10), 0, place) + 1}: {what}")

    def after_space(place: int) -> int:
        match = SPACE.match(text, place)
        assert match is not None
        return match.end()

    decoder, place = json.JSONDecoder(), after_space(after_space(0) + 1)
    if text[place : place + 1] == "]":
        return
    while True:
        try:
            row, end = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise fail(error.pos, f"not JSON: {error.msg}") from None
        if not isinstance(row, dict):
            raise fail(place, f"expected an object, got {short(row)}")
        yield row, place, end
        place = after_space(end)
        if text[place : place + 1] == "]":
            return
        if text[place : place + 1] != ",":
            raise fail(place, f"expected a comma or ] after an object, got {short(text[place : place + 20])}")
        place = after_space(place + 1)


def _csv(path: Path, size: int | None, key: str) -> DatasetRows:
    """The first line names the columns. Values are unchanged strings; an empty value is null."""
    import pyarrow as pa

    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)

        def fail(what: str) -> UserError:
            return UserError(f"{key}.path: {path}, line {lines.line_num}: {what}")

        try:
            names = next(lines, [])
            if "" in names or len(set(names)) < len(names):
                raise fail(f"the first line names the columns, each once; got {short(names)}")
            columns: list[list[str | None]] = [[] for _ in names]
            for fields in lines:
                if not fields:
                    continue
                if len(fields) != len(names):
                    raise fail(f"{len(fields)} values; expected {len(names)}, one per column of the first line")
                if len(columns[0]) == size:
                    break
                for column, value in zip(columns, fields, strict=True):
                    column.append(value or None)
        except csv.Error as error:
            raise fail(f"not a table: {error}") from None
    return _rows_of(pa.table({n: pa.array(c, pa.large_string()) for n, c in zip(names, columns, strict=True)}), size)


def _parquet(path: Path, size: int | None, key: str, media: Collection[str] = ()) -> DatasetRows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{key}.path: {path} is not a readable parquet file: {' '.join(str(error).split())}") from None
    if not media:
        about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))  # written by `datasets`
        reject_media(about.get("info", {}).get("features") or {}, key)
    return _rows_of(table, size)


def _rows_of(table: Any, size: int | None) -> DatasetRows:
    num_rows = table.num_rows if size is None else min(size, table.num_rows)
    return DatasetRows(num_rows, lambda i: table.slice(i, 1).to_pylist()[0], table.column_names)


READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}


def reject_media(features: dict[str, Any], key: str) -> None:
    """Raises UserError for columns of a media type: {"image": {"_type": "Image"}, "prompt": {"dtype": "string"}}."""
    for name, feature in features.items():
        if kinds := sorted(_media_types(feature)):
            raise UserError(
                f"{key}: column {name!r} holds {kinds[0]} features; expected text only, because the model takes "
                "no media (use a model that does, or remove the column)"
            )


def _media_types(feature: Any) -> set[str]:
    if isinstance(feature, dict):
        own = {feature["_type"]} & set(MEDIA_FEATURES) if isinstance(feature.get("_type"), str) else set()
        return own.union(*map(_media_types, feature.values()))
    return set().union(*map(_media_types, feature)) if isinstance(feature, list) else set()


def short(value: Any) -> str:
    text = " ".join(repr(value).split())  # of an array, several lines
    return text if len(text) <= 80 else text[:77] + "..."
