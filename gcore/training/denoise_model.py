"""The StepModel of diffusion models: latents of consecutive denoising steps -> the logprob of each step.

    Latents ──pack──> a row for each stochastic step: latents before and after it, time, condition
            ──network, one pass over all rows──> Transition of each row ──> logprob, entropy, location

Rows of all samples are one batch: every row has the same number of tokens, so nothing is padded. Deterministic steps
need no pass; their logprob is 0. The engine computes the same formulas (generation/diffusion.py).

The *location* of a step is a vector such that the KL of two policies at this step is half the squared distance of
their locations: the mean of the Gaussian divided by its standard deviation, or the prediction itself (`velocity`).

The steps of a demonstration are passes at random times; their "logprob" is the negative mean squared error, so that
imitation is the usual regression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gcore.config.denoising import Denoising
from gcore.content.latents import DEMONSTRATION_DRAWS, Latents, latents_of
from gcore.diffusion.denoiser import EMPTY, Condition, Denoiser, from_pixels, stacked, tensors_of
from gcore.diffusion.noise import normals, uniforms
from gcore.diffusion.samplers import noised, rows, schedule_of, to_device
from gcore.training.context import RowGroup
from gcore.training.step_model import ON_CPU, Compute
from gcore.types import Key, MicroBatch, Sample, UserError

DEMONSTRATIONS = 1 << 21  # first draw of the noise of demonstrations
DROPPED = 0.1  # share of demonstrations without their condition, if the recipe uses guidance
HEADROOM = 0.12  # share of a GPU that activations leave free: gradients grow, and free memory has gaps
WORKING_LAYERS = 3  # a layer that is recomputed, and its gradients, in units of what a layer keeps


@dataclass(frozen=True, slots=True)
class PackedLatents:
    """Implements step_model.StepBatch. P passes (`_P`), of the steps `at_P` of all S steps."""

    latents_P: Tensor
    targets_P: Tensor  # the next latents; for demonstrations what the network should predict
    times_P: Tensor
    steps_P: Tensor  # number of the denoising step
    condition: Mapping[str, Tensor]
    at_P: Tensor
    sample_S: Tensor
    keys: tuple[Key, ...]
    is_demonstration: bool = False
    is_padding: bool = False

    def joined(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        return outputs


class LayersThatFit:
    """Calls layers so that as many as fit keep their activations. The first ones are recomputed in the backward pass:
    when it comes to them, the others have freed theirs. `row_bytes`: that a layer keeps for a row."""

    def __init__(self, num_layers: int, row_bytes: float, free_bytes: Callable[[], float]) -> None:
        self._num_layers, self._row_bytes, self._free_bytes = num_layers, row_bytes, free_bytes
        self.recomputed = 0  # layers still to come

    def begin(self, num_rows: int) -> None:
        """A forward pass."""
        lacking = self._num_layers - int(self._free_bytes() / (num_rows * self._row_bytes))
        self.recomputed = min(lacking + WORKING_LAYERS, self._num_layers) if lacking > 0 else 0

    def __call__(self, layer: Any, *inputs: Any) -> Any:
        if not self.recomputed:
            return layer(*inputs)
        self.recomputed -= 1
        return checkpoint(layer.__call__, *inputs, use_reentrant=False)


def free_bytes(device: torch.device) -> float:
    """Of a GPU, for activations. Does not wait for the device."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(free + unused - HEADROOM * total)


