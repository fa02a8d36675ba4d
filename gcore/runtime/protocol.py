"""The interface of a runtime: it starts, watches and ends the processes of a run. The driver alone uses it. Also what
is known about a node of a cluster (runtime/nodes.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gcore.protocols import Handle


class Runtime(Protocol):
    """Starts and monitors roles. Implementations: runtime/local.py, runtime/ray.py. The methods that have a body do
    what is right where all roles share one process, which is the caller's."""

    def prepare(self, kind: str, count: int, imports: Callable[[], None]) -> None:
        """Start the processes of a group that `start_group` will build later. Meanwhile they call `imports`."""
        return

    async def start_group(
        self, kind: str, factory: Callable[..., Any], args: Sequence[tuple[Any, ...]]
    ) -> Sequence[Handle]:
        """Build `factory(*args[i], rendezvous)` as `KIND-i`, each in its own process."""

    def processes(self) -> dict[str, int]:
        """Role -> process id, for messages and debuggers. Includes roles that are still being built."""
        return {}

    def ready(self) -> set[str]:
        """Roles that are built, if roles have their own processes."""
        return set()

    async def watch(self) -> None:
        """Never returns; raises RoleDied as soon as a started role dies."""

    async def revive(self, name: str) -> None:
        """Start a dead role again, with the same factory and arguments. Handles to it stay valid."""
        raise AssertionError(f"{name} cannot die alone: it runs in this process")

    def dead(self) -> set[str]:
        """Roles whose death `watch` has reported and that are not revived."""
        return set()

    async def answers(self, name: str) -> None:
        """Returns when the process of a role has answered: it is neither stopped nor blocked."""
        return

    def kill(self, name: str) -> None:
        """End the process of a role at once, also one that is stopped. `watch` reports its death."""
        raise AssertionError(f"{name} cannot be killed alone: it runs in this process")

    def dump_stacks(self) -> None:
        """Every process of this machine writes the stacks of its threads to its log."""
        return

    async def stop_group(self, kind: str) -> None:
        """End all processes of a kind. Its handles are invalid then, and `start_group` can start it again."""
        raise AssertionError(f"{kind}: roles of this process are not restarted")

    def stop(self) -> None:
        """End every process this runtime started."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a process on a node of a cluster has seen there. NodeFacts("10.0.0.2", "host2", versions={"torch": ...})"""

    address: str
    host: str = ""
    failure: str = ""  # why it could not be looked at; then everything else is empty
    versions: Mapping[str, str] = field(default_factory=dict)  # of Python, G-Core and packages that are installed
    code: str = ""  # digest of G-Core's files
    gpus: tuple[str, ...] = ()  # names and drivers
    interface: str = ""  # that has the address; empty: none
    clock_s: float = 0.0  # ahead of the driver's clock
    clock_error_s: float = 0.0  # at most
    sizes: Mapping[str, int] = field(default_factory=dict)  # of the paths asked for: bytes, 0 for a folder, -1: missing
    folder: str = ""  # why the folder asked for is not shared with the driver; empty: it is
    link: str = ""  # why the next node cannot be reached at a free port; empty: it can
    link_mb_s: float = 0.0  # to the next node; 0: not measured
