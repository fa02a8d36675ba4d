"""Losses and their weights: numbers worked out by hand, and parity with verl (tests/parity/make_verl_golden.py)."""

import json
import math
from pathlib import Path

import pytest
import torch

from gcore.config.algorithm import Algorithm
from gcore.training.objective import POLICY_LOSSES, Steps, call_own, importance, kl_penalty, step_weights, value_loss
from gcore.types import MiniBatch, UserError

VERL = json.loads((Path(__file__).parents[1] / "parity" / "verl_golden.json").read_text())
GOLDEN, KL = VERL["cases"], VERL["kl"]
LN = math.log


def steps(ratios, advantages, mask=None, sample=None, logprobs=None) -> Steps:
    n = len(ratios)
    logprobs = torch.tensor(logprobs or [-1.0] * n, dtype=torch.float64, requires_grad=True)
    old = logprobs.detach() - torch.tensor([LN(r) for r in ratios], dtype=torch.float64)
    sample = sample or [0] * n
    return Steps(
        logprobs,
        old,
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(mask or [1.0] * n, dtype=torch.float64),
        torch.tensor(sample),
        max(sample) + 1,
    )


def run(name, given: Steps, **options):
    loss_S, clipped_S = POLICY_LOSSES[name](given, Algorithm(policy_loss=name, **options))
    (gradient,) = torch.autograd.grad(loss_S.sum(), given.logprobs_S)
    return loss_S.tolist(), clipped_S.tolist(), gradient.tolist()


# --- by hand


def test_ppo_clips_only_where_the_clip_is_worse():
    given = steps(ratios=[0.5, 0.5, 1.5, 1.5, 1.1, 1.25], advantages=[2, -2, 2, -2, 3, 1])
    loss, clipped, gradient = run("ppo", given, clip_ratio_low=0.2, clip_ratio_high=0.28)
    assert loss == pytest.approx([-1.0, 1.6, -2.56, 3.0, -3.3, -1.25], abs=1e-12)
    assert clipped == [False, True, True, False, False, False]
    # d(-r A) = -r A where unclipped; clipped steps have none
    assert gradient == pytest.approx([-1.0, 0.0, 0.0, 3.0, -3.3, -1.25], abs=1e-12)


def test_ppo_dual_clip_bounds_negative_advantages_alone():
    given = steps(ratios=[5.0, 5.0, 2.0], advantages=[-2, 2, -2])
    loss, clipped, gradient = run("ppo", given, clip_ratio_dual=3.0)
    assert loss == pytest.approx([6.0, -2.4, 4.0], abs=1e-12)
    assert clipped == [False, True, False]
    assert gradient == pytest.approx([0.0, 0.0, 4.0], abs=1e-12)
    assert run("ppo", given)[0] == pytest.approx([10.0, -2.4, 4.0], abs=1e-12)


def test_ppo_on_policy_is_reinforce():
    loss, clipped, gradient = run("ppo", steps(ratios=[1, 1, 1], advantages=[2, -3, 0]))
    assert (loss, clipped, gradient) == ([-2.0, 3.0, 0.0], [False] * 3, [-2.0, 3.0, 0.0])


def test_ratios_stay_finite():
    given = steps(ratios=[1, 1], advantages=[-1, -1])
    given.old_logprobs_S.copy_(torch.tensor([-500.0, 500.0]))
    loss, _, gradient = run("ppo", given)
    assert loss == pytest.approx([math.exp(20), 0.8]) and all(map(math.isfinite, gradient))


def test_gspo_has_one_ratio_a_sample():
    # sample 0: ratios 2, 1/2 and a masked 100 -> geometric mean 1; sample 1: 4 and 1 -> 2
    given = steps(
        ratios=[2, 0.5, 100, 4, 1], advantages=[3, 3, 3, -1, -1], mask=[1.0, 1, 0, 1, 1], sample=[0, 0, 0, 1, 1]
    )
    loss, clipped, gradient = run("gspo", given)
    assert loss == pytest.approx([-3, -3, -3, 2, 2], abs=1e-12)
    assert clipped == [False] * 5
    assert gradient == pytest.approx([-3, -3, -3, 2, 2], abs=1e-12)
    positive = steps(ratios=[4, 1], advantages=[1, 1])
    assert run("gspo", positive, clip_ratio_high=0.5) == (
        pytest.approx([-1.5, -1.5], abs=1e-12),
        [True, True],
        [0.0, 0.0],
    )


