"""Weights, optimizer state and reference of a sharded network, in a checkpoint. Each rank writes its shards, and any
number of ranks reads them again; no rank holds a whole model.

    trainer.json (counters, adapters)    weights/    optimizer/ (moments, step counters)    reference/ (with a KL)
                                         critic/     critic_optimizer/ (with a critic)
    critic.json (counters of a critic that has ranks of its own; else trainer.json has them)

If the network has adapters, only the adapters are written and read. The format of the folders is in
checkpoint/tensors.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from gcore.checkpoint.tensors import Place, Shard, ShardFiles, assign, shapes
from gcore.models.networks import LORA_A, Adapters
from gcore.training.shards import local_of, part_of
from gcore.types import UserError

NetworkName = Literal["policy", "reference", "critic"]
TrainedName = Literal["policy", "critic"]
REFERENCE = "reference"
# Folders of a checkpoint by network, and the file of counters by the first network of the ranks that write it.
WEIGHTS: dict[NetworkName, str] = {"policy": "weights", "reference": REFERENCE, "critic": "critic"}
OPTIMIZERS: dict[NetworkName, str] = {"policy": "optimizer", "critic": "critic_optimizer"}
ABOUT: dict[TrainedName, str] = {"policy": "trainer.json", "critic": "critic.json"}
MISSING: dict[NetworkName, str] = {
    "reference": "has no reference model: it was saved with algorithm.kl_coef=0; resume with 0 too",
    "critic": "has no critic: it was saved with another algorithm.adv_estimator; resume with that one",
}
Shards = dict[str, list[Shard]]  # by folder


class SavePlan:
    """Which rank writes which shard: ranks may hold copies. Decided once, because it needs a collective."""

    def __init__(self) -> None:
        self._own: dict[frozenset[Any], set[Place]] = {}

    def own(self, held: Mapping[str, Sequence[Shard]], kinds: frozenset[Any] = frozenset()) -> Shards:
        """Of the shards that this rank holds, by folder, those that it writes. `kinds`: changes, on all ranks, when
        there are other shards than before. Collective if it is new."""
        held = {folder: shards for folder, shards in held.items() if shards}
        if kinds not in self._own:
            sizes = {_place(folder, s): s.num_bytes for folder, shards in held.items() for s in shards}
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, sizes)
            self._own[kinds] = assign(gathered, dist.get_rank())
        own = self._own[kinds]
        return {folder: [s for s in shards if _place(folder, s) in own] for folder, shards in held.items()}


def _place(folder: str, shard: Shard) -> Place:
    return f"{folder}/{shard.name}", shard.offset


def shards_of(tensors: Mapping[str, Tensor]) -> list[Shard]:
    """What this rank holds of each tensor, without a copy. It stays what it is if the tensor is moved."""
    found = []
    for name, tensor in tensors.items():
        local = local_of(tensor).detach()
        if local.numel():
            found.append(Shard(name, tuple(tensor.shape), tuple(part.start for part in part_of(tensor)), local))
    return found


def describe(counters: Mapping[str, float], adapters: Adapters | None) -> bytes:
    """The content of trainer.json."""
    kind = {"rank": adapters.rank, "alpha": adapters.alpha} if adapters else None
    return json.dumps({"counters": dict(counters), "adapters": kind}).encode()


def counters_of(folder: Path, first: TrainedName, adapters: Adapters | None = None) -> dict[str, float]:
    """All counters that ranks have saved, and those of a critic, wherever it was. `first`: of the ranks that load.
    UserError if the checkpoint has another kind of weights than this run."""
    files = [json.loads((folder / name).read_text()) for name in ABOUT.values() if (folder / name).exists()]
    if first == "policy":
        _check(folder, files[0]["adapters"], adapters)
    return {name: value for file in files for name, value in file["counters"].items()}


def weights_folder(folder: Path, name: NetworkName) -> Path:
    """The weights of a network."""
    weights = folder / WEIGHTS[name]
    if name in MISSING and not weights.is_dir():
        raise UserError(f"{folder} {MISSING[name]}")
    return weights


@torch.no_grad()
def fill(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    files = ShardFiles(folder)
    for shard in shards_of(tensors):
        files.read(shard)


def _check(folder: Path, kind: Mapping[str, Any] | None, adapters: Adapters | None) -> None:
    """Raise if the checkpoint has another kind of weights: other adapters could be loaded without an error."""
    if (kind is None) != (adapters is None):
        raise UserError(
            f"{folder} holds adapters, and this run trains all weights; resume with the model.lora it was saved with"
            if kind is not None
            else f"{folder} holds all weights, and this run trains adapters; resume without model.lora, or export it "
            "and start a new run from it with model.path"
        )
    if adapters is None or kind is None:
        return
    layers = sorted(n.removesuffix(LORA_A) for n in shapes(folder / WEIGHTS["policy"]) if n.endswith(LORA_A))
    saved = f"rank={kind['rank']}, alpha={kind['alpha']}, {len(layers)} layers"
    expected = f"rank={adapters.rank}, alpha={adapters.alpha}, {len(adapters.layers)} layers"
    if saved != expected or layers != sorted(adapters.layers):
        raise UserError(f"{folder} holds adapters of {saved}; model.lora (rank, alpha, targets) now gives {expected}")
