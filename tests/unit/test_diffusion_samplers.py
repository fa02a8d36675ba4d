"""Samplers of diffusion models: marginals on a flow that is known, formulas of the papers written a second time, noise
that is keyed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gcore.config.denoising import Denoising
from gcore.diffusion.noise import normals
from gcore.diffusion.samplers import noised, schedule_of
from gcore.generation.noise import uniforms

CPU = torch.device("cpu")


def spec_of(**keys) -> Denoising:
    return Denoising.model_validate(keys)


# ---- marginals ------------------------------------------------------------------------------------------------------

MEAN, STD = 1.5, 0.4


def toy_velocity(x: torch.Tensor, s: float) -> torch.Tensor:
    """The exact v = E[noise - x0 | x] of the flow from N(MEAN, STD^2) to noise: both are Gaussian."""
    variance = (1 - s) ** 2 * STD**2 + s**2
    centred = x - (1 - s) * MEAN
    return s * centred / variance - (MEAN + (1 - s) * STD**2 * centred / variance)


def run_toy(spec: Denoising, stochastic: bool, rows: int = 100_000) -> torch.Tensor:
    schedule, generator = schedule_of(spec), torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1, generator=generator)
    for step in range(spec.steps):
        steps = torch.full((rows,), step)
        v = toy_velocity(x, float(schedule.time[step]))
        found = schedule.step(x, v, steps, torch.full((rows,), stochastic))
        x = found.mean + found.std_B[:, None] * torch.randn(rows, 1, generator=generator)
    return x


@pytest.mark.parametrize(
    ("steps", "stochastic", "std"),
    [(10, True, 0.38), (40, True, 0.396), (400, True, 0.400), (10, False, 0.341), (40, False, 0.385)],
)
def test_flow_sde_keeps_the_marginals_of_the_flow(steps, stochastic, std):
    x = run_toy(spec_of(steps=steps, noise_level=0.7), stochastic)
    assert float(x.mean()) == pytest.approx(MEAN, abs=0.01)
    assert float(x.std()) == pytest.approx(std, abs=0.004)


def test_the_first_noise_of_flow_sde():
    """At s = 1, g takes s of the second step. The variance after it is nearer to that of the flow than with the first
    step of Flow-GRPO's public code, whose std is `level`."""
    schedule = schedule_of(spec_of(steps=10, noise_level=0.7))
    a, b, std = schedule.sde[0].tolist()
    assert std == pytest.approx(0.7 * math.sqrt(0.9), rel=1e-12) and b == pytest.approx(-0.1, rel=1e-12)
    assert a == pytest.approx(1 - 0.49 * 9 / 2 * 0.1, rel=1e-12)

    def variance(a: float, std: float) -> float:
        """After the step, of the flow above: v = x - MEAN, x has variance 1."""
        return (a + b) ** 2 + std**2

    flow = 0.1**2 * STD**2 + 0.9**2
    ours, public = variance(a, std), variance(1 - 0.49 * 10 / 2 * 0.1, 0.7)
    assert (flow, ours, public) == pytest.approx((0.8116, 0.90272025, 0.919025), rel=1e-12)
    g2 = 0.49 * 9  # for given clean latents the variance should be s^2; it has the error of the docstring
    assert ours - 0.9**2 == pytest.approx(0.1**2 * (g2 + g2**2 / 4), rel=1e-12)


def test_constant_noise_of_dance_keeps_the_marginals_too():
    x = run_toy(spec_of(sampler="dance", steps=400, noise_level=0.3), True)
    assert float(x.mean()) == pytest.approx(MEAN, abs=0.01)
    assert float(x.std()) == pytest.approx(STD, abs=0.006)


# ---- the papers' formulas, written a second time ---------------------------------------------------------------------


def flow_grpo(x, v, s_all, step, level):
    """Flow-GRPO, eq. 9, in the form with the time-dependent diffusion coefficient."""
    s, ds = s_all[step], s_all[step + 1] - s_all[step]
    inside = s_all[1] if s == 1 else s
    sigma_t = math.sqrt(inside / (1 - inside)) * level
    mean = x * (1 + sigma_t**2 / (2 * s) * ds) + v * (1 + sigma_t**2 * (1 - s) / (2 * s)) * ds
    return mean, sigma_t * math.sqrt(-ds)


