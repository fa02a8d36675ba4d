"""From this controller's samples to the trainer ranks, and from the trainer to the engines.

    samples ──layout (all_gather of metadata)──> push to the ranks ──> calls of all ranks (prepare, update, save, ...)
    new weights ──controller 0──> engines; they sleep while the trainer works, and wake for the weights

Every controller computes the same layout from the gathered metadata. Samples go straight from the controller that
holds them to the rank that trains on them. Rank r is driven by controller r mod N.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from gcore.clients import EngineClient
from gcore.config.tree import Config
from gcore.generation.pool import EnginePool
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import meta_of
from gcore.preparation.workload import CostModel
from gcore.protocols import Group, Handle, MemoryChange, Stats
from gcore.types import Sample, SampleMeta, TrainBatch
from gcore.weights.transfer import WeightTransfer

T = TypeVar("T")


class Dispatcher:
    def __init__(
        self,
        config: Config,
        group: Group,
        engines: EnginePool,
        trainers: Sequence[Handle],
        sleep_level: int = 0,
    ) -> None:
        self._config, self._group, self._engines, self._trainers = config, group, engines, trainers
        self._transfer = WeightTransfer(trainers)
        self._sleep_level, self._asleep = sleep_level, False
        self.slept: dict[str, float] = {}  # metrics of the last sleep and wake: seconds and gigabytes
        self._mine = [r for r in range(len(trainers)) if r % group.size == group.rank]
        self._cost = CostModel(crossover=768.0)
        self._bytes_out = 0
        self.version = 0  # of the weights that the engines serve

    async def open(self) -> Stats:
        info: Stats = await self._trainers[0].call("info")
        self._cost = CostModel(crossover=6 * info["hidden_size"])
        return info

    async def dispatch_samples(
        self, step: int, samples: Sequence[Sample], objective: Literal["policy", "imitation"] = "policy"
    ) -> tuple[list[SampleMeta], list[TrainBatch]]:
        """Agree on the layout, and push each sample to the rank that trains on it. Only metadata is gathered."""
        gathered = await self._group.all_gather(f"samples of step {step}", [meta_of(s) for s in samples])
        metas = [meta for part in gathered for meta in part]
        if not metas:
            return metas, []
        batches = make_layout(
            metas,
            step=step,
            num_ranks=len(self._trainers),
            cost=self._cost,
            objective=objective,
            mini_batches=self._config.algorithm.mini_batches if objective == "policy" else 1,
            max_tokens=self._config.training.max_tokens_per_gpu,
        )
        by_key = {sample.key: sample for sample in samples}
        await asyncio.gather(*(self._push(rank, batch, by_key) for rank, batch in enumerate(batches)))
        await self._group.all_gather(f"samples of step {step} at their ranks", None)
        return metas, batches

    async def _push(self, rank: int, batch: TrainBatch, by_key: dict[tuple[int, int], Sample]) -> None:
        keys = (key for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows for key in row)
        bundle = [by_key[key] for key in keys if key in by_key]
        if bundle:
            self._bytes_out += sum(s.content.nbytes + 9 * s.num_steps for s in bundle)
            await self._trainers[rank].call("push", self._group.rank, bundle)

    def take_bytes_out(self) -> int:
        """Bytes that were pushed since the last call."""
        num_bytes, self._bytes_out = self._bytes_out, 0
        return num_bytes

    async def on_all_ranks(self, method: str, *args: Any) -> list[Any]:
        """Call every rank, each from the controller that drives it. Returns all answers by rank, on all of them."""
        return await self.on_ranks(method, [args] * len(self._trainers))

    async def on_ranks(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        answers = await asyncio.gather(*(self._trainers[r].call(method, *args[r]) for r in self._mine))
        gathered = await self._group.all_gather(method, dict(zip(self._mine, answers, strict=True)))
        by_rank = {rank: answer for part in gathered for rank, answer in part.items()}
        return [by_rank[r] for r in range(len(self._trainers))]

    async def rest(self) -> None:
        """After the rollout, engines free their memory for the trainer. They wake for the new weights. Requests of
        unfinished groups are held and continue with the new weights."""
        if not self._sleep_level:
            return
        await self._engines.pause()
        await self._group.all_gather("engines idle", None)
        if self._group.rank == 0:
            while any(s.running + s.waiting for s in await self._on_engines(EngineClient.stats)):
                await asyncio.sleep(0.005)  # aborted requests are still being removed
            self._measure("sleep", await self._on_engines(lambda engine: engine.sleep(self._sleep_level)))
        self._asleep = True
        await self._group.all_gather("engines at rest", None)

    async def update_weights(self, version: int, engines: Mapping[int, Handle] | None = None) -> None:
        """Controller 0 starts the transfer; the weights pass through no controller. `engines`: those that serve the
        next rollout; default: all. Returns on every controller when they serve `version`."""
        if self._group.rank == 0:
            if self._asleep:
                self._measure("wake_weights", await self._on_engines(lambda engine: engine.wake("weights")))
            alive = self._engines.alive()
            await self._transfer.send({i: e for i, e in alive.items() if engines is None or i in engines}, version)
            if self._asleep:
                self._measure("wake_cache", await self._on_engines(lambda engine: engine.wake("kv_cache")))
        self._asleep = False
        await self._group.all_gather(f"weights of version {version}", None)
        self.version = version
        self._engines.resume()

    async def _on_engines(self, call: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
        return list(await asyncio.gather(*(call(EngineClient(engine)) for engine in self._engines.alive().values())))

    def _measure(self, move: str, answers: Sequence[MemoryChange]) -> None:
        """The metrics are the maximum over replicas: seconds, and gigabytes per replica."""
        self.slept[f"placement/{move}_s"] = max(answer.seconds for answer in answers)
        self.slept[f"placement/{move}_gb"] = max(answer.gigabytes for answer in answers)
