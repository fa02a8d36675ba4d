"""Objectives of pairs: pure functions of the steps of a packed micro-batch.

    logprobs_S ──sum over the actions of each sample──> logps_B ──chosen, rejected──> Pairs ──loss_P──> mean over pairs

The two answers of a pair are neighbours in a micro-batch (preparation/balance.py), and the chosen one has the higher
reward. `_B` runs over samples, `_P` over pairs. Denominators are those of the global mini-batch, so the losses of all
micro-batches and ranks add up. A new loss is a function and an entry in PAIR_LOSSES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gcore.config.preference import Preference
from gcore.training.objective import (
    ENTROPY,
    Metrics,
    Objective,
    Part,
    StepColumns,
    StepData,
    at_actions,
    sample_sums,
    step_columns,
)
from gcore.types import Key, MicroBatch, MiniBatch


class Pairs(NamedTuple):
    """Sums of logprobs over the answers. Without a reference model, `ref_*` are 0."""

    chosen_P: Tensor
    rejected_P: Tensor
    ref_chosen_P: Tensor
    ref_rejected_P: Tensor
    chosen_length_P: Tensor
    rejected_length_P: Tensor

    @property
    def chosen_ratio_P(self) -> Tensor:
        """log p_policy - log p_reference of the chosen answers."""
        return self.chosen_P - self.ref_chosen_P

    @property
    def rejected_ratio_P(self) -> Tensor:
        return self.rejected_P - self.ref_rejected_P

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Mean logprob of a token, minus that of the reference."""
        return self.chosen_ratio_P / self.chosen_length_P, self.rejected_ratio_P / self.rejected_length_P


class PairValues(NamedTuple):
    loss_P: Tensor
    chosen_reward_P: Tensor  # implicit rewards, for the metrics
    rejected_reward_P: Tensor


def _rewarded(loss_P: Tensor, pairs: Pairs, settings: Preference) -> PairValues:
    return PairValues(loss_P, settings.beta * pairs.chosen_ratio_P, settings.beta * pairs.rejected_ratio_P)


def dpo(pairs: Pairs, settings: Preference) -> PairValues:
    """-log sigmoid(beta * difference of the log ratios) (Rafailov et al. 2023); smoothed labels: cDPO."""
    logits_P, noise = settings.beta * (pairs.chosen_ratio_P - pairs.rejected_ratio_P), settings.label_smoothing
    loss_P = -(1 - noise) * F.logsigmoid(logits_P) - noise * F.logsigmoid(-logits_P)
    return _rewarded(loss_P, pairs, settings)


def robust_dpo(pairs: Pairs, settings: Preference) -> PairValues:
    """Unbiased if each pair is labelled the wrong way with probability `label_smoothing` (Chowdhury et al. 2024)."""
    logits_P, noise = settings.beta * (pairs.chosen_ratio_P - pairs.rejected_ratio_P), settings.label_smoothing
    loss_P = (-(1 - noise) * F.logsigmoid(logits_P) + noise * F.logsigmoid(-logits_P)) / (1 - 2 * noise)
    return _rewarded(loss_P, pairs, settings)


def ipo(pairs: Pairs, settings: Preference) -> PairValues:
    """(difference of the mean log ratios - 1 / (2 beta))^2 (Azar et al. 2023), with means over tokens as in TRL."""
    chosen_P, rejected_P = pairs.means
    return _rewarded((chosen_P - rejected_P - 1 / (2 * settings.beta)).square(), pairs, settings)


def hinge(pairs: Pairs, settings: Preference) -> PairValues:
    """max(0, 1 - beta * difference of the log ratios): SLiC, RSO."""
    return _rewarded(F.relu(1 - settings.beta * (pairs.chosen_ratio_P - pairs.rejected_ratio_P)), pairs, settings)


def apo_zero(pairs: Pairs, settings: Preference) -> PairValues:
    """Anchored: raises chosen answers and lowers rejected ones (D'Oosterlinck et al. 2024, eq. 7)."""
    values = _rewarded(pairs.chosen_P, pairs, settings)
    return values._replace(loss_P=1 - values.chosen_reward_P.sigmoid() + values.rejected_reward_P.sigmoid())


