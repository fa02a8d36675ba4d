"""From scored groups to samples: overlong rewards, masked samples, KL in the reward (parity with verl)."""

import asyncio
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from gcore.config.tree import Algorithm
from gcore.content.tokens import Tokens
from gcore.preparation.advantages import ESTIMATORS, grpo
from gcore.preparation.samples import advantages_of, charge_kl, make_samples
from gcore.protocols import Rendezvous
from gcore.runtime.local import Hub, LocalGroup
from gcore.types import KlSums, MicroBatch, MiniBatch, Prompt, Rollout, Scored, TrainBatch

VERL = json.loads((Path(__file__).parents[1] / "parity" / "verl_golden.json").read_text())
GOLDEN, KL_COEF = VERL["cases"], VERL["kl_coef"]


def scored(prompt: int, sibling: int, reward: float, mask, finish="stop") -> Scored:
    mask_S = np.array(mask, bool)
    tokens_S = np.zeros(len(mask_S), np.int32)
    floats = np.zeros(len(mask_S), np.float32)
    given = Prompt(prompt, prompt, (), "", Tokens(np.array([1, 2], np.int32)))
    return Scored(Rollout(given, sibling, Tokens.steps(tokens_S), floats, mask_S, "", tokens_S, finish), reward)


def on_controllers(work, groups, size=1):
    """`work(group of controllers, its share of the groups)` on each of them at once."""

    async def run():
        hub = Hub(size)
        lines = [LocalGroup(Rendezvous(r, size, None, hub)) for r in range(size)]
        return await asyncio.gather(*(work(line, groups[line.rank :: size]) for line in lines))

    return asyncio.run(run())


def samples_of(groups, algorithm, **options):
    (found,) = on_controllers(lambda group, own: make_samples(own, algorithm, group, 0, **options), groups)
    return {s.key: s for s in found}


# --- overlong rewards and masks


def test_overlong_rewards_change_advantages_and_no_reward():
    group = [scored(0, i, 1.0, [1] * n) for i, n in enumerate((3, 8, 9, 10))]
    found = samples_of([group], Algorithm(overlong_buffer=2, overlong_penalty=0.5), max_length=10)
    expected = grpo(np.array([1.0, 1.0, 0.75, 0.5]))
    assert [found[0, i].advantages_S[0] for i in range(4)] == pytest.approx(expected, abs=1e-6)
    assert {s.reward for s in found.values()} == {1.0}
    assert not any(s.advantages_S.any() for s in samples_of([group], Algorithm(), max_length=10).values())


def test_masked_truncated_samples_count_in_the_group_and_not_in_the_loss():
    group = [scored(0, 0, 1.0, [1, 0, 1]), scored(0, 1, 0.0, [1, 1], "length"), scored(0, 2, 0.0, [1])]
    found = samples_of([group], Algorithm(mask_truncated=True))
    assert [found[0, i].mask_S.tolist() for i in range(3)] == [[True, False, True], [False, False], [True]]
    assert [found[0, i].advantages_S[0] for i in range(3)] == pytest.approx(grpo(np.array([1.0, 0, 0])), abs=1e-6)
    assert samples_of([group], Algorithm())[0, 1].mask_S.all()


def test_whitening_leaves_masked_samples_out():
    group = [scored(0, 0, 1.0, [1, 1]), scored(0, 1, 0.0, [1]), scored(0, 2, 9.0, [1] * 5, "length")]
    algorithm = Algorithm(adv_estimator="reinforce_pp", mask_truncated=True)
    found = samples_of([group], algorithm)
    tokens = np.array([1.0, 1.0, 0.0])
    expected = (np.array([1.0, 0.0]) - tokens.mean()) / tokens.std(ddof=1)
    assert [found[0, i].advantages_S[0] for i in range(2)] == pytest.approx(expected, abs=1e-6)


# --- KL in the reward. verl: apply_kl_penalty, then its estimators


