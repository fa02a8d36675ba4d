"""Sends samples to the trainer ranks, calls the ranks, and starts the weight update of the engines.

    samples ──all_gather of metadata──> layout, made by one controller ──> push to the ranks
    calls of all ranks (prepare, update, load, ...), each by one controller; all_gather of the answers
    new weights ──started by controller 0──> engines; they sleep while the trainer works and wake for the update

One controller, another one in every step, computes the layout from the gathered metadata and sends it to the others:
it takes as long as the other control work of hundreds of samples. With more than 256 ranks, several controllers make
parts of it. Each sample goes directly from its controller to the rank that trains on it. Controller d mod N calls the
ranks of data-parallel rank d.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from gcore.clients import EngineClient, TrainerClient
from gcore.config.tree import Config
from gcore.generation.pool import EnginePool
from gcore.observe.links import Links
from gcore.placement.replica_switch import ReplicaSwitch
from gcore.preparation.balance import join_parts, make_layout, num_parts
from gcore.preparation.samples import meta_of
from gcore.preparation.step_times import StepTimes
from gcore.preparation.workload import CostModel
from gcore.protocols import Group, Metric, TrainerInfo, UpdateStats, add_metrics
from gcore.simulate.shapes import model_shape
from gcore.types import Key, ObjectiveName, Sample, SampleMeta, Topology, TrainBatch, UserError, Written
from gcore.weights.transfer import WeightTransfer

T = TypeVar("T")


class Dispatcher:
    """`sleep_level`: of the engines while the trainer works, in placement modes without slots; 0: they stay awake.
    `topology`: which ranks compute the same samples together: a data-parallel rank. Default: each alone."""

    def __init__(
        self,
        config: Config,
        group: Group,
        engines: EnginePool,
        trainers: Sequence[TrainerClient],
        sleep_level: int = 0,
        topology: Topology | None = None,
        links: Links | None = None,
    ) -> None:
        self.links = links or Links()
        self._config, self._group, self._engines, self._trainers = config, group, engines, trainers
        self.transfer = WeightTransfer(trainers)
        self._sleeps, self._switch = (
            sleep_level > 0,
            ReplicaSwitch(engines.replicas, sleep_level, on_death=engines.mark_dead),
        )
        self._topology = topology = topology or Topology(len(trainers))
        self._mine = [r for r in range(len(trainers)) if topology.data_rank(r) % group.size == group.rank]
        self._open(TrainerInfo(num_parameters=1, hidden_size=128), CostModel(crossover=768.0))  # until `open`
        self._metas: Sequence[SampleMeta] = ()
        self.balance_metrics: dict[str, float] = {}  # controller 0, of the last update: idle shares, seconds per token
        self.version = 0  # of the weights that the engines serve

    async def open(self) -> TrainerInfo:
        """Call once before the first dispatch, on every controller: it makes the cost model of the layout."""
        info = await self._trainers[0].info()
        found = await self._group.all_gather("cost model", cost_model(self._config, info))
        self._open(info, found[0])  # every controller must compute the same layout
        return info

    def _open(self, info: TrainerInfo, cost: CostModel) -> None:
        self._info, self._cost, self._times = info, cost, StepTimes(cost, info)
        self._engines.cost_of = cost.of  # requests are routed by the same costs

    @property
    def sleep_metrics(self) -> dict[str, float]:
        """Seconds and gigabytes of the last sleep and wake of the engines."""
        return self._switch.metrics

    async def dispatch_samples(
        self, step: int, samples: Sequence[Sample], objective: ObjectiveName = "policy"
    ) -> tuple[list[SampleMeta], list[TrainBatch]]:
        """Compute the layout and push each sample to the rank that trains on it. Only metadata is gathered."""
        gathered = await self._group.all_gather(f"samples of step {step}", [meta_of(s) for s in samples])
        metas = [meta for part in gathered for meta in part]
        if not metas:
            return metas, []
        batches = await self._lay_out(step, metas, objective)
        self._metas = metas
        by_key = {sample.key: sample for sample in samples}
        await asyncio.gather(*(self._push(rank, batch, by_key) for rank, batch in enumerate(batches)))
        await self._group.barrier(f"samples of step {step} at their ranks")
        return metas, batches

    async def _lay_out(self, step: int, metas: Sequence[SampleMeta], objective: ObjectiveName) -> list[TrainBatch]:
        """The same layout on every controller. Part i is made by controller step + i."""
        size, num_ranks = self._group.size, self._topology.data_parallel
        max_context, batches = self._config.training.context_parallel, list[TrainBatch]()
        count = num_parts(num_ranks, max_context)
        parts_of = [[part for part in range(count) if (step + part) % size == rank] for rank in range(size)]
        if parts_of[self._group.rank]:
            batches = make_layout(
                metas,
                step=step,
                num_ranks=num_ranks,
                cost=self._cost,
                objective=objective,
                together=objective != "imitation" and self._config.needs.pairs,
                mini_batches=self._config.algorithm.mini_batches if objective != "imitation" else 1,
                max_tokens=self._config.training.max_tokens_per_gpu,
                padded=self._info.padded,
                sharded=self._info.sharded,
                max_context=max_context,
                parts=parts_of[self._group.rank],
            )
        if size == 1:
            return batches
        gathered: list[list[TrainBatch]] = await self._group.all_gather(f"layout of step {step}", batches)
        made, width = dict[int, list[TrainBatch]](), num_ranks // count
        for parts, found in zip(parts_of, gathered, strict=True):
            made |= {part: found[i * width : (i + 1) * width] for i, part in enumerate(parts)}
        return join_parts([made[part] for part in range(count)])

    async def _push(self, rank: int, batch: TrainBatch, by_key: dict[tuple[int, int], Sample]) -> None:
        """`rank`: a data-parallel rank. All of its trainer ranks get the samples."""
        own_samples = [by_key[key] for key in batch.keys if key in by_key]
        if own_samples:
            ranks, step_bytes = self._topology.ranks_of(rank), 5  # logprob 4, mask 1
            num_bytes = sum(s.content.nbytes + step_bytes * s.num_steps for s in own_samples)
            for each in ranks:
                self.links.add("samples", each, num_bytes)
            await asyncio.gather(*(self._trainers[each].push(self._group.rank, own_samples) for each in ranks))

    async def begin(self) -> None:
        await self._on_ranks("begin", lambda trainer, rank: trainer.begin())

    async def compute_logprobs(self, batches: Sequence[TrainBatch]) -> list[Mapping[Key, float]]:
        """Arguments of this method and of `update` are lists by data-parallel rank, results are lists by rank."""
        return await self._on_ranks(
            "prepare", lambda trainer, rank: trainer.prepare(batches[self._topology.data_rank(rank)])
        )

    async def update(self, batches: Sequence[TrainBatch]) -> list[UpdateStats]:
        stats = await self._on_ranks(
            "update", lambda trainer, rank: trainer.update(batches[self._topology.data_rank(rank)])
        )
        if self._group.rank == 0:  # which records them
            self.balance_metrics = self._times.row(
                batches, self._metas, [stats[self._topology.ranks_of(r)[0]] for r in range(len(batches))]
            )
        return stats

    async def evaluate(self, batches: Sequence[TrainBatch]) -> dict[str, Metric]:
        """The metrics of dispatched samples, without an update; those of all ranks together."""
        found = await self._on_ranks(
            "evaluate", lambda trainer, rank: trainer.evaluate(batches[self._topology.data_rank(rank)])
        )
        return add_metrics(*found)  # ranks with the same samples have the same metrics

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
            "tensor_parallel": self._topology.tensor,
            **({"pipeline_parallel": self._topology.pipeline} if self._topology.pipeline > 1 else {}),
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
        await self._group.barrier("engines idle")
        if self._group.rank == 0:
            await self._switch.sleep(self._engines.alive(), skip_dead=True)
        await self._group.barrier("engines asleep")

    async def update_weights(self, version: int, engines: Mapping[int, EngineClient] | None = None) -> None:
        """Controller 0 starts the transfer; weights go directly from trainer ranks to engines. `engines`: those that
        serve the next rollout; default: all. Returns on every controller when they serve `version`."""
        missed: list[str] = []  # engines that died or could not be called: they do not have the weights
        if self._group.rank == 0 and self._engines.replicas:
            # With slots, placement puts engines to sleep and wakes them; then this switch has nothing to wake.
            async with self._switch.waking(self._engines.alive):
                wanted = {i: e for i, e in self._engines.alive().items() if engines is None or i in engines}
                served = await self.transfer.send(wanted, version)
                for engine in wanted.values():
                    if engine.name not in served:
                        self._engines.mark_dead(engine.name)
            alive = self._engines.alive()
            missed = [engine.name for i, engine in enumerate(self._engines.replicas) if i not in alive]
        for name in (await self._group.all_gather(f"weights of version {version}", missed))[0]:
            self._engines.mark_dead(name)  # until it is restarted
        self.version = version
        self._engines.resume()


def cost_model(config: Config, info: TrainerInfo) -> CostModel:
    """Of the policy's own shape. A model whose shape is not known has that of a dense decoder of its width."""
    if config.generation.denoising is not None:
        return CostModel(crossover=12.0 * info.hidden_size, causal=False)  # 12 matrices of this width in a layer
    try:
        cost = model_shape(config.model, "model.path").cost
    except UserError:
        return CostModel(crossover=6.0 * info.hidden_size)
    return cost.recomputed() if config.training.activation_checkpointing is True else cost
