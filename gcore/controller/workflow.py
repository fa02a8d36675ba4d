"""A sample's life as an async function. Replace it with `workflow: package.module:function`.

    async def workflow(ctx, prompt) -> list[Scored]

Thousands run at once in each controller; each awaits only what concerns its own prompt.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gcore.config.tree import Config
from gcore.generation.noise import noise_key
from gcore.generation.pool import EnginePool
from gcore.observe.trace import Tracer
from gcore.protocols import Context, Rewarder
from gcore.types import Completion, Prompt, Request, Rollout, SamplingParams, Scored

Workflow = Callable[[Context, Prompt], Awaitable[list[Scored]]]


async def generate_and_reward(ctx: Context, prompt: Prompt) -> list[Scored]:
    """The default: n responses, scored together."""
    group = await ctx.generate(prompt)
    return await ctx.reward(group)


class StageClock:
    """Stages overlap: how long was *anything* in each of them?"""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: dict[str, int] = {}
        self._since: dict[str, float] = {}

    @contextlib.contextmanager
    def within(self, stage: str) -> Iterator[None]:
        if not self._inside.get(stage):
            self._since[stage] = time.perf_counter()
        self._inside[stage] = self._inside.get(stage, 0) + 1
        try:
            yield
        finally:
            self._inside[stage] -= 1
            if not self._inside[stage]:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - self._since[stage]


class SampleContext:
    """Implements protocols.Context for one controller; `greedy` is the variant evaluations use."""

    def __init__(
        self,
        config: Config,
        pool: EnginePool,
        rewarder: Rewarder,
        tokenizer: Any,
        tracer: Tracer,
        *,
        greedy: bool = False,
    ) -> None:
        self._pool, self._rewarder, self._tokenizer, self._tracer = pool, rewarder, tokenizer, tracer
        self._seed = config.run.seed
        self._n = 1 if greedy else config.sampling.samples_per_prompt
        generation = config.generation
        self._params = {
            "max_tokens": generation.max_response_length,
            "temperature": 0.0 if greedy else generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k,
            "stop_tokens": (tokenizer.eos_token_id,),
        }
        self.clock = StageClock()

    async def generate(self, prompt: Prompt, n: int | None = None, **params: Any) -> list[Rollout]:
        """`n` responses (default: sampling.samples_per_prompt). `params` override fields of SamplingParams."""
        sampling = SamplingParams(**{**self._params, **params})
        requests = [
            Request(prompt.tokens_P, sampling, noise_key(self._seed, prompt.id, sibling))
            for sibling in range(self._n if n is None else n)
        ]
        with self.clock.within("generation"):
            completions = await self._pool.generate(requests)
        return [self._rollout(prompt, sibling, c) for sibling, c in enumerate(completions)]

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]:
        with self.clock.within("rewarding"):
            return await self._rewarder.score(group)

    def _rollout(self, prompt: Prompt, sibling: int, completion: Completion) -> Rollout:
        text = self._tokenizer.decode(completion.tokens_S, skip_special_tokens=True)
        return Rollout(
            prompt=prompt,
            sibling=sibling,
            tokens_S=completion.tokens_S,
            logprobs_S=completion.logprobs_S,
            mask_S=np.ones(len(completion.tokens_S), np.bool_),
            text=text,
            version=completion.version,
            finish=completion.finish,
        )
