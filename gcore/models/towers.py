"""The tower of a network that takes media, as engines and trainers compute it: both call the functions here.

    media of several sequences ──unique──> encode: one pass of the tower ──────────> features of each medium
    tokens, features ──embed──> inputs of the decoder         positions: of every token, per sequence

The modules of transformers that join both parts are not called: they find images by their tokens, in a whole batch, and
compute positions for one sequence per row. Here the places of features are part of the content (content/media.py), and
sequences are packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gcore.content.families import FAMILIES, TOWERS, module_of
from gcore.content.media import Media
from gcore.models.decoders import decoder_of

Features = tuple[Tensor, ...]  # of a medium: [places, width], for the embedding, then for layers of the decoder


def takes_media(network: Any) -> bool:
    return network.config.model_type in FAMILIES


def tower_of(network: Any) -> dict[str, Any]:
    """By name: the tower, and what projects its features to the decoder."""
    kinds = FAMILIES[network.config.model_type].kinds
    unused = () if "audio" in kinds else ("audio_tower",)
    prefix = "" if network.base_model is network else "model."  # Llama 4 has no module that joins tower and decoder
    children = network.base_model.named_children()
    return {f"{prefix}{name}": module for name, module in children if name in TOWERS and name not in unused}


def tower_parameters(network: Any) -> dict[str, Any]:
    """By their names in the network."""
    found = {
        f"{name}.{p}": value for name, module in tower_of(network).items() for p, value in module.named_parameters()
    }
    loose = getattr(network.base_model, "image_newline", None)  # of LLaVA-OneVision
    return found if loose is None else {**found, "model.image_newline": loose}


def tower_layers(network: Any) -> list[nn.Module]:
    """The blocks that make up most of the tower."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    every = (layer for tower in tower_of(network).values() for layer in tower.modules())
    return [layer for layer in every if isinstance(layer, GradientCheckpointingLayer)]


def prepare(network: Any) -> None:
    """Replaces two functions of transformers by equal ones that do not hold up a GPU. Patches that are cut already are
    multiplied with the kernel of their convolution: in half precision, cuDNN may convolve patch by patch. Features are
    added to hidden states at their places, of which a mask would have to be searched for them."""
    for tower in tower_of(network).values():
        for layer in tower.modules():
            if isinstance(layer, nn.Conv3d):
                layer.forward = partial(_product, layer)  # type: ignore[method-assign]
    decoder = decoder_of(network)
    if hasattr(decoder, "_deepstack_process"):
        decoder._deepstack_process = partial(_add_features, decoder)


def _product(layer: nn.Conv3d, patches: Tensor) -> Tensor:
    if patches.shape[2:] != layer.kernel_size or layer.groups > 1 or any(layer.padding):
        return nn.Conv3d.forward(layer, patches)
    return linear(patches.flatten(1), layer.weight.flatten(1), layer.bias)[..., None, None, None]


def _add_features(decoder: Any, hidden_RWD: Tensor, at: Tensor, features: Tensor) -> Tensor:
    """`at`: flat indices, from `embed`; a mask in the forward pass of transformers."""
    if at.dtype == torch.bool:
        found: Tensor = type(decoder)._deepstack_process(decoder, hidden_RWD, at, features)
        return found
    return hidden_RWD.flatten(0, 1).index_add(0, at, features.to(hidden_RWD.dtype)).view_as(hidden_RWD)


# ---- positions -----------------------------------------------------------------------------------------------------


def positions_of(config: Any, length: int, media: Sequence[Media]) -> np.ndarray:
    """The positions of the tokens of one sequence: [3, length] for models with a grid, else [1, length]. `config`: of
    the network.

    With a grid, a token of text advances all three axes. The features of an image share a start, are numbered by row
    and column, and advance the axes by the longer edge. Each time of a video's grid is like an image. In Qwen2.5-VL all
    times of a video share a start, and the first axis is the time; the text after it does not wait for that axis, as in
    transformers.
    """
    if config.model_type not in FAMILIES or not FAMILIES[config.model_type].grid:
        return np.arange(length)[None]
    found = np.zeros((3, length), np.int64)
    at, end = 0, 0  # position and token
    for medium in media:
        _, height, width = medium.grid
        for places, times in _blocks(config, medium):
            first = int(places[0])
            found[:, end:first] = at + np.arange(first - end)
            at += first - end
            rows, columns = np.divmod(np.arange(height * width), width)
            ahead = np.stack([np.tile(axis, len(times)) for axis in (np.zeros_like(rows), rows, columns)])
            ahead[0] = np.repeat(times, height * width)
            found[:, places] = at + ahead
            at, end = at + max(height, width), int(places[-1]) + 1
    found[:, end:] = at + np.arange(length - end)
    return found


