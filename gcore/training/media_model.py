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

from gcore.content.media import Media
from gcore.content.tokens import tokens_of
from gcore.models.towers import blocks_of, embed, encode, positions_of, smallest_medium, tower_parameters, unique
from gcore.training import context
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
        self.varlen = self.varlen and not self.traits.media_blocks
        self.encoded = 0  # media that the tower has computed

    def pack(self, micro: MicroBatch, samples: Mapping[Key, Sample], ranks: context.RowGroup) -> PackedMedia:
        assert ranks.size == 1, "modalities/media_keys.py refuses samples that are shared by ranks"
        packed, config = super().pack(micro, samples, ranks), self.network.config
        tokens_RW, first = packed.tokens_RW, 0
        axes, places, media = len(positions_of(config, 0, ())), list[Tensor](), list[Media]()
        positions = np.zeros((axes, tokens_RW.numel()), np.int64)
        select = packed.select_S.cpu().numpy()
        for key in () if packed.is_padding else packed.keys:
            content = tokens_of(samples[key].content)
            start = int(select[first]) - len(content.tokens_P) + 1  # the prompt's last token predicts the first step
            first += content.num_steps
            positions[:, start : start + content.size] = positions_of(config, content.size, content.media)
            for medium in content.media:
                places.append(torch.from_numpy(medium.places.astype(np.int64) + start).to(tokens_RW.device))
            media.extend(content.media)
        all_axes = torch.from_numpy(positions).view(-1, *tokens_RW.shape).to(tokens_RW.device)
        return PackedMedia(
            **{field.name: getattr(packed, field.name) for field in fields(packed)},
            media=tuple(media),
            places=tuple(places),
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
