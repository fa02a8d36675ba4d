"""Trainer -> engines: the policy's new weights, and the version every later token is stamped with.

All ranks gather together (a collective); rank 0's answer goes to the engines by reference, so the weights travel from
its process to theirs (through shared memory on one machine) and pass through nobody else. An engine answers with the
version it now serves: one that missed an update is found here, not in the gradients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gcore.protocols import Handle


async def transfer(trainers: Sequence[Handle], engines: Sequence[Handle], version: int) -> None:
    gathered = [trainer.submit("weights") for trainer in trainers]
    served = await asyncio.gather(*(engine.call("load_weights", version, gathered[0]) for engine in engines))
    for other in gathered[1:]:
        await other
    late = [e.name for e, v in zip(engines, served, strict=True) if v != version]
    if late:
        raise RuntimeError(f"{', '.join(late)} did not take the weights of version {version}")
