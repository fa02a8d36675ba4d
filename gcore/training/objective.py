"""From a micro-batch and its logprobs to the loss and the logged sums. Pure functions.

All sums run over the actions (mask_S). Denominators are those of the global mini-batch (losses.step_weights), so the
losses of all micro-batches and ranks add up.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gcore.config.tree import Algorithm
from gcore.training import losses
from gcore.training.micro import Packed
from gcore.types import Bools, Floats, KlSums, MiniBatch

Parts = dict[str, Tensor]


def imitation(packed: Packed, mini: MiniBatch, logprobs_S: Tensor) -> tuple[Tensor, Parts]:
    """Mean negative logprob of the demonstrations."""
    loss = -(logprobs_S * _weights(packed, mini, "token_mean")).sum()
    return loss, {"loss": loss}


def policy(
    algorithm: Algorithm,
    packed: Packed,
    mini: MiniBatch,
    logprobs_S: Tensor,
    entropy_S: Tensor,
    old_S: Tensor | None,
    ref_S: Tensor | None,
    max_response_length: int,
) -> tuple[Tensor, Parts]:
    """`old_S`: logprobs before the first mini-batch; None: same as `logprobs_S`. `ref_S`: those of the reference."""
    weights_S = _weights(packed, mini, algorithm.loss_aggregation, max_response_length)
    mask_S, num_local = packed.loss_mask_S, len(packed.keys)
    before_S = logprobs_S.detach() if old_S is None else old_S
    steps = losses.Steps(logprobs_S, before_S, packed.advantages_S, mask_S, packed.sample_S, num_local)
    loss_S, clipped_S = losses.POLICY_LOSSES[algorithm.policy_loss](steps, algorithm)
    importance_S, capped_S, floored_S = losses.importance(before_S, packed.rollout_logprobs_S, steps, algorithm)
    applied_S = torch.ones_like(importance_S) if algorithm.importance == "none" else importance_S
    pg_loss = (loss_S * applied_S * weights_S).sum()
    loss = pg_loss - algorithm.entropy_coef * (entropy_S * weights_S).sum()
    parts = {
        "pg_loss": pg_loss,
        "entropy": (entropy_S * mask_S).sum(),
        "clipped": (clipped_S * mask_S).sum(),
        "approx_kl": ((before_S - logprobs_S) * mask_S).sum(),
        "logprob_diff": ((before_S - packed.rollout_logprobs_S).abs() * mask_S).sum(),
        "importance": (importance_S * mask_S).sum(),
        "importance_capped": (capped_S * mask_S).sum(),
        "importance_floored": (floored_S * mask_S).sum(),
        "actions": mask_S.sum(),
    }
    if ref_S is not None:
        policy_S = before_S if algorithm.kl_in_reward else logprobs_S
        kl_S = losses.kl_penalty(policy_S, ref_S, algorithm.kl_estimator)
        if algorithm.kl_in == "loss":
            loss = loss + algorithm.kl_coef * (kl_S * applied_S * weights_S).sum()
        parts["kl"] = (kl_S * mask_S).sum()
    return loss, {"loss": loss, **parts}


def _weights(packed: Packed, mini: MiniBatch, aggregation: str, max_response_length: int = 0) -> Tensor:
    return losses.step_weights(
        packed.loss_mask_S,
        packed.sample_S,
        len(packed.keys),
        aggregation=aggregation,
        num_actions=mini.num_actions,
        num_samples=mini.num_samples,
        max_response_length=max_response_length,
    )


def kl_to_go(kl_S: Floats, mask_S: Bools) -> tuple[np.ndarray, KlSums]:
    """KL-to-go: the KL of each action and of all later actions of the sample. Also its sums, for the controllers.

    [0.1, 0.2, 0.3], where the second is no action -> [0.4, 0.3, 0.3], KlSums(0.4, 0.7, 0.25)
    """
    counted_S = np.where(mask_S, kl_S.astype(np.float64), 0.0)
    kl_to_go_S = np.cumsum(counted_S[::-1])[::-1]
    actions = kl_to_go_S[mask_S]
    return kl_to_go_S, KlSums(float(counted_S.sum()), float(actions.sum()), float((actions**2).sum()))
