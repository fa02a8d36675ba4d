"""Starts the processes of a run, and shows how many of each kind are ready, and how long each kind took.

engines, judges, scorers, trainer and critic ranks ──> controllers, which call them
after a rollback: trainer and critic ranks ──> controllers; the others keep their processes
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gcore.clients import ControllerClient, EngineClient, ScorerClient, TrainerClient
from gcore.config.tree import Config
from gcore.launch.build import Roles, build_critic, build_engine, build_judge, build_scorer, build_trainer
from gcore.launch.build_controller import build_controller, import_controller
from gcore.launch.plan import Plan
from gcore.observe.progress import Progress, Status
from gcore.protocols import Handle, RoleDied
from gcore.runtime.protocol import Runtime
from gcore.task_group import task_group

START_POLL_S = 0.5  # between two polls of the processes
START_LINES_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # between two lines about the start, if the view is not live
Mode = Literal["train", "eval"]
C = TypeVar("C")
T = TypeVar("T")


@dataclass
class Processes:
    """Those of a plan, and how to start them."""

    runtime: Runtime
    config: Config
    plan: Plan
    mode: Mode = "train"

    @property
    def counts(self) -> dict[str, int]:
        """By kind."""
        counts = self.plan.counts()
        return counts if self.mode == "train" else {**counts, "trainer": 0, "critic": 0}

    @property
    def listed(self) -> str:
        """2 x engine, 1 x judge-critic, 1 x trainer, 2 x controller on 2 nodes"""
        nodes = len(self.plan.nodes)
        kinds = ", ".join(f"{count} x {kind}" for kind, count in self.counts.items() if count)
        return kinds + (f" on {nodes} nodes" if nodes > 1 else "")

    async def start(self) -> tuple[Roles, list[ControllerClient]]:
        """All roles that serve requests at the same time, then the controllers, which call them."""
        self.runtime.prepare("controller", self.plan.controllers, import_controller)
        judges = {name: self._group(f"judge-{name}", EngineClient, build_judge, name) for name in self.plan.judges}
        scorers = {
            name: self._group(f"scorer-{name}", ScorerClient, build_scorer, i)
            for i, name in enumerate(self.plan.scorers)
        }
        served = await asyncio.gather(
            self._group("engine", EngineClient, build_engine),
            self._group("trainer", TrainerClient, build_trainer),
            _by_name(judges),
            _by_name(scorers),
            self._group("critic", TrainerClient, build_critic),
        )
        return await self._with_controllers(Roles(*served))

    async def start_again(
        self, roles: Roles, revive: Callable[[], Awaitable[None]]
    ) -> tuple[Roles, list[ControllerClient]]:
        """Controllers, trainer and critic ranks. Other roles keep their processes and drop their requests. `revive`:
        those of them that died."""
        await asyncio.gather(*(self.runtime.stop_group(kind) for kind in ("controller", "trainer", "critic")))
        self.runtime.prepare("controller", self.plan.controllers, import_controller)

        async def reset_engines() -> None:
            await revive()
            engines = (*roles.engines, *itertools.chain.from_iterable(roles.judges.values()))
            answers = await asyncio.gather(*(engine.reset() for engine in engines), return_exceptions=True)
            for engine, failed in zip(engines, answers, strict=True):
                if isinstance(failed, RoleDied):  # it has its old requests, or is dead: RoleWatch restarts it
                    self.runtime.kill(engine.name)
                elif failed is not None:
                    raise failed

        async with task_group() as tasks:  # if one of them fails, no other must run into the next restart
            tasks.create_task(reset_engines())
            trainers = tasks.create_task(self._group("trainer", TrainerClient, build_trainer))
            critics = tasks.create_task(self._group("critic", TrainerClient, build_critic))
        roles = dataclasses.replace(roles, trainers=trainers.result(), critics=critics.result())
        return await self._with_controllers(roles)

    async def _with_controllers(self, roles: Roles) -> tuple[Roles, list[ControllerClient]]:
        return roles, await self._group("controller", ControllerClient, build_controller, roles)

    async def _group(
        self, kind: str, client: Callable[[Handle], C], build: Callable[..., Any], *more: object
    ) -> list[C]:
        """Start all processes of a kind. `more`: arguments of `build`, after the configuration and the plan."""
        args = [(self.config, self.plan, *more)] * self.counts.get(kind, 0)
        return [client(handle) for handle in await self.runtime.start_group(kind, build, args)]


async def _by_name(calls: Mapping[str, Awaitable[T]]) -> dict[str, T]:
    return dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))


# ---- what is shown --------------------------------------------------------------------------------------------------


async def reporting_start(
    starting: Coroutine[Any, Any, C], runtime: Runtime, wanted: Mapping[str, int], progress: Progress
) -> C:
    """Await `starting` and return its result. Until then, show how many processes of each kind are ready; at the end,
    after how many seconds each kind was."""
    task = asyncio.ensure_future(starting)
    pauses, began = itertools.chain(START_LINES_S, itertools.repeat(START_LINES_S[-1])), time.monotonic()
    due, seconds = next(pauses), dict[str, float]()
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=START_POLL_S)
            waited, ready = time.monotonic() - began, runtime.ready()
            seconds |= dict.fromkeys(set(ready_kinds(wanted, ready)) - set(seconds), waited)
            if done:
                break
            statuses = starting_statuses(wanted, runtime.processes(), ready)
            if progress.mode == "live":
                progress.update(statuses)
            elif waited >= due:
                due = waited + next(pauses)
                lines = "; ".join(f"{status.role} {status.detail}" for status in statuses)
                progress.note(f"starting, {waited:.0f} s: {lines}")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    result = task.result()
    if seconds:
        slowest_first = sorted(seconds.items(), key=lambda item: -item[1])
        progress.note("seconds until ready: " + ", ".join(f"{kind} {s:.0f}" for kind, s in slowest_first))
    return result


def starting_statuses(wanted: Mapping[str, int], up: Collection[str], ready: Collection[str]) -> list[Status]:
    """One per kind of process: Status("engine", "starting", "2 of 8 ready, 3 loading", 0)"""
    running, built = (Counter(name.rpartition("-")[0] for name in names) for names in (up, ready))
    statuses = []
    for kind, count in wanted.items():
        more = max(0, running[kind] - built[kind])  # processes of the last start may end in between
        detail = f"{built[kind]} of {count} ready" + (f", {more} loading" if more else "")
        statuses += [Status(kind, "starting", detail, 0)] if count else []
    return statuses


def ready_kinds(wanted: Mapping[str, int], ready: Collection[str]) -> list[str]:
    """The kinds of which all processes are ready."""
    built = Counter(name.rpartition("-")[0] for name in ready)
    return [kind for kind, count in wanted.items() if count and built[kind] >= count]
