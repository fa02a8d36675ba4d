"""Families of models that take images, some of them also videos (videos.py).

The processors of transformers are used, with their image processors for Pillow: the others need torchvision. Each image
is processed alone, so its tensors do not depend on the other images of a prompt.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore.config.base import BuildModel
from gcore.content.families import FAMILIES, built_family
from gcore.content.media import Media, on_device
from gcore.content.processor import FILES, Expanded, KindProcessor, read_json, read_settings
from gcore.media.videos import VIDEO_FILE, VideoProcessor, Videos, tower_work
from gcore.types import Pixels, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

QWEN = ("qwen2_vl", "Qwen2VLImageProcessorPil")
PROCESSORS = {  # class in transformers; transformers.models.MODULE.image_processing_pil_MODULE, and the class there
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", *QWEN),
    **dict.fromkeys(("qwen3_vl", "qwen3_5", "qwen3_5_moe", "qwen4_exp"), ("Qwen3VLProcessor", *QWEN)),
    "gemma3": ("Gemma3Processor", "gemma3", "Gemma3ImageProcessorPil"),
    "gemma4": ("", "gemma4", "Gemma4ImageProcessorPil"),  # its processor needs torchvision
    "llama4": ("Llama4Processor", "llama4", "Llama4ImageProcessor"),
    "internvl": ("InternVLProcessor", "got_ocr2", "GotOcr2ImageProcessorPil"),
    "idefics3": ("Idefics3Processor", "idefics3", "Idefics3ImageProcessorPil"),
    "smolvlm": ("SmolVLMProcessor", "smolvlm", "SmolVLMImageProcessorPil"),
    "llava_onevision": ("LlavaOnevisionProcessor", "llava_onevision", "LlavaOnevisionImageProcessorPil"),
}
NEED_TORCHVISION = ("llama4",)  # transformers has no image processor for Pillow
INPUTS = (
    *("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_sizes", "batch_num_images"),
    "image_position_ids",
)
SETTINGS = (
    *("patch_size", "pixel_shuffle_ratio", "image_seq_len", "image_seq_length", "num_image_tokens"),
    "vision_feature_select_strategy",
)
TILES_OF_ONE_SIZE = ("gemma3", "internvl", "llama4")


class Images:
    """Implements content.processor.KindProcessor. `processor`: of transformers."""

    def __init__(self, processor: Any, family: str) -> None:
        self._processor, self._family = processor, family
        self.placeholder: str = processor.image_token
        self._options: dict[str, Any] = {}
        if PROCESSORS[family][0]:
            settings = processor._merge_kwargs(processor.valid_processor_kwargs, tokenizer_init_kwargs={})
            self._options |= settings["images_kwargs"]
        self._options["return_tensors"] = "pt" if family in NEED_TORCHVISION else None
        tokenizer = processor.tokenizer
        # of Gemma, the placeholder is the mark before the features
        mark = getattr(processor, "img_patch_token", self.placeholder)
        feature = tokenizer.image_token_id if family == "gemma3" else tokenizer.convert_tokens_to_ids(mark)
        self.features: tuple[int, ...] = (int(feature),)

    def variant(self, given: Any, number: int) -> str:
        return str(self._in_one_tile(number))

    def expand(self, array: Pixels, given: Any, number: int) -> Expanded:
        inputs = self._prepared(array, self._in_one_tile(number))
        tensors = {name: _array(inputs[name]) for name in INPUTS if name in inputs}
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


def _array(values: Any) -> np.ndarray:
    """Of Llama 4, a tensor in bfloat16."""
    return np.asarray(values.float() if hasattr(values, "float") else values)


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
    family = str(built_family(build))
    return _both(make_processor(family, settings, {}, tokenizer), family, videos)


def _both(processor: Any, family: str, videos: Mapping[str, Any]) -> dict[str, KindProcessor]:
    images = Images(processor, family)
    if "video" not in FAMILIES[family].kinds:
        return {"image": images}
    processor.video_processor = VideoProcessor(family, videos)
    return {"image": images, "video": Videos(processor, images.features)}


def make_processor(family: str, image: Mapping[str, Any], settings: Mapping[str, Any], tokenizer: Any) -> Any:
    """The processor of transformers. It insists on a video processor, which needs torchvision: it gets none."""
    name, module, kind = PROCESSORS[family]
    if family in NEED_TORCHVISION and importlib.util.find_spec("torchvision") is None:
        raise UserError(f"the image processor of {family} needs torchvision: pip install torchvision")
    pil = "" if family in NEED_TORCHVISION else "pil_"
    pictures = importlib.import_module(f"transformers.models.{module}.image_processing_{pil}{module}")
    unused = ("processor_class", "image_processor_type", "feature_extractor_type", "auto_map")
    image_processor = getattr(pictures, kind)(**{k: v for k, v in image.items() if k not in unused})
    if not name:
        return _Gemma4(image_processor, tokenizer)
    transformers = importlib.import_module("transformers")
    lenient = type(name, (getattr(transformers, name),), {"check_argument_for_proper_class": lambda *_: None})
    video = {} if family in ("gemma3", "idefics3", "llama4") else {"video_processor": None}
    options = {name: settings[name] for name in SETTINGS if name in settings}
    return lenient(image_processor=image_processor, tokenizer=tokenizer, **video, **options)


@dataclass(frozen=True)
class _Gemma4:
    """What Images needs of Gemma4Processor."""

    image_processor: Any
    tokenizer: Any

    @property
    def image_token(self) -> str:
        return str(self.tokenizer.image_token)

    def replace_image_token(self, inputs: Mapping[str, Any], image_idx: int) -> str:
        features = self.image_token * int(inputs["num_soft_tokens_per_image"][image_idx])
        return f"{self.tokenizer.boi_token}{features}{self.tokenizer.eoi_token}"


# ---- network -------------------------------------------------------------------------------------------------------


def build_network(build: BuildModel, tokenizer: Any, decoder: dict[str, Any]) -> Any:
    """The vision tower of a small Qwen3-VL also feeds the first decoder layer directly, as in the large ones. A Qwen3.5
    rotates a quarter of each head."""
    transformers, family = importlib.import_module("transformers"), built_family(build)
    name, share, more = {
        "qwen3_vl": ("Qwen3VL", 1.0, {"deepstack_visual_indexes": [0]}),
        "qwen3_5": ("Qwen3_5", 0.25, {}),
    }[str(family)]
    vision, token = build.vision, tokenizer.convert_tokens_to_ids
    assert vision is not None
    pairs = int(decoder["head_dim"] * share) // 2
    across = pairs // 3
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [pairs - 2 * across, across, across],
        "mrope_interleaved": True,
        **({"partial_rotary_factor": share} if share < 1 else {}),
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
        **more,
    }
    attention: dict[str, Any] = {"attn_implementation": "sdpa"}
    config = getattr(transformers, f"{name}Config")(
        text_config={**decoder, "rope_parameters": rope},
        vision_config=tower,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        **attention,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def encode(network: Any, media: Sequence[Media]) -> list[tuple[Tensor, ...]]:
    import torch

    family, model = network.config.model_type, network.base_model
    if FAMILIES[family].grid:
        return _encode_grids(model, [medium.tensors() for medium in media], network.device)
    tensors = [{name: torch.from_numpy(np.array(a)) for name, a in medium.tensors().items()} for medium in media]
    inputs = [{name: t.to(network.device) for name, t in own.items()} for own in tensors]
    if family == "gemma4":
        pixels, places = (torch.cat([own[name] for own in inputs]) for name in ("pixel_values", "image_position_ids"))
        return [(part,) for part in model.get_image_features(pixels, places).pooler_output]
    if family in TILES_OF_ONE_SIZE:
        pixels, sizes = torch.cat([own["pixel_values"] for own in inputs]), [len(own["pixel_values"]) for own in inputs]
        if family == "llama4":  # the others convert the pixels, and project the tiles
            tiles = network.get_image_features(pixels.to(network.vision_model.dtype)).last_hidden_state
            features = network.multi_modal_projector(tiles)
        else:
            features = model.get_image_features(pixels, **_options(network)).pooler_output
        return [(part.flatten(0, 1),) for part in features.split(sizes)]
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
    elif family == "gemma4":
        edge = vision.pooling_kernel_size
        inputs = {
            "pixel_values": np.ones((1, edge**2, 3 * vision.patch_size**2), np.float32),
            "image_position_ids": np.stack(np.divmod(np.arange(edge**2), edge)[::-1], -1)[None],
        }
    else:
        edges = vision.image_size if isinstance(vision.image_size, list | tuple) else (vision.image_size,) * 2
        pixels = np.ones((1, 3, *edges), np.float32)
        inputs = {"pixel_values": pixels if family in TILES_OF_ONE_SIZE else pixels[None]}
        inputs |= {"image_sizes": np.array([edges]), "batch_num_images": np.array([2])}
    return Media("image", "", np.zeros((1, 1, 3), np.uint8), inputs)
