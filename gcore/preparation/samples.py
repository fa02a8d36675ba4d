"""Makes training samples from scored groups: advantages, loss masks, and the metadata that controllers exchange.

usually:           reward - overlong penalty ──advantages──> samples ──> ranks
KL in the reward:  samples ──> ranks ──KlSums──> reward - penalty - KL ──advantages──> TrainBatch.advantages ──> ranks
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from gcore.config.tree import Algorithm
from gcore.preparation.advantages import ESTIMATORS, Array, Moments, overlong_penalty, whiten
from gcore.protocols import Group
from gcore.types import Key, KlSums, Rollout, Sample, SampleMeta, Scored, TrainBatch

Groups = Sequence[Sequence[Scored]]
NO_KL = KlSums(0.0, 0.0, 0.0)


async def make_samples(
    groups: Groups, algorithm: Algorithm, group: Group, version: int, staleness: int = 0, max_length: int = 0
) -> list[Sample]:
    """Samples with their advantages. If the KL is part of the reward, advantages are 0 until `charge_kl`.

    `version` is the policy that will be trained; samples may be up to `staleness` versions older, and never newer.
    `max_length` is generation.max_response_length.
    """
    rollouts = [s.rollout for siblings in groups for s in siblings]
    versions = {v for r in rollouts for v in (r.version, int(r.versions_S.max()))}
    invalid = {v for v in versions if not version - staleness <= v <= version}
    assert not invalid, f"samples of policy versions {sorted(invalid)} in a step that trains version {version}"
    scored = [s for siblings in groups for s in siblings]
    if algorithm.kl_in_reward:
        advantages = dict.fromkeys(map(_key, scored), 0.0)
    else:
        advantages, _ = await advantages_of(groups, algorithm, group, max_length)
    return [to_sample(s, advantages[_key(s)], algorithm.mask_truncated) for s in scored]


async def advantages_of(
    groups: Groups, algorithm: Algorithm, group: Group, max_length: int, kl: Mapping[Key, KlSums] | None = None
) -> tuple[dict[Key, float], float]:
    """The advantage of each sample, and kl_scale: the advantage of a step is reduced by kl_scale x (KL to come).

    Controllers exchange only three sums, and only for estimators that whiten. `kl`: given if the KL is part of the
    reward. Then the score of a sample is reduced by its whole KL before the group is compared; with `reinforce_pp`,
    each step is reduced by its KL to come instead, and kl_scale is not 0.
    """
    estimator, coef = ESTIMATORS[algorithm.adv_estimator], algorithm.kl_coef
    scored = [s for siblings in groups for s in siblings]
    scores = {_key(s): s.reward + overlong(s.rollout, algorithm, max_length) for s in scored}
    per_step = kl if estimator.per_step else None
    if kl is not None and per_step is None:
        scores = {key: score - coef * kl[key].total for key, score in scores.items()}
    parts = [estimator.group(np.array([scores[_key(s)] for s in siblings], np.float64)) for siblings in groups]
    flat = np.concatenate(parts) if parts else np.zeros(0)
    scale = 0.0
    if estimator.whiten:
        sums = [per_step[_key(s)] if per_step is not None else NO_KL for s in scored]
        num_actions = np.array([_mask(s.rollout, algorithm.mask_truncated).sum() for s in scored], np.float64)
        to_come, squares = (_column(sums, name) for name in ("to_come", "to_come_squares"))
        own = Moments.of(flat, num_actions, to_come, squares, coef)
        gathered = await group.all_gather("advantage moments", dataclasses.astuple(own))
        moments = Moments.sum([Moments(*part) for part in gathered])
        flat, scale = whiten(flat, moments), coef / moments.spread if per_step is not None else 0.0
    return {_key(s): float(value) for s, value in zip(scored, flat, strict=True)}, scale


async def charge_kl(
    groups: Groups,
    algorithm: Algorithm,
    group: Group,
    max_length: int,
    kl: Sequence[Mapping[Key, KlSums]],
    batches: Sequence[TrainBatch],
) -> list[TrainBatch]:
    """The batches with the advantages of reward - KL. `kl`: from the ranks. Controllers exchange only scalars."""
    every = {key: sums for part in kl for key, sums in part.items()}
    own, scale = await advantages_of(groups, algorithm, group, max_length, every)
    advantages = {key: a for part in await group.all_gather("advantages after KL", own) for key, a in part.items()}
    return [
        dataclasses.replace(batch, advantages={key: advantages[key] for key in batch.keys}, kl_scale=scale)
        for batch in batches
    ]


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


def _column(sums: Sequence[KlSums], name: str) -> Array:
    return np.array([getattr(s, name) for s in sums], np.float64)


def _mask(rollout: Rollout, mask_truncated: bool) -> np.ndarray:
    """The steps that count in the loss."""
    return np.zeros_like(rollout.mask_S) if mask_truncated and rollout.finish == "length" else rollout.mask_S


def to_sample(scored: Scored, advantage: float, mask_truncated: bool = False) -> Sample:
    rollout = scored.rollout
    return Sample(
        prompt_id=rollout.prompt.id,
        sibling=rollout.sibling,
        content=rollout.content,
        mask_S=_mask(rollout, mask_truncated),
        rollout_logprobs_S=rollout.logprobs_S,
        advantages_S=np.full(rollout.num_steps, advantage, np.float32),
        temperature=rollout.temperature,
        reward=scored.reward,
    )


def meta_of(sample: Sample) -> SampleMeta:
    actions = int(sample.mask_S.sum())
    return SampleMeta(sample.prompt_id, sample.sibling, sample.content.size, actions, sample.content.digest())


def samples_digest(metas: Sequence[SampleMeta]) -> str:
    """Hash of (prompt id, sibling, steps) of all samples of a training step, sorted: equal for equal samples."""
    total = hashlib.blake2b(digest_size=16)
    for meta in sorted(metas, key=lambda m: m.key):
        total.update(f"{meta.prompt_id}/{meta.sibling}/".encode() + meta.digest)
    return total.hexdigest()