def _blocks(config: Any, medium: Media) -> list[tuple[np.ndarray, np.ndarray]]:
    """The places of features that share a start, and the position of each time of the grid among them."""
    times = medium.grid[0]
    if FAMILIES[config.model_type].timed and medium.kind == "video":
        step = np.float32(config.vision_config.tokens_per_second) * np.float32(medium.seconds)
        return [(medium.places, (np.arange(times, dtype=np.float32) * step).astype(np.int64))]
    return [(places, np.zeros(1, np.int64)) for places in np.split(medium.places, times)]


def next_position(config: Any, length: int, media: Sequence[Media]) -> int:
    """Of the token after the sequence."""
    return int(positions_of(config, length + 1, media)[0, -1])


# ---- features ------------------------------------------------------------------------------------------------------


def unique(media: Sequence[Media]) -> dict[str, Media]:
    """By key: siblings share the images of their prompt, and their features are computed once."""
    return {medium.key: medium for medium in media}


def encode(network: Any, media: Sequence[Media]) -> list[Features]:
    """The features of each medium."""
    return module_of(network.config.model_type).encode(network, media)


def smallest_medium(network: Any) -> Media:
    """For a rank that has no media, and whose tower learns."""
    return module_of(network.config.model_type).smallest(network)


def embed(network: Any, tokens_RW: Tensor, places: Sequence[Tensor], features: Sequence[Features]) -> dict[str, Any]:
    """Inputs of the decoder of a network that is prepared. `places`: of each medium, flat indices into `tokens_RW`."""
    config, decoder = network.config.get_text_config(), decoder_of(network)
    at = torch.cat(list(places)) if places else tokens_RW.new_zeros(0)
    # placeholders may have no embedding
    flat = tokens_RW.flatten().index_fill(0, at, getattr(config, "pad_token_id", None) or 0)
    more = {}
    if getattr(config, "hidden_size_per_layer_input", 0):  # of Gemma, a second embedding for each layer
        more["per_layer_inputs"] = decoder.get_per_layer_inputs(flat.view(tokens_RW.shape), None)
    if getattr(config, "ple_layer_ids", None):  # of Qwen4-Exp, embeddings of n-grams
        more["ple_input_ids"] = tokens_RW
    embeds = network.get_input_embeddings()(flat)
    if not places:
        return {"inputs_embeds": embeds.view(*tokens_RW.shape, -1), **more}
    layers = [torch.cat(parts).to(embeds.dtype) for parts in zip(*features, strict=True)]
    embeds = embeds.index_copy(0, at, layers[0])
    inputs = {"inputs_embeds": embeds.view(*tokens_RW.shape, -1), **more}
    if len(layers) > 1:
        inputs |= {"visual_pos_masks": at, "deepstack_visual_embeds": layers[1:]}  # see _add_features
    return inputs


def blocks_of(shape: Sequence[int], places: Sequence[Tensor]) -> Tensor:
    """[rows, 1, width, width]: True for two features of the same image. `places` as in `embed`. Features with other
    tokens between them (the parts of an image that was cut) are different images."""
    at = torch.cat(list(places))
    apart = torch.cat([torch.diff(part, prepend=part[:1] - 2) != 1 for part in places])
    image = torch.zeros(shape[0] * shape[1], dtype=torch.int64, device=at.device)
    image[at] = apart.cumsum(0)
    image = image.view(shape[0], shape[1])
    return ((image[:, :, None] == image[:, None, :]) & (image > 0)[:, :, None])[:, None]
