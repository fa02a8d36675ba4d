"""Restarts of roles that die or hang. Runs in the driver.

    engine, judge, scorer    restarted alone; other replicas get its requests
    controller, trainer      all controllers, trainer and critic ranks are started again and load the last checkpoint;
                             engines, judges and scorers keep their processes

Controllers and trainer ranks are restarted together: their collectives break when one of them dies, and all of their
state is in the checkpoint. supervise.py does the rollback.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gcore.checkpoint import store
from gcore.clients import ControllerClient
from gcore.config.run import Run
from gcore.config.tree import Config
from gcore.launch.machines import Cluster, Machine
from gcore.launch.plan import Plan, make_plan
from gcore.observe.events import EventLog
from gcore.observe.logs import blocking_line
from gcore.observe.progress import Progress
from gcore.protocols import ControllerStatus, RoleDied, RoleError
from gcore.runtime.protocol import Runtime
from gcore.task_group import task_group
from gcore.types import UserError

HOUR_S = 3600.0
NODES_S = 10.0  # between two looks at the nodes of the cluster
BUILD_S = 300.0  # least time without an answer of a process that builds its role: imports can block it
PING_S = 5.0  # between two checks of a process that answers
DEATH_S = 10.0  # for the runtime to notice the death of a process whose connections broke
UNREACHABLE_S = 5.0  # for the runtime to notice the death of a replica that a controller cannot call
REVIVE_S = 10.0  # between two restarts of a replica that could not be built
STACKS_S = 1.0  # for the processes to write their stacks
BROKEN_CONNECTIONS = (  # exceptions of collectives, of weight transfers, and of Ray for a reference to weights
    *("TimeoutError", "DistBackendError", "DistNetworkError", "DistStoreError"),
    *("BroadcastError", "ActorDiedError", "ActorUnavailableError"),
)
REVIVABLE = ("engine-", "judge-", "scorer-")  # roles without state except weights
MIN_REVIVALS = 3  # of one replica per hour, also if run.max_restarts is lower
C = TypeVar("C")


class RestartBudget:
    """At most `limit` restarts per hour."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._times: list[float] = []

    def take(self) -> bool:
        """True: one more restart is allowed. It counts."""
        now = self._clock()
        self._times = [at for at in self._times if now - at < HOUR_S]
        if len(self._times) >= self._limit:
            return False
        self._times.append(now)
        return True


def is_healable(error: BaseException) -> bool:
    """A rollback may help. An exception in the code of a role would occur again, and without Ray nothing can start."""
    return (isinstance(error, RoleDied) and error.role != "ray") or is_broken_connection(error)


def is_broken_connection(error: BaseException) -> bool:
    """A collective or a transfer of weights failed, maybe although both sides are alive."""
    if not isinstance(error, RoleError) or error.user_error:
        return False
    return error.kind in BROKEN_CONNECTIONS or "gloo/transport" in error.message


async def wait_for_cause(tasks: Collection[asyncio.Future[Any]], grace_s: float) -> None:
    """After the first failure of a task: wait for failures that explain it better. The connections of a process that
    dies break at once; that it is dead is known later, on a busy machine after seconds."""
    deadline = time.monotonic() + DEATH_S
    if waiting := [task for task in tasks if not task.done()]:
        await asyncio.wait(waiting, timeout=grace_s)
    while waiting := [task for task in tasks if not task.done()]:
        errors = [error for task in tasks if task.done() and (error := task.exception())]
        if not all(map(is_broken_connection, errors)) or time.monotonic() > deadline:
            return
        await asyncio.wait(waiting, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)


def first_cause(errors: Sequence[BaseException | None]) -> BaseException:
    """A dead process explains exceptions of other roles; an exception of a role explains a broken collective."""

    def rank(error: BaseException | None) -> int:
        if isinstance(error, RoleDied):
            return 0 if error.observed else 1
        if isinstance(error, RoleError):
            return 3 if "TimeoutError" in error.message else 2
        return 4

    cause = min(errors, key=rank)
    assert cause is not None
    return cause


