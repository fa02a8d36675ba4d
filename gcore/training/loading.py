"""Weights of a network that was made without them (models.make_empty): each rank reads its shards and nothing else.

    make_empty ──> adapters, fully_shard (the trainer) ──> fill: memory on the device, then parameter by parameter
                                                                 this rank's part of it ──safetensors──> copy

No rank holds the whole model, with two exceptions: a model that is built from the configuration, and a checkpoint that
transformers converts while it reads it (experts that are stored one by one, pytorch_model.bin). Then every rank has
the whole model in host memory while it copies its shards.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gcore.config.tree import Model
from gcore.hub import model_folder
from gcore.models import LORA_A, LORA_B, load_whole
from gcore.training import lora
from gcore.training.shards import local_of, materialise, part_of, reshard
from gcore.types import UserError
from gcore.weights.files import Part, WeightFiles

log = logging.getLogger(__name__)
Read = Callable[[str, Part], Tensor]  # a part of the parameter or buffer of this name
ROWS_AT_ONCE = 4096  # of two tensors that are compared


def fill(network: Any, model: Model, seed: int, device: torch.device, tokenizer: Any) -> None:
    """Give an empty network its memory on `device` and its starting weights, in the dtype of each parameter. It may be
    sharded in any way that DTensor describes. Adapters get their starting values. Not a collective."""
    materialise(network, device)
    read = _source(network, model, seed, tokenizer)
    with torch.no_grad():
        for name, tensor in _loaded(network).items():
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


def _loaded(network: Any) -> dict[str, Tensor]:
    """Parameters and buffers that a checkpoint holds, tied ones once."""
    stored = network.state_dict(keep_vars=True).keys()
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: tensor for name, tensor in named.items() if name in stored and not name.endswith((LORA_A, LORA_B))}


# ---- where the weights come from


def _source(network: Any, model: Model, seed: int, tokenizer: Any) -> Read:
    if model.build is None:
        files = WeightFiles(model_folder(model, weights=True))
        reason = "it has no safetensors"
        if files.shapes:
            names, reason = _match(network, files)
            if names is not None:
                _check_tied(network, model, files)
                return lambda name, part: files.read(names[name], part)
        log.warning("model.path=%s: %s; every trainer rank reads the whole model into host memory", model.path, reason)
    whole: Any = load_whole(model, tokenizer, seed)
    tensors = {**dict(whole.named_parameters(remove_duplicate=False)), **dict(whole.named_buffers())}
    return lambda name, part: tensors[name].detach()[part]


def _match(network: Any, files: WeightFiles) -> tuple[Mapping[str, str] | None, str]:
    """Name in the network -> name in the files. None and the reason if transformers would convert the tensors."""
    if pattern := _conversion(network, files):
        return None, f"its {pattern} are stored differently"
    found: dict[str, str] = {}
    for name, tensor in _loaded(network).items():
        stored = next((n for n in _same(network, name) if n in files), None)
        if stored is None:
            return None, f"it has no tensor named {name}"
        if files.shapes[stored] != tuple(tensor.shape):
            return None, f"its {stored} has shape {files.shapes[stored]}, expected {tuple(tensor.shape)}"
        found[name] = stored
    known = {n for name in found for n in _same(network, name)}
    if unknown := sorted(name for name in set(files) - known if not _ignored(network, name)):
        return None, f"the network has no parameter named {unknown[0]}"
    return found, ""


def _conversion(network: Any, names: Iterable[str]) -> str | None:
    """The pattern of names in the checkpoint whose tensors transformers computes with: it stacks experts, for example.
    It may do so without a change of names."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    for change in get_model_conversion_mapping(network, add_legacy=False):
        for pattern in change.source_patterns if getattr(change, "operations", None) else ():
            if any(re.search(pattern, name) for name in names):
                return str(pattern)
    return None


def _same(network: Any, name: str) -> list[str]:
    """All names of a parameter: tied ones have several. The name itself is the first."""
    tied: Mapping[str, str] = network.all_tied_weights_keys
    first = tied.get(name, name)
    return sorted({name, first, *(n for n, other in tied.items() if other == first)}, key=lambda n: n != name)


def _ignored(network: Any, name: str) -> bool:
    """True for tensors that transformers leaves out when it reads a checkpoint of this model."""
    patterns = [*(network._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    return any(re.search(pattern, name) for pattern in patterns)


def _check_tied(network: Any, model: Model, files: WeightFiles) -> None:
    """A checkpoint may hold a tied tensor twice. Transformers does not tie two that differ."""
    for name, other in network.all_tied_weights_keys.items():
        if name not in files or other not in files:
            continue
        num_rows = files.shapes[other][0]
        for first in range(0, num_rows, ROWS_AT_ONCE):
            part = (slice(first, min(first + ROWS_AT_ONCE, num_rows)), *map(slice, files.shapes[other][1:]))
            if not torch.equal(files.read(name, part), files.read(other, part)):
                raise UserError(
                    f"model.path={model.path}: config.json ties {name} to {other}, and the files have different values "
                    "for them; set tie_word_embeddings to false in config.json"
                )
