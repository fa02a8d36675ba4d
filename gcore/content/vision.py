"""Text with images and videos -> the tokens and tensors that a vision-language model computes with. It happens once per
prompt.

    text with placeholders, pixels ──the model's processor──> tokens (a placeholder becomes one token per feature),
                                                              inputs of the vision tower, places of the features

Engines and trainers get the result by reference: what the engine saw is what the trainer trains on.

The processors of transformers are used, with their image processors for Pillow: the others need torchvision, and so do
their video processors (see video.py). Each image is processed alone, so its tensors do not depend on the other images
of a prompt.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gcore.config.base import BuildVision
from gcore.content.media import ArrayRef, Media, Video, hash_of, resolve, store
from gcore.content.tokens import Tokens
from gcore.content.video import VideoProcessor
from gcore.types import Pixels, UserError


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models takes images. Family("Qwen3VLProcessor", "qwen2_vl", "Qwen2VLImageProcessorPil")"""

    processor: str  # class in transformers
    module: str  # transformers.models.MODULE.image_processing_pil_MODULE
    image_processor: str
    grid: bool = False  # the positions of features have three axes: time, height, width
    videos: bool = False


FAMILIES = {  # by model_type
    "qwen2_5_vl": Family("Qwen2_5_VLProcessor", "qwen2_vl", "Qwen2VLImageProcessorPil", grid=True, videos=True),
    "qwen3_vl": Family("Qwen3VLProcessor", "qwen2_vl", "Qwen2VLImageProcessorPil", grid=True, videos=True),
    "gemma3": Family("Gemma3Processor", "gemma3", "Gemma3ImageProcessorPil"),
    "internvl": Family("InternVLProcessor", "got_ocr2", "GotOcr2ImageProcessorPil"),
    "idefics3": Family("Idefics3Processor", "idefics3", "Idefics3ImageProcessorPil"),
    "smolvlm": Family("SmolVLMProcessor", "smolvlm", "SmolVLMImageProcessorPil"),
    "llava_onevision": Family("LlavaOnevisionProcessor", "llava_onevision", "LlavaOnevisionImageProcessorPil"),
}
INPUTS = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_sizes", "batch_num_images")
SETTINGS = ("image_seq_len", "image_seq_length", "num_image_tokens", "vision_feature_select_strategy")
VIDEO_FILE = "video_preprocessor_config.json"
FILES = ("preprocessor_config.json", "processor_config.json", VIDEO_FILE)
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"  # tokens of a built model, as in Qwen-VL
MOST_KNOWN = 1 << 16
BUILT_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE, VIDEO)


@dataclass(frozen=True, slots=True)
class _Made:
    """What became of an image or a video: the text that replaces its placeholder, and the rest."""

    text: str
    num_features: int
    media: Media  # without places


