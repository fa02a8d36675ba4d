"""Ray outside of the roles: join a cluster, list its nodes, watch its daemons, reserve GPUs.

RAY_ADDRESS ──join──> nodes ──> the plan (controller/) ──reserve──> Reservation ──strategy──> options of an actor
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil

from gcore.observe.files import no_link
from gcore.protocols import RoleDied
from gcore.task_group import task_group
from gcore.types import UserError

DAEMONS = ("gcs_server", "raylet")
DAEMONS_S = 0.5  # between two looks at them
STOPPED_LOOKS = 10  # that find one of them stopped, before the run ends
PROBE_S = 5.0
RESERVE_S = 60
PROBE_GPUS = 0.01  # shares of roles leave at least 0.05 of a GPU
HIDDEN_MESSAGES = (
    "maximum expected startup concurrency",  # more processes than cores are intended
    "A worker died or was killed",  # the driver names the role
    "The autoscaler failed",  # it is ended with the run and logs an error
)


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a process runs. ProcessPlace(node="75e354...", bundles=(2, 3), gpus=0.475)"""

    node: str = ""  # Ray's id of the node; empty: any node
    bundles: tuple[int, ...] = ()  # of the reserved GPUs that it uses; all on one node
    gpus: float = 0.0  # GPUs to reserve in the first bundle


def is_joined() -> bool:
    """A cluster exists that the run should use: RAY_ADDRESS names it, or this process has joined it already."""
    ray = sys.modules.get("ray")
    return bool(os.environ.get("RAY_ADDRESS")) or (ray is not None and ray.is_initialized())


def only_this_machine() -> None:
    """Ray and all roles listen on the loopback interface. By default Ray listens on all interfaces on Linux, and on
    loopback elsewhere; this variable chooses. It must be set before Ray is imported."""
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def join() -> None:
    """Connect this process to the cluster at RAY_ADDRESS, if it is not connected yet."""
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        _probe(_resolved(address))
        import ray

        if not ray.is_initialized():
            quiet_ray(None)
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"RAY_ADDRESS={address}: cannot join a Ray cluster there ({' '.join(str(error).split())[:300]}); start one "
            "with `ray start --head`, or unset RAY_ADDRESS to use only this machine"
        ) from error


def _resolved(address: str) -> str:
    """`auto`: the address of a cluster that runs on this machine, or that of the last `ray start`, which Ray keeps in a
    file. Other addresses: unchanged. Raises ConnectionError if there is none."""
    if address != "auto":
        return address
    from ray._private import services

    find = getattr(services, "get_ray_address_from_environment", None)
    return address if find is None else str(find(address, None))


def _probe(address: str) -> None:
    """Raises OSError if nothing listens at HOST:PORT. Ray itself waits for two minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
        except OSError as error:
            raise OSError(f"{error}, at {address}") from None


def list_nodes() -> tuple[list[dict[str, Any]], str]:
    """Join the cluster. The nodes, as Ray describes them, and the id of the node of this process."""
    join()
    import ray

    return ray.nodes(), ray.get_runtime_context().get_node_id()


def node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def interface_of(address: str) -> str | None:
    """The interface with this address. All of 127.0.0.0/8 belongs to the loopback interface, which lists only one."""
    with contextlib.suppress(ValueError):  # a host name
        if ip_address(address).is_loopback:
            address = "127.0.0.1"
    names = (name for name, addresses in psutil.net_if_addrs().items() if any(a.address == address for a in addresses))
    return next(names, None)


def quiet_ray(log: Path | None) -> None:
    """Write the messages that Ray prints on the driver's screen to `log`. Do not show HIDDEN_MESSAGES."""
    from ray._private import worker

    original: Any = getattr(worker, "print_to_stdstream", None)
    if original is None:
        return
    original = getattr(original, "_original", original)  # a run before in the same process replaced it already

    def log_and_print(data: dict[str, Any], *args: Any, **options: Any) -> None:
        lines = data.get("lines", ())
        if log is not None:
            with contextlib.suppress(OSError), open(log, "a", opener=no_link) as file:
                file.writelines(f"{line}\n" for line in lines)
        if not any(message in line for line in lines for message in HIDDEN_MESSAGES):
            original(data, *args, **options)

    log_and_print._original = original  # type: ignore[attr-defined]
    worker.print_to_stdstream = log_and_print


class Daemons:
    """Ray's own processes, without which no process of a run can be started. `processes`: those of a private cluster.
    On a cluster that was joined there is nothing to look at here."""

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._all = {p.name(): p for p in processes if p.name().startswith(DAEMONS)}

    def all_work(self) -> bool:
        return all(is_alive(process) and not _is_stopped(process) for process in self._all.values())

    def check(self, stopped_too: bool = True) -> None:
        """RoleDied if Ray itself has failed: it, and no role, is to blame."""
        for name, process in self._all.items():
            if not is_alive(process):
                text = f"its process {name} ({process.pid}) is gone; no role can be called any more"
                raise RoleDied("ray", text, observed=True)
            if stopped_too and _is_stopped(process):
                text = f"its process {name} ({process.pid}) is stopped (SIGSTOP); no role can be started any more"
                raise RoleDied("ray", text, observed=True)

    async def until_one_fails(self) -> None:
        looks = 0  # in a row that saw one stopped. Looks, not seconds: this process may have been stopped with it
        while True:
            looks = looks + 1 if any(map(_is_stopped, self._all.values())) else 0
            self.check(stopped_too=looks > STOPPED_LOOKS)
            await asyncio.sleep(DAEMONS_S)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Raises RoleDied if one fails during the call: Ray's calls wait without end for a daemon that is stopped."""
        async with task_group() as tasks:
            failing = tasks.create_task(self.until_one_fails())
            yield
            failing.cancel()


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() == psutil.STATUS_STOPPED
    return False


class Reservation:
    """The GPUs of a run: a placement group of Ray. `nodes`: id of the node of each bundle; empty: any node."""

    def __init__(self, bundles: Sequence[int], nodes: Sequence[str] = ()) -> None:
        from ray.util import placement_group

        selectors = [{"ray.io/node-id": node} for node in nodes] if any(nodes) else None
        self._group = placement_group([{"GPU": gpus, "CPU": 1} for gpus in bundles], bundle_label_selector=selectors)
        if not self._group.wait(timeout_seconds=RESERVE_S):
            raise UserError(
                f"the Ray cluster did not provide {sum(bundles)} GPUs, with one CPU for each process, within "
                f"{RESERVE_S} s (key: placement.trainer.ranks)"
            )
        self._gpu_ids: dict[int, list[str]] = {}  # by bundle; they do not change

    def strategy(self, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, bundle)

    async def visible_gpus(self, bundles: Sequence[int]) -> str | None:
        """CUDA_VISIBLE_DEVICES of a process that uses several bundles. None: Ray sets it, for one bundle."""
        import ray

        if len(bundles) < 2:
            return None
        for bundle in bundles:
            if bundle not in self._gpu_ids:
                probe = ray.remote(_own_gpu_ids).options(
                    num_cpus=0, num_gpus=PROBE_GPUS, scheduling_strategy=self.strategy(bundle)
                )
                self._gpu_ids[bundle] = await probe.remote()
        return ",".join(gpu for bundle in bundles for gpu in self._gpu_ids[bundle])


def _own_gpu_ids() -> list[str]:
    import ray

    return [str(gpu) for gpu in ray.get_gpu_ids()]
