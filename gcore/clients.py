"""Typed clients for roles in other processes: one thin class per role, over its Handle.

    runtime.start_group ──> Handle ──> EngineClient, TrainerClient, ... ──> pools, dispatcher, driver

The methods are those of protocols.Engine, Trainer, Critic and Scorer and of controller/loop.py, so the type checker
sees every call between processes. Only this file names methods by strings. A client can be sent to another process if
its Handle can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gcore.protocols import (
    ControllerStatus,
    EngineStats,
    Handle,
    MemoryChange,
    Metric,
    Receivers,
    Ref,
    ScorerStats,
    TrainerInfo,
    UpdateStats,
    WeightPlan,
    Weights,
)
from gcore.types import Completion, Floats, Ints, Key, Request, Sample, TrainBatch, Written


@dataclass(frozen=True, slots=True)
class Client:
    """A replica of a role, called through its Handle."""

    handle: Handle

    @property
    def name(self) -> str:
        return self.handle.name


class EngineClient(Client):
    """protocols.Engine behind RPC: an engine of the policy or of a judge."""

    __slots__ = ()

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        completions: list[Completion] = await self.handle.call("generate", requests, ticket)
        return completions

    async def abort(self, ticket: str) -> None:
        await self.handle.call("abort", ticket)

    async def load_weights(
        self, version: int, weights: Weights | Ref[Weights], bucket: tuple[int, int] = (0, 1)
    ) -> int:
        served: int = await self.handle.call("load_weights", version, weights, bucket)
        return served

    async def sleep(self, level: int) -> MemoryChange:
        change: MemoryChange = await self.handle.call("sleep", level)
        return change

    async def wake(self, *tags: str) -> MemoryChange:
        change: MemoryChange = await self.handle.call("wake", *tags)
        return change

    async def reset(self) -> None:
        await self.handle.call("reset")

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self.handle.call("stats")
        return stats


class ScorerClient(Client):
    """protocols.Scorer behind RPC."""

    __slots__ = ()

    async def score(self, texts_tokens: Sequence[Ints]) -> list[float]:
        scores: list[float] = await self.handle.call("score", texts_tokens)
        return scores

    async def stats(self) -> ScorerStats:
        stats: ScorerStats = await self.handle.call("stats")
        return stats


class RankClient(Client):
    """protocols.Rank behind RPC."""

    __slots__ = ()

    async def info(self) -> TrainerInfo:
        info: TrainerInfo = await self.handle.call("info")
        return info

    async def begin(self) -> None:
        await self.handle.call("begin")

    async def push(self, source: int, samples: Sequence[Sample]) -> None:
        await self.handle.call("push", source, samples)

    async def update(self, batch: TrainBatch) -> UpdateStats:
        stats: UpdateStats = await self.handle.call("update", batch)
        return stats

    async def snapshot(self) -> int:
        num_bytes: int = await self.handle.call("snapshot")
        return num_bytes

    async def write(self, folder: str) -> Written:
        written: Written = await self.handle.call("write", folder)
        return written

    async def abandon(self) -> None:
        await self.handle.call("abandon")

    async def load(self, folder: str, begun: bool = True) -> None:
        await self.handle.call("load", folder, begun)


class TrainerClient(RankClient):
    """protocols.Trainer behind RPC: one rank."""

    __slots__ = ()

    async def prepare(self, batch: TrainBatch) -> Mapping[Key, float]:
        kl: Mapping[Key, float] = await self.handle.call("prepare", batch)
        return kl

    async def penalties(self, keys: Sequence[Key]) -> Mapping[Key, Floats]:
        penalties: Mapping[Key, Floats] = await self.handle.call("penalties", keys)
        return penalties

    async def take_values(self, values: Mapping[Key, Floats]) -> None:
        await self.handle.call("take_values", values)

    async def evaluate(self, batch: TrainBatch) -> Mapping[str, Metric]:
        metrics: Mapping[str, Metric] = await self.handle.call("evaluate", batch)
        return metrics

    async def weight_plan(self) -> WeightPlan:
        plan: WeightPlan = await self.handle.call("weight_plan")
        return plan

    def weight_bucket(self, index: int, receivers: Receivers) -> Ref[Weights]:
        """Starts the call; the bucket stays in the rank's process until an engine reads it."""
        return self.handle.submit("weight_bucket", index, receivers)


class CriticClient(RankClient):
    """protocols.Critic behind RPC: one rank."""

    __slots__ = ()

    async def load_policy(self, weights: Weights | Ref[Weights]) -> None:
        await self.handle.call("load_policy", weights)

    async def prepare(self, batch: TrainBatch) -> None:
        await self.handle.call("prepare", batch)

    async def values(self, keys: Sequence[Key]) -> Mapping[Key, Floats]:
        values: Mapping[Key, Floats] = await self.handle.call("values", keys)
        return values

    async def take_penalties(self, penalties: Mapping[Key, Floats]) -> None:
        await self.handle.call("take_penalties", penalties)


class ControllerClient(Client):
    """controller/loop.py behind RPC, for the driver."""

    __slots__ = ()

    async def run(self) -> None:
        await self.handle.call("run")

    async def evaluate(self) -> dict[str, Any]:
        row: dict[str, Any] = await self.handle.call("evaluate")
        return row

    async def status(self) -> ControllerStatus:
        status: ControllerStatus = await self.handle.call("status")
        return status

    async def mark_dead(self, name: str) -> None:
        await self.handle.call("mark_dead", name)

    async def begin_restart(self, name: str) -> None:
        """Only on controller 0."""
        await self.handle.call("begin_restart", name)

    async def restore(self, name: str) -> bool:
        """Only on controller 0. False: the replica died again."""
        restored: bool = await self.handle.call("restore", name)
        return restored

    async def mark_alive(self, name: str) -> None:
        await self.handle.call("mark_alive", name)

    async def finished_step(self) -> dict[str, Any]:
        """Only on controller 0, with run.on_step. Waits for the metrics of the next step."""
        row: dict[str, Any] = await self.handle.call("finished_step")
        return row

    async def go_on(self, stop: bool) -> None:
        """After `finished_step`. `stop`: the run ends."""
        await self.handle.call("go_on", stop)
