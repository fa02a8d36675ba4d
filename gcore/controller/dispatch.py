"""Sends samples to the trainer ranks, calls the ranks, and starts the weight update of the engines.

    samples ──all_gather of metadata──> layout ──> push to the ranks (rank_group.py)
    calls of all ranks (prepare, update, load, ...), each by one controller; all_gather of the answers
    new weights ──started by controller 0──> engines; they sleep while the trainer works and wake for the update

Each sample goes directly from its controller to the rank that trains on it. A critic with ranks of its own
(placement.critic) has its own layout: each sample also goes to a critic rank, both train at the same time, and what
one of them needs of the other (values, penalties of the KL) goes through the controller of the sample.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path

from gcore.clients import CriticClient, EngineClient, TrainerClient
from gcore.config.tree import Config
from gcore.controller.rank_group import C, RankGroup
from gcore.cost.workload import CostModel
from gcore.generation.pool import EnginePool
from gcore.modalities.table import kind_of
from gcore.observe.links import Link, Links, Reach
from gcore.placement.replica_switch import ReplicaSwitch
from gcore.preparation.samples import meta_of
from gcore.preparation.step_times import StepTimes
from gcore.protocols import Group, Metric, TrainerInfo, UpdateStats, add_metrics
from gcore.types import Floats, Key, ObjectiveName, Sample, SampleMeta, Topology, TrainBatch, Written
from gcore.weights.transfer import WeightTransfer, copy_policy


class Dispatcher:
    """`sleep_level`: of the engines while the trainer works, in placement modes without slots; 0: they stay awake.
    `topology`: of the trainer ranks; default: each is a data-parallel rank. `critics`: ranks of the critic, if it has
    its own. `links`: to the trainer ranks and to the critic ranks."""

    def __init__(
        self,
        config: Config,
        group: Group,
        engines: EnginePool,
        trainers: Sequence[TrainerClient],
        sleep_level: int = 0,
        topology: Topology | None = None,
        links: tuple[Links, Links] | None = None,
        critics: Sequence[CriticClient] = (),
    ) -> None:
        links = links or (Links(), Links())
        self._config, self._group, self._engines = config, group, engines
        context = config.training.context_parallel
        self._trainers = RankGroup("trainer", trainers, group, config, topology, links[0], context)
        self._critics: RankGroup[CriticClient] | None = None
        if critics:  # in a group of its own: it is called at the same time as the trainer
            self._critics = RankGroup("critic", critics, group.subgroup(), config, links=links[1])
        self.transfer = WeightTransfer(trainers)
        self._sleeps, self._switch = (
            sleep_level > 0,
            ReplicaSwitch(engines.replicas, sleep_level, on_death=engines.mark_dead),
        )
        self._open(TrainerInfo(num_parameters=1, hidden_size=128), CostModel(crossover=768.0))  # until `open`
        # Of the current step: metadata of all samples, keys of this controller's, batches of the critic ranks.
        self._metas: Sequence[SampleMeta] = ()
        self._own: Collection[Key] = ()
        self._critic_batches: list[TrainBatch] = []
        self.balance_metrics: dict[str, float] = {}  # controller 0, of the last update: idle shares, seconds per token
        self.version = 0  # of the weights that the engines serve

    async def open(self) -> TrainerInfo:
        """Call once before the first dispatch, on every controller: it makes the cost model of the layout."""
        info = await self._trainers.open()
        if self._critics is not None:
            await self._critics.open()
        found = await self._group.all_gather("cost model", kind_of(self._config).cost_model(info))
        self._open(info, found[0])  # every controller must compute the same layout
        return info

    def _open(self, info: TrainerInfo, cost: CostModel) -> None:
        self._cost, self._times = cost, StepTimes(cost, info)
        self._engines.cost_of = cost.of  # requests are routed by the same costs

    @property
    def sleep_metrics(self) -> dict[str, float]:
        """Seconds and gigabytes of the last sleep and wake of the engines."""
        return self._switch.metrics

    async def dispatch_samples(
        self, step: int, samples: Sequence[Sample], objective: ObjectiveName = "policy"
    ) -> tuple[list[SampleMeta], list[TrainBatch]]:
        """Compute the layout and push each sample to the rank that trains on it. Only metadata is gathered. Returns the
        batches of the trainer's data-parallel ranks."""
        gathered = await self._group.all_gather(f"samples of step {step}", [meta_of(s) for s in samples])
        metas = [meta for part in gathered for meta in part]
        if not metas:
            return metas, []
        by_key = {sample.key: sample for sample in samples}
        batches = await self._trainers.lay_out(step, metas, objective, self._cost)
        pushes = [self._trainers.push(batches, by_key)]
        if self._critics is not None and objective == "policy":
            self._critic_batches = await self._critics.lay_out(step, metas, objective, self._cost)
            pushes.append(self._critics.push(self._critic_batches, by_key))
        self._metas, self._own = metas, by_key.keys()
        await asyncio.gather(*pushes)
        await self._group.barrier(f"samples of step {step} at their ranks")
        return metas, batches

    async def begin(self) -> None:
        await self._trainers.on_all("begin", lambda trainer, _: trainer.begin())
        if self._critics is not None:
            if self._config.critic_copies_policy and self._group.rank == 0:
                await copy_policy(self._trainers.clients, self._critics.clients)
            await self._group.barrier("policy at the critic ranks")
            await self._critics.on_all("begin", lambda critic, _: critic.begin())

    async def compute_logprobs(self, batches: Sequence[TrainBatch]) -> list[Mapping[Key, float]]:
        """And values. Arguments of this method and of `update` are lists by data-parallel rank, results are lists by
        rank."""
        prepare = self._trainers.on_all("prepare", lambda trainer, d: trainer.prepare(batches[d]))
        if self._critics is None or batches[0].objective != "policy":
            return await prepare
        own_batches = self._critic_batches
        kl, _ = await asyncio.gather(prepare, self._critics.on_all("prepare", lambda c, d: c.prepare(own_batches[d])))
        await self._exchange(self._trainers, batches, self._critics, own_batches)
        return kl

    async def _exchange(
        self,
        trainers: RankGroup[TrainerClient],
        batches: Sequence[TrainBatch],
        critics: RankGroup[CriticClient],
        critic_batches: Sequence[TrainBatch],
    ) -> None:
        """Of this controller's samples: values to the trainer ranks, penalties of the KL to the critic ranks."""

        async def values() -> None:
            found = await _read(critics, critic_batches, self._own, lambda critic, keys: critic.values(keys))
            await _give(trainers, batches, found, lambda trainer, part: trainer.take_values(part))

        async def penalties() -> None:
            if self._config.algorithm.kl_per_step:
                found = await _read(trainers, batches, self._own, lambda trainer, keys: trainer.penalties(keys))
                await _give(critics, critic_batches, found, lambda critic, part: critic.take_penalties(part))

        await asyncio.gather(values(), penalties())

    async def update(self, batches: Sequence[TrainBatch]) -> list[UpdateStats]:
        """Policy and critic. The critic's metrics are those of the first rank."""
        update = self._trainers.on_all("update", lambda trainer, d: trainer.update(batches[d]))
        if self._critics is None or batches[0].objective != "policy":
            stats = await update
        else:
            advantages = {key: value for batch in batches for key, value in batch.advantages.items()}
            filled = [
                dataclasses.replace(batch, advantages={key: advantages[key] for key in batch.keys})
                for batch in self._critic_batches
            ]
            stats, found = await asyncio.gather(
                update, self._critics.on_all("update", lambda critic, d: critic.update(filled[d]))
            )
            metrics = add_metrics(stats[0].metrics, *(each.metrics for each in found))
            stats[0] = dataclasses.replace(stats[0], metrics=metrics)
        if self._group.rank == 0:  # which records them
            first_ranks = [self._trainers.topology.ranks_of(d)[0] for d in range(len(batches))]
            self.balance_metrics = self._times.row(batches, self._metas, [stats[rank] for rank in first_ranks])
        return stats

    async def evaluate(self, batches: Sequence[TrainBatch]) -> dict[str, Metric]:
        """The metrics of dispatched samples, without an update; those of all ranks together."""
        found = await self._trainers.on_all("evaluate", lambda trainer, d: trainer.evaluate(batches[d]))
        return add_metrics(*found)  # ranks with the same samples have the same metrics

    def take_links(self) -> Counter[tuple[Link, Reach]]:
        """Bytes that this controller has sent to ranks since the last call."""
        return sum((ranks.links.take() for ranks in self._all_ranks), Counter())

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def _all_ranks(self) -> Sequence[RankGroup[TrainerClient] | RankGroup[CriticClient]]:
        return [self._trainers] if self._critics is None else [self._trainers, self._critics]

    async def snapshot(self) -> int:
        """All ranks start to copy their state; returns the bytes of all."""
        return sum([await ranks.snapshot() for ranks in self._all_ranks])

    async def write(self, folder: Path) -> list[Written]:
        """The ranks of this controller write their snapshots. Not a collective: it runs beside other calls."""
        found = await asyncio.gather(*(ranks.write(folder) for ranks in self._all_ranks))
        return [written for part in found for written in part]

    async def abandon(self) -> None:
        """The ranks of this controller drop their snapshots. Not a collective."""
        await asyncio.gather(*(ranks.abandon() for ranks in self._all_ranks))

    async def load(self, folder: Path, begun: bool) -> None:
        for ranks in self._all_ranks:
            await ranks.load(folder, begun)

    @property
    def topology(self) -> dict[str, int]:
        """Numbers of processes, for the manifest of a checkpoint."""
        topology = self._trainers.topology
        return {
            "controllers": self._group.size,
            "trainers": len(self._trainers.clients),
            "tensor_parallel": topology.tensor,
            **({"pipeline_parallel": topology.pipeline} if topology.pipeline > 1 else {}),
            **({"critics": len(self._critics.clients)} if self._critics else {}),
            "engines": len(self._engines.replicas),
        }

    # ---- engines --------------------------------------------------------------------------------------------------

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


