"""Prompts by pass rate: the order, the running rates, the state of a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from gcore.config import sampling as config
from gcore.config.tree import Config
from gcore.prompts.curriculum import CurriculumOrder, make_curriculum
from gcore.types import UserError
from tests.unit.test_training import config_of

KEPT = np.array([2, 3, 5, 7, 11])


def curriculum(**keys) -> CurriculumOrder:
    return CurriculumOrder(config.Curriculum(**keys), KEPT, seed=3)


def test_running_rates_by_hand():
    """The first group counts in full, later ones half, in the order of the prompts."""
    found = curriculum()
    found.update([(9, 5, 1.0), (4, 5, 0.5), (6, 11, 0.0)])
    assert found.state() == {"rows": [5, 11], "drawn": [2, 1], "failed": [0, 0], "rates": [0.75, 0.0]}
    assert found.weights().tolist() == [1.0, 1.0, 4 * 0.75 * 0.25, 1.0, 0.1]
    assert found.metrics() == {
        "curriculum/pass_rate": 0.375,
        "curriculum/solved_frac": 0.0,
        "curriculum/unsolved_frac": 0.5,
        "curriculum/seen_frac": 0.4,
    }
    assert curriculum().metrics() == {}
    assert [curriculum(pass_reward=1.0).passed(rewards) for rewards in ([1, 0.9, 0], [1, 1], [0.0])] == [1 / 3, 1, 0]


def test_easy_first_by_hand():
    found = curriculum(order="easy_first")
    found.update([(0, 2, 0.2), (1, 3, 0.9), (2, 5, 0.0)])
    assert set(found.order(3)[:2].tolist()) == {7, 11}  # not drawn in this pass
    assert found.order(3)[2:].tolist() == [3, 2, 5]  # the next pass: from the highest rate to the lowest
    found.update([(3, 7, 0.1), (4, 11, 0.95)])
    assert found.order(5).tolist() == [11, 3, 2, 7, 5]


def test_easy_first_draws_a_prompt_that_fails_once_per_pass():
    """Not in every step: it has no groups."""
    found = curriculum(order="easy_first")
    found.update([(0, 2, 0.2), (1, 3, None), (2, 5, 0.0)])
    assert set(found.order(3)[:2].tolist()) == {7, 11} and found.order(3)[2:].tolist() == [3, 2, 5]
    restored = curriculum(order="easy_first")
    restored.restore(found.state())
    assert restored.order(3).tolist() == found.order(3).tolist()
    assert found.metrics()["curriculum/seen_frac"] == 0.4  # of the rows with a pass rate
    found.update([(3, 3, 0.8)])
    assert found.state()["rates"] == [0.2, 0.8, 0.0]  # its first group counts in full


def test_near_half_draws_by_weight_without_replacement():
    """The first prompt of a step has each row with a probability proportional to its weight."""
    found = curriculum()
    found.update([(0, 2, 0.5), (1, 3, 0.9), (2, 5, 0.0), (3, 7, 1.0), (4, 11, 0.25)])
    weights = np.array([1.0, 0.36, 0.1, 0.1, 0.75])
    assert found.weights() == pytest.approx(weights)
    orders = np.array([found.order(first) for first in range(4000)])
    assert all(sorted(order) == KEPT.tolist() for order in orders)
    shares = np.array([(orders[:, 0] == row).mean() for row in KEPT])
    assert np.abs(shares - weights / weights.sum()).max() < 0.02
    # the second one, given the first: proportional to the weights of the others
    after = orders[orders[:, 0] == 2][:, 1]
    assert np.abs(np.array([(after == row).mean() for row in KEPT[1:]]) - weights[1:] / weights[1:].sum()).max() < 0.04


def test_the_order_depends_on_seed_number_and_rates_only():
    one, other = curriculum(), curriculum()
    groups = [(4, 5, 0.5), (6, 11, 0.0), (9, 5, 1.0)]
    one.update(groups)
    other.update(reversed(groups))  # parts of controllers arrive in any order
    assert one.state() == other.state()
    restored = curriculum()
    restored.restore(one.state())
    assert all(np.array_equal(one.order(n), restored.order(n)) for n in range(5))
    assert not all(np.array_equal(one.order(n), curriculum().order(n)) for n in range(5))
    assert len({tuple(one.order(n)) for n in range(20)}) > 10
    reseeded = CurriculumOrder(config.Curriculum(), KEPT, seed=4)
    reseeded.restore(one.state())
    assert not all(np.array_equal(one.order(n), reseeded.order(n)) for n in range(5))


def test_a_column_of_the_dataset():
    rows = [{"prompt": "?", "rate": rate} for rate in (0.75, None, 1.0)] + [{"prompt": "?"}]
    kept = np.array([0, 1, 3])
    spec = config.Curriculum(order="easy_first", column="rate")
    found = make_curriculum(spec, rows, kept, seed=0)
    assert found is not None and found.order(0)[0] == 0
    assert make_curriculum(None, rows, kept, seed=0) is None
    with pytest.raises(UserError, match=r"sampling.curriculum.column=rate: row 1 of data.train has 1.5; expected a"):
        make_curriculum(spec, [{"rate": 1}, {"rate": 1.5}], np.arange(2), seed=0)
    with pytest.raises(UserError, match=r"column=rate: no row of data.train has it; expected one of \['level'\]"):
        make_curriculum(spec, [{"level": 1}], np.arange(1), seed=0)


@pytest.mark.parametrize("sampling", [{"max_staleness": 1}, {"deterministic": False, "filter": "spread"}])
def test_runs_that_depend_on_timing_are_refused(sampling):
    with pytest.raises(ValueError, match=r"sampling.curriculum needs steps that do not depend on timing"):
        config_of(sampling={**sampling, "curriculum": {}})


def test_answers_of_the_dataset_have_no_pass_rate():
    tree = config_of(sampling={"curriculum": {}}).model_dump() | {"objective": "sft"}
    with pytest.raises(ValueError, match=r"sampling.curriculum needs rewards of the policy's own samples"):
        Config.model_validate(tree)
