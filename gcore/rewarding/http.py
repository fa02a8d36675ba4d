"""A reward server: one POST per group of siblings returns their rewards.

group ──{"prompts", "completions", columns}──> JsonClient ──{"rewards", ...}──> Answer

Only the client knows which failures are worth a retry. So it retries, and the rewarder does not (`attempts = 1`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from gcore.config.rewards import HttpReward
from gcore.rewarding.client import USUAL_DELAYS, JsonClient, RetryDelays
from gcore.rewarding.functions import OWN, adapt
from gcore.rewarding.source import Answer
from gcore.types import RewardError, Rollout, UserError

# names that `columns` must not contain: G-Core sends them itself, or they have another meaning
RESERVED = OWN["trl"] | {"prompt", "completion"}


class HttpSource:
    """Implements source.Source. The adapter treats the server as a function with TRL's signature."""

    attempts = 1

    def __init__(self, spec: HttpReward, key: str = "rewards.http.0", delays: RetryDelays = USUAL_DELAYS):
        self.spec, self.key = spec, key
        self.name, self.weight = spec.name, spec.weight
        self.counts: Counter[str] = Counter()
        self.client = JsonClient(spec, key, spec.attempts, self.counts, delays=delays)
        self._call = adapt(self._post)

    def check(self, columns: Collection[str]) -> None:
        self.client.check()
        for name in self.spec.columns:
            if name in RESERVED:
                raise UserError(f"{self.key}.columns: {name} is reserved by G-Core; expected other columns")
            if name not in columns:
                raise UserError(f"{self.key}.columns: no column {name}; the dataset has {', '.join(sorted(columns))}")

    async def reach(self) -> None:
        """Checks that a server answers. Any answer to a GET is enough."""
        await self.client.reach("")

    async def answer(self, group: Sequence[Rollout], attempt: int) -> Answer:
        prompt = group[0].prompt
        where = f"reward {self.name!r}, prompt {prompt.id}"
        if missing := [name for name in self.spec.columns if name not in prompt.columns]:
            raise RewardError(f"{where}: the row has no column {', '.join(missing)} (key: {self.key}.columns)")
        return await self.client.with_retries(lambda: self._call(group), where)

    def close(self) -> None:
        self.client.close()

    async def _post(self, prompts: list[Any], completions: list[Any], **columns: list[Any]) -> Any:
        names = self.spec.columns or [name for name in ("answer",) if name in columns]
        return await self.client.post(
            {"prompts": prompts, "completions": completions} | {name: columns[name] for name in names}
        )