async def _read(
    ranks: RankGroup[C],
    batches: Sequence[TrainBatch],
    own: Collection[Key],
    read: Callable[[C, list[Key]], Awaitable[Mapping[Key, Floats]]],
) -> dict[Key, Floats]:
    """A column of the samples `own`, each from one of the ranks that have it."""
    rank_of = {key: ranks.topology.ranks_of(d)[0] for d, batch in enumerate(batches) for key in batch.keys}
    wanted: dict[int, list[Key]] = {}
    for key in own:
        wanted.setdefault(rank_of[key], []).append(key)
    found = await asyncio.gather(*(read(ranks.clients[rank], keys) for rank, keys in wanted.items()))
    return {key: values for part in found for key, values in part.items()}


async def _give(
    ranks: RankGroup[C],
    batches: Sequence[TrainBatch],
    column: Mapping[Key, Floats],
    give: Callable[[C, dict[Key, Floats]], Awaitable[None]],
) -> None:
    """A column to all ranks that have the samples."""
    calls = []
    for data_rank, batch in enumerate(batches):
        if part := {key: column[key] for key in batch.keys if key in column}:
            for rank in ranks.topology.ranks_of(data_rank):
                ranks.links.add("samples", rank, sum(values.nbytes for values in part.values()))
                calls.append(give(ranks.clients[rank], part))
    await asyncio.gather(*calls)
