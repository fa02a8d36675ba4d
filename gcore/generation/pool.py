"""A controller's view of the engine replicas: send a request where the least work is outstanding.

Which replica answers never changes what it answers (noise belongs to the sample), so routing is free to chase speed.
"""

from __future__ import annotations

from collections.abc import Sequence

from gcore.protocols import Handle
from gcore.types import Completion, Request


class EnginePool:
    def __init__(self, engines: Sequence[Handle], first: int) -> None:
        """`first` is where ties start: different controllers begin at different replicas."""
        self._engines = engines
        self._order = [(i + first) % len(engines) for i in range(len(engines))]
        self._outstanding = [0] * len(engines)  # tokens asked for and not yet answered

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        work = sum(len(r.tokens_P) + r.params.max_tokens for r in requests)
        chosen = min(self._order, key=lambda i: self._outstanding[i])
        self._outstanding[chosen] += work
        try:
            completions: list[Completion] = await self._engines[chosen].call("generate", list(requests))
            return completions
        finally:
            self._outstanding[chosen] -= work
