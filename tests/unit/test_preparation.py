"""From scored groups to samples: overlong rewards, masked samples, KL in the reward (parity with verl)."""

import asyncio
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from gcore.config.algorithm import Algorithm
from gcore.content.tokens import Tokens
from gcore.preparation.advantages import (
    GROUP_ESTIMATORS,
    AdvantageSettings,
    GroupScores,
    advantages_of,
    with_advantages,
)
from gcore.preparation.samples import make_samples, to_sample
from gcore.protocols import Rendezvous
from gcore.runtime.local import Hub, LocalGroup
from gcore.training.step_advantages import GlobalSums, step_targets
from gcore.types import MicroBatch, MiniBatch, Prompt, Rollout, Scored, TrainBatch

VERL = json.loads((Path(__file__).parents[1] / "parity" / "verl_golden.json").read_text())
GOLDEN, KL_COEF = VERL["cases"], VERL["kl_coef"]
MASKED = Algorithm(overlong={"mask": True})


def scored(prompt: int, sibling: int, reward: float, mask, finish="stop") -> Scored:
    mask_S = np.array(mask, bool)
    tokens_S = np.zeros(len(mask_S), np.int32)
    floats = np.zeros(len(mask_S), np.float32)
    given = Prompt(prompt, prompt, (), "", Tokens(np.array([1, 2], np.int32)))
    return Scored(Rollout(given, sibling, Tokens.steps(tokens_S), floats, mask_S, "", tokens_S, finish), reward)


def grpo(rewards: np.ndarray) -> np.ndarray:
    return GROUP_ESTIMATORS["grpo"](GroupScores(rewards, np.ones_like(rewards)))


def on_controllers(work, groups, size=1):
    """`work(group of controllers, its share of the groups)` on each of them at once."""

    async def run():
        hub = Hub(size)
        lines = [LocalGroup(Rendezvous(r, size, None, hub)) for r in range(size)]
        return await asyncio.gather(*(work(line, groups[line.rank :: size]) for line in lines))

    return asyncio.run(run())


def samples_of(groups, algorithm, **options):
    return {s.key: s for s in make_samples(groups, algorithm, 0, **options)}


# --- overlong rewards and masks


def test_overlong_rewards_change_advantages_and_no_reward():
    group = [scored(0, i, 1.0, [1] * n) for i, n in enumerate((3, 8, 9, 10))]
    algorithm = Algorithm(overlong={"buffer": 2, "penalty": 0.5})
    found = advantages_of([group], AdvantageSettings(algorithm, 10), {})[0]
    expected = grpo(np.array([1.0, 1.0, 0.75, 0.5]))
    assert [found[0, i] for i in range(4)] == pytest.approx(expected, abs=1e-12)
    assert {s.reward for s in samples_of([group], algorithm).values()} == {1.0}
    assert not any(advantages_of([group], AdvantageSettings(Algorithm(), 10), {})[0].values())


def test_masked_truncated_samples_count_in_the_group_and_not_in_the_loss():
    group = [scored(0, 0, 1.0, [1, 0, 1]), scored(0, 1, 0.0, [1, 1], "length"), scored(0, 2, 0.0, [1])]
    found, advantages = samples_of([group], MASKED), advantages_of([group], AdvantageSettings(MASKED), {})[0]
    assert [found[0, i].mask_S.tolist() for i in range(3)] == [[True, False, True], [False, False], [True]]
    assert [advantages[0, i] for i in range(3)] == pytest.approx(grpo(np.array([1.0, 0, 0])), abs=1e-12)
    assert samples_of([group], Algorithm())[0, 1].mask_S.all()


def test_whitening_leaves_masked_samples_out():
    group = [scored(0, 0, 1.0, [1, 1]), scored(0, 1, 0.0, [1]), scored(0, 2, 9.0, [1] * 5, "length")]
    algorithm = Algorithm(adv_estimator="reinforce_pp", overlong={"mask": True})
    samples, advantages = samples_of([group], algorithm), advantages_of([group], AdvantageSettings(algorithm), {})[0]
    found = step_targets(samples, advantages, algorithm, GlobalSums()).advantages
    tokens = np.array([1.0, 1.0, 0.0])
    expected = (np.array([1.0, 0.0]) - tokens.mean()) / tokens.std(ddof=1)
    assert [found[0, i][0] for i in range(2)] == pytest.approx(expected, abs=1e-6)


