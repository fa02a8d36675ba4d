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
from gcore.observe.trace import Tracer
from gcore.protocols import Metric, UpdateStats, Weights
from gcore.training import state
from gcore.training.backend import Backend, Snapshot
from gcore.training.compute_rank import ComputeRank, micros_of
from gcore.training.critic import HEAD
from gcore.training.critic_update import CriticUpdate, ranks_of, to_column, to_numpy
from gcore.training.shards import local_of, part_of
from gcore.training.step_advantages import explained_variance, step_targets
from gcore.types import Floats, Key, TrainBatch
from gcore.weights.bucket import unpack_bucket


class CriticRank(ComputeRank):
    """Implements protocols.Critic. The only network of its backend, which the backend calls policy, is the critic."""

    def __init__(
        self, config: Config, make_backend: Callable[[], Backend], rank: int, threads: int, tracer: Tracer
    ) -> None:
        super().__init__(config, make_backend, rank, threads, tracer)
        self.critic = CriticUpdate(config, self.backend, self._data, "policy")
        self._penalties = dict[Key, Floats]()
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
        self._penalties.update(penalties)

    async def update(self, batch: TrainBatch) -> UpdateStats:
        return await self._in_thread(self._update, batch)

    # ---- the compute thread ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _load_policy(self, weights: Weights) -> None:
        """Each rank copies its shards of the tensors that the critic has: it has no head for tokens."""
        tensors, own = unpack_bucket(weights), cast(Mapping[str, torch.Tensor], self.backend.weights())
        for name in own.keys() & tensors.keys():
            if (local := local_of(own[name])).numel():
                local.copy_(tensors[name][part_of(own[name])])
            self._copied.add(name)
        local_of(own[HEAD]).zero_()

    def _begin(self) -> None:
        missing = self.backend.weights().keys() - self._copied - {HEAD}
        assert not (self._config.critic_copies_policy and missing), f"the policy has no {sorted(missing)[:3]}"
        self.backend.begin(reference=False)
        self.critic.reset()
        self._begun = True

    def _prepare(self, batch: TrainBatch) -> None:
        with self._tracer.span("passes", step=batch.step):
            self._data.columns["values"] = self.backend.logprobs("policy", micros_of(batch), self._data)

    def _update(self, batch: TrainBatch) -> UpdateStats:
        with self._tracer.span("update", step=batch.step):
            stats = UpdateStats(metrics=self._fill_returns(batch)) + self.critic.train(batch)
        self._tracer.flush()
        self._data.clear()
        self._penalties.clear()
        self.backend.free_memory(weights=False)
        return stats

    def _fill_returns(self, batch: TrainBatch) -> dict[str, Metric]:
        """Returns metrics, which are equal on all ranks."""
        algorithm, samples, ranks = self._config.algorithm, self._data.samples, ranks_of(self.backend, batch)
        values = to_numpy(self._data.columns["values"], batch.keys)
        advantages = {key: batch.advantages[key] for key in batch.keys}
        penalties = self._penalties if algorithm.kl_per_step else None
        returns = step_targets(samples, advantages, algorithm, ranks, penalties, values).returns
        self._data.columns["returns"] = to_column(returns, self.backend.device)
        masks = {key: samples[key].mask_S for key in batch.keys}
        return {"critic/explained_variance": Metric(explained_variance(returns, values, masks, ranks))}

    def _snapshot(self) -> Snapshot:
        return self.backend.snapshot(self.critic.counters()) if self._begun else Snapshot({}, {}, {})

    def _load(self, folder: Path, begun: bool) -> None:
        self._data.clear()
        self._penalties.clear()
        if begun:  # a warm start has no critic yet
            state.critic_folder(folder)
            self.backend.load(folder, reference=False)
            self.critic.restore(state.critic_counters(folder))
            self._begun = True
