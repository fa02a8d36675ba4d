"""From the outputs of a network to the loss and the metrics. Pure functions. A new loss or metric changes this file
alone.

    StepOutputs (of the network), StepColumns (of the samples) ──objective──> loss, {"actor/entropy": Part(...), ...}

`_S` runs over all response steps of a packed micro-batch, sample after sample. A loss returns one number per step.
`step_weights` returns the weight of each step, with *global* denominators, so that the sum over micro-batches and ranks
is the loss of one process that holds the whole batch. Sums run over the actions (mask_S). Metrics add up too: each one
has its own total and weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gcore.config.algorithm import Algorithm
from gcore.content.media import on_device
from gcore.protocols import Metric, add_metrics
from gcore.types import Key, MiniBatch, Sample, UserError

if TYPE_CHECKING:
    from gcore.training.step_model import StepBatch

ColumnName = Literal[
    "old_logprobs", "ref_logprobs", "ref_location", "penalties", "values", "advantages", "returns"
]  # penalties: kl_coef x KL between the policy before the update and the reference


@dataclass(frozen=True, slots=True)
class StepColumns:
    """What the objective knows about the steps of a micro-batch. `mask_S`: 1.0 where the step is an action."""

    mask_S: Tensor
    sample_S: Tensor  # index of each step's sample
    num_samples: int  # of this micro-batch
    rollout_logprobs_S: Tensor  # of the engine
    advantages_S: Tensor
    old_logprobs_S: Tensor | None = None  # of the policy before the update
    ref_logprobs_S: Tensor | None = None  # of the reference model
    ref_location_SD: Tensor | None = None  # of the reference model, see objective.StepOutputs
    rewards_B: Tensor | None = None  # of each sample: of a pair, the chosen answer has the higher one
    values_S: Tensor | None = None  # of the critic before the update
    returns_S: Tensor | None = None  # what the critic should predict
    actions_B: Tensor | None = None  # of the trajectory of each sample, if one has other segments

    def at_actions(self, values_S: Tensor) -> Tensor:
        """0 at all other steps, whatever is there. A product with the mask would leave NaN: NaN x 0 is NaN."""
        is_action = (self.mask_S > 0).reshape(-1, *[1] * (values_S.ndim - 1))  # of locations: S x D
        return torch.where(is_action, values_S, 0.0)

    def masked(self) -> StepColumns:
        """All columns at the actions."""
        names = ("rollout_logprobs_S", "advantages_S", "old_logprobs_S", "ref_logprobs_S", "values_S", "returns_S")
        columns = {name: getattr(self, name) for name in (*names, "ref_location_SD")}
        masked: dict[str, Any] = {name: self.at_actions(each) for name, each in columns.items() if each is not None}
        return replace(self, **masked)


@dataclass(slots=True)
class StepData:
    """The samples of a rank in one training step, and the columns that the rank has computed: values per step."""

    samples: dict[Key, Sample] = field(default_factory=dict)
    columns: dict[ColumnName, dict[Key, Tensor]] = field(default_factory=dict)
    packed: dict[Any, StepBatch] = field(default_factory=dict)  # for other networks and passes

    def clear(self) -> None:
        self.samples.clear()
        self.columns.clear()
        self.packed.clear()


def step_columns(packed: StepBatch, data: StepData, device: torch.device) -> StepColumns:
    """The columns of a packed micro-batch, in the order of its steps."""

    def column(name: ColumnName) -> Tensor | None:
        values = data.columns.get(name)
        if values is None:
            return None
        if packed.is_padding:  # also of a rank without any samples, whose columns are empty
            return torch.zeros(1, device=device)
        return torch.cat([values[key] for key in packed.keys]).to(device, torch.float32)

    def stored(arrays: list[np.ndarray]) -> Tensor:
        return on_device(np.concatenate(arrays).astype(np.float32) if arrays else np.zeros(1, np.float32), device)

    samples = [] if packed.is_padding else [data.samples[key] for key in packed.keys]
    mask_S = stored([s.mask_S for s in samples])
    advantages_S = column("advantages")
    return StepColumns(
        mask_S=mask_S,
        sample_S=packed.sample_S,
        num_samples=len(packed.keys),
        rollout_logprobs_S=stored([s.rollout_logprobs_S for s in samples]),
        advantages_S=torch.zeros_like(mask_S) if advantages_S is None else advantages_S,
        rewards_B=on_device(np.array([sample.reward or 0.0 for sample in samples], np.float32), device),
        old_logprobs_S=column("old_logprobs"),
        ref_logprobs_S=column("ref_logprobs"),
        ref_location_SD=column("ref_location"),
        values_S=column("values"),
        returns_S=column("returns"),
        actions_B=stored([_trajectory_actions(samples)]) if any(s.trajectory_actions for s in samples) else None,
    )


def _trajectory_actions(samples: Sequence[Sample]) -> np.ndarray:
    return np.array([s.trajectory_actions or int(s.mask_S.sum()) for s in samples])


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
    given = [each for each in outputs if each is not None]  # the last one may be missing
    return StepOutputs(*map(columns.at_actions, given)), columns.masked()


def demonstrations(mini: MiniBatch, name: Literal["warm_start", "sft"] = "sft") -> Objective:
    """Mean negative logprob of the tokens of the answers. `name`: of the metric."""

    def objective(outputs: Sequence[Tensor], columns: StepColumns) -> tuple[Tensor, Metrics]:
        (logprobs_S, entropy_S, *_), columns = at_actions(outputs, columns)
        nll = -logprobs_S.sum()
        metrics = {f"{name}/loss": Part(nll.detach().double(), columns.mask_S.double().sum())}
        if name == "sft":
            metrics[ENTROPY] = _per_action(entropy_S, columns)
        return nll / max(mini.num_actions, 1), metrics

    return objective


def policy(
    algorithm: Algorithm, mini: MiniBatch, max_response_length: int, own_loss: OwnLoss | None = None
) -> Objective:
    """The loss of reinforcement learning. Without old logprobs, those of this forward pass are the old ones.
    `own_loss`: of the user, instead of a built-in one."""

    def objective(outputs: Sequence[Tensor], columns: StepColumns) -> tuple[Tensor, Metrics]:
        found, columns = at_actions(outputs, columns)
        logprobs_S, entropy_S, mask_S = found.logprobs_S, found.entropy_S, columns.mask_S
        weights_S = step_weights(columns, mini, algorithm.loss_aggregation, max_response_length)
        before_S = logprobs_S.detach() if columns.old_logprobs_S is None else columns.old_logprobs_S
        steps = Steps(logprobs_S, before_S, columns.advantages_S, mask_S, columns.sample_S, columns.num_samples)
        if own_loss is None:
            loss_S, clipped_S = POLICY_LOSSES[algorithm.policy_loss](steps, algorithm)
            own_metrics = {"clip_frac": clipped_S}
        else:
            loss_S, own_metrics = call_own(own_loss, steps, algorithm)
        importance_S, capped_S, floored_S = importance(before_S, columns.rollout_logprobs_S, steps, algorithm)
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
            change_S = kl_penalty(before_S, logprobs_S)  # sampled by the policy before the update
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
        return (outputs.location_SD - columns.ref_location_SD).square().sum(-1) / 2
    if columns.ref_logprobs_S is None:
        return None
    policy_S = before_S if algorithm.kl_in_reward else outputs.logprobs_S
    return kl_penalty(policy_S, columns.ref_logprobs_S, algorithm.kl_estimator)


def value(mini: MiniBatch, clip: float | None) -> Objective:
    """The loss of the critic, a mean over all actions. Its StepModel returns one value per step."""

    def objective(outputs: Sequence[Tensor], columns: StepColumns) -> tuple[Tensor, Metrics]:
        columns = columns.masked()
        values_S = columns.at_actions(outputs[0])
        returns_S, old_S = columns.returns_S, columns.values_S
        assert returns_S is not None and old_S is not None, "no values: `prepare` computes them"
        loss_S, clipped_S = value_loss(values_S, old_S, returns_S, clip)
        loss = (loss_S * step_weights(columns, mini)).sum()
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


def to_metrics(micros: Sequence[Metrics]) -> dict[str, Metric]:
    """The metrics of a mini-batch, as numbers. Waits for the device, once."""
    parts = [(name, part) for metrics in micros for name, part in metrics.items()]
    if not parts:
        return {}
    numbers = torch.stack([value.double() for _, part in parts for value in part[:2]]).tolist()
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return add_metrics(*({name: Metric(*pair, part.reducer)} for (name, part), pair in zip(parts, pairs, strict=True)))


# ---- losses of the policy and of the critic --------------------------------------------------------------------------


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
    mean = _sample_means(log_ratio, steps)[steps.sample_S]
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
        log_ratio = sample_sums(log_ratio, steps)[steps.sample_S]
    elif weights.level == "geometric":
        log_ratio = _sample_means(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), steps)[steps.sample_S]
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
    steps: Steps | StepColumns, mini: MiniBatch, aggregation: str = "token_mean", max_response_length: int = 0
) -> Tensor:
    """The weight of each step's loss. The denominators are those of the global mini-batch."""
    num_samples = max(mini.num_samples, 1)
    match aggregation:
        case "token_mean":
            return steps.mask_S / max(mini.num_actions, 1)
        case "sequence_mean":
            lengths = steps.actions_B if isinstance(steps, StepColumns) else None  # a trajectory weighs as one sample
            lengths = sample_sums(torch.ones_like(steps.mask_S), steps) if lengths is None else lengths
            return steps.mask_S / lengths.clamp(min=1)[steps.sample_S] / num_samples
        case "fixed_length":
            return steps.mask_S / (num_samples * max_response_length)
        case _:
            raise AssertionError(aggregation)


def _log_ratio(steps: Steps) -> Tensor:
    return (steps.logprobs_S - steps.old_logprobs_S).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sample_sums(values_S: Tensor, steps: Steps | StepColumns) -> Tensor:
    """Sum over the actions of each sample."""
    zeros = torch.zeros(steps.num_samples, device=values_S.device, dtype=values_S.dtype)
    return zeros.index_add(0, steps.sample_S, torch.where(steps.mask_S > 0, values_S, 0.0))


def _sample_means(values_S: Tensor, steps: Steps) -> Tensor:
    return sample_sums(values_S, steps) / sample_sums(torch.ones_like(values_S), steps).clamp(min=1)


def _clipped(ratio: Tensor, advantages: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high) * advantages
    loss = torch.maximum(plain, clipped)
    if algorithm.clip_ratio_dual is not None:
        bound = -algorithm.clip_ratio_dual * advantages
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, clipped > plain