class DenoiseModel(nn.Module):
    """Implements step_model.StepModel. `velocity`: locations are predictions, see above. `seed`: of the noise of
    demonstrations. `row_bytes`: what a layer keeps of a row for the backward pass, if layers that do not fit on the GPU
    are recomputed; 0: all keep theirs."""

    def __init__(
        self,
        network: Denoiser,
        compute: Compute = ON_CPU,
        *,
        spec: Denoising,
        seed: int = 0,
        velocity: bool = False,
        row_bytes: float = 0.0,
    ) -> None:
        super().__init__()
        self.network, self.compute, self.spec, self.seed, self.velocity = network, compute, spec, seed, velocity
        self.schedule, self.guided = schedule_of(spec), network.is_guided(spec.guidance_scale)
        self.recompute: LayersThatFit | None = None
        if row_bytes:
            self.recompute = LayersThatFit(len(network.layers), row_bytes, partial(free_bytes, compute.device))
            network.checkpoint_activations(self.recompute)
        if compute.compiled:  # norms and activation functions are computed again, matrix products and attention never
            torch._functorch.config.ban_recompute_materialized_backward = False

    @property
    def layers(self) -> Sequence[nn.Module]:
        return self.network.layers

    @property
    def hidden_size(self) -> int:
        return self.network.hidden_size

    @property
    def unshared(self) -> str:
        return "samples of a diffusion model have no prefixes"

    @property
    def padded(self) -> bool:
        return False

    def checkpoint_activations(self) -> None:
        self.network.checkpoint_activations()

    # ---- samples to tensors ---------------------------------------------------------------------------------------

    def pack(self, micro: MicroBatch, samples: Mapping[Key, Sample], ranks: RowGroup) -> PackedLatents:
        keys = tuple(key for row in micro.rows for key in row)
        if not keys:
            return self._padding()
        contents = [latents_of(samples[key].content) for key in keys]
        lengths = [content.num_steps for content in contents]
        device = self.compute.device
        sample_S = to_device(torch.repeat_interleave(torch.arange(len(keys)), torch.tensor(lengths)), device)
        if contents[0].demonstration is not None:
            return self._demonstrations(keys, contents, sample_S)
        starts = np.cumsum([0, *lengths[:-1]])
        before, after, steps, at = [], [], [], []
        for content, start in zip(contents, starts, strict=True):
            states, chosen = content.states(), np.flatnonzero(content.actions_S)
            before.append(states[chosen])
            after.append(states[chosen + 1])
            steps.append(chosen)
            at.append(start + chosen)
        conditions = [tensors_of(self._condition(content), device) for content in contents]
        repeated = [c for c, chosen in zip(conditions, steps, strict=True) for _ in range(len(chosen))]
        steps_P = torch.from_numpy(np.concatenate(steps))
        return PackedLatents(
            to_device(torch.from_numpy(np.concatenate(before)), device),
            to_device(torch.from_numpy(np.concatenate(after)), device),
            to_device(self.schedule.times(steps_P), device),
            steps_P,
            stacked(repeated),
            to_device(torch.from_numpy(np.concatenate(at)), device),
            sample_S,
            keys,
        )

    def _condition(self, content: Latents) -> Condition:
        if content.condition:
            return {name: np.asarray(ref.read()) for name, ref in content.condition}
        return self.network.encode(content.prompt, self.guided)

    def _demonstrations(self, keys: Sequence[Key], contents: Sequence[Latents], sample_S: Tensor) -> PackedLatents:
        device, shape, number = self.compute.device, self.network.latent_shape, len(sample_S)
        draws = [DEMONSTRATIONS + i for _ in keys for i in range(DEMONSTRATION_DRAWS)]
        row_keys = [(self.seed % 2**31 << 32) + prompt_id for prompt_id, _ in keys for _ in range(DEMONSTRATION_DRAWS)]
        noise = normals(row_keys, draws, shape, device)
        uniform_P2 = uniforms(row_keys, [DEMONSTRATION_DRAWS + draw for draw in draws], 2, device)
        pictures = [_pixels(content, shape) for content in contents]
        clean = torch.stack([picture for picture in pictures for _ in range(DEMONSTRATION_DRAWS)]).to(device)
        latents_P, times_P, targets_P = noised(self.spec, clean, noise, uniform_P2[:, 0])
        conditions = [tensors_of(self._condition(content), device) for content in contents]
        condition = stacked([c for c in conditions for _ in range(DEMONSTRATION_DRAWS)])
        own = {name: value for name, value in condition.items() if not name.startswith(EMPTY)}
        if self.guided:
            dropped = uniform_P2[:, 1] < DROPPED
            own = {n: torch.where(rows(dropped, value), condition[EMPTY + n], value) for n, value in own.items()}
        zeros = torch.zeros(number, dtype=torch.int64)
        every = torch.arange(number, device=device)
        rest = (own, every, sample_S, tuple(keys), True)
        return PackedLatents(latents_P, targets_P, times_P, zeros, *rest)

    def _padding(self) -> PackedLatents:
        """One step, so that this rank joins the collectives of the others."""
        device = self.compute.device
        latents = torch.zeros(1, *self.network.latent_shape, device=device)
        condition = stacked([tensors_of(self.network.empty_condition(self.guided), device)])
        index = torch.zeros(1, dtype=torch.int64, device=device)
        times = torch.ones(1, device=device)
        return PackedLatents(
            latents, latents, times, index.cpu(), condition, index, index, ((-1, -1),), is_padding=True
        )

    # ---- computation ----------------------------------------------------------------------------------------------

    def forward(self, packed: PackedLatents) -> tuple[Tensor, Tensor, Tensor]:
        """The fields of objective.StepOutputs."""
        latents_P, at_P, num_steps = packed.latents_P, packed.at_P, len(packed.sample_S)
        guidance = 1.0 if packed.is_demonstration else self.spec.guidance_scale
        if self.recompute is not None and torch.is_grad_enabled():
            self.recompute.begin(len(latents_P))
        prediction = self.network(latents_P, packed.times_P, packed.condition, guidance)
        zeros_S = torch.zeros(num_steps, device=latents_P.device)
        if packed.is_demonstration:
            error_P = (prediction - packed.targets_P).square().flatten(1).mean(1)
            return zeros_S.index_copy(0, at_P, -error_P), zeros_S, zeros_S[:, None]
        stochastic_P = torch.ones(len(packed.steps_P), dtype=torch.bool)
        transition = self.schedule.step(latents_P, prediction, packed.steps_P, stochastic_P)
        logprobs_P = transition.logprob(packed.targets_P, self.spec.logprob)
        numbers = latents_P[0].numel()
        entropy_P = transition.entropy(numbers, self.spec.logprob)
        location_PD = prediction if self.velocity else transition.mean / rows(transition.std_B, latents_P)
        location_PD = location_PD.flatten(1) / (numbers**0.5 if self.spec.logprob == "mean" else 1.0)
        zeros_SD = zeros_S[:, None].expand(num_steps, numbers)
        return (
            zeros_S.index_copy(0, at_P, logprobs_P),
            zeros_S.index_copy(0, at_P, entropy_P),
            zeros_SD.index_copy(0, at_P, location_PD),
        )


def _pixels(content: Latents, shape: tuple[int, ...]) -> Tensor:
    assert content.demonstration is not None
    found = from_pixels(content.demonstration, shape[0])
    if tuple(found.shape) != shape:
        raise UserError(
            f"a demonstration has the shape {tuple(found.shape)}; expected {shape} as in model.denoiser "
            "(keys: data.train, model.denoiser.image_size)"
        )
    return found
