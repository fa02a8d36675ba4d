"""The starting weights of a model, by the names of its network's parameters: any part of one without the rest.

They are read from safetensors, except in two cases, in which the whole model is in host memory for a time: a model that
is built from the configuration, whose random numbers depend on their order, and a checkpoint that transformers converts
while it reads it (experts that are stored one by one, pytorch_model.bin).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gcore.config.base import Model
from gcore.hub import model_folder
from gcore.models.networks import LORA_A, LORA_B, load_whole
from gcore.types import UserError

log = logging.getLogger(__name__)
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SCALES = "_scale_inv"  # after the name of a tensor in FP8: what its blocks are multiplied with
Part = tuple[slice, ...]  # one slice per dimension: (slice(8, 16), slice(0, 64))
Read = Callable[[str, Part], Tensor]  # a part of the parameter or buffer of this name
ROWS_AT_ONCE = 4096  # of two tensors that are compared


class WeightFiles:
    """The tensors in the safetensors of a Hugging Face folder, by name; none if it has no safetensors. Files are
    mapped: of a tensor, only the parts that are used are read. One in FP8 is read with its scales, one per block."""

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {SINGLE}
        files = [safe_open(folder / name, "pt") for name in sorted(names) if (folder / name).is_file()]
        self._where: dict[str, Any] = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._where.items()}
        self._in_fp8 = {name for name in shapes if name + SCALES in shapes}
        self._block = fp8_block(folder) if self._in_fp8 else (1, 1)
        self.shapes = {name: shape for name, shape in shapes.items() if not name.endswith(SCALES)}

    def read(self, name: str, part: Part | None = None) -> Tensor:
        """The tensor, or a part of it, in the dtype of the file; of one in FP8, in float32."""
        if name in self._in_fp8:
            return self._dequantised(name, part or tuple(slice(0, edge) for edge in self.shapes[name]))
        if not part:
            tensor: Tensor = self._where[name].get_tensor(name)
            return tensor
        piece: Tensor = self._where[name].get_slice(name)[part]
        return piece

    def _dequantised(self, name: str, part: Part) -> Tensor:
        scales: Tensor = self._where[name + SCALES].get_tensor(name + SCALES).float()
        for axis, block in zip((-2, -1), self._block, strict=True):
            scales = scales.index_select(axis, torch.arange(*part[axis].indices(self.shapes[name][axis])) // block)
        whole: Tensor = self._where[name].get_slice(name)[part].float() * scales[part[:-2]]
        return whole


def fp8_block(folder: Path) -> tuple[int, int]:
    """Rows and columns of a weight that share a scale."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config") or {}
    rows, columns = config.get("weight_block_size") or (128, 128)
    return rows, columns


def stored_tensors(network: Any) -> dict[str, Tensor]:
    """Parameters and buffers that a checkpoint holds, tied ones once."""
    stored = network.state_dict(keep_vars=True).keys()
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: tensor for name, tensor in named.items() if name in stored and not name.endswith((LORA_A, LORA_B))}


def open_weights(network: Any, model: Model, seed: int, tokenizer: Any) -> Read:
    """The starting weights of this network, which may be empty, sharded, or have adapters. UserError if the folder
    lacks some or has others."""
    if model.build is None:
        files = WeightFiles(model_folder(model, weights=True))
        reason = "it has no safetensors"
        if files.shapes:
            names, reason = _match(network, files)
            if names is not None:
                _check_tied(network, model, files)
                return lambda name, part: files.read(names[name], part)
        log.warning("model.path=%s: %s; the whole model is read into host memory", model.path, reason)
    return read_whole(load_whole(model, tokenizer, seed))[0]


def read_whole(network: Any) -> tuple[Read, Set[str]]:
    """Reads from a network that is in memory; the names that it has."""
    tensors = {**dict(network.named_parameters(remove_duplicate=False)), **dict(network.named_buffers())}
    return lambda name, part: tensors[name].detach()[part], tensors.keys()


