"""From the outputs of a network to the loss and the metrics. Pure functions. A new loss or metric changes this file
alone (and losses.py, for its formula).

    StepOutputs (of the network), StepColumns (of the samples) ──objective──> loss, {"actor/entropy": Part(...), ...}

Sums run over the actions (mask_S). Denominators are those of the global mini-batch (losses.step_weights), so the losses
of all micro-batches and ranks add up. Metrics add up too: each one has its own total and weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gcore.config.algorithm import Algorithm
from gcore.protocols import Metric, add_metrics
from gcore.training import losses
from gcore.training.micro import StepColumns
from gcore.types import MiniBatch


class Part(NamedTuple):
    """A protocols.Metric of one micro-batch, as tensors: the host does not wait for the device."""

    total: Tensor
    weight: Tensor
    reducer: Literal["mean", "max"] = "mean"

    def shared_by(self, num_ranks: int) -> Part:
        """The part of one rank, if this many ranks computed this one together. Their sum counts it once."""
        return self if self.reducer == "max" else Part(self.total / num_ranks, self.weight / num_ranks)


Metrics = dict[str, Part]
ENTROPY, KL, UPDATE_KL = "actor/entropy", "actor/kl", "actor/update_kl"  # the rank also reads these


class StepOutputs(NamedTuple):
    """What a network computes for each step of a micro-batch."""

    logprobs_S: Tensor
    entropy_S: Tensor
    location_SD: Tensor | None = None  # of Gaussian steps: the KL is half the squared distance of two locations


Objective = Callable[[Sequence[Tensor], StepColumns], tuple[Tensor, Metrics]]  # of the outputs of a StepModel


def at_actions(outputs: Sequence[Tensor], columns: StepColumns) -> tuple[StepOutputs, StepColumns]:
    """What an objective computes with: 0 at steps that are no actions. Masks of the result would be too late, because
    the gradient of NaN is NaN."""
    found = StepOutputs(*outputs)
    logprobs_S, entropy_S = columns.at_actions(found.logprobs_S), columns.at_actions(found.entropy_S)
    return found._replace(logprobs_S=logprobs_S, entropy_S=entropy_S), columns.masked()


def imitation(mini: MiniBatch) -> Objective:
    """Mean negative logprob of demonstrations."""

    def objective(outputs: Sequence[Tensor], columns: StepColumns) -> tuple[Tensor, Metrics]:
        found, columns = at_actions(outputs, columns)
        loss = -(found.logprobs_S * _weights(columns, mini, "token_mean")).sum()
        return loss, {"warm_start/loss": _per_update(loss, columns, mini)}

    return objective


def policy(
    algorithm: Algorithm, mini: MiniBatch, max_response_length: int, own_loss: losses.OwnLoss | None = None
) -> Objective:
    """The loss of reinforcement learning. Without old logprobs, those of this forward pass are the old ones.
    `own_loss`: of the user, instead of a built-in one."""

    def objective(outputs: Sequence[Tensor], columns: StepColumns) -> tuple[Tensor, Metrics]:
        found, columns = at_actions(outputs, columns)
        logprobs_S, entropy_S, mask_S = found.logprobs_S, found.entropy_S, columns.mask_S
        weights_S = _weights(columns, mini, algorithm.loss_aggregation, max_response_length)
        before_S = logprobs_S.detach() if columns.old_logprobs_S is None else columns.old_logprobs_S
        steps = losses.Steps(logprobs_S, before_S, columns.advantages_S, mask_S, columns.sample_S, columns.num_samples)
        if own_loss is None:
            loss_S, clipped_S = losses.POLICY_LOSSES[algorithm.policy_loss](steps, algorithm)
            own_metrics = {"clip_frac": clipped_S}
        else:
            loss_S, own_metrics = losses.call_own(own_loss, steps, algorithm)
        importance_S, capped_S, floored_S = losses.importance(before_S, columns.rollout_logprobs_S, steps, algorithm)
        applied_S = torch.ones_like(importance_S) if algorithm.importance.level == "none" else importance_S
        pg_loss = (columns.at_actions(loss_S) * applied_S * weights_S).sum()
        loss = pg_loss - algorithm.entropy_coef * (entropy_S * weights_S).sum()
        diff_S = (before_S - columns.rollout_logprobs_S).abs()
        metrics = {
            "actor/pg_loss": _per_update(pg_loss, columns, mini),
            ENTROPY: _per_action(entropy_S, columns),
            **{f"actor/{name}": _per_action(values_S, columns) for name, values_S in own_metrics.items()},
            "actor/approx_kl": _per_action(before_S - logprobs_S, columns),
            "rollout/logprob_diff_mean": _per_action(diff_S, columns),
            "rollout/logprob_diff_max": _maximum(diff_S, columns),
            "rollout/importance_mean": _per_action(importance_S, columns),
            "rollout/importance_capped_frac": _per_action(capped_S, columns),
            "rollout/importance_floored_frac": _per_action(floored_S, columns),
        }
        if algorithm.early_stop_kl is not None:
            change_S = losses.kl_penalty(before_S, logprobs_S)  # sampled by the policy before the update
            metrics[UPDATE_KL] = _per_action(change_S, columns)
        kl_S = _kl(found, before_S, columns, algorithm)
        if kl_S is not None:
            if algorithm.kl_in == "loss":
                loss = loss + algorithm.kl_coef * (kl_S * applied_S * weights_S).sum()
            metrics[KL] = _per_action(kl_S, columns)
        return loss, {"actor/loss": _per_update(loss, columns, mini), **metrics}

    return objective


def _kl(outputs: StepOutputs, before_S: Tensor, columns: StepColumns, algorithm: Algorithm) -> Tensor | None:
    """KL of each step to the reference, if there is one: estimated from logprobs, or that of two Gaussians."""
    if columns.ref_location_SD is not None and outputs.location_SD is not None:
        return columns.at_actions((outputs.location_SD - columns.ref_location_SD).square().sum(-1) / 2)
    if columns.ref_logprobs_S is None:
        return None
    policy_S = before_S if algorithm.kl_in_reward else outputs.logprobs_S
    return losses.kl_penalty(policy_S, columns.ref_logprobs_S, algorithm.kl_estimator)


def value(mini: MiniBatch, clip: float | None) -> Objective:
    """The loss of the critic, a mean over all actions. Its StepModel returns one value per step."""

    def objective(outputs: Sequence[Tensor], columns: StepColumns) -> tuple[Tensor, Metrics]:
        columns = columns.masked()
        values_S = columns.at_actions(outputs[0])
        returns_S, old_S = columns.returns_S, columns.values_S
        assert returns_S is not None and old_S is not None, "no values: `prepare` computes them"
        loss_S, clipped_S = losses.value_loss(values_S, old_S, returns_S, clip)
        loss = (loss_S * _weights(columns, mini, "token_mean")).sum()
        return loss, {
            "critic/loss": _per_update(loss, columns, mini),
            "critic/value_mean": _per_action(values_S, columns),
            "critic/return_mean": _per_action(returns_S, columns),
            "critic/clip_frac": _per_action(clipped_S, columns),
        }

    return objective


# ---- metrics: how the parts of micro-batches, mini-batches and ranks become one number


def _per_action(values_S: Tensor, columns: StepColumns) -> Part:
    """The mean over all actions."""
    return Part(columns.at_actions(values_S.detach()).double().sum(), columns.mask_S.double().sum())


def _per_update(part: Tensor, columns: StepColumns, mini: MiniBatch) -> Part:
    """The sum over the micro-batches and ranks of an update; the mean over updates."""
    return Part(part.detach().double(), columns.mask_S.double().sum() / max(mini.num_actions, 1))


def _maximum(values_S: Tensor, columns: StepColumns) -> Part:
    """The largest value of an action; values are not negative."""
    return Part(columns.at_actions(values_S.detach()).double().max(), torch.ones((), device=values_S.device), "max")


def _weights(columns: StepColumns, mini: MiniBatch, aggregation: str, max_response_length: int = 0) -> Tensor:
    return losses.step_weights(
        columns.mask_S,
        columns.sample_S,
        columns.num_samples,
        aggregation=aggregation,
        num_actions=mini.num_actions,
        num_samples=mini.num_samples,
        max_response_length=max_response_length,
    )


def to_metrics(micros: Sequence[Metrics]) -> dict[str, Metric]:
    """The metrics of a mini-batch, as numbers. Waits for the device, once."""
    parts = [(name, part) for metrics in micros for name, part in metrics.items()]
    if not parts:
        return {}
    numbers = torch.stack([value.double() for _, part in parts for value in part[:2]]).tolist()
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return add_metrics(*({name: Metric(*pair, part.reducer)} for (name, part), pair in zip(parts, pairs, strict=True)))
