"""Makes training samples from scored groups: loss masks, the metadata that controllers exchange, and advantages.

samples ──> ranks ──KL of each sample, if it is part of the reward──> reward - overlong penalty - KL
                                    compared within the group ──> TrainBatch.advantages ──> ranks
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from gcore.config.algorithm import Algorithm
from gcore.preparation.advantages import GROUP_ESTIMATORS, GroupEstimator, GroupScores, estimate, overlong_penalty
from gcore.protocols import Group, Metric, add_metrics
from gcore.types import Key, Rollout, Sample, SampleMeta, Scored, TrainBatch

Groups = Sequence[Sequence[Scored]]


def make_samples(
    groups: Groups, algorithm: Algorithm, version: int, staleness: int = 0, pairs: bool = False
) -> list[Sample]:
    """The samples of a step. `version` is the policy that will be trained; samples may be up to `staleness` versions
    older, and never newer. `pairs`: only the best and the worst of each group."""
    scored = [s for siblings in groups for s in (best_and_worst(siblings) if pairs else siblings)]
    versions = {v for s in scored for v in (s.rollout.version, int(s.rollout.versions_S.max()))}
    invalid = {v for v in versions if not version - staleness <= v <= version}
    assert not invalid, f"samples of policy versions {sorted(invalid)} in a step that trains version {version}"
    return [to_sample(s, algorithm.overlong.mask) for s in scored]


def best_and_worst(siblings: Sequence[Scored]) -> list[Scored]:
    """A pair of answers; none if all rewards are equal. Of equal rewards, that of the first sibling counts."""
    ordered = sorted(siblings, key=lambda s: (-s.reward, s.rollout.sibling))
    best, worst = ordered[0], min(ordered, key=lambda s: (s.reward, s.rollout.sibling))
    return [best, worst] if best.reward > worst.reward else []


@dataclasses.dataclass(frozen=True, slots=True)
class Scoring:
    """How rewards become advantages. Scoring(config.algorithm, max_length=256, weights={"exact": 1.0})"""

    algorithm: Algorithm
    max_length: int = 0  # generation.max_response_length
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of the rewards of the recipe
    estimator: GroupEstimator | None = None  # of the user; None: the one that algorithm.adv_estimator names

    @property
    def function(self) -> GroupEstimator:
        return self.estimator or GROUP_ESTIMATORS[self.algorithm.adv_estimator]


def advantages_of(
    groups: Groups, scoring: Scoring, kl: Mapping[Key, float]
) -> tuple[dict[Key, float], dict[str, Metric]]:
    """The advantage of each sample: rewards - overlong penalties - KL, compared within each group; and the metrics of
    the estimator, if it has some.

    `kl`: of each sample, times its coefficient, if the KL is part of the reward and is not charged to each step; else
    empty.
    """
    algorithm, weights = scoring.algorithm, scoring.weights
    found, metrics = dict[Key, float](), dict[str, Metric]()
    for siblings in groups:
        keys = [_key(s) for s in siblings]
        scores = [s.reward + overlong(s.rollout, algorithm, scoring.max_length) for s in siblings]
        charged = [value - kl.get(key, 0.0) for key, value in zip(keys, scores, strict=True)]
        group = GroupScores(
            np.array(charged, np.float64),
            np.array([_mask(s.rollout, algorithm.overlong.mask).sum() for s in siblings], np.float64),
            {part: np.array([s.parts.get(part, np.nan) for s in siblings], np.float64) for part in weights},
            weights,
            siblings[0].baseline,
        )
        values, more = estimate(scoring.function, group, algorithm.adv_estimator)
        found |= zip(keys, values.tolist(), strict=True)
        metrics = add_metrics(metrics, {f"advantages/{key}": Metric(value) for key, value in more.items()})
    return found, metrics


async def with_advantages(
    batches: Sequence[TrainBatch],
    groups: Groups,
    scoring: Scoring,
    group: Group,
    kl: Sequence[Mapping[Key, float]],
) -> tuple[list[TrainBatch], dict[str, float]]:
    """The batches with the advantages of their samples, and the estimator's metrics, means over groups. `kl`: from the
    ranks. Controllers exchange one number per sample: a sample trains on a rank that another controller may call."""
    charged = {key: value for part in kl for key, value in part.items()}
    gathered = await group.all_gather("advantages", advantages_of(groups, scoring, charged))
    advantages = {key: value for own, _ in gathered for key, value in own.items()}
    metrics = add_metrics(*(more for _, more in gathered))
    filled = [dataclasses.replace(b, advantages={key: advantages[key] for key in b.keys}) for b in batches]
    return filled, {name: metric.value for name, metric in metrics.items()}


def overlong(rollout: Rollout, algorithm: Algorithm, max_length: int) -> float:
    """Penalty of a response near the length limit: 0 or negative."""
    return overlong_penalty(
        rollout.num_steps,
        max_length=max_length,
        buffer=algorithm.overlong.buffer,
        penalty=algorithm.overlong.penalty,
    )


def _key(scored: Scored) -> Key:
    return (scored.rollout.prompt.id, scored.rollout.sibling)


def _mask(rollout: Rollout, mask_truncated: bool) -> np.ndarray:
    """The steps that count in the loss."""
    return np.zeros_like(rollout.mask_S) if mask_truncated and rollout.finish == "length" else rollout.mask_S


def to_sample(scored: Scored, mask_truncated: bool = False) -> Sample:
    rollout = scored.rollout
    return Sample(
        prompt_id=rollout.prompt.id,
        sibling=rollout.sibling,
        content=rollout.content,
        mask_S=_mask(rollout, mask_truncated),
        rollout_logprobs_S=rollout.logprobs_S,
        temperature=rollout.temperature,
        reward=scored.reward,
        step_rewards_S=scored.step_rewards_S,
    )


def meta_of(sample: Sample) -> SampleMeta:
    content = sample.content
    return SampleMeta(
        sample.prompt_id,
        sample.sibling,
        content.work,
        actions=int(sample.mask_S.sum()),
        digest=content.digest(),
        steps=content.num_steps,
    )


def samples_digest(metas: Sequence[SampleMeta]) -> str:
    """Hash of (prompt id, sibling, steps) of all samples of a training step, sorted: equal for equal samples."""
    total = hashlib.blake2b(digest_size=16)
    for meta in sorted(metas, key=lambda m: m.key):
        total.update(f"{meta.prompt_id}/{meta.sibling}/".encode() + meta.digest)
    return total.hexdigest()
