"""Attention of a group of ranks by heads (Ulysses): every rank attends with some of the heads over the whole row.

    L tokens, all heads ──all-to-all──> T tokens, H / k heads ──attend_row──> ──all-to-all──> L tokens, all heads

A group of k ranks needs query heads that k divides. Key heads are repeated where there are too few of them, so that
each rank gets those of its query heads; their gradients are summed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gcore.training.context import RowGroup, Sharing
from gcore.training.varlen import attend_row


def attend(
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
