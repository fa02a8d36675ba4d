"""A critic rank: a process of a critic that has ranks of its own (placement.critic). It trains beside the policy.

    push (samples) ──> prepare: values ──controllers──> trainer ranks: advantages ──> policy
                       trainer ranks: penalties of the KL ──controllers──> returns ──> update of the critic

Both sides compute advantages and returns by the same pure function (step_advantages.py), so one exchange per step is
enough. Values and penalties take the way of the samples: through the controller that made the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from gcore.config.tree import Config
from gcore.models.networks import SCORE
from gcore.observe.trace import Tracer
from gcore.protocols import UpdateStats, Weights
from gcore.training.backend import Backend, Snapshot
from gcore.training.rank import ComputeRank, Trained, micros_of
from gcore.training.shards import local_of, part_of
from gcore.types import Floats, Key, TrainBatch
from gcore.weights.bucket import unpack_bucket


class CriticRank(ComputeRank):
    """Implements protocols.CriticTrainer. The critic is its only network."""

    def __init__(
        self, config: Config, make_backend: Callable[[], Backend], rank: int, threads: int, tracer: Tracer
    ) -> None:
        super().__init__(config, make_backend, rank, threads, tracer, ("critic",))
        self._received = dict[Key, Floats]()  # penalties, from trainer ranks
        self._begun = False  # before that, its weights are not part of a checkpoint
        self._copied = set[str]()  # names of the policy's weights

    async def load_policy(self, weights: Weights) -> None:
        await self._in_thread(self._load_policy, weights)

    async def begin(self) -> None:
        await self._in_thread(self._begin)

    async def prepare(self, batch: TrainBatch) -> None:
        await self._in_thread(self._prepare, batch)

    async def values(self, keys: Sequence[Key]) -> Mapping[Key, Floats]:
        column = self._data.columns["values"]
        return await self._in_thread(lambda: {key: column[key].cpu().numpy() for key in keys})

    async def take_penalties(self, penalties: Mapping[Key, Floats]) -> None:
        self._received.update(penalties)

    async def update(self, batch: TrainBatch) -> UpdateStats:
        return await self._in_thread(self._update, batch)

    # ---- the compute thread ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _load_policy(self, weights: Weights) -> None:
        """Each rank copies its shards of the tensors that the critic has: it has no head for tokens."""
        tensors, own = unpack_bucket(weights), cast(Mapping[str, torch.Tensor], self.backend.weights("critic"))
        for name in own.keys() & tensors.keys():
            if (local := local_of(own[name])).numel():
                local.copy_(tensors[name][part_of(own[name])])
            self._copied.add(name)
        local_of(own[SCORE]).zero_()

    def _begin(self) -> None:
        missing = self.backend.weights("critic").keys() - self._copied - {SCORE}
        assert not (self._config.critic_copies_policy and missing), f"the policy has no {sorted(missing)[:3]}"
        self.backend.begin(["critic"])
        self.trained = {"critic": Trained()}
        self._begun = True

    def _prepare(self, batch: TrainBatch) -> None:
        with self._tracer.span("passes", step=batch.step):
            self._data.columns["values"] = self.backend.outputs("critic", micros_of(batch), self._data)

    def _update(self, batch: TrainBatch) -> UpdateStats:
        with self._tracer.span("update", step=batch.step):
            stats = UpdateStats(metrics=self._fill_targets(batch)) + self._train_critic(batch)
        self._tracer.flush()
        self._data.clear()
        self._received.clear()
        self.backend.free_memory(weights=False)
        return stats

    def _penalties(self, keys: Sequence[Key]) -> Mapping[Key, Floats]:
        return self._received

    def _snapshot(self) -> Snapshot:
        return super()._snapshot() if self._begun else Snapshot({}, {}, {})

    def _load(self, folder: Path, begun: bool) -> None:
        self._received.clear()
        self._data.clear()
        if begun:  # a warm start has no critic yet
            self._restore(folder, ["critic"])
            self._begun = True
