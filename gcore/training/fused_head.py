"""The output layer of a language model: hidden states -> logprobs of given tokens, without holding all logits.

Logits of a few steps at a time are computed in the forward pass, and again in the backward pass, where they become the
gradients of the hidden states and of the weight matrix at once. Peak memory does not grow with the number of steps.

    forward    hidden_SD, weight_VD ──chunk──> logits ──> logprob_S, entropy_S     (kept: logsumexp_S)
    backward   the same chunk again ──> d logits ──> d hidden_SD, d weight_VD

The rows of the matrix may be divided among the ranks of a group (Megatron-Core): then numbers per step are joined over
the group, and the gradient of the hidden states is summed. `compiled`: the element-wise part of a chunk is one kernel
each way, which reads the logits once in half precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gcore.models.decoders import MASKED_LOGIT

Candidates = tuple[Tensor, Tensor]  # ids_K, counts_S, as in content.tokens.SamplingMask


class Scaling(NamedTuple):
    """What the model does to the outputs of its last layer: cap * tanh(scale * x / cap), or scale * x without a cap.
    Then, logits of forbidden tokens are masked."""

    scale: float = 1.0
    cap: float | None = None
    forbidden: tuple[int, ...] = ()


PLAIN = Scaling()


@dataclass(frozen=True, slots=True)
class Head:
    """An output layer. Of a rank of a group that divides the tokens: Head(1024, group=..., first=512, size=500)"""

    chunk: int  # steps per piece
    scaling: Scaling = PLAIN
    compiled: bool = False
    group: Any = None  # the ranks that divide the rows of the matrix; None: all rows are here
    first: int = 0  # the token of the first row
    size: int | None = None  # the rows that are tokens, the others only pad the matrix; None: all

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _compiled(function) if self.compiled else function

    def pieces(self, num_steps: int) -> Iterator[slice]:
        return (slice(at, at + self.chunk) for at in range(0, num_steps, self.chunk))

    def allowed(self, weight_VD: Tensor, part: slice, candidates: Candidates | None) -> Tensor | None:
        """Which logits of a piece are not masked: [steps, rows], or [1, rows] for all steps; None: all of them."""
        rows = len(weight_VD)
        size = rows if self.size is None else self.size
        if candidates is None:
            return None if size == rows else (torch.arange(rows, device=weight_VD.device) < size)[None]
        ids_K, counts_S = candidates
        ids_K = ids_K[int(counts_S[: part.start].sum()) : int(counts_S[: part.stop].sum())]
        allowed = allowed_tokens(ids_K, counts_S[part], self.first, rows)
        allowed[:, size:] = False
        return allowed


def allowed_tokens(ids_K: Tensor, counts_S: Tensor, first: int, size: int) -> Tensor:
    """The candidates of each step among `size` tokens from `first`. A step with a count of 0 had all tokens."""
    allowed = (counts_S == 0)[:, None].repeat(1, size)
    step_K = torch.repeat_interleave(torch.arange(len(counts_S), device=ids_K.device), counts_S)
    here_K = (ids_K >= first) & (ids_K < first + size)
    allowed[step_K[here_K], ids_K[here_K] - first] = True
    return allowed


def token_logprobs(
    head: Head,
    hidden_SD: Tensor,
    weight_VD: Tensor,
    targets_S: Tensor,
    temperature_S: Tensor,
    candidates: Candidates | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of each step, in float32, differentiable. They are the same on all ranks
    of a group, which must differentiate the same function of them. `candidates`: the tokens that could be sampled."""
    logprobs_S, entropy_S = _TokenLogprobs.apply(hidden_SD, weight_VD, targets_S, temperature_S, candidates, head)
    return logprobs_S, entropy_S


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: Tensor,
        weight_VD: Tensor,
        targets_S: Tensor,
        temperature_S: Tensor,
        candidates: Candidates | None,
        head: Head,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        score, parts = head.compile(_score), []
        for part in head.pieces(len(hidden_SD)):
            allowed = head.allowed(weight_VD, part, candidates)
            targets = targets_S[part] - head.first
            here = (targets >= 0) & (targets < len(weight_VD))
            raw, targets = hidden_SD[part] @ weight_VD.t(), targets.clamp(0, len(weight_VD) - 1)
            numbers: tuple[Tensor, Tensor, Tensor] = score(raw, targets, temperature_S[part], allowed, *head.scaling)
            parts.append(numbers if head.group is None else _joined(numbers, here, head.group))
        chosen_S, mean_S, logsumexp_S = (torch.cat(column) for column in zip(*parts, strict=True))
        entropy_S = logsumexp_S - mean_S
        ctx.save_for_backward(hidden_SD, weight_VD, targets_S, temperature_S, logsumexp_S, entropy_S)
        ctx.candidates, ctx.head = candidates, head
        return chosen_S - logsumexp_S, entropy_S

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_SD, weight_VD, targets_S, temperature_S, logsumexp_S, entropy_S = ctx.saved_tensors
        head: Head = ctx.head
        zeros = torch.zeros_like(logsumexp_S)
        for_logprobs_S, for_entropy_S = (zeros if gradient is None else gradient for gradient in gradients)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        hidden_grad = torch.empty_like(hidden_SD) if wants_hidden else None
        columns = (targets_S - head.first, temperature_S, logsumexp_S, entropy_S, for_logprobs_S, for_entropy_S)
        differentiate = head.compile(_differentiate)
        for part in head.pieces(len(hidden_SD)):
            allowed = head.allowed(weight_VD, part, ctx.candidates)
            raw = hidden_SD[part] @ weight_VD.t()
            logits_grad = differentiate(raw, *(column[part] for column in columns), allowed, *head.scaling)
            if hidden_grad is not None:
                hidden_grad[part] = logits_grad @ weight_VD
            if weight_grad is not None:
                weight_grad += logits_grad.t() @ hidden_SD[part]
        if head.group is not None and hidden_grad is not None:
            dist.all_reduce(hidden_grad, group=head.group)
        weights = None if weight_grad is None else weight_grad.to(weight_VD.dtype)
        return hidden_grad, weights, None, None, None, None


