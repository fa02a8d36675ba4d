"""The KV cache of the embedded engine: one row per sequence, active rows first."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class LayerState:
    """The states of a recurrent layer, [rows, ...] each: of convolutions and of the recurrence. A layer of transformers
    finds both here by number, and replaces or changes them in a forward pass."""

    record_past = False

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        self._conv: dict[int, Tensor] = {}
        self._recurrent: dict[int, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        return [*self._conv.values(), *self._recurrent.values()]

    @property
    def conv_states(self) -> dict[int, Tensor]:
        return {number: state[self._cache.active] for number, state in self._conv.items()}

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        return {number: state[self._cache.active] for number, state in self._recurrent.items()}

    def update_conv_state(self, new_BDW: Tensor, number: int, conv_kernel_size: int | None = None) -> Tensor:
        """Returns the new inputs after those that the kernel still sees. Keeps the last ones."""
        width = conv_kernel_size or new_BDW.shape[-1]
        if self._cache.continues:
            whole = torch.cat([self.conv_states[number], new_BDW], -1)
        else:
            whole = torch.nn.functional.pad(new_BDW, (max(width - new_BDW.shape[-1], 0), 0))
        self._put(self._conv, number, whole[..., -width:])
        return whole

    def update_recurrent_state(self, state: Tensor, number: int) -> Tensor:
        self._put(self._recurrent, number, state)
        return state

    def _put(self, states: dict[int, Tensor], number: int, state: Tensor) -> None:
        if number not in states:
            states[number] = state.new_zeros(self._cache.num_rows, *state.shape[1:])
        states[number][self._cache.active] = state

    def grow(self, num_rows: int) -> None:
        for states in (self._conv, self._recurrent):
            for number, old in states.items():
                states[number] = torch.cat([old, old.new_zeros(num_rows - len(old), *old.shape[1:])])


class RowCache(Cache):
    """Keys and values as [rows, heads, length, dim] per layer, and the states of recurrent layers. Implements the Cache
    of transformers.

    Before each forward pass the engine calls `begin_prefill` (these rows, from one position on) or `begin_step` (one
    more token for each of the first n rows, each at its own position).
    """

    def __init__(self, num_layers: int) -> None:
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.index_keys: list[Tensor | None] = [None] * num_layers  # of indexers that choose what attention sees
        self.states = [LayerState(self) for _ in range(num_layers)]
        self.layers: Any = self.states  # transformers finds them here
        self.num_rows = self.length = self.read_length = 0
        self._rows: Tensor | None = None  # rows of the current prefill; None in a decoding step
        self._start = 0  # of the current prefill
        self._num_active = 0
        self._step_rows: Tensor | None = None
        self._write_at: Tensor | None = None

    @property
    def active(self) -> Tensor | slice:
        """The rows of the current forward pass."""
        return slice(self._num_active) if self._rows is None else self._rows

    @property
    def continues(self) -> bool:
        """Whether these rows have tokens in the cache before those of the current forward pass."""
        return self._rows is None or self._start > 0

    @property
    def _tensors(self) -> list[Tensor]:
        states = [tensor for layer in self.states for tensor in layer.tensors]
        return states + [tensor for tensors in self._by_token for tensor in tensors if tensor is not None]

    @property
    def _by_token(self) -> tuple[list[Tensor | None], ...]:
        return self.keys, self.values, self.index_keys

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def reserve(self, num_rows: int, length: int) -> None:
        """Grow to at least this size and keep the contents."""
        if num_rows <= self.num_rows and length <= self.length:
            return
        self.num_rows, self.length = max(num_rows, self.num_rows), max(length, self.length)
        for tensors in self._by_token:
            for i, old in enumerate(tensors):
                if old is not None:
                    new = old.new_zeros(self.num_rows, old.shape[1], self.length, old.shape[3])
                    new[: old.shape[0], :, : old.shape[2]] = old
                    tensors[i] = new
        for layer in self.states:
            layer.grow(self.num_rows)

    def begin_prefill(self, rows: Tensor, width: int, start: int = 0) -> None:
        """Of the tokens from `start` to `width`. Those before `start` are in the cache."""
        self.reserve(0, width)
        self._rows, self._start, self.read_length = rows, start, width

    def begin_step(self, positions_B: Tensor, read_length: int) -> None:
        self._rows, self.read_length = None, read_length
        self._num_active = len(positions_B)
        self._step_rows = torch.arange(len(positions_B), device=positions_B.device)
        self._write_at = positions_B

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._write(self.keys, layer_idx, key_states), self._write(self.values, layer_idx, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        return self._write(self.index_keys, layer_idx, indexer_key_states[:, None])[:, 0]

    def write_step(self, layer: int, keys_BHD: Tensor, values_BHD: Tensor) -> tuple[Tensor, Tensor]:
        """Add one token per row. Returns all keys and values that the rows may attend to."""
        return self.update(keys_BHD[:, :, None], values_BHD[:, :, None], layer)

    def _write(self, tensors: list[Tensor | None], layer: int, new_BHWD: Tensor) -> Tensor:
        """Of the current forward pass. Returns what its tokens may attend to."""
        if (kept := tensors[layer]) is None:
            heads, dim = new_BHWD.shape[1], new_BHWD.shape[3]
            kept = tensors[layer] = new_BHWD.new_zeros(self.num_rows, heads, self.length, dim)
        if self._rows is None:
            kept[self._step_rows, :, self._write_at] = new_BHWD[:, :, 0]
            return kept[: len(new_BHWD), :, : self.read_length]
        kept[self._rows, :, self._start : self.read_length] = new_BHWD
        return kept[self._rows, :, : self.read_length] if self._start else new_BHWD

    def copy_row(self, source: int, targets: list[int], length: int) -> None:
        for tensors in self._by_token:
            for tensor in tensors:
                if tensor is not None:
                    tensor[targets, :, :length] = tensor[source, :, :length]
        for layer in self.states:
            for tensor in layer.tensors:
                tensor[targets] = tensor[source].clone()

    @property
    def has_states(self) -> bool:
        return any(layer.tensors for layer in self.states)

    def clear_states(self, row: int) -> None:
        for layer in self.states:
            for tensor in layer.tensors:
                tensor[row] = 0

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return self.states[layer_idx].update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return self.states[layer_idx].update_recurrent_state(recurrent_states, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.continues

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """As MiniMax names the state of its recurrent layers."""
        return self.states[layer_idx].recurrent_states[0] if self.continues else None

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.states[layer_idx].update_recurrent_state(state, 0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.read_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.read_length, 0


def make_cache(network: Any) -> RowCache:
    config = network.config.get_text_config()
    if config.model_type != "minimax":
        return RowCache(config.num_hidden_layers)
    from transformers.models.minimax.modeling_minimax import MiniMaxCache  # it accepts no other class

    made: RowCache = type("MiniMaxRowCache", (RowCache, MiniMaxCache), {})(config.num_hidden_layers)
    return made


def cache_argument(decoder: Any) -> str:
    """Of its forward pass."""
    return "cache_params" if "cache_params" in inspect.signature(decoder.forward).parameters else "past_key_values"
