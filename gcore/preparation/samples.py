"""Makes training samples from scored groups: loss masks, and the metadata that controllers exchange."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gcore.config.algorithm import Algorithm
from gcore.types import Key, Rollout, Sample, SampleMeta, Scored, SharedPrefix

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


def metas_of(samples: Sequence[Sample]) -> list[SampleMeta]:
    """With what siblings have in common."""
    groups: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.key):
        groups.setdefault(sample.prompt_id, []).append(sample)
    shared = {key: path for siblings in groups.values() for key, path in shared_prefixes(siblings).items()}
    return [replace(meta_of(sample), shared=shared[sample.key]) for sample in samples]


def shared_prefixes(siblings: Sequence[Sample]) -> dict[Key, tuple[SharedPrefix, ...]]:
    """The tree of a group: the beginnings of each sample that others have too. In the order of their first tokens that
    differ, what two samples have in common is the least that neighbours between them have in common."""
    ordered = sorted(siblings, key=lambda sample: sample.content.order())
    common = [b.content.common(a.content) for a, b in itertools.pairwise(ordered)]
    paths: dict[Key, tuple[SharedPrefix, ...]] = {sample.key: () for sample in siblings}
    growing: list[tuple[int, int, int]] = []  # prefixes that the next sample may have: tokens, media, the first sample
    for end, (tokens, media) in enumerate([*common, (0, 0)], start=1):
        start = end - 1
        while growing and growing[-1][0] > tokens:
            *size, start = growing.pop()
            having = ordered[start:end]
            prefix = SharedPrefix(min(sample.sibling for sample in having), *size)
            paths |= {sample.key: (prefix, *paths[sample.key]) for sample in having}
        if tokens and (not growing or growing[-1][0] < tokens):
            growing.append((tokens, media, start))
    return paths


def meta_of(sample: Sample) -> SampleMeta:
    """Of a sample without siblings."""
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
