"""Each role in its own process, as Ray actors: on one machine, or on the cluster at RAY_ADDRESS.

An exception of a role is raised again as RoleError with the role's name and first traceback. The death of a process is
raised as RoleDied with the last lines of its log. Each process prints to its own log, and Ray's own messages go to
ray.log. A private cluster requires a random token on every connection, has no dashboard, and ends with the driver.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from gcore import faults
from gcore.observe.logs import last_lines, trim
from gcore.protocols import Rendezvous, RoleDied, RoleError
from gcore.runtime.guard import Guard
from gcore.runtime.ray_cluster import (
    Daemons,
    ProcessPlace,
    Reservation,
    is_alive,
    is_joined,
    join,
    only_this_machine,
    quiet_ray,
)
from gcore.runtime.ray_process import Process
from gcore.task_group import task_group
from gcore.types import UserError

START_S = 300
MEMORY_S = 0.5  # between two looks at the memory of the processes
STOP_S = 10.0  # for killed processes to end
NODE_GONE = "its node has left the Ray cluster"
NODE_DIED = "its node has died"  # in Ray's text
_TOKEN = secrets.token_hex(32)


class RayHandle:
    """A role in another process. Can be pickled and sent to other processes."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self._actor = name, actor

    def submit(self, method: str, *args: Any) -> Any:
        return self._actor.call.remote(method, *args)

    async def call(self, method: str, *args: Any) -> Any:
        try:
            await faults.reach_call(f"to:{self.name}", f"to:{self.name}:{method}")
        except ConnectionError as error:  # Ray reports a cut connection like a death
            raise RoleDied(self.name, str(error)) from None
        return await translate(self.name, self.submit(method, *args))


async def translate(name: str, ref: Any) -> Any:
    """Await a reference. Ray's exceptions become RoleError or RoleDied."""
    from ray import exceptions

    try:
        return await ref
    except exceptions.ActorUnschedulableError:
        raise RoleDied(name, NODE_GONE) from None
    except exceptions.RayActorError as error:
        if getattr(error, "actor_init_failed", False):
            raise RoleError(name, "its process could not be set up", str(error)) from None
        raise RoleDied(name, _first_lines(str(error))) from None
    except exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RoleError | RoleDied):
            raise cause from None
        raise RoleError(name, _first_lines(str(cause or error)), str(error)) from None


@dataclass(slots=True)
class HostedRole:
    """A role and its process."""

    actor: Any
    place: ProcessPlace
    pid: int | None = None  # None: not started yet
    is_built: bool = False
    death: Literal["", "by kill", "reported"] = ""  # by `kill` and not reported yet; reported and not revived yet
    build_args: tuple[Any, ...] = ()  # of Process.build
    memory_mb: float | None = None  # when last seen