class RoleWatch:
    """Restarts replicas that die, and kills those that hang. Raises RoleDied if a controller or a trainer rank dies or
    hangs, or if one replica dies too often."""

    def __init__(
        self, runtime: Runtime, progress: Progress, events: EventLog, run: Run, logs: Path | None = None
    ) -> None:
        """`logs`: the folder where the roles write their output and stacks."""
        self._logs = logs
        self._runtime, self._progress, self._events, self._hang_s = runtime, progress, events, run.hang_s
        limit = max(MIN_REVIVALS, run.max_restarts)
        self._budgets: defaultdict[str, RestartBudget] = defaultdict(lambda: RestartBudget(limit))
        self._no_progress_s = run.no_progress_s
        self._begin()

    def _begin(self) -> None:
        self._restarting: set[str] = set()
        self._unreachable_since: dict[str, float] = {}
        self._last: object = None  # what the controllers were doing, and since when
        self._since = time.monotonic()

    async def watch(self, controllers: Sequence[ControllerClient]) -> None:
        """Until the run ends. `controllers` must know which replicas are alive."""
        self._begin()
        async with task_group() as tasks:
            tasks.create_task(self._watch_answers())
            while True:
                try:
                    await self._runtime.watch()
                except RoleDied as error:
                    if not error.role.startswith(REVIVABLE):
                        raise
                    tasks.create_task(self._restart(error, controllers))

    async def _restart(self, error: RoleDied, controllers: Sequence[ControllerClient]) -> None:
        name = error.role
        if not self._budgets[name].take():
            raise error
        self._restarting.add(name)
        self._events.add("died", role=name)
        self._progress.note(with_notes(error, "; its requests go to other replicas until it is restarted"))
        await asyncio.gather(*(c.mark_dead(name) for c in controllers))
        await controllers[0].begin_restart(name)
        await self._revive(error)
        if not await controllers[0].restore(name):
            self._runtime.kill(name)  # it may be alive, if a call did not arrive; `watch` of the runtime reports it
            return
        await asyncio.gather(*(c.mark_alive(name) for c in controllers))
        self._restarting.discard(name)
        self._events.add("restarted", role=name)
        self._progress.note(f"{name} is restarted, with current weights: process {self._runtime.processes().get(name)}")

    async def _revive(self, error: RoleDied) -> None:
        """It was built before, so an exception may be of the moment: the memory of its device is in use, or not free
        yet. Then try again, in another process; too often: `error`, for a rollback."""
        name = error.role
        while True:
            try:
                return await self._runtime.revive(name)
            except RoleError as failed:
                if failed.user_error:
                    raise
                self._progress.note(f"{name} was not restarted: {failed.message}")
                if not self._budgets[name].take():
                    raise error from failed
            self._runtime.kill(name)
            await asyncio.sleep(REVIVE_S)

    def check_reachable(self, statuses: Sequence[ControllerStatus]) -> None:
        """At each poll of the controllers. If a replica is alive, but a controller cannot call it, the connection was
        cut. The replica may have missed weights, so it is restarted."""
        unreachable = {name: why for status in statuses for name, why in status.unreachable.items()}
        now, since = time.monotonic(), self._unreachable_since
        names = unreachable.keys() & self._runtime.processes().keys() - self._restarting
        self._unreachable_since = {name: since.get(name, now) for name in names}
        for name, at in self._unreachable_since.items():
            if now - at > (self._hang_s if unreachable[name] == "suspect" else UNREACHABLE_S):
                self._restarting.add(name)  # until `_restart` is done with it
                self._events.add("unreachable", role=name)
                self._progress.note(f"{name} is alive, but a controller cannot call it: it is restarted")
                self._runtime.kill(name)

    async def check_progress(self, statuses: object) -> None:
        """At each poll, with what the controllers are doing. RoleDied if none of them has made progress for long."""
        now = time.monotonic()
        if statuses != self._last:
            self._last, self._since = statuses, now
        elif now - self._since > self._no_progress_s:
            await write_stacks(self._runtime)
            raise RoleDied(
                "run",
                f"no controller has made progress for {self._no_progress_s:.0f} s ({statuses}); the stacks of all "
                "processes are in their logs (key: run.no_progress_s)",
            )

    async def revive_dead(self) -> None:
        """Without controllers: restart replicas whose restart a rollback has interrupted. If one cannot be restarted,
        the others are not restarted either: the next rollback does it."""
        async with task_group() as tasks:
            for name in sorted(self._runtime.dead()):
                if name.startswith(REVIVABLE):
                    tasks.create_task(self._revive(RoleDied(name, "it could not be restarted")))

    async def guard_start(self, starting: Coroutine[Any, Any, C]) -> C:
        """Await a restart, which calls roles that are alive. Those that hang are killed, so that the restart does not
        wait for them. RoleDied if it is a controller or a trainer rank."""
        async with task_group() as tasks:
            answers = tasks.create_task(self._watch_answers())
            started = await starting
            answers.cancel()
        return started

    async def _watch_answers(self) -> None:
        """Never returns. A process that is stopped or blocked is alive, but nothing continues without it."""
        watched: dict[str, asyncio.Task[None]] = {}
        async with task_group() as tasks:
            while True:
                for name in self._runtime.processes():
                    if name not in watched or watched[name].done():
                        watched[name] = tasks.create_task(self._watch_answers_of(name))
                await asyncio.sleep(PING_S)

    async def _watch_answers_of(self, name: str) -> None:
        """As long as the role has a process."""
        while name in self._runtime.processes():
            is_built = name in self._runtime.ready() - self._runtime.dead()
            limit_s = self._hang_s if is_built else max(self._hang_s, BUILD_S)
            try:
                await asyncio.wait_for(self._runtime.answers(name), limit_s)
            except TimeoutError:
                await self._hung(name, limit_s)
            except (RoleDied, RoleError):
                pass  # `watch` of the runtime reports it
            await asyncio.sleep(min(PING_S, self._hang_s))

    async def _hung(self, name: str, limit_s: float) -> None:
        await write_stacks(self._runtime)
        self._events.add("hung", role=name)
        text = f"it has not answered for {limit_s:.0f} s; the stacks of all processes are in their logs"
        if self._logs is not None and (line := blocking_line(self._logs / f"{name}.log")):
            text = (
                f"it has not answered for {limit_s:.0f} s: {line} blocks its event loop; expected code that awaits, "
                "such as `await asyncio.to_thread(function)` (key: workflow); the stacks are in the logs"
            )
        if not name.startswith(REVIVABLE):
            raise RoleDied(name, f"{text} (key: run.hang_s)", observed=True)
        self._progress.note(f"{name}: {text}; it is restarted")
        self._runtime.kill(name)


