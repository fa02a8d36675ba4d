"""Controller side of a weight update: trainer ranks -> engines, then every engine serves the new version.

    for every bucket:   trainer ranks gather it together ──Ref──> engines load it
                        (bucket i + 1 is gathered while bucket i is loaded; at most two are held)

Only references pass through the controller: the bytes go from a rank's process to the engines' (see publisher.py).
Every engine returns the version that it serves, so an engine that missed an update is detected here.

An engine that dies is left out; the driver starts it again. If that breaks a broadcast group, the other engines
report BroadcastError, and the update starts again without the dead engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from gcore.clients import EngineClient, TrainerClient
from gcore.protocols import BroadcastError, Receivers, Ref, RoleDied, RoleError, WeightPlan, Weights

ATTEMPTS = 3


class WeightTransfer:
    """Runs in controller 0. All ranks publish. Engine i reads from rank i if all ranks hold weights, else from 0."""

    def __init__(self, trainers: Sequence[TrainerClient]) -> None:
        self._trainers = trainers
        self._plan: WeightPlan | None = None  # the same for the whole run
        self._unconnected: set[str] = set()  # engines of no broadcast group, or of a broken one

    def mark_dead(self, name: str) -> None:
        """The engine with this name is another process when the next weights are sent to it."""
        self._unconnected.add(name)

    async def send(self, engines: Mapping[int, EngineClient], version: int) -> list[str]:
        """Returns the names of the engines that serve `version` now: all but those that died during the transfer."""
        names = {engine.name for engine in engines.values()}
        restarted = not names.isdisjoint(self._unconnected)
        self._unconnected -= names
        served = list[str]()
        try:
            served = await self._send(engines, version, restarted)
        finally:
            self._unconnected |= names.difference(served)
        return served

    async def _send(self, engines: Mapping[int, EngineClient], version: int, restarted: bool) -> list[str]:
        alive = dict(engines)
        plan = self._plan = self._plan or await self._trainers[0].weight_plan()
        rank_of = {i: i % len(self._trainers) if plan.every_rank else 0 for i in engines}
        broken: RoleError | None = None

        async def load(engine: EngineClient, weights: Ref[Weights], index: int) -> int | RoleError | None:
            """The version that the engine serves; None if it died; the error if its broadcast failed."""
            try:
                return await engine.load_weights(version, weights, (index, plan.num_buckets))
            except RoleDied:
                return None
            except RoleError as error:
                if error.kind != BroadcastError.__name__:
                    raise
                return error

        for attempt in range(ATTEMPTS):
            receivers = Receivers(tuple(engine.name for engine in alive.values()), restarted or attempt > 0)
            unread_ranks = set(range(len(self._trainers))) - {rank_of[i] for i in alive}
            next_refs = self._gather(0, receivers)
            for index in range(plan.num_buckets):
                refs = next_refs
                if index + 1 < plan.num_buckets:
                    next_refs = self._gather(index + 1, receivers)
                loads = (load(engine, refs[rank_of[i]], index) for i, engine in alive.items())
                answers = dict(zip(alive, await asyncio.gather(*loads), strict=True))
                alive = {i: engine for i, engine in alive.items() if answers[i] is not None}
                for rank in unread_ranks:  # no engine reads these: await them, so that their errors are raised
                    await refs[rank]
                broken = next((answer for answer in answers.values() if isinstance(answer, RoleError)), None)
                if broken is not None:
                    with contextlib.suppress(RoleError):  # end this attempt before the next one starts
                        await asyncio.gather(*next_refs)
                    break
            else:
                if late := [engine.name for i, engine in alive.items() if answers[i] != version]:
                    raise RuntimeError(f"{', '.join(late)} did not load the weights of version {version}")
                return [engine.name for engine in alive.values()]
        assert broken is not None
        raise broken

    def _gather(self, index: int, receivers: Receivers) -> list[Ref[Weights]]:
        """Start gathering a bucket: a collective of all ranks."""
        return [trainer.weight_bucket(index, receivers) for trainer in self._trainers]


async def copy_policy(trainers: Sequence[TrainerClient], critics: Sequence[TrainerClient]) -> None:
    """A critic with ranks of its own becomes a copy of the policy, bucket by bucket. Called by controller 0."""
    plan = await trainers[0].weight_plan()
    for index in range(plan.critic_buckets):
        receivers = Receivers(tuple(critic.name for critic in critics), are_critics=True)
        refs = [trainer.weight_bucket(index, receivers) for trainer in trainers]
        await asyncio.gather(*(critic.load_policy(refs[0]) for critic in critics), *refs[1:])
