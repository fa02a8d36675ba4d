"""Typed calls of roles in other processes: one thin class per role over its Handle.

The methods are those of protocols.Engine and protocols.Trainer. This file has those that a weight update calls.
"""

from __future__ import annotations

from gcore.protocols import EngineStats, Handle, MemoryChange, Receivers, Ref, WeightPlan, Weights


class EngineClient:
    """protocols.Engine behind RPC."""

    def __init__(self, handle: Handle) -> None:
        self._handle, self.name = handle, handle.name

    async def load_weights(
        self, version: int, weights: Weights | Ref[Weights], bucket: tuple[int, int] = (0, 1)
    ) -> int:
        served: int = await self._handle.call("load_weights", version, weights, bucket)
        return served

    async def sleep(self, level: int) -> MemoryChange:
        change: MemoryChange = await self._handle.call("sleep", level)
        return change

    async def wake(self, *tags: str) -> MemoryChange:
        change: MemoryChange = await self._handle.call("wake", *tags)
        return change

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self._handle.call("stats")
        return stats


class TrainerClient:
    """protocols.Trainer behind RPC."""

    def __init__(self, handle: Handle) -> None:
        self._handle, self.name = handle, handle.name

    async def weight_plan(self) -> WeightPlan:
        plan: WeightPlan = await self._handle.call("weight_plan")
        return plan

    def weight_bucket(self, index: int, receivers: Receivers) -> Ref[Weights]:
        """Starts the call; the bucket stays in the rank's process until an engine reads it."""
        return self._handle.submit("weight_bucket", index, receivers)
