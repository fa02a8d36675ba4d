"""Advantages: numbers worked out by hand, and parity with verl (tests/parity/make_verl_golden.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

from gcore.preparation.advantages import (
    ESTIMATORS,
    Moments,
    dr_grpo,
    grpo,
    overlong_penalty,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    whiten,
)

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


def test_moments_weigh_by_actions():
    moments = Moments.of(of(2, -1), of(3, 1))
    assert moments == Moments(count=4, total=5, squares=13)
    assert Moments.sum([moments, Moments(1, 2, 4), Moments()]) == Moments(5, 7, 17)


def test_whiten_by_hand():
    # actions 2 2 2 -1: mean 5/4, variance (3 * 9/16 + 81/16) / 3 = 9/4, spread 3/2
    moments = Moments.of(of(2, -1), of(3, 1))
    assert whiten(of(2, -1), moments) == pytest.approx(of(0.5, -1.5), abs=1e-8)


def test_whiten_leaves_a_single_action_and_survives_no_spread():
    assert whiten(of(3), Moments.of(of(3), of(1))).tolist() == [3.0]
    assert whiten(of(3, 3), Moments.of(of(3, 3), of(2, 2))).tolist() == [0.0, 0.0]


def test_whiten_does_not_depend_on_the_split_over_controllers():
    rng = np.random.default_rng(0)
    advantages, actions = rng.normal(size=60), rng.integers(0, 9, 60).astype(np.float64)
    whole = whiten(advantages, Moments.of(advantages, actions))
    parts = np.array_split(np.arange(60), [7, 7, 31])  # one controller has nothing
    moments = Moments.sum([Moments.of(advantages[p], actions[p]) for p in parts])
    assert np.concatenate([whiten(advantages[p], moments) for p in parts]) == pytest.approx(whole, abs=1e-12)
    tokens = np.repeat(whole, actions.astype(int))
    assert tokens.mean() == pytest.approx(0, abs=1e-12) and tokens.std(ddof=1) == pytest.approx(1, abs=1e-8)


def test_estimators_that_whiten():
    assert {name for name, estimator in ESTIMATORS.items() if estimator.whiten} == {
        "reinforce_pp",
        "reinforce_pp_baseline",
    }


def test_moments_of_steps_that_are_charged_with_the_kl_to_come():
    # two actions with KL to come of 0.4 and 0.3, one with 0.2; coefficient 0.5
    steps = of(2 - 0.5 * 0.4, 2 - 0.5 * 0.3, -1 - 0.5 * 0.2)
    found = Moments.of(of(2, -1), of(2, 1), of(0.7, 0.2), of(0.25, 0.04), 0.5)
    assert (found.count, found.total, found.squares) == pytest.approx((3, steps.sum(), (steps**2).sum()), abs=1e-12)
    assert (found.mean, found.spread) == pytest.approx((steps.mean(), steps.std(ddof=1)), abs=1e-8)


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
    batch, estimator = GOLDEN[case]["batch"], ESTIMATORS[name]
    rewards, group, mask = (np.array(batch[key]) for key in ("rewards", "group", "mask"))
    ours = np.concatenate([estimator.group(rewards[group == g].astype(np.float64)) for g in np.unique(group)])
    if estimator.whiten:
        ours = whiten(ours, Moments.of(ours, mask.sum(1).astype(np.float64)))
    assert ours[:, None] * mask == pytest.approx(np.array(GOLDEN[case]["advantages"][name]), abs=1e-6)
    assert np.abs(ours).max() > 0.5
