"""The output layer of a language model: hidden states -> logprobs of given tokens, without holding all logits.

Logits of a few steps at a time are computed in the forward pass, and again in the backward pass, where they become the
gradients of the hidden states and of the weight matrix at once. Peak memory does not grow with the number of steps.

    forward    hidden_SD, weight_VD ──chunk──> logits ──> logprob_S, entropy_S     (kept: logsumexp_S)
    backward   the same chunk again ──> d logits ──> d hidden_SD, d weight_VD

`compiled`: the element-wise part of a chunk is one kernel each way, which reads the logits once in half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gcore.models.decoders import MASKED_LOGIT

ChunkFunction = Callable[..., Any]


class Scaling(NamedTuple):
    """What the model does to the outputs of its last layer: cap * tanh(scale * x / cap), or scale * x without a cap.
    Then, logits of forbidden tokens are masked."""

    scale: float = 1.0
    cap: float | None = None
    forbidden: tuple[int, ...] = ()


def token_logprobs(
    hidden_SD: Tensor,
    weight_VD: Tensor,
    targets_S: Tensor,
    temperature_S: Tensor,
    scaling: Scaling,
    chunk: int,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of each step, in float32, differentiable. `chunk`: steps per piece."""
    functions = (_score, _differentiate) if not compiled else (_compiled(_score), _compiled(_differentiate))
    inputs = hidden_SD, weight_VD, targets_S, temperature_S
    logprobs_S, entropy_S = _TokenLogprobs.apply(*inputs, scaling, chunk, functions)
    return logprobs_S, entropy_S


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: Tensor,
        weight_VD: Tensor,
        targets_S: Tensor,
        temperature_S: Tensor,
        scaling: Scaling,
        chunk: int,
        functions: tuple[ChunkFunction, ChunkFunction],
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        score, ctx.differentiate = functions
        parts = [
            score(hidden @ weight_VD.t(), targets, temperature, *scaling)
            for hidden, targets, temperature in _pieces(chunk, hidden_SD, targets_S, temperature_S)
        ]
        logprobs_S, entropy_S, logsumexp_S = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_SD, weight_VD, targets_S, temperature_S, logsumexp_S, entropy_S)
        ctx.scaling, ctx.chunk = scaling, chunk
        return logprobs_S, entropy_S

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_SD, weight_VD, targets_S, temperature_S, logsumexp_S, entropy_S = ctx.saved_tensors
        zeros = torch.zeros_like(logsumexp_S)
        for_logprobs, for_entropy = (zeros if gradient is None else gradient for gradient in gradients)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        hidden_grad = torch.empty_like(hidden_SD) if wants_hidden else None
        columns = (hidden_SD, targets_S, temperature_S, logsumexp_S, entropy_S, for_logprobs, for_entropy)
        start = 0
        for hidden, *rest in _pieces(ctx.chunk, *columns):
            logits_grad = ctx.differentiate(hidden @ weight_VD.t(), *rest, *ctx.scaling)
            if hidden_grad is not None:
                hidden_grad[start : start + len(hidden)] = logits_grad @ weight_VD
            if weight_grad is not None:
                weight_grad += logits_grad.t() @ hidden
            start += len(hidden)
        weights = None if weight_grad is None else weight_grad.to(weight_VD.dtype)
        return hidden_grad, weights, None, None, None, None, None


def _pieces(chunk: int, *columns: Tensor) -> Any:
    return zip(*(column.split(chunk) for column in columns), strict=True)


def _logits(
    raw: Tensor, temperature_S: Tensor, scale: float, cap: float | None, forbidden: tuple[int, ...]
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
    return logits, slope / temperature_S[:, None]


def _score(
    raw: Tensor,
    targets_S: Tensor,
    temperature_S: Tensor,
    scale: float,
    cap: float | None,
    forbidden: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    logits, _ = _logits(raw, temperature_S, scale, cap, forbidden)
    logsumexp_S = torch.logsumexp(logits, -1)
    chosen_S = logits.gather(-1, targets_S[:, None])[:, 0]
    mean_S = ((logits - logsumexp_S[:, None]).exp() * logits).sum(-1)
    return chosen_S - logsumexp_S, logsumexp_S - mean_S, logsumexp_S


def _differentiate(
    raw: Tensor,
    targets_S: Tensor,
    temperature_S: Tensor,
    logsumexp_S: Tensor,
    entropy_S: Tensor,
    for_logprobs_S: Tensor,
    for_entropy_S: Tensor,
    scale: float,
    cap: float | None,
    forbidden: tuple[int, ...] = (),
) -> Tensor:
    """d logprob / d logit = [target] - p, and d entropy / d logit = -p (log p + entropy)."""
    logits, slope = _logits(raw, temperature_S, scale, cap, forbidden)
    logprobs = logits - logsumexp_S[:, None]
    probabilities = logprobs.exp()
    at_target = torch.arange(raw.shape[-1], device=raw.device) == targets_S[:, None]
    gradient = for_logprobs_S[:, None] * (at_target.float() - probabilities)
    gradient = gradient - for_entropy_S[:, None] * probabilities * (logprobs + entropy_S[:, None])
    return (gradient * slope).to(raw.dtype)


_COMPILED: dict[ChunkFunction, ChunkFunction] = {}


def _compiled(function: ChunkFunction) -> ChunkFunction:
    if function not in _COMPILED:
        _COMPILED[function] = torch.compile(function, dynamic=True)
    return _COMPILED[function]
