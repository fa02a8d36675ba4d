"""The whole objective: importance weights, policy loss, KL and denominators together, value and gradient.

Expected numbers: tests/parity/make_formula_golden.py, which works them out token by token in plain Python.
"""

import json
from pathlib import Path

import pytest
import torch

from gcore.config.algorithm import Algorithm
from gcore.config.preference import Preference
from gcore.protocols import Metric, add_metrics
from gcore.training import objective, preference
from gcore.training.objective import StepColumns
from gcore.types import MiniBatch

GOLDEN = json.loads((Path(__file__).parents[1] / "parity" / "formula_golden.json").read_text())
KEYS = GOLDEN["keys"]


def flat(rows) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def columns_of(batch) -> StepColumns:
    lengths = [len(row) for row in batch["log"]]
    return StepColumns(
        mask_S=flat(batch["mask"]),
        sample_S=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_samples=len(lengths),
        rollout_logprobs_S=flat(batch["rollout"]),
        advantages_S=flat([[a] * n for a, n in zip(batch["advantages"], lengths, strict=True)]),
        old_logprobs_S=flat(batch["old"]),
        ref_logprobs_S=flat(batch["ref"]),
    )


def algorithm_of(importance, mode, estimator, aggregation, **more) -> Algorithm:
    return Algorithm(
        clip_ratio_low=KEYS["low"],
        clip_ratio_high=KEYS["high"],
        importance={"level": importance, "mode": mode, "cap": KEYS["cap"], "floor": KEYS["floor"]},
        kl_coef=KEYS["kl_coef"],
        kl_estimator=estimator,
        loss_aggregation=aggregation,
        **more,
    )


def run(batch, algorithm: Algorithm):
    columns, logprobs_S = columns_of(batch), flat(batch["log"]).requires_grad_()
    mini = MiniBatch((), int(columns.mask_S.sum()), columns.num_samples)
    outputs = objective.StepOutputs(logprobs_S, torch.zeros_like(logprobs_S))
    loss, parts = objective.policy(algorithm, mini, KEYS["max_length"])(outputs, columns)
    loss.backward()
    return loss.item(), logprobs_S.grad.tolist(), objective.to_metrics([parts])


@pytest.mark.parametrize("kind", list(GOLDEN["cases"][0]["answers"]))
@pytest.mark.parametrize("case", range(len(GOLDEN["cases"])))
def test_same_as_the_formulas(case, kind):
    batch, expected = GOLDEN["cases"][case]["batch"], GOLDEN["cases"][case]["answers"][kind]
    loss, gradient, _ = run(batch, algorithm_of(*kind.split("/")))
    assert loss == pytest.approx(expected["loss"], abs=1e-9)
    assert gradient == pytest.approx(expected["gradient"], abs=1e-9)


def test_the_golden_numbers_tell_the_kinds_apart():
    for case in GOLDEN["cases"]:
        kinds = [str(answer) for kind, answer in case["answers"].items() if not kind.startswith("none/mask")]
        assert len(set(kinds)) == len(kinds)


def test_masked_weights_count_as_capped_or_floored():
    batch = {
        **{name: [[-1.0, -1.0, -1.0, -1.0]] for name in ("log", "old", "ref")},
        "rollout": [[-1.0, -2.0, 0.0, -9.0]],  # ratios 1, e, 1/e and one that is no action
        **{"mask": [[1.0, 1.0, 1.0, 0.0]], "advantages": [1.0]},
    }
    for mode, total in {"mask": 1.0, "truncate": 1.0 + KEYS["cap"] + KEYS["floor"]}.items():
        _, _, parts = run(batch, algorithm_of("token", mode, "k3", "token_mean"))
        found = [parts[f"rollout/importance_{name}"] for name in ("mean", "capped_frac", "floored_frac")]
        assert [metric.total for metric in found] == [pytest.approx(total), 1.0, 1.0]
        assert {metric.weight for metric in found} == {3.0}


def test_kl_in_the_reward_is_logged_and_no_part_of_the_loss():
    batch = GOLDEN["cases"][0]["batch"]
    in_loss = run(batch, algorithm_of("none", "truncate", "k2", "token_mean"))
    in_reward = run(batch, algorithm_of("none", "truncate", "k2", "token_mean", kl_in="reward"))
    d, mask_S = flat(batch["old"]) - flat(batch["ref"]), flat(batch["mask"])  # of the policy before the update
    assert in_reward[2]["actor/kl"].total == pytest.approx(float((d**2 / 2 * mask_S).sum()), abs=1e-9)
    assert in_reward[2]["actor/kl"] != in_loss[2]["actor/kl"]
    name = "actor/pg_loss"
    assert in_reward[0] == in_reward[2][name].value == in_loss[2][name].value != in_loss[0]


