"""Attention of a group of ranks in a ring: keys and values pass from rank to rank, queries stay.

    step s of rank i: the keys of rank j = i - s (mod k) are here; the next ones are on their way
        j = i  all queries, all keys, causal        j < i  all queries, the front half of the keys
                                                    j > i  the back half of the queries, all keys

Each sample is cut into 2k pieces; rank i has piece i (front) and piece 2k - 1 - i (back). So every step computes the
same number of scores on every rank, none of which is masked except in step 0. Outputs of the steps are merged by the
log-sum-exp of their scores. In the backward pass keys and values pass by again, and their gradients travel after them
and arrive at their rank at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gcore.training.context import RowGroup, Sharing
from gcore.training.varlen import Spans, attend_block, attend_block_backward


def attend(query_LHD: Tensor, key_LGD: Tensor, value_LGD: Tensor, sharing: Sharing, scale: float) -> Tensor:
    output: Tensor = _Ring.apply(query_LHD, key_LGD, value_LGD, sharing, scale)
    return output


class RingStep(NamedTuple):
    """What a rank computes in one step. None: all its tokens."""

    query_index: Tensor | None
    key_index: Tensor | None
    queries: Spans
    keys: Spans
    causal: bool


def ring_step(sharing: Sharing, source: int) -> RingStep:
    """`source`: the rank that the keys come from."""
    whole, half = sharing.spans.divided(sharing.ranks.size), sharing.spans.divided(2 * sharing.ranks.size)
    front_L, back_L = sharing.halves
    if source == sharing.ranks.position:
        return RingStep(None, None, whole, whole, True)
    if source < sharing.ranks.position:
        return RingStep(None, front_L, whole, half, False)
    return RingStep(back_L, None, half, whole, False)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_LHD: Tensor, key_LGD: Tensor, value_LGD: Tensor, sharing: Sharing, scale: float
    ) -> Tensor:
        ranks, query_LHD = sharing.ranks, query_LHD.contiguous()
        own = passing = torch.stack([key_LGD, value_LGD])
        exact = torch.promote_types(query_LHD.dtype, torch.float32)
        output_LHD = torch.zeros_like(query_LHD, dtype=exact)
        lse_HL = torch.full((query_LHD.shape[1], len(query_LHD)), -torch.inf, dtype=exact, device=query_LHD.device)
        for step in range(ranks.size):
            arrival = _pass_on(passing, ranks) if step + 1 < ranks.size else None
            now = ring_step(sharing, (ranks.position - step) % ranks.size)
            key, value = _rows(passing, now.key_index, 1).unbind()
            part = attend_block(_rows(query_LHD, now.query_index), key, value, *now[2:], scale)
            merge(output_LHD, lse_HL, part, now.query_index)
            if arrival is not None:
                passing = arrival()
        output_LHD = output_LHD.to(query_LHD.dtype)
        ctx.save_for_backward(query_LHD, own, output_LHD, lse_HL)
        ctx.sharing, ctx.scale = sharing, scale
        return output_LHD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query_LHD, passing, output_LHD, lse_HL = ctx.saved_tensors
        grad_LHD, ranks = gradients[0].contiguous(), ctx.sharing.ranks
        exact = torch.promote_types(query_LHD.dtype, torch.float32)
        query_grad, own_grad = torch.zeros_like(query_LHD, dtype=exact), torch.zeros_like(passing, dtype=exact)
        home: Callable[[], Tensor] | None = None  # of the gradients that travel after their keys
        for step in range(ranks.size):
            arrival = _pass_on(passing, ranks) if step + 1 < ranks.size else None
            now = ring_step(ctx.sharing, (ranks.position - step) % ranks.size)
            grad, query, output = (_rows(t, now.query_index) for t in (grad_LHD, query_LHD, output_LHD))
            key, value = _rows(passing, now.key_index, 1).unbind()
            lse = _rows(lse_HL, now.query_index, 1)
            dq, dk, dv = attend_block_backward(grad, query, key, value, output, lse, *now[2:], ctx.scale)
            _add(query_grad, dq, now.query_index)
            key_grad = own_grad if step == 0 else torch.zeros_like(own_grad) if home is None else home()
            _add(key_grad, torch.stack([dk, dv]), now.key_index, 1)
            if step > 0:
                home = _pass_on(key_grad, ranks)
            if arrival is not None:
                passing = arrival()
        if home is not None:
            own_grad += home()
        dk, dv = own_grad.to(passing.dtype).unbind()
        return query_grad.to(query_LHD.dtype), dk, dv, None, None


def merge(output_LHD: Tensor, lse_HL: Tensor, part: tuple[Tensor, Tensor], index: Tensor | None) -> None:
    """Add the result of more keys, in place. `index`: of the queries that have it."""
    part_output, part_lse = part
    old_lse = _rows(lse_HL, index, 1)
    new_lse = torch.logaddexp(old_lse, part_lse.to(old_lse.dtype))
    kept, added = ((lse - new_lse).exp().t()[..., None] for lse in (old_lse, part_lse))
    merged = _rows(output_LHD, index) * kept + part_output * added
    if index is None:
        output_LHD.copy_(merged)
        lse_HL.copy_(new_lse)
    else:
        output_LHD.index_copy_(0, index, merged)
        lse_HL.index_copy_(1, index, new_lse)


def _rows(tensor: Tensor, index: Tensor | None, dim: int = 0) -> Tensor:
    return tensor if index is None else tensor.index_select(dim, index)


def _add(total: Tensor, part: Tensor, index: Tensor | None, dim: int = 0) -> None:
    if index is None:
        total += part
    else:
        total.index_add_(dim, index, part.to(total.dtype))


def _pass_on(tensor: Tensor, ranks: RowGroup) -> Callable[[], Tensor]:
    """Send to the next rank of the ring and receive from the previous one, in the background. The returned function
    waits and returns what was received."""
    received = torch.empty_like(tensor)
    ops = [
        dist.P2POp(dist.isend, tensor, ranks.members[(ranks.position + 1) % ranks.size], ranks.group),
        dist.P2POp(dist.irecv, received, ranks.members[ranks.position - 1], ranks.group),
    ]
    works = dist.batch_isend_irecv(ops)

    def arrival() -> Tensor:
        for work in works:
            work.wait()
        return received

    return arrival
