"""The StepModel of language models that take media: tokens and media -> logprobs and entropies of the selected steps.

samples ──pack──> tokens, positions of each sample, its media (siblings share them) ──tower, once per medium
                  ──> features at their places ──> decoder, as for text (logprob_model.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
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
from gcore.types import Key, MicroBatch, Sample, UserError


@dataclass(frozen=True, slots=True)
class Seen:
    """The media of a micro-batch. `places`: of each medium of each sample, flat indices into the tokens; `keys`: which
    medium is there."""

    media: Mapping[str, Media]  # each once
    keys: tuple[str, ...]
    places: tuple[Tensor, ...]
    positions: Tensor  # [axes, rows, width], or [rows, width]


@dataclass(frozen=True, slots=True)
class PackedMedia(Packed):
    seen: Seen = field(kw_only=True)


class MediaLogprobModel(LogprobModel):
    """Implements step_model.StepModel."""

    def __init__(self, network: Any, compute: Compute = ON_CPU) -> None:
        super().__init__(network, compute)
        self.varlen = self.varlen and not self.traits.media_blocks
        self.encoded = 0  # media that the tower has computed

    def check_sharing(self, num_ranks: int) -> None:
        if num_ranks > 1:
            raise UserError(
                f"training.context_parallel={num_ranks}: ranks cannot share a sample of a model that takes media; "
                "expected 1"
            )

    def pack(self, micro: MicroBatch, samples: Mapping[Key, Sample], ranks: context.RowGroup) -> PackedMedia:
        packed = super().pack(micro, samples, ranks)
        tokens_RW = packed.tokens_RW
        kept = {field.name: getattr(packed, field.name) for field in fields(packed)}
        positions, keys, places, media = _Positions(self.network.config, tokens_RW), [], [], list[Media]()
        contents = [] if packed.is_padding else [tokens_of(samples[key].content) for key in packed.keys]
        first = 0
        select = packed.select_S.cpu().numpy()
        for content in contents:  # the first selected position is that of the prompt's last token
            start = int(select[first]) - len(content.tokens_P) + 1
            first += content.num_steps
            positions.put(start, content.size, content.media)
            for medium in content.media:
                places.append(torch.from_numpy(medium.places.astype(np.int64) + start).to(tokens_RW.device))
                keys.append(medium.key)
            media.extend(content.media)
        seen = Seen(unique(media), tuple(keys), tuple(places), positions.tensor())
        return PackedMedia(**kept, seen=seen)

    def _inputs(self, packed: Packed) -> dict[str, Any]:
        assert isinstance(packed, PackedMedia)
        inputs, tokens_RW, seen = super()._inputs(packed), packed.tokens_RW, packed.seen
        del inputs["input_ids"]
        found = encode(self.network, list(seen.media.values())) if seen.media else []
        self.encoded += len(found)
        features = dict(zip(seen.media, found, strict=True))
        inputs |= embed(self.network, tokens_RW, seen.places, [features[key] for key in seen.keys])
        if not found and self._tower_learns:  # all ranks must have gradients of the same parameters
            (unused,) = encode(self.network, [smallest_medium(self.network)])
            inputs["inputs_embeds"] = inputs["inputs_embeds"] + sum(0.0 * part.sum() for part in unused)
        inputs["position_ids"] = seen.positions
        if self.traits.media_blocks and seen.places:
            causal = torch.ones(tokens_RW.shape[1:] * 2, dtype=torch.bool, device=tokens_RW.device).tril()
            whole = causal.expand(len(tokens_RW), 1, -1, -1) if packed.mask_R1WW is None else packed.mask_R1WW
            inputs["attention_mask"] = self._masks(whole, blocks_of(tokens_RW.shape, seen.places))
        return inputs

    @property
    def _tower_learns(self) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in tower_parameters(self.network).values())


class _Positions:
    """Of all tokens of a micro-batch, sample by sample."""

    def __init__(self, config: Any, tokens_RW: Tensor) -> None:
        self._config, self._shape, self._device = config, tuple(tokens_RW.shape), tokens_RW.device
        axes = positions_of(config, 0, ()).shape[0]
        self._flat = np.zeros((axes, tokens_RW.numel()), np.int64)

    def put(self, start: int, length: int, media: tuple[Media, ...]) -> None:
        self._flat[:, start : start + length] = positions_of(self._config, length, media)

    def tensor(self) -> Tensor:
        found = torch.from_numpy(self._flat).view(-1, *self._shape).to(self._device)
        return found if len(found) > 1 else found[0]
