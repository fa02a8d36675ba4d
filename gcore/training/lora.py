"""Low-rank adapters on frozen weights (model.lora).

    y = W x + b + alpha / rank * B (A x)        W and b are frozen; A starts small and random, B at zero

At the start B A = 0, so the policy equals the base model. A copy of the adapters can be swapped in later: the KL
reference is such a copy, so no second network is needed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gcore.config.base import Lora
from gcore.models.networks import LORA_A, LORA_B, Adapters, adapters_of
from gcore.training.shards import local_of, part_of, reshard


class LoraLinear(nn.Linear):
    """A linear layer that learns an addition to its weight. Old names stay; new parameters are named as in PEFT."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = linear.in_features, linear.out_features, scale
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, device=device)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.lora_B(self.lora_A(x))
        return super().forward(x) + added * self.scale


def adapt(network: Any, lora: Lora, seed: int, dtype: torch.dtype) -> Adapters:
    """Put adapters into the network. All other parameters are frozen and stored in the compute dtype, because no
    optimizer needs more. The same seed makes the same adapters on every rank. If the network is empty
    (models.make_empty), so are its adapters: `fill_adapters` gives them their values after sharding."""
    adapters = adapters_of(network, lora)
    for parameter in network.requires_grad_(False).parameters():
        parameter.data = parameter.data.to(dtype)
    for layer in adapters.layers:
        parent, _, name = layer.rpartition(".")
        adapted = LoraLinear(network.get_submodule(layer), adapters.rank, adapters.scale)
        setattr(network.get_submodule(parent), name, adapted)
    if not any(parameter.is_meta for parameter in network.parameters()):
        fill_adapters(network, seed)
    return adapters


@torch.no_grad()
def fill_adapters(network: Any, seed: int) -> None:
    """The starting values of all adapters: A is random, B is zero. Each rank writes its shards."""
    for name, parameter in network.named_parameters():
        local = local_of(parameter)
        if name.endswith(LORA_B):
            local.zero_()
        elif name.endswith(LORA_A) and local.numel():
            rng = np.random.default_rng([seed % 2**64, zlib.crc32(name.removesuffix(LORA_A).encode())])
            bound = parameter.shape[1] ** -0.5  # as in the default initialization of a linear layer
            values = rng.uniform(-bound, bound, tuple(parameter.shape)).astype(np.float32)
            local.copy_(torch.from_numpy(values[part_of(parameter)]))


def trainable_parameters(network: Any) -> dict[str, Tensor]:
    """The parameters that training changes, by name: those of adapters if there are any, else all."""
    found = dict(network.named_parameters())
    return {name: p for name, p in found.items() if name.endswith((LORA_A, LORA_B))} or found


def copy_adapters(policy: nn.Module) -> dict[str, Tensor]:
    """A copy of the current adapters; each rank copies its shard."""
    reshard(policy)
    return {name: parameter.detach().clone() for name, parameter in trainable_parameters(policy.network).items()}


@contextmanager
def with_adapters(policy: nn.Module, adapters: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """The policy with other adapters. Its current ones are restored at the end of the block."""
    current = copy_adapters(policy)
    _write(policy, adapters)
    try:
        yield policy
    finally:
        _write(policy, current)


@torch.no_grad()
def _write(policy: nn.Module, adapters: Mapping[str, Tensor]) -> None:
    reshard(policy)
    for name, parameter in trainable_parameters(policy.network).items():
        parameter.copy_(adapters[name])
