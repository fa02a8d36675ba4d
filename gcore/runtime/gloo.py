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
    rank, size, timeout = rendezvous.rank, rendezvous.size, timedelta(seconds=timeout_s)
    store: HashStore | TCPStore
    if rendezvous.address is None:
        if dist.is_initialized():
            return
        rank, size, store = 0, 1, HashStore()
    else:
        host, _, port = rendezvous.address.rpartition(":")
        store = TCPStore(
            host,
            int(port),
            size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if rendezvous.listener is None else rendezvous.listener.detach(),
        )
    device = device if backend == "nccl" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device)
