"""Videos -> the patches of Qwen-VL's vision tower.

    frames ──same size for all, Pillow──> resized ──normalized──> patches of `temporal_patch_size` frames each, and
                                                                  their grid: time, height, width

The video processors of transformers do the same with torchvision. Here frames are resized by the pieces of the image
processor for Pillow, so resized pixels can differ from theirs by a rounding.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from gcore.content.media import Video
from gcore.content.processor import Expanded
from gcore.types import Pixels, UserError

# of the video processors of transformers, where a model's files do not name them
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2}, "max_video_tokens": 128_000},
    "qwen3_vl": {
        "size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2},
        "patch_size": 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "max_video_tokens": 768,
    },
}
DEFAULTS |= dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen4_exp"), DEFAULTS["qwen3_vl"])
VIDEO_FILE = "video_preprocessor_config.json"
OF_FRAMES = (  # settings that image and video processors share
    *("size", "min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size", "resample"),
    *("rescale_factor", "image_mean", "image_std"),
)


class Videos:
    """Implements content.processor.KindProcessor. `processor`: of transformers, with a VideoProcessor.
    `image_features`: tokens; in a video, frames may have those of images."""

    def __init__(self, processor: Any, image_features: tuple[int, ...]) -> None:
        self._processor, self._tokenizer = processor, processor.tokenizer
        self._videos: VideoProcessor = processor.video_processor
        self.placeholder = str(processor.video_token)
        self.features = (*image_features, int(self._tokenizer.convert_tokens_to_ids(self.placeholder)))

    def variant(self, given: Video, number: int) -> str:
        """The same frames at another rate are another video: its timestamps or positions differ."""
        return str(given.fps)

    def expand(self, array: Pixels, given: Video, number: int) -> Expanded:
        videos = self._videos
        inputs = videos.inputs(array)
        text = str(self._processor.replace_video_token(videos.text_inputs(inputs, given), video_idx=0))
        self._check_alphabet(text)
        time, height, width = inputs["image_grid_thw"][0].tolist()
        grid = (time, height // videos.merge_size, width // videos.merge_size)
        seconds = videos.temporal_patch_size / given.fps
        return Expanded(text, inputs, grid, seconds, tower_work(inputs, time))

    def save(self, folder: Path) -> None:
        (folder / VIDEO_FILE).write_text(json.dumps(self._videos.settings, indent=2))

    def _check_alphabet(self, text: str) -> None:
        """Of a model built from scratch: a timestamp must not become unknown tokens."""
        special = "|".join(map(re.escape, self._tokenizer.all_special_tokens))
        alphabet = set(getattr(self._tokenizer, "alphabet", ""))
        if alphabet and (unknown := set(re.sub(special, "", text)) - alphabet):
            raise UserError(
                f"no token for the characters {''.join(sorted(unknown))!r} in the timestamps of a video (add them to "
                "model.build.alphabet)"
            )


def tower_work(inputs: Mapping[str, np.ndarray], times: int = 1) -> tuple[tuple[str, int], ...]:
    """Pixels that the tower encodes, after resizing and tiling: of an image, or of each time of a video's grid, which
    the tower encodes like an image."""
    given = inputs["pixel_values"]
    in_patches = given.ndim == 2  # of Qwen-VL, where a patch holds an image twice, or two frames
    pixels = given.size // (6 if in_patches else 3)
    return (("image", pixels // times),) * times


class VideoProcessor:
    """Takes the place of the video processor in a processor of transformers. `settings`: of the model's video
    processor, as in its files."""

    def __init__(self, family: str, settings: Mapping[str, Any]) -> None:
        module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        own = {**DEFAULTS[family], **{name: value for name, value in settings.items() if value is not None}}
        own["size"] = dict(own["size"])  # min_pixels and max_pixels overwrite it
        self._frames: Any = module.Qwen2VLImageProcessorPil(**{n: own[n] for n in OF_FRAMES if n in own})
        self._resize = importlib.import_module("transformers.image_processing_backends").PilBackend.resize
        self._edges_of_image, self._family = module.smart_resize, family
        self._capped, self._max_tokens = bool(own.get("cap_pixels_per_frame")), int(own["max_video_tokens"])
        self.settings = {n: own[n] for n in (*OF_FRAMES, "cap_pixels_per_frame", "max_video_tokens") if n in own}
        self.merge_size, self.temporal_patch_size = self._frames.merge_size, self._frames.temporal_patch_size

    def inputs(self, pixels_FHWC: Pixels) -> dict[str, np.ndarray]:
        """Patches and grid, under the names of an image: the tower computes both in the same way."""
        frames, together = self._frames, self.temporal_patch_size
        size = _size(*self._edges(*pixels_FHWC.shape[:3]))
        made = [self._frame(frame, size) for frame in pixels_FHWC]
        made += [made[-1]] * (-len(made) % together)
        frames_FCHW = np.stack(made)
        patch, merge = frames.patch_size, frames.merge_size
        num_frames, channels, height, width = frames_FCHW.shape
        time, rows, columns = num_frames // together, height // patch, width // patch
        shape = (time, together, channels, rows // merge, merge, patch, columns // merge, merge, patch)
        # patches that are merged to one feature follow each other
        patches = frames_FCHW.reshape(shape).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return {
            "pixel_values": patches.reshape(time * rows * columns, -1).astype(np.float32),
            "image_grid_thw": np.array([[time, rows, columns]], np.int64),
        }

    def text_inputs(self, inputs: Mapping[str, np.ndarray], video: Video) -> dict[str, Any]:
        """What a processor of transformers needs to expand the placeholder: the grid, and when each frame was."""
        seen = SimpleNamespace(fps=video.fps, frames_indices=list(range(video.frames.shape[0])))
        return {"video_grid_thw": inputs["image_grid_thw"], "video_metadata": [seen]}

    def _frame(self, frame_HWC: Pixels, size: Any) -> np.ndarray:
        frames = self._frames
        image: np.ndarray = self._resize(frames, frame_HWC.transpose(2, 0, 1), size, frames.resample)
        image = frames.rescale(image, frames.rescale_factor)
        found: np.ndarray = frames.normalize(image, frames.image_mean, frames.image_std)
        return found

    def _edges(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Of the resized frames. Qwen2.5-VL limits the pixels of a frame, Qwen3-VL those of all frames together."""
        frames, factor, together = self._frames, self._frames.patch_size * self.merge_size, self.temporal_patch_size
        least, most = int(frames.size.shortest_edge), int(frames.size.longest_edge)
        floor = int(least * 1.05)
        if self._family == "qwen2_5_vl":
            if self._capped:
                share = int(self._max_tokens * factor**2 * 0.9) * together // num_frames
                most = max(min(most, share), floor)
            edges: tuple[int, int] = self._edges_of_image(height, width, factor, least, most)
            return edges
        if self._capped:
            most = num_frames * max(min(self._max_tokens * factor**2, most // num_frames), floor)
        return edges_of_video(num_frames, height, width, together, factor, least, most)


def edges_of_video(
    num_frames: int, height: int, width: int, together: int, factor: int, least: int, most: int
) -> tuple[int, int]:
    """Height and width of the frames, multiples of `factor`, so that all pixels of the video are between `least` and
    `most`. As in the video processor of Qwen3-VL. `together`: frames per patch."""
    if num_frames < together:
        raise UserError(f"a video of {num_frames} frames; expected at least {together}, as the model's processor does")
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > 200 * min(height, width):
        raise UserError(f"a video of {height} x {width} pixels; expected edges of a ratio of at most 200")
    edges = round(height / factor) * factor, round(width / factor) * factor
    pixels, rounded = num_frames * height * width, round(num_frames / together) * together
    if rounded * math.prod(edges) > most:
        shrink = math.sqrt(pixels / most)
        return _down(height / shrink, factor), _down(width / shrink, factor)
    if rounded * math.prod(edges) < least:
        grow = math.sqrt(least / pixels)
        return _up(height * grow, factor), _up(width * grow, factor)
    return edges


def _down(edge: float, factor: int) -> int:
    return max(factor, math.floor(edge / factor) * factor)


def _up(edge: float, factor: int) -> int:
    return math.ceil(edge / factor) * factor


def _size(height: int, width: int) -> Any:
    return importlib.import_module("transformers.image_utils").SizeDict(height=height, width=width)
