"""Makes training samples from scored groups: loss masks, the metadata that controllers exchange, and advantages.

samples ──> ranks ──KL of each sample, if it is part of the reward──> reward - overlong penalty - KL
                                    compared within the group ──> TrainBatch.advantages ──> ranks
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from gcore.config.tree import Algorithm
from gcore.preparation.advantages import GROUP_ESTIMATORS, overlong_penalty
from gcore.protocols import Group
from gcore.types import Key, Rollout, Sample, SampleMeta, Scored, TrainBatch

Groups = Sequence[Sequence[Scored]]


def make_samples(groups: Groups, algorithm: Algorithm, version: int, staleness: int = 0) -> list[Sample]:
    """The samples of a step. `version` is the policy that will be trained; samples may be up to `staleness` versions
    older, and never newer."""
    scored = [s for siblings in groups for s in siblings]
    versions = {v for s in scored for v in (s.rollout.version, int(s.rollout.versions_S.max()))}
    invalid = {v for v in versions if not version - staleness <= v <= version}
    assert not invalid, f"samples of policy versions {sorted(invalid)} in a step that trains version {version}"
    return [to_sample(s, algorithm.mask_truncated) for s in scored]


def advantages_of(groups: Groups, algorithm: Algorithm, max_length: int, kl: Mapping[Key, float]) -> dict[Key, float]:
    """The advantage of each sample: rewards - overlong penalties - KL, compared within each group.

    `kl`: of each sample, if the KL is part of the reward and is not charged to each step; else empty. `max_length` is
    generation.max_response_length.
    """
    estimate, found = GROUP_ESTIMATORS[algorithm.adv_estimator], dict[Key, float]()
    for siblings in groups:
        keys = [_key(s) for s in siblings]
        scores = [s.reward + overlong(s.rollout, algorithm, max_length) for s in siblings]
        charged = [score - algorithm.kl_coef * kl.get(key, 0.0) for key, score in zip(keys, scores, strict=True)]
        found |= zip(keys, estimate(np.array(charged, np.float64)).tolist(), strict=True)
    return found


async def with_advantages(
    batches: Sequence[TrainBatch],
    groups: Groups,
    algorithm: Algorithm,
    group: Group,
    max_length: int,
    kl: Sequence[Mapping[Key, float]],
) -> list[TrainBatch]:
    """The batches with the advantages of their samples. `kl`: from the ranks. Controllers exchange one number per
    sample: a sample trains on a rank that another controller may call."""
    charged = {key: value for part in kl for key, value in part.items()}
    own = advantages_of(groups, algorithm, max_length, charged)
    advantages = {key: a for part in await group.all_gather("advantages", own) for key, a in part.items()}
    return [dataclasses.replace(batch, advantages={key: advantages[key] for key in batch.keys}) for batch in batches]


def overlong(rollout: Rollout, algorithm: Algorithm, max_length: int) -> float:
    """Penalty of a response near the length limit: 0 or negative."""
    return overlong_penalty(
        rollout.num_steps,
        max_length=max_length,
        buffer=algorithm.overlong_buffer,
        penalty=algorithm.overlong_penalty,
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
    )


def meta_of(sample: Sample) -> SampleMeta:
    content = sample.content
    return SampleMeta(
        sample.prompt_id,
        sample.sibling,
        content.size,
        actions=int(sample.mask_S.sum()),
        digest=content.digest(),
        steps=content.num_steps,
        passes=content.passes,
        images=content.image_pixels,
    )


def samples_digest(metas: Sequence[SampleMeta]) -> str:
    """Hash of (prompt id, sibling, steps) of all samples of a training step, sorted: equal for equal samples."""
    total = hashlib.blake2b(digest_size=16)
    for meta in sorted(metas, key=lambda m: m.key):
        total.update(f"{meta.prompt_id}/{meta.sibling}/".encode() + meta.digest)
    return total.hexdigest()