def test_metrics_of_parts_add_up():
    """The batch in one micro-batch, and sample by sample on two ranks: the same metrics, each with its own reducer."""
    batch = GOLDEN["cases"][0]["batch"]
    algorithm = algorithm_of("token", "truncate", "k3", "sequence_mean")
    columns = columns_of(batch)
    whole_batch = MiniBatch((), int(columns.mask_S.sum()), columns.num_samples)
    run_objective = objective.policy(algorithm, whole_batch, KEYS["max_length"])

    def parts_of(rows):
        some = {name: [batch[name][i] for i in rows] for name in batch}
        logprobs_S = flat(some["log"])
        return run_objective(objective.StepOutputs(logprobs_S, -logprobs_S), columns_of(some))[1]

    samples = range(columns.num_samples)
    whole = objective.to_metrics([parts_of(samples)])
    ranks = [objective.to_metrics([parts_of([i]) for i in samples if i % 2 == rank]) for rank in range(2)]
    found = add_metrics(*ranks)
    assert found.keys() == whole.keys() and {m.reducer for m in whole.values()} == {"mean", "max"}
    for name, metric in whole.items():
        assert found[name].value == pytest.approx(metric.value, abs=1e-9), name
        assert metric.value != 0 or name.endswith("frac"), name


MINI = MiniBatch((), 17, 4)
OBJECTIVES = {
    **{
        f"{loss}/{importance}/{estimator}/{aggregation}": objective.policy(
            Algorithm(
                policy_loss=loss,
                importance={"level": importance},
                kl_estimator=estimator,
                loss_aggregation=aggregation,
                kl_coef=0.1,
                kl_in="reward" if estimator == "k1" else "loss",
                entropy_coef=0.01,
                early_stop_kl=1.0,
            ),
            MINI,
            8,
        )
        for loss, importance, estimator, aggregation in [
            ("ppo", "token", "k3", "token_mean"),
            ("gspo", "sequence", "k3+", "sequence_mean"),
            ("cispo", "geometric", "k2", "fixed_length"),
            ("sapo", "none", "k1", "token_mean"),
            ("reinforce", "token", "k1+", "token_mean"),
        ]
    },
    "own": objective.policy(
        Algorithm(),
        MINI,
        8,
        lambda steps, _: (-steps.advantages_S * steps.logprobs_S / steps.mask_S, {"x": 1 / steps.mask_S}),
    ),
    "gaussian": objective.policy(Algorithm(kl_coef=0.1), MINI, 8),
    "warm_start": objective.demonstrations(MINI, "warm_start"),
    "value": objective.value(MINI, 0.2),
    "demonstrations": objective.demonstrations(MINI),
    "dpo": preference.preference("dpo", Preference(sft_coef=0.1), MINI),
    "orpo": preference.preference("orpo", Preference(), MINI),
    "kto": preference.kto(Preference(), MINI, 0.3),
}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_is_at_masked_steps_does_not_matter(name, bad):
    """Tokens of a tool may have no logprob. Loss, gradient and metrics are those with zeros there, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    mask_S = (torch.rand(24, generator=generator) > 0.3).float()
    names = ("rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "values", "returns")
    values = {f"{each}_S": -torch.rand(24, generator=generator) for each in names}
    outputs = [-torch.rand(24, generator=generator) for _ in range(1 if name == "value" else 2)]
    if name == "gaussian":
        outputs.append(torch.rand(24, 5, generator=generator))
        values["ref_location_SD"] = torch.rand(24, 5, generator=generator)

    def with_holes(values_S, hole):
        filled = values_S.clone()
        filled[mask_S == 0] = hole
        return filled

    def computed(hole):
        filled = {key: with_holes(each, hole) for key, each in values.items()}
        columns = StepColumns(
            mask_S=mask_S,
            sample_S=torch.arange(24) // 6,
            num_samples=4,
            rewards_B=torch.tensor([1.0, 0.0, 0.0, 1.0]),
            **filled,
        )
        leaves = [with_holes(each, hole).requires_grad_() for each in outputs]
        loss, parts = OBJECTIVES[name](leaves, columns)
        loss.backward()
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        assert not any(gradient[mask_S == 0].any() for gradient in gradients)  # NaN would count, too
        return loss.item(), [g.flatten().tolist() for g in gradients], objective.to_metrics([parts])

    expected = computed(0.0)
    assert computed(bad) == expected and torch.tensor(expected[0]).isfinite() and any(map(any, expected[1]))
    assert name != "gaussian" or any(expected[1][2])  # the KL is that of the locations


def test_metrics_by_hand():
    parts = Metric(3.0, 2.0), Metric(1.0, 2.0), Metric(9.0, 1.0, "max"), Metric(4.0, 1.0, "max")
    assert (parts[0] + parts[1]).value == 1.0 and (parts[2] + parts[3]).value == 9.0
    assert Metric(0.0, 0.0).value == 0.0  # only padding
    assert objective.to_metrics([]) == {}
