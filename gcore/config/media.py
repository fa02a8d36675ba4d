"""The configuration of images and videos in datasets."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gcore.config.base import Count, PositiveInt, Section


class MediaData(Section):
    max_pixels: PositiveInt = 16_777_216
    """Maximum number of pixels of an image (or of a frame). Checked before it is decoded."""
    max_images: PositiveInt = 64
    """Maximum number of images and videos of a prompt."""
    max_frames: PositiveInt = 64
    """Maximum number of frames of a video. A longer one is sampled at equal distances, to this number."""
    fps: Annotated[float, Field(gt=0)] = 2.0
    """Frames per second of videos whose data do not have it: a message part may have its own `fps`, and animated images
    have durations. The model sees it, as timestamps or positions."""
    max_bad_rows: Count = 0
    """Rows that may be dropped because an image is corrupt, too large, missing or outside of `folder`; they are
    reported. With more of them the run ends before it starts."""
    folder: str | None = None
    """Folder that paths of images are relative to, and must be in. Default: the folder of the dataset's file."""
    allow_urls: bool = False
    """Download images from http and https addresses of the dataset when they are read."""
    optional: bool = False
    """Allow a dataset without any image for a model that takes images."""
