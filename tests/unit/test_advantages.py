"""Advantages: numbers worked out by hand, and parity with verl (tests/parity/make_verl_golden.py)."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from gcore.config.algorithm import ESTIMATORS, AdaptiveEntropy, AdaptiveKl, Algorithm, Overlong
from gcore.content.tokens import Tokens
from gcore.preparation.advantages import (
    GROUP_ESTIMATORS,
    GroupScores,
    estimate,
    overlong_penalty,
)
from gcore.training.schedule import Coefficients
from gcore.training.step_advantages import GlobalSums, Moments, explained_variance, generalized, step_targets, whiten
from gcore.types import Sample, UserError

VERL = json.loads((Path(__file__).parents[1] / "parity" / "verl_golden.json").read_text())
GOLDEN = VERL["cases"]


def of(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def advantages(name: str, rewards, **more) -> np.ndarray:
    lengths = np.array(more.pop("lengths", [1] * len(rewards)), np.float64)
    return GROUP_ESTIMATORS[name](GroupScores(np.array(rewards, np.float64), lengths, **more))


# --- by hand


def test_grpo_divides_by_the_sample_spread():
    # mean 2, squares (1 + 1 + 1 + 1) / (4 - 1) = 4/3; population spread would be 1 and give exactly +-1
    std = (4 / 3) ** 0.5
    expected = of(-1, 1, -1, 1) / (std + 1e-6)
    assert advantages("grpo", of(1, 3, 1, 3)) == pytest.approx(expected, abs=1e-12)
    assert advantages("grpo", of(1, 3, 1, 3))[1] == pytest.approx(0.866025, abs=1e-6)


def test_grpo_of_one_success_in_four():
    # mean 1/4, spread 1/2: (3/4) / (1/2) and (-1/4) / (1/2), less the epsilon
    assert advantages("grpo", of(0, 0, 1, 0)) == pytest.approx(of(-0.5, -0.5, 1.5, -0.5), abs=4e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gpg", "reinforce_pp_baseline"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.7])
def test_equal_rewards_give_exactly_zero(value, name):
    for number in (3, 7):  # 0.1 * 7 / 7 != 0.1: a mean alone would leave noise
        assert advantages(name, np.full(number, value)).tolist() == [0.0] * number


@pytest.mark.parametrize("name", [name for name, kind in ESTIMATORS.items() if kind.siblings])
def test_a_single_sample_has_no_advantage(name):
    """With a teacher alone, which scores steps, a prompt may have one sample."""
    group = GroupScores(of(0), of(3), {}, {"teacher": 1.0})
    assert estimate(GROUP_ESTIMATORS[name], group, name)[0].tolist() == [0.0]


def test_dr_grpo_keeps_the_scale():
    assert advantages("dr_grpo", of(0, 4, 2)).tolist() == [-2.0, 2.0, 0.0]
    assert advantages("dr_grpo", of(0, 40, 20)).tolist() == [-20.0, 20.0, 0.0]


def test_rloo_leaves_itself_out():
    # others' means: (4 + 2) / 2, (0 + 2) / 2, (0 + 4) / 2
    assert advantages("rloo", of(0, 4, 2)).tolist() == [-3.0, 3.0, 0.0]
    assert advantages("rloo", of(1, 0)).tolist() == [1.0, -1.0]


def test_reinforce_pp_has_no_baseline_but_the_batch():
    rewards = of(0, 4, 2)
    assert advantages("reinforce_pp", rewards).tolist() == [0.0, 4.0, 2.0]
    assert advantages("reinforce_pp_baseline", rewards).tolist() == [-2.0, 2.0, 0.0]


def test_whiten_by_hand():
    # actions 2 2 2 -1: mean 5/4, variance (3 * 9/16 + 81/16) / 3 = 9/4, spread 3/2
    moments = moments_of(of(2, 2, 2, -1))
    assert moments == Moments(count=4, mean=1.25, squares=6.75)
    assert whiten(of(2, -1), moments) == pytest.approx(of(0.5, -1.5), abs=1e-8)


def test_whiten_leaves_a_single_action_and_survives_no_spread():
    assert whiten(of(3), moments_of(of(3))).tolist() == [3.0]
    assert whiten(of(3, 3), moments_of(of(3, 3))).tolist() == [0.0, 0.0]
    assert whiten(of(0.1, 0.1, 0.1), moments_of(of(0.1, 0.1, 0.1))).tolist() == [0.0] * 3  # 0.1 * 3 / 3 != 0.1
    assert np.isnan(whiten(of(1, 2), moments_of(of(1, np.nan)))).all()  # the update is skipped


def moments_of(values, ranks: GlobalSums | None = None) -> Moments:
    return (ranks or GlobalSums()).moments({(0, 0): values})


@pytest.mark.parametrize(("mean", "spread"), [(1e6, 1.0), (1e8, 1.0), (1e3, 1e-3), (0.0, 1e-300), (-3e200, 1e150)])
def test_moments_against_exact_arithmetic(mean, spread):
    """A difference of squares has an error of 4e4 for N(1e8, 1)."""
    values = np.random.default_rng(0).normal(mean, spread, 512)
    exact = [Fraction(value) for value in values.tolist()]
    center = sum(exact) / 512
    squares = sum((value - center) ** 2 for value in exact)
    found = moments_of(values)
    assert found.mean == float(center) and found.squares == pytest.approx(float(squares), rel=1e-12, abs=0)


def over_ranks(shares: list[dict], function, holders=None) -> list:
    """`function(share, ranks)` on one thread per rank, whose sums are added up in the order in which they arrive."""
    waiting, sums, lock = threading.Barrier(len(shares)), list[np.ndarray](), threading.Lock()

    def sum_over_ranks(own: np.ndarray) -> np.ndarray:
        with lock:
            sums.append(own)
        waiting.wait()
        total = sum(sums[-len(shares) :])
        waiting.wait()
        return total

    ranks = GlobalSums(sum_over_ranks, holders or {})
    with ThreadPoolExecutor(len(shares)) as pool:
        return list(pool.map(lambda share: function(share, ranks), shares))


def test_moments_do_not_depend_on_the_ranks_to_the_last_bit():
    """In any order, also of values that differ by 300 orders of magnitude, and of samples that two ranks share."""
    rng = np.random.default_rng(1)
    own = {(i, 0): rng.normal(size=rng.integers(0, 9)) * 10.0 ** rng.integers(-150, 150) for i in range(60)}
    whole, keys = GlobalSums().moments(own), list(own)
    for size in (1, 2, 3, 7):
        rng.shuffle(keys)
        shares = [{tuple(key): own[tuple(key)] for key in keys[rank::size]} for rank in range(size)]
        assert over_ranks(shares, lambda share, ranks: ranks.moments(share)) == [whole] * size
    both = over_ranks([own, own], lambda share, ranks: ranks.moments(share), dict.fromkeys(own, 2))
    assert both == [whole] * 2


def sample(prompt: int, mask) -> Sample:
    mask_S = np.array(mask) > 0
    return Sample(prompt, 0, Tokens.steps(np.zeros(len(mask_S), np.int32)), mask_S, np.zeros(len(mask_S), np.float32))


def test_rewards_to_come_by_hand():
    """Without values and with lambda 1: discounted sums over actions. A step between them is no time."""
    mask = np.array([True, False, True, True])
    rewards = {(0, 0): of(-0.5, 0.0, -0.25, 1.0), (1, 0): of(0.0, 0.0, 0.0, 0.0)}
    masks = {(0, 0): mask, (1, 0): np.zeros(4, bool)}
    assert generalized(rewards, None, masks, 1.0, 1.0)[0, 0].tolist() == [0.25, 0.75, 0.75, 1.0]
    found = generalized(rewards, None, masks, 0.5, 1.0)
    assert found[0, 0].tolist() == [-0.5 + 0.5 * 0.25, 0.25, 0.25, 1.0] and found[1, 0].tolist() == [0.0] * 4


def test_gae_by_hand():
    """gamma 0.5, lambda 0.5, values 1, 2: delta = 3 - 2 = 1 and 0 + 0.5 x 2 - 1 = 0; A = 1 and 0 + 0.25 x 1."""
    masks = {(0, 0): np.array([True, True])}
    found = generalized({(0, 0): of(0, 3)}, {(0, 0): of(1, 2)}, masks, 0.5, 0.5)
    assert found[0, 0].tolist() == [0.25, 1.0]


def loop_of_gae(rewards, values, mask, gamma, lam):
    """The definition, action by action: A_t is the sum of (gamma lam)^k delta_t+k."""
    at = [i for i, m in enumerate(mask) if m]
    found = {}
    for t in range(len(at)):
        total = 0.0
        for k in range(len(at) - t):
            after = values[at[t + k + 1]] if t + k + 1 < len(at) else 0.0
            total += (gamma * lam) ** k * (rewards[at[t + k]] + gamma * after - values[at[t + k]])
        found[at[t]] = total
    return found


@pytest.mark.parametrize("seed", range(4))
def test_gae_same_as_an_independent_loop(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, 20)
    masks = {(i, 0): rng.random(n) > 0.3 for i, n in enumerate(lengths)}
    rewards, values = ({key: rng.normal(size=len(mask)) for key, mask in masks.items()} for _ in range(2))
    gamma, lam = rng.uniform(0.5, 1, 2)
    found = generalized(rewards, values, masks, gamma, lam)
    for key, mask in masks.items():
        expected = loop_of_gae(rewards[key], values[key], mask, gamma, lam)
        assert [found[key][t] for t in expected] == pytest.approx(list(expected.values()), abs=1e-9)


def test_explained_variance():
    masks = {(0, 0): np.array([True, False, True]), (1, 0): np.array([True, True])}
    returns = {(0, 0): of(1, 99, 2), (1, 0): of(3, 6)}
    assert explained_variance(returns, returns, masks, GlobalSums()) == pytest.approx(1.0, abs=1e-7)
    flat = {key: np.full(len(mask), 5.0) for key, mask in masks.items()}
    assert explained_variance(returns, flat, masks, GlobalSums()) == pytest.approx(0.0, abs=1e-7)
    half = {key: values - 0.5 * values for key, values in returns.items()}
    assert explained_variance(returns, half, masks, GlobalSums()) == pytest.approx(0.75, abs=1e-7)


def test_opo_weighs_the_baseline_by_length():
    # (1 x 4 + 3 x 0) / 4 = 1
    assert advantages("opo", of(4, 0), lengths=[1, 3]).tolist() == [3.0, -1.0]
    assert advantages("opo", of(4, 0), lengths=[0, 0]).tolist() == [2.0, -2.0]


def test_remax_compares_with_the_greedy_response():
    assert advantages("remax", of(1, 0), baseline=0.75).tolist() == [0.25, -0.75]


def test_gdpo_normalizes_each_reward_apart():
    parts, weights = {"a": of(0, 1000), "b": of(1, 0)}, {"a": 1.0, "b": 1.0}
    found = advantages("gdpo", of(1, 1000), parts=parts, weights=weights)
    assert found == pytest.approx(of(0, 0), abs=1e-5)  # of equal weight, although one has a thousand times the spread
    missing = {"a": of(0, 2), "b": of(np.nan, 1)}  # b does not apply to the first sample, and has no spread
    assert advantages("gdpo", of(0, 3), parts=missing, weights=weights) == pytest.approx(of(-1, 1) / 2**0.5, abs=1e-5)
    charged = advantages("gdpo", of(0.5, 1000), parts=parts, weights=weights)  # an overlong penalty of 0.5
    assert charged == pytest.approx(found - of(0.5, 0), abs=1e-12)


def test_gpg_scales_up_for_groups_without_a_spread():
    samples = {(i, 0): sample(i, [1]) for i in range(4)}
    algorithm = Algorithm(adv_estimator="gpg")
    given = {(0, 0): 0.5, (1, 0): -0.5, (2, 0): 0.0, (3, 0): 0.0}
    found = step_targets(samples, given, algorithm, GlobalSums()).advantages
    assert [found[key][0] for key in samples] == [1.0, -1.0, 0.0, 0.0]
    nothing = step_targets(samples, dict.fromkeys(samples, 0.0), algorithm, GlobalSums()).advantages
    assert not any(values.any() for values in nothing.values())


def test_an_estimator_of_the_user_is_checked_and_has_metrics():
    group = GroupScores(of(1, 0), of(3, 4))
    values, metrics = estimate(lambda g: (g.rewards * 2, {"mean": g.rewards.mean()}), group, "mine.py:f")
    assert values.tolist() == [2.0, 0.0] and metrics == {"mean": 0.5}
    for bad in ([1.0], [1.0, np.nan]):
        with pytest.raises(UserError, match=r"adv_estimator=mine.py:f returned .* for 2 samples; expected one finite"):
            estimate(lambda g, bad=bad: bad, group, "mine.py:f")


# --- adaptive coefficients


def test_adaptive_kl_same_as_verl():
    current, control = Coefficients(0.1, 0.0), AdaptiveKl(target=0.05, horizon=1000)
    for kl, samples, expected in VERL["adaptive_kl"]:
        current = current.after_kl(control, kl, samples)
        assert current.kl == pytest.approx(expected, abs=1e-9)


def test_adaptive_kl_of_a_large_step_keeps_its_sign():
    start, control = Coefficients(0.1, 0.0), AdaptiveKl(target=0.05, horizon=200)
    assert start.after_kl(control, 0.0, 1024).kl == pytest.approx(0.08)
    assert start.after_kl(control, 1.0, 1024).kl == pytest.approx(0.12)


def test_entropy_control():
    start, control = Coefficients(0.0, 0.01), AdaptiveEntropy(target=0.2, change=0.005)
    assert start.after_entropy(control, 0.1) == Coefficients(0.0, pytest.approx(0.015), True)
    assert start.after_entropy(control, 0.3) == Coefficients(0.0, pytest.approx(0.005), False)
    assert Coefficients(0.0, 0.0).after_entropy(control, 0.3) == Coefficients(0.0, 0.0, False)
    algorithm = Algorithm(adaptive_entropy={"target": 0.2}, entropy_coef=0.5, kl_coef=0.1, adaptive_kl={"target": 0.05})
    now = Coefficients(0.3, 0.7, bonus=False)
    assert (now.applied(algorithm).kl_coef, now.applied(algorithm).entropy_coef) == (0.3, 0.0)
    assert Coefficients.restored(now.counters(), algorithm) == now
    assert Coefficients.restored(now.counters(), Algorithm(entropy_coef=0.5)) == Coefficients(0.0, 0.5)


def test_advantages_of_steps_by_hand():
    """Charged: 2 - 0.5 x (0.4, 0.3) and -1 - 0.5 x 0.2; whitened over these three actions."""
    algorithm = Algorithm(adv_estimator="reinforce_pp", kl_coef=0.5, kl_in="reward")
    samples = {(0, 0): sample(0, [1, 0, 1]), (1, 0): sample(1, [1])}
    penalties = {(0, 0): 0.5 * of(0.1, 7.0, 0.3), (1, 0): 0.5 * of(0.2)}
    found = step_targets(samples, {(0, 0): 2.0, (1, 0): -1.0}, algorithm, GlobalSums(), penalties).advantages
    actions = of(2 - 0.5 * 0.4, 2 - 0.5 * 0.3, -1 - 0.5 * 0.2)
    expected = (actions - actions.mean()) / actions.std(ddof=1)
    assert [*found[0, 0][[0, 2]], *found[1, 0]] == pytest.approx(expected, abs=1e-6)
    plain = step_targets(samples, {(0, 0): 2.0, (1, 0): -1.0}, Algorithm(), GlobalSums(lambda sums: 1 / 0)).advantages
    assert plain[0, 0].tolist() == [2.0, 2.0, 2.0] and plain[1, 0].tolist() == [-1.0]


def test_whitening_does_not_depend_on_the_split_over_ranks():
    rng = np.random.default_rng(0)
    samples = {(i, 0): sample(i, rng.random(rng.integers(1, 9)) > 0.3) for i in range(60)}
    given = {key: float(rng.normal()) for key in samples}
    algorithm = Algorithm(adv_estimator="reinforce_pp_baseline")
    whole = step_targets(samples, given, algorithm, GlobalSums()).advantages
    keys = list(samples)
    shares = [keys[:7], [], keys[7:31], keys[31:]]  # one rank has nothing
    parts = [{key: given[key] for key in share} for share in shares]
    targets = over_ranks(parts, lambda some, ranks: step_targets(samples, some, algorithm, ranks))
    for share, found in zip(shares, targets, strict=True):
        assert all(np.array_equal(found.advantages[key], whole[key]) for key in share)
    actions = np.concatenate([whole[key][samples[key].mask_S] for key in keys])
    assert actions.mean() == pytest.approx(0, abs=1e-6) and actions.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_estimators_that_whiten():
    assert ESTIMATORS.keys() == GROUP_ESTIMATORS.keys()
    assert {name for name, estimator in ESTIMATORS.items() if estimator.whiten} == {
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gdpo",
        "gae",
    }


def test_soft_overlong_punishment():
    """DAPO, equation 13: 0 up to max - cache, then linearly to -1 at max, and -1 beyond."""

    def found(length, **more):
        return overlong_penalty(length, Overlong(**{"buffer": 4, "penalty": 1.0, **more}), 20)

    assert [found(n) for n in (1, 16, 17, 18, 20, 25)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert found(18, penalty=3.0) == -1.5
    assert found(20, buffer=0) == 0.0
    assert found(10, buffer=20) == -0.5


# --- verl 0.9.1. Its epsilon (1e-6), spread (n - 1) and whitening (n - 1, 1e-8) are ours too. A group of one, which
# --- verl leaves as it is and G-Core's configuration refuses, is not compared.


def samples_of(batch) -> dict:
    return {(i, 0): sample(i, row) for i, row in enumerate(batch["mask"])}


@pytest.mark.parametrize("name", [*(name for name in ESTIMATORS if name != "gae"), "reinforce_pp_discounted"])
@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_same_as_verl(name, case):
    batch, estimator = GOLDEN[case]["batch"], name.removesuffix("_discounted")
    rewards, group, mask = (np.array(batch[key]) for key in ("rewards", "group", "mask"))
    rewards = np.array(batch["spreadless_rewards"]) if name == "gpg" else rewards
    gamma = 0.9 if name != estimator else 1.0
    algorithm = Algorithm(adv_estimator=estimator, gamma=gamma)
    per_sample = {}
    for g in np.unique(group):
        own = group == g
        parts = {part: np.array(values)[own] for part, values in batch["parts"].items()}
        more = {"lengths": mask.sum(1)[own], "baseline": np.array(batch["baselines"])[own][0]}
        if name == "gdpo":  # verl takes the parts alone
            more |= {"parts": parts, "weights": batch["weights"]}
            rewards[own] = sum(batch["weights"][part] * values for part, values in parts.items())
        found = advantages(estimator, rewards[own], **more)
        per_sample |= zip([(int(i), 0) for i in np.flatnonzero(own)], found.tolist(), strict=True)
    found = step_targets(samples_of(batch), per_sample, algorithm, GlobalSums()).advantages
    ours = np.array([found[i, 0] for i in range(len(mask))]) * mask
    assert ours == pytest.approx(np.array(GOLDEN[case]["advantages"][name]) * mask, abs=1e-6)
    assert np.abs(ours).max() > 0.5


@pytest.mark.parametrize("kind", [kind for kind in GOLDEN[0]["critic"] if kind.startswith("gae")])
@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_gae_same_as_verl(case, kind):
    batch, expected = GOLDEN[case]["batch"], GOLDEN[case]["critic"][kind]
    _, penalty, gamma, lam = kind.split("/")
    mask, values = np.array(batch["mask"]), np.array(batch["values"])
    difference = np.array(batch["old_log_prob"]) - np.array(batch["ref_log_prob"])
    algorithm = Algorithm(
        adv_estimator="gae",
        gamma=float(gamma),
        gae_lambda=float(lam),
        **({"kl_coef": VERL["kl_coef"], "kl_in": "reward", "kl_estimator": "k1"} if penalty == "kl" else {}),
    )
    penalties = {(i, 0): VERL["kl_coef"] * row for i, row in enumerate(difference)} if penalty == "kl" else None
    scores = {(i, 0): reward for i, reward in enumerate(batch["rewards"])}
    given = {(i, 0): row for i, row in enumerate(values)}
    found = step_targets(samples_of(batch), scores, algorithm, GlobalSums(), penalties, given)
    for name, columns in (("advantages", found.advantages), ("returns", found.returns)):
        ours = np.array([columns[i, 0] for i in range(len(mask))]) * mask
        assert ours == pytest.approx(np.array(expected[name]) * mask, abs=1e-6)
        assert np.abs(ours).max() > 0.3
