"""A reward function called in a thread of this process, for debuggers. A call that hangs cannot be killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from gcore.config.rewards import RewardFunction
from gcore.rewarding.functions import load_reward
from gcore.rewarding.source import Answer
from gcore.types import RewardError, Rollout, UserError


class FunctionSource:
    """Implements source.Source. The function is imported and its signature checked here, before the run.

    A function may have its own check of this machine: `function.preflight(args)`.
    """

    def __init__(self, spec: RewardFunction, attempts: int, key: str):
        self.name, self.weight, self.attempts = spec.name, spec.weight, attempts
        self.counts: Counter[str] = Counter()
        self.adapter = load_reward(spec.path, spec.args, key)

    def check(self, columns: Collection[str]) -> None:
        if missing := self.adapter.missing(columns):
            raise UserError(
                f"rewards.functions: {self.name} needs {', '.join(missing)}; the dataset has "
                f"{', '.join(sorted(columns))} (change its columns, or set the function's args)"
            )
        if preflight := getattr(self.adapter.function, "preflight", None):
            preflight(self.adapter.args)

    async def answer(self, group: Sequence[Rollout], attempt: int) -> Answer:
        prompt = group[0].prompt
        if missing := self.adapter.missing(prompt.columns):  # a retry would not help
            raise RewardError(f"reward {self.name!r}, prompt {prompt.id}: the row has no column {', '.join(missing)}")
        return await self._ask(group)

    async def _ask(self, group: Sequence[Rollout]) -> Answer:
        return await self.adapter(group)

    def close(self) -> None:
        pass
