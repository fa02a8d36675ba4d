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
        stop_tokens: tuple[int, ...],
        *,
        greedy: bool = False,
    ) -> None:
        self._pool, self._rewarder, self._tokenizer = pool, rewarder, tokenizer
        self._seed = config.run.seed
        self._n = 1 if greedy else config.sampling.samples_per_prompt
        generation = config.generation
        self._params = {
            "max_tokens": generation.max_response_length,
            "temperature": 0.0 if greedy else generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k,
            "stop_tokens": stop_tokens,
        }
        self._greedy = greedy
        self.least_siblings = 1 if greedy or config.algorithm.adv_estimator == "reinforce_pp" else 2
        self._issued: dict[int, int] = {}  # prompt id -> siblings drawn so far
        self.clock = StageClock()

    def begin(self) -> None:
        """A new rollout phase: sibling numbers and clocks start again."""
        self._issued.clear()
        self.clock.seconds.clear()

    async def generate(self, prompt: Prompt, n: int | None = None, **params: Any) -> list[Rollout]:
        """`n` more responses (default: sampling.samples_per_prompt), each with noise of its own.

        `params` override fields of SamplingParams. In evaluations there is one greedy response, whatever is asked for.
        """
        sampling = SamplingParams(**{**self._params, **params, **({"temperature": 0.0} if self._greedy else {})})
        first = self._issued.get(prompt.id, 0)
        siblings = range(first, first + (self._n if n is None or self._greedy else n))
        self._issued[prompt.id] = siblings.stop
        requests = [Request(prompt.tokens_P, sampling, noise_key(self._seed, prompt.id, s)) for s in siblings]
        with self.clock.within("generation"):
            completions = await self._pool.generate(requests)
        temperature = sampling.temperature or 1.0
        return [self._rollout(prompt, s, c, temperature) for s, c in zip(siblings, completions, strict=True)]

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]:
        with self.clock.within("rewarding"):
            return await self._rewarder.score(group)

    def _rollout(self, prompt: Prompt, sibling: int, completion: Completion, temperature: float) -> Rollout:
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
            temperature=temperature,
        )