class RayRuntime:
    """Implements runtime.protocol.Runtime."""

    def __init__(
        self,
        object_store_mb: int,
        bundles: Sequence[int] = (),
        place_of: Callable[[str, int], ProcessPlace] = lambda kind, rank: ProcessPlace(),
        logs: Path | None = None,
        bundle_nodes: Sequence[str] = (),
        files: bytes = b"",
        lock: Sequence[int] = (),
    ) -> None:
        """`bundles`: GPUs to reserve, those of each bundle on one machine. `bundle_nodes`: id of the node of each
        bundle; empty: any node. `place_of`: kind and rank -> where the process runs. `logs`: folder for the output of
        the processes; None: Ray's own log folder. `files`: of the user, for all processes (user_files.pack).
        `lock`: descriptors that stay open until all processes have ended, also if the driver is killed."""
        self._place_of, self._logs = place_of, logs
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        self._unrelated = {p.pid for p in _descendants()}  # children of this process that `stop` must not end
        self._owns_cluster = not is_joined()
        self._guard = Guard(lock) if self._owns_cluster else None  # before Ray, whose processes it may have to end
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if self._owns_cluster:  # before Ray is imported: a process keeps the first token that it reads
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
            only_this_machine()
        quiet_ray(None if logs is None else logs / "ray.log")
        import ray

        if self._owns_cluster:
            try:
                ray.init(
                    "local",
                    object_store_memory=object_store_mb * 2**20,
                    include_dashboard=False,
                    num_cpus=os.cpu_count(),
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            except BaseException as error:
                for process in _descendants():
                    if process.pid not in self._unrelated:
                        _kill(process)
                if not isinstance(error, Exception):  # Ctrl-C
                    raise
                raise UserError(  # Ray has no type for it
                    f"Ray did not start on this machine: {_first_lines(str(error))} Its logs are in "
                    f"/tmp/ray/session_*_{os.getpid()}/logs. "
                    "If the machine is busy, try again; runtime=local needs no Ray"
                ) from error
        else:
            join()
        self._files: Any = ray.put(files) if files else b""
        self._roles: dict[str, HostedRole] = {}
        self._changed = asyncio.Event()  # a role was killed or revived
        self._daemons = Daemons(_descendants() if self._owns_cluster else ())
        self._tracked: dict[int, psutil.Process] = {}  # signals go through these: never to a later process with this id
        self._track_processes()
        self._reserved = Reservation(bundles, bundle_nodes) if bundles else None

    def prepare(self, kind: str, count: int, imports: Callable[[], None]) -> None:
        for name in self._create(kind, count):
            self._roles[name].actor.prepare.remote(imports)

    def _create(self, kind: str, count: int) -> list[str]:
        """Start the processes of a group that are not started yet. Returns the names of all."""
        import ray

        folder, names = None if self._owns_cluster else os.getcwd(), [f"{kind}-{rank}" for rank in range(count)]
        for rank, name in enumerate(names):
            if name not in self._roles:
                place, log = self._place_of(kind, rank), self._log(name)
                hosts = ray.remote(Process).options(**self._options(kind, place))
                actor = hosts.remote(name, None if log is None else str(log), folder, self._files)
                self._roles[name] = HostedRole(actor, place)
        return names

    async def start_group(
        self, kind: str, factory: Callable[..., Any], args: Sequence[tuple[Any, ...]]
    ) -> list[RayHandle]:
        async def build(name: str) -> None:
            """A process is in `processes()` as soon as it runs, and in `ready()` when its role is built."""
            role = self._roles[name]
            role.pid = await self._started(name, role.actor.pid.remote())
            await self._called(name, role.actor.build.remote(*role.build_args))
            role.is_built = True

        if not args:
            return []
        async with self._daemons.watched():
            names, secret = self._create(kind, len(args)), secrets.token_bytes(32)
            address = await self._started(names[0], self._roles[names[0]].actor.address.remote())
            for rank, name in enumerate(names):
                role, rendezvous = self._roles[name], Rendezvous(rank, len(args), address, secret=secret)
                visible = None if self._reserved is None else await self._reserved.visible_gpus(role.place.bundles)
                role.build_args = factory, args[rank], rendezvous, visible
            await asyncio.gather(*map(build, names))
        self._roles |= {name: self._roles.pop(name) for name in names}  # in the order of building, not of `prepare`
        self._track_processes()
        return [RayHandle(name, self._roles[name].actor) for name in names]

    async def _started(self, name: str, ref: Any) -> Any:
        """The first answer of a process. Ray waits without a word for a free device, or for free memory."""
        try:
            return await asyncio.wait_for(self._called(name, ref), START_S)
        except TimeoutError:
            raise UserError(
                f"{name} was not started by the Ray cluster within {START_S} s: Ray starts none on a machine "
                "whose memory is full, or without the GPUs that it needs (key: placement)"
            ) from None

    async def _called(self, name: str, ref: Any) -> Any:
        """The result of a call of a process that starts. If it dies: what is known here, not Ray's text."""
        try:
            return await translate(name, ref)
        except RoleDied as error:
            if error.detail == NODE_GONE or NODE_DIED in error.detail:
                raise RoleDied(name, NODE_GONE) from None
            self._daemons.check()
            raise self._died(name) from None

    def _options(self, kind: str, place: ProcessPlace) -> dict[str, Any]:
        """Options of an actor. Ray restarts a dead process on the same node, `revive` builds its role again."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        restarts = 0 if kind in ("controller", "trainer", "critic") else -1
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 100_000, "max_restarts": restarts}
        options["enable_task_events"] = False  # a record of each call stays in Ray's GCS, which grows by 50 kB per step
        if self._reserved is not None and place.bundles:
            options |= {"num_gpus": place.gpus, "scheduling_strategy": self._reserved.strategy(place.bundles[0])}
        elif place.node:  # not soft: then Ray also uses other nodes
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place.node, soft=False)
        return options

    def processes(self) -> dict[str, int]:
        return {name: role.pid for name, role in self._roles.items() if role.pid is not None}

    def ready(self) -> set[str]:
        return {name for name, role in self._roles.items() if role.is_built}

    async def watch(self) -> None:
        while True:  # again when a role was killed or revived
            self._changed.clear()
            for name, role in self._roles.items():
                if role.death == "by kill":  # Ray reports it when the next process is started, seconds later
                    role.death = "reported"
                    raise self._died(name)
            up = [self._until_gone(name, role.actor) for name, role in self._roles.items() if not role.death]
            try:
                async with task_group() as tasks:
                    others = self._daemons.until_one_fails(), self._watch_memory()
                    watching = [tasks.create_task(each) for each in (*up, *others)]
                    await self._changed.wait()
                    for task in watching:
                        task.cancel()
            except RoleDied as error:  # the next `watch` reports other roles that died at the same moment
                if error.role in self._roles:
                    self._roles[error.role].death = "reported"
                raise

    async def revive(self, name: str) -> None:
        """Ray restarts the process by itself. Build the role in it again."""
        role, deadline = self._roles[name], time.monotonic() + START_S
        async with self._daemons.watched():
            while True:
                try:
                    role.pid = await translate(name, role.actor.pid.remote())
                    self._track_processes()
                    await translate(name, role.actor.build.remote(*role.build_args))
                    role.death = ""
                    self._changed.set()
                    return
                except RoleDied as error:  # not back yet
                    if error.detail == NODE_GONE or time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(0.1)

    def dead(self) -> set[str]:
        return {name for name, role in self._roles.items() if role.death == "reported"}

    async def answers(self, name: str) -> None:
        await translate(name, self._roles[name].actor.pid.remote())

    def kill(self, name: str) -> None:
        import ray

        role = self._roles[name]
        role.death = role.death or "by kill"
        self._changed.set()
        if self._owns_cluster:  # by signal: a stopped process does not execute Ray's command
            self._track_processes()
            if role.pid is not None and (process := self._tracked.get(role.pid)) is not None:
                _kill(process)
        else:
            ray.kill(role.actor, no_restart=False)

    def dump_stacks(self) -> None:
        if self._owns_cluster:
            self._track_processes()
            for process in filter(None, map(self._tracked.get, self.processes().values())):
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGUSR1)

    async def stop_group(self, kind: str) -> None:
        import ray

        self._track_processes()
        for name in [name for name in self._roles if name.rpartition("-")[0] == kind]:
            role = self._roles.pop(name)
            if self._owns_cluster and (process := self._tracked.get(role.pid or 0)) is not None:
                with contextlib.suppress(psutil.Error):
                    family = [*process.children(recursive=True), process]  # also the reward workers of a controller
                    for member in family:
                        _kill(member)
                    await asyncio.to_thread(psutil.wait_procs, family, STOP_S)
            ray.kill(role.actor)

    async def _until_gone(self, name: str, actor: Any) -> None:
        try:
            await translate(name, actor.until_gone.remote())
        except RoleDied:
            self._daemons.check()  # if Ray is dead, every role seems dead
            raise self._died(name) from None

    def _died(self, name: str) -> RoleDied:
        """What is known about the death of a role."""
        role, log, known = self._roles.get(name, HostedRole(None, ProcessPlace())), self._log(name), ""
        if role.memory_mb is not None:
            free = psutil.virtual_memory().available / 2**20
            known = f"; it held {role.memory_mb:.0f} MB when last seen, {free:.0f} MB are free on this machine"
        process = "its process" if role.pid is None else f"process {role.pid}"
        printed = "" if log is None or not log.is_file() else f"; its output is in {log}"
        text = f"{process} is gone (killed, crashed, or out of memory{known}){printed}"
        error = RoleDied(name, text, observed=True)
        if log is not None and (lines := last_lines(log)):
            error.add_note("\n  ".join([f"last lines of {log}:", *lines]))
        return error

    def _log(self, name: str) -> Path | None:
        return None if self._logs is None else self._logs / f"{name}.log"

    async def _watch_memory(self) -> None:
        while self._owns_cluster:
            self._track_processes()
            for role in self._roles.values():
                with contextlib.suppress(psutil.Error):
                    if role.pid in self._tracked:
                        role.memory_mb = self._tracked[role.pid].memory_info().rss / 2**20
            await asyncio.sleep(MEMORY_S)

    def stop(self) -> None:
        """Stop the cluster, then kill all processes of the run that are still alive. Calls in progress are lost."""
        import ray

        self._track_processes()
        for role in self._roles.values() if not self._owns_cluster else ():
            ray.kill(role.actor)
        self._roles.clear()
        if self._daemons.all_work():
            ray.shutdown()
            deadline = time.monotonic() + 3
        else:  # a shutdown would wait for these daemons, here and once more at interpreter exit
            atexit.unregister(ray.shutdown)
            deadline = time.monotonic()
        while time.monotonic() < deadline and any(is_alive(p) for p in self._tracked.values()):
            time.sleep(0.05)
        for process in self._tracked.values():
            _kill(process)
        if self._guard is not None:
            self._guard.dismiss()
        for log in self._logs.glob("*.log") if self._logs is not None else ():
            with contextlib.suppress(OSError):
                trim(log)  # what was printed since its process last trimmed it

    def _track_processes(self) -> None:
        """Record all descendants of the driver, so that processes that are reparented later are still known."""
        if self._guard is not None:
            own = (p for p in _descendants() if p.pid != self._guard.pid and p.pid not in self._unrelated)
            self._tracked |= {p.pid: p for p in own}
            self._guard.register(self._tracked.values())


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()


def _first_lines(text: str) -> str:
    return " ".join(text.split())[:400]
