"""The process group of trainer ranks: torch.distributed over gloo or NCCL. Controllers have their own (tree.py)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

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
