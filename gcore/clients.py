"""Typed clients for roles in other processes: one thin class per role, over its Handle.

    runtime.start_group ──> Handle ──> EngineClient, TrainerClient, ... ──> pools, dispatcher, driver

A client has the methods of its role with their signatures (protocols.py), so the type checker sees every call between
processes. No other file names a method by a string. A client can be sent to another process if its Handle can.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from gcore.protocols import Controller, Engine, Handle, Receivers, Ref, Scorer, Trainer, Weights

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Client:
    """A replica of a role, called through its Handle."""

    handle: Handle

    @property
    def name(self) -> str:
        return self.handle.name


class RemoteMethod(Generic[P, T]):
    """A method of a role, called in the role's process. Arguments are positional."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        self.method = method

    def __get__(self, client: Client, _: type[Client]) -> Callable[P, Coroutine[Any, Any, T]]:
        return partial(client.handle.call, self.method.__name__)


class EngineClient(Client):
    """Of an engine of the policy or of a judge."""

    __slots__ = ()
    generate = RemoteMethod(Engine.generate)
    abort = RemoteMethod(Engine.abort)
    sleep = RemoteMethod(Engine.sleep)
    wake = RemoteMethod(Engine.wake)
    reset = RemoteMethod(Engine.reset)
    stats = RemoteMethod(Engine.stats)

    async def load_weights(
        self, version: int, weights: Weights | Ref[Weights], bucket: tuple[int, int] = (0, 1)
    ) -> int:
        return await self.handle.call("load_weights", version, weights, bucket)


class ScorerClient(Client):
    __slots__ = ()
    score = RemoteMethod(Scorer.score)
    stats = RemoteMethod(Scorer.stats)


class TrainerClient(Client):
    """Of a trainer rank or of a critic rank."""

    __slots__ = ()
    info = RemoteMethod(Trainer.info)
    end_warm_start = RemoteMethod(Trainer.end_warm_start)
    push = RemoteMethod(Trainer.push)
    compute_logprobs = RemoteMethod(Trainer.compute_logprobs)
    column = RemoteMethod(Trainer.column)
    take_column = RemoteMethod(Trainer.take_column)
    update = RemoteMethod(Trainer.update)
    evaluate = RemoteMethod(Trainer.evaluate)
    weight_plan = RemoteMethod(Trainer.weight_plan)
    snapshot = RemoteMethod(Trainer.snapshot)
    write = RemoteMethod(Trainer.write)
    abandon = RemoteMethod(Trainer.abandon)
    load = RemoteMethod(Trainer.load)

    def weight_bucket(self, index: int, receivers: Receivers) -> Ref[Weights]:
        """Starts the call; the bucket stays in the rank's process until an engine reads it."""
        return self.handle.submit("weight_bucket", index, receivers)

    async def load_policy(self, weights: Weights | Ref[Weights]) -> None:
        await self.handle.call("load_policy", weights)


class ControllerClient(Client):
    """For the driver."""

    __slots__ = ()
    run = RemoteMethod(Controller.run)
    evaluate = RemoteMethod(Controller.evaluate)
    status = RemoteMethod(Controller.status)
    mark_dead = RemoteMethod(Controller.mark_dead)
    begin_restart = RemoteMethod(Controller.begin_restart)
    restore = RemoteMethod(Controller.restore)
    mark_alive = RemoteMethod(Controller.mark_alive)
    finished_step = RemoteMethod(Controller.finished_step)
    go_on = RemoteMethod(Controller.go_on)
