"""Segments: a trajectory of several conversations is one sibling with one reward; each sampled token counts once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gcore.checkpoint.pending_groups import load_pending_groups, pending_bytes, write_pending_groups
from gcore.config.algorithm import Algorithm
from gcore.content.tokens import Tokens
from gcore.controller.run_prompts import _checked
from gcore.cost.workload import CostModel
from gcore.observe.samples import SampleLog
from gcore.preparation.advantages import AdvantageSettings, advantages_of
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import make_samples, meta_of
from gcore.training.objective import StepColumns, StepData, step_columns, step_weights
from gcore.training.step_advantages import GlobalSums, step_targets
from gcore.types import Prompt, Rollout, Scored, UserError

PROMPT = Prompt(7, 7, ({"role": "user", "content": "?"},), "?", Tokens(np.array([1, 2], np.int32)))


def rollout(sibling: int, mask: list[int], **fields: Any) -> Rollout:
    steps = np.arange(3, 3 + len(mask), dtype=np.int32)
    return Rollout(
        PROMPT,
        sibling,
        PROMPT.content.extended(Tokens.steps(steps)),
        -steps.astype(np.float32) / 10,
        np.array(mask, bool),
        f"text {sibling}",
        np.zeros(len(mask), np.int32),
        **{"finish": "stop", **fields},
    )


def group(**fields: Any) -> list[Scored]:
    """Three siblings. The second has three conversations, one of which continues the first two steps of another."""
    others = (rollout(10, [1, 1, 0, 1], shared=2), rollout(11, [1, 1, 1]))
    many = rollout(1, [1, 1, 0, 1, 1], segments=others)
    one, two = Scored(rollout(0, [1, 1]), 1.0), Scored(rollout(2, [1, 0, 1]), 0.5)
    return [one, Scored(many, 0.0, **fields), two]


def samples_of(algorithm: Algorithm, groups: list[list[Scored]]) -> dict[Any, Any]:
    return {sample.key: sample for sample in make_samples(groups, algorithm, 0)}


def test_a_trajectory_is_one_sibling():
    algorithm = Algorithm(adv_estimator="grpo")
    found = advantages_of([group()], AdvantageSettings(algorithm), {})[0]
    rewards = np.array([1.0, 0.0, 0.5])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert [found[7, s] for s in (0, 1, 10, 11, 2)] == pytest.approx([expected[i] for i in (0, 1, 1, 1, 2)])
    opo = advantages_of([group()], AdvantageSettings(Algorithm(adv_estimator="opo")), {})[0]
    lengths = np.array([2, 4 + 1 + 3, 2])
    assert opo[7, 10] == pytest.approx(0.0 - lengths @ rewards / lengths.sum())


def test_the_kl_of_all_segments_is_charged_to_the_trajectory():
    kl = {(7, 0): 0.5, (7, 1): 0.25, (7, 10): 0.125, (7, 11): 0.0625, (7, 2): 0.0}
    found = advantages_of([group()], AdvantageSettings(Algorithm(adv_estimator="dr_grpo")), kl)[0]
    charged = np.array([0.5, -0.4375, 0.5])
    assert [found[7, s] for s in (0, 1, 10, 11, 2)] == pytest.approx((charged - charged.mean())[[0, 1, 1, 1, 2]])


def test_a_segment_with_a_reward_of_its_own():
    scored = group(segment_rewards=[0.0, 2.0, 0.0])
    found = advantages_of([scored], AdvantageSettings(Algorithm(adv_estimator="rloo")), {})[0]
    others = (1.0 + 0.5) / 2
    assert [found[7, s] for s in (1, 10, 11)] == pytest.approx([-others, 2.0 - others, -others])
    assert found[7, 0] == pytest.approx(1.0 - 0.25)  # the siblings are compared with the trajectory
    assert samples_of(Algorithm(), [scored])[7, 10].reward == 2.0
    with pytest.raises(UserError, match="2 segment_rewards for prompt 7; expected none, or 3"):
        _checked(group(segment_rewards=[0.0, 2.0]), PROMPT, 2)


def test_each_sampled_step_is_trained_once():
    found = samples_of(Algorithm(), [group()])
    masks = {s: found[7, s].mask_S.astype(int).tolist() for s in (0, 1, 10, 11)}
    assert masks == {0: [1, 1], 1: [1, 1, 0, 1, 1], 10: [0, 0, 0, 1], 11: [1, 1, 1]}
    assert [(found[7, s].trajectory, found[7, s].trajectory_actions) for s in (0, 1, 10, 11)] == [
        (None, 0),
        *[(1, 8)] * 3,
    ]
    assert group()[1].rollout.length == 5 + 2 + 3
    cut = group()
    cut[1] = dataclasses.replace(
        cut[1],
        rollout=dataclasses.replace(cut[1].rollout, segments=(rollout(10, [1, 1], finish="length"),)),
    )
    masked = samples_of(Algorithm(overlong={"mask": True}), [cut])
    assert (masked[7, 10].mask_S.sum(), masked[7, 1].trajectory_actions) == (0, 4)


def test_pairs_are_whole_answers():
    with pytest.raises(UserError, match="expected one conversation per sample"):
        make_samples([group()], Algorithm(), 0, pairs=True)


def test_a_trajectory_weighs_as_one_sample():
    """Every aggregation gives the steps of three segments the weights that they have in one conversation."""

    def weights(scored: list[Scored], aggregation: str) -> dict[int, list[float]]:
        samples = samples_of(Algorithm(), [scored])
        metas = [meta_of(sample) for sample in samples.values()]
        (batch,) = make_layout(metas, step=1, num_ranks=1, mini_batches=1, max_tokens=64, cost=CostModel(8.0))
        columns = columns_of([samples[key] for key in batch.keys])
        assert batch.mini_batches[0].num_samples == 3
        found_S = step_weights(columns, batch.mini_batches[0], aggregation, 16)
        of_sibling: dict[int, list[float]] = {}
        for (_, sibling), sample in zip(batch.keys, range(len(batch.keys)), strict=True):
            own = found_S[columns.sample_S == sample]
            of_sibling[sibling] = own[own > 0].tolist()
        return of_sibling

    whole = group()
    whole[1] = Scored(rollout(1, [1] * 8), 0.0)
    for aggregation in ("token_mean", "sequence_mean", "fixed_length"):
        split, one = weights(group(), aggregation), weights(whole, aggregation)
        assert split[0] == one[0] and split[2] == one[2]
        assert [w for s in (1, 10, 11) for w in split[s]] == pytest.approx(one[1])


def columns_of(samples: list[Any]) -> StepColumns:
    lengths = torch.tensor([sample.num_steps for sample in samples])
    packed = SimpleNamespace(
        is_padding=False,
        keys=[sample.key for sample in samples],
        sample_S=torch.repeat_interleave(torch.arange(len(samples)), lengths),
    )
    data: Any = StepData(samples={sample.key: sample for sample in samples})
    return step_columns(packed, data, torch.device("cpu"))  # type: ignore[arg-type]


def test_gpg_counts_trajectories():
    algorithm = Algorithm(adv_estimator="gpg")
    samples = samples_of(algorithm, [group()])
    advantages = {(7, 0): 0.5, (7, 1): -0.5, (7, 10): -0.5, (7, 11): -0.5, (7, 2): 0.0}
    found = step_targets(samples, advantages, algorithm, GlobalSums()).advantages
    assert found[7, 0][0] == pytest.approx(0.5 * 3 / 2)  # three siblings, two with an advantage


def test_segments_survive_a_checkpoint(tmp_path: Path):
    scored = group(segment_rewards=[0.0, 2.0, 0.0])
    write_pending_groups(tmp_path, 0, [scored])
    ((first, many, last),) = load_pending_groups(tmp_path, lambda _: PROMPT)
    assert (first.rollout.segments, last.rollout.segments, list(many.segment_rewards)) == ((), (), [0.0, 2.0, 0.0])
    for found, given in zip(many.rollout.trajectory, scored[1].rollout.trajectory, strict=True):
        assert (found.sibling, found.shared, found.text) == (given.sibling, given.shared, given.text)
        for name in ("mask_S", "logprobs_S", "versions_S"):
            assert getattr(found, name).tolist() == getattr(given, name).tolist()
        assert found.content.tokens_T.tolist() == given.content.tokens_T.tolist()
    assert pending_bytes([scored]) > pending_bytes([[scored[0], scored[2]]]) + 7 * 13


def test_the_log_of_samples_has_the_segments(tmp_path: Path):
    SampleLog(tmp_path, 0, 0, 1, 1).write(1, [7], [group(segment_rewards=[0.0, 2.0, 0.0])])
    (row,) = map(json.loads, (tmp_path / "samples" / "controller-0.jsonl").read_text().splitlines())
    assert row["siblings"] == 3 and ["segments" in sample for sample in row["samples"]] == [False, True, False]
    segments = row["samples"][1]["segments"]
    assert [(s["text"], s["length"], s["shared"], s["reward"]) for s in segments] == [
        ("text 10", 4, 2, 2.0),
        ("text 11", 3, 0, 0.0),
    ]