def _logits(
    raw: Tensor,
    temperature_S: Tensor,
    allowed: Tensor | None,
    scale: float,
    cap: float | None,
    forbidden: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """The logits that are sampled from, in float32, and their derivative by `raw`."""
    logits, slope = raw.float() * scale, torch.full((), scale, device=raw.device)
    if cap is not None:
        bounded = torch.tanh(logits / cap)
        logits, slope = bounded * cap, slope * (1 - bounded * bounded)
    logits = logits / temperature_S[:, None]
    at_V = torch.arange(raw.shape[-1], device=raw.device)
    for token in forbidden:  # as decoders.forbid; an index would make the compiler write all logits in float32
        logits = torch.where(at_V == token, MASKED_LOGIT, logits)
    if allowed is not None:
        logits = torch.where(allowed, logits, MASKED_LOGIT)
    return logits, slope / temperature_S[:, None]


def _score(
    raw: Tensor, targets_S: Tensor, temperature_S: Tensor, allowed: Tensor | None, *scaling: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Logit of the target, mean of the logits, and logsumexp."""
    logits, _ = _logits(raw, temperature_S, allowed, *scaling)
    logsumexp_S = torch.logsumexp(logits, -1)
    chosen_S = logits.gather(-1, targets_S[:, None])[:, 0]
    return chosen_S, ((logits - logsumexp_S[:, None]).exp() * logits).sum(-1), logsumexp_S


def _joined(numbers: tuple[Tensor, Tensor, Tensor], here_S: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of all tokens, from those of each rank's tokens. `here_S`: whether the target is one of them."""
    chosen_S, mean_S, logsumexp_S = numbers
    largest_S = logsumexp_S.clone()
    dist.all_reduce(largest_S, dist.ReduceOp.MAX, group=group)
    share_S = (logsumexp_S - largest_S).double().exp()
    sums = torch.stack([share_S, share_S * mean_S, torch.where(here_S, chosen_S, 0.0).double()])
    dist.all_reduce(sums, group=group)
    total_S, weighted_S, chosen_S = sums.unbind()
    return chosen_S.float(), (weighted_S / total_S).float(), (largest_S + total_S.log()).float()


def _differentiate(
    raw: Tensor,
    targets_S: Tensor,
    temperature_S: Tensor,
    logsumexp_S: Tensor,
    entropy_S: Tensor,
    for_logprobs_S: Tensor,
    for_entropy_S: Tensor,
    allowed: Tensor | None,
    *scaling: Any,
) -> Tensor:
    """d logprob / d logit = [target] - p, and d entropy / d logit = -p (log p + entropy)."""
    logits, slope = _logits(raw, temperature_S, allowed, *scaling)
    logprobs = logits - logsumexp_S[:, None]
    probabilities = logprobs.exp()
    at_target = torch.arange(raw.shape[-1], device=raw.device) == targets_S[:, None]
    gradient = for_logprobs_S[:, None] * (at_target.float() - probabilities)
    gradient = gradient - for_entropy_S[:, None] * probabilities * (logprobs + entropy_S[:, None])
    return (gradient * slope).to(raw.dtype)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
