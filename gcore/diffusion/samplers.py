"""One denoising step as a Gaussian: its mean, its standard deviation, and the logprob of what was sampled.

    x (noisy latents), prediction of the network ──Schedule.step──> Transition(mean, std) ──noise──> next latents
                                                                          └──logprob(next latents)──> one number

Every sampler here is linear: mean = a x + b prediction, with numbers a and b that depend only on the step. They are
tables in float64, so an engine that samples and a trainer that computes the logprob again use the same numbers.
`_B` are rows: a sample each in an engine, a step of a sample each in a trainer.

Flows: s runs from 1 (noise) to 0, x = (1 - s) x0 + s noise, the network predicts v = noise - x0, and ds < 0. An SDE
with the marginals of the flow adds noise g and corrects the drift by -g^2/2 times the score, -(x + (1 - s) v) / s:

    mean = x (1 + g^2 / (2 s) ds) + v (1 + g^2 (1 - s) / (2 s)) ds        std = g sqrt(-ds)

    flow_sde   g = level sqrt(s / (1 - s)), at s = 1 with the s of the second step (Flow-GRPO)
    dance      g = level (DanceGRPO)

Any g keeps the marginals of the flow, up to the error of a step of finite length: after the first step (s = 1) the
variance is too large by ds^2 (g^2 + g^4 / 4). Flow-GRPO's public code takes the s of the second step only in 1 - s,
so that its first std is `level` instead of level sqrt(s_1), 5 % more with 10 steps, and that error is larger.

DDIM: x = sqrt(A) x0 + sqrt(1 - A) noise, the network predicts the noise (DDPO, on 1,000 steps of a DDPM).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gcore.config.denoising import Denoising

TRAIN_STEPS = 1000  # of a DDPM
LOG_2PI = math.log(2 * math.pi)


class Transition(NamedTuple):
    """The distribution of the next latents. A row with std 0 is deterministic: its next latents are the mean."""

    mean: Tensor
    std_B: Tensor

    def logprob(self, latents: Tensor, reduce: str) -> Tensor:
        """Of the next latents, `mean` or `sum` over their numbers. 0 for deterministic rows."""
        std = rows(self.std_B, latents)
        safe = torch.where(std > 0, std, torch.ones_like(std))
        each = -((latents.float() - self.mean) ** 2) / (2 * safe**2) - safe.log() - LOG_2PI / 2
        total = each.flatten(1).mean(1) if reduce == "mean" else each.flatten(1).sum(1)
        return torch.where(self.std_B > 0, total, torch.zeros_like(total))

    def entropy(self, numbers: int, reduce: str) -> Tensor:
        """`numbers`: of the latents of a row."""
        safe = torch.where(self.std_B > 0, self.std_B, torch.ones_like(self.std_B))
        each = safe.log() + (1 + LOG_2PI) / 2
        total = each if reduce == "mean" else each * numbers
        return torch.where(self.std_B > 0, total, torch.zeros_like(total))


def rows(values_B: Tensor, like: Tensor) -> Tensor:
    """One number per row, to be broadcast over the rest of `like`."""
    return values_B.view(-1, *[1] * (like.dim() - 1))


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """From the host, without waiting for a GPU: the host prepares the next pass while the GPU computes."""
    if device.type != "cuda" or values.device.type == "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Schedule:
    """The steps of a sampler. `time`: what the network gets at each step, from 1 (noise) towards 0. `sde`, `ode`: a, b
    and std of each step."""

    time: Tensor  # N
    sde: Tensor  # N x 3
    ode: Tensor  # N x 3

    @property
    def num_steps(self) -> int:
        return len(self.time)

    def step(self, latents: Tensor, prediction: Tensor, steps_B: Tensor, stochastic_B: Tensor) -> Transition:
        """The transition of each row from step `steps_B` to the next, by the SDE where `stochastic_B`, else the ODE."""
        steps_B = steps_B.cpu()
        table = torch.where(stochastic_B.cpu()[:, None], self.sde[steps_B], self.ode[steps_B])
        a, b, std_B = to_device(table.float(), latents.device).unbind(1)
        mean = rows(a, latents) * latents.float() + rows(b, latents) * prediction.float()
        return Transition(mean, std_B)

    def times(self, steps_B: Tensor) -> Tensor:
        return self.time[steps_B.cpu()].float().to(steps_B.device)


def schedule_of(spec: Denoising) -> Schedule:
    time, sde, ode = _ddim(spec) if spec.sampler == "ddim" else _flow(spec)
    sde[-1] = ode[-1]  # the last step is deterministic
    return Schedule(*(torch.from_numpy(np.ascontiguousarray(table)) for table in (time, sde, ode)))


def _flow(spec: Denoising) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields of Schedule."""
    even = np.linspace(1.0, 0.0, spec.steps + 1)
    s_all = spec.shift * even / (1 + (spec.shift - 1) * even)
    s, ds = s_all[:-1], np.diff(s_all)
    if spec.sampler == "flow_sde":
        inside = np.where(s < 1, s, s_all[1])
        g = spec.level * np.sqrt(inside / (1 - inside))
    else:
        g = np.full(len(s), spec.level)
    sde = np.stack([1 + g**2 / (2 * s) * ds, (1 + g**2 * (1 - s) / (2 * s)) * ds, g * np.sqrt(-ds)], axis=1)
    return s, sde, np.stack([np.ones_like(s), ds, np.zeros_like(s)], axis=1)


def _ddim(spec: Denoising) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields of Schedule."""
    betas = np.linspace(spec.betas[0] ** 0.5, spec.betas[1] ** 0.5, TRAIN_STEPS) ** 2
    kept = np.cumprod(1 - betas)
    stride = TRAIN_STEPS // spec.steps
    times = np.arange(spec.steps)[::-1] * stride
    now, later = kept[times], np.append(kept[times[1:]], 1.0)
    variance = (1 - later) / (1 - now) * (1 - now / later)

    def table(std: np.ndarray) -> np.ndarray:
        a = np.sqrt(later / now)
        b = np.sqrt(np.maximum(1 - later - std**2, 0.0)) - np.sqrt(later * (1 - now) / now)
        return np.stack([a, b, std], axis=1)

    return times / TRAIN_STEPS, table(spec.level * np.sqrt(variance)), table(np.zeros_like(variance))


def noised(spec: Denoising, clean: Tensor, noise: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For supervised training: latents at random times, these times, and what the network should predict there.
    `uniform_B`: one number in [0, 1) per row."""
    if spec.sampler == "ddim":
        betas = torch.linspace(spec.betas[0] ** 0.5, spec.betas[1] ** 0.5, TRAIN_STEPS, dtype=torch.float64) ** 2
        index_B = (uniform_B.double() * TRAIN_STEPS).long()
        kept = torch.cumprod(1 - betas, 0).to(clean.device)[index_B]
        signal, scale, time_B = kept.sqrt(), (1 - kept).sqrt(), index_B / TRAIN_STEPS
        target = noise
    else:
        time_B = spec.shift * uniform_B / (1 + (spec.shift - 1) * uniform_B)
        signal, scale, target = 1 - time_B, time_B, noise - clean
    return rows(signal, clean).float() * clean + rows(scale, clean).float() * noise, time_B.float(), target