def test_cispo_keeps_every_gradient():
    given = steps(ratios=[3, 0.1, 1], advantages=[2, 2, -1], logprobs=[-1.0, -2.0, -0.5])
    loss, clipped, gradient = run("cispo", given, clip_ratio_low=0.2, clip_ratio_high=0.28)
    assert loss == pytest.approx([1.28 * 2 * 1.0, 0.8 * 2 * 2.0, -0.5], abs=1e-12)
    assert clipped == [True, True, False]
    assert gradient == pytest.approx([-2.56, -1.6, 1.0], abs=1e-12)


def test_sapo_by_hand():
    """At a ratio of 1 the gradient is that of ppo; the gate of a ratio of 2 is sigmoid(tau) 4 / tau."""
    given = steps(ratios=[1, 1, 2, 2], advantages=[3, -3, 1, -1])
    loss, clipped, gradient = run("sapo", given, sapo_tau=(1.0, 2.0))
    gates = [4 / (1 + math.exp(-1)), 2 / (1 + math.exp(-2))]
    assert loss == pytest.approx([-6.0, 3.0, -gates[0], gates[1]], abs=1e-12)
    slopes = [2 * 4 * s * (1 - s) for s in (1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2)))]
    assert gradient == pytest.approx([-3.0, 3.0, -slopes[0], slopes[1]], abs=1e-12) and not any(clipped)


def test_reinforce_has_no_ratio():
    loss, clipped, gradient = run("reinforce", steps(ratios=[3, 0.1], advantages=[2, -1], logprobs=[-1.0, -2.0]))
    assert (loss, clipped, gradient) == ([2.0, -2.0], [False, False], [-2.0, 1.0])


def test_value_loss_by_hand():
    """Value 1.0 was 0.5, clipped to 0.7; returns 0, 2, 0.9: the larger error counts, which may have no gradient."""
    values = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([0.0, 2.0, 0.9], dtype=torch.float64)
    loss_S, clipped_S = value_loss(values, torch.full_like(values, 0.5), returns, 0.2)
    loss_S.sum().backward()
    assert loss_S.tolist() == pytest.approx([0.5, 1.3**2 / 2, 0.2**2 / 2], abs=1e-12)
    assert clipped_S.tolist() == [False, True, True] and values.grad.tolist() == [1.0, 0.0, 0.0]


def test_a_users_loss_is_checked_and_has_metrics():
    given, algorithm = steps(ratios=[1, 2], advantages=[1, -1]), Algorithm(policy_loss="mine.py:f")
    loss_S, metrics = call_own(lambda steps, _: (-steps.advantages_S, {"a": steps.mask_S}), given, algorithm)
    assert loss_S.tolist() == [-1.0, 1.0] and metrics["a"].tolist() == [1.0, 1.0]
    assert call_own(lambda steps, _: steps.logprobs_S, given, algorithm)[1] == {}
    with pytest.raises(UserError, match=r"mine.py:f returned loss of shape \(\); expected .* of shape \(2,\)"):
        call_own(lambda steps, _: steps.logprobs_S.sum(), given, algorithm)


def test_k3_by_hand():
    # log ratios ln 2, 0, -ln 2: 2 - ln 2 - 1, 0, 1/2 + ln 2 - 1
    found = kl_penalty(torch.tensor([-2.0, -1.0, -1.0]), torch.tensor([-2.0 + LN(2), -1.0, -1.0 - LN(2)]))
    assert found.tolist() == pytest.approx([1 - LN(2), 0.0, LN(2) - 0.5], abs=1e-6)
    assert torch.isfinite(kl_penalty(torch.tensor([-500.0]), torch.tensor([0.0]))).all()


def test_k3_is_unbiased():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    assert (p * kl_penalty(p.log(), q.log())).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)


# --- importance weights


def weigh_by_policy(ratios, mask=None, sample=None, **options):
    """ratios: how much likelier the trainer finds each token than the engine did. Weights, and where a bound decided:
    1 above the cap, -1 below the floor."""
    before = torch.tensor([-1.5] * len(ratios), dtype=torch.float64, requires_grad=True)
    rollout = before.detach() - torch.tensor([LN(r) for r in ratios], dtype=torch.float64)
    given = steps(ratios=[1.0] * len(ratios), advantages=[1.0] * len(ratios), mask=mask, sample=sample)
    weights_S, capped_S, floored_S = importance(before, rollout, given, Algorithm(importance=options))
    assert not weights_S.requires_grad  # a weight, not a way to be likelier
    return weights_S.tolist(), (capped_S.int() - floored_S.int()).tolist()


