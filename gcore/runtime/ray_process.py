"""A process of a run under Ray: a thin host that builds its role and forwards calls to it."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gcore import faults, user_files
from gcore.observe.logs import Log
from gcore.protocols import Rendezvous, RoleDied, RoleError
from gcore.runtime.ray_cluster import interface_of, node_address


class Process:
    """The host of one role. Runs as a Ray actor."""

    def __init__(self, name: str, log: str | None = None, folder: str | None = None, files: bytes = b"") -> None:
        """`folder`: the driver's current folder, from which relative paths of the recipe start. `files`: the user's."""
        self.name = name
        self.role: Any = None
        self._listener: socket.socket | None = None
        self._building = asyncio.Lock()
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not spin on a core
        if folder is not None:
            with contextlib.suppress(OSError):  # a node without this folder needs absolute paths
                os.chdir(folder)
        if log is not None:
            with contextlib.suppress(OSError):  # a node without the run's folder prints to Ray's own log
                Log(Path(log)).take_over(name if folder is None else f"{name} on node {node_address()}")
        if files:
            user_files.unpack(files)
        faulthandler.register(signal.SIGUSR1, file=2)  # for `dump_stacks`; 2: where the log is now

    async def address(self) -> str:
        """A free host:port on this machine. The socket stays open, so that no other process gets the port."""
        host = node_address()
        self._listener = socket.create_server((host, 0))
        return f"{host}:{self._listener.getsockname()[1]}"

    async def pid(self) -> int:
        return os.getpid()

    async def prepare(self, imports: Callable[[], None]) -> None:
        with contextlib.suppress(Exception):  # `build` fails too, and reports it
            await asyncio.to_thread(imports)

    async def build(
        self,
        factory: Callable[..., Any],
        args: tuple[Any, ...],
        rendezvous: Rendezvous,
        visible_gpus: str | None = None,
    ) -> None:
        """`visible_gpus`: the GPUs to use; None: those that Ray has chosen. If a restart was interrupted by a rollback,
        the role may be built already, or is being built: it is never built twice in one process."""
        async with self._building:
            if self.role is not None:
                return
            if visible_gpus is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus
            if interface := interface_of(node_address()):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # else gloo resolves the host name: it may fail
            try:
                self.role = await asyncio.to_thread(factory, *args, replace(rendezvous, listener=self._listener))
            except Exception as error:
                raise self._wrap(error) from None
            finally:
                if self._listener is not None:
                    self._listener.close()  # does nothing if the role's group uses it

    async def call(self, method: str, *args: Any) -> Any:
        if self.role is None:  # sent to the process before this one: Ray delivers the call after the restart
            raise RoleDied(self.name, "the process was restarted, the role is not built yet")
        try:
            faults.reach(method)
            return await getattr(self.role, method)(*args)
        except (RoleError, RoleDied, asyncio.CancelledError):
            raise
        except Exception as error:
            raise self._wrap(error) from None

    def _wrap(self, error: Exception) -> RoleError:
        cause = getattr(error, "cause", error)
        if isinstance(cause, RoleError):
            return cause
        return RoleError.of(self.name, error, traceback.format_exc())

    async def until_gone(self) -> None:
        if self.role is None:  # it died between two calls of `watch`
            raise RoleDied(self.name, "the process was restarted, the role is not built yet")
        await asyncio.Event().wait()
