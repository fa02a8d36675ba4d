"""Rewards by functions: their weighted sum. One that fails is asked again; then the group has no reward at all."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from gcore.config.tree import Rewards
from gcore.rewarding.functions import Adapter, Answer, BadAnswer, adapt, load_function, short
from gcore.types import RewardError, Rollout, Scored, UserError


class RuleRewarder:
    """Implements protocols.Rewarder. Functions are imported and their signatures recognised here, before the run."""

    def __init__(self, rewards: Rewards, backoff_s: float = 0.1):
        self.attempts, self.backoff_s = rewards.attempts, backoff_s
        self.errors = 0  # groups left without a reward
        self.retries = 0  # calls made again
        self.functions: dict[str, tuple[float, Adapter]] = {}
        for index, spec in enumerate(rewards.functions):
            key = f"rewards.functions.{index}"
            self.functions[spec.name] = (spec.weight, adapt(load_function(spec.path, f"{key}.path"), spec.args, key))

    def check(self, columns: Collection[str]) -> None:
        """Before the run: does the dataset (a prompt's `columns`) have what the functions ask for?"""
        for name, (_, adapter) in self.functions.items():
            if missing := adapter.missing(columns):
                raise UserError(
                    f"rewards.functions: {name} needs {', '.join(missing)}; the dataset has "
                    f"{', '.join(sorted(columns))} (change its columns, or set the function's args)"
                )

    async def score(self, group: Sequence[Rollout]) -> list[Scored]:
        """Siblings of one prompt, scored together, by all functions at once. Raises RewardError; never makes up a 0."""
        try:
            asked = (self._ask(name, adapter, group) for name, (_, adapter) in self.functions.items())
            results = await asyncio.gather(*asked, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            answers = dict(zip(self.functions, (r for r in results if isinstance(r, Answer)), strict=True))
            return [self._blend(i, rollout, answers) for i, rollout in enumerate(group)]
        except RewardError:
            self.errors += 1
            raise

    async def _ask(self, name: str, adapter: Adapter, group: Sequence[Rollout]) -> Answer:
        prompt = group[0].prompt
        if missing := adapter.missing(prompt.columns):  # asking again would not help
            raise RewardError(f"reward {name!r}, prompt {prompt.id}: the row has no column {', '.join(missing)}")
        for attempt in range(self.attempts):
            if attempt:
                self.retries += 1
                await asyncio.sleep(self.backoff_s * 2 ** (attempt - 1))
            try:
                return await adapter(group)
            except Exception as error:
                cause = error
        said = str(cause) if isinstance(cause, BadAnswer) else f"raised {short(cause)}"
        raise RewardError(f"reward {name!r}, prompt {prompt.id}: {said} (tried {self.attempts} times)") from cause

    def _blend(self, i: int, rollout: Rollout, answers: dict[str, Answer]) -> Scored:
        """None is TRL's "does not apply to this sample": left out of the sum; nothing left is a failure."""
        reward, parts = 0.0, dict[str, float]()
        applied = False
        for name, answer in answers.items():
            value = answer.values[i]
            if value is not None:
                applied = True
                parts[name] = value
                reward += self.functions[name][0] * value
            parts |= {f"{name}/{extra}": number for extra, number in answer.extras[i].items()}
        if not applied:
            raise RewardError(
                f"reward {', '.join(map(repr, answers))}, prompt {rollout.prompt.id}: every function returned None "
                f"for sibling {rollout.sibling}; expected a number from at least one"
            )
        return Scored(rollout=rollout, reward=reward, parts=parts)
