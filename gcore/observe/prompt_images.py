"""The images of a prompt in the log of samples: small copies inside data URIs, so that samples.html needs no files."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_SIDE = 160  # pixels
MAX_IMAGES = 16


def thumbnails(images: Any) -> list[str]:
    """Of arrays, or references to arrays, of uint8: height x width x 3; of a video, the frame in the middle."""
    if not isinstance(images, Sequence) or isinstance(images, str):
        return []
    arrays = (image.read() if hasattr(image, "read") else image for image in images[:MAX_IMAGES])
    return [_data_uri(array) for array in arrays if isinstance(array, np.ndarray) and array.ndim in (3, 4)]


def _data_uri(array: np.ndarray) -> str:
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(array if array.ndim == 3 else array[len(array) // 2]))
    is_small = max(picture.size) <= 64
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    written = io.BytesIO()
    picture.save(written, "PNG" if is_small else "JPEG", **({} if is_small else {"quality": 80}))
    kind = "png" if is_small else "jpeg"
    return f"data:image/{kind};base64," + base64.b64encode(written.getvalue()).decode()
