"""Normal noise that depends on the sample and on the denoising step, not on the process or the batch that draws it.

    (key of the sample, draw) ──SplitMix64──> uniform numbers ──Box-Muller──> normal numbers

The key comes from (seed, prompt id, sibling), as for tokens (generation/noise.py). Draw 0 is the noise that a sample
starts from, draw i + 1 the noise of denoising step i. The integers are the same on every device; the normal numbers of
a CPU and a GPU may differ in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gcore.diffusion.samplers import to_device

GOLDEN, MIX_1, MIX_2 = (
    value - 2**64 if value >= 2**63 else value  # torch has no unsigned arithmetic: the same bits as signed numbers
    for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
DRAW_BITS = 34  # numbers of one draw: at most 2**DRAW_BITS
BLOCK = 64  # elements are computed in whole blocks, so that the vector code of a CPU leaves no remainder
START = 0  # the draw of the noise that a sample starts from
EVALUATION = 1 << 20  # the start of samples of evaluations: not the noise of a training prompt with the same number


def normals(keys: Sequence[int], draws: Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """Standard normal numbers of `shape` for each (key, draw), in float32: rows x shape."""
    size = math.prod(shape)
    half = -(-size // (2 * BLOCK)) * BLOCK
    found = uniforms(keys, draws, 2 * half, device)
    radius = torch.sqrt(-2 * torch.log1p(-found[:, :half]))  # 1 - u is in (0, 1]: the logarithm is finite
    angle = 2 * math.pi * found[:, half:]
    found = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], 1)[:, :size]
    return found.float().view(len(keys), *shape)


def uniforms(keys: Sequence[int], draws: Sequence[int], number: int, device: torch.device) -> Tensor:
    """`number` numbers in [0, 1) for each (key, draw), in float64: as generation/noise.uniforms."""
    signed = [key - 2**64 if key >= 2**63 else key for key in keys]
    key_B1, draw_B1 = to_device(torch.tensor([signed, list(draws)], dtype=torch.int64), device)[..., None]
    first_B1 = draw_B1 << DRAW_BITS
    z = key_B1 + (first_B1 + torch.arange(1, number + 1, device=device)) * GOLDEN
    z = (z ^ _shift(z, 30)) * MIX_1
    z = (z ^ _shift(z, 27)) * MIX_2
    z = z ^ _shift(z, 31)
    return _shift(z, 11).double() * 2.0**-53


def _shift(z: Tensor, bits: int) -> Tensor:
    """To the right, with zeros: torch's shift repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
