"""Media of dataset rows: where they are in a row, and the bytes of their values.

    row ──messages_with_media──> messages with {"type": "image"} parts, values in that order ──MediaReader──> arrays

A value is bytes, a path, a data URL, an http URL (off by default), what Hugging Face datasets store ({"bytes": ...,
"path": ...}), or what the module of its kind takes besides, such as an array (gcore/media). What cannot be read is a
BadMedia: the row is dropped and counted.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore.config.data import MediaData
from gcore.content.families import KINDS, kind_module
from gcore.content.media import BadMedia
from gcore.http_body import download
from gcore.types import Message

COLUMNS = {column: kind for kind, row in KINDS.items() for column in row.columns}
MARKS = re.compile(f"({'|'.join(f'<{kind}>' for kind in KINDS)})")  # in the text of verl's prompts
FILE_OF_MEDIA = re.compile(r"^\S*\.(png|jpe?g|webp|gif|bmp|mp4|wav|mp3|flac)$|^data:(image|video|audio)/", re.I)
URL_BYTES, URL_SECONDS = 64 << 20, 20


@dataclass(frozen=True, slots=True)
class Value:
    """A medium as it is in the dataset."""

    kind: str
    value: Any
    fps: float | None = None  # of the frames of a video, if the dataset tells


def has_media(row: Mapping[str, Any], messages: Any = ()) -> bool:
    """Whether a row has media: in its columns, or in the parts of its messages."""
    return bool(_column_values(row)) or any(media_parts(m.get("content")) for m in messages if isinstance(m, Mapping))


def unread_media(row: Mapping[str, Any]) -> str:
    """A column that holds media under a name that is not read; empty: there is none."""
    for name, value in row.items():
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, Mapping):  # as datasets of Hugging Face store them
            first = first.get("bytes") or first.get("path")
        looks = isinstance(first, str) and FILE_OF_MEDIA.search(first)
        if name not in COLUMNS and (looks or isinstance(first, bytes) or hasattr(first, "getbands")):
            return name
    return ""


def media_parts(content: Any) -> list[str]:
    """Types of the parts of a message that are not text: [{"type": "image"}, {"type": "text", ...}] -> ["image"]"""
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    kinds = [str(part.get("type")) for part in parts if isinstance(part, Mapping)]
    return [kind for kind in kinds if any(word in kind for word in KINDS)]


def messages_with_media(
    row: Mapping[str, Any], messages: Sequence[Message]
) -> tuple[tuple[Message, ...], tuple[Value, ...]]:
    """Messages whose media are parts without content, and the media in the order of these parts.

    A part may have its own content (OpenAI, Qwen); others take the next value of the row's columns. Text with <image>
    marks (verl) becomes parts. A row with columns and no parts (TRL) has its media before the text of the first user
    message.
    """
    waiting = _column_values(row)
    places_exist = any(media_parts(m.get("content")) or _marked(m.get("content"), waiting) for m in messages)
    changed, values = list[Message](), list[Value]()
    first_user = next((i for i, m in enumerate(messages) if m.get("role") == "user"), len(messages) - 1)
    for i, message in enumerate(messages):
        content = message.get("content")
        parts = _parts(content, waiting)
        if not places_exist and i == first_user:
            parts = [*({"type": v.kind} for v in waiting), *parts]
        done = list[Any]()
        for part in parts:
            kind = _kind(part)
            if kind is None:
                done.append(part)
                continue
            if (own := _own_content(part)) is None:
                place = next((place for place, v in enumerate(waiting) if v.kind == kind), None)
                if place is None:
                    raise BadMedia(f"more {kind} parts than {kind}s in the row's columns; expected one for each part")
                own = waiting.pop(place).value
            values.append(Value(kind, own, _fps(part) if kind == "video" else None))
            done.append({"type": kind})
        plain = all(isinstance(p, Mapping) and p.get("type") == "text" for p in done)
        changed.append({**message, "content": content if plain and isinstance(content, str) else done})
    if waiting:
        raise BadMedia(f"{len(waiting)} more {waiting[0].kind}s in the row's columns than parts in its messages")
    return tuple(changed), tuple(values)


def _column_values(row: Mapping[str, Any]) -> list[Value]:
    found = list[Value]()
    for name, kind in COLUMNS.items():
        value = row.get(name)
        if value is None or (isinstance(value, Sequence | Mapping) and not value):
            continue
        several = name.endswith("s") and isinstance(value, list | tuple)
        found += [Value(kind, v) for v in (value if several else [value])]
    return found


def _marked(content: Any, waiting: Sequence[Value]) -> bool:
    return isinstance(content, str) and bool(waiting) and bool(MARKS.search(content))


def _parts(content: Any, waiting: Sequence[Value]) -> list[Any]:
    if isinstance(content, str):
        pieces = MARKS.split(content) if _marked(content, waiting) else [content]
        return [{"type": p[1:-1]} if MARKS.fullmatch(p) else {"type": "text", "text": p} for p in pieces if p]
    return list(content or ())


def _kind(part: Any) -> str | None:
    kind = str(part.get("type")) if isinstance(part, Mapping) else ""
    return next((known for known in KINDS if known in kind), None)


def _own_content(part: Mapping[str, Any]) -> Any:
    """Of {"type": "image", "image": ...} or {"type": "image_url", "image_url": {"url": ...}}."""
    kind = str(part["type"])
    urls = [f"{known}_url" for known in KINDS]
    for name in (kind, *KINDS, *urls, "url", "path", "base64"):
        value = part.get(name)
        if value is not None:
            inner = value.get("url") if isinstance(value, Mapping) and "url" in value else value
            return f"data:;base64,{inner}" if name == "base64" else inner
    return None


def _fps(part: Mapping[str, Any]) -> float | None:
    given = next((part[name] for name in ("fps", "sample_fps") if part.get(name) is not None), None)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < float("inf"):
        raise BadMedia(f"a video with fps={given!r}; expected a number above 0")
    return float(given)


class MediaReader:
    """Implements families.MediaSource. `root`: the folder that paths are relative to and must be in; None: paths are
    refused."""

    def __init__(self, limits: MediaData, root: Path | None) -> None:
        self.limits = limits
        self._root = Path(limits.folder).resolve() if limits.folder else root.resolve() if root else None

    def read(self, values: Sequence[Value]) -> list[tuple[str, Any]]:
        """(kind, array, or an object that has one) of each."""
        if len(values) > (most := self.limits.max_images):
            what = KINDS[values[0].kind].plural
            raise BadMedia(f"{len(values)} {what}; expected at most {most} (data.media.max_images)")
        return [(v.kind, kind_module(v.kind).read(v.kind, v.value, v.fps, self)) for v in values]

    def load(self, kind: str, value: Any) -> bytes:
        one = KINDS[kind].one
        match value:
            case bytes() | bytearray() | memoryview():
                return bytes(value)
            case {"bytes": bytes() as data}:
                return data
            case {"path": str() as path}:
                return self._file(path, kind)
            case str() if value.startswith("data:"):
                return _of_data_url(value)
            case str() if re.match(r"https?://", value):
                return self._download(value, one)
            case str() | Path():
                return self._file(str(value).removeprefix("file://"), kind)
            case None:
                raise BadMedia(f"{one} that is null; expected its bytes, path or URL")
        raise BadMedia(f"{one} of type {type(value).__name__}; expected bytes, a path, a URL or a decoded one")

    def _file(self, path: str, kind: str) -> bytes:
        if self._root is None:
            raise BadMedia(f"the path {path!r}, and the dataset has no folder (set data.media.folder)")
        file = (self._root / path).resolve()
        if not file.is_relative_to(self._root):
            raise BadMedia(f"the path {path!r} is outside of {self._root} (set data.media.folder)")
        try:
            return file.read_bytes()
        except OSError as error:
            raise BadMedia(f"the {kind} {path!r} cannot be read: {error.strerror}") from error

    def _download(self, url: str, one: str) -> bytes:
        if not self.limits.allow_urls:
            raise BadMedia(f"the address {url[:80]!r}; expected local files (or set data.media.allow_urls=true)")
        try:
            data = download(url, URL_BYTES, URL_SECONDS)
        except (OSError, ValueError) as error:
            raise BadMedia(f"the address {url[:80]!r} cannot be read: {_line(error)}") from error
        if data is None:
            raise BadMedia(f"the address {url[:80]!r} has more than {URL_BYTES >> 20} MB; expected {one}")
        return data


def _of_data_url(url: str) -> bytes:
    head, comma, data = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("expected data:image/png;base64,...")
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadMedia(f"a data URL that cannot be decoded: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
