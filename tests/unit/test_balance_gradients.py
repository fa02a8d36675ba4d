"""The layout decides who computes what, and nothing else: loss and gradients are the same under all layouts."""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from bench import layouts
from gcore.cost.workload import CostModel
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import metas_of
from gcore.preparation.step_times import shared_tokens
from gcore.protocols import add_metrics
from gcore.training.objective import POLICY_LOSSES
from tests.e2e.helpers import RECIPE
from tests.unit.test_prefixes import samples_of as trees_of
from tests.unit.test_training import config_of, gradients_of, off_policy, samples_of, trainer_of

pytestmark = pytest.mark.usefixtures("one_rank")
LAYOUTS = {
    "one rank": {"num_ranks": 1, "max_tokens": 10_000},
    "naive": {"method": layouts.naive},
    "sort": {"method": layouts.sort},
    "karmarkar_karp": {"method": layouts.karmarkar_karp},
    "ours": {},
    "ours, sharded": {"sharded": True},
    "ours, one row": {"sharded": True, "padded": False},
    "shared": {"shares": True},
    "shared, sharded": {"shares": True, "sharded": True, "num_ranks": 3},
    "shared, one row": {"shares": True, "sharded": True, "padded": False},
}
SHARED = {name: changes for name, changes in LAYOUTS.items() if "shares" in changes or name == "one rank"}
ALGORITHMS = [{"loss_aggregation": "token_mean"}, {"policy_loss": "gspo", "loss_aggregation": "sequence_mean"}]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["ppo", "gspo"])
def test_loss_and_gradients_do_not_depend_on_the_layout(algorithm):
    """The ranks are played one after another; their gradients and metrics are added as the collectives do."""
    config, samples = config_of(algorithm=algorithm), samples_of(3, prompts=6, siblings=4)
    check(trainer_of(config), samples, LAYOUTS, max_tokens=40)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_samples_that_share_a_tree(loss, aggregation):
    """Of three levels, cut into micro-batches of several ranks. Ratios are clipped."""
    settings = {"policy_loss": loss, "loss_aggregation": aggregation, "kl_coef": 0.1, "entropy_coef": 0.01}
    build = {**RECIPE["model"]["build"], "max_length": 256}
    config, rng = config_of(algorithm=settings, model={"build": build}), np.random.default_rng(1)
    samples = [dataclasses.replace(s, reward=float(rng.normal())) for s in trees_of(1)]
    trainer = trainer_of(config)
    check(trainer, samples, SHARED, max_tokens=max(s.content.size for s in samples) + 40, old=True)


def check(trainer, samples, layouts, max_tokens, old=False):
    metas, results, saved = metas_of(samples), {}, set()
    asyncio.run(trainer.end_warm_start())
    old_logprobs = off_policy(trainer, samples) if old else {}
    for name, changes in layouts.items():
        request = {"num_ranks": 4, "max_tokens": max_tokens, **changes}
        batches = make_layout(metas, step=1, mini_batches=1, cost=CostModel(100.0), **request)
        saved |= {name} if shared_tokens(batches, metas) > 0.1 else set()
        assert sorted(key for batch in batches for key in batch.keys) == sorted(s.key for s in samples)
        sums, metrics = {}, {}
        for batch in batches:
            own = [s for s in samples if s.key in batch.keys]
            batch = dataclasses.replace(batch, advantages={s.key: s.reward for s in own})
            if old:
                trainer._data.columns["old_logprobs"] = old_logprobs
            gradients, stats = gradients_of(trainer, own, batch)
            sums = {key: sums.get(key, 0) + value for key, value in gradients.items()}
            metrics = add_metrics(metrics, stats.metrics)
        results[name] = sums, metrics["actor/loss"].value
    assert saved == {name for name, changes in layouts.items() if "shares" in changes}
    expected, loss = results.pop("one rank")
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
    for name, (gradients, found) in results.items():
        assert found == pytest.approx(loss, abs=1e-6), name
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[key], rtol=0, atol=1e-6, msg=f"{name}: {key}")