# --- KL in the reward. verl: apply_kl_penalty, then its estimators


def verl_case(case: int, estimator: str):
    """Groups, and the KL of each step, by sample."""
    batch = GOLDEN[case]["batch"]
    old, ref = (np.array(batch[name]) for name in ("old_log_prob", "ref_log_prob"))
    d, mask = old - ref, np.array(batch["mask"])
    kl = {"k1": d, "k2": d**2 / 2, "k3": np.minimum(np.exp(-d) + d - 1, 10)}[estimator]
    groups: dict[int, list[Scored]] = {}
    kl_of = {}
    for i, prompt in enumerate(batch["group"]):
        siblings = groups.setdefault(prompt, [])
        one = scored(prompt, len(siblings), batch["rewards"][i], mask[i])
        siblings.append(dataclasses.replace(one, baseline=batch["baselines"][i]))
        kl_of[prompt, len(siblings) - 1] = kl[i]
    return list(groups.values()), kl_of, mask


def totals(groups, kl_of):
    """What the ranks answer: see TrainerRank._prepare."""
    rollouts = [s.rollout for siblings in groups for s in siblings]
    return {(r.prompt.id, r.sibling): KL_COEF * float(kl_of[r.prompt.id, r.sibling][r.mask_S].sum()) for r in rollouts}


@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", [name for name in GROUP_ESTIMATORS if name not in ("gae", "gdpo", "gpg")])
@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_kl_in_the_reward_same_as_verl(case, name, kl_estimator):
    groups, kl_of, mask = verl_case(case, kl_estimator)
    algorithm = Algorithm(adv_estimator=name, kl_coef=KL_COEF, kl_in="reward", kl_estimator=kl_estimator)
    assert algorithm.kl_per_step == (name in ("reinforce_pp", "remax"))
    charged = {} if algorithm.kl_per_step else totals(groups, kl_of)
    advantages = advantages_of(groups, AdvantageSettings(algorithm), charged)[0]
    samples = {sample.key: sample for siblings in groups for sample in map(to_sample, siblings)}
    penalties = {key: KL_COEF * kl_S for key, kl_S in kl_of.items()}
    found = step_targets(samples, advantages, algorithm, GlobalSums(), penalties).advantages
    ours = np.array([found[key] for key in samples]) * mask
    expected = np.array(GOLDEN[case]["kl_in_reward"][kl_estimator][name]) * mask
    assert ours == pytest.approx(expected, abs=1e-6)
    moved = np.abs(expected - np.array(GOLDEN[case]["advantages"][name]) * mask).max()
    assert moved > 1e-3 or (name == "grpo" and len(groups[0]) == 2)  # of two siblings one is up and one down


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_every_rank_gets_the_advantages_of_its_samples_for_any_controller(name):
    groups, kl_of, _ = verl_case(1, "k1")
    algorithm = Algorithm(adv_estimator=name, kl_coef=KL_COEF, kl_in="reward", kl_estimator="k1")
    keys, sums = sorted(kl_of), totals(groups, kl_of)
    batches = [TrainBatch(1, (MiniBatch((MicroBatch((tuple(part),), 8),), 1, 1),)) for part in (keys[:2], keys[2:], [])]
    by_rank = [{key: sums[key] for key in batch.keys} for batch in batches]

    async def work(group, own):
        return await with_advantages(batches, own, AdvantageSettings(algorithm), group, by_rank)

    ((alone, _),) = on_controllers(work, groups)
    assert [sorted(batch.advantages) for batch in alone] == [keys[:2], keys[2:], []]
    assert any(any(batch.advantages.values()) for batch in alone)
    for found, _ in on_controllers(work, groups, size=4):  # the last has no group
        assert found == alone


def test_without_kl_the_ranks_answer_nothing():
    groups, _, _ = verl_case(1, "k1")
    batches = [TrainBatch(1, (MiniBatch((MicroBatch((((0, 0), (0, 1)),), 8),), 1, 1),))]
    scoring = AdvantageSettings(Algorithm())
    ((found, _),) = on_controllers(lambda group, own: with_advantages(batches, own, scoring, group, []), groups)
    assert found[0].advantages == {key: advantages_of(groups, scoring, {})[0][key] for key in batches[0].keys}
