"""The KV cache of the embedded engine: one row per sequence, active rows first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class RowCache(Cache):
    """Keys and values as [rows, heads, length, dim] per layer. Implements the Cache of transformers.

    Before each forward pass the engine calls `begin_prefill` (these rows, from one position on) or `begin_step` (one
    more token for each of the first n rows, each at its own position).
    """

    def __init__(self, num_layers: int) -> None:
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.layers = []  # transformers reads layer kinds from here; none of them applies
        self.num_rows = self.length = self.read_length = 0
        self._rows: Tensor | None = None  # rows of the current prefill; None in a decoding step
        self._start = 0  # of the current prefill
        self._step_rows: Tensor | None = None
        self._write_at: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values) if tensor is not None)

    def reserve(self, num_rows: int, length: int) -> None:
        """Grow to at least this size and keep the contents."""
        if num_rows <= self.num_rows and length <= self.length:
            return
        self.num_rows, self.length = max(num_rows, self.num_rows), max(length, self.length)
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                if old is not None:
                    new = old.new_zeros(self.num_rows, old.shape[1], self.length, old.shape[3])
                    new[: old.shape[0], :, : old.shape[2]] = old
                    tensors[i] = new

    def begin_prefill(self, rows: Tensor, width: int, start: int = 0) -> None:
        """Of the tokens from `start` to `width`. Those before `start` are in the cache."""
        self.reserve(0, width)
        self._rows, self._start, self.read_length = rows, start, width

    def begin_step(self, positions_B: Tensor, read_length: int) -> None:
        self._rows, self.read_length = None, read_length
        self._step_rows = torch.arange(len(positions_B), device=positions_B.device)
        self._write_at = positions_B

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._rows is None:
            return self.write_step(layer_idx, key_states[:, :, 0], value_states[:, :, 0])
        keys, values = self._at(layer_idx, key_states, value_states)
        keys[self._rows, :, self._start : self.read_length] = key_states
        values[self._rows, :, self._start : self.read_length] = value_states
        if not self._start:
            return key_states, value_states
        return keys[self._rows, :, : self.read_length], values[self._rows, :, : self.read_length]

    def write_step(self, layer: int, keys_BHD: Tensor, values_BHD: Tensor) -> tuple[Tensor, Tensor]:
        """Add one token per row. Returns all keys and values that the rows may attend to."""
        keys, values = self._at(layer, keys_BHD, values_BHD)
        keys[self._step_rows, :, self._write_at] = keys_BHD
        values[self._step_rows, :, self._write_at] = values_BHD
        n = len(keys_BHD)
        return keys[:n, :, : self.read_length], values[:n, :, : self.read_length]

    def _at(self, layer: int, like_keys: Tensor, like_values: Tensor) -> tuple[Tensor, Tensor]:
        for tensors, like in ((self.keys, like_keys), (self.values, like_values)):
            if tensors[layer] is None:
                tensors[layer] = like.new_zeros(self.num_rows, like.shape[1], self.length, like.shape[-1])
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None and values is not None
        return keys, values

    def copy_row(self, source: int, targets: list[int], length: int) -> None:
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                if tensor is not None:
                    tensor[targets, :, :length] = tensor[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.read_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.read_length, 0
