"""What a pool of replicas has sent, and why it sends nothing to some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gcore.generation.pool import ClientPool, Reason


@dataclass(frozen=True)
class Outstanding:
    """One controller's load on a replica."""

    name: str
    requests: int
    work: int  # tokens of the prompts plus maximum tokens of the responses
    closed: tuple[Reason, ...] = ()  # why nothing is sent to it; empty: it is open


@dataclass(frozen=True)
class PoolState:
    waiting: int  # requests in the pool's own queue
    replicas: tuple[Outstanding, ...]


def observe(pool: ClientPool[Any]) -> PoolState:
    columns = zip(pool.replicas, pool._router.counts, pool._router.loads, pool._closed, strict=True)
    replicas = tuple(Outstanding(r.name, count, work, tuple(sorted(why))) for r, count, work, why in columns)
    return PoolState(sum(entry.count for _, _, entry, granted in pool._waiting if not granted.done()), replicas)
