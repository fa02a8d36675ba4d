"""Which policy engines serve a rollout: the placement modes of a run, with their metrics and their log.

    choose_engines ──> during (the rollout; slots may move between policy and judges) ──> sleep_engines ──> next step

Modes `shared` and `disaggregated` (RolloutPlacement): all engines serve every rollout. Modes `static`, `colocated` and
`dynamic` (SlotPlacement): policy and judges share the slots of a device grid, and a rule decides which role has which
slots. gcore/placement/ implements the rules and the moves; this module connects them to the run. Controller 0 writes
placement.jsonl, which `gcore report` draws.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from gcore.clients import EngineClient
from gcore.config.tree import Config
from gcore.generation.pool import EnginePool
from gcore.observe.placement_log import PlacementLog
from gcore.placement.grid import POLICY
from gcore.placement.guard import DynamicRule, GuardState
from gcore.placement.placer import PlacedPool, Placer, Progress
from gcore.placement.replica_switch import ReplicaSwitch
from gcore.protocols import ControllerGroup


class RolloutPlacement:
    """placement.mode: shared, disaggregated. All engines serve every rollout. `switch`: of engines that sleep while the
    trainer works; `EngineWeights.update` wakes them."""

    def __init__(self, group: ControllerGroup, engines: EnginePool, switch: ReplicaSwitch | None = None) -> None:
        self._group, self._engines, self._switch = group, engines, switch

    async def choose_engines(self, rate: float) -> Mapping[int, EngineClient] | None:
        """The engines of the next rollout, by index; they are awake and need weights. None: all engines. `rate`:
        fraction of groups that pass the filter."""
        return None

    def during(self, progress: Progress, step: int, keep_split: bool = False) -> AbstractAsyncContextManager[None]:
        """Context of a rollout: inside it, slots may move between roles. `keep_split`: of an evaluation, which leaves
        the slots as `choose_engines` has placed them for the next rollout."""
        return contextlib.nullcontext()

    async def sleep_engines(self, step: int) -> None:
        """After the rollout, engines free their memory for the trainer until the new weights. Requests of unfinished
        groups queue and continue with these."""
        if self._switch is None:
            return
        await self._engines.pause()
        await self._group.barrier("engines idle")
        if self._group.rank == 0:
            await self._switch.sleep(self._engines.alive(), skip_dead=True)
        await self._group.barrier("engines asleep")

    def row(self) -> Mapping[str, float]:
        """Metrics of the last rollout."""
        return {} if self._switch is None else self._switch.metrics

    def saved(self) -> dict[str, Any]:
        """For a checkpoint: what was learned about lengths and speeds, and the split."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """On every controller, before the first rollout. The run that saved may have had other devices."""


class SlotPlacement(RolloutPlacement):
    """placement.mode: static, colocated, dynamic. One per controller; controller 0 writes placement.jsonl. `pools`: of
    the roles that share slots. `sleeps`: they sleep while the trainer works. `dynamic`: the rule of that mode."""

    def __init__(
        self,
        config: Config,
        group: ControllerGroup,
        pools: Mapping[str, PlacedPool],
        placer: Placer,
        dynamic: DynamicRule,
        sleeps: bool,
    ) -> None:
        self._config, self._rank, self._sleeps = config, group.rank, sleeps
        self._group, self._pools, self._placer, self._dynamic = group, pools, placer, dynamic
        self._log = PlacementLog(config.run.folder)
        self._ended: tuple[int, float] | None = None  # step and end time of the last rollout

    async def choose_engines(self, rate: float) -> dict[int, EngineClient]:
        """Apply the split of the next rollout. Returns the policy's engines, which need weights."""
        if self._ended is not None and self._rank == 0:  # the trainer used the slots since then
            step, start = self._ended
            piece = {"kind": "timeline", "step": step, "role": "trainer", "start": start, "end": time.monotonic()}
            self._log.write({**piece, "slot": slot} for slot in range(self._placer.grid.slots))
        self._ended = None
        sampling = self._config.sampling
        await self._placer.begin(sampling.prompts_per_step, rate, sampling.samples_per_prompt)
        for role, pool in self._pools.items():
            if role != POLICY:  # the policy's engines need weights first
                pool.resume()
        return self._placer.owners(POLICY)

    async def sleep_engines(self, step: int) -> None:
        """Policy and judges free their memory. Requests of unfinished groups queue until the next rollout."""
        self._ended = step, time.monotonic()
        await asyncio.gather(*(pool.pause() for pool in self._pools.values()))
        await self._group.barrier("engines idle")
        if self._sleeps:
            await self._placer.sleep_all()

    @contextlib.asynccontextmanager
    async def during(self, progress: Progress, step: int, keep_split: bool = False) -> AsyncIterator[None]:
        async with self._placer.during(progress, step, keep_split):
            yield
        if self._rank == 0:
            timeline = self._placer.timeline
            pieces = [{"kind": "timeline", **piece} for piece in timeline.intervals]
            self._log.write([*pieces, *({"kind": "move", **move} for move in timeline.moves)])

    def saved(self) -> dict[str, Any]:
        grid = self._placer.grid
        rule = self._dynamic.before.saved()
        return {"slots": grid.slots, "widths": dict(grid.widths), "rule": rule, **self._placer.saved()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """With other roles or tensor parallel sizes, no measurement applies. With another number of slots, speeds and
        lengths do."""
        grid = self._placer.grid
        if saved.get("widths") == dict(grid.widths):
            same_blocks = saved["slots"] == grid.slots
            self._placer.restore(saved, same_blocks)
            if same_blocks:
                self._dynamic.state = GuardState.restored(saved["rule"])

    def row(self) -> dict[str, float]:
        timeline, slots = self._placer.timeline, self._placer.grid.slots
        total = max(1e-9, timeline.seconds * slots)
        row = {
            "placement/idle": 1 - sum(timeline.busy_s.values()) / total,
            "placement/moves": float(len(timeline.moves)),
            "placement/switch_s": sum(move["seconds"] for move in timeline.moves),
        }
        for role, owned in timeline.owned_s.items():
            row[f"placement/busy/{role}"] = timeline.busy_s[role] / owned if owned else 0.0
            row[f"placement/split/{role}"] = owned / max(1e-9, timeline.seconds)
        return row
