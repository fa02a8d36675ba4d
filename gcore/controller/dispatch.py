"""Sends samples to the trainer ranks, calls the ranks, and starts the weight update of the engines.

    samples ──layout (all_gather of metadata)──> push to the ranks ──> calls of all ranks (prepare, update, load, ...)
    new weights ──started by controller 0──> engines; they sleep while the trainer works and wake for the update

Every controller computes the same layout from the gathered metadata. Each sample goes directly from its controller to
the rank that trains on it. Controller d mod N calls the ranks of data-parallel rank d.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from gcore.clients import EngineClient, TrainerClient
from gcore.config.tree import Config
from gcore.generation.pool import EnginePool
from gcore.placement.replica_switch import ReplicaSwitch
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import meta_of
from gcore.preparation.step_times import StepTimes
from gcore.preparation.workload import CostModel
from gcore.protocols import Group, TrainerInfo, UpdateStats
from gcore.simulate.shapes import model_shape
from gcore.types import Key, Sample, SampleMeta, TrainBatch, UserError, Written
from gcore.weights.transfer import WeightTransfer

T = TypeVar("T")


class Dispatcher:
    """`sleep_level`: of the engines while the trainer works, in placement modes without slots; 0: they stay awake.
    `tensor_parallel`: number of consecutive ranks that compute the same samples together: a data-parallel rank."""

    def __init__(
        self,
        config: Config,
        group: Group,
        engines: EnginePool,
        trainers: Sequence[TrainerClient],
        sleep_level: int = 0,
        tensor_parallel: int = 1,
    ) -> None:
        self._config, self._group, self._engines, self._trainers = config, group, engines, trainers
        self._transfer = WeightTransfer(trainers)
        self._sleeps, self._switch = sleep_level > 0, ReplicaSwitch(engines.replicas, sleep_level)
        self._mine = [r for r in range(len(trainers)) if r // tensor_parallel % group.size == group.rank]
        self._open(TrainerInfo(num_parameters=1, hidden_size=128), CostModel(crossover=768.0))  # until `open`
        self._metas: Sequence[SampleMeta] = ()
        self.balance_metrics: dict[str, float] = {}  # of the last update: idle shares, seconds per token
        self._tensor_parallel, self._bytes_out = tensor_parallel, 0
        self.version = 0  # of the weights that the engines serve

    async def open(self) -> TrainerInfo:
        """Call once before the first dispatch, on every controller: it makes the cost model of the layout."""
        info = await self._trainers[0].info()
        found = await self._group.all_gather("cost model", cost_model(self._config, info))
        self._open(info, found[0])  # every controller must compute the same layout
        return info

    def _open(self, info: TrainerInfo, cost: CostModel) -> None:
        self._info, self._cost, self._times = info, cost, StepTimes(cost, info)

    @property
    def sleep_metrics(self) -> dict[str, float]:
        """Seconds and gigabytes of the last sleep and wake of the engines."""
        return self._switch.metrics

    async def dispatch_samples(
        self, step: int, samples: Sequence[Sample], objective: Literal["policy", "imitation"] = "policy"
    ) -> tuple[list[SampleMeta], list[TrainBatch]]:
        """Compute the layout and push each sample to the rank that trains on it. Only metadata is gathered."""
        gathered = await self._group.all_gather(f"samples of step {step}", [meta_of(s) for s in samples])
        metas = [meta for part in gathered for meta in part]
        if not metas:
            return metas, []
        batches = make_layout(
            metas,
            step=step,
            num_ranks=len(self._trainers) // self._tensor_parallel,
            cost=self._cost,
            objective=objective,
            mini_batches=self._config.algorithm.mini_batches if objective == "policy" else 1,
            max_tokens=self._config.training.max_tokens_per_gpu,
            padded=self._info.padded,
            sharded=self._info.sharded,
            max_context=self._config.training.context_parallel,
        )
        self._metas = metas
        by_key = {sample.key: sample for sample in samples}
        await asyncio.gather(*(self._push(rank, batch, by_key) for rank, batch in enumerate(batches)))
        await self._group.all_gather(f"samples of step {step} at their ranks", None)
        return metas, batches

    async def _push(self, rank: int, batch: TrainBatch, by_key: dict[tuple[int, int], Sample]) -> None:
        """`rank`: a data-parallel rank. All of its trainer ranks get the samples."""
        own_samples = [by_key[key] for key in batch.keys if key in by_key]
        if own_samples:
            size, step_bytes = self._tensor_parallel, 5  # logprob 4, mask 1
            self._bytes_out += size * sum(s.content.nbytes + step_bytes * s.num_steps for s in own_samples)
            ranks = self._trainers[rank * size : (rank + 1) * size]
            await asyncio.gather(*(trainer.push(self._group.rank, own_samples) for trainer in ranks))

    def take_bytes_out(self) -> int:
        """Bytes that were pushed since the last call."""
        num_bytes, self._bytes_out = self._bytes_out, 0
        return num_bytes

    async def begin(self) -> None:
        await self._on_ranks("begin", lambda trainer, rank: trainer.begin())

    async def compute_logprobs(self, batches: Sequence[TrainBatch]) -> list[Mapping[Key, float]]:
        """Arguments of this method and of `update` are lists by data-parallel rank, results are lists by rank."""
        return await self._on_ranks(
            "prepare", lambda trainer, rank: trainer.prepare(batches[rank // self._tensor_parallel])
        )

    async def update(self, batches: Sequence[TrainBatch]) -> list[UpdateStats]:
        stats = await self._on_ranks(
            "update", lambda trainer, rank: trainer.update(batches[rank // self._tensor_parallel])
        )
        self.balance_metrics = self._times.row(batches, self._metas, stats[:: self._tensor_parallel])
        return stats

    async def snapshot(self) -> int:
        """All ranks start to copy their state; returns the bytes of all."""
        return sum(await self._on_ranks("snapshot", lambda trainer, rank: trainer.snapshot()))

    async def write(self, folder: Path) -> list[Written]:
        """The ranks of this controller write their snapshots. Not a collective: it runs beside other calls."""
        return await asyncio.gather(*(self._trainers[r].write(str(folder)) for r in self._mine))

    async def abandon(self) -> None:
        """The ranks of this controller drop their snapshots. Not a collective."""
        await asyncio.gather(*(self._trainers[r].abandon() for r in self._mine))

    @property
    def topology(self) -> dict[str, int]:
        """Numbers of processes, for the manifest of a checkpoint."""
        return {
            "controllers": self._group.size,
            "trainers": len(self._trainers),
            "tensor_parallel": self._tensor_parallel,
            "engines": len(self._engines.replicas),
        }

    async def load(self, folder: Path, begun: bool) -> None:
        await self._on_ranks("load", lambda trainer, rank: trainer.load(str(folder), begun))

    async def _on_ranks(self, name: str, call: Callable[[TrainerClient, int], Awaitable[T]]) -> list[T]:
        """Each controller calls its own ranks. Returns the answers of all ranks, by rank, on every controller.
        `name`: of the collective."""
        answers = await asyncio.gather(*(call(self._trainers[r], r) for r in self._mine))
        gathered: list[dict[int, T]] = await self._group.all_gather(name, dict(zip(self._mine, answers, strict=True)))
        by_rank = {rank: answer for part in gathered for rank, answer in part.items()}
        return [by_rank[r] for r in range(len(self._trainers))]

    async def sleep_engines(self) -> None:
        """After the rollout, engines free their memory for the trainer until `update_weights`. Requests of unfinished
        groups queue and continue with the new weights."""
        if not self._sleeps:
            return
        await self._engines.pause()
        await self._group.all_gather("engines idle", None)
        if self._group.rank == 0:
            await self._switch.sleep(self._engines.alive(), skip_dead=True)
        await self._group.all_gather("engines asleep", None)

    async def update_weights(self, version: int, engines: Mapping[int, EngineClient] | None = None) -> None:
        """Controller 0 starts the transfer; weights go directly from trainer ranks to engines. `engines`: those that
        serve the next rollout; default: all. Returns on every controller when they serve `version`."""
        if self._group.rank == 0:
            # With slots, placement puts engines to sleep and wakes them; then this switch has nothing to wake.
            async with self._switch.waking(self._engines.alive):
                alive = self._engines.alive()
                await self._transfer.send({i: e for i, e in alive.items() if engines is None or i in engines}, version)
        await self._group.all_gather(f"weights of version {version}", None)
        self.version = version
        self._engines.resume()


def cost_model(config: Config, info: TrainerInfo) -> CostModel:
    """Of the policy's own shape. A model whose shape is not known has that of a dense decoder of its width."""
    try:
        cost = model_shape(config.model, "model.path").cost
    except UserError:
        return CostModel(crossover=6.0 * info.hidden_size)
    return cost.recomputed() if config.training.activation_checkpointing is True else cost
