"""Collectives among controller processes: torch.distributed over gloo, in a thread, with names for timeouts."""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from gcore.protocols import Rendezvous

TIMEOUT_S = 6 * 3600.0  # the driver notices dead processes; this limit is for processes that hang


def join(rendezvous: Rendezvous, backend: str, timeout_s: float = TIMEOUT_S, device: Any = None) -> None:
    """Set up this process's default group. A single process needs no network."""
    timeout = timedelta(seconds=timeout_s)
    device = device if backend == "nccl" else None
    if rendezvous.address is None:
        if not dist.is_initialized():
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device)
        return
    host, _, port = rendezvous.address.rpartition(":")
    listener = None if rendezvous.listener is None else rendezvous.listener.detach()
    store = TCPStore(
        host,
        int(port),
        rendezvous.size,
        is_master=rendezvous.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    dist.init_process_group(
        backend,
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.size,
        timeout=timeout,
        device_id=device,
    )


class GlooGroup:
    """Implements protocols.Group. Each rank stores the name of its collective, so a timeout can name missing ranks."""

    def __init__(self, rendezvous: Rendezvous, timeout_s: float = TIMEOUT_S) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self._timeout_s = timeout_s
        self._open("0")
        self._pool.submit(join, rendezvous, "gloo", timeout_s).result()
        self._store: Store = dist.distributed_c10d._get_default_store()
        self._members: Any = None  # the default group
        self._num_subgroups = 0

    def _open(self, name: str) -> None:
        self._name, self._round = name, 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"collective-{name}")

    async def all_gather(self, name: str, value: Any) -> list[Any]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._all_gather, name, value)

    def subgroup(self) -> GlooGroup:
        self._num_subgroups += 1
        subgroup = copy.copy(self)
        subgroup._open(f"{self._name}.{self._num_subgroups}")
        limit = timedelta(seconds=self._timeout_s)
        subgroup._members = self._pool.submit(dist.new_group, backend="gloo", timeout=limit).result()
        return subgroup

    def _all_gather(self, name: str, value: Any) -> list[Any]:
        self._round += 1
        self._store.set(f"at/{self._name}/{self.rank}", f"{self._round} {name}")
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._members)
        except RuntimeError as error:
            raise TimeoutError(
                f"collective {name!r} failed after up to {self._timeout_s:.0f} s: {self._missing(name)}"
            ) from error
        return values

    def _missing(self, name: str) -> str:
        try:
            keys = [f"at/{self._name}/{rank}" for rank in range(self.size)]
            notes = [self._store.get(key) if self._store.check([key]) else b"0 the start" for key in keys]
            places = [note.decode().split(" ", 1) for note in notes]
        except RuntimeError:
            return "the group's store is not reachable (controller-0 died?)"
        behind = [
            f"controller-{r} (last seen at {at!r})"
            for r, (number, at) in enumerate(places)
            if int(number) < self._round
        ]
        return "missing " + ", ".join(behind) if behind else "all ranks had joined; a connection broke"