def test_token_weights_are_the_ratio_up_to_the_cap():
    found, bound = weigh_by_policy([0.25, 1.0, 1.99, 2.01, 50.0])
    assert found == pytest.approx([0.25, 1.0, 1.99, 2.0, 2.0], abs=1e-12)
    assert bound == [0, 0, 0, 1, 1]
    assert weigh_by_policy([0.25, 4.0], cap=5.0) == (pytest.approx([0.25, 4.0], abs=1e-12), [0, 0])
    assert weigh_by_policy([0.25, 4.0], cap=0.1) == (pytest.approx([0.1, 0.1], abs=1e-12), [1, 1])


def test_masked_weights_are_0_outside_the_bounds():
    ratios, bounds = [0.25, 0.5001, 1.0, 4.999, 5.001], {"cap": 5.0, "floor": 0.5}
    assert weigh_by_policy(ratios, mode="mask", **bounds) == (
        pytest.approx([0, 0.5001, 1.0, 4.999, 0], abs=1e-12),
        [-1, 0, 0, 0, 1],
    )
    assert weigh_by_policy(ratios, **bounds) == (
        pytest.approx([0.5, 0.5001, 1.0, 4.999, 5.0], abs=1e-12),
        [-1, 0, 0, 0, 1],
    )


def test_importance_of_the_same_policy_is_one_exactly():
    logprobs = torch.tensor([-0.1, -3.0, 0.0], dtype=torch.float64)
    given = steps(ratios=[1.0] * 3, advantages=[1.0] * 3)
    for level in ("token", "sequence", "geometric", "none"):
        weights_S, *bound = importance(logprobs, logprobs.clone(), given, Algorithm(importance={"level": level}))
        assert (weights_S.tolist(), any(b.any() for b in bound)) == ([1.0] * 3, False)


SEQUENCES = {  # sample 0: 2 and 1/2, and 100 that is no action of the policy; sample 1: 9 and 1; sample 2: 1/4, 1/4
    "ratios": [2, 0.5, 100, 9, 1, 0.25, 0.25],
    "mask": [1.0, 1, 0, 1, 1, 1, 1],
    "sample": [0, 0, 0, 1, 1, 2, 2],
}


def test_sequence_weights_are_the_product_over_the_actions_of_a_sample():
    found, bound = weigh_by_policy(**SEQUENCES, level="sequence", cap=8.0)
    assert found == pytest.approx([1, 1, 1, 8, 8, 1 / 16, 1 / 16], abs=1e-12)
    assert bound == [0, 0, 0, 1, 1, 0, 0]
    masked, bound = weigh_by_policy(**SEQUENCES, level="sequence", mode="mask", cap=10.0, floor=0.1)
    assert masked == pytest.approx([1, 1, 1, 9, 9, 0, 0], abs=1e-12)
    assert bound == [0, 0, 0, 0, 0, -1, -1]


def test_geometric_weights_are_the_geometric_mean():
    found, bound = weigh_by_policy(**SEQUENCES, level="geometric")
    assert found == pytest.approx([1, 1, 1, 2, 2, 0.25, 0.25], abs=1e-12)
    assert bound == [0, 0, 0, 1, 1, 0, 0]


