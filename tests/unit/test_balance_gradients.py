"""The layout decides who computes what, and nothing else: loss and gradients are the same under all layouts."""

import asyncio
import dataclasses

import pytest
import torch

from bench import layouts
from gcore.cost.workload import CostModel
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import meta_of
from gcore.protocols import add_metrics
from tests.unit.test_training import config_of, gradients_of, samples_of, trainer_of

pytestmark = pytest.mark.usefixtures("one_rank")
LAYOUTS = {
    "one rank": {"num_ranks": 1, "max_tokens": 10_000},
    "naive": {"method": layouts.naive},
    "sort": {"method": layouts.sort},
    "karmarkar_karp": {"method": layouts.karmarkar_karp},
    "ours": {},
    "ours, sharded": {"sharded": True},
    "ours, one row": {"sharded": True, "padded": False},
}
ALGORITHMS = [{"loss_aggregation": "token_mean"}, {"policy_loss": "gspo", "loss_aggregation": "sequence_mean"}]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["ppo", "gspo"])
def test_loss_and_gradients_do_not_depend_on_the_layout(algorithm):
    """The ranks are played one after another; their gradients and metrics are added as the collectives do."""
    config, samples = config_of(algorithm=algorithm), samples_of(3, prompts=6, siblings=4)
    metas, trainer, results = [meta_of(s) for s in samples], trainer_of(config), {}
    asyncio.run(trainer.end_warm_start())
    for name, changes in LAYOUTS.items():
        request = {"num_ranks": 4, "max_tokens": 40, **changes}
        batches = make_layout(metas, step=1, mini_batches=1, cost=CostModel(100.0), **request)
        assert sorted(key for batch in batches for key in batch.keys) == sorted(s.key for s in samples)
        sums, metrics = {}, {}
        for batch in batches:
            own = [s for s in samples if s.key in batch.keys]
            batch = dataclasses.replace(batch, advantages={s.key: s.reward for s in own})
            gradients, stats = gradients_of(trainer, own, batch)
            sums = {key: sums.get(key, 0) + value for key, value in gradients.items()}
            metrics = add_metrics(metrics, stats.metrics)
        results[name] = sums, metrics["actor/loss"].value
    expected, loss = results.pop("one rank")
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
    for name, (gradients, found) in results.items():
        assert found == pytest.approx(loss, abs=1e-6), name
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[key], rtol=0, atol=1e-6, msg=f"{name}: {key}")
