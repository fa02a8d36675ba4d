"""The reward of a sample: the weighted sum over all sources. A source that fails is retried; then the group fails.

group ──> all sources at once ──(retry)──> weighted sum ──> Scored, or RewardError (the group is dropped and counted)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from gcore import faults
from gcore.config.base import LARGEST
from gcore.protocols import ReplicaPool, RoleDied, RoleError
from gcore.rewarding.source import Answer, BadAnswer, Source, TimedOut, line_of, short
from gcore.types import Message, RewardError, Rollout, Scored, UserError


class WeightedRewarder:
    """Implements protocols.Rewarder."""

    def __init__(
        self,
        sources: Sequence[Source],
        backoff_s: float = 0.1,
        pools: Sequence[ReplicaPool] = (),
        least_scored: int | None = None,
    ):
        """`least_scored`: siblings without a reward are dropped as long as at least this number remains. None: the
        whole group fails."""
        self.pools = pools
        self._least_scored = least_scored
        self.sources = {source.name: source for source in sources}
        self.backoff_s = backoff_s
        self.counts: Counter[str] = Counter()

    def check(self, columns: Collection[str]) -> None:
        """Before the run: does the dataset (a prompt's `columns`) have the columns that the sources need?"""
        for source in self.sources.values():
            source.check(columns)

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]:
        """Scores the siblings of one prompt by all sources at once. Raises RewardError; a failure is never a 0."""
        results = await asyncio.gather(*(self._ask(s, group) for s in self.sources.values()), return_exceptions=True)
        answers: dict[str, Answer] = {}
        for name, result in zip(self.sources, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            answers[name] = result
        scored = [s for i, rollout in enumerate(group) if (s := self._blend(i, rollout, answers)) is not None]
        unscored = len(group) - len(scored)
        least = len(group) if self._least_scored is None else min(self._least_scored, len(group))
        if len(scored) < least:
            every = "every source returned None" if len(answers) > 1 else "it returned None"
            raise RewardError(
                f"reward {', '.join(map(repr, answers))}, prompt {group[0].prompt.id}: {every} for {unscored} of "
                f"{len(group)} siblings; expected a number from at least one source for each "
                "(rewards.unscored=drop_sample drops such siblings)"
            )
        if unscored:
            self.counts["unscored"] += unscored
        return scored

    async def score(self, name: str, group: Sequence[Rollout]) -> list[float | None]:
        """The unweighted values of one source, for workflows that select by them."""
        if name not in self.sources:
            raise UserError(
                f"no reward is called {name!r}; expected one of {list(self.sources)} (keys: workflow, rewards)"
            )
        return (await self._ask(self.sources[name], group)).values

    async def ask(self, judge: str, messages: Sequence[Message], key: tuple[object, ...], **params: Any) -> str:
        ask = getattr(self.sources.get(judge), "ask", None)
        if ask is None:
            judges = [name for name, source in self.sources.items() if hasattr(source, "ask")]
            raise UserError(f"no judge is called {judge!r}; expected one of {judges} (keys: workflow, rewards.judges)")
        text: str = await ask(messages, (judge, *key), **params)
        return text

    def take_counts(self) -> dict[str, int]:
        """Counters since the last call, summed over all sources: retries, timeouts and the sources' own."""
        counts, self.counts = self.counts, Counter()
        for source in self.sources.values():
            counts.update(source.counts)
            source.counts.clear()
        return dict(counts)

    def close(self) -> None:
        for source in self.sources.values():
            source.close()

    async def _ask(self, source: Source, group: Sequence[Rollout]) -> Answer:
        cause: Exception
        for attempt in range(source.attempts):
            if attempt:
                self.counts["retries"] += 1
                await asyncio.sleep(self.backoff_s * 2 ** (attempt - 1))
            try:
                await faults.reach_call(f"reward:{source.name}")
                return await source.answer(group)
            except (RewardError, UserError, RoleError, RoleDied):
                raise
            except TimedOut as error:
                self.counts["timeouts"] += 1
                cause = error
            except Exception as error:
                cause = error
        failure = str(cause) if isinstance(cause, BadAnswer | TimedOut) else f"raised {short(cause)}"
        where = f"reward {source.name!r}, prompt {group[0].prompt.id}"
        raise RewardError(f"{where}: {failure}{line_of(cause)} (tried {source.attempts} times)") from cause

    def _blend(self, i: int, rollout: Rollout, answers: dict[str, Answer]) -> Scored | None:
        """The weighted sum. As in TRL, None means "does not apply to this sample" and is skipped. Returns None if all
        sources returned None."""
        reward, parts = 0.0, dict[str, float]()
        applied, steps_S = False, None
        for name, answer in answers.items():
            value = answer.values[i]
            if value is not None:
                applied = True
                parts[name] = value
                reward += self.sources[name].weight * value
            if answer.steps:
                applied, weighted_S = True, np.float32(self.sources[name].weight) * answer.steps[i]
                steps_S = weighted_S if steps_S is None else steps_S + weighted_S
            if answer.extras:
                parts |= {f"{name}/{extra}": number for extra, number in answer.extras[i].items()}
        sums = np.append([] if steps_S is None else steps_S, reward)
        largest = sums[np.abs(sums).argmax()]
        if not abs(largest) <= LARGEST:  # also NaN
            raise RewardError(
                f"prompt {rollout.prompt.id}: the weighted sum of {parts} is {largest:g}; expected a number of at most "
                f"{LARGEST:g}, of smaller rewards or weights (keys: rewards)"
            )
        notes = {name: answer.notes[i] for name, answer in answers.items() if answer.notes and answer.notes[i]}
        return Scored(rollout, reward, parts, notes, step_rewards_S=steps_S) if applied else None
