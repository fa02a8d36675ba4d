"""A reward server: one POST per group of siblings returns their rewards.

group ──{"prompts", "completions", columns}──> JsonClient ──{"rewards", ...}──> Answer

Only the client knows which failures are worth a retry. So it retries, and the rewarder does not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gcore.config.rewards import HttpReward
from gcore.rewarding.client import USUAL_DELAYS, JsonClient, RetryDelays
from gcore.rewarding.functions import trl_arguments
from gcore.rewarding.signatures import OWN
from gcore.rewarding.source import Answer, Source
from gcore.rewarding.worker import read_batch
from gcore.types import RewardError, Rollout, UserError

# names that `columns` must not contain: G-Core sends them itself, or they have another meaning
RESERVED = OWN["trl"] | {"prompt", "completion"}


class HttpSource(Source):
    """The server gets the arguments of a function in the style of TRL, and answers what such a function returns."""

    def __init__(self, spec: HttpReward, key: str = "rewards.http.0", delays: RetryDelays = USUAL_DELAYS):
        super().__init__(spec.name, spec.weight)
        self.spec, self.key = spec, key
        self.client = JsonClient(spec, key, spec.attempts, self.counts, delays=delays)

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
        given = trl_arguments(group)
        names = self.spec.columns or [name for name in ("answer",) if name in given]
        payload = {name: given[name] for name in ("prompts", "completions", *names)}

        async def once() -> Answer:
            return read_batch(await self.client.post(payload), len(group))

        return await self.client.with_retries(once, where)

    def close(self) -> None:
        self.client.close()
