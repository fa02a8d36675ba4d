"""Attention over packed samples without a mask: PyTorch's varlen kernel, for models of transformers.

All samples of a micro-batch are in one row; `cu_seq_lens_q` holds where each begins. The kernel is causal within each
sample. It runs on GPUs in half precision. Elsewhere the trainer uses rows with a mask (decoders.py); `attend` then
computes sample by sample.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "gcore_varlen"


def usable(network: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Models whose attention needs more than scores and a window (sinks, capped scores) are computed with masks."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return network.config._attn_implementation in ("sdpa", NAME) and _KERNEL is not None


def install(network: Any) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    network.config._attn_implementation = NAME  # transformers makes no mask for an attention that it does not know


def attend(
    module: Any,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    if query_1HTD.device.type != "cuda":
        return _one_by_one(query_1HTD, key_1HTD, value_1HTD, cu_seq_lens_q.tolist(), scaling, sliding_window), None
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query_1HTD, key_1HTD, value_1HTD))
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    kernel, grouped = _KERNEL
    sizes = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    output = kernel(query, key, value, *sizes, scale=scaling, window_size=window, **grouped)
    return output[None], None


def _one_by_one(
    query_1HTD: Tensor, key_1HTD: Tensor, value_1HTD: Tensor, starts: list[int], scale: float | None, window: int | None
) -> Tensor:
    parts = []
    for first, end in itertools.pairwise(starts):
        query, key, value = (tensor[:, :, first:end] for tensor in (query_1HTD, key_1HTD, value_1HTD))
        at = torch.arange(end - first, device=query.device)
        seen = (at <= at[:, None]) & (at > at[:, None] - (window or end))
        parts.append(scaled_dot_product_attention(query, key, value, seen, scale=scale, enable_gqa=True))
    return torch.cat(parts, 2).transpose(1, 2)


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


_KERNEL: Any = _kernel()


def rounded(length: int) -> int:
    """The next power of two: the kernel only sizes its grid by it, and compiled layers see few different values."""
    return 1 << max(7, (length - 1).bit_length())