def dance_grpo(x, v, s_all, step, level):
    """DanceGRPO: Euler step, minus eta^2 / 2 times the score that the predicted clean latents give."""
    s, following = s_all[step], s_all[step + 1]
    clean = x - s * v
    score = -(x - clean * (1 - s)) / s**2
    mean = x + (following - s) * v - 0.5 * level**2 * score * (following - s)
    return mean, level * math.sqrt(s - following)


def shifted(steps, shift):
    return [shift * (1 - i / steps) / (1 + (shift - 1) * (1 - i / steps)) for i in range(steps + 1)]


@pytest.mark.parametrize(("name", "formula"), [("flow_sde", flow_grpo), ("dance", dance_grpo)])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_formulas(name, formula, shift):
    spec = spec_of(sampler=name, steps=8, noise_level=0.6, shift=shift)
    schedule, s_all = schedule_of(spec), shifted(8, shift)
    generator = torch.Generator().manual_seed(1)
    for step in range(7):
        x, v, sampled = (torch.randn(3, 4, 5, generator=generator) for _ in range(3))
        mean, std = formula(x.double(), v.double(), s_all, step, 0.6)
        found = schedule.step(x, v, torch.full((3,), step), torch.ones(3, dtype=torch.bool))
        assert torch.allclose(found.mean.double(), mean, atol=1e-6, rtol=1e-6)
        assert found.std_B.tolist() == pytest.approx([std] * 3, rel=1e-6)
        exact = torch.distributions.Normal(mean, std).log_prob(sampled.double()).flatten(1)
        assert torch.allclose(found.logprob(sampled, "mean").double(), exact.mean(1), rtol=2e-6)
        assert torch.allclose(found.logprob(sampled, "sum").double(), exact.sum(1), rtol=2e-6)


def test_ddim_is_the_step_of_ddpo():
    """DDPO's ddim_step_with_logprob, written from DDIM eq. 12 and 16; and diffusers' own scheduler."""
    diffusers = pytest.importorskip("diffusers")
    spec = spec_of(sampler="ddim", steps=10, noise_level=1.0)
    schedule = schedule_of(spec)
    theirs = diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=0
    )
    theirs.set_timesteps(10)
    alphas = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    generator = torch.Generator().manual_seed(2)
    for step in range(9):
        time, before = 900 - 100 * step, 900 - 100 * step - 100
        assert int(theirs.timesteps[step]) == time and float(schedule.time[step]) == time / 1000
        x, e, noise = (torch.randn(2, 3, 4, 4, generator=generator) for _ in range(3))
        a, a_before = alphas[time], alphas[before]
        std = math.sqrt((1 - a_before) / (1 - a) * (1 - a / a_before))
        clean = (x.double() - math.sqrt(1 - a) * e.double()) / math.sqrt(a)
        mean = math.sqrt(a_before) * clean + math.sqrt(1 - a_before - std**2) * e.double()
        found = schedule.step(x, e, torch.full((2,), step), torch.ones(2, dtype=torch.bool))
        assert torch.allclose(found.mean.double(), mean, atol=2e-6, rtol=1e-6)
        assert found.std_B.tolist() == pytest.approx([std] * 2, rel=1e-6)
        sampled = found.mean + found.std_B.view(-1, 1, 1, 1) * noise
        assert torch.allclose(sampled, theirs.step(e, time, x, eta=1.0, variance_noise=noise).prev_sample, atol=2e-5)
        exact = torch.distributions.Normal(mean, std).log_prob(sampled.double())
        assert torch.allclose(found.logprob(sampled, "mean").double(), exact.flatten(1).mean(1), rtol=1e-5)


