"""Every role in a process of its own, as Ray actors: one machine, or a cluster named by RAY_ADDRESS.

An actor is a thin host: it builds the role in its process and forwards calls to it. What a role raises comes back as
RoleError with the role's name and first traceback; what dies comes back as RoleDied, with the last lines of its log.
What a process prints goes to that log, and so does what Ray itself has to say (ray.log). A private cluster asks for a
token of its own on every connection, has no dashboard, and ends with the driver.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from gcore.observe.logs import Log, last_lines, trim
from gcore.protocols import Rendezvous, RoleDied, RoleError
from gcore.runtime.guard import Guard
from gcore.types import UserError

START_S = 300
NOISE = (
    "maximum expected startup concurrency",  # more processes than cores are meant
    "The autoscaler failed",  # it is ended with the run, and complains
)
_TOKEN = secrets.token_hex(32)


class Process:
    """The host of one role. Runs as a Ray actor."""

    def __init__(self, name: str, log: str | None = None) -> None:
        self.name = name
        self.role: Any = None
        if log is not None:
            with contextlib.suppress(OSError):  # on a node without the run's folder Ray's own log has it
                Log(Path(log)).take_over(name)

    async def address(self) -> str:
        """host:port that is free here."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    async def pid(self) -> int:
        return os.getpid()

    async def build(self, factory: Callable[..., Any], args: tuple[Any, ...], rendezvous: Rendezvous) -> int:
        import ray

        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not burn a shared core
        if interface := _interface_of(ray.util.get_node_ip_address()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else gloo resolves the host's name, which may fail
        try:
            self.role = await asyncio.to_thread(factory, *args, rendezvous)
        except Exception as error:
            raise self._wrap(error) from None
        return os.getpid()

    async def call(self, method: str, *args: Any) -> Any:
        if self.role is None:  # meant for the process before this one: Ray delivers what was sent when it died
            raise RoleDied(self.name, "its process is back, the role is not")
        try:
            return await getattr(self.role, method)(*args)
        except (RoleError, RoleDied, asyncio.CancelledError):
            raise
        except Exception as error:
            raise self._wrap(error) from None

    def _wrap(self, error: Exception) -> RoleError:
        cause = getattr(error, "cause", error)
        if isinstance(cause, RoleError):
            return cause
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return RoleError(self.name, message, traceback.format_exc(), isinstance(error, UserError))

    async def until_gone(self) -> None:
        if self.role is None:  # it died while nobody watched
            raise RoleDied(self.name, "its process is back, the role is not")
        await asyncio.Event().wait()


class RayHandle:
    """A role in another process. Travels to other processes as it is."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self._actor = name, actor

    def submit(self, method: str, *args: Any) -> Any:
        return self._actor.call.remote(method, *args)

    async def call(self, method: str, *args: Any) -> Any:
        return await translate(self.name, self.submit(method, *args))


async def translate(name: str, ref: Any) -> Any:
    """Await a reference; Ray's exceptions become ours."""
    from ray import exceptions

    try:
        return await ref
    except exceptions.RayActorError as error:
        raise RoleDied(name, _first_lines(str(error))) from None
    except exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RoleError | RoleDied):
            raise cause from None
        raise RoleError(name, _first_lines(str(cause or error)), str(error)) from None


def _quiet_ray(log: Path | None) -> None:
    """Ray prints messages of its own on the driver's screen. Here they go to `log`; only what is no NOISE is shown."""
    from ray._private import worker

    say: Any = getattr(worker, "print_to_stdstream", None)
    if say is None:
        return
    say = getattr(say, "_says", say)  # of the run before, in the same process

    def say_the_rest(data: dict[str, Any], *args: Any, **options: Any) -> None:
        lines = data.get("lines", ())
        if log is not None:
            with contextlib.suppress(OSError), log.open("a") as file:
                file.writelines(f"{line}\n" for line in lines)
        if not any(noise in line for line in lines for noise in NOISE):
            say(data, *args, **options)

    say_the_rest._says = say  # type: ignore[attr-defined]
    worker.print_to_stdstream = say_the_rest


