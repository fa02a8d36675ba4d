"""Advantages: scores of a group (the siblings of one prompt) -> one number per sample. Estimators are pure functions.

ranks ──KL of each sample, if it is part of the reward──> reward - overlong penalty - KL
                                compared within the group ──> TrainBatch.advantages ──> ranks

What needs values per step or the whole batch (KL per step, GAE, whitening) follows on the trainer ranks:
training/step_advantages.py. A user's estimator has the same form: GroupScores -> advantages, or also metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gcore.config.algorithm import Algorithm, Overlong
from gcore.preparation.samples import Groups, actions_of
from gcore.protocols import ControllerGroup, Metric, add_metrics
from gcore.types import Key, Scored, TrainBatch, UserError

Array = npt.NDArray[np.float64]
EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class GroupScores:
    """The samples of one prompt. GroupScores(rewards=[1, 0], lengths=[4, 7], parts={"exact": [1, 0]})"""

    rewards: Array  # after the overlong penalty and the KL in the reward
    lengths: Array  # actions of each sample; of a trajectory, those of all its segments
    parts: Mapping[str, Array] = field(default_factory=dict)  # rewards of the recipe, unweighted; NaN: does not apply
    weights: Mapping[str, float] = field(default_factory=dict)  # of the parts, in the sum that is the reward
    baseline: float | None = None  # reward of a greedy response, for estimators that need it


def grpo(group: GroupScores) -> Array:
    """(r - mean) / std within the group; std is the sample standard deviation (n - 1). Equal rewards give exactly 0."""
    return _normalized(group.rewards)


def dr_grpo(group: GroupScores) -> Array:
    """r - mean: not divided by std, which gives very easy and very hard prompts more weight (Dr.GRPO)."""
    if np.all(group.rewards == group.rewards[0]):  # a mean would leave noise, and GPG counts what is not 0
        return np.zeros_like(group.rewards)
    return group.rewards - group.rewards.mean()


def rloo(group: GroupScores) -> Array:
    """r minus the mean of the *other* siblings: the unbiased baseline (REINFORCE leave-one-out)."""
    rewards = group.rewards
    if len(rewards) < 2:  # only a teacher scores: there is nothing to compare
        return np.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def opo(group: GroupScores) -> Array:
    """r minus the mean weighted by length: the baseline of least variance if the gradient of a sample grows with its
    length (OPO)."""
    total = group.lengths.sum()
    return group.rewards - (group.lengths @ group.rewards / total if total else group.rewards.mean())


def gdpo(group: GroupScores) -> Array:
    """Each reward of the recipe normalized within the group, then their weighted sum (GDPO): a reward of large spread
    does not drown another one. What the penalties and the KL took from the reward is subtracted afterwards."""
    total = np.zeros_like(group.rewards)
    blended = np.zeros_like(group.rewards)
    for name, weight in group.weights.items():
        values = group.parts.get(name, np.full_like(group.rewards, np.nan))
        applies = ~np.isnan(values)
        if applies.any():
            total[applies] += weight * _normalized(values[applies])
            blended[applies] += weight * values[applies]
    return total + (group.rewards - blended)


def score(group: GroupScores) -> Array:
    """r itself: whitened over the whole batch afterwards (REINFORCE++), or compared with values (GAE)."""
    return group.rewards.copy()


def remax(group: GroupScores) -> Array:
    """r minus the reward of a greedy response (ReMax)."""
    assert group.baseline is not None, "no greedy response: controller/run_prompts.py makes it"
    return group.rewards - group.baseline


def _normalized(rewards: Array) -> Array:
    if len(rewards) < 2 or np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)


GroupEstimator = Callable[[GroupScores], Array]
GROUP_ESTIMATORS: dict[str, GroupEstimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": dr_grpo,
    "gdpo": gdpo,
    "reinforce_pp": score,
    "reinforce_pp_baseline": dr_grpo,
    "remax": remax,
    "gae": score,
}


def estimate(function: Callable[[GroupScores], Any], group: GroupScores, name: str) -> tuple[Array, dict[str, float]]:
    """Call an estimator, also a user's, and check its answer: one finite number per sample, perhaps with metrics.
    `name`: algorithm.adv_estimator."""
    answer = function(group)
    returned, metrics = answer if isinstance(answer, tuple) else (answer, {})
    values: Array = np.asarray(returned, np.float64)
    if values.shape != group.rewards.shape or not np.isfinite(values).all():
        raise UserError(
            f"algorithm.adv_estimator={name} returned {returned!r} for {len(group.rewards)} samples; expected one "
            "finite number per sample"
        )
    return values, {str(key): float(value) for key, value in metrics.items()}


def overlong_penalty(length: int, spec: Overlong, max_length: int) -> float:
    """Soft overlong punishment (DAPO): 0 up to max_length - buffer tokens, then linearly down to -penalty."""
    over = length - (max_length - spec.buffer)
    return -spec.penalty * min(over / spec.buffer, 1.0) if spec.buffer and over > 0 else 0.0


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """How rewards become advantages. AdvantageSettings(config.algorithm, max_length=256, weights={"exact": 1.0})"""

    algorithm: Algorithm
    max_length: int = 0  # generation.max_response_length
    weights: Mapping[str, float] = field(default_factory=dict)  # of the rewards of the recipe
    estimator: GroupEstimator | None = None  # of the user; None: the one that algorithm.adv_estimator names


def advantages_of(
    groups: Groups, scoring: AdvantageSettings, kl: Mapping[Key, float]
) -> tuple[dict[Key, float], dict[str, Metric]]:
    """The advantage of each sample: rewards - overlong penalties - KL, compared within each group; and the metrics of
    the estimator, if it has some. The segments of a trajectory are one sibling and share its advantage. A segment with
    a reward of its own gets the advantage that its trajectory would have with that reward.

    `kl`: of each sample, times its coefficient, if the KL is part of the reward and is not charged to each step; else
    empty.
    """
    algorithm, weights = scoring.algorithm, scoring.weights
    estimator = scoring.estimator or GROUP_ESTIMATORS[algorithm.adv_estimator]
    advantages, metrics = dict[Key, float](), dict[str, Metric]()
    for siblings in groups:
        keys = [[(s.rollout.prompt.id, segment.sibling) for segment in s.rollout.trajectory] for s in siblings]
        taken = [
            sum(kl.get(key, 0.0) for key in own) - overlong_penalty(_longest(s), algorithm.overlong, scoring.max_length)
            for own, s in zip(keys, siblings, strict=True)
        ]
        group = GroupScores(
            np.array([s.reward - less for s, less in zip(siblings, taken, strict=True)], np.float64),
            np.array([actions_of(s.rollout, algorithm.overlong.mask) for s in siblings], np.float64),
            {part: np.array([s.parts.get(part, np.nan) for s in siblings], np.float64) for part in weights},
            weights,
            siblings[0].baseline,
        )
        values, more = estimate(estimator, group, algorithm.adv_estimator)
        for i, (own, s) in enumerate(zip(keys, siblings, strict=True)):
            shared = {key: float(values[i]) for key in own}
            for key, reward in zip(own, s.segment_rewards or [s.reward] * len(own), strict=True):
                if reward != s.reward:
                    rewards = group.rewards.copy()
                    rewards[i] = reward - taken[i]
                    again = replace(group, rewards=rewards)
                    shared[key] = float(estimate(estimator, again, algorithm.adv_estimator)[0][i])
            advantages |= shared
        metrics = add_metrics(metrics, {f"advantages/{key}": Metric(value) for key, value in more.items()})
    return advantages, metrics


def _longest(scored: Scored) -> int:
    """Steps of the longest conversation."""
    return max(segment.num_steps for segment in scored.rollout.trajectory)


async def with_advantages(
    batches: Sequence[TrainBatch],
    groups: Groups,
    settings: AdvantageSettings,
    controllers: ControllerGroup,
    kl: Sequence[Mapping[Key, float]],
) -> tuple[list[TrainBatch], dict[str, float]]:
    """The batches with the advantages of their samples, and the estimator's metrics, means over groups. `kl`: from the
    ranks. Controllers exchange one number per sample: a sample trains on a rank that another controller may call."""
    charged = {key: value for part in kl for key, value in part.items()}
    gathered = await controllers.all_gather("advantages", advantages_of(groups, settings, charged))
    advantages = {key: value for own, _ in gathered for key, value in own.items()}
    metrics = add_metrics(*(more for _, more in gathered))
    filled = [replace(b, advantages={key: advantages[key] for key in b.keys}) for b in batches]
    return filled, {name: metric.value for name, metric in metrics.items()}
