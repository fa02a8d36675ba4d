"""Weights of a network that was made without them (models.make_empty): each rank reads its shards and nothing else.

    make_empty ──> adapters, fully_shard (the trainer) ──> fill: memory on the device, then parameter by parameter
                                                                 this rank's part of it ──safetensors──> copy

No rank holds the whole model, with the two exceptions that weights/pretrained.py names: then it has the whole model in
host memory while it copies its shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gcore.config.base import Model
from gcore.training import lora
from gcore.training.shards import local_of, materialise, part_of, reshard
from gcore.weights.pretrained import open_weights, stored_tensors


def fill(network: Any, model: Model, seed: int, device: torch.device, tokenizer: Any) -> None:
    """Give an empty network its memory on `device` and its starting weights, in the dtype of each parameter. It may be
    sharded in any way that DTensor describes. Adapters get their starting values. Not a collective."""
    materialise(network, device)
    read = open_weights(network, model, seed, tokenizer)
    with torch.no_grad():
        for name, tensor in stored_tensors(network).items():
            if (local := local_of(tensor)).numel():
                local.copy_(read(name, part_of(tensor)))
    lora.fill_adapters(network, seed)


def fill_from(target: nn.Module, source: nn.Module, device: torch.device) -> None:
    """Make an empty network, sharded like `source`, a copy of it: each rank copies its shards. Pass the modules that
    `fully_shard` was applied to last, which contain the networks. Not a collective."""
    reshard(source)
    materialise(target, device)
    found = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(found[name])
        buffers = dict(source.named_buffers())
        for name, buffer in target.named_buffers():
            buffer.copy_(buffers[name])
