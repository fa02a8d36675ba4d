"""A sample's life as an async function. Replace it with `workflow: package.module:function`.

    async def workflow(ctx, prompt) -> list[Scored]

Thousands run at once in each controller; each awaits only what concerns its own prompt. What an engine produced is
never tokenised again, also when a tool or a judge speaks between two turns of the policy (content/text.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gcore.config.tree import Config
from gcore.content.base import Content, Modality
from gcore.generation.noise import noise_key
from gcore.generation.pool import EnginePool
from gcore.protocols import Context, Rewarder
from gcore.types import Completion, Message, Prompt, Request, Rollout, SamplingParams, Scored

Workflow = Callable[[Context, Prompt], Awaitable[list[Scored]]]


async def generate_and_reward(ctx: Context, prompt: Prompt) -> list[Scored]:
    """The default: n responses, scored together."""
    group = await ctx.generate(prompt)
    return await ctx.reward(group)


def least_siblings(config: Config) -> int:
    """Samples of a prompt that the advantage estimator needs."""
    return 1 if config.algorithm.adv_estimator == "reinforce_pp" else 2


class StageClock:
    """Stages overlap: how long was *anything* in each of them?"""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
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
                self._add(stage, time.perf_counter())

    def take(self) -> dict[str, float]:
        """Seconds since the last time; a stage that is not empty goes on counting from now."""
        now = time.perf_counter()
        for stage, inside in self._inside.items():
            if inside:
                self._add(stage, now)
                self._since[stage] = now
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _add(self, stage: str, now: float) -> None:
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._since[stage]


class SharedContext:
    """What all samples of a controller share; `greedy` is the variant that evaluations use."""

    def __init__(
        self, config: Config, pool: EnginePool, rewarder: Rewarder, modality: Modality, *, greedy: bool = False
    ) -> None:
        self.pool, self.rewarder, self.modality, self.greedy = pool, rewarder, modality, greedy
        self.seed = config.run.seed
        self.n = 1 if greedy else config.sampling.samples_per_prompt
        self.least_siblings = 1 if greedy else least_siblings(config)
        self.clock = StageClock()


class SampleContext:
    """Implements protocols.Context for one run of a workflow: it numbers the siblings."""

    __slots__ = ("_branches", "_issued", "_shared")

    def __init__(self, shared: SharedContext) -> None:
        self._shared = shared
        self._issued = 0  # siblings drawn so far
        self._branches: Counter[tuple[int, int]] = Counter()  # by the place where they branch off

    async def generate(self, prompt: Prompt, n: int | None = None, **params: Any) -> list[Rollout]:
        """`n` more responses (default: sampling.samples_per_prompt), each with noise of its own.

        `params` override fields of SamplingParams; `stop="]"` also ends a turn at that token. In evaluations there is
        one greedy response, whatever is asked for.
        """
        shared = self._shared
        sampling = shared.modality.params(params, greedy=shared.greedy)
        siblings = self._issue(shared.n if n is None or shared.greedy else n)
        temperature, none = sampling.temperature or 1.0, np.zeros(0, np.int32)
        start = Rollout(prompt, 0, prompt.content, none.astype(np.float32), none != 0, "", none, "stop", temperature)
        return await self._continue(start, siblings, None, sampling)

    async def proceed(self, rollout: Rollout, said: str | Sequence[Message] = "", **params: Any) -> Rollout:
        """Append what a tool or a judge said (masked from the loss), then let the policy continue, within the same
        length limit.

        `said` is text that is used as it is, or messages for the chat template. Without room for another step of the
        policy the rollout comes back unchanged, finish="length".
        """
        added = self._shared.modality.between_turns(rollout.content, said)
        return (await self._next_turn(rollout, [rollout.sibling], added, params))[0]

    async def branch(self, rollout: Rollout, n: int, **params: Any) -> list[Rollout]:
        """`n` continuations of the same beginning, as new siblings with noise of their own."""
        place = (rollout.sibling, rollout.num_steps)  # numbers follow from it: branches may run at the same time
        first, more = self._branches[place], 1 if self._shared.greedy else n
        self._branches[place] += more
        siblings = [noise_key("branch", *place, i) >> 16 for i in range(first, first + more)]
        return await self._next_turn(rollout, siblings, None, params)

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]:
        with self._shared.clock.within("rewarding"):
            return await self._shared.rewarder.reward(group)

    async def score(self, name: str, group: Sequence[Rollout]) -> list[float | None]:
        with self._shared.clock.within("rewarding"):
            return await self._shared.rewarder.score(name, group)

    async def ask(self, judge: str, messages: Sequence[Message], *, draw: int = 0, **params: Any) -> str:
        """The same question gets the same answer; another `draw` is another sample of it."""
        digest = hashlib.blake2b(json.dumps([dict(m) for m in messages]).encode(), digest_size=8).hexdigest()
        with self._shared.clock.within("rewarding"):
            return await self._shared.rewarder.ask(judge, messages, ("ask", digest, draw), **params)

    def _issue(self, n: int) -> range:
        first, self._issued = self._issued, self._issued + n
        return range(first, self._issued)

    async def _next_turn(
        self, rollout: Rollout, siblings: Sequence[int], added: Content | None, params: dict[str, Any]
    ) -> list[Rollout]:
        num_steps = rollout.num_steps + (added.num_steps if added is not None else 0)
        greedy, modality = self._shared.greedy, self._shared.modality
        sampling = modality.next_params(params, greedy=greedy, temperature=rollout.temperature, num_steps=num_steps)
        if sampling is None:
            return [dataclasses.replace(rollout, sibling=s, finish="length") for s in siblings]
        return await self._continue(rollout, siblings, added, sampling)

    async def _continue(
        self, start: Rollout, siblings: Sequence[int], added: Content | None, params: SamplingParams
    ) -> list[Rollout]:
        """Prompts are numbered as they are drawn: earlier prompts and their later turns go first in queues. Siblings
        and later turns go to the replica that has computed the prompt. Evaluations have prompt numbers of their own."""
        shared, prompt = self._shared, start.prompt
        content = start.content if added is None else start.content.extended(added)
        requests = [Request(content, params, noise_key(shared.seed, prompt.id, s)) for s in siblings]
        with shared.clock.within("generation"):
            completions = await shared.pool.generate(requests, priority=prompt.id, key=(shared.greedy, prompt.id))
        return [self._joined(start, s, content, c) for s, c in zip(siblings, completions, strict=True)]

    def _joined(self, start: Rollout, sibling: int, content: Content, end: Completion) -> Rollout:
        """start, then the steps that `content` has beyond it (not the policy's), then end: one sample."""
        between, new = content.num_steps - start.num_steps, end.content.num_steps
        whole = content.extended(end.content)
        before = start.versions_S[-1:] if start.num_steps else end.versions_S[:1]
        return dataclasses.replace(
            start,
            sibling=sibling,
            content=whole,
            logprobs_S=np.concatenate([start.logprobs_S, np.zeros(between, np.float32), end.logprobs_S]),
            mask_S=np.concatenate([start.mask_S, np.zeros(between, np.bool_), np.ones(new, np.bool_)]),
            output=self._shared.modality.output(whole),
            versions_S=np.concatenate([start.versions_S, np.repeat(before, between), end.versions_S]).astype(np.int32),
            finish=end.finish,
        )
