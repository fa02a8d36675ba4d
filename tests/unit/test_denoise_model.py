"""The trainer's side of diffusion: logprobs of the engine again, gradients, KL, packing, demonstrations."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gcore.config.algorithm import Algorithm
from gcore.content.latents import Latents
from gcore.cost.workload import CostModel
from gcore.diffusion.samplers import rows
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import meta_of
from gcore.prompts.conditions import ConditionTemplater
from gcore.training import objective
from gcore.training.context import RowGroup
from gcore.training.denoise_model import DenoiseModel
from gcore.training.objective import StepData, step_columns
from gcore.types import MicroBatch, MiniBatch, Sample, UserError
from tests.unit.denoisers import config_of, engine_of, generate, network_of, request_of, samples_of

ALONE = RowGroup(None, (0,), 0)
CPU = torch.device("cpu")


def trained(config, tmp_path, number=6):
    """Samples of an engine, and the model of a trainer with the same weights."""
    engine = engine_of(config, tmp_path)
    requests = [request_of(config, str(i % 10), 50 + i) for i in range(number)]
    samples = samples_of(config, requests, generate(engine, requests))
    engine.close()
    return {sample.key: sample for sample in samples}, model_of(config)


def model_of(config, seed=0, **options) -> DenoiseModel:
    return DenoiseModel(network_of(config, seed), spec=config.generation.denoising, **options)


def micro_of(samples) -> MicroBatch:
    return MicroBatch((tuple(samples),), 8)


@pytest.mark.parametrize(
    "denoising",
    [
        {},
        {"sampler": "dance"},
        {"sampler": "ddim"},
        {"guidance_scale": 2.5},
        {"logprob": "sum"},
        {"steps": 6, "window": {"size": 2, "order": "random"}},
    ],
)
def test_logprobs_are_those_of_the_engine(tmp_path, denoising):
    config = config_of(denoising=denoising)
    samples, model = trained(config, tmp_path)
    packed = model.pack(micro_of(samples), samples, ALONE)
    assert len(packed.latents_P) == sum(int(s.mask_S.sum()) for s in samples.values()) < len(packed.sample_S)
    with torch.no_grad():
        logprobs_S, entropy_S, _ = model(packed)
    for i, key in enumerate(packed.keys):
        found, sample = logprobs_S[packed.sample_S == i].numpy(), samples[key]
        assert np.allclose(found, sample.rollout_logprobs_S, atol=1e-5, rtol=1e-5)
        assert (found[~sample.mask_S] == 0).all() and (
            entropy_S[packed.sample_S == i].numpy()[~sample.mask_S] == 0
        ).all()


def test_packing_changes_nothing(tmp_path):
    config = config_of()
    samples, model = trained(config, tmp_path)
    together = model.pack(micro_of(samples), samples, ALONE)
    with torch.no_grad():
        whole = model(together)[0]
        for i, key in enumerate(together.keys):
            alone = model(model.pack(micro_of([key]), samples, ALONE))[0]
            assert torch.allclose(alone, whole[together.sample_S == i], atol=1e-6)


def loss_of(model, samples, algorithm, advantages, columns=None):
    data = StepData(dict(samples), {"advantages": advantages, **(columns or {})})
    packed = model.pack(micro_of(samples), samples, ALONE)
    mini = MiniBatch((), sum(int(s.mask_S.sum()) for s in samples.values()), len(samples))
    outputs = objective.StepOutputs(*packed.joined(*model(packed)))
    return objective.policy(algorithm, mini, 4)(outputs, step_columns(packed, data, CPU))


def pass_of(model, samples, field):
    packed = model.pack(micro_of(samples), samples, ALONE)
    with torch.no_grad():
        values = getattr(objective.StepOutputs(*model(packed)), field)
    return {key: values[packed.sample_S == i] for i, key in enumerate(packed.keys)}


def test_the_gradient_is_that_of_a_finite_difference(tmp_path):
    config = config_of()
    samples, model = trained(config, tmp_path, number=3)
    model.double()
    algorithm = Algorithm(kl_coef=0.1, kl_estimator="exact", importance={"level": "none"})
    advantages = {key: torch.full((4,), a) for key, a in zip(samples, (1.0, -0.5, 0.3), strict=True)}
    old = pass_of(model_of(config, 0), samples, "logprobs_S")  # fixed, else the value of the loss is constant
    reference = pass_of(model_of(config, 4), samples, "location_SD")
    columns = {"old_logprobs": old, "ref_location": reference}
    loss, _ = loss_of(model, samples, algorithm, advantages, columns)
    loss.backward()
    for name in ("transformer.head.weight", "transformer.layers.0.qkv.weight", "transformer.classes.weight"):
        parameter = model.network.get_parameter(name)
        at = int(parameter.grad.abs().argmax())
        values = []
        for move in (1e-3, -1e-3):
            with torch.no_grad():
                parameter.view(-1)[at] += move
                values.append(float(loss_of(model, samples, algorithm, advantages, columns)[0]))
                parameter.view(-1)[at] -= move
        numeric = (values[0] - values[1]) / 2e-3
        assert numeric == pytest.approx(float(parameter.grad.view(-1)[at]), rel=2e-2), name


@pytest.mark.parametrize("estimator", ["exact", "velocity"])
def test_kl_is_that_of_the_gaussians_or_of_the_velocities(tmp_path, estimator):
    config = config_of()
    samples, _ = trained(config, tmp_path)
    models = [model_of(config, seed, velocity=estimator == "velocity") for seed in (0, 4)]
    reference = pass_of(models[1], samples, "location_SD")
    advantages = {key: torch.zeros(4) for key in samples}
    algorithm = Algorithm(kl_coef=0.5, kl_estimator=estimator)
    loss, metrics = loss_of(models[0], samples, algorithm, advantages, {"ref_location": reference})
    packed = models[0].pack(micro_of(samples), samples, ALONE)
    latents, times, steps, condition = packed.latents_P, packed.times_P, packed.steps_P, packed.condition
    every = torch.ones(len(steps), dtype=torch.bool)
    with torch.no_grad():
        predictions = [model.network(latents, times, condition, 1.0) for model in models]
    ours, theirs = (models[0].schedule.step(latents, p, steps, every) for p in predictions)
    of_ours, of_theirs = (torch.distributions.Normal(way.mean, rows(way.std_B, way.mean)) for way in (ours, theirs))
    expected = torch.distributions.kl_divergence(of_ours, of_theirs).flatten(1).mean(1)
    if estimator == "velocity":
        expected = (predictions[0] - predictions[1]).square().flatten(1).mean(1) / 2
    kl = metrics["actor/kl"]
    assert float(kl.total / kl.weight) == pytest.approx(float(expected.mean()), rel=1e-4)
    assert float(loss) == pytest.approx(0.5 * float(expected.mean()), rel=1e-4)
    same, _ = loss_of(models[1], samples, algorithm, advantages, {"ref_location": reference})
    assert float(same) == pytest.approx(0, abs=1e-10)


def test_a_demonstration_is_a_regression_that_is_learned():
    config = config_of()
    model = model_of(config)
    random = np.random.default_rng(0)
    prompt = Latents("3", 4, (0, 3))
    samples = {}
    for i in range(8):
        picture = random.integers(0, 256, (4, 4, 1)).astype(np.uint8)
        content = prompt.extended(Latents("", 4, (0, 0), demonstration=picture))
        ones = np.ones(content.num_steps, np.float32)
        samples[(i, 0)] = Sample(i, 0, content, ones > 0, 0 * ones)
    packed = model.pack(micro_of(samples), samples, ALONE)
    assert packed.is_demonstration and torch.equal(
        packed.latents_P, model.pack(micro_of(samples), samples, ALONE).latents_P
    )
    mini = MiniBatch((), len(packed.sample_S), len(samples))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(60):
        outputs = objective.StepOutputs(*model(packed))
        loss, _ = objective.demonstrations(mini)(outputs, step_columns(packed, StepData(samples, {}), CPU))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    prediction = model.network(packed.latents_P, packed.times_P, packed.condition, 1.0)
    assert losses[-1] < 0.5 * losses[0]
    assert float((prediction - packed.targets_P).square().mean()) < 0.5 * losses[0]


def test_a_rank_without_samples_joins_with_one_step():
    config = config_of(denoising={"guidance_scale": 2.0})
    model = model_of(config)
    packed = model.pack(MicroBatch((), 8), {}, ALONE)
    columns = step_columns(packed, StepData(), CPU)
    outputs = objective.StepOutputs(*model(packed))
    loss, _ = objective.policy(Algorithm(kl_coef=0.0), MiniBatch((), 5, 2), 4)(outputs, columns)
    loss.backward()
    assert packed.is_padding and float(loss) == 0
    assert all(float(p.grad.abs().max()) == 0 for p in model.parameters() if p.grad is not None)


def test_the_layout_counts_passes(tmp_path):
    """A micro-batch holds as many tokens as the budget, over all denoising steps that are trained."""
    config = config_of()
    samples, _ = trained(config, tmp_path, number=8)
    found = [meta_of(sample) for sample in samples.values()]
    metas = [dataclasses.replace(m, work=dataclasses.replace(m.work, length=100)) for m in found]
    assert {meta.work.passes for meta in metas} == {3} and {meta.actions for meta in metas} == {3}
    cost = CostModel(crossover=768.0, causal=False)
    (batch,) = make_layout(metas, step=1, num_ranks=1, mini_batches=1, max_tokens=700, cost=cost, padded=False)
    sizes = [sum(map(len, micro.rows)) for micro in batch.mini_batches[0].micro_batches]
    assert sizes == [2, 2, 2, 2]  # 600 of 700 tokens
    assert cost.of_sample(metas[0]) == 3 * (100 + 2 * 100 * 100 / 768)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([[0.0, 0.5], [1.0, 0.25]], "numbers from 0 to 1; expected whole numbers from 0 to 255"),
        ([[0, 300]], "numbers from 0 to 300; expected"),
        ([[0, 1], [2]], "no picture"),
        ("x.png", "'x.png'; expected whole numbers"),
    ],
)
def test_a_demonstration_that_is_no_picture_is_refused(given, words):
    """As whole numbers, pixels from 0 to 1 would be black pictures."""
    templater = ConditionTemplater(config_of())
    assert templater.demonstration({"demonstration": [[0, 255.0]]}).demonstration.tolist() == [[[0], [255]]]
    with pytest.raises(UserError, match=words):
        templater.demonstration({"demonstration": given})