class NodesChanged(Exception):
    """The run needs another plan: a node of its plan is lost, or the cluster has new nodes that it can use."""


def lost_nodes(plan: Plan, see: Callable[[], Cluster]) -> list[Machine]:
    """Nodes of the plan that are not in the cluster any more. On one machine without a cluster: none."""
    if not plan.nodes[0].node_id:
        return []
    present = {node.node_id for node in see().nodes}
    return [node for node in plan.nodes if node.node_id not in present]


async def watch_for_new_nodes(plan: Plan, config: Config, see: Callable[[Config], Cluster]) -> None:
    """Raises NodesChanged after the next checkpoint, if a plan with the new nodes has more processes. Never returns if
    the run has no cluster, or keeps no checkpoints: then growing would cost more than it gains."""
    if not plan.nodes[0].node_id or not config.checkpoint.every:
        await asyncio.Event().wait()
    while True:
        await asyncio.sleep(NODES_S)
        known = {node.node_id for node in plan.nodes}
        try:
            cluster = await asyncio.to_thread(see, config)
            new = [node for node in cluster.nodes if node.node_id not in known]
            grows = bool(new) and sum(make_plan(config, cluster).counts().values()) > sum(plan.counts().values())
        except (UserError, OSError):  # a new node left while it was checked, or fits in no plan: no reason to end a run
            continue
        if grows:
            before = store.complete_checkpoints(config.run.folder)
            while store.complete_checkpoints(config.run.folder)[-1:] == before[-1:]:
                await asyncio.sleep(NODES_S)
            raise NodesChanged(f"new: {', '.join(node.address for node in new)}")


async def write_stacks(runtime: Runtime) -> None:
    runtime.dump_stacks()
    await asyncio.sleep(STACKS_S)


def with_notes(error: BaseException, then: str = "") -> str:
    """The error, and on the next lines its notes: the last lines of a log, or the path of the log."""
    return "\n".join([f"{error}{then}", *getattr(error, "__notes__", ())])
