"""Images and videos of dataset rows: where they are in a row, and their pixels.

    row ──messages_with_media──> messages with {"type": "image"} parts, values in that order ──pixels_of──> arrays

A value is bytes, a path, a data URL, an http URL (off by default), a Pillow image, an array, or what Hugging Face
datasets store: {"bytes": ..., "path": ...}. What cannot be read is a BadMedia: the row is dropped and counted.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gcore.config.data import MediaData
from gcore.content.families import KINDS
from gcore.content.media import Video
from gcore.http_body import download
from gcore.types import Message, Pixels, UserError

COLUMNS = {column: kind for kind, row in KINDS.items() for column in row.columns}
MARKS = re.compile(f"({'|'.join(f'<{kind}>' for kind in KINDS)})")  # in the text of verl's prompts
URL_BYTES, URL_SECONDS = 64 << 20, 20


class BadMedia(UserError):
    """A row whose images cannot be used."""


@dataclass(frozen=True, slots=True)
class Value:
    """An image or a video as it is in the dataset."""

    kind: str
    value: Any
    fps: float | None = None  # of the frames of a video, if the dataset tells


def has_media(row: Mapping[str, Any], messages: Any = ()) -> bool:
    """Whether a row has images or videos: in its columns, or in the parts of its messages."""
    return bool(_column_values(row)) or any(media_parts(m.get("content")) for m in messages if isinstance(m, Mapping))


def media_parts(content: Any) -> list[str]:
    """Types of the parts of a message that are not text: [{"type": "image"}, {"type": "text", ...}] -> ["image"]"""
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    kinds = [str(part.get("type")) for part in parts if isinstance(part, Mapping)]
    return [kind for kind in kinds if any(word in kind for word in ("image", "video", "audio"))]


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
        parts = _parts(content, waiting) if places_exist else [{"type": "text", "text": content}]
        if not places_exist and waiting:
            parts = parts if isinstance(content, str) else list(content or ())
            parts = [*({"type": v.kind} for v in waiting), *parts] if i == first_user else parts
        done = list[Any]()
        for part in parts:
            kind = _kind(part)
            if kind is None:
                done.append(part)
                continue
            own = _own_content(part)
            if own is None:
                own = next((v.value for v in waiting if v.kind == kind), None)
                if own is None:
                    raise BadMedia(f"more {kind} parts than {kind}s in the row's columns; expected one for each part")
                waiting.remove(next(v for v in waiting if v.kind == kind))
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
    if "audio" in kind:
        raise BadMedia(f"a message part of type {kind!r}; expected text, image or video")
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


# ---- pixels --------------------------------------------------------------------------------------------------------


class MediaReader:
    """`root`: the folder that paths are relative to and must be in; None: paths are refused."""

    def __init__(self, limits: MediaData, root: Path | None) -> None:
        self._limits = limits
        self._root = Path(limits.folder).resolve() if limits.folder else root.resolve() if root else None

    def read(self, values: Sequence[Value]) -> list[tuple[str, Pixels | Video]]:
        if len(values) > self._limits.max_images:
            raise BadMedia(f"{len(values)} images; expected at most {self._limits.max_images} (data.media.max_images)")
        return [(v.kind, self.image(v.value) if v.kind == "image" else self.video(v.value, v.fps)) for v in values]

    def image(self, value: Any) -> Pixels:
        if isinstance(value, np.ndarray):
            return self._checked(value)
        return self._decoded(self._opened(value))

    def video(self, value: Any, fps: float | None = None) -> Video:
        """A list of frames, an array, or an animated image. `fps`: of these frames, if the dataset tells."""
        if isinstance(value, list | tuple | np.ndarray):
            number, chosen = len(value), self._chosen(len(value))
            frames = [self.image(value[index]) for index in chosen]
        else:
            opened, frames, durations = self._opened(value), [], list[float]()
            number = getattr(opened, "n_frames", 1)
            chosen = self._chosen(number)
            for index in chosen:
                opened.seek(index)
                frames.append(self._decoded(opened.copy()))
                durations.append(float(opened.info.get("duration") or 0))
            if fps is None and sum(durations) > 0:
                fps = 1000 * len(durations) / sum(durations)  # durations are in milliseconds
        if len({frame.shape for frame in frames}) > 1:
            raise BadMedia("a video whose frames have different sizes; expected one size")
        fps = self._limits.fps if fps is None else fps
        if len(chosen) < number:
            fps *= max(len(chosen) - 1, 1) / (number - 1)
        return Video(np.stack(frames), fps)

    def _chosen(self, number: int) -> list[int]:
        """Indices of at most data.media.max_frames frames, at equal distances, with the first and the last one."""
        if number < 1:
            raise BadMedia("a video without frames; expected at least one")
        found: list[int] = np.linspace(0, number - 1, min(number, self._limits.max_frames)).round().astype(int).tolist()
        return found

    def _checked(self, array: np.ndarray) -> Pixels:
        if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
            raise BadMedia(f"an image of {array.dtype} and shape {array.shape}; expected uint8, height x width x 3")
        self._check_size(array.shape[1], array.shape[0])
        return np.ascontiguousarray(array if array.ndim == 3 else np.repeat(array[:, :, None], 3, 2))

    def _check_size(self, width: int, height: int) -> None:
        if not 1 <= width * height <= self._limits.max_pixels:
            raise BadMedia(
                f"an image of {width} x {height} pixels; expected at most {self._limits.max_pixels:,} pixels "
                "(data.media.max_pixels)"
            )

    def _decoded(self, picture: Any) -> Pixels:
        from PIL import ImageOps, UnidentifiedImageError

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                picture.load()
                return np.array(ImageOps.exif_transpose(picture).convert("RGB"), np.uint8)
        except (OSError, ValueError, SyntaxError, EOFError, UnidentifiedImageError, Warning) as error:
            raise BadMedia(f"an image that cannot be decoded: {_why(error)}") from error

    def _opened(self, value: Any) -> Any:
        """A Pillow image whose pixels are not decoded yet; its size is checked."""
        from PIL import Image

        if not isinstance(value, Image.Image):
            data = self._bytes(value)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of large images; the limit below is ours
                    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
                    try:
                        value = Image.open(io.BytesIO(data))
                    finally:
                        Image.MAX_IMAGE_PIXELS = limit
            except (OSError, ValueError, SyntaxError) as error:
                raise BadMedia(f"{len(data)} bytes that are no image: {_why(error)}") from error
        self._check_size(*value.size)
        return value

    def _bytes(self, value: Any) -> bytes:
        match value:
            case bytes() | bytearray() | memoryview():
                return bytes(value)
            case {"bytes": bytes() as data}:
                return data
            case {"path": str() as path}:
                return self._file(path)
            case str() if value.startswith("data:"):
                return _of_data_url(value)
            case str() if re.match(r"https?://", value):
                return self._download(value)
            case str() | Path():
                return self._file(str(value).removeprefix("file://"))
            case None:
                raise BadMedia("an image that is null; expected its bytes, path or URL")
        raise BadMedia(f"an image of type {type(value).__name__}; expected bytes, a path, a URL or a Pillow image")

    def _file(self, path: str) -> bytes:
        if self._root is None:
            raise BadMedia(f"the path {path!r}, and the dataset has no folder (set data.media.folder)")
        file = (self._root / path).resolve()
        if not file.is_relative_to(self._root):
            raise BadMedia(f"the path {path!r} is outside of {self._root} (set data.media.folder)")
        try:
            return file.read_bytes()
        except OSError as error:
            raise BadMedia(f"the image {path!r} cannot be read: {error.strerror}") from error

    def _download(self, url: str) -> bytes:
        if not self._limits.allow_urls:
            raise BadMedia(f"the address {url[:80]!r}; expected local images (or set data.media.allow_urls=true)")
        try:
            data = download(url, URL_BYTES, URL_SECONDS)
        except (OSError, ValueError) as error:
            raise BadMedia(f"the address {url[:80]!r} cannot be read: {_line(error)}") from error
        if data is None:
            raise BadMedia(f"the address {url[:80]!r} has more than {URL_BYTES >> 20} MB; expected an image")
        return data


def _of_data_url(url: str) -> bytes:
    head, comma, data = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("expected data:image/png;base64,...")
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadMedia(f"a data URL that cannot be decoded: {_line(error)}") from error


def _why(error: BaseException) -> str:
    """Without the name of the object in memory that Pillow read."""
    from PIL import UnidentifiedImageError

    return "Pillow finds no format in them" if isinstance(error, UnidentifiedImageError) else _line(error)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