def apo_down(pairs: Pairs, settings: Preference) -> PairValues:
    """Anchored: lowers both, rejected answers more (eq. 8); for chosen answers that are worse than the policy's."""
    values = _rewarded(pairs.chosen_P, pairs, settings)
    difference_P = values.chosen_reward_P - values.rejected_reward_P
    return values._replace(loss_P=values.chosen_reward_P.sigmoid() + 1 - difference_P.sigmoid())


def orpo(pairs: Pairs, settings: Preference) -> PairValues:
    """Mean NLL of the chosen answer - beta * log sigmoid(log odds ratio), without a reference (Hong et al. 2024)."""
    chosen_P, rejected_P = pairs.means
    log_odds_P = chosen_P - rejected_P - (_log1mexp(chosen_P) - _log1mexp(rejected_P))
    loss_P = -chosen_P - settings.beta * F.logsigmoid(log_odds_P)
    return PairValues(loss_P, settings.beta * chosen_P, settings.beta * rejected_P)


def simpo(pairs: Pairs, settings: Preference) -> PairValues:
    """-log sigmoid(beta * difference of the mean logprobs - margin), without a reference (Meng et al. 2024)."""
    chosen_P, rejected_P = pairs.means
    loss_P = -F.logsigmoid(settings.beta * (chosen_P - rejected_P) - settings.margin)
    return PairValues(loss_P, settings.beta * chosen_P, settings.beta * rejected_P)


def bradley_terry(pairs: Pairs, settings: Preference) -> PairValues:
    """Of a reward model, whose scores take the place of logprobs: -log of the probability that the chosen answer wins.
    Equal scores: log 2."""
    return PairValues(-F.logsigmoid(pairs.chosen_P - pairs.rejected_P), pairs.chosen_P, pairs.rejected_P)


PairLoss = Callable[[Pairs, Preference], PairValues]
PAIR_LOSSES: dict[str, PairLoss] = {
    "dpo": dpo,
    "robust_dpo": robust_dpo,
    "ipo": ipo,
    "hinge": hinge,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "orpo": orpo,
    "simpo": simpo,
    "reward_model": bradley_terry,
}


