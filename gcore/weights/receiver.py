"""Engine side of a weight update: buckets arrive in order and are checked before any tensor is loaded.

    bucket ──order──> unpack_bucket (checksum) ──names, shapes──> full matrices ───────────────────> tensors to load
                                                            └──> factors of adapters ──base + scale B A──┘

With adapters (model.lora) only their factors arrive. The engine keeps a copy of the base weights from its start and
computes every version from that copy: rounding errors do not accumulate, and a missed update has no lasting effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gcore.models.networks import LORA_A, LORA_B, Adapters, auto_class
from gcore.protocols import Weights
from gcore.types import UserError
from gcore.weights.bucket import unpack_bucket
from gcore.weights.fp8 import all_restored
from gcore.weights.pretrained import WeightFiles, conversions, file_names

CHUNK_BYTES = 2**29  # limit of merged matrices held at a time
Shapes = Mapping[str, tuple[int, ...]]
Loads = Iterator[tuple[dict[str, Tensor], bool]]  # what to write now; True: the last of the update


@dataclass(frozen=True, slots=True)
class Base:
    """Base weights of an engine, in host memory, to which adapters are added: the target matrices, or all weights."""

    adapters: Adapters
    tensors: Mapping[str, Tensor]
    device: torch.device  # where the sums are computed
    dtype: torch.dtype  # of the engine

    def merged(self, factors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The matrices of which both factors are present."""
        for layer in self.adapters.layers:
            if layer + LORA_A in factors and layer + LORA_B in factors:
                name = f"{layer}.weight"
                base, a, b = (
                    tensor.to(self.device, torch.float32)
                    for tensor in (self.tensors[name], factors[layer + LORA_A], factors[layer + LORA_B])
                )
                yield name, self.adapters.merge(base, a, b).to(self.dtype)

    def unpaired(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Factors whose partner has not arrived yet."""
        partner = {LORA_A: LORA_B, LORA_B: LORA_A}
        return {n: t for n, t in factors.items() if n[: -len(LORA_A)] + partner[n[-len(LORA_A) :]] not in factors}


@dataclass(slots=True)
class _Update:
    """An update of which not all buckets have arrived."""

    version: int
    count: int
    next: int = 0
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the tensors that have arrived
    pending: dict[str, Tensor] = field(default_factory=dict)  # arrived, but not loaded yet


class WeightReceiver:
    """`shapes`: of the weights that the engine serves; if empty, the first update defines them. `whole`: the engine
    loads all weights in one call.
    """

    def __init__(self, shapes: Shapes, base: Base | None = None, whole: bool = False) -> None:
        self._shapes = dict(shapes) if base is None else base.adapters.shapes(shapes)
        self._base, self._whole = base, whole
        self._update: _Update | None = None

    @property
    def incomplete(self) -> bool:
        """Some buckets of an update are loaded and others are not: the engine must not decode."""
        return self._update is not None

    def forget_update(self) -> bool:
        """Drop an incomplete update. True: there was one, so the engine has a mix of two versions."""
        was_incomplete, self._update = self.incomplete, None
        return was_incomplete

    @contextmanager
    def receive(self, version: int, weights: Weights, bucket: tuple[int, int]) -> Iterator[Loads]:
        """Yields what to load now: after the last tensors, `version` is served.

        A bucket that does not fit raises ValueError and changes nothing. If loading fails, the update stays incomplete:
        the sender repeats this bucket, or starts again with bucket 0.
        """
        (index, count), update = bucket, self._update
        if index == 0:
            update = _Update(version, count)
        elif update is None or (version, count, index) != (update.version, update.count, update.next):
            due = f"bucket {update.next} of {update.count} of version {update.version}" if update else "bucket 0"
            raise ValueError(f"got bucket {index} of {count} of the weights of version {version}, expected {due}")
        last = index + 1 == count
        tensors = self._checked(version, all_restored(unpack_bucket(weights)), update.shapes.keys() if last else None)
        self._update = update
        yield self._loads({**update.pending, **tensors}, last)
        update.next += 1
        update.shapes |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if last:
            self._shapes, self._update = self._shapes or update.shapes, None
        else:  # copies: the sender may overwrite its memory
            copies = {name: tensor.clone() for name, tensor in tensors.items()} if self._whole or self._base else {}
            update.pending |= copies
            if self._base is not None and not self._whole:
                update.pending = self._base.unpaired(update.pending)

    def _loads(self, tensors: dict[str, Tensor], last: bool) -> Loads:
        if self._whole and not last:
            return
        if self._base is None:
            yield tensors, last
        elif self._whole:
            yield {**self._base.tensors, **dict(self._base.merged(tensors))}, last
        else:
            chunk: dict[str, Tensor] = {}
            for name, tensor in self._base.merged(tensors):
                if sum(t.nbytes for t in chunk.values()) > CHUNK_BYTES:
                    yield chunk, False
                    chunk = {}
                chunk[name] = tensor
            if chunk or last:
                yield chunk, last

    def _checked(self, version: int, tensors: Mapping[str, Tensor], before: Set[str] | None) -> dict[str, Tensor]:
        """The tensors that this engine has, with the right shapes. `before`: names in earlier buckets, given with the
        last bucket: then no name may be missing."""
        if not self._shapes:
            return dict(tensors)
        known = {name: tensor for name, tensor in tensors.items() if name in self._shapes}
        missing = sorted(self._shapes.keys() - known.keys() - before) if before is not None else []
        if missing:
            raise ValueError(f"weights of version {version} lack {missing[:3]} ({len(missing)} names)")
        for name, tensor in known.items():
            if tuple(tensor.shape) != self._shapes[name]:
                raise ValueError(
                    f"weights of version {version}: {name} has shape {tuple(tensor.shape)}, "
                    f"expected {self._shapes[name]}"
                )
        return known


def receiver_in_process(parameters: Mapping[str, Tensor], adapters: Adapters | None) -> WeightReceiver:
    """Of an engine whose parameters these are. With adapters, only their factors arrive: it keeps a copy of the base
    matrices."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if adapters is None:
        return WeightReceiver(shapes)
    names = [f"{layer}.weight" for layer in adapters.layers]
    matrices = {name: parameters[name].detach().to("cpu", copy=True) for name in names}
    first = parameters[names[0]]
    return WeightReceiver(shapes, Base(adapters, matrices, first.device, first.dtype))


# ---- the checkpoint folder that an engine starts from


class FolderWeights:
    """Weights by the names of transformers' network, which trainers send, and as files have them, which libraries load:
    with other names, and stacked tensors in parts.

    FolderWeights(folder, config).as_stored({"model.layers.0.mlp.experts.down_proj": tensor}, last=False)
        -> {"model.layers.0.mlp.experts.0.down_proj.weight": part, ...}"""

    def __init__(self, folder: Path, config: Any = None) -> None:
        """`config`: of the decoder, for a model that transformers does not have."""
        files, network = WeightFiles(folder), _empty_network(folder)
        self.shapes = dict(files.shapes)  # of the parameters in the network, tied ones once; empty: no safetensors
        self.stored = {name: name for name in files.shapes}  # name in the network -> name in the files
        self._folder, self._files, self._network = folder, files.shapes, network
        self._joined = dict[str, Tensor]()  # have arrived, and wait for those that files join them with
        self._frozen = dict[str, Tensor]()  # what no trainer sends, and a sleep may drop
        if network is None:
            if getattr(config, "tie_word_embeddings", False):
                self.shapes.pop("lm_head.weight", None)
            self.shapes = {name: shape for name, shape in self.shapes.items() if not name.endswith(".inv_freq")}
            return
        self.stored = file_names(network, files)
        self.shapes = {n: tuple(p.shape) for n, p in network.named_parameters()} if files.shapes else {}
        buffers = sorted(self.stored[name] for name, _ in network.named_buffers() if name in self.stored)
        self._frozen = {name: files.read(name) for name in buffers}
        network._weight_conversions = conversions(network, files.shapes)

    def as_stored(self, tensors: Mapping[str, Tensor], last: bool) -> dict[str, Tensor]:
        """These tensors as the library loads them; with the `last` ones of an update, those that never change."""
        found = dict(self._frozen) if last else {}
        for name, tensor in tensors.items():
            parts = {self.stored[name]: tensor} if name in self.stored else self._parts(name, tensor)
            if parts is None:
                self._joined[name] = tensor.clone()  # the sender may overwrite its memory
            else:
                found |= parts
        if last and self._joined:
            found |= self._reverted(self._joined)
            self._joined = {}
        return found

    def _parts(self, name: str, tensor: Tensor) -> Mapping[str, Tensor] | None:
        """Of a tensor that transformers makes from those of files. None: files have it joined with others."""
        if self._network is None:
            return {name: tensor}
        parts = self._reverted({name: tensor})
        shapes = [self._files.get(part, tuple(parts[part].shape)) for part in parts]
        if shapes == [tuple(part.shape) for part in parts.values()]:
            return parts
        sizes = [shape[0] for shape in shapes]
        if sum(sizes) == len(tensor):  # transformers splits evenly what was joined from parts of several sizes
            return dict(zip(parts, tensor.split(sizes), strict=True))
        return None

    def _reverted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._network, tensors))

    def base(self, adapters: Adapters | None, device: str, dtype: torch.dtype, whole: bool = False) -> Base | None:
        """With adapters, the weights that they are added to; all weights if `whole`. Without adapters, None."""
        if adapters is None:
            return None
        matrices = {f"{layer}.weight" for layer in adapters.layers}
        files = WeightFiles(self._folder)
        parts = files.shapes.keys() - set(self.stored.values()) if whole else set()  # of stacked tensors
        names = (set(self.shapes) if whole else matrices) & self.stored.keys()
        tensors = {name: files.read(self.stored.get(name, name)) for name in sorted(names | parts)}
        if missing := sorted(matrices - tensors.keys()):
            raise UserError(
                f"model.lora: {self._folder} has no safetensors with {missing[0]} ({len(missing)} in all), which "
                "adapters need"
            )
        return Base(adapters, tensors, torch.device(device), dtype)


def _empty_network(folder: Path) -> Any:
    """Without memory. None: transformers does not have it."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]

    try:
        # vLLM registers configurations of its own, with which transformers' networks cannot always be built
        found, _ = transformers.PreTrainedConfig.get_config_dict(str(folder), local_files_only=True)
        named = found["model_type"]
        kind = getattr(transformers, CONFIG_MAPPING_NAMES.get(named, "AutoConfig"))
        config = kind.from_pretrained(str(folder), local_files_only=True)
        with torch.device("meta"):
            return auto_class(config).from_config(config)
    except (OSError, ValueError, KeyError):
        return None
