"""Losses of policy and critic: pure functions of the steps of a packed micro-batch, independent of ranks and devices.

`_S` runs over all response steps of the micro-batch, sample after sample. A loss returns one number per step.
`step_weights` returns the weight of each step, with *global* denominators, so that the sum over micro-batches and ranks
is the loss of one process that holds the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcore.config.algorithm import Algorithm
from gcore.types import UserError

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


@dataclass(frozen=True, slots=True)
class Steps:
    """Input of a policy loss. `sample_S`: index of each step's sample; `mask_S`: 1.0 where the step is an action."""

    logprobs_S: Tensor
    old_logprobs_S: Tensor
    advantages_S: Tensor
    mask_S: Tensor
    sample_S: Tensor
    num_samples: int


def ppo(steps: Steps, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Clipped surrogate, -min(r A, clip(r) A), with separate lower and upper ranges, and an optional dual clip.

    Returns the loss and, for logging, the steps where the clip was active.
    """
    ratio = _log_ratio(steps).exp()
    return _clipped(ratio, steps.advantages_S, algorithm)


def gspo(steps: Steps, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """The same surrogate with one ratio per sample: the geometric mean of its steps' ratios (GSPO)."""
    log_ratio = _log_ratio(steps)
    mean = _sample_mean(log_ratio, steps)[steps.sample_S]
    # value: the ratio of the sample; gradient: through each step's own logprob
    ratio = (mean.detach() + steps.logprobs_S - steps.logprobs_S.detach()).exp()
    return _clipped(ratio, steps.advantages_S, algorithm)


def cispo(steps: Steps, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """REINFORCE weighted by the clipped ratio, which has no gradient. So every step keeps its gradient (CISPO)."""
    ratio = _log_ratio(steps).exp().detach()
    clipped = ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    return -clipped * steps.advantages_S * steps.logprobs_S, clipped != ratio


def sapo(steps: Steps, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """A soft gate instead of the clip: sigmoid(tau (r - 1)) 4 / tau, which has slope 1 at r = 1 and falls off to both
    sides, faster for negative advantages (SAPO). Nothing is clipped."""
    ratio = _log_ratio(steps).exp()
    tau = torch.where(steps.advantages_S > 0, *algorithm.sapo_tau).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return -gate * steps.advantages_S, torch.zeros_like(ratio, dtype=torch.bool)


def reinforce(steps: Steps, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """-A log p: without a ratio, and so for one update per step (REINFORCE; ReMax, OPO, GPG)."""
    return -steps.advantages_S * steps.logprobs_S, torch.zeros_like(steps.logprobs_S, dtype=torch.bool)


PolicyLoss = Callable[[Steps, Algorithm], tuple[Tensor, Tensor]]
POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}
OwnLoss = Callable[[Steps, Algorithm], Any]  # of a user: loss_S, or also {"name": values_S}, with means over actions


def call_own(function: OwnLoss, steps: Steps, algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each step and the metrics. Checks the answer of the user's function."""
    answer = function(steps, algorithm)
    loss_S, metrics = answer if isinstance(answer, tuple) else (answer, {})
    shape = steps.logprobs_S.shape
    for name, values in {"loss": loss_S, **metrics}.items():
        if not isinstance(values, Tensor) or values.shape != shape:
            got = f"of shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise UserError(
                f"algorithm.policy_loss={algorithm.policy_loss} returned {name} {got}; expected a tensor with one "
                f"number per step, of shape {tuple(shape)}"
            )
    return loss_S, metrics


def value_loss(values_S: Tensor, old_values_S: Tensor, returns_S: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """Half of the squared error of each value. With `clip`, values are not rewarded for a change of more than that: the
    larger one of the plain and the clipped error. Returns the loss and the steps where the clip was active."""
    plain = (values_S - returns_S).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain, dtype=torch.bool)
    near_S = values_S.clamp(old_values_S - clip, old_values_S + clip)
    clipped = (near_S - returns_S).square()
    return torch.maximum(plain, clipped) / 2, clipped > plain


def importance(
    before_S: Tensor, rollout_S: Tensor, steps: Steps, algorithm: Algorithm
) -> tuple[Tensor, Tensor, Tensor]:
    """Importance weights, without gradient: they correct for the engine's policy, which sampled the steps.

    `before_S`: the trainer's logprobs before the update. `rollout_S`: the engine's logprobs at sampling. The ratio
    p_trainer / p_engine is that of the step (`token`; also `none`, for logging only), the product over the actions of
    the sample (`sequence`) or their geometric mean (`geometric`). Its logarithm is clamped to +-20.
    Returns the weights, and the steps where the ratio was above the cap and below the floor.
    """
    weights, log_ratio = algorithm.importance, (before_S - rollout_S).detach()
    if weights.level == "sequence":
        log_ratio = _sample_sum(log_ratio, steps)[steps.sample_S]
    elif weights.level == "geometric":
        log_ratio = _sample_mean(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), steps)[steps.sample_S]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    above, below = ratio > weights.cap, ratio < weights.floor
    if weights.mode == "mask":
        return ratio.masked_fill(above | below, 0.0), above, below
    return ratio.clamp(weights.floor, weights.cap), above, below


def kl_penalty(logprobs_S: Tensor, ref_logprobs_S: Tensor, estimator: str = "k3") -> Tensor:
    """Schulman's estimates of KL(policy || reference) per step; algorithm.kl_estimator has the formulas.

    Only k3 is bounded. The values of k1 and k3 are unbiased, but their gradients are not the gradient of the KL. The
    gradient of k2 is. `k1+` and `k3+` have the value of k1 or k3 and the gradient of k2.
    """
    difference = logprobs_S - ref_logprobs_S
    match estimator.removesuffix("+"):
        case "k1":
            value = difference
        case "k2":
            value = difference.square() / 2
        case "k3":
            towards_ref = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            value = (towards_ref.exp() - towards_ref - 1).clamp(max=MAX_K3)
        case _:
            raise AssertionError(estimator)
    if not estimator.endswith("+"):
        return value
    gradient = difference.square() / 2
    return value.detach() + gradient - gradient.detach()


def step_weights(
    steps_mask_S: Tensor,
    sample_S: Tensor,
    num_local: int,
    *,
    aggregation: str,
    num_actions: int,
    num_samples: int,
    max_response_length: int,
) -> Tensor:
    """The weight of each step's loss. The denominators are those of the global mini-batch."""
    match aggregation:
        case "token_mean":
            return steps_mask_S / max(num_actions, 1)
        case "sequence_mean":
            lengths = torch.zeros(num_local, device=sample_S.device, dtype=steps_mask_S.dtype).index_add_(
                0, sample_S, steps_mask_S
            )
            return steps_mask_S / lengths.clamp(min=1)[sample_S] / max(num_samples, 1)
        case "fixed_length":
            return steps_mask_S / (max(num_samples, 1) * max_response_length)
        case _:
            raise AssertionError(aggregation)


def _log_ratio(steps: Steps) -> Tensor:
    return (steps.logprobs_S - steps.old_logprobs_S).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _sample_sum(values_S: Tensor, steps: Steps) -> Tensor:
    """Sum over the actions of each sample."""
    zeros = torch.zeros(steps.num_samples, device=values_S.device, dtype=values_S.dtype)
    return zeros.index_add(0, steps.sample_S, torch.where(steps.mask_S > 0, values_S, 0.0))


def _sample_mean(values_S: Tensor, steps: Steps) -> Tensor:
    count = _sample_sum(torch.ones_like(values_S), steps)
    return _sample_sum(values_S, steps) / count.clamp(min=1)


def _clipped(ratio: Tensor, advantages: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high) * advantages
    loss = torch.maximum(plain, clipped)
    if algorithm.clip_ratio_dual is not None:
        bound = -algorithm.clip_ratio_dual * advantages
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, clipped > plain
