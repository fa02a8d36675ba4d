"""Held-out metrics: pass@k against brute force, several sets, names, and which metric keeps a checkpoint."""

from __future__ import annotations

import dataclasses
import itertools
import json
from fractions import Fraction

import numpy as np
import pytest

from gcore.config.data import Dataset
from gcore.config.load import dump_config, parse_yaml, validate
from gcore.config.run import Evaluation
from gcore.config.tree import Config
from gcore.controller.evaluation import _set_row, pass_at_k, rows_of, sums_of
from gcore.types import UserError
from tests.e2e.helpers import RECIPE
from tests.unit.rollouts import scored

TASK = {"task": "arithmetic", "args": {"min": 0, "max": 9, "split": "eval", "eval_size": 20}}


def test_pass_at_k_is_the_mean_over_all_choices():
    for passed in itertools.product([0, 1], repeat=6):
        for k in range(1, 7):
            chosen = [any(choice) for choice in itertools.combinations(passed, k)]
            assert pass_at_k(6, sum(passed), k) == Fraction(sum(chosen), len(chosen))
    assert pass_at_k(10, 3, 1) == Fraction(3, 10)


def groups_of(values: list[list[float]]):
    return [
        [dataclasses.replace(scored(i, j, 2 * v), parts={"exact": v}) for j, v in enumerate(group)]
        for i, group in enumerate(values)
    ]


def test_sums_do_not_depend_on_how_prompts_are_divided():
    evaluation = Evaluation(samples=4, success=0.5)
    assert evaluation.ks == [1, 2, 4]
    groups = groups_of([[0, 1, 0, 0], [0.5, 0.5, 1, 0], [0, 0, 0, 0], [1, 0]])  # of the last prompt, two failed
    alone = _set_row([(sums_of(groups, "exact", evaluation), 2)], evaluation)
    split = _set_row([(sums_of(groups[i::3], "exact", evaluation), i) for i in range(3)], evaluation)
    assert {**split, "failed": 2} == alone
    assert alone["pass@1"] == pytest.approx((1 / 4 + 3 / 4 + 0 + 1 / 2) / 4)
    assert alone["pass@4"] == pytest.approx(2 / 3)  # the prompt with two responses has no pass@4
    assert alone["mean@4"] == pytest.approx((1 / 4 + 2 / 4 + 0 + 1 / 2) / 4)
    assert alone["accuracy"] == pytest.approx(4 / 14) and alone["reward_mean"] == pytest.approx(8 / 14)
    assert (alone["prompts"], alone["failed"]) == (4, 2)


def test_greedy_evaluations_have_no_pass_at_k():
    evaluation = Evaluation()
    row = _set_row([(sums_of(groups_of([[1], [0]]), "exact", evaluation), 0)], evaluation)
    assert row["accuracy"] == 0.5 and not any("@" in name for name in row)
    assert _set_row([(sums_of([], "exact", evaluation), 3)], evaluation)["accuracy"] is None


def test_names_of_one_set_and_of_several():
    one = {"accuracy": 0.5, "prompts": 2, "failed": 0}
    other = {"accuracy": 1.0, "prompts": 6, "failed": 1}
    assert rows_of({"": one}) == {"eval/accuracy": 0.5, "eval/prompts": 2, "eval/failed": 0}
    row = rows_of({"a": one, "b": other})
    assert row["eval/accuracy"] == 0.75 and row["eval/prompts"] == 8 and row["eval/failed"] == 1
    assert row["eval/b/accuracy"] == 1.0 and row["eval/a/prompts"] == 2


def config_of(**data) -> Config:
    tree = {**RECIPE, **{k: v for k, v in data.items() if k != "eval"}}
    if "eval" in data:
        tree["data"] = {**RECIPE["data"], "eval": data["eval"]}
    return validate(tree, "recipe", Config)


def test_data_eval_is_one_dataset_or_several_with_names():
    assert list(config_of().data.eval_sets) == [""]
    named = config_of(eval={"sums": TASK, "more": TASK})
    assert list(named.data.eval_sets) == ["sums", "more"] and isinstance(named.data.eval_sets["sums"], Dataset)
    again = validate(parse_yaml(dump_config(named)), "dumped", Config)
    assert again == named  # the configuration of a run can be read again
    assert config_of(eval=None).data.eval_sets == {}
    with pytest.raises(UserError, match=r"data\.eval\.tsk: unknown key; did you mean data\.eval\.task"):
        config_of(eval={"tsk": "arithmetic"})
    with pytest.raises(UserError, match=r"data\.eval\.sums\.tsk: unknown key"):
        config_of(eval={"sums": {"tsk": "arithmetic"}, "more": TASK})
    with pytest.raises(UserError, match="got the name 'accuracy' of an evaluation set"):
        config_of(eval={"accuracy": TASK})


def test_the_metric_of_the_best_checkpoint_is_checked():
    sets, evaluation = {"a": TASK, "b": TASK}, {"samples": 4}
    keep = {"keep_best": 1, "best_metric": "eval/b/pass@4"}
    assert config_of(eval=sets, evaluation=evaluation, checkpoint=keep).checkpoint.best_metric == "eval/b/pass@4"
    with pytest.raises(UserError, match=r"checkpoint\.best_metric: got 'eval/b/pass@4'; expected one of"):
        config_of(eval=sets, checkpoint=keep)
    with pytest.raises(UserError, match=r"k=\[8\] exceeds samples=4"):
        config_of(evaluation={"samples": 4, "k": [8, 2]})


def test_metrics_are_json():
    row = rows_of({"": {"accuracy": float(np.float32(0.5)), "prompts": 2, "failed": 0}})
    assert json.loads(json.dumps(row)) == row
