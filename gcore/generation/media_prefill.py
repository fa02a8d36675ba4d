"""Media in the prompts of the embedded engine: their features, computed once for all requests that have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcore.content.tokens import Tokens
from gcore.models.decoders import Traits
from gcore.models.towers import Features, blocks_of, embed, encode, next_position, positions_of, prepare, unique

MAX_KEPT = 1 << 24  # tokens x width of the features that are kept for later requests


class MediaPrefill:
    """The inputs of the decoder for prompts with media. Features are kept until the weights change: the siblings of a
    prompt may come later."""

    def __init__(self, network: Any, traits: Traits) -> None:
        self._network, self._traits = network, traits
        prepare(network)
        self._features: dict[str, Features] = {}
        self.encoded = 0  # media that the tower has computed

    def forget(self) -> None:
        """The weights have changed."""
        self._features.clear()

    def offset(self, content: Tokens) -> int:
        """What is added to the number of a token after the content to get its position."""
        return next_position(self._network.config, content.size, content.media) - content.size

    def _positions(self, content: Tokens, length: int) -> np.ndarray:
        return positions_of(self._network.config, length, content.media)

    def inputs(self, tokens_BW: Tensor, contents: Sequence[Tokens]) -> tuple[dict[str, Any], Tensor, Tensor | None]:
        """The decoder's inputs, the positions of the tokens, and which pairs of features see each other if that differs
        from causal attention. Row i of `tokens_BW` is the prompt of contents[i] without its last token."""
        width, device = tokens_BW.shape[1], tokens_BW.device
        media = [medium for content in contents for medium in content.media]
        if sum(f[0].numel() for f in self._features.values()) > MAX_KEPT:
            self._features.clear()
        new = [medium for key, medium in unique(media).items() if key not in self._features]
        if new:
            self.encoded += len(new)
            found = encode(self._network, new)
            self._features |= {medium.key: features for medium, features in zip(new, found, strict=True)}
        places = [
            torch.from_numpy(medium.places.astype(np.int64) + row * width).to(device)
            for row, content in enumerate(contents)
            for medium in content.media
        ]
        positions = [_padded(self._positions(content, content.size - 1), width) for content in contents]
        positions_ABW = torch.from_numpy(np.stack(positions, 1)).to(device)
        blocks = None
        if self._traits.media_blocks and places:
            blocks = blocks_of((len(contents), width), places)
        inputs = embed(self._network, tokens_BW, places, [self._features[medium.key] for medium in media])
        return inputs, positions_ABW if len(positions_ABW) > 1 else positions_ABW[0], blocks


def _padded(positions: np.ndarray, width: int) -> np.ndarray:
    return np.pad(positions, ((0, 0), (0, width - positions.shape[1])))