def kto(settings: Preference, mini: MiniBatch, kl: float) -> Objective:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024) of labelled answers, a mean over them:

        good: 1 - sigmoid(beta (log ratio - kl))        bad: 1 - sigmoid(beta (kl - log ratio))

    A "pair" is an answer and the answer of another row to the same prompt, which only the KL needs: `mismatched_kl`.
    """

    def of_pairs(pairs: Pairs, columns: StepColumns) -> tuple[Tensor, Metrics]:
        rewards_B = columns.rewards_B
        assert rewards_B is not None
        good_P = torch.maximum(rewards_B[::2], rewards_B[1::2]) > 0.5
        signed_P = torch.where(good_P, pairs.chosen_ratio_P - kl, kl - pairs.chosen_ratio_P)
        weight_P = torch.where(good_P, settings.desirable_weight, settings.undesirable_weight)
        loss_P = weight_P * (1 - (settings.beta * signed_P).sigmoid())
        reward_P = settings.beta * pairs.chosen_ratio_P
        return loss_P, {
            "preference/kl": _mean(torch.full_like(loss_P, kl)),
            "preference/chosen_reward": _mean(reward_P[good_P]),
            "preference/rejected_reward": _mean(reward_P[~good_P]),
            "preference/chosen_logp": _mean(pairs.chosen_P[good_P]),
            "preference/rejected_logp": _mean(pairs.chosen_P[~good_P]),
        }

    return _mean_over_pairs(mini, of_pairs)


def mismatched_kl(keys: Iterable[Key], data: StepData) -> dict[Key, float]:
    """Log ratios of the policy before the update and the reference, of the answers of other rows."""
    old, ref = data.columns["old_logprobs"], data.columns["ref_logprobs"]
    ratios = {}
    for key in keys:
        sample = data.samples[key]
        if sample.reward is not None and sample.reward < 0:
            mask_S = torch.from_numpy(sample.mask_S).to(old[key].device)
            ratios[key] = float(torch.where(mask_S, old[key] - ref[key], 0.0).double().sum())
    return ratios


def preference(loss: str, settings: Preference, mini: MiniBatch) -> Objective:
    def of_pairs(pairs: Pairs, columns: StepColumns) -> tuple[Tensor, Metrics]:
        values = PAIR_LOSSES[loss](pairs, settings)
        loss_P = values.loss_P
        if settings.sft_coef:
            loss_P = loss_P - settings.sft_coef * pairs.chosen_P / pairs.chosen_length_P
        margin_P = values.chosen_reward_P - values.rejected_reward_P
        return loss_P, {
            "preference/accuracy": _mean((margin_P > 0).double()),
            "preference/margin": _mean(margin_P),
            "preference/chosen_reward": _mean(values.chosen_reward_P),
            "preference/rejected_reward": _mean(values.rejected_reward_P),
            "preference/chosen_logp": _mean(pairs.chosen_P),
            "preference/rejected_logp": _mean(pairs.rejected_P),
        }

    return _mean_over_pairs(mini, of_pairs)


def _mean_over_pairs(mini: MiniBatch, of_pairs: Callable[[Pairs, StepColumns], tuple[Tensor, Metrics]]) -> Objective:
    """Of the mini-batch. `of_pairs`: the loss of each pair, and metrics."""

    def objective(outputs: Sequence[Tensor], columns: StepColumns) -> tuple[Tensor, Metrics]:
        (logprobs_S, entropy_S, *_), columns = at_actions(outputs, columns)
        if columns.num_samples < 2:  # padding
            return 0.0 * logprobs_S.sum(), {}
        loss_P, metrics = of_pairs(to_pairs(logprobs_S, columns), columns)
        entropy = Part(entropy_S.detach().double().sum(), columns.mask_S.double().sum())
        total = loss_P.sum() / max(mini.num_samples // 2, 1)
        return total, {"preference/loss": _mean(loss_P), **metrics, ENTROPY: entropy}

    return objective


@torch.no_grad()
def without_gradients(
    objective: Objective, micro: MicroBatch, outputs: Mapping[Key, Tensor], data: StepData
) -> Metrics:
    """The metrics of a micro-batch, from the outputs of a pass that was made before; the entropy is not known."""
    keys = tuple(key for row in micro.rows for key in row)
    logprobs_S = torch.cat([outputs[key] for key in keys]).float()
    sample_S = torch.cat([torch.full_like(outputs[key], i, dtype=torch.int64) for i, key in enumerate(keys)])
    columns = step_columns(ComputedSteps(sample_S, keys), data, logprobs_S.device)
    _, metrics = objective((logprobs_S, torch.zeros_like(logprobs_S)), columns)
    return {name: part.shared_by(micro.context) for name, part in metrics.items() if name != ENTROPY}


class ComputedSteps(NamedTuple):
    """Implements step_model.StepBatch for steps whose outputs are known."""

    sample_S: Tensor
    keys: tuple[Key, ...]
    is_padding: bool = False

    def joined(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        return outputs


def to_pairs(logprobs_S: Tensor, columns: StepColumns) -> Pairs:
    """Samples 2i and 2i + 1 are pair i."""
    ref_S, rewards_B = columns.ref_logprobs_S, columns.rewards_B
    assert rewards_B is not None
    sums_B = [sample_sums(logprobs_S, columns), *([] if ref_S is None else [sample_sums(ref_S, columns)])]
    lengths_B = sample_sums(torch.ones_like(logprobs_S), columns).clamp(min=1)
    first_P = rewards_B[::2] > rewards_B[1::2]

    def split(values_B: Tensor) -> tuple[Tensor, Tensor]:
        a_P, b_P = values_B[::2], values_B[1::2]
        return torch.where(first_P, a_P, b_P), torch.where(first_P, b_P, a_P)

    chosen_P, rejected_P = split(sums_B[0])
    references = split(sums_B[1]) if ref_S is not None else (torch.zeros_like(chosen_P), torch.zeros_like(chosen_P))
    return Pairs(chosen_P, rejected_P, *references, *split(lengths_B))


def _mean(values_P: Tensor) -> Part:
    """Over the pairs of all micro-batches and ranks."""
    values_P = values_P.detach().double()
    return Part(values_P.sum(), torch.tensor(float(len(values_P)), dtype=torch.double, device=values_P.device))


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, without cancellation near 0 (Maechler 2012)."""
    x = x.clamp(max=-1e-7)
    return torch.where(x > -0.6931472, (-torch.expm1(x)).log(), torch.log1p(-x.exp()))
