"""One decoding step in this process: logits, then tokens from logits.

The modules of transformers are general. At one token per row their overhead costs several times the arithmetic of a
small model. FusedDecoder does the same arithmetic for the Llama family (Llama, Mistral, Qwen2, Qwen3, also in Qwen-VL)
on the same weights: one matrix product for queries, keys and values, one for gate and up, rotations from a table. The
model's own parameters become views of the fused matrices, so a weight update writes both. Other families decode with
transformers (embedded.py).

Tokens are drawn by inverse transform sampling with each row's own noise, independent of the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gcore.generation.cache import RowCache
from gcore.generation.noise import uniforms
from gcore.types import Ints, Request

GRID = ("qwen2_5_vl_text", "qwen3_vl_text")  # positions with three axes
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *GRID)


class _Layer:
    """The weights of a decoder layer, some of them joined."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm_1: Tensor = layer.input_layernorm.weight
        self.qkv, self.qkv_bias = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.qk_norm = None if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight)
        self.out: nn.Linear = attention.o_proj
        self.norm_2: Tensor = layer.post_attention_layernorm.weight
        self.gate_up, self.gate_up_bias = _join([mlp.gate_proj, mlp.up_proj])
        self.down: nn.Linear = mlp.down_proj


class FusedDecoder:
    """`step(tokens, positions, masks, cache)` -> logits, with one mask per layer. `supports`: for which models.

    The tokens are one per row, or blocks of proposed ones (RowCache.begin_list)."""

    def __init__(self, model: Any, max_length: int) -> None:
        config, body = model.config.get_text_config(), model.get_decoder()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.embedding, self.norm = body.embed_tokens.weight, body.norm.weight
        self.head: nn.Linear = model.get_output_embeddings()
        self.layers = [_Layer(layer) for layer in body.layers]
        positions = torch.arange(max_length, device=self.embedding.device)[None]
        if config.model_type in GRID:  # one row per axis; all axes of a generated token are equal
            positions = positions.expand(3, 1, -1)
        cos, sin = body.rotary_emb(self.embedding[:1, None], positions)
        sign = torch.ones(self.head_dim, device=sin.device, dtype=sin.dtype)
        sign[: self.head_dim // 2] = -1  # rotated x = x cos + swapped(x) sin; the first half of swapped is negated
        self.cos, self.sin = cos[0, :, None].contiguous(), (sin * sign)[0, :, None].contiguous()

    @staticmethod
    def supports(model: Any) -> bool:
        config = model.config.get_text_config()
        return config.model_type in FAMILIES and config.hidden_act == "silu"

    def step(self, tokens_B: Tensor, positions_B: Tensor, masks: Sequence[Tensor], cache: RowCache) -> Tensor:
        num, dim = len(tokens_B), self.head_dim
        cos, sin = self.cos[positions_B], self.sin[positions_B]
        x = F.embedding(tokens_B, self.embedding)
        width = (x.shape[-1],)
        for index, layer in enumerate(self.layers):
            h = F.rms_norm(x, width, layer.norm_1, self.eps)
            qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(num, -1, dim)
            qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 1)
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (dim,), None, self.eps) * self._per_head(*layer.qk_norm)
            swapped = torch.cat(qk.chunk(2, -1)[::-1], -1)
            q, k = torch.addcmul(qk * cos, swapped, sin).split((self.heads, self.kv_heads), 1)
            attended = self._attended(q[:, :, None], *cache.write_step(index, k, v), masks[index], cache.proposed)
            x = _add_linear(x, attended.view(num, -1), layer.out)
            h = F.rms_norm(x, width, layer.norm_2, self.eps)
            gate, up = F.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = _add_linear(x, F.silu(gate).mul_(up), layer.down)
        return self.head(F.rms_norm(x, width, self.norm, self.eps))

    def _attended(self, q_NH1D: Tensor, keys: Tensor, values: Tensor, mask: Tensor, proposed: Tensor | None) -> Tensor:
        """The first token of each row, then the proposed ones of these rows. Each is a query of its own: in one of
        several tokens, its last bits would be others."""
        grouped, rows = self.heads != self.kv_heads, len(keys)
        first = F.scaled_dot_product_attention(q_NH1D[:rows], keys, values, mask[:rows], enable_gqa=grouped)
        if proposed is None:
            return first
        others = F.scaled_dot_product_attention(
            q_NH1D[rows:], keys[proposed], values[proposed], mask[rows:], enable_gqa=grouped
        )
        return torch.cat((first, others))

    def _per_head(self, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        return torch.cat((q_norm.expand(self.heads, -1), k_norm.expand(self.kv_heads, -1)))


def _add_linear(x: Tensor, h: Tensor, linear: nn.Linear) -> Tensor:
    y = torch.addmm(x, h, linear.weight.t())
    return y if linear.bias is None else y + linear.bias


def _join(parts: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Join the weights in one matrix. Each part's own weight becomes a view of it. Same for the biases."""
    joined: list[Tensor | None] = []
    for name in ("weight", "bias"):
        tensors = [getattr(part, name) for part in parts]
        if tensors[0] is None:
            joined.append(None)
            continue
        whole = torch.cat([t.data for t in tensors])
        for tensor, piece in zip(tensors, whole.split([len(t) for t in tensors]), strict=True):
            tensor.data = piece
        joined.append(whole)
    weight, bias = joined
    assert weight is not None
    return weight, bias


# ---- from logits to tokens ------------------------------------------------------------------------------------------


class RowTable:
    """The state of each row, as arrays: set when a request gets the row, moved when the row moves."""

    def __init__(self, capacity: int) -> None:
        self.length = np.zeros(capacity, np.int64)  # tokens in the cache of the engine
        self.offset = np.zeros(capacity, np.int64)  # position - number of a new token: not 0 after media
        self.last = np.zeros(capacity, np.int64)  # the token to feed next
        self.temperature = np.ones(capacity, np.float32)
        self.top_p = np.ones(capacity, np.float32)
        self.top_k = np.zeros(capacity, np.int64)
        self.noise_key = np.zeros(capacity, np.uint64)
        self.keep_mask = np.zeros(capacity, np.bool_)
        self.position = np.zeros(capacity, np.int64)  # of the next token in the sample's noise stream

    def put(self, row: int, request: Request) -> None:
        params = request.params
        self.temperature[row], self.top_p[row], self.top_k[row] = params.temperature, params.top_p, params.top_k
        self.keep_mask[row] = params.keep_mask and params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)
        self.noise_key[row], self.position[row] = request.noise_key, request.position

    def move(self, source: int, target: int) -> None:
        for array in vars(self).values():
            array[target] = array[source]

    def advance(self, numbers: Sequence[int], lasts: Sequence[int]) -> None:
        """The first rows by so many tokens, of which these are the last ones."""
        n = len(numbers)
        self.length[:n] += numbers
        self.position[:n] += numbers
        self.last[:n] = lasts

    def ahead(self, rows_N: np.ndarray, ahead_N: np.ndarray) -> RowTable:
        """A row for each of these, after so many more tokens."""
        found = RowTable(0)
        for name, array in vars(self).items():
            setattr(found, name, array[rows_N])
        found.position += ahead_N
        return found


def sample(logits: Tensor, rows: RowTable) -> tuple[np.ndarray, np.ndarray, dict[int, Ints]]:
    """Per row of `logits`: the next token and its logprob. Also the candidates by row. Temperature 0 is greedy.

    Candidates are the tokens that top-k and top-p left to choose from. They are returned for
    rows with `keep_mask` only, and the logprob of such a row is computed among its candidates.
    """
    n, device = len(logits), logits.device
    temperature = rows.temperature[:n]
    greedy = temperature == 0
    scaled_BV = logits.float()
    if (temperature != 1).any():
        scaled_BV = scaled_BV / torch.from_numpy(np.where(greedy, 1, temperature)).to(device)[:, None]
    logprobs_BV, probs_BV = torch.log_softmax(scaled_BV, dim=-1), torch.softmax(scaled_BV, dim=-1)
    if rows.top_k[:n].any() or (rows.top_p[:n] < 1).any():
        probs_BV = _truncate(probs_BV, rows)
    noise = torch.from_numpy(uniforms(rows.noise_key[:n], rows.position[:n])).clamp_(max=1 - 2.0**-24)
    cumulative = probs_BV.cumsum(-1)
    tokens = torch.searchsorted(cumulative, noise.float().to(device)[:, None] * cumulative[:, -1:], right=True)[:, 0]
    tokens.clamp_(max=logits.shape[-1] - 1)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(device), logits.argmax(-1), tokens)
    logprobs = logprobs_BV.gather(-1, tokens[:, None])[:, 0]
    candidates: dict[int, Ints] = {}
    if (masked := np.flatnonzero(rows.keep_mask[:n])).size:
        probs_MV = probs_BV[torch.from_numpy(masked).to(device)]
        candidates = {int(i): row.nonzero()[:, 0].int().cpu().numpy() for i, row in zip(masked, probs_MV, strict=True)}
        logprobs[torch.from_numpy(masked).to(device)] -= probs_MV.sum(-1).log()
    return tokens.cpu().numpy(), logprobs.cpu().numpy(), candidates


def _truncate(probs_BV: Tensor, rows: RowTable) -> Tensor:
    """Set excluded tokens to 0: first top-k, then top-p of what top-k left. The most likely token always stays."""
    n, vocabulary = probs_BV.shape
    sorted_BV, order = probs_BV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=probs_BV.device)
    top_k = torch.from_numpy(np.where(rows.top_k[:n] == 0, vocabulary, rows.top_k[:n])).to(probs_BV.device)
    top_p = torch.from_numpy(rows.top_p[:n].copy()).to(probs_BV.device)
    sorted_BV = sorted_BV * (rank < top_k[:, None])
    cumulative = sorted_BV.cumsum(-1)
    keep = (cumulative - sorted_BV < top_p[:, None] * cumulative[:, -1:]) | (rank == 0)
    return torch.zeros_like(probs_BV).scatter_(-1, order, sorted_BV * keep)
