"""Trainer -> engines: the policy's new weights, and the version every later token is stamped with.

All ranks gather a part together (a collective); it goes to the engines by reference, straight from a rank's process to
theirs, and passes through nobody else: as tensors in one process, as handles to GPU memory on one GPU, through shared
memory on one machine. While engines take one part, the next is gathered; no more than two are ever held.

An engine answers with the version it serves, and each part carries a checksum: one that missed an update, or got it
damaged, is found here and not in the gradients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from gcore.protocols import Handle, Ref, RoleDied


async def transfer(trainers: Sequence[Handle], engines: Mapping[int, Handle], version: int) -> list[str]:
    """Every rank offers what it has: engine i takes it from rank i where all have it, else from rank 0.

    Returns the names of the engines that serve `version` now; one that died on the way is not among them.
    """
    count, everywhere = await trainers[0].call("weight_parts")
    sources = {i: i % len(trainers) if everywhere else 0 for i in engines}
    living = dict(engines)
    coming = [trainer.submit("weights", 0) for trainer in trainers]
    for index in range(count):
        here = coming
        if index + 1 < count:
            coming = [trainer.submit("weights", index + 1) for trainer in trainers]
        loads = (_load(engine, version, here[sources[i]], (index, count)) for i, engine in living.items())
        served = dict(zip(living, await asyncio.gather(*loads), strict=True))
        living = {i: engine for i, engine in living.items() if served[i] is not None}
        for rank in set(range(len(trainers))) - set(sources.values()):
            await here[rank]
    late = [engine.name for i, engine in living.items() if served[i] != version]
    if late:
        raise RuntimeError(f"{', '.join(late)} did not take the weights of version {version}")
    return [engine.name for engine in living.values()]


async def _load(engine: Handle, version: int, weights: Ref, part: tuple[int, int]) -> int | None:
    try:
        served: int = await engine.call("load_weights", version, weights, part)
        return served
    except RoleDied:  # the supervisor hears of it too, and brings it back
        return None