class VisionProcessor:
    """`processor`: of transformers. `family`: the model_type. `folder`: where pixels and tensors are stored; None: they
    stay in memory. An image that is a reference stays where it is, and its tensors are stored beside it: they are
    removed together. `videos`: settings of the video processor, for families that take videos."""

    def __init__(
        self, processor: Any, family: str, folder: Path | None = None, videos: Mapping[str, Any] | None = None
    ) -> None:
        self._processor, self.family, self._folder = processor, family, folder
        self._tokenizer = processor.tokenizer
        self._known: dict[str, _Made] = {}
        self._num_bytes = 0
        self._max_known = MOST_KNOWN if folder is not None else 16  # with a folder they are references
        self.placeholder: str = processor.image_token  # in the text that the chat template makes
        settings = processor._merge_kwargs(processor.valid_processor_kwargs, tokenizer_init_kwargs={})
        self._options: dict[str, Any] = {**settings["images_kwargs"], "return_tensors": None}
        self._feature = self._feature_token()  # that stands for one feature, after expansion
        self._kinds, self._features = {self.placeholder: "image"}, [self._feature]
        self._videos, self.no_videos = None, f"videos are not supported for {family}"
        if FAMILIES[family].videos:
            self._videos, self.no_videos = VideoProcessor(family, videos or {}), ""
            processor.video_processor = self._videos
            self._kinds[str(processor.video_token)] = "video"
            self._features.append(int(self._tokenizer.convert_tokens_to_ids(processor.video_token)))

    @property
    def kinds(self) -> frozenset[str]:
        """Of the media that a prompt may have."""
        return frozenset(self._kinds.values())

    def _feature_token(self) -> int:
        if self.family == "gemma3":  # its placeholder is the mark before the features
            return int(self._tokenizer.image_token_id)
        return int(self._tokenizer.convert_tokens_to_ids(self.placeholder))

    def content(self, text: str, media: Sequence[tuple[str, Pixels | ArrayRef | Video]]) -> Tokens:
        """The prompt `text` with one placeholder per medium, given as (kind, pixels or video). Raises UserError if they
        do not fit each other."""
        if any(kind == "video" and (self.no_videos or not isinstance(given, Video)) for kind, given in media):
            raise UserError(f"a video; expected images: {self.no_videos or 'judges get no videos'}")
        pieces = re.split(f"({'|'.join(map(re.escape, self._kinds))})", text)
        found, kinds = [self._kinds[mark] for mark in pieces[1::2]], [kind for kind, _ in media]
        if found != kinds:
            raise UserError(
                f"{_named(kinds)}, and placeholders of {_named(found)} in the prompt after the chat template; expected "
                'one each, in the same order (an image belongs to a message part {"type": "image"})'
            )
        pixels = [given.frames if isinstance(given, Video) else given for _, given in media]
        self._num_bytes += sum(each.nbytes for each in pixels if not isinstance(each, ArrayRef))
        made = [
            self._made_of_video(given) if isinstance(given, Video) else self._made(given, len(media))
            for _, given in media
        ]
        pieces[1::2] = [each.text for each in made]
        return self._tokens(text, self._encode("".join(pieces)), made)

    def take_bytes(self) -> int:
        """Of the pixels of all images that prompts had since the last call, without those by reference."""
        found, self._num_bytes = self._num_bytes, 0
        return found

    def _tokens(self, text: str, tokens: np.ndarray, made: Sequence[_Made]) -> Tokens:
        places = np.flatnonzero(np.isin(tokens, self._features)).astype(np.int32)
        ends = np.cumsum([m.num_features for m in made], dtype=np.int64)
        assert len(places) == (ends[-1] if made else 0), f"{len(places)} tokens for the features of {len(made)} images"
        split = np.split(places, ends[:-1]) if made else []
        media = tuple(replace(m.media, places=own) for m, own in zip(made, split, strict=True))
        return Tokens(tokens, media=media, short_P=self._encode(text) if media else None)

    def _made(self, image: Pixels | ArrayRef, num_images: int) -> _Made:
        """Of an image in a prompt of `num_images`. The same pixels are processed once while they are remembered; the
        same pixels in two files twice, since one of the files may be removed."""
        several = num_images > 1 and self.family == "llava_onevision"
        known = f"{image.path if isinstance(image, ArrayRef) else hash_of(image)}-{several}"
        if (found := self._known.get(known)) is None:
            pixels = resolve(image)
            inputs = self._prepared(pixels, num_images)
            text = str(self._processor.replace_image_token(inputs, image_idx=0))
            num_features = int((self._encode(text) == self._feature).sum())
            key = f"{hash_of(pixels)}-{several}"
            found = self._remember(known, _Made(text, num_features, self._media(key, image, inputs, num_features)))
        return found

    def _made_of_video(self, video: Video) -> _Made:
        """The same frames at another rate are another video: its timestamps or positions differ."""
        assert self._videos is not None
        name = video.frames.path if isinstance(video.frames, ArrayRef) else hash_of(video.frames)
        known = f"{name}-{video.fps}"
        if (found := self._known.get(known)) is None:
            frames = resolve(video.frames)
            inputs = self._videos.inputs(frames)
            text = str(self._processor.replace_video_token(self._videos.text_inputs(inputs, video), video_idx=0))
            self._check_alphabet(text)
            num_features = int(np.isin(self._encode(text), self._features).sum())
            made = self._media(f"{hash_of(frames)}-{video.fps}", video.frames, inputs, num_features)
            seconds = self._videos.temporal_patch_size / video.fps
            found = self._remember(known, _Made(text, num_features, replace(made, kind="video", seconds=seconds)))
        return found

    def _remember(self, known: str, made: _Made) -> _Made:
        if len(self._known) >= self._max_known:
            del self._known[next(iter(self._known))]
        self._known[known] = made
        return made

    def _check_alphabet(self, text: str) -> None:
        """Of a model built from scratch: a timestamp must not become unknown tokens."""
        special = "|".join(map(re.escape, self._tokenizer.all_special_tokens))
        alphabet = set(getattr(self._tokenizer, "alphabet", ""))
        if alphabet and (unknown := set(re.sub(special, "", text)) - alphabet):
            raise UserError(
                f"no token for the characters {''.join(sorted(unknown))!r} in the timestamps of a video (add them to "
                "model.build.alphabet)"
            )

    def save(self, folder: Path, source: Path | None) -> None:
        """The settings of the processor, as in a model's folder. `source`: the folder they came from."""
        if source is None:
            self._processor.image_processor.save_pretrained(folder)
            if self._videos is not None:
                (folder / VIDEO_FILE).write_text(json.dumps(self._videos.settings, indent=2))
            return
        for name in FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def _prepared(self, pixels: Pixels, num_images: int) -> Mapping[str, Any]:
        """What the image processor makes of one image. `num_images`: of the prompt; LLaVA-OneVision cuts an image into
        tiles only if it is alone."""
        several = self.family == "llava_onevision" and num_images > 1
        options = {**self._options, "input_data_format": "channels_last"}
        try:
            found = dict(self._processor.image_processor([[pixels] * 2] if several else [pixels], **options))
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise UserError(
                f"an image of {pixels.shape[0]} x {pixels.shape[1]} pixels: the model's processor refuses it: "
                f"{' '.join(str(error).split())}"
            ) from error
        if several:
            found |= {name: found[name][:1] for name in ("pixel_values", "image_sizes")}
        return found

    def _media(self, key: str, image: Pixels | ArrayRef, inputs: Mapping[str, Any], num_features: int) -> Media:
        tensors = {name: np.asarray(inputs[name]) for name in INPUTS if name in inputs}
        grid = (1, 1, num_features)
        if FAMILIES[self.family].grid:
            time, height, width = tensors["image_grid_thw"][0].tolist()
            merge = self._processor.image_processor.merge_size
            grid = (time, height // merge, width // merge)
        is_large = {name: array.dtype.kind == "f" for name, array in tensors.items()}
        folder = self._folder
        if folder is not None and isinstance(image, ArrayRef):
            folder = Path(image.path).parent
        kept = {name: _kept(a.astype(np.float32), folder) if is_large[name] else a for name, a in tensors.items()}
        return Media("image", key, _kept(image, folder), kept, grid=grid)


def _named(kinds: Sequence[str]) -> str:
    """Those of a prompt, in order: image, image, video"""
    return ", ".join(kinds) or "no image"


def _kept(array: np.ndarray | ArrayRef, folder: Path | None) -> np.ndarray | ArrayRef:
    if folder is None:
        return resolve(array)
    return array if isinstance(array, ArrayRef) else store(array, folder)


def built_processor(vision: BuildVision, tokenizer: Any, folder: Path | None) -> VisionProcessor:
    """Of a model that is built from the configuration."""
    edge = vision.image_size**2
    settings = {
        "patch_size": vision.patch_size,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": edge, "longest_edge": edge},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    videos = {**settings, "size": {"shortest_edge": 2 * edge, "longest_edge": 16 * edge}}  # of all frames together
    return VisionProcessor(make_processor("qwen3_vl", settings, {}, tokenizer), "qwen3_vl", folder, videos)


def saved_processor(family: str, model: Path, tokenizer: Any, folder: Path | None) -> VisionProcessor:
    """Of a model's folder: preprocessor_config.json and processor_config.json."""
    found = [_read(model / name) for name in ("preprocessor_config.json", "processor_config.json")]
    own = found[1].pop("image_processor", None)
    settings = own if isinstance(own, dict) else found[0]
    if not settings:
        raise UserError(
            f"model.path={model}: no preprocessor_config.json; expected the settings of its image processor"
        )
    videos = found[1].pop("video_processor", None) or _read(model / VIDEO_FILE) or found[0]
    processor = make_processor(family, settings, {**found[0], **found[1]}, tokenizer)
    return VisionProcessor(processor, family, folder, videos)


def make_processor(family: str, image: Mapping[str, Any], settings: Mapping[str, Any], tokenizer: Any) -> Any:
    """The processor of transformers. It insists on a video processor, which needs torchvision: it gets none."""
    spec = FAMILIES[family]
    transformers = importlib.import_module("transformers")
    pictures = importlib.import_module(f"transformers.models.{spec.module}.image_processing_pil_{spec.module}")
    base = getattr(transformers, spec.processor)
    lenient = type(spec.processor, (base,), {"check_argument_for_proper_class": lambda *_: None})
    unused = ("processor_class", "image_processor_type", "feature_extractor_type", "auto_map")
    image_processor = getattr(pictures, spec.image_processor)(**{k: v for k, v in image.items() if k not in unused})
    video = {} if family in ("gemma3", "idefics3") else {"video_processor": None}
    options = {name: settings[name] for name in SETTINGS if name in settings}
    return lenient(image_processor=image_processor, tokenizer=tokenizer, **video, **options)


def _read(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text()) if file.is_file() else {}
    return found if isinstance(found, dict) else {}
