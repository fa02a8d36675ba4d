"""The StepModel of language models that take media: tokens and media -> logprobs and entropies of the selected steps.

samples ──pack──> tokens, positions of each sample, its media (siblings share them) ──tower, once per medium
                  ──> features at their places ──> decoder, as for text (logprob_model.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcore.content.families import FAMILIES
from gcore.content.media import NO_PLACES, Media, on_device
from gcore.content.tokens import tokens_of
from gcore.models.towers import (
    blocks_of,
    embed,
    encode,
    positions_of,
    prepare,
    smallest_medium,
    tower_layers,
    tower_parameters,
    unique,
)
from gcore.training import attention, context
from gcore.training.logprob_model import LogprobModel, Packed
from gcore.training.step_model import ON_CPU, Compute
from gcore.types import Key, MicroBatch, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMedia(Packed):
    """The media of all samples, one after another: siblings have the same ones."""

    media: tuple[Media, ...]
    places: tuple[Tensor, ...]  # of each medium: flat indices into the tokens
    positions: Tensor  # [axes, rows, width], or [rows, width]


class MediaLogprobModel(LogprobModel):
    """Implements step_model.StepModel."""

    def __init__(self, network: Any, compute: Compute = ON_CPU) -> None:
        super().__init__(network, compute)
        if self.varlen and FAMILIES[network.config.model_type].grid:  # instead of one call per image or window
            network.model.visual.config._attn_implementation = attention.OF_TOWERS
        self.varlen = self.varlen and not self.traits.media_blocks
        prepare(network)
        for layer in tower_layers(network) if compute.compiled else ():
            layer.compile()
        self.encoded = 0  # media that the tower has computed

    def pack(self, micro: MicroBatch, samples: Mapping[Key, Sample], ranks: context.RowGroup) -> PackedMedia:
        assert ranks.size == 1, "modalities/media_keys.py refuses samples that are shared by ranks"
        packed, config, device = super().pack(micro, samples, ranks), self.network.config, self.compute.device
        axes, places, media = len(positions_of(config, 0, ())), [NO_PLACES.astype(np.int64)], list[Media]()
        positions, known = np.zeros((axes, packed.tokens_RW.numel()), np.int64), set[int]()
        for key, path in () if packed.is_padding else zip(packed.keys, packed.paths, strict=True):
            content = tokens_of(samples[key].content)
            positions[:, path] = positions_of(config, content.size, content.media)
            for medium in content.media:
                if int(path[medium.places[0]]) not in known:  # in a prefix that samples share
                    known.add(int(path[medium.places[0]]))
                    places.append(path[medium.places])
                    media.append(medium)
        all_axes = on_device(positions, device).view(-1, *packed.tokens_RW.shape)
        all_places = on_device(np.concatenate(places), device).split([len(each) for each in places])
        return PackedMedia(
            **{field.name: getattr(packed, field.name) for field in fields(packed)},
            media=tuple(media),
            places=all_places[1:],
            positions=all_axes if axes > 1 else all_axes[0],
        )

    def _inputs(self, packed: Packed) -> dict[str, Any]:
        assert isinstance(packed, PackedMedia)
        inputs, tokens_RW, media = super()._inputs(packed), packed.tokens_RW, unique(packed.media)
        del inputs["input_ids"]
        encoded = encode(self.network, list(media.values())) if media else []
        self.encoded += len(encoded)
        features = dict(zip(media, encoded, strict=True))
        inputs |= embed(self.network, tokens_RW, packed.places, [features[medium.key] for medium in packed.media])
        if not media and self._tower_learns:  # all ranks must have gradients of the same parameters
            (unused,) = encode(self.network, [smallest_medium(self.network)])
            inputs["inputs_embeds"] = inputs["inputs_embeds"] + sum(0.0 * part.sum() for part in unused)
        inputs["position_ids"] = packed.positions
        if self.traits.media_blocks and packed.places:
            causal = torch.ones(tokens_RW.shape[1:] * 2, dtype=torch.bool, device=tokens_RW.device).tril()
            whole = causal.expand(len(tokens_RW), 1, -1, -1) if packed.mask_R1WW is None else packed.mask_R1WW
            inputs["attention_mask"] = self._masks(whole, blocks_of(tokens_RW.shape, packed.places))
        return inputs

    @property
    def _tower_learns(self) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in tower_parameters(self.network).values())
