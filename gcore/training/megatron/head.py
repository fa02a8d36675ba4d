"""The output layer over a split vocabulary: hidden states -> logprobs and entropies of the selected steps.

As fused_head.py, with the rows of the output matrix divided among the ranks of a tensor group. Logits of a few steps at
a time are computed in the forward pass and again in the backward pass; only numbers per step cross the group, and the
gradient of the hidden states.

    logits of this rank's tokens ──max, sum of exp, sum of p * logit, logit of the target: over the group──> per step
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gcore.models.decoders import MASKED_LOGIT

LOGITS_AT_ONCE = 1 << 26  # elements of this rank


class Split(NamedTuple):
    """Which tokens a rank has: `first` to `first + size`, without those that only pad the matrix."""

    group: Any  # None: all
    first: int
    size: int


class Steps(NamedTuple):
    """What is asked for: the logprob of `targets_S`, at these temperatures, among the candidates if there are any."""

    targets_S: Tensor
    temperature_S: Tensor
    candidate_ids_K: Tensor | None = None
    candidate_counts_S: Tensor | None = None


def token_logprobs(hidden_SD: Tensor, weight_VD: Tensor, steps: Steps, split: Split) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of each step, in float32, the same on every rank of the group; differentiable
    if every rank differentiates the same function of them."""
    logprobs_S, entropy_S = _TokenLogprobs.apply(hidden_SD, weight_VD, steps, split)
    return logprobs_S, entropy_S


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_SD: Tensor, weight_VD: Tensor, steps: Steps, split: Split) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        parts = []
        for part in _pieces(len(hidden_SD), split):
            logits = _logits(hidden_SD, weight_VD, steps, split, part)
            parts.append(_score(logits, steps.targets_S[part], split))
        logprobs_S, entropy_S, logsumexp_S = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_SD, weight_VD, logsumexp_S, entropy_S)
        ctx.steps, ctx.split = steps, split
        return logprobs_S, entropy_S

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_SD, weight_VD, logsumexp_S, entropy_S = ctx.saved_tensors
        steps, split = ctx.steps, ctx.split
        zeros = torch.zeros_like(logsumexp_S)
        for_logprobs_S, for_entropy_S = (zeros if gradient is None else gradient for gradient in gradients)
        hidden_grad = torch.zeros_like(hidden_SD)
        weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32)
        for part in _pieces(len(hidden_SD), split):
            logprobs = _logits(hidden_SD, weight_VD, steps, split, part) - logsumexp_S[part, None]
            probabilities = logprobs.exp()
            own, local = _own(steps.targets_S[part], split)
            gradient = -for_logprobs_S[part, None] * probabilities
            gradient.scatter_add_(1, local[:, None], (for_logprobs_S[part] * own)[:, None])
            gradient -= for_entropy_S[part, None] * probabilities * (logprobs + entropy_S[part, None])
            gradient = (gradient / steps.temperature_S[part, None]).to(hidden_SD.dtype)
            hidden_grad[part] = gradient @ weight_VD[: split.size]
            weight_grad[: split.size] += gradient.t() @ hidden_SD[part]
        if split.group is not None:
            dist.all_reduce(hidden_grad, group=split.group)
        return hidden_grad, weight_grad.to(weight_VD.dtype), None, None


def _pieces(num_steps: int, split: Split) -> list[slice]:
    size = max(1, LOGITS_AT_ONCE // max(split.size, 1))
    return [slice(first, first + size) for first in range(0, num_steps, size)]


def _logits(hidden_SD: Tensor, weight_VD: Tensor, steps: Steps, split: Split, part: slice) -> Tensor:
    """Of this rank's tokens, in float32."""
    logits = (hidden_SD[part] @ weight_VD[: split.size].t()).float() / steps.temperature_S[part, None]
    ids_K, counts_S = steps.candidate_ids_K, steps.candidate_counts_S
    if ids_K is None or counts_S is None:
        return logits
    ids_K = ids_K[int(counts_S[: part.start].sum()) : int(counts_S[: part.stop].sum())]
    counts_S = counts_S[part]
    allowed = (counts_S == 0)[:, None].repeat(1, split.size)  # no candidates: all tokens
    step_K = torch.repeat_interleave(torch.arange(len(counts_S), device=ids_K.device), counts_S)
    own_K = (ids_K >= split.first) & (ids_K < split.first + split.size)
    allowed[step_K[own_K], ids_K[own_K] - split.first] = True
    return logits.masked_fill(~allowed, MASKED_LOGIT)


def _score(logits: Tensor, targets_S: Tensor, split: Split) -> tuple[Tensor, Tensor, Tensor]:
    own, local = _own(targets_S, split)
    largest_S = logits.max(-1).values if split.size else logits.new_full((len(logits),), MASKED_LOGIT)
    if split.group is not None:
        dist.all_reduce(largest_S, dist.ReduceOp.MAX, group=split.group)
    exps = (logits - largest_S[:, None]).exp()
    chosen_S = torch.where(own, logits.gather(-1, local[:, None])[:, 0], 0.0)
    sums = torch.stack([exps.sum(-1), (exps * logits).sum(-1), chosen_S])
    if split.group is not None:
        dist.all_reduce(sums, group=split.group)
    total_S, weighted_S, chosen_S = sums.unbind()
    logsumexp_S = largest_S + total_S.log()
    return chosen_S - logsumexp_S, logsumexp_S - weighted_S / total_S, logsumexp_S


def _own(targets_S: Tensor, split: Split) -> tuple[Tensor, Tensor]:
    """Whether this rank has the target, and its row there."""
    local = targets_S - split.first
    own = (local >= 0) & (local < split.size)
    return own, local.clamp(0, max(split.size - 1, 0))
