"""Trainer -> engines: the policy's new weights, and the version every later token is stamped with.

All ranks gather a part together (a collective); it goes to the engines by reference, straight from a rank's process to
theirs, and passes through nobody else: as tensors in one process, as handles to GPU memory on one GPU, through shared
memory on one machine, or over a line from GPU to GPU (line.py), of which the reference carries no more than a note.
While engines take one part, the next is gathered; no more than two are ever held. Where adapters are trained
(model.lora), the parts are their factors, and engines add them to what they started with.

An engine answers with the version it serves, and each part carries a checksum: one that missed an update, or got it
damaged, is found here and not in the gradients.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from gcore.protocols import Handle, Ref, RoleDied, RoleError

TRIES = 3  # a line breaks when one engine dies: the others try again without it


class _Broken(Exception):
    """The line on which the weights came, with who is left."""

    def __init__(self, living: dict[int, Handle], cause: RoleError) -> None:
        self.living, self.cause = living, cause


async def transfer(
    trainers: Sequence[Handle], engines: Mapping[int, Handle], version: int, fresh: bool = False
) -> list[str]:
    """Every rank offers what it has: engine i takes it from rank i where all have it, else from rank 0.

    `fresh`: some engines have died and come back since the last time. Returns the names of the engines that serve
    `version` now; one that died on the way is not among them.
    """
    for left in reversed(range(TRIES)):
        try:
            return await _once(trainers, engines, version, fresh)
        except _Broken as broken:
            if not left:
                raise broken.cause from None
            engines, fresh = broken.living, True
    raise AssertionError


async def _once(trainers: Sequence[Handle], engines: Mapping[int, Handle], version: int, fresh: bool) -> list[str]:
    names = [engine.name for engine in engines.values()]
    count, everywhere = await trainers[0].call("weight_parts", names, fresh)
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
        if causes := [answer for answer in served.values() if isinstance(answer, RoleError)]:
            with contextlib.suppress(RoleError):  # nothing of this try may be under way in the next
                await asyncio.gather(*(_settled(ref) for ref in coming))
            raise _Broken(living, causes[0])
    late = [engine.name for i, engine in living.items() if served[i] != version]
    if late:
        raise RuntimeError(f"{', '.join(late)} did not take the weights of version {version}")
    return [engine.name for engine in living.values()]


async def _settled(ref: Ref) -> None:
    await ref


async def _load(engine: Handle, version: int, weights: Ref, part: tuple[int, int]) -> int | RoleError | None:
    """The version it serves; None where it died; the error where its line broke."""
    try:
        served: int = await engine.call("load_weights", version, weights, part)
        return served
    except RoleDied:  # the supervisor hears of it too, and brings it back
        return None
    except RoleError as error:
        if not error.message.startswith("LineError"):
            raise
        return error
