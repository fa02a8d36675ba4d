"""Processes of tests that are the ranks of one world.

They are forked from a server that has imported torch, transformers and the trainer once. A process that imports them
itself needs four seconds of computing for it, which is more than most of these tests compute.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

PRELOAD = ["gcore.training.rank", "gcore.training.fsdp", "transformers.models.qwen3.modeling_qwen3"]


def free_address() -> str:
    """Where rank 0 can listen."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def context() -> ForkServerContext:
    """Makes processes. Their environment is that of this process when the first of them starts."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOAD)
    return found


def start_ranks(count: int, target: Callable[..., None], *args: Any) -> list[BaseProcess]:
    """Processes that call target(rank, *args)."""
    make = context().Process
    ranks: list[BaseProcess] = [make(target=target, args=(i, *args), daemon=True) for i in range(count)]
    for rank in ranks:
        rank.start()
    return ranks


def finish_ranks(ranks: Sequence[BaseProcess], limit_s: float = 300) -> None:
    for rank in ranks:
        rank.join(limit_s)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * len(ranks)