class RayRuntime:
    """Implements protocols.Runtime."""

    def __init__(
        self,
        object_store_mb: int,
        bundles: Sequence[int] = (),
        seat: Callable[[str, int], tuple[int, float]] | None = None,
        logs: Path | None = None,
    ) -> None:
        """`bundles`: GPUs to reserve, those of each bundle on one machine. `seat`: kind and rank -> bundle, GPUs.
        `logs`: where processes print to; None: to Ray's own log folder."""
        self._seat, self._logs = seat, logs
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        self._strangers = {p.pid for p in _descendants()}  # children of this process that are not ours to end
        self._owns_cluster = not os.environ.get("RAY_ADDRESS")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if self._owns_cluster:  # a token of our own, before Ray is imported; a process keeps the first that it reads
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
        import ray

        own: dict[str, Any] = {
            "address": "local",
            "object_store_memory": object_store_mb * 2**20,
            "include_dashboard": False,
            "num_cpus": os.cpu_count(),
        }
        _quiet_ray(None if logs is None else logs / "ray.log")
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **(own if self._owns_cluster else {}))
        self._actors: dict[str, Any] = {}
        self._pids: dict[str, int] = {}
        self._ready: set[str] = set()
        self._down: set[str] = set()  # roles whose death was told, and that are not back
        self._recipes: dict[str, tuple[Any, ...]] = {}  # what each role was built of
        self._memory: dict[str, float] = {}
        self._daemons = {p.pid: p for p in _descendants() if p.name().startswith(("gcs_server", "raylet"))}
        self._seen: dict[int, psutil.Process] = {}
        self._guard = Guard() if self._owns_cluster else None
        self._look()
        self._bundles = self._reserve(bundles)

    def _reserve(self, bundles: Sequence[int]) -> Any:
        if not bundles:
            return None
        from ray.util import placement_group

        group = placement_group([{"GPU": gpus, "CPU": 1} for gpus in bundles])
        if not group.wait(timeout_seconds=60):
            raise UserError(
                f"the Ray cluster could not give {sum(bundles)} GPUs within 60 s (key: placement.trainer.ranks)"
            )
        return group

    async def start_group(
        self, kind: str, factory: Callable[..., Any], args: Sequence[tuple[Any, ...]]
    ) -> list[RayHandle]:
        import ray

        if not args:
            return []
        names = [f"{kind}-{rank}" for rank in range(len(args))]
        for rank, name in enumerate(names):
            restarts = 0 if kind in ("controller", "trainer") else -1  # Ray brings the process back, `revive` the role
            options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 100_000, "max_restarts": restarts}
            if self._bundles is not None and self._seat is not None and kind != "controller":
                from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

                bundle, gpus = self._seat(kind, rank)
                options |= {
                    "num_gpus": gpus,
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(self._bundles, bundle),
                }
            log = self._log(name)
            self._actors[name] = ray.remote(Process).options(**options).remote(name, None if log is None else str(log))
        actors = [self._actors[name] for name in names]
        try:
            address = await asyncio.wait_for(translate(names[0], actors[0].address.remote()), START_S)
        except TimeoutError:
            raise UserError(
                f"{names[0]} found no place in the Ray cluster within {START_S} s (key: placement)"
            ) from None
        rendezvous = [Rendezvous(rank, len(args), address, None) for rank in range(len(args))]

        async def build(name: str, actor: Any, arguments: tuple[Any, ...], place: Rendezvous) -> None:
            """One that runs is among `processes()` at once, and among `ready()` when its role is there."""
            self._pids[name] = await translate(name, actor.pid.remote())
            await translate(name, actor.build.remote(factory, arguments, place))
            self._ready.add(name)

        await asyncio.gather(*map(build, names, actors, args, rendezvous))
        self._pids |= {name: self._pids.pop(name) for name in names}  # by rank again, not by who was first
        self._look()
        self._recipes |= dict(zip(names, ((factory, a, r) for a, r in zip(args, rendezvous, strict=True)), strict=True))
        return [RayHandle(name, actor) for name, actor in zip(names, actors, strict=True)]

    def processes(self) -> dict[str, int]:
        return dict(self._pids)

    def ready(self) -> set[str]:
        return set(self._ready)

    async def watch(self) -> None:
        up = [(name, actor) for name, actor in self._actors.items() if name not in self._down]
        gone = [asyncio.ensure_future(self._until_gone(name, actor)) for name, actor in up]
        daemons = asyncio.ensure_future(self._watch_daemons())
        try:
            done, _ = await asyncio.wait([*gone, daemons], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except RoleDied as error:  # of others that died in the same moment the next watch tells
            self._down.add(error.role)
            raise
        finally:
            for task in [*gone, daemons]:
                task.cancel()

    async def revive(self, name: str) -> None:
        """Ray has started the process again, or is about to; the role itself is built anew."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._pids[name] = await translate(name, self._actors[name].build.remote(*self._recipes[name]))
                self._down.discard(name)
                self._look()
                return
            except RoleDied:  # not back yet
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def _until_gone(self, name: str, actor: Any) -> None:
        try:
            await translate(name, actor.until_gone.remote())
        except RoleDied:
            self._check_daemons()  # without Ray every role seems dead
            known = ""
            if name in self._memory:
                free = psutil.virtual_memory().available / 2**20
                known = f"; it held {self._memory[name]:.0f} MB when last seen, {free:.0f} MB are free on this machine"
            pid, log = self._pids.get(name, "?"), self._log(name)
            printed = "" if log is None else f"; its output is in {log}"
            error = RoleDied(name, f"process {pid} is gone (killed, crashed, or out of memory{known}){printed}")
            if log is not None and (lines := last_lines(log)):
                error.add_note("\n  ".join([f"last lines of {log}:", *lines]))
            raise error from None

    def _log(self, name: str) -> Path | None:
        return None if self._logs is None else self._logs / f"{name}.log"

    def _check_daemons(self) -> None:
        for process in self._daemons.values():
            if not _alive(process):
                raise RoleDied("ray", f"its process {process.pid} is gone; nothing can be called any more")

    async def _watch_daemons(self) -> None:
        while True:
            self._check_daemons()
            if self._owns_cluster:
                self._look()
                for name, pid in self._pids.items():
                    with contextlib.suppress(psutil.Error, KeyError):
                        self._memory[name] = self._seen[pid].memory_info().rss / 2**20
            await asyncio.sleep(0.5)

    def stop(self) -> None:
        """The cluster, then whatever of ours still runs, in the middle of whatever it is."""
        import ray

        self._look()
        for actor in self._actors.values() if not self._owns_cluster else ():
            ray.kill(actor)
        self._actors.clear()
        if all(_alive(p) for p in self._daemons.values()):
            ray.shutdown()
            deadline = time.monotonic() + 3
        else:  # a shutdown would wait for those who cannot answer, now and again when the interpreter exits
            atexit.unregister(ray.shutdown)
            deadline = time.monotonic()
        while time.monotonic() < deadline and any(_alive(p) for p in self._seen.values()):
            time.sleep(0.05)
        for process in self._seen.values():
            _kill(process)
        if self._guard is not None:
            self._guard.dismiss()
        for log in self._logs.glob("*.log") if self._logs is not None else ():
            with contextlib.suppress(OSError):
                trim(log)  # what was printed since its process last looked

    def _look(self) -> None:
        """Remember every process below the driver: who is reparented later is still known."""
        if self._guard is not None:
            ours = (p for p in _descendants() if p.pid != self._guard.pid and p.pid not in self._strangers)
            self._seen |= {p.pid: p for p in ours}
            self._guard.tell(self._seen.values())


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()


def _interface_of(address: str) -> str | None:
    names = (name for name, found in psutil.net_if_addrs().items() if any(a.address == address for a in found))
    return next(names, None)


def _first_lines(text: str) -> str:
    return " ".join(text.split())[:400]
