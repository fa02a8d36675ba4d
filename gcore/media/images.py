"""Families of models that take images, some of them also videos (videos.py).

The processors of transformers are used, with their image processors for Pillow: the others need torchvision. Each image
is processed alone, so its tensors do not depend on the other images of a prompt.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore.config.base import BuildModel
from gcore.content.families import FAMILIES
from gcore.content.media import Media, on_device
from gcore.content.processor import FILES, Expanded, KindProcessor, read_json, read_settings
from gcore.media.videos import VIDEO_FILE, VideoProcessor, Videos, tower_work
from gcore.types import Pixels, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PROCESSORS = {  # class in transformers; transformers.models.MODULE.image_processing_pil_MODULE, and the class there
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "qwen2_vl", "Qwen2VLImageProcessorPil"),
    "qwen3_vl": ("Qwen3VLProcessor", "qwen2_vl", "Qwen2VLImageProcessorPil"),
    "gemma3": ("Gemma3Processor", "gemma3", "Gemma3ImageProcessorPil"),
    "internvl": ("InternVLProcessor", "got_ocr2", "GotOcr2ImageProcessorPil"),
    "idefics3": ("Idefics3Processor", "idefics3", "Idefics3ImageProcessorPil"),
    "smolvlm": ("SmolVLMProcessor", "smolvlm", "SmolVLMImageProcessorPil"),
    "llava_onevision": ("LlavaOnevisionProcessor", "llava_onevision", "LlavaOnevisionImageProcessorPil"),
}
INPUTS = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_sizes", "batch_num_images")
SETTINGS = ("image_seq_len", "image_seq_length", "num_image_tokens", "vision_feature_select_strategy")
TILES_OF_ONE_SIZE = ("gemma3", "internvl")


class Images:
    """Implements content.processor.KindProcessor. `processor`: of transformers."""

    def __init__(self, processor: Any, family: str) -> None:
        self._processor, self._family = processor, family
        self.placeholder: str = processor.image_token
        settings = processor._merge_kwargs(processor.valid_processor_kwargs, tokenizer_init_kwargs={})
        self._options: dict[str, Any] = {**settings["images_kwargs"], "return_tensors": None}
        tokenizer = processor.tokenizer
        # of Gemma, the placeholder is the mark before the features
        feature = tokenizer.image_token_id if family == "gemma3" else tokenizer.convert_tokens_to_ids(self.placeholder)
        self.features: tuple[int, ...] = (int(feature),)

    def variant(self, given: Any, number: int) -> str:
        return str(self._in_one_tile(number))

    def expand(self, array: Pixels, given: Any, number: int) -> Expanded:
        inputs = self._prepared(array, self._in_one_tile(number))
        tensors = {name: np.asarray(inputs[name]) for name in INPUTS if name in inputs}
        grid = None
        if FAMILIES[self._family].grid:
            time, height, width = tensors["image_grid_thw"][0].tolist()
            merge = self._processor.image_processor.merge_size
            grid = (time, height // merge, width // merge)
        text = str(self._processor.replace_image_token(inputs, image_idx=0))
        return Expanded(text, tensors, grid, work=tower_work(tensors))

    def save(self, folder: Path) -> None:
        self._processor.image_processor.save_pretrained(folder)

    def _in_one_tile(self, number: int) -> bool:
        """LLaVA-OneVision cuts an image into tiles only if it is alone."""
        return number > 1 and self._family == "llava_onevision"

    def _prepared(self, pixels: Pixels, in_one_tile: bool) -> Mapping[str, Any]:
        """What the image processor makes of one image."""
        options = {**self._options, "input_data_format": "channels_last"}
        try:
            found = dict(self._processor.image_processor([[pixels] * 2] if in_one_tile else [pixels], **options))
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise UserError(
                f"an image of {pixels.shape[0]} x {pixels.shape[1]} pixels: the model's processor refuses it: "
                f"{' '.join(str(error).split())}"
            ) from error
        if in_one_tile:
            found |= {name: found[name][:1] for name in ("pixel_values", "image_sizes")}
        return found


def processors(family: str, folder: Path, tokenizer: Any) -> dict[str, KindProcessor]:
    """Of preprocessor_config.json and processor_config.json."""
    settings = read_settings(folder, "image_processor")
    found = [read_json(folder / name) for name in FILES[:2]]
    videos = found[1].get("video_processor") or read_json(folder / VIDEO_FILE) or found[0]
    return _both(make_processor(family, settings, {**found[0], **found[1]}, tokenizer), family, videos)


def built_processors(build: BuildModel, tokenizer: Any) -> dict[str, KindProcessor]:
    assert build.vision is not None
    edge = build.vision.image_size**2
    settings = {
        "patch_size": build.vision.patch_size,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": edge, "longest_edge": edge},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    videos = {**settings, "size": {"shortest_edge": 2 * edge, "longest_edge": 16 * edge}}  # of all frames together
    return _both(make_processor("qwen3_vl", settings, {}, tokenizer), "qwen3_vl", videos)


def _both(processor: Any, family: str, videos: Mapping[str, Any]) -> dict[str, KindProcessor]:
    images = Images(processor, family)
    if "video" not in FAMILIES[family].kinds:
        return {"image": images}
    processor.video_processor = VideoProcessor(family, videos)
    return {"image": images, "video": Videos(processor, images.features)}


def make_processor(family: str, image: Mapping[str, Any], settings: Mapping[str, Any], tokenizer: Any) -> Any:
    """The processor of transformers. It insists on a video processor, which needs torchvision: it gets none."""
    name, module, kind = PROCESSORS[family]
    transformers = importlib.import_module("transformers")
    pictures = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    lenient = type(name, (getattr(transformers, name),), {"check_argument_for_proper_class": lambda *_: None})
    unused = ("processor_class", "image_processor_type", "feature_extractor_type", "auto_map")
    image_processor = getattr(pictures, kind)(**{k: v for k, v in image.items() if k not in unused})
    video = {} if family in ("gemma3", "idefics3") else {"video_processor": None}
    options = {name: settings[name] for name in SETTINGS if name in settings}
    return lenient(image_processor=image_processor, tokenizer=tokenizer, **video, **options)


# ---- network -------------------------------------------------------------------------------------------------------


def build_network(build: BuildModel, tokenizer: Any, decoder: dict[str, Any]) -> Any:
    """A small Qwen3-VL. Its vision tower also feeds the first decoder layer directly, as in the large ones."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision, token, pairs = build.vision, tokenizer.convert_tokens_to_ids, build.hidden_size // build.heads // 2
    assert vision is not None
    across = pairs // 3
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [pairs - 2 * across, across, across],
        "mrope_interleaved": True,
    }
    tower = {
        "depth": vision.layers,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.intermediate_size,
        "num_heads": vision.heads,
        "patch_size": vision.patch_size,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": build.hidden_size,
        "num_position_embeddings": (vision.image_size // vision.patch_size) ** 2,
        "deepstack_visual_indexes": [0],
    }
    attention: dict[str, Any] = {"attn_implementation": "sdpa"}
    config = Qwen3VLConfig(
        text_config={**decoder, "rope_parameters": rope},
        vision_config=tower,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        **attention,
    )
    return Qwen3VLForConditionalGeneration(config)


def encode(network: Any, media: Sequence[Media]) -> list[tuple[Tensor, ...]]:
    import torch

    family, model = network.config.model_type, network.model
    if FAMILIES[family].grid:
        return _encode_grids(model, [medium.tensors() for medium in media], network.device)
    tensors = [{name: torch.from_numpy(np.array(a)) for name, a in medium.tensors().items()} for medium in media]
    inputs = [{name: t.to(network.device) for name, t in own.items()} for own in tensors]
    if family in TILES_OF_ONE_SIZE:
        sizes = [len(own["pixel_values"]) for own in inputs]
        found = model.get_image_features(torch.cat([own["pixel_values"] for own in inputs]), **_options(network))
        return [(part.flatten(0, 1),) for part in found.pooler_output.split(sizes)]
    return [(_encode_alone(network, own),) for own in inputs]


def _encode_grids(
    model: Any, tensors: Sequence[Mapping[str, np.ndarray]], device: torch.device
) -> list[tuple[Tensor, ...]]:
    """The host knows the grids and waits for nothing: what depends on them alone is made there."""
    import torch

    given = [own["pixel_values"] for own in tensors]
    pixels = torch.empty(sum(map(len, given)), given[0].shape[1], pin_memory=device.type == "cuda")
    np.concatenate(given, out=pixels.numpy())
    grids = torch.from_numpy(np.concatenate([own["image_grid_thw"] for own in tensors]))
    numbers = _numbers_of(tuple(map(tuple, grids.tolist())), *_traits_of(model.visual))
    more = {f"image_{n}": on_device(v, device) if isinstance(v, np.ndarray) else v for n, v in numbers.items()}
    found = model.get_image_features(pixels.to(device, non_blocking=True), grids, **more)
    sizes = [len(part) for part in found.pooler_output]
    layers = getattr(found, "deepstack_features", None) or ()  # transformers 5.17 does not divide them among the media
    parts = [layer.split(sizes) if isinstance(layer, torch.Tensor) else layer for layer in layers]
    return list(zip(found.pooler_output, *parts, strict=True))


def _traits_of(tower: Any) -> tuple[int, tuple[int, int] | None, tuple[int, str, bool] | None]:
    """Patches per edge of a feature; windows of attention: their edge in pixels, and that of a patch; the table of
    positions: its edge, and how values between its entries are made."""
    windows = (tower.window_size, tower.patch_size) if hasattr(tower, "window_size") else None
    table = None
    if hasattr(tower, "num_grid_per_side"):
        table = (tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners)
    return tower.spatial_merge_size, windows, table


@functools.lru_cache(maxsize=64)
def _numbers_of(
    grids: tuple[tuple[int, int, int], ...],
    merge: int,
    windows: tuple[int, int] | None,
    table: tuple[int, str, bool] | None,
) -> dict[str, np.ndarray | int]:
    """Arguments of a tower of transformers that it would compute from the grids."""
    import torch
    from transformers import vision_utils as of

    grid_thw = torch.tensor(grids)
    starts = {"cu_seqlens": of.get_vision_cu_seqlens(grid_thw)}
    found = {"position_ids": of.get_vision_position_ids(grid_thw, merge)}
    if windows is not None:
        found["window_index"], starts["cu_window_seqlens"] = of.get_vision_window_index(grid_thw, merge, *windows)
    if table is not None:
        side, mode, corners = table
        of_table = of.get_vision_interpolation_indices_and_weights(grid_thw, side, mode, corners, merge)
        found["interp_indices"], found["interp_weights"] = of_table
    longest = {name.replace("cu_", "max_").removesuffix("s"): _longest(each) for name, each in starts.items()}
    return {**{name: each.numpy() for name, each in {**found, **starts}.items()}, **longest}


def _longest(ends: Tensor) -> int:
    """The next power of two: attention only needs a bound, and compiled layers see few different values."""
    return 1 << max(7, int(ends.diff().max() - 1).bit_length())


def _encode_alone(network: Any, own: dict[str, Tensor]) -> Tensor:
    import torch

    if network.config.model_type == "llava_onevision":
        options = {name: own[name] for name in ("image_sizes", "batch_num_images")}
        found = network.model.get_image_features(own["pixel_values"], **options, **_options(network))
        part = found.pooler_output[0]
        return part if isinstance(part, torch.Tensor) else torch.cat(list(part))
    mask = own.get("pixel_attention_mask")
    found = network.model.get_image_features(own["pixel_values"], pixel_attention_mask=mask)
    return found.pooler_output.flatten(0, 1)


def _options(network: Any) -> dict[str, Any]:
    names = ("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio")
    return {name: getattr(network.config, name) for name in names if hasattr(network.config, name)}


def smallest(network: Any) -> Media:
    vision, family = network.config.vision_config, network.config.model_type
    if FAMILIES[family].grid:
        merge = vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        inputs = {
            "pixel_values": np.ones((merge**2, width), np.float32),
            "image_grid_thw": np.array([[1, merge, merge]]),
        }
    else:
        edges = vision.image_size if isinstance(vision.image_size, list | tuple) else (vision.image_size,) * 2
        pixels = np.ones((1, 3, *edges), np.float32)
        inputs = {"pixel_values": pixels if family in TILES_OF_ONE_SIZE else pixels[None]}
        inputs |= {"image_sizes": np.array([edges]), "batch_num_images": np.array([2])}
    return Media("image", "", np.zeros((1, 1, 3), np.uint8), inputs)