def verl_case(case: int, estimator: str):
    """Groups, the KL per step, and what the ranks would say of it: see FsdpTrainer._kl_of."""
    batch = GOLDEN[case]["batch"]
    old, ref = (np.array(batch[name]) for name in ("old_log_prob", "ref_log_prob"))
    d, mask = old - ref, np.array(batch["mask"])
    kl = {"k1": d, "k2": d**2 / 2, "k3": np.minimum(np.exp(-d) + d - 1, 10)}[estimator] * mask
    groups: dict[int, list[Scored]] = {}
    sums, to_come = {}, {}
    for i, prompt in enumerate(batch["group"]):
        siblings = groups.setdefault(prompt, [])
        siblings.append(scored(prompt, len(siblings), batch["rewards"][i], mask[i]))
        key = (prompt, len(siblings) - 1)
        to_come[key] = np.cumsum(kl[i][::-1])[::-1]
        own = to_come[key][mask[i] > 0]
        sums[key] = KlSums(kl[i].sum(), own.sum(), (own**2).sum())
    return list(groups.values()), sums, to_come, mask


@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_kl_in_the_reward_same_as_verl(case, name, kl_estimator):
    groups, sums, to_come, mask = verl_case(case, kl_estimator)
    algorithm = Algorithm(adv_estimator=name, kl_coef=KL_COEF, kl_in="reward", kl_estimator=kl_estimator)

    async def work(group, own):
        return await advantages_of(own, algorithm, group, 0, sums)

    ((found, scale),) = on_controllers(work, groups)
    keys = [(s.rollout.prompt.id, s.rollout.sibling) for siblings in groups for s in siblings]
    ours = np.array([found[key] - scale * to_come[key] for key in keys]) * mask
    expected = np.array(GOLDEN[case]["kl_in_reward"][kl_estimator][name])
    assert ours == pytest.approx(expected, abs=1e-6)
    assert (scale > 0) == (name == "reinforce_pp")
    moved = np.abs(expected - np.array(GOLDEN[case]["advantages"][name])).max()
    assert moved > 1e-3 or (name == "grpo" and len(groups[0]) == 2)  # of two siblings one is up and one down


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_every_rank_gets_the_advantages_of_its_samples_for_any_controller(name):
    groups, sums, _, _ = verl_case(1, "k1")
    algorithm = Algorithm(adv_estimator=name, kl_coef=KL_COEF, kl_in="reward", kl_estimator="k1")
    keys = sorted(sums)
    batches = [TrainBatch(1, (MiniBatch((MicroBatch((tuple(part),), 8),), 1, 1),)) for part in (keys[:2], keys[2:], [])]
    by_rank = [{key: sums[key] for key in batch.keys} for batch in batches]

    async def work(group, own):
        return await charge_kl(own, algorithm, group, 0, by_rank, batches)

    (alone,) = on_controllers(work, groups)
    assert [sorted(batch.advantages) for batch in alone] == [keys[:2], keys[2:], []]
    assert len({batch.kl_scale for batch in alone}) == 1
    for found in on_controllers(work, groups, size=4):  # the last has no group
        for one, other in zip(alone, found, strict=True):
            assert dataclasses.replace(other, advantages=None, kl_scale=0.0) == dataclasses.replace(
                one, advantages=None, kl_scale=0.0
            )
            assert other.advantages == pytest.approx(one.advantages, abs=1e-12)
            assert other.kl_scale == pytest.approx(one.kl_scale, abs=1e-12)


def test_samples_wait_for_the_kl_without_advantages():
    group = [scored(0, 0, 1.0, [1, 1]), scored(0, 1, 0.0, [1])]
    found = samples_of([group], Algorithm(kl_coef=0.1, kl_in="reward"))
    assert not any(s.advantages_S.any() for s in found.values())
    assert any(s.advantages_S.any() for s in samples_of([group], Algorithm(kl_coef=0.1)).values())
