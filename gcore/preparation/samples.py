"""Makes training samples from scored groups: loss masks, and the metadata that controllers exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from gcore.config.algorithm import Algorithm
from gcore.types import Rollout, Sample, SampleMeta, Scored

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


def mask_of(rollout: Rollout, mask_truncated: bool) -> np.ndarray:
    """The steps that count in the loss."""
    return np.zeros_like(rollout.mask_S) if mask_truncated and rollout.finish == "length" else rollout.mask_S


def to_sample(scored: Scored, mask_truncated: bool = False) -> Sample:
    rollout = scored.rollout
    return Sample(
        prompt_id=rollout.prompt.id,
        sibling=rollout.sibling,
        content=rollout.content,
        mask_S=mask_of(rollout, mask_truncated),
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
