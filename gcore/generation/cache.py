"""The KV cache of the embedded engine: one row per sequence, active rows first."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from gcore.models.decoders import CHUNKED, KINDS, SLIDING, layers_of, traits_of

KEY_BLOCK = 32  # keys of a sequence are rounded up to a multiple: see embedded.py


class LayerState:
    """The states of a recurrent layer, [rows, ...] each: of convolutions and of the recurrence. A layer of transformers
    finds both here by number, and replaces or changes them in a forward pass."""

    record_past = False

    def __init__(self, cache: RowCache, number: int) -> None:
        self._cache, self._number = cache, number
        self._conv: dict[int, Tensor] = {}
        self._recurrent: dict[int, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        return [*self._conv.values(), *self._recurrent.values()]

    @property
    def keys(self) -> Tensor:
        """Of attention in this layer, that the current forward pass sees."""
        kept = self._cache.keys[self._number]
        assert kept is not None, "the indexer runs after the cache has the new keys"
        return kept[self._cache.active, :, : self._cache.read_length]

    def get_seq_length(self) -> int:
        return self._cache.read_length

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


class CompressedState(LayerState):
    """Of a layer whose attention sees compressed entries of the tokens before its window, one per `compress_rate`
    tokens (DeepSeek-V4). `compressor`: the module of transformers that makes them. It calls the methods here,
    for its own entries and for those of its indexer.

    In a decoding step the rows are at different places of their entries. The entry that a row is in is computed at
    every token, from the tokens that it has, and is visible from the last one on.
    """

    def __init__(self, cache: RowCache, number: int, compressor: Any) -> None:
        super().__init__(cache, number)
        self._rate = compressor.compress_rate
        self._makers = {"compressor": compressor, "indexer": getattr(compressor, "indexer", None)}
        self._kept: dict[tuple[str, str], Tensor] = {}
        compressor.forward = partial(_hide_unfinished, compressor)

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._kept.values())

    def grow(self, num_rows: int) -> None:
        for key, old in self._kept.items():
            self._kept[key] = torch.cat([old, old.new_zeros(num_rows - len(old), *old.shape[1:])])

    def store_compression_weights(self, name: str, kv_BWD: Tensor, gate_BWD: Tensor) -> tuple[Tensor, Tensor, int]:
        """Inputs of the entries that the new tokens belong to: of those that are complete, or in a decoding step of the
        one that each row is in. And the position of their first token."""
        cache, both = self._cache, []
        for part, new_BWD in (("kv", kv_BWD), ("gate", gate_BWD)):
            kept = self._of(name, part, new_BWD.new_zeros(1, self._rate, new_BWD.shape[2]))
            if (at := cache.write_at) is not None:
                kept[cache.step_rows, at % self._rate] = new_BWD[:, 0]
                both.append(kept[cache.active])
                continue
            whole = torch.cat([kept[cache.active, : cache.start % self._rate], new_BWD], 1)
            complete = whole.shape[1] // self._rate * self._rate
            kept[cache.active, : whole.shape[1] - complete] = whole[:, complete:]
            both.append(whole[:, :complete])
        first = 0 if cache.write_at is not None else cache.start // self._rate * self._rate
        return both[0], both[1], first

    def update_overlap_state(
        self, name: str, kv_BNWD: Tensor, gate_BNWD: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the first of these entries takes from the tokens of the entry before it. Keeps that of the last one."""
        cache, before = self._cache, list[Tensor]()
        for part, whole_BNWD, none in (("kv", kv_BNWD, 0.0), ("gate", gate_BNWD, -torch.inf)):
            last_BWD = whole_BNWD[:, -1, :, :head_dim]
            kept = self._of(name, f"{part} before", last_BWD[:1])
            before.append(kept[cache.active].clone())
            if (at := cache.write_at) is not None:
                before[-1][at < self._rate] = none
                last_BWD = torch.where((at % self._rate == self._rate - 1)[:, None, None], last_BWD, before[-1])
            kept[cache.active] = last_BWD
        return (None, None) if cache.write_at is None and cache.start < self._rate else (before[0], before[1])

    def update_compressor_states(self, name: str, new_BND: Tensor) -> Tensor:
        """All entries, with the new ones."""
        cache, most = self._cache, -(-self._cache.length // self._rate)
        kept = self._of(name, "entries", new_BND.new_zeros(1, most, new_BND.shape[2]))
        if kept.shape[1] < most:
            kept = self._kept[name, "entries"] = torch.nn.functional.pad(kept, (0, 0, 0, most - kept.shape[1]))
        if (at := cache.write_at) is not None:
            kept[cache.step_rows, at // self._rate] = self._rotated(name, new_BND, at)[:, 0]
            return kept[cache.active, : -(-cache.read_length // self._rate)]
        first = cache.start // self._rate
        kept[cache.active, first : first + new_BND.shape[1]] = new_BND
        return kept[cache.active, : first + new_BND.shape[1]]

    def _rotated(self, name: str, entry_B1D: Tensor, at: Tensor) -> Tensor:
        """The compressor gives all rows the same position, 0."""
        maker = self._makers[name]
        first = (at // self._rate * self._rate)[:, None]
        cos, sin = maker.rotary_emb(entry_B1D, position_ids=first, layer_type=maker.rope_layer_type)
        rotate = sys.modules[type(maker).__module__].apply_rotary_pos_emb
        rotated: Tensor = rotate(entry_B1D[:, None], cos, sin)[:, 0]
        return rotated

    def _of(self, name: str, part: str, like: Tensor) -> Tensor:
        if (name, part) not in self._kept:
            self._kept[name, part] = like.new_zeros(self._cache.num_rows, *like.shape[1:])
        return self._kept[name, part]


def _hide_unfinished(
    compressor: Any, hidden_BWD: Tensor, query: Tensor, position_BW: Tensor, *rest: Any
) -> tuple[Tensor, Tensor | None]:
    """In a decoding step, some compressors show all entries."""
    entries_B1ED, bias = type(compressor).forward(compressor, hidden_BWD, query, position_BW, *rest)
    if bias is None and (number := entries_B1ED.shape[2]):
        finished_BW = (position_BW + 1) // compressor.compress_rate
        later = torch.arange(number, device=position_BW.device) >= finished_BW[..., None]
        bias = entries_B1ED.new_zeros(later.shape).masked_fill(later, -torch.inf)[:, None]
    return entries_B1ED, bias


class RowCache(Cache):
    """Keys and values as [rows, heads, length, dim] per layer, and the states of recurrent layers. Implements the Cache
    of transformers.

    Before each forward pass the engine calls `begin_prefill` (these rows, from one position on) or `begin_step` (one
    more token for each of the first n rows, each at its own position; or `begin_blocks`, several more).

    Proposed tokens that are rejected need no removal: masks hide what is behind a row's last position, until the next
    tokens are written over it. States cannot go back like that: their models get no proposals.

    A layer with a window or chunks keeps as many keys as it can see, rounded up: `rings`, by the kind of layer. The key
    at position p is in place p modulo that number, and replaces one that no token sees any more.
    """

    def __init__(self, num_layers: int, filler: int = 0, rings: Mapping[str, int] | None = None) -> None:
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.index_keys: list[Tensor | None] = [None] * num_layers  # of indexers that choose what attention sees
        self._positions: list[Tensor | None] = [None]  # [rows, 3, length, 1], of models that ask for them
        self.states = [LayerState(self, number) for number in range(num_layers)]
        self.layers: Any = self.states  # transformers finds them here
        self.num_rows = self.length = self.read_length = 0
        self.rings = dict(rings or {})
        self.kinds: Sequence[str] = ()  # of the layers, where rings matter
        self._filler = filler  # before the first token, in states that are tokens
        self._rows: Tensor | None = None  # rows of the current prefill; None in a decoding step
        self.start = 0  # of the current prefill
        self._num_active = 0
        self.step_rows: Tensor | None = None
        self.write_at: Tensor | None = None  # positions of the current decoding step: [n] or, of blocks, [n, width]
        self._last: Tensor | None = None  # position of the last token of each block, if there are some
        self.proposed: Tensor | None = None  # rows of the proposed tokens, if those of all blocks are in one list

    @property
    def active(self) -> Tensor | slice:
        """The rows of the current forward pass."""
        return slice(self._num_active) if self._rows is None else self._rows

    @property
    def continues(self) -> bool:
        """Whether these rows have tokens in the cache before those of the current forward pass."""
        return self._rows is None or self.start > 0

    @property
    def _tensors(self) -> list[Tensor]:
        states = [tensor for layer in self.states for tensor in layer.tensors]
        return states + [tensor for tensors in self._by_token for tensor in tensors if tensor is not None]

    @property
    def _by_token(self) -> tuple[list[Tensor | None], ...]:
        return self.keys, self.values, self.index_keys, self._positions

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
                    length = self._ring(tensors, i) or self.length
                    new = old.new_zeros(self.num_rows, old.shape[1], length, old.shape[3])
                    new[: old.shape[0], :, : old.shape[2]] = old
                    tensors[i] = new
        for layer in self.states:
            layer.grow(self.num_rows)

    def begin_prefill(self, rows: Tensor, width: int, start: int = 0, lengths: Tensor | None = None) -> None:
        """Of the tokens from `start` to `width`. Those before `start` are in the cache. `lengths`: of the rows, if some
        end before `width`."""
        self.reserve(0, width)
        self._lengths = torch.full_like(rows, width) if lengths is None else lengths
        if start == 0:
            self._clear_index_keys(rows, 0)
        self._rows, self.write_at, self.start, self.read_length = rows, None, start, width

    def begin_step(self, positions_B: Tensor, read_length: int, turned_B: Tensor | None = None) -> None:
        """`turned_B`: their positions for rotary embeddings, if those differ."""
        self._rows, self.read_length, self._last, self.proposed = None, read_length, None, None
        self._num_active = len(positions_B)
        self.step_rows = torch.arange(len(positions_B), device=positions_B.device)
        self.write_at = positions_B
        if (kept := self._positions[0]) is not None:
            kept[self.step_rows, :, positions_B] = (positions_B if turned_B is None else turned_B)[:, None, None]

    def begin_blocks(self, positions_BW: Tensor, last_B: Tensor, read_length: int) -> None:
        """Blocks of equal width, for a forward pass of transformers. `last_B`: the last position of each block; places
        behind it only fill the table."""
        self.reserve(0, read_length)
        self._rows, self.read_length, self.proposed = None, read_length, None
        self._num_active = len(positions_BW)
        self.step_rows = torch.arange(len(positions_BW), device=positions_BW.device)[:, None]
        self.write_at, self._last = positions_BW, last_B

    def begin_list(self, positions_N: Tensor, rows_N: Tensor, last_N: Tensor, num_rows: int, read_length: int) -> None:
        """Blocks of any width as one list, for `write_step`: the first token of each row, then the others."""
        self.reserve(0, read_length)
        self._rows, self.read_length = None, read_length
        self._num_active, self.step_rows, self.proposed = num_rows, rows_N, rows_N[num_rows:]
        self.write_at, self._last = positions_N, last_N

    def _ring(self, tensors: list[Tensor | None], layer: int) -> int | None:
        """How many keys or values the layer keeps; None: all."""
        of_attention = tensors is self.keys or tensors is self.values
        ring = self.rings.get(self.kinds[layer]) if of_attention and self.kinds else None
        return ring if ring is not None and ring < self.length else None

    def _in_ring(self, ring: int, last_B: Tensor, number: int) -> Tensor:
        """Positions of the keys in the first places, [rows, number], once the keys up to `last_B` are there; negative:
        there is none yet."""
        last_B1 = last_B[:, None]
        return last_B1 - (last_B1 - torch.arange(number, device=last_B.device)) % ring

    def visible(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The masks of the current forward pass, by kind of layer, for the keys that layers of this kind return."""
        found = dict(masks)
        for kind, mask in masks.items():
            if (ring := self.rings.get(kind)) is None or ring >= self.length:
                continue
            if self.write_at is None:
                found[kind] = mask[..., max(self.start - ring, 0) :]
                continue
            last_B = self.write_at if self._last is None else self._last
            at_BK = self._in_ring(ring, last_B, min(ring, self.read_length))
            hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
            index = at_BK.clamp(min=0)[:, None, None].expand(-1, -1, mask.shape[2], -1)
            gathered = mask.gather(-1, index)
            found[kind] = gathered.masked_fill((at_BK < 0)[:, None, None], hidden)
        return found

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys = self._write(self.keys, layer_idx, key_states)
        return keys, keys if value_states is key_states else self._write(self.values, layer_idx, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        return self._write(self.index_keys, layer_idx, indexer_key_states[:, None])[:, 0]

    def write_step(self, layer: int, keys_BHD: Tensor, values_BHD: Tensor) -> tuple[Tensor, Tensor]:
        """Add one token per row. Returns all keys and values that the rows may attend to."""
        return self.update(keys_BHD[:, :, None], values_BHD[:, :, None], layer)

    def _write(self, tensors: list[Tensor | None], layer: int, new_BHWD: Tensor) -> Tensor:
        """Of the current forward pass. Returns what its tokens may attend to."""
        ring = self._ring(tensors, layer)
        if (kept := tensors[layer]) is None:
            heads, dim = new_BHWD.shape[1], new_BHWD.shape[3]
            kept = tensors[layer] = new_BHWD.new_zeros(self.num_rows, heads, ring or self.length, dim)
        if self.write_at is not None:
            new = new_BHWD[:, :, 0] if self.write_at.dim() == 1 else new_BHWD.transpose(1, 2)
            kept[self.step_rows, :, self.write_at if ring is None else self.write_at % ring] = new
            return kept[: self._num_active, :, : min(self.read_length, ring or self.read_length)]
        if ring is not None:
            return self._write_ring(kept, ring, new_BHWD)
        kept[self._rows, :, self.start : self.read_length] = new_BHWD
        return kept[self._rows, :, : self.read_length] if self.start else new_BHWD

    def _write_ring(self, kept: Tensor, ring: int, new_BHWD: Tensor) -> Tensor:
        """Keeps the last keys of each row. Returns those that the tokens of this prefill may attend to, in order."""
        rows, start = self._rows, self.start
        assert rows is not None
        before = torch.arange(max(start - ring, 0), start, device=new_BHWD.device)
        seen = torch.cat([kept[rows][:, :, before % ring], new_BHWD], 2) if start else new_BHWD
        last_B = self._lengths.clamp(max=self.read_length) - 1
        at_BK = self._in_ring(ring, last_B, ring) - start
        index = at_BK.clamp(min=0)[:, None, :, None].expand(-1, new_BHWD.shape[1], -1, new_BHWD.shape[3])
        kept[rows] = torch.where((at_BK >= 0)[:, None, :, None], new_BHWD.gather(2, index), kept[rows])
        return seen

    def copy_row(self, source: int, targets: list[int], length: int) -> None:
        for tensors in self._by_token:
            for tensor in tensors:
                if tensor is not None:
                    tensor[targets, :, :length] = tensor[source, :, :length].clone()
        self._clear_index_keys(targets, length)
        for layer in self.states:
            for tensor in layer.tensors:
                tensor[targets] = tensor[source].clone()

    def _clear_index_keys(self, rows: Tensor | list[int], length: int) -> None:
        """From this length on. Some indexers find out by the keys how many tokens there are."""
        for tensor in self.index_keys:
            if tensor is not None:
                tensor[rows, :, length:] = 0

    @property
    def has_states(self) -> bool:
        return any(layer.tensors for layer in self.states)

    def clear_states(self, row: int) -> None:
        self._clear_index_keys([row], 0)
        for layer in self.states:
            for tensor in layer.tensors:
                tensor[row] = 0 if tensor.is_floating_point() else self._filler

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

    @property
    def position_ids(self) -> Tensor:
        """Of the keys, [3, rows, length], as Qwen4-Exp asks for them: before those of the current forward pass. A key
        is found by its place, the query by the last one."""
        if (kept := self._positions[0]) is None or not self.continues:
            raise AttributeError
        length = self.start if self.write_at is None else self.read_length
        return kept[self.active, :, :length, 0].transpose(0, 1)

    @position_ids.setter
    def position_ids(self, value: Tensor) -> None:
        """It adds those of the current pass."""
        if self.write_at is None:
            self._write(self._positions, 0, value[:, :, self.start :].transpose(0, 1)[..., None])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.read_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.read_length, 0


def make_cache(network: Any, ahead: int = 0) -> RowCache:
    """`ahead`: at most this many tokens behind a row's last one are written, and may be rejected. Keys that they
    replace in a ring are hidden from all later tokens."""
    config = network.config.get_text_config()
    if config.model_type != "minimax":
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        traits = traits_of(network.config)
        seen = {SLIDING: traits.window, CHUNKED: traits.chunk}
        rings = {kind: -(-(size + ahead) // KEY_BLOCK) * KEY_BLOCK for kind, size in seen.items() if size is not None}
        cache = RowCache(config.num_hidden_layers, ends[0] or 0, rings)
        cache.kinds = [{"sliding": SLIDING, "chunked": CHUNKED}.get(KINDS[kind].mask, kind) for kind in traits.kinds]
        for number, layer in enumerate(layers_of(network)[1]):
            if (compressor := getattr(getattr(layer, "self_attn", None), "compressor", None)) is not None:
                cache.states[number] = CompressedState(cache, number, compressor)
        return cache
    from transformers.models.minimax.modeling_minimax import MiniMaxCache  # it accepts no other class

    made: RowCache = type("MiniMaxRowCache", (RowCache, MiniMaxCache), {})(config.num_hidden_layers)
    return made


def cache_argument(decoder: Any) -> str:
    """Of its forward pass."""
    return "cache_params" if "cache_params" in inspect.signature(decoder.forward).parameters else "past_key_values"
