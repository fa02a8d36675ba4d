"""Advantages: numbers worked out by hand, and parity with verl (tests/parity/make_verl_golden.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

from gcore.config.algorithm import ESTIMATORS
from gcore.config.tree import Algorithm
from gcore.content.tokens import Tokens
from gcore.preparation.advantages import (
    GROUP_ESTIMATORS,
    dr_grpo,
    grpo,
    overlong_penalty,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from gcore.training.step_advantages import Moments, kl_to_come, step_advantages, whiten
from gcore.types import Sample

GOLDEN = json.loads((Path(__file__).parents[1] / "parity" / "verl_golden.json").read_text())["cases"]


def of(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


# --- by hand


def test_grpo_divides_by_the_sample_spread():
    # mean 2, squares (1 + 1 + 1 + 1) / (4 - 1) = 4/3; population spread would be 1 and give exactly +-1
    std = (4 / 3) ** 0.5
    expected = of(-1, 1, -1, 1) / (std + 1e-6)
    assert grpo(of(1, 3, 1, 3)) == pytest.approx(expected, abs=1e-12)
    assert grpo(of(1, 3, 1, 3))[1] == pytest.approx(0.866025, abs=1e-6)


def test_grpo_of_one_success_in_four():
    # mean 1/4, spread 1/2: (3/4) / (1/2) and (-1/4) / (1/2), less the epsilon
    assert grpo(of(0, 0, 1, 0)) == pytest.approx(of(-0.5, -0.5, 1.5, -0.5), abs=4e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.7])
def test_grpo_of_equal_rewards_is_exactly_zero(value):
    assert grpo(np.full(7, value)).tolist() == [0.0] * 7  # 0.1 * 7 / 7 != 0.1: a mean alone would leave noise


def test_dr_grpo_keeps_the_scale():
    assert dr_grpo(of(0, 4, 2)).tolist() == [-2.0, 2.0, 0.0]
    assert dr_grpo(of(0, 40, 20)).tolist() == [-20.0, 20.0, 0.0]


def test_rloo_leaves_itself_out():
    # others' means: (4 + 2) / 2, (0 + 2) / 2, (0 + 4) / 2
    assert rloo(of(0, 4, 2)).tolist() == [-3.0, 3.0, 0.0]
    assert rloo(of(1, 0)).tolist() == [1.0, -1.0]


def test_reinforce_pp_has_no_baseline_but_the_batch():
    rewards = of(0, 4, 2)
    assert reinforce_pp(rewards).tolist() == [0.0, 4.0, 2.0]
    assert reinforce_pp(rewards) is not rewards
    assert reinforce_pp_baseline(rewards).tolist() == [-2.0, 2.0, 0.0]


def test_whiten_by_hand():
    # actions 2 2 2 -1: mean 5/4, variance (3 * 9/16 + 81/16) / 3 = 9/4, spread 3/2
    moments = Moments.of(of(2, 2, 2, -1))
    assert moments == Moments(count=4, total=5, squares=13)
    assert whiten(of(2, -1), moments) == pytest.approx(of(0.5, -1.5), abs=1e-8)


def test_whiten_leaves_a_single_action_and_survives_no_spread():
    assert whiten(of(3), Moments.of(of(3))).tolist() == [3.0]
    assert whiten(of(3, 3), Moments.of(of(3, 3))).tolist() == [0.0, 0.0]


def sample(prompt: int, mask) -> Sample:
    mask_S = np.array(mask) > 0
    return Sample(prompt, 0, Tokens.steps(np.zeros(len(mask_S), np.int32)), mask_S, np.zeros(len(mask_S), np.float32))


def test_kl_to_come_by_hand():
    mask = np.array([True, False, True, True])
    assert kl_to_come(of(0.5, 9.0, 0.25, -1.0), mask).tolist() == [-0.25, -0.75, -0.75, -1.0]
    assert kl_to_come(np.ones(2), np.zeros(2, bool)).tolist() == [0.0, 0.0]


def test_advantages_of_steps_by_hand():
    """Charged: 2 - 0.5 x (0.4, 0.3) and -1 - 0.5 x 0.2; whitened over these three actions."""
    algorithm = Algorithm(adv_estimator="reinforce_pp", kl_coef=0.5, kl_in="reward")
    samples = {(0, 0): sample(0, [1, 0, 1]), (1, 0): sample(1, [1])}
    kl = {(0, 0): of(0.1, 7.0, 0.3), (1, 0): of(0.2)}
    found = step_advantages(samples, {(0, 0): 2.0, (1, 0): -1.0}, kl, algorithm, lambda sums: sums)
    actions = of(2 - 0.5 * 0.4, 2 - 0.5 * 0.3, -1 - 0.5 * 0.2)
    expected = (actions - actions.mean()) / actions.std(ddof=1)
    assert [*found[0, 0][[0, 2]], *found[1, 0]] == pytest.approx(expected, abs=1e-6)
    plain = step_advantages(samples, {(0, 0): 2.0, (1, 0): -1.0}, {}, Algorithm(), lambda sums: 1 / 0)
    assert plain[0, 0].tolist() == [2.0, 2.0, 2.0] and plain[1, 0].tolist() == [-1.0]


def test_whitening_does_not_depend_on_the_split_over_ranks():
    rng = np.random.default_rng(0)
    samples = {(i, 0): sample(i, rng.random(rng.integers(1, 9)) > 0.3) for i in range(60)}
    advantages = {key: float(rng.normal()) for key in samples}
    algorithm = Algorithm(adv_estimator="reinforce_pp_baseline")
    whole = step_advantages(samples, advantages, {}, algorithm, lambda sums: sums)
    keys = list(samples)
    shares = [keys[:7], [], keys[7:31], keys[31:]]  # one rank has nothing
    own: list[np.ndarray] = []

    def keep(sums):
        own.append(sums)
        return sums

    for share in shares:
        step_advantages(samples, {key: advantages[key] for key in share}, {}, algorithm, keep)
    for share in shares:
        given = {key: advantages[key] for key in share}
        found = step_advantages(samples, given, {}, algorithm, lambda sums: sum(own))
        for key in share:
            assert found[key] == pytest.approx(whole[key], abs=1e-6)
    actions = np.concatenate([whole[key][samples[key].mask_S] for key in keys])
    assert actions.mean() == pytest.approx(0, abs=1e-6) and actions.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_estimators_that_whiten():
    assert ESTIMATORS.keys() == GROUP_ESTIMATORS.keys()
    assert {name for name, estimator in ESTIMATORS.items() if estimator.whiten} == {
        "reinforce_pp",
        "reinforce_pp_baseline",
    }


def test_soft_overlong_punishment():
    """DAPO, equation 13: 0 up to max - cache, then linearly to -1 at max, and -1 beyond."""

    def found(length, **more):
        return overlong_penalty(length, **{"max_length": 20, "buffer": 4, "penalty": 1.0, **more})

    assert [found(n) for n in (1, 16, 17, 18, 20, 25)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert found(18, penalty=3.0) == -1.5
    assert found(20, buffer=0) == 0.0
    assert found(10, buffer=20) == -0.5


# --- verl 0.9.1. Its epsilon (1e-6), spread (n - 1) and whitening (n - 1, 1e-8) are ours too. A group of one, which
# --- verl leaves as it is and G-Core's configuration refuses, is not compared.


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_same_as_verl(name, case):
    batch = GOLDEN[case]["batch"]
    rewards, group, mask = (np.array(batch[key]) for key in ("rewards", "group", "mask"))
    ours = np.concatenate([GROUP_ESTIMATORS[name](rewards[group == g].astype(np.float64)) for g in np.unique(group)])
    if ESTIMATORS[name].whiten:
        ours = whiten(ours, Moments.of(np.repeat(ours, mask.sum(1))))
    assert ours[:, None] * mask == pytest.approx(np.array(GOLDEN[case]["advantages"][name]), abs=1e-6)
    assert np.abs(ours).max() > 0.5
