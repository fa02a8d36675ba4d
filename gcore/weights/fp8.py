"""Weights in FP8 (e4m3): blocks of 128 x 128 numbers share a scale, as in the files of DeepSeek-V3 and Qwen3.

    trainer: matrix of a layer ──quantised──> numbers of one byte, scales ──bucket──> engine: restored, or as they are

A scale is named as in such files, `NAME_scale_inv`: number x scale is the weight. Embeddings, the head, norms, biases
and routers keep their precision, as in the published files of Qwen and Llama.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
SCALE = "_scale_inv"
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
MATRIX = re.compile(  # of the decoder's layers; experts may be stacked
    r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.\d+\..*"
    r"(?:[qkvo]_proj|qkv_proj|gate_proj|up_proj|down_proj|gate_up_proj)(?:\.weight)?$"
)


def is_quantised(name: str, tensor: Tensor) -> bool:
    """Whether engines get this parameter in FP8."""
    return tensor.dim() > 1 and MATRIX.search(name) is not None


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[..., rows, columns] -> the same in FP8, and the scales [..., rows / 128, columns / 128], rounded up."""
    rows, columns = matrix.shape[-2:]
    padded = pad(matrix.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., row, 128, column, 128]
    largest = blocks.abs().amax((-3, -1))
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    numbers = (blocks / scales[..., :, None, :, None]).clamp(-LARGEST, LARGEST)
    return numbers.view_as(padded)[..., :rows, :columns].to(FP8).contiguous(), scales


def restored(numbers: Tensor, scales: Tensor) -> Tensor:
    rows, columns = numbers.shape[-2:]
    whole = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return numbers.float() * whole[..., :rows, :columns]


def in_fp8(name: str, tensor: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """What is sent for a parameter: in FP8 with its scales, or in this precision."""
    if not is_quantised(name, tensor):
        return {name: tensor.to(dtype)}
    numbers, scales = quantised(tensor)
    return {name: numbers, name + SCALE: scales}


def all_restored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights that arrived, for an engine that computes with the numbers that they stand for."""
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(SCALE)}
    return {
        name: restored(tensor, scales[name + SCALE]) if name + SCALE in scales else tensor
        for name, tensor in tensors.items()
        if name not in scales
    }


@torch.no_grad()
def round_parameters(network: Any) -> None:
    """To what FP8 can store: an engine starts as if its first weights had been sent in FP8."""
    for name, parameter in network.named_parameters():
        if is_quantised(name, parameter):
            parameter.copy_(restored(*quantised(parameter)))
