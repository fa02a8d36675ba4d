"""The whole objective: importance weights, policy loss, KL and denominators together, value and gradient.

Expected numbers: tests/parity/make_formula_golden.py, which works them out token by token in plain Python.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gcore.config.tree import Algorithm
from gcore.training import objective
from gcore.training.micro import Packed
from gcore.types import KlSums, MiniBatch

GOLDEN = json.loads((Path(__file__).parents[1] / "parity" / "formula_golden.json").read_text())
KEYS = GOLDEN["keys"]


def flat(rows) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def packed_of(batch) -> Packed:
    lengths = [len(row) for row in batch["log"]]
    nothing = torch.zeros(1)
    return Packed(
        *(nothing, nothing, None, nothing, nothing),
        loss_mask_S=flat(batch["mask"]),
        advantages_S=flat([[a] * n for a, n in zip(batch["advantages"], lengths, strict=True)]),
        rollout_logprobs_S=flat(batch["rollout"]),
        temperature_S=nothing,
        sample_S=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        keys=tuple((0, i) for i in range(len(lengths))),
    )


def algorithm_of(importance, mode, estimator, aggregation, **more) -> Algorithm:
    return Algorithm(
        clip_ratio_low=KEYS["low"],
        clip_ratio_high=KEYS["high"],
        importance=importance,
        importance_mode=mode,
        importance_cap=KEYS["cap"],
        importance_floor=KEYS["floor"],
        kl_coef=KEYS["kl_coef"],
        kl_estimator=estimator,
        loss_aggregation=aggregation,
        **more,
    )


def run(batch, algorithm: Algorithm):
    packed, logprobs_S = packed_of(batch), flat(batch["log"]).requires_grad_()
    mini = MiniBatch((), int(packed.loss_mask_S.sum()), len(packed.keys))
    old_S, ref_S, entropy_S = flat(batch["old"]), flat(batch["ref"]), torch.zeros_like(logprobs_S)
    loss, parts = objective.policy(algorithm, packed, mini, logprobs_S, entropy_S, old_S, ref_S, KEYS["max_length"])
    loss.backward()
    return loss.item(), logprobs_S.grad.tolist(), {name: float(value.detach()) for name, value in parts.items()}


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
        found = parts["importance"], parts["importance_capped"], parts["importance_floored"], parts["actions"]
        assert found == (pytest.approx(total), 1.0, 1.0, 3.0)


def test_kl_in_the_reward_is_logged_and_no_part_of_the_loss():
    batch = GOLDEN["cases"][0]["batch"]
    in_loss = run(batch, algorithm_of("none", "truncate", "k2", "token_mean"))
    in_reward = run(batch, algorithm_of("none", "truncate", "k2", "token_mean", kl_in="reward"))
    d, mask_S = flat(batch["old"]) - flat(batch["ref"]), flat(batch["mask"])  # of the policy before the update
    assert in_reward[2]["kl"] == pytest.approx(float((d**2 / 2 * mask_S).sum()), abs=1e-9)
    assert in_reward[2]["kl"] != in_loss[2]["kl"]
    assert in_reward[0] == in_reward[2]["pg_loss"] == in_loss[2]["pg_loss"] != in_loss[0]


def test_kl_to_come_by_hand():
    mask = np.array([True, False, True, True])
    to_come, sums = objective.kl_to_go(np.array([0.5, 9.0, 0.25, -1.0], np.float32), mask)
    assert to_come.tolist() == [-0.25, -0.75, -0.75, -1.0]
    assert sums == KlSums(total=-0.25, to_come=-2.0, to_come_squares=0.0625 + 0.5625 + 1.0)
    assert objective.kl_to_go(np.ones(2, np.float32), np.zeros(2, bool))[1] == KlSums(0.0, 0.0, 0.0)
