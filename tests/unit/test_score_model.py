"""Reward models on a trainer rank: scores, the Bradley-Terry loss, its gradient; an evaluation changes nothing."""

import asyncio
import math
from functools import partial

import numpy as np
import pytest
import torch

from gcore.config.preference import Preference
from gcore.config.tree import Config
from gcore.content.tokens import Tokens
from gcore.cost.workload import CostModel
from gcore.models.networks import load_scorer, score_texts
from gcore.observe.trace import Tracer
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import metas_of
from gcore.preparation.step_times import shared_tokens
from gcore.prompts.tokenizer import load_tokenizer
from gcore.protocols import add_metrics
from gcore.training.backend import NewNetwork
from gcore.training.fsdp import FsdpBackend
from gcore.training.logprob_model import ScoreModel
from gcore.training.preference import Pairs, bradley_terry
from gcore.training.rank import TrainerRank
from gcore.types import Sample
from tests.e2e.helpers import RECIPE
from tests.unit.test_training import CPU, gradients_of

pytestmark = pytest.mark.usefixtures("one_rank")


def text(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(4, 16, size=length).astype(np.int32)


PAIRS = [(text(n, 1), text(n + n % 3, 2)) for n in range(3, 19)]


def config_of() -> Config:
    tree = {
        "objective": "reward_model",
        "model": {"build": {**RECIPE["model"]["build"], "max_length": 128}},
        "data": {"train": {"path": "pairs.jsonl"}, "max_prompt_length": 12},
        "generation": {"max_response_length": 11},
        "training": {"lr": 1e-3},
    }
    return Config.model_validate(tree)


def samples_of_pairs(pairs):
    one, zero = np.ones(1, np.bool_), np.zeros(1, np.float32)
    return [
        Sample(i, sibling, Tokens.split(tokens, 1), one, zero, reward=1.0 - sibling)
        for i, pair in enumerate(pairs)
        for sibling, tokens in enumerate(pair)
    ]


def scorer_of(config: Config):
    tokenizer = load_tokenizer(config.model)
    return load_scorer(config.model, 3, torch.float32, CPU, tokenizer=tokenizer, new_head=True)


def trainer_of(config: Config) -> TrainerRank:
    policy = NewNetwork(lambda: scorer_of(config), ScoreModel)
    backend = partial(FsdpBackend, config, {"policy": policy}, CPU, torch.float32)
    return TrainerRank(config, backend, rank=0, threads=1, tracer=Tracer(None, "trainer-0"))


def lay_out(samples, num_ranks=1, max_tokens=10_000, **options):
    sizes = {"num_ranks": num_ranks, "max_tokens": max_tokens, "mini_batches": 1, "cost": CostModel(100.0), **options}
    return make_layout(metas_of(samples), step=1, together=True, objective="reward_model", **sizes)


def test_bradley_terry():
    difference = torch.tensor([0.0, math.log(3), -math.log(3), 100.0, -100.0], dtype=torch.float64)
    zero = torch.zeros_like(difference)
    found = bradley_terry(Pairs(difference, zero, zero, zero, zero, zero), Preference()).loss_P
    assert found.tolist() == pytest.approx([math.log(2), math.log(4 / 3), math.log(4), 0.0, 100.0], abs=1e-12)


def direct(network, pairs):
    """Differences of the scores, by the network as it is served: one row per text."""
    scores = [torch.cat([score_texts(network, [t], len(t)) for t in side]) for side in zip(*pairs, strict=True)]
    return scores[0] - scores[1]


@pytest.mark.parametrize(
    "layout",
    [{}, {"num_ranks": 4, "max_tokens": 60}, {"num_ranks": 4, "max_tokens": 130, "shares": True}],
    ids=["whole", "ranks", "shared conversations"],
)
def test_loss_gradient_and_metrics(layout):
    """Of packed rows on several ranks, played one after another: those of the served model with one text per row."""
    config, pairs = config_of(), PAIRS
    if "shares" in layout:  # the answers of a pair follow one conversation
        pairs = [tuple(np.concatenate([text(40 + a.size, 3), t]) for t in (a, b)) for a, b in PAIRS]
    network = scorer_of(config)
    differences = direct(network, pairs)
    expected = -torch.nn.functional.logsigmoid(differences).mean()
    expected.backward()
    samples, trainer, sums, metrics = samples_of_pairs(pairs), trainer_of(config), {}, {}
    asyncio.run(trainer.end_warm_start())
    batches = lay_out(samples, **layout)
    assert (shared_tokens(batches, metas_of(samples)) > 0.3) == ("shares" in layout)
    for batch in batches:
        own = [s for s in samples if s.key in batch.keys]
        gradients, stats = gradients_of(trainer, own, batch)
        sums = {key: sums.get(key, 0) + value for key, value in gradients.items()}
        metrics = add_metrics(metrics, stats.metrics)
    found = {name: metrics[f"preference/{name}"].value for name in ("loss", "accuracy", "margin")}
    accuracy = float((differences > 0).double().mean())
    wanted = {"loss": expected.item(), "accuracy": accuracy, "margin": differences.mean().item()}
    assert found == pytest.approx(wanted, abs=1e-5)
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(sums[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)
    assert float(sums["score.weight"].abs().max()) > 1e-3


def test_an_evaluation_changes_nothing_and_has_the_same_metrics():
    config = config_of()
    samples, trainer = samples_of_pairs(PAIRS), trainer_of(config)
    asyncio.run(trainer.end_warm_start())
    before = [p.detach().clone() for p in trainer.backend.networks["policy"].model.network.parameters()]
    (batch,) = lay_out(samples, max_tokens=60)

    async def evaluate():
        await trainer.push(0, samples)
        return await trainer.evaluate(batch)

    found = asyncio.run(evaluate())
    _, stats = gradients_of(trainer, samples, batch)
    assert found["preference/loss"].weight == len(PAIRS)
    for name, metric in found.items():
        assert metric.value == pytest.approx(stats.metrics[name].value, abs=1e-6), name
    after = list(trainer.backend.networks["policy"].model.network.parameters())
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, after, strict=True))
