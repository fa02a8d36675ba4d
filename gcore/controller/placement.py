"""Which policy engines serve a rollout: the placement modes of a run, with their metrics and their log.

    choose_engines ──> during (the rollout; slots may move between policy and judges) ──> sleep_engines ──> next step

Modes `shared` and `disaggregated` (AllEngines): all engines serve every rollout. Modes `static`, `colocated` and
`dynamic` (SlotPlacement): policy and judges share the slots of a device grid, and a rule decides which role has which
slots. gcore/placement/ implements the rules and the moves; this module connects them to the run. Controller 0 writes
placement.jsonl, which `gcore report` draws.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from gcore.clients import EngineClient
from gcore.config.tree import Config
from gcore.controller.dispatch import Dispatcher
from gcore.launch.plan import first_split
from gcore.observe.placement_log import PlacementLog
from gcore.placement.baselines import ColocatedRule, StaticRule
from gcore.placement.grid import POLICY, DeviceGrid
from gcore.placement.guard import DynamicRule, GuardState
from gcore.placement.monitor import Monitor
from gcore.placement.placer import PlacedPool, Placer, Progress
from gcore.placement.replica_switch import LoadWeights, ReplicaSwitch
from gcore.placement.rules import Rule
from gcore.protocols import Group


class RolloutPlacement(Protocol):
    """The interface of the placement modes for the training loop."""

    async def choose_engines(self, rate: float) -> Mapping[int, EngineClient] | None:
        """The engines of the next rollout, by index; they are awake and need weights. None: all engines. `rate`:
        fraction of groups that pass the filter."""
        ...

    def during(self, progress: Progress, step: int, keep_split: bool = False) -> AbstractAsyncContextManager[None]:
        """Context of a rollout: inside it, slots may move between roles. `keep_split`: of an evaluation, which leaves
        the slots as `choose_engines` has placed them for the next rollout."""
        ...

    async def sleep_engines(self, step: int) -> None:
        """After the rollout, engines free their memory for the trainer. They wake for the new weights."""
        ...

    def row(self) -> Mapping[str, float]:
        """Metrics of the last rollout."""
        ...

    def saved(self) -> dict[str, Any]:
        """For a checkpoint: what was learned about lengths and speeds, and the split."""
        ...

    def restore(self, saved: Mapping[str, Any]) -> None:
        """On every controller, before the first rollout. The run that saved may have had other devices."""
        ...


@dataclass(frozen=True)
class AllEngines:
    """placement.mode: shared, disaggregated. All engines serve every rollout."""

    dispatcher: Dispatcher

    async def choose_engines(self, rate: float) -> None:
        return None

    def during(self, progress: Progress, step: int, keep_split: bool = False) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def sleep_engines(self, step: int) -> None:
        await self.dispatcher.sleep_engines()

    def row(self) -> dict[str, float]:
        return {}

    def saved(self) -> dict[str, Any]:
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """It learns nothing."""


class SlotPlacement:
    """placement.mode: static, colocated, dynamic. One per controller; controller 0 writes placement.jsonl."""

    def __init__(
        self,
        config: Config,
        grid: DeviceGrid,
        pools: Mapping[str, PlacedPool],
        group: Group,
        sleep_level: int,
        load: LoadWeights,
        note: Callable[[str], None],
    ) -> None:
        self._config, self._rank, self._sleeps = config, group.rank, sleep_level > 0
        self._group, self._pools = group, pools
        self._log = PlacementLog(config.run.folder)
        self._ended: tuple[int, float] | None = None  # step and end time of the last rollout
        split = first_split(config, grid)
        self._dynamic = DynamicRule()
        rules: dict[str, Rule] = {"static": StaticRule(split), "colocated": ColocatedRule(), "dynamic": self._dynamic}
        # Level 1: judges keep their weights.
        switches = {role: ReplicaSwitch(pool.replicas, 1, on_death=pool.mark_dead) for role, pool in pools.items()}
        policy = pools[POLICY]
        switches[POLICY] = ReplicaSwitch(policy.replicas, max(1, sleep_level), load, policy.mark_dead)
        serving = {POLICY: config.generation} | {judge.name: judge for judge in config.rewards.engine_judges}
        self._placer = Placer(
            grid,
            rules[config.placement.mode],
            split,
            pools,
            switches,
            group,
            Monitor(grid, {role: spec.max_concurrent for role, spec in serving.items()}),
            timeout_s=config.run.hang_s,
            note=note,
        )

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

    def has(self, name: str) -> bool:
        return self._placer.has(name)

    def mark_dead(self, name: str) -> None:
        self._placer.mark_dead(name)

    async def wait_for_move(self, name: str) -> None:
        await self._placer.wait_for_move(name)

    def restarted(self, name: str) -> contextlib.AbstractAsyncContextManager[bool | None]:
        return self._placer.restarted(name)

    def mark_alive(self, name: str) -> None:
        self._placer.mark_alive(name)

    def row(self) -> dict[str, float]:
        """Metrics of the last rollout."""
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