def test_sequence_weights_are_unbiased_and_geometric_ones_are_not():
    """All 9 sequences of two tokens: the mean over what the engine samples, weighted, is that of the trainer."""
    trainer, engine = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]))
    value = torch.arange(9, dtype=torch.float64)  # of each sequence
    first, second = torch.arange(9) // 3, torch.arange(9) % 3
    tokens = torch.stack([first, second], 1).flatten()
    given = steps(ratios=[1.0] * 18, advantages=[1.0] * 18, sample=[i // 2 for i in range(18)])

    def mean(level):
        algorithm = Algorithm(importance={"level": level, "cap": 1e6})
        found, *_ = importance(trainer.log()[tokens], engine.log()[tokens], given, algorithm)
        return float((engine[first] * engine[second] * found[::2] * value).sum())

    expected = float((trainer[first] * trainer[second] * value).sum())
    assert expected == pytest.approx(2.8, abs=1e-9) and mean("sequence") == pytest.approx(2.8, abs=1e-9)
    assert abs(mean("geometric") - expected) > 0.2 and abs(mean("token") - expected) > 0.2


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_importance_of_a_sample_without_actions_is_one(level):
    found, _ = weigh_by_policy([5.0, 3.0, 0.5], mask=[0.0, 0, 1], sample=[0, 0, 1], level=level)
    assert found == pytest.approx([1.0, 1.0, 0.5], abs=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_stays_finite(level):
    given = steps(ratios=[1.0] * 2, advantages=[1.0] * 2, sample=[0, 1])
    far = torch.tensor([-500.0, 0.0], dtype=torch.float64), torch.tensor([0.0, -500.0], dtype=torch.float64)
    weights_S, capped_S, _ = importance(*far, given, Algorithm(importance={"level": level, "cap": 1e12}))
    assert weights_S.tolist() == pytest.approx([math.exp(-20), math.exp(20)]) and not capped_S.any()


# --- what each step counts


def weigh(aggregation):
    mask, sample = torch.tensor([1.0, 1, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 1])
    given = Steps(mask, mask, mask, mask, sample, 2)
    return step_weights(given, MiniBatch((), num_actions=10, num_samples=4), aggregation, 5).tolist()


def test_weights_by_hand():
    assert weigh("token_mean") == pytest.approx([0.1, 0.1, 0, 0.1, 0.1, 0.1])
    assert weigh("sequence_mean") == pytest.approx([1 / 8, 1 / 8, 0, 1 / 12, 1 / 12, 1 / 12])
    assert weigh("fixed_length") == pytest.approx([0.05, 0.05, 0, 0.05, 0.05, 0.05])


def test_weights_of_a_sample_without_actions_are_zero():
    for aggregation in ("token_mean", "sequence_mean", "fixed_length"):
        given = Steps(*torch.zeros(4, 2), torch.tensor([0, 0]), 1)
        found = step_weights(given, MiniBatch((), num_actions=0, num_samples=0), aggregation, 5)
        assert found.tolist() == [0.0, 0.0]


# --- verl 0.9.1. Common grid: `clip_ratio_c` = 1e9 turns off its dual clip, which is always on; every response has an
# --- action (verl leaves the others out of the mean over sequences, G-Core counts them); its GSPO ratio stops at e^10,
# --- ours at e^20.

VERL_NAMES = {"ppo": "vanilla", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "reinforce": "gpg"}
VERL_AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "fixed_length": "seq-mean-token-sum-norm",
}


def flat(batch, key: str) -> torch.Tensor:
    """[samples, width] as verl has it -> the response steps one after another, as a packed micro-batch has them."""
    rows = batch[key]
    rows = [row if isinstance(row, list) else [row] * max(batch["lengths"]) for row in rows]
    return torch.tensor(
        [v for row, n in zip(rows, batch["lengths"], strict=True) for v in row[:n]], dtype=torch.float64
    )


@pytest.mark.parametrize("aggregation", list(VERL_AGGREGATIONS))
@pytest.mark.parametrize("name", list(VERL_NAMES))
@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_policy_loss_same_as_verl(case, name, aggregation):
    batch = GOLDEN[case]["batch"]
    expected = GOLDEN[case]["losses"][VERL_NAMES[name]][VERL_AGGREGATIONS[aggregation]]
    samples = len(batch["lengths"])
    sample_S = torch.repeat_interleave(torch.arange(samples), torch.tensor(batch["lengths"]))
    mask_S, logprobs_S = flat(batch, "mask"), flat(batch, "log_prob").requires_grad_()
    # verl's GSPO knows no dual clip
    dual = batch["clip_ratio_c"] if name == "ppo" else None
    algorithm = Algorithm(
        clip_ratio_low=batch["clip_ratio_low"],
        clip_ratio_high=batch["clip_ratio_high"],
        clip_ratio_dual=dual,
        sapo_tau=(VERL["tau_pos"], VERL["tau_neg"]),
    )
    if name == "sapo" and aggregation != "sequence_mean":
        return  # verl's SAPO has one aggregation
    given = Steps(logprobs_S, flat(batch, "old_log_prob"), flat(batch, "advantages"), mask_S, sample_S, samples)
    loss_S, clipped_S = POLICY_LOSSES[name](given, algorithm)
    mini = MiniBatch((), int(mask_S.sum()), samples)
    weights_S = step_weights(given, mini, aggregation, batch["max_response_length"])
    loss = (loss_S * weights_S).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert ((clipped_S * mask_S).sum() / mask_S.sum()).item() == pytest.approx(expected["clip_frac"], abs=1e-6)
    gradient = flat({**batch, "gradient": expected["gradient"]}, "gradient")
    assert logprobs_S.grad.tolist() == pytest.approx(gradient.tolist(), abs=1e-6)


def test_the_golden_batches_reach_every_branch():
    vanilla = [case["losses"]["vanilla"]["token-mean"]["clip_frac"] for case in GOLDEN]
    assert min(vanilla) > 0 and max(vanilla) < 1
    ratios = [flat(c["batch"], "log_prob") - flat(c["batch"], "old_log_prob") for c in GOLDEN]
    bound = [
        bool(((r.exp() > c["batch"]["clip_ratio_c"]) & (flat(c["batch"], "advantages") < 0)).any())
        for r, c in zip(ratios, GOLDEN, strict=True)
    ]
    assert bound[1] and not bound[2]  # the dual clip bites, and is off in the last


@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_kl_same_as_verl(case):
    batch = GOLDEN[case]["batch"]
    found = kl_penalty(flat(batch, "log_prob"), flat(batch, "ref_log_prob"))
    expected = flat({**batch, "kl": GOLDEN[case]["low_var_kl"]}, "kl")
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert found.max() < 10


@pytest.mark.parametrize("clip", [0.2, 1e9])
@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_value_loss_same_as_verl(case, clip):
    batch, expected = GOLDEN[case]["batch"], GOLDEN[case]["critic"][f"loss/{clip}"]
    mask_S, values_S = flat(batch, "mask"), flat(batch, "values").requires_grad_()
    loss_S, clipped_S = value_loss(values_S, flat(batch, "old_values"), flat(batch, "returns"), clip)
    loss = (loss_S * mask_S).sum() / mask_S.sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert ((clipped_S * mask_S).sum() / mask_S.sum()).item() == pytest.approx(expected["clip_frac"], abs=1e-6)
    gradient = flat({**batch, "gradient": expected["gradient"]}, "gradient")
    assert values_S.grad.tolist() == pytest.approx(gradient.tolist(), abs=1e-6)
    if clip == 1e9:
        plain, _ = value_loss(values_S, flat(batch, "old_values"), flat(batch, "returns"), None)
        assert torch.equal(plain, loss_S) and expected["clip_frac"] == 0
    else:
        assert expected["clip_frac"] > 0.1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
def test_kl_estimators_and_their_gradients_same_as_verl(estimator):
    given, ref = (torch.tensor(KL[name], dtype=torch.float64) for name in ("log_prob", "ref_log_prob"))
    found = kl_penalty(given.requires_grad_(), ref, estimator)
    found.sum().backward()
    assert found.tolist() == pytest.approx(KL[estimator]["value"], abs=1e-8)
    assert given.grad.tolist() == pytest.approx(KL[estimator]["gradient"], abs=1e-8)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_importance_same_as_verl(case, level, mode):
    """verl's rollout_is: one threshold is truncation, two are IcePop. It writes 0 where there is no action."""
    floor = 0.6 if mode == "mask" else 0.0
    found_S, mask_S, batch = verl_importance(case, level, mode=mode, floor=floor)
    expected = flat({**batch, "found": GOLDEN[case]["importance"][level][mode]}, "found")
    assert (found_S * mask_S).tolist() == pytest.approx(expected.tolist(), abs=1e-8)
    assert not torch.equal(found_S * mask_S, mask_S)


@pytest.mark.parametrize("case", range(len(GOLDEN)))
def test_geometric_mask_same_as_verl(case):
    """verl has the geometric mean as rejection (rollout_rs: seq_mean_k1), without weights."""
    found_S, mask_S, batch = verl_importance(case, "geometric", mode="mask", floor=0.8, cap=1.25)
    expected = flat({**batch, "found": GOLDEN[case]["geometric_kept"]}, "found")
    assert ((found_S > 0) * mask_S).tolist() == expected.tolist()


def verl_importance(case, level, **options):
    batch = GOLDEN[case]["batch"]
    samples = len(batch["lengths"])
    sample_S = torch.repeat_interleave(torch.arange(samples), torch.tensor(batch["lengths"]))
    mask_S, old_S = flat(batch, "mask"), flat(batch, "old_log_prob")
    given = Steps(old_S, old_S, flat(batch, "advantages"), mask_S, sample_S, samples)
    algorithm = Algorithm(importance={"level": level, "cap": 1.5, **options})
    return importance(old_S, flat(batch, "rollout_log_prob"), given, algorithm)[0], mask_S, batch
