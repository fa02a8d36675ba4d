"""The ranks of one role, trainer or critic, as one controller sees them: lays out a step over them and calls them.

    metadata of all samples ──layout, made by one controller──> a batch per data-parallel rank ──> push to the ranks
    calls of all ranks, each by one controller ──> all_gather of the answers

One controller, another one in every step, computes the layout from the gathered metadata and sends it to the others:
it takes as long as the other control work of hundreds of samples. With more than 256 ranks, several controllers make
parts of it. Controller d mod N calls the ranks of data-parallel rank d.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from gcore.clients import CriticClient, TrainerClient
from gcore.config.tree import Config
from gcore.cost.workload import CostModel
from gcore.observe.links import Links
from gcore.preparation.balance import join_parts, make_layout, num_parts
from gcore.protocols import Group, TrainerInfo
from gcore.types import Key, ObjectiveName, Sample, SampleMeta, Topology, TrainBatch, Written

T = TypeVar("T")
C = TypeVar("C", TrainerClient, CriticClient)
STEP_BYTES = 5  # of a sample, beside its content: logprob 4, mask 1


class RankGroup(Generic[C]):
    """`role`: the name in collectives. `topology`: which ranks compute the same samples together: a data-parallel
    rank. `max_context`: data-parallel ranks that may share a long sample."""

    def __init__(
        self,
        role: str,
        clients: Sequence[C],
        group: Group,
        config: Config,
        topology: Topology | None = None,
        links: Links | None = None,
        max_context: int = 1,
    ) -> None:
        self.clients: Sequence[C] = clients
        self.role, self._group, self._config = role, group, config
        self.topology, self.links = topology or Topology(len(clients)), links or Links()
        self._max_context = max_context
        self._mine = [r for r in range(len(clients)) if self.topology.data_rank(r) % group.size == group.rank]
        self.info = TrainerInfo(num_parameters=1, hidden_size=128)  # until `open`

    async def open(self) -> TrainerInfo:
        self.info = await self.clients[0].info()
        return self.info

    async def lay_out(
        self, step: int, metas: Sequence[SampleMeta], objective: ObjectiveName, cost: CostModel
    ) -> list[TrainBatch]:
        """The same layout on every controller, by data-parallel rank. Part i is made by controller step + i."""
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
                together=objective != "imitation" and self._config.needs.pairs,
                mini_batches=self._config.algorithm.mini_batches if objective != "imitation" else 1,
                max_tokens=self._config.training.max_tokens_per_gpu,
                padded=self.info.padded,
                sharded=self.info.sharded,
                max_context=self._max_context,
                parts=parts_of[self._group.rank],
            )
        if size == 1:
            return batches
        gathered: list[list[TrainBatch]] = await self._group.all_gather(f"{self.role} layout of step {step}", batches)
        made, width = dict[int, list[TrainBatch]](), num_ranks // count
        for parts, found in zip(parts_of, gathered, strict=True):
            made |= {part: found[i * width : (i + 1) * width] for i, part in enumerate(parts)}
        return join_parts([made[part] for part in range(count)])

    async def push(self, batches: Sequence[TrainBatch], samples: Mapping[Key, Sample]) -> None:
        """Each of this controller's samples to the ranks that train on it."""
        await asyncio.gather(*(self._push(rank, batch, samples) for rank, batch in enumerate(batches)))

    async def _push(self, data_rank: int, batch: TrainBatch, samples: Mapping[Key, Sample]) -> None:
        own = [samples[key] for key in batch.keys if key in samples]
        if own:
            ranks = self.topology.ranks_of(data_rank)
            num_bytes = sum(s.content.nbytes + STEP_BYTES * s.num_steps for s in own)
            for each in ranks:
                self.links.add("samples", each, num_bytes)
            await asyncio.gather(*(self.clients[each].push(self._group.rank, own) for each in ranks))

    async def on_all(self, name: str, call: Callable[[C, int], Awaitable[T]]) -> list[T]:
        """Each controller calls its own ranks; `call` gets the client and its data-parallel rank. Returns the answers
        of all ranks, by rank, on every controller. `name`: of the collective."""
        calls = (call(self.clients[r], self.topology.data_rank(r)) for r in self._mine)
        answers = await asyncio.gather(*calls)
        gathered: list[dict[int, T]] = await self._group.all_gather(
            f"{self.role} {name}", dict(zip(self._mine, answers, strict=True))
        )
        by_rank = {rank: answer for part in gathered for rank, answer in part.items()}
        return [by_rank[r] for r in range(len(self.clients))]

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    async def snapshot(self) -> int:
        """All ranks start to copy their state; returns the bytes of all."""
        return sum(await self.on_all("snapshot", lambda client, _: client.snapshot()))

    async def write(self, folder: Path) -> list[Written]:
        """The ranks of this controller write their snapshots. Not a collective: it runs beside other calls."""
        return await asyncio.gather(*(self.clients[r].write(str(folder)) for r in self._mine))

    async def abandon(self) -> None:
        """The ranks of this controller drop their snapshots. Not a collective."""
        await asyncio.gather(*(self.clients[r].abandon() for r in self._mine))

    async def load(self, folder: Path, begun: bool) -> None:
        await self.on_all("load", lambda client, _: client.load(str(folder), begun))