def test_steps_outside_the_window_and_the_last_are_deterministic():
    schedule = schedule_of(spec_of(steps=5))
    x, v = torch.randn(2, 3), torch.randn(2, 3)
    last = schedule.step(x, v, torch.full((2,), 4), torch.ones(2, dtype=torch.bool))
    mixed = schedule.step(x, v, torch.tensor([1, 1]), torch.tensor([True, False]))
    assert last.std_B.tolist() == [0, 0] and torch.allclose(last.mean, x - 0.2 * v)
    assert last.logprob(last.mean, "mean").tolist() == [0, 0] and last.entropy(3, "sum").tolist() == [0, 0]
    assert mixed.std_B[0] > 0 and mixed.std_B[1] == 0
    assert torch.allclose(mixed.mean[1], (x - 0.2 * v)[1])


def test_the_window_slides_with_the_prompts():
    spec = spec_of(steps=10, window={"size": 3, "every": 2})
    windows = [spec.window_at(step * 32, 32, 0.9) for step in range(20)]
    assert windows[:5] == [(0, 3), (0, 3), (1, 4), (1, 4), (2, 5)]
    assert windows[-1] == (6, 9)  # never the last step
    random = spec_of(steps=10, window={"size": 3, "order": "random"})
    assert {random.window_at(0, 32, u) for u in (0.0, 0.5, 0.999)} == {(0, 3), (3, 6), (6, 9)}


# ---- noise ---------------------------------------------------------------------------------------------------------


def test_noise_depends_on_key_and_draw_alone():
    one = normals([7], [3], (5, 7), CPU)
    many = normals([1, 7, 2**64 - 1], [0, 3, 3], (5, 7), CPU)
    assert torch.equal(one[0], many[1])
    assert not torch.equal(many[0], many[1]) and not torch.equal(many[1], many[2])
    assert not torch.equal(normals([7], [4], (5, 7), CPU)[0], one[0])


def test_noise_is_normal_and_its_integers_are_those_of_tokens():
    x = normals([2**63 + 5], [1], (200_000,), CPU)[0].double()
    assert float(x.mean()) == pytest.approx(0, abs=0.01) and float(x.std()) == pytest.approx(1, abs=0.01)
    assert float((x**4).mean()) == pytest.approx(3, abs=0.06)
    assert abs(float((x[:-1] * x[1:]).mean())) < 0.01
    first = uniforms(np.array([2**63 + 5], np.uint64), np.array([1 << 34], np.int64))  # number 0 of draw 1
    half = 100_032
    second = uniforms(np.array([2**63 + 5], np.uint64), np.array([(1 << 34) + half], np.int64))
    expected = math.sqrt(-2 * math.log1p(-first[0])) * math.cos(2 * math.pi * second[0])
    assert float(x[0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("sampler", ["flow_sde", "ddim"])
def test_demonstrations_are_noised_as_the_sampler_expects(sampler):
    """With the exact prediction, one deterministic pass over the schedule brings a noised picture back."""
    spec = spec_of(sampler=sampler, steps=50)
    schedule, clean, noise = schedule_of(spec), torch.randn(4, 6), torch.randn(4, 6)
    index = torch.tensor([10, 20, 30, 40])
    uniform = schedule.time[index] + (5e-4 if sampler == "ddim" else 0)
    x, times, target = noised(spec, clean, noise, uniform)
    assert torch.allclose(times.double(), schedule.time[index])
    signal, scale = 1 - times.double(), times.double()
    if sampler == "ddim":
        betas = np.linspace(spec.betas[0] ** 0.5, spec.betas[1] ** 0.5, 1000) ** 2
        kept = torch.from_numpy(np.cumprod(1 - betas))[(times * 1000).round().long()]
        signal, scale = kept.sqrt(), (1 - kept).sqrt()
    expected = signal.view(-1, 1) * clean + scale.view(-1, 1) * noise
    assert torch.allclose(x.double(), expected, atol=1e-5)
    for row, step in enumerate(index.tolist()):
        y = x[row : row + 1]
        for later in range(step, 50):
            steps, ode = torch.tensor([later]), torch.tensor([False])
            y = schedule.step(y, target[row : row + 1], steps, ode).mean
        assert torch.allclose(y, clean[row : row + 1], atol=1e-4)
