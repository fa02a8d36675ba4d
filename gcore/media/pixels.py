"""Images and videos in datasets: values -> pixels. Also Pillow images, arrays, lists of frames, animated images."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np

from gcore.config.data import MediaData
from gcore.content.families import MediaSource
from gcore.content.media import BadMedia, Video, picture_url
from gcore.types import Pixels

MAX_SHOWN = 160  # pixels of a side in a page


def read(kind: str, value: Any, fps: float | None, source: MediaSource) -> Pixels | Video:
    return read_image(value, source) if kind == "image" else read_video(value, fps, source)


def shown(array: np.ndarray) -> str:
    if array.ndim not in (3, 4):
        return ""
    return picture_url(array, MAX_SHOWN, "PNG" if max(array.shape[-3:-1]) <= 64 else "JPEG")


def read_image(value: Any, source: MediaSource) -> Pixels:
    if isinstance(value, np.ndarray):
        return _checked(value, source.limits)
    return _decoded(_opened(value, source))


def read_video(value: Any, fps: float | None, source: MediaSource) -> Video:
    limits = source.limits
    if isinstance(value, list | tuple | np.ndarray):
        number, chosen = len(value), _chosen(len(value), limits.max_frames)
        frames = [read_image(value[index], source) for index in chosen]
    else:
        opened, frames, durations = _opened(value, source), [], list[float]()
        number = getattr(opened, "n_frames", 1)
        chosen = _chosen(number, limits.max_frames)
        for index in chosen:
            opened.seek(index)
            frames.append(_decoded(opened.copy()))
            durations.append(float(opened.info.get("duration") or 0))
        if fps is None and sum(durations) > 0:
            fps = 1000 * len(durations) / sum(durations)  # durations are in milliseconds
    if len({frame.shape for frame in frames}) > 1:
        raise BadMedia("a video whose frames have different sizes; expected one size")
    fps = limits.fps if fps is None else fps
    if len(chosen) < number:
        fps *= max(len(chosen) - 1, 1) / (number - 1)
    return Video(np.stack(frames), fps)


def _chosen(number: int, most: int) -> list[int]:
    """Indices of at most data.media.max_frames frames, at equal distances, with the first and the last one."""
    if number < 1:
        raise BadMedia("a video without frames; expected at least one")
    found: list[int] = np.linspace(0, number - 1, min(number, most)).round().astype(int).tolist()
    return found


def _checked(array: np.ndarray, limits: MediaData) -> Pixels:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
        raise BadMedia(f"an image of {array.dtype} and shape {array.shape}; expected uint8, height x width x 3")
    _check_size(array.shape[1], array.shape[0], limits.max_pixels)
    return np.ascontiguousarray(array if array.ndim == 3 else np.repeat(array[:, :, None], 3, 2))


def _check_size(width: int, height: int, most: int) -> None:
    if not 1 <= width * height <= most:
        got = f"an image of {width} x {height} pixels"
        raise BadMedia(f"{got}; expected at most {most:,} pixels (data.media.max_pixels)")


def _decoded(picture: Any) -> Pixels:
    from PIL import ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            picture.load()
            return np.array(ImageOps.exif_transpose(picture).convert("RGB"), np.uint8)
    except (OSError, ValueError, SyntaxError, EOFError, Warning) as error:
        raise BadMedia(f"an image that cannot be decoded: {' '.join(str(error).split())[:200]}") from error


def _opened(value: Any, source: MediaSource) -> Any:
    """A Pillow image whose pixels are not decoded yet; its size is checked."""
    from PIL import Image, UnidentifiedImageError

    if not isinstance(value, Image.Image):
        data = source.load("image", value)
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # the limit below is ours
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = Image.open(io.BytesIO(data))
        except (OSError, ValueError, SyntaxError) as error:
            is_unknown = isinstance(error, UnidentifiedImageError)  # its text names an object in memory
            why = "Pillow finds no format in them" if is_unknown else " ".join(str(error).split())[:200]
            raise BadMedia(f"{len(data)} bytes that are no image: {why}") from error
        finally:
            Image.MAX_IMAGE_PIXELS = limit
    width, height = value.size
    _check_size(width, height, source.limits.max_pixels)
    return value
