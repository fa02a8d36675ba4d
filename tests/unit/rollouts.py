"""A run of several controllers in one event loop whose clock jumps: nothing is generated, everything is scripted.

    World: sampling, size, delay(prompt, attempt), outcome(prompt, version) ──run──> what each controller collected

A wait costs no time. When everyone waits for what cannot come, it is an error and not a hang.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from gcore.config.sampling import Sampling
from gcore.content.tokens import Tokens
from gcore.controller.collect import Collector, spread
from gcore.controller.prompt_ledger import REWARD_ERROR, Collected
from gcore.controller.run_prompts import Filter
from gcore.protocols import Rendezvous
from gcore.runtime.local import Hub, LocalGroup
from gcore.types import Prompt, RewardError, Rollout, Scored
from gcore.workflows.context import StageClock

FOREVER = 1e9


class JumpingLoop(asyncio.SelectorEventLoop):
    """When nothing is ready, the clock goes straight to what is due next."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            assert timeout is not None, "deadlock: everyone waits, and nothing is due"
            self._now += timeout
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now


def run(main: Coroutine[Any, Any, Any], bound_s: float = 3600.0) -> Any:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(asyncio.wait_for(main, bound_s))


def prompt_at(number: int) -> Prompt:
    return Prompt(number, number, (), "", Tokens(np.array([1], np.int32)))


def scored(number: int, sibling: int, reward: float = 1.0, versions: tuple[int, ...] = (0,)) -> Scored:
    steps = np.array(versions, np.int32)
    logprobs, mask = np.zeros(len(steps), np.float32), np.ones(len(steps), np.bool_)
    return Scored(Rollout(prompt_at(number), sibling, Tokens.steps(steps), logprobs, mask, "", steps, "stop"), reward)


def group_of(number: int, good: bool = True, versions: tuple[int, ...] = (0,)) -> list[Scored]:
    return [scored(number, 0, 0.0, versions), scored(number, 1, float(good), versions)]


def number_of(group: list[Scored]) -> int:
    return group[0].rollout.prompt.id


def numbers(found: list[Collected]) -> list[int]:
    """The prompts of a step, over all controllers."""
    return sorted(number_of(group) for part in found for group in part.groups)


@dataclass
class World:
    """`outcome`: True is a group with spread, False one without; an exception is raised."""

    sampling: Sampling
    size: int = 1
    delay: Callable[[int, int], float] = lambda prompt, attempt: 0.1
    outcome: Callable[[int, int], bool | Exception] = lambda prompt, version: True
    train_s: float = 0.5
    late_s: float = 0.0  # how much later than controller 0 the others begin
    keep: Filter = spread
    version: int = 0  # the engines'
    started: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)  # for good, in the modes that forget nothing
    steps: list[list[Collected]] = field(default_factory=list)  # by step, by rank
    reports: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        hub = Hub(self.size)
        self.groups = [LocalGroup(Rendezvous(rank, self.size, None, hub)) for rank in range(self.size)]
        self.collectors = [self._collector(group) for group in self.groups]

    def _collector(self, group: LocalGroup) -> Collector:
        shared: Any = SimpleNamespace(clock=StageClock(), take_calls=Counter, least_siblings=2, baseline=None)
        source: Any = SimpleNamespace(at=prompt_at)
        rest = self.sampling, self._filter, self.reports.append, source, lambda: self.version
        return Collector(self.workflow, shared, group, *rest)

    async def workflow(self, ctx: Any, prompt: Prompt) -> list[Scored]:
        attempt, first = self.started.count(prompt.id), self.version
        self.started.append(prompt.id)
        try:
            await asyncio.sleep(self.delay(prompt.id, attempt))
        except asyncio.CancelledError:
            self.aborted.append(prompt.id)
            raise
        outcome = self.outcome(prompt.id, first)
        if isinstance(outcome, Exception):
            self.dropped.append(prompt.id)
            raise outcome
        return group_of(prompt.id, outcome, (first, self.version))

    def _filter(self, group: list[Scored]) -> tuple[bool, str]:
        keep, reason = self.keep(group)
        if not keep:
            self.dropped.append(number_of(group))
        return keep, reason

    async def train(self, steps: int) -> None:
        """All controllers, as in the training loop: rollout, training, weights; then the collectors stand still."""
        begin = self.version + 1
        self.steps += [[Collected()] * self.size for _ in range(steps)]
        await asyncio.gather(*(self._controller(rank, begin, steps) for rank in range(self.size)))
        self.places = [c.prompts.place(c.rate) for c in self.collectors]
        self.pool = [group for c in self.collectors for group in c.prompts.ready.values()]
        for collector in self.collectors:
            collector.close()

    async def _controller(self, rank: int, begin: int, steps: int) -> None:
        collector, group = self.collectors[rank], self.groups[rank]
        await asyncio.sleep(self.late_s if rank else 0.0)
        for step in range(begin, begin + steps):
            self.steps[step - begin][rank] = await collector.step(step)
            await asyncio.sleep(self.train_s)
            await group.all_gather("trained", None)
            if rank == 0:
                self.version = step
            await group.all_gather("weights", None)


def of_chance(seed: object, drop: float, error: float = 0.0, slow: float = 0.1) -> dict[str, Any]:
    """Delays and outcomes drawn once and for all; the outcomes do not know the timing."""

    def delay(prompt: int, attempt: int) -> float:
        dice = random.Random(f"{seed}/{prompt}/{attempt}")
        return dice.random() * (3.0 if dice.random() < slow else 0.2)

    return {"delay": delay, "outcome": outcome_of_chance(str(seed).partition("/")[0], drop, error)}


def outcome_of_chance(seed: object, drop: float, error: float) -> Callable[[int, int], bool | Exception]:
    def outcome(prompt: int, version: int) -> bool | Exception:
        number = random.Random(f"{seed}/{prompt}/{version}/outcome").random()
        return RewardError(f"no reward for {prompt}") if number < error else number >= error + drop

    return outcome


def in_order(world: World, steps: int) -> list[tuple[list[int], Counter[str], int]]:
    """What strict means, one prompt after another: those trained on, why others were not, how many were looked at."""
    found, base = [], 0
    for step in range(steps):
        good, why, cursor = list[int](), Counter[str](), base
        while len(good) < world.sampling.prompts_per_step and cursor < base + world.sampling.window:
            match world.outcome(cursor, step):
                case True:
                    good.append(cursor)
                case False:
                    why["no_spread"] += 1
                case _:
                    why[REWARD_ERROR] += 1
            cursor += 1
        found.append((good, why, cursor - base))
        base = cursor
    return found
