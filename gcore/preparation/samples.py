"""Scored groups -> samples with advantages, and the metadata that stands for them in collectives."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from gcore.preparation.advantages import ESTIMATORS, Moments, whiten
from gcore.protocols import Group
from gcore.types import Sample, SampleMeta, Scored


async def make_samples(
    groups: Sequence[Sequence[Scored]], adv_estimator: str, group: Group, version: int, staleness: int = 0
) -> list[Sample]:
    """Advantages of every group; only three sums cross to other controllers, and only for estimators that whiten.

    `version` is the policy that will be trained; samples may be up to `staleness` versions older, and never newer.
    """
    rollouts = [s.rollout for siblings in groups for s in siblings]
    versions = {v for r in rollouts for v in (r.version, int(r.versions_S.max()))}
    odd = {v for v in versions if not version - staleness <= v <= version}
    assert not odd, f"samples of policy versions {sorted(odd)} in a step that trains version {version}"
    estimator = ESTIMATORS[adv_estimator]
    scored = [s for siblings in groups for s in siblings]
    advantages = [estimator.group(np.array([s.reward for s in siblings], np.float64)) for siblings in groups]
    flat = np.concatenate(advantages) if advantages else np.zeros(0)
    if estimator.whiten:
        num_actions = np.array([s.rollout.mask_S.sum() for s in scored], np.float64)
        parts: list[tuple[float, ...]] = await group.all_gather("advantage moments", _values(flat, num_actions))
        flat = whiten(flat, Moments.sum([Moments(*part) for part in parts]))
    return [to_sample(s, advantage) for s, advantage in zip(scored, flat, strict=True)]


def _values(flat: np.ndarray, num_actions: np.ndarray) -> tuple[float, ...]:
    moments = Moments.of(flat, num_actions)
    return (moments.count, moments.total, moments.squares)


def to_sample(scored: Scored, advantage: float) -> Sample:
    rollout = scored.rollout
    return Sample(
        prompt_id=rollout.prompt.id,
        sibling=rollout.sibling,
        tokens_T=np.concatenate([rollout.prompt.tokens_P, rollout.tokens_S]).astype(np.int32),
        mask_S=rollout.mask_S,
        rollout_logprobs_S=rollout.logprobs_S,
        advantages_S=np.full(len(rollout.tokens_S), advantage, np.float32),
        temperature=rollout.temperature,
    )


def meta_of(sample: Sample) -> SampleMeta:
    tokens_S = sample.tokens_T[len(sample.tokens_T) - sample.num_steps :]
    digest = hashlib.blake2b(tokens_S.astype("<i4").tobytes(), digest_size=16).digest()
    return SampleMeta(sample.prompt_id, sample.sibling, len(sample.tokens_T), int(sample.mask_S.sum()), digest)


def samples_digest(metas: Sequence[SampleMeta]) -> str:
    """One hash over (prompt id, sibling, sampled tokens) of a whole step, in sorted order: equal for equal samples."""
    total = hashlib.blake2b(digest_size=16)
    for meta in sorted(metas, key=lambda m: m.key):
        total.update(f"{meta.prompt_id}/{meta.sibling}/".encode() + meta.digest)
    return total.hexdigest()