def _match(network: Any, files: WeightFiles) -> tuple[Mapping[str, str] | None, str]:
    """Name in the network -> name in the files. None and the reason if transformers would convert the tensors."""
    if pattern := _conversion(network, files.shapes):
        return None, f"its {pattern} are stored differently"
    names: dict[str, str] = {}
    for name, tensor in stored_tensors(network).items():
        stored = next((n for n in _same(network, name) if n in files.shapes), None)
        if stored is None:
            return None, f"it has no tensor named {name}"
        if files.shapes[stored] != tuple(tensor.shape):
            return None, f"its {stored} has shape {files.shapes[stored]}, expected {tuple(tensor.shape)}"
        names[name] = stored
    known = {n for name in names for n in _same(network, name)}
    if unknown := sorted(name for name in files.shapes.keys() - known if not _ignored(network, name)):
        return None, f"the network has no parameter named {unknown[0]}"
    return names, ""


def conversions(network: Any, files: Iterable[str] | None = None) -> list[Any]:
    """What transformers changes when it reads or writes a checkpoint of this kind of model: names and tensors. `files`:
    the names in one checkpoint, which may not have the prefixes that others have."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    def absent(change: Any) -> bool:
        patterns = change.source_patterns if isinstance(change, PrefixChange) and files is not None else ()
        return bool(patterns) and not any(re.search(pattern, name) for pattern in patterns for name in files or ())

    return [c for c in get_model_conversion_mapping(network, add_legacy=False) if not absent(c)]


def file_names(network: Any, files: WeightFiles) -> dict[str, str]:
    """Name in the network -> name in the files, also if transformers renames it. Without tensors that it computes."""
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    changes, state = conversions(network), network.state_dict()
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if not isinstance(change, WeightRenaming)]
    names = dict[str, str]()
    for stored in sorted(files.shapes):
        name, converted = rename_source_key(stored, renamings, converters, network.base_model_prefix, state)
        if converted is None and name in state and files.shapes[stored] == tuple(state[name].shape):
            names[name] = stored
    return names


def _conversion(network: Any, names: Iterable[str]) -> str | None:
    """The pattern of names in the checkpoint whose tensors transformers computes with: it stacks experts, for example.
    It may do so without a change of names."""
    for change in conversions(network):
        for pattern in change.source_patterns if getattr(change, "operations", None) else ():
            if any(re.search(pattern, name) for name in names):
                return str(pattern)
    return None


def _same(network: Any, name: str) -> list[str]:
    """All names of a parameter: tied ones have several. The name itself is the first."""
    tied: Mapping[str, str] = network.all_tied_weights_keys
    first = tied.get(name, name)
    return sorted({name, first, *(n for n, other in tied.items() if other == first)}, key=lambda n: n != name)


def left_out(network: Any, name: str) -> bool:
    """True for tensors of this kind of model that transformers does not read."""
    return any(re.search(pattern, name) for pattern in network._keys_to_ignore_on_load_unexpected or ())


def _ignored(network: Any, name: str) -> bool:
    """True for tensors that transformers leaves out when it reads a checkpoint of this model."""
    computed = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
    return left_out(network, name) or any(re.search(pattern, name) for pattern in computed)


def _check_tied(network: Any, model: Model, files: WeightFiles) -> None:
    """A checkpoint may hold a tied tensor twice. Transformers does not tie two that differ."""
    for name, other in network.all_tied_weights_keys.items():
        if name not in files.shapes or other not in files.shapes:
            continue
        num_rows = files.shapes[other][0]
        for first in range(0, num_rows, ROWS_AT_ONCE):
            part = (slice(first, min(first + ROWS_AT_ONCE, num_rows)), *map(slice, files.shapes[other][1:]))
            if not torch.equal(files.read(name, part), files.read(other, part)):
                raise UserError(
                    f"model.path={model.path}: config.json ties {name} to {other}, and the files have different values "
                    "for them; set tie_word_embeddings to false in config.json"
                )
