"""Attention over packed samples without a mask: PyTorch's varlen kernel, or plain operations elsewhere.

All samples of a micro-batch are in one row of T tokens. `starts_N` holds where each sample begins, and the end of the
row. `attend_row` is attention within each sample, causal or not. `attend_block` is attention of some queries of each
sample to some of its keys, with the log-sum-exp of the scores, so that ring.py can merge blocks. Tensors are tokens x
heads x size (`_THD`); keys may have fewer heads than queries (`_TGD`).

The kernel runs on GPUs in half precision. In all other cases samples are computed one by one.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gcore.models.decoders import KINDS, implementation, traits_of


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Where the samples begin in a row. Spans(starts_N=[0, 5, 9], longest=5) are two samples, of 5 and 4 tokens."""

    starts_N: Tensor  # int32, on the device of the row
    longest: int  # an upper bound of the lengths

    def divided(self, by: int) -> Spans:
        """Of a part that has 1 / `by` of each sample."""
        return Spans(self.starts_N // by, -(-self.longest // by))


def usable(network: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Models whose attention needs more than scores and a window (sinks, capped scores, chunks, an indexer) are
    computed with masks."""
    if device.type != "cuda" or dtype not in HALF or not _KERNEL or implementation(network.config) != "sdpa":
        return False
    return all(KINDS[kind].kernel for kind in traits_of(network.config).kinds)


def attend_row(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    spans: Spans,
    scale: float | None,
    window: int | None = None,
    causal: bool = True,
    keys: Spans | None = None,
) -> Tensor:
    """`keys`: where the keys of each sample begin, if it has more keys than queries. Then its queries are the last
    ones of its tokens."""
    keys = keys or spans
    if not _has_kernel(query_THD):
        return _one_by_one(query_THD, key_TGD, value_TGD, spans, keys, scale, window, causal)
    kernel, grouped = _KERNEL
    sizes = (spans.starts_N, keys.starts_N, spans.longest, keys.longest)
    seen = (-1 if window is None else window - 1, 0 if causal else -1)
    output: Tensor = kernel(query_THD, key_TGD, value_TGD, *sizes, scale=scale, window_size=seen, **grouped)
    return output


def attend_block(
    query_QHD: Tensor, key_KGD: Tensor, value_KGD: Tensor, queries: Spans, keys: Spans, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs_QHD and log-sum-exps_HQ. `causal`: queries and keys are the same tokens. Not differentiable."""
    if _has_kernel(query_QHD):
        from torch.nn.attention.varlen import AuxRequest

        kernel, options = _KERNEL
        options = {**options, "scale": scale, "window_size": (-1, 0 if causal else -1), "return_aux": AuxRequest(True)}
        sizes = (queries.starts_N, keys.starts_N, queries.longest, keys.longest)
        output, lse = kernel(query_QHD, key_KGD, value_KGD, *sizes, **options)
        return output, lse
    exact, num_heads = torch.promote_types(query_QHD.dtype, torch.float32), query_QHD.shape[1]
    output_QHD = torch.zeros_like(query_QHD, dtype=exact)
    lse_HQ = torch.full((num_heads, len(query_QHD)), -torch.inf, dtype=exact, device=query_QHD.device)
    for q, k in _pairs(queries, keys):
        scores_GRQK = _scores(query_QHD[q].to(exact), key_KGD[k].to(exact), causal, scale)
        lse_GRQ = scores_GRQK.logsumexp(-1)
        weights_GRQK = (scores_GRQK - lse_GRQ[..., None]).exp()
        output_QHD[q] = torch.einsum("grqk,kgd->qgrd", weights_GRQK, value_KGD[k].to(exact)).flatten(1, 2)
        lse_HQ[:, q] = lse_GRQ.flatten(0, 1)
    return output_QHD, lse_HQ


def attend_block_backward(
    grad_QHD: Tensor,
    query_QHD: Tensor,
    key_KGD: Tensor,
    value_KGD: Tensor,
    output_QHD: Tensor,
    lse_HQ: Tensor,
    queries: Spans,
    keys: Spans,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. `output_QHD`, `lse_HQ`: of all blocks of these queries, merged."""
    if _has_kernel(query_QHD):
        sizes = (queries.starts_N, keys.starts_N, queries.longest, keys.longest)
        noise, unused = query_QHD.new_zeros(2, dtype=torch.uint64), query_QHD.new_empty(0)  # no dropout
        given = (grad_QHD, query_QHD, key_KGD, value_KGD, output_QHD, lse_HQ, *sizes, 0.0, causal, noise, unused)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(*given, scale=scale)
        return dq, dk, dv
    exact, num_groups = torch.promote_types(query_QHD.dtype, torch.float32), key_KGD.shape[1]
    dq, dk, dv = (torch.zeros_like(tensor, dtype=exact) for tensor in (query_QHD, key_KGD, value_KGD))
    for q, k in _pairs(queries, keys):
        query, key, value = query_QHD[q].to(exact), key_KGD[k].to(exact), value_KGD[k].to(exact)
        grad, output = (tensor[q].to(exact).unflatten(1, (num_groups, -1)) for tensor in (grad_QHD, output_QHD))
        lse_GRQ = lse_HQ[:, q].to(exact).unflatten(0, (num_groups, -1))
        weights_GRQK = (_scores(query, key, causal, scale) - lse_GRQ[..., None]).exp()
        mean_GRQ = (grad * output).sum(-1).permute(1, 2, 0)
        change_GRQK = weights_GRQK * (torch.einsum("qgrd,kgd->grqk", grad, value) - mean_GRQ[..., None]) * scale
        dq[q] = torch.einsum("grqk,kgd->qgrd", change_GRQK, key).flatten(1, 2)
        dk[k] = torch.einsum("grqk,qgrd->kgd", change_GRQK, query.unflatten(1, (num_groups, -1)))
        dv[k] = torch.einsum("grqk,qgrd->kgd", weights_GRQK, grad)
    return dq, dk, dv


def _scores(query_QHD: Tensor, key_KGD: Tensor, causal: bool, scale: float) -> Tensor:
    """Heads are ordered by the key head that they share: H = G groups x R heads."""
    query_QGRD = query_QHD.unflatten(1, (key_KGD.shape[1], -1))
    scores_GRQK = torch.einsum("qgrd,kgd->grqk", query_QGRD, key_KGD) * scale
    if not causal:
        return scores_GRQK
    later = torch.ones(scores_GRQK.shape[-2:], dtype=torch.bool, device=query_QHD.device).triu(1)
    return scores_GRQK.masked_fill(later, -torch.inf)


def _pairs(queries: Spans, keys: Spans) -> Iterator[tuple[slice, slice]]:
    """The queries and the keys of each sample."""
    both = (itertools.starmap(slice, itertools.pairwise(spans.starts_N.tolist())) for spans in (queries, keys))
    return zip(*both, strict=True)


def _one_by_one(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    queries: Spans,
    keys: Spans,
    scale: float | None,
    window: int | None,
    causal: bool,
) -> Tensor:
    parts = []
    for q, k in _pairs(queries, keys):
        query = query_THD[None, q].transpose(1, 2)
        key, value = (tensor[None, k].transpose(1, 2) for tensor in (key_TGD, value_TGD))
        seen, num_queries, num_keys = None, query.shape[2], key.shape[2]
        if causal and (window is not None or num_queries < num_keys):
            at = torch.arange(num_keys, device=query.device)
            last = at[num_keys - num_queries :, None]
            seen = (at <= last) & (at > last - (window or num_keys))
        output = scaled_dot_product_attention(
            query, key, value, seen, is_causal=causal and seen is None, scale=scale, enable_gqa=True
        )
        parts.append(output[0].transpose(0, 1))
    return torch.cat(parts)


def _has_kernel(query: Tensor) -> bool:
    return query.device.type == "cuda" and query.dtype in HALF and bool(_KERNEL)


def _kernel() -> tuple[Any, dict[str, bool]] | None:
    """The function, and how it is told that several query heads share a key head: newer versions ask for it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    if "window_size" not in parameters:
        return None
    return varlen_attn, {"enable_gqa": True} if "enable_gqa" in parameters else {}


HALF = (torch.bfloat16, torch.float16)
_KERNEL: Any = _kernel()


def rounded(length: int) -> int:
    """The next power of two: the kernel only sizes its grid by it, and compiled layers see few different values."""
    return 1 << max(7, (length - 1).bit_length())
