"""The attention function of packed rows, for models of transformers: of one rank, or of a group of ranks.

layer ──query, key, value of this rank's tokens──> attend ──┬── the whole row is here: varlen.py
                                                            ├── Ulysses: each rank computes some heads of the row
                                                            └── ring: keys and values pass by (ring.py)

Ulysses    L tokens, all heads ──all-to-all──> T tokens, H / k heads ──attend_row──> ──all-to-all──> L tokens, all heads

A group of k ranks that attends by heads needs query heads that k divides. Key heads are repeated where there are too
few of them, so that each rank gets those of its query heads; their gradients are summed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gcore.training import prefixes, ring
from gcore.training.context import RowGroup, Sharing
from gcore.training.prefixes import Seen
from gcore.training.varlen import Spans, attend_row

NAME = "gcore_packed"
OF_TOWERS = "gcore_packed_flash"  # the towers of Qwen pass packed lengths only to functions with this word


def register() -> None:
    """Transformers calls these in models whose configuration names them, and makes no mask for them."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_ATTENTION_FUNCTIONS.register(OF_TOWERS, partial(attend, causal=False))


def attend(
    module: Any,
    query_1HTD: Tensor,
    key_1GTD: Tensor,
    value_1GTD: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    sharing: Sharing | None = None,
    seen: Seen | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    causal: bool = True,
    **rest: Any,
) -> tuple[Tensor, None]:
    """`cu_seq_lens_q`, `max_length_q`: the samples of the row, or the images of a tower. `sharing`: this rank has a
    part of the row. `seen`: by the nodes of a tree, if `cu_seq_lens_q` are of nodes."""
    query_THD, key_TGD, value_TGD = (tensor[0].transpose(0, 1) for tensor in (query_1HTD, key_1GTD, value_1GTD))
    scale = query_THD.shape[-1] ** -0.5 if scaling is None else scaling
    if sharing is not None:
        return _attend_shared(query_THD, key_TGD, value_TGD, sharing, scale, sliding_window)[None], None
    spans = Spans(cu_seq_lens_q, max_length_q)
    if seen is not None:
        return prefixes.attend(query_THD, key_TGD, value_TGD, spans, seen, scale, sliding_window)[None], None
    return attend_row(query_THD, key_TGD, value_TGD, spans, scale, sliding_window, causal)[None], None


@torch.compiler.disable  # communication stays out of compiled layers
def _attend_shared(
    query_LHD: Tensor, key_LGD: Tensor, value_LGD: Tensor, sharing: Sharing, scale: float, window: int | None
) -> Tensor:
    if sharing.method == "ulysses":
        return attend_by_heads(query_LHD, key_LGD, value_LGD, sharing, scale, window)
    assert window is None, "context.choose_method refuses windows"
    return ring.attend(query_LHD, key_LGD, value_LGD, sharing, scale)


def attend_by_heads(
    query_LHD: Tensor, key_LGD: Tensor, value_LGD: Tensor, sharing: Sharing, scale: float, window: int | None
) -> Tensor:
    size, num_keys = sharing.ranks.size, key_LGD.shape[1]
    repeats = math.lcm(num_keys, size) // num_keys
    if repeats > 1:
        key_LGD, value_LGD = (tensor.repeat_interleave(repeats, 1) for tensor in (key_LGD, value_LGD))
    by_rank = [tensor.unflatten(1, (size, -1)).transpose(0, 1) for tensor in (query_LHD, key_LGD, value_LGD)]
    parts_kLHD = _exchange(torch.cat(by_rank, 2), sharing.ranks)  # one exchange for all three
    row_THD = parts_kLHD.transpose(0, 1).flatten(0, 1)  # rank r has the tokens r, r + k, ...
    query_THD, key_TGD, value_TGD = row_THD.split([part.shape[2] for part in by_rank], 1)
    output_THD = attend_row(query_THD, key_TGD, value_TGD, sharing.spans, scale, window)
    output_kLHD = _exchange(output_THD.unflatten(0, (-1, size)).transpose(0, 1), sharing.ranks)
    return output_kLHD.transpose(0, 1).flatten(1, 2)


def _exchange(parts: Tensor, ranks: RowGroup) -> Tensor:
    """Part r goes to rank r; the result has the parts of all ranks for this one."""
    received: Tensor = _AllToAll.apply(parts, ranks)
    return received


class _AllToAll(torch.autograd.Function):
    """Its gradient is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: RowGroup) -> Tensor:
        ctx.ranks = ranks
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ranks.group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.ranks), None
