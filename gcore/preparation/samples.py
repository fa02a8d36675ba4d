"""Makes training samples from scored groups: loss masks, and the metadata that controllers exchange."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gcore.config.algorithm import Algorithm
from gcore.content.base import Shareable
from gcore.types import Key, Rollout, Sample, SampleMeta, Scored, SharedPrefix, UserError

Groups = Sequence[Sequence[Scored]]


def make_samples(
    groups: Groups, algorithm: Algorithm, version: int, staleness: int = 0, pairs: bool = False
) -> list[Sample]:
    """The samples of a step. `version` is the policy that will be trained; samples may be up to `staleness` versions
    older, and never newer. `pairs`: only the best and the worst of each group."""
    scored = [s for siblings in groups for s in (best_and_worst(siblings) if pairs else siblings)]
    segments = [segment for s in scored for segment in s.rollout.trajectory]
    versions = {int(v) for segment in segments for v in (segment.versions_S.min(), segment.versions_S.max())}
    invalid = {v for v in versions if not version - staleness <= v <= version}
    assert not invalid, f"samples of policy versions {sorted(invalid)} in a step that trains version {version}"
    if pairs and len(segments) > len(scored):
        raise UserError(
            "objective: the workflow returned a sample of several conversations; expected one conversation per sample, "
            "because this objective compares pairs of whole answers (keys: workflow, objective)"
        )
    return [sample for s in scored for sample in to_samples(s, algorithm.overlong.mask)]


def best_and_worst(siblings: Sequence[Scored]) -> list[Scored]:
    """A pair of answers; none if all rewards are equal. Of equal rewards, that of the first sibling counts."""
    ordered = sorted(siblings, key=lambda s: (-s.reward, s.rollout.sibling))
    best, worst = ordered[0], min(ordered, key=lambda s: (s.reward, s.rollout.sibling))
    return [best, worst] if best.reward > worst.reward else []


def mask_of(rollout: Rollout, mask_truncated: bool) -> np.ndarray:
    """The steps of a segment that count in the loss."""
    if mask_truncated and rollout.finish == "length":
        return np.zeros_like(rollout.mask_S)
    return rollout.mask_S & (np.arange(rollout.num_steps) >= rollout.shared) if rollout.shared else rollout.mask_S


def actions_of(rollout: Rollout, mask_truncated: bool) -> int:
    """Steps of the trajectory that count in the loss."""
    return sum(int(mask_of(segment, mask_truncated).sum()) for segment in rollout.trajectory)


def to_sample(scored: Scored, mask_truncated: bool = False) -> Sample:
    """Of a rollout that is one conversation, or of the first segment of a trajectory."""
    return to_samples(scored, mask_truncated)[0]


def to_samples(scored: Scored, mask_truncated: bool = False) -> list[Sample]:
    """One per segment of the trajectory. Only the first has the rewards per step of teachers, who read no others."""
    first = scored.rollout
    trajectory = first.sibling if first.segments else None
    num_actions = actions_of(first, mask_truncated) if first.segments else 0
    rewards = scored.segment_rewards or [scored.reward] * len(first.trajectory)
    return [
        Sample(
            prompt_id=segment.prompt.id,
            sibling=segment.sibling,
            content=segment.content,
            mask_S=mask_of(segment, mask_truncated),
            rollout_logprobs_S=segment.logprobs_S,
            temperature=segment.temperature,
            reward=reward,
            step_rewards_S=scored.step_rewards_S if segment is first else None,
            trajectory=trajectory,
            trajectory_actions=num_actions,
        )
        for segment, reward in zip(first.trajectory, rewards, strict=True)
    ]


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
    paths: dict[Key, tuple[SharedPrefix, ...]] = {sample.key: () for sample in siblings}
    contents = {s.key: s.content for s in siblings if isinstance(s.content, Shareable)}
    ordered = sorted((s for s in siblings if s.key in contents), key=lambda sample: contents[sample.key].order())
    common = [contents[b.key].common(a.content) for a, b in itertools.pairwise(ordered)]
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
        trajectory=sample.trajectory,
    )


def samples_digest(metas: Sequence[SampleMeta]) -> str:
    """Hash of (prompt id, sibling, steps) of all samples of a training step, sorted: equal for equal samples."""
    total = hashlib.blake2b(digest_size=16)
    for meta in sorted(metas, key=lambda m: m.key):
        total.update(f"{meta.prompt_id}/{meta.sibling}/".encode() + meta.digest)
    return total.hexdigest()
