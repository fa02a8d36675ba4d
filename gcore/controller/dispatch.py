"""Sends samples to the trainer ranks, and calls the ranks.

    samples ──all_gather of metadata──> layout, made by one controller ──> a batch per data-parallel rank ──> push
    calls of all ranks (prepare, update, load, ...), each by one controller; all_gather of the answers

Each sample goes directly from its controller to the rank that trains on it. A critic with ranks of its own
(placement.critic) has its own layout: each sample also goes to a critic rank, both train at the same time, and what
one of them needs of the other (values, penalties of the KL) goes through the controller of the sample.

One controller, another one in every step, computes the layout from the gathered metadata and sends it to the others:
it takes as long as the other control work of hundreds of samples. With more than 256 ranks, several controllers make
parts of it. Controller d mod N calls the ranks of data-parallel rank d.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from gcore.clients import TrainerClient
from gcore.config.tree import Config
from gcore.cost.costs import peak_flops
from gcore.cost.workload import CostModel
from gcore.modalities.table import kind_of
from gcore.observe.links import Link, Links, LinkScope
from gcore.preparation.balance import join_parts, make_layout, num_parts
from gcore.preparation.samples import metas_of
from gcore.preparation.step_times import StepTimes
from gcore.protocols import ControllerGroup, ExchangedColumn, Metric, TrainerInfo, UpdateStats, add_metrics
from gcore.types import Floats, Key, ObjectiveName, Sample, SampleMeta, Topology, TrainBatch
from gcore.weights.transfer import copy_policy

T = TypeVar("T")
STEP_BYTES = 5  # of a sample, beside its content: logprob 4, mask 1


class RankGroup:
    """The ranks of one role, trainer or critic, as one controller sees them. `role`: the name in collectives.
    `topology`: which ranks compute the same samples together: a data-parallel rank. `max_context`: data-parallel ranks
    that may share a long sample."""

    def __init__(
        self,
        role: str,
        clients: Sequence[TrainerClient],
        group: ControllerGroup,
        config: Config,
        topology: Topology | None = None,
        links: Links | None = None,
        max_context: int = 1,
    ) -> None:
        self.clients, self.role, self._group, self._config = clients, role, group, config
        self.topology, self.links = topology or Topology(len(clients)), links or Links()
        self._max_context = max_context
        owners = {r: self.topology.data_rank(r) % group.size for r in range(len(clients))}
        self.mine = {r: clients[r] for r, owner in owners.items() if owner == group.rank}  # called here
        self.info = TrainerInfo(num_parameters=1, hidden_size=128)  # until `open`

    async def open(self) -> None:
        self.info = await self.clients[0].info()

    async def send(
        self,
        step: int,
        metas: Sequence[SampleMeta],
        samples: Mapping[Key, Sample],
        objective: ObjectiveName,
        cost: CostModel,
    ) -> list[TrainBatch]:
        """Lay out a step, and push each of this controller's samples to the ranks that train on it. Returns the same
        batches on every controller, by data-parallel rank. Part i of the layout is made by controller step + i."""
        size, num_ranks = self._group.size, self.topology.data_parallel
        batches, count = list[TrainBatch](), num_parts(num_ranks, self._max_context)
        parts_of = [[part for part in range(count) if (step + part) % size == rank] for rank in range(size)]
        if parts_of[self._group.rank]:
            batches = make_layout(
                metas,
                step=step,
                num_ranks=num_ranks,
                cost=cost,
                objective=objective,
                together=objective != "warm_start" and self._config.needs.pairs,
                mini_batches=self._config.algorithm.mini_batches if objective != "warm_start" else 1,
                max_tokens=self._config.training.max_tokens_per_gpu,
                padded=self.info.padded,
                sharded=self.info.sharded,
                shares=self.info.shares,
                max_context=self._max_context,
                parts=parts_of[self._group.rank],
            )
        if size > 1:
            name = f"{self.role} layout of step {step}"
            gathered: list[list[TrainBatch]] = await self._group.all_gather(name, batches)
            made, width = dict[int, list[TrainBatch]](), num_ranks // count
            for parts, own in zip(parts_of, gathered, strict=True):
                made |= {part: own[i * width : (i + 1) * width] for i, part in enumerate(parts)}
            batches = join_parts([made[part] for part in range(count)])
        pushes = []
        for data_rank, batch in enumerate(batches):
            if mine := [samples[key] for key in batch.keys if key in samples]:
                num_bytes = sum(s.content.nbytes + STEP_BYTES * s.num_steps for s in mine)
                for rank in self.topology.ranks_of(data_rank):
                    self.links.add("samples", rank, num_bytes)
                    pushes.append(self.clients[rank].push(self._group.rank, mine))
        await asyncio.gather(*pushes)
        return batches

    async def on_all(self, name: str, call: Callable[[TrainerClient, int], Awaitable[T]]) -> list[T]:
        """Each controller calls its own ranks; `call` gets the client and its data-parallel rank. Returns the answers
        of all ranks, by rank, on every controller. `name`: of the collective."""
        answers = await asyncio.gather(*(call(client, self.topology.data_rank(r)) for r, client in self.mine.items()))
        own = dict(zip(self.mine, answers, strict=True))
        gathered: list[dict[int, T]] = await self._group.all_gather(f"{self.role} {name}", own)
        by_rank = {rank: answer for part in gathered for rank, answer in part.items()}
        return [by_rank[r] for r in range(len(self.clients))]

    async def read(
        self, batches: Sequence[TrainBatch], keys: Collection[Key], name: ExchangedColumn
    ) -> dict[Key, Floats]:
        """A column of some samples, each from one of the ranks that have it."""
        rank_of = {key: self.topology.ranks_of(d)[0] for d, batch in enumerate(batches) for key in batch.keys}
        wanted: dict[int, list[Key]] = {}
        for key in keys:
            wanted.setdefault(rank_of[key], []).append(key)
        parts = await asyncio.gather(*(self.clients[rank].column(name, some) for rank, some in wanted.items()))
        return {key: values for part in parts for key, values in part.items()}

    async def give(self, batches: Sequence[TrainBatch], name: ExchangedColumn, column: Mapping[Key, Floats]) -> None:
        """A column to all ranks that have the samples."""
        calls = []
        for data_rank, batch in enumerate(batches):
            if part := {key: column[key] for key in batch.keys if key in column}:
                for rank in self.topology.ranks_of(data_rank):
                    self.links.add("samples", rank, sum(values.nbytes for values in part.values()))
                    calls.append(self.clients[rank].take_column(name, part))
        await asyncio.gather(*calls)


class Dispatcher:
    """`topology`: of the trainer ranks; default: each is a data-parallel rank. `critics`: ranks of the critic, if it
    has its own. `links`: to the trainer ranks and to the critic ranks."""

    def __init__(
        self,
        config: Config,
        group: ControllerGroup,
        trainers: Sequence[TrainerClient],
        topology: Topology | None = None,
        links: tuple[Links, Links] | None = None,
        critics: Sequence[TrainerClient] = (),
    ) -> None:
        links = links or (Links(), Links())
        self._config, self._group = config, group
        context = config.training.context_parallel
        self._trainers = RankGroup("trainer", trainers, group, config, topology, links[0], context)
        self._critics: RankGroup | None = None
        if critics:  # in a group of its own: it is called at the same time as the trainer
            self._critics = RankGroup("critic", critics, group.subgroup(), config, links=links[1])
        self.cost = CostModel(crossover=768.0)  # until `open`
        # Of the current step: metadata of all samples, keys of this controller's, batches of the critic ranks.
        self._metas: Sequence[SampleMeta] = ()
        self._my_keys: Collection[Key] = ()
        self._critic_batches: list[TrainBatch] = []
        self.bad_in_a_row = 0  # updates that were skipped, the last one among them
        self.balance_metrics: dict[str, float] = {}  # controller 0, of the last update: idle shares, seconds per token

    async def open(self) -> None:
        """Call once before the first dispatch, on every controller: it makes the cost model of the layout."""
        for ranks in self._all_ranks:
            await ranks.open()
        cost = kind_of(self._config).cost_model(self._trainers.info)
        self.cost = (await self._group.all_gather("cost model", cost))[0]  # every controller computes the same layout

    @cached_property
    def _times(self) -> StepTimes:
        """Call `open` before."""
        peak = peak_flops(self._trainers.info.device)
        return StepTimes(self.cost, self._trainers.info, peak and peak * len(self._trainers.clients))

    async def dispatch_samples(
        self, step: int, samples: Sequence[Sample], objective: ObjectiveName = "policy"
    ) -> tuple[list[SampleMeta], list[TrainBatch]]:
        """Compute the layout and push each sample to the rank that trains on it. Only metadata is gathered. Returns the
        batches of the trainer's data-parallel ranks."""
        gathered = await self._group.all_gather(f"samples of step {step}", metas_of(samples))
        metas = [meta for part in gathered for meta in part]
        if not metas:
            return metas, []
        by_key = {sample.key: sample for sample in samples}
        self._metas, self._my_keys = metas, by_key.keys()
        work = step, metas, by_key, objective, self.cost
        if self._critics is None or objective != "policy":
            batches = await self._trainers.send(*work)
        else:
            batches, self._critic_batches = await asyncio.gather(self._trainers.send(*work), self._critics.send(*work))
        await self._group.barrier(f"samples of step {step} at their ranks")
        return metas, batches

    async def end_warm_start(self) -> None:
        await self._trainers.on_all("end_warm_start", lambda trainer, _: trainer.end_warm_start())
        if self._critics is not None:
            if self._config.critic_copies_policy and self._group.rank == 0:
                await copy_policy(self._trainers.clients, self._critics.clients)
            await self._group.barrier("policy at the critic ranks")
            await self._critics.on_all("end_warm_start", lambda critic, _: critic.end_warm_start())

    async def compute_logprobs(self, batches: Sequence[TrainBatch]) -> list[Mapping[Key, float]]:
        """And values. Arguments of this method and of `update` are lists by data-parallel rank, results are lists by
        rank."""
        prepare = self._trainers.on_all("compute_logprobs", lambda trainer, d: trainer.compute_logprobs(batches[d]))
        if self._critics is None or batches[0].objective != "policy":
            return await prepare
        own_batches = self._critic_batches
        kl, _ = await asyncio.gather(
            prepare, self._critics.on_all("compute_logprobs", lambda c, d: c.compute_logprobs(own_batches[d]))
        )
        await asyncio.gather(
            self._send_column("values", (self._critics, own_batches), (self._trainers, batches)),
            self._send_column("penalties", (self._trainers, batches), (self._critics, own_batches)),
        )
        return kl

    async def _send_column(
        self,
        name: ExchangedColumn,
        source: tuple[RankGroup, Sequence[TrainBatch]],
        target: tuple[RankGroup, Sequence[TrainBatch]],
    ) -> None:
        """Of this controller's samples."""
        if name == "values" or self._config.algorithm.kl_per_step:
            (senders, sent), (receivers, received) = source, target
            await receivers.give(received, name, await senders.read(sent, self._my_keys, name))

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
            stats, of_critics = await asyncio.gather(
                update, self._critics.on_all("update", lambda critic, d: critic.update(filled[d]))
            )
            metrics = add_metrics(stats[0].metrics, *(each.metrics for each in of_critics))
            stats[0] = dataclasses.replace(stats[0], metrics=metrics)
        if stats[0].updates:
            self.bad_in_a_row = stats[0].bad_in_a_row
        if self._group.rank == 0:  # which records them
            first_ranks = [self._trainers.topology.ranks_of(d)[0] for d in range(len(batches))]
            self.balance_metrics = self._times.row(batches, self._metas, [stats[rank] for rank in first_ranks])
        return stats

    async def evaluate(self, batches: Sequence[TrainBatch]) -> dict[str, Metric]:
        """The metrics of dispatched samples, without an update; those of all ranks together."""
        parts = await self._trainers.on_all("evaluate", lambda trainer, d: trainer.evaluate(batches[d]))
        return add_metrics(*parts)  # ranks with the same samples have the same metrics

    def take_links(self) -> Counter[tuple[Link, LinkScope]]:
        """Bytes that this controller has sent to ranks since the last call."""
        return sum((ranks.links.take() for ranks in self._all_ranks), Counter())

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def _all_ranks(self) -> Sequence[RankGroup]:
        return [self._trainers] if self._critics is None else [self._trainers, self._critics]

    @property
    def my_ranks(self) -> list[TrainerClient]:
        """Those that this controller calls: it also tells them to write or drop their snapshots."""
        return [rank for ranks in self._all_ranks for rank in ranks.mine.values()]

    async def snapshot(self) -> int:
        """All ranks start to copy their state; returns the bytes of all."""
        return sum([sum(await ranks.on_all("snapshot", lambda rank, _: rank.snapshot())) for ranks in self._all_ranks])

    async def load(self, folder: Path, after_warm_start: bool) -> None:
        for ranks in self._all_ranks:
            await ranks.on_all("load", lambda rank, _: rank.load(str(folder), after_warm_start))

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
        }
