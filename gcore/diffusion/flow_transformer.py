"""The network of `model.denoiser`: a small transformer over the patches of a picture, conditioned on a class.

    picture ──patches──> tokens + positions ──layers, modulated by time and class──> tokens ──> prediction per pixel

Layers are those of diffusion transformers (DiT): scale, shift and gate of each half of a layer come from the condition,
and start at zero, so that the network starts as the zero function.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcore.config.base import BuildDenoiser

FREQUENCIES = 32
INIT = {"positions": 0.02, "classes.weight": 0.5}  # standard deviations; of other matrices 1 / sqrt(width)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, hidden_BTD: Tensor, condition_BD: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition_BD)[:, None].chunk(6, -1)
        normed = self.norm1(hidden_BTD) * (1 + scale1) + shift1
        q, k, v = (self._split(part) for part in self.qkv(normed).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        hidden_BTD = hidden_BTD + gate1 * self.out(attended)
        normed = self.norm2(hidden_BTD) * (1 + scale2) + shift2
        return hidden_BTD + gate2 * self.down(functional.gelu(self.up(normed), approximate="tanh"))

    def _split(self, part_BTD: Tensor) -> Tensor:
        return part_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class FlowTransformer(nn.Module):
    """Label `len(spec.classes)` is no class: the condition of guidance."""

    def __init__(self, spec: BuildDenoiser) -> None:
        super().__init__()
        self.spec, width = spec, spec.hidden_size
        numbers = spec.channels * spec.patch_size**2
        self.patches = nn.Linear(numbers, width)
        self.positions = nn.Parameter(torch.zeros(spec.tokens, width))
        self.time1, self.time2 = nn.Linear(2 * FREQUENCIES, width), nn.Linear(width, width)
        self.classes = nn.Embedding(len(spec.classes) + 1, width)
        self.layers = nn.ModuleList(Layer(width, spec.heads) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation, self.head = nn.Linear(width, 2 * width), nn.Linear(width, numbers)

    def forward(self, latents: Tensor, time_B: Tensor, label_B: Tensor) -> Tensor:
        """`latents`: rows x channels x height x width."""
        tokens = to_patches(latents, self.spec.patch_size).to(self.patches.weight.dtype)
        hidden = self.patches(tokens) + self.positions
        waves = _waves(time_B).to(hidden.dtype)
        condition = functional.silu(self.time2(functional.silu(self.time1(waves))) + self.classes(label_B))
        for layer in self.layers:
            hidden = layer(hidden, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, -1)
        prediction = self.head(self.norm(hidden) * (1 + scale) + shift)
        return from_patches(prediction, latents.shape, self.spec.patch_size)

    @torch.no_grad()
    def initialize(self, seed: int) -> FlowTransformer:
        """The same weights in every process."""
        generator = torch.Generator().manual_seed(seed % 2**63)
        zero = ("modulation.weight", "head.weight")
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or name.endswith(zero):
                parameter.zero_()
            else:
                std = INIT.get(name, parameter.shape[1] ** -0.5)
                parameter.normal_(std=std, generator=generator)
        return self


def to_patches(latents: Tensor, size: int) -> Tensor:
    """Rows x channels x height x width -> rows x patches x (channels, size, size)."""
    cut = latents.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # rows, channels, y, dy, x, dx
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def from_patches(patches: Tensor, shape: torch.Size, size: int) -> Tensor:
    """The inverse, to latents of this shape."""
    _, channels, height, width = shape
    cut = patches.unflatten(1, (height // size, width // size)).unflatten(3, (channels, size, size))
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(shape)


def _waves(time_B: Tensor) -> Tensor:
    rates = torch.exp(torch.linspace(0, math.log(1000.0), FREQUENCIES, device=time_B.device))
    angles = time_B.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1)
