"""A sample's life as an async function. Replace it with `workflow: package.module:function`.

    async def workflow(ctx, prompt) -> list[Scored]

Thousands run at once in each controller; each awaits only what concerns its own prompt. Tokens in, tokens out: what an
engine produced is never tokenised again, also when a tool or a judge speaks between two turns of the policy.
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
from gcore.generation.noise import noise_key
from gcore.generation.pool import EnginePool
from gcore.protocols import Context, Rewarder
from gcore.types import Completion, Ints, Kept, Message, Prompt, Request, Rollout, SamplingParams, Scored, UserError

Workflow = Callable[[Context, Prompt], Awaitable[list[Scored]]]
PROBE = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "\u00a7"})


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
    """What all samples of a controller share; `greedy` is the variant evaluations use."""

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
        self.pool, self.rewarder, self.tokenizer, self.greedy = pool, rewarder, tokenizer, greedy
        self.seed = config.run.seed
        self.n = 1 if greedy else config.sampling.samples_per_prompt
        generation = config.generation
        self.max_tokens = generation.max_response_length
        self.params = SamplingParams(
            self.max_tokens,
            0.0 if greedy else generation.temperature,
            generation.top_p,
            generation.top_k,
            stop_tokens,
            generation.keep_sampling_mask,
        )
        self.least_siblings = 1 if greedy else least_siblings(config)
        self.clock = StageClock()

    def sampling(self, given: dict[str, Any], room: int | None = None) -> SamplingParams:
        given = {**given, **({"temperature": 0.0} if self.greedy else {})}
        stop = given.pop("stop", ())
        params = self.params.override(given, "ctx.generate")
        words = [stop] if isinstance(stop, str) else stop
        stop_tokens = (*params.stop_tokens, *map(self._token, words))
        max_tokens = params.max_tokens if room is None else min(params.max_tokens, room)
        return dataclasses.replace(params, stop_tokens=stop_tokens, max_tokens=max_tokens)

    def _token(self, text: str) -> int:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) != 1:
            raise UserError(f"stop={text!r} is {len(tokens)} tokens of this tokenizer; expected one (key: workflow)")
        return tokens[0]

    def between_turns(self, rollout: Rollout, said: str | Sequence[Message]) -> Ints:
        """The tokens that stand between what the policy said and its next turn. A string stands there as it is."""
        text = said if isinstance(said, str) else self._tail() + self._turns(said)
        tokens: Ints = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        if not isinstance(said, str) and len(tokens) and tokens[0] == rollout.tokens_S[-1]:
            tokens = tokens[1:]  # the policy ended its turn itself
        return tokens

    def _tail(self) -> str:
        """What the chat template writes after the content of an assistant's message."""
        rendered = self._render(PROBE)
        return rendered[rendered.rindex("\u00a7") + 1 :]

    def _turns(self, messages: Sequence[Message]) -> str:
        before, after = self._render(PROBE), self._render((*PROBE, *messages), add_generation_prompt=True)
        if not after.startswith(before):
            raise UserError(
                "the chat template rewrites earlier turns when messages are added, so tokens would change; "
                "give ctx.proceed a string instead of messages (or change model.chat_template)"
            )
        return after[len(before) :]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        if not self.tokenizer.chat_template:
            raise UserError(
                "ctx.proceed: the tokenizer has no chat template for messages; give it a string (or set "
                "model.chat_template)"
            )
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text


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
        sampling = shared.sampling(params)
        siblings = self._issue(shared.n if n is None or shared.greedy else n)
        requests = [Request(prompt.tokens_P, sampling, noise_key(shared.seed, prompt.id, s)) for s in siblings]
        completions = await self._complete(prompt, requests)
        temperature = sampling.temperature or 1.0
        nothing = np.zeros(0, np.int32)
        empty = Rollout(prompt, 0, nothing, nothing.astype(np.float32), nothing != 0, "", nothing, "stop", temperature)
        return [self._joined(empty, s, nothing, c) for s, c in zip(siblings, completions, strict=True)]

    async def proceed(self, rollout: Rollout, said: str | Sequence[Message] = "", **params: Any) -> Rollout:
        """Append what somebody said (masked from the loss) and let the policy go on, within the same length limit.

        `said` is text as it stands, or messages for the chat template. Without room for another token of the policy the
        rollout comes back as it is, finish="length".
        """
        added = self._shared.between_turns(rollout, said)
        return (await self._go_on(rollout, [rollout.sibling], added, params))[0]

    async def branch(self, rollout: Rollout, n: int, **params: Any) -> list[Rollout]:
        """`n` continuations of the same beginning, as new siblings with noise of their own."""
        place = (rollout.sibling, len(rollout.tokens_S))  # numbers follow from it: branches may race with one another
        first, more = self._branches[place], 1 if self._shared.greedy else n
        self._branches[place] += more
        siblings = [noise_key("branch", *place, i) >> 16 for i in range(first, first + more)]
        return await self._go_on(rollout, siblings, np.zeros(0, np.int32), params)

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

    async def _complete(self, prompt: Prompt, requests: Sequence[Request]) -> list[Completion]:
        """Prompts are numbered as they are drawn: who began earlier goes first, and so do its later turns. Siblings and
        later turns go where the prompt was computed; prompts of evaluations have numbers of their own."""
        shared = self._shared
        with shared.clock.within("generation"):
            return await shared.pool.generate(requests, priority=prompt.id, key=(shared.greedy, prompt.id))

    async def _go_on(
        self, rollout: Rollout, siblings: Sequence[int], added: Ints, params: dict[str, Any]
    ) -> list[Rollout]:
        shared, prompt = self._shared, rollout.prompt
        taken = len(rollout.tokens_S) + len(added)
        room = shared.max_tokens - taken
        if room < 1:
            return [dataclasses.replace(rollout, sibling=s, finish="length") for s in siblings]
        same = rollout.temperature if shared.params.temperature else 0.0  # greedy samples are trained at 1
        sampling = shared.sampling({"temperature": same, **params}, room)
        if (sampling.temperature or 1.0) != rollout.temperature:
            raise UserError(
                f"a sample goes on at its temperature of {rollout.temperature}; got {sampling.temperature}: "
                "its logprobs are computed at one temperature (key: workflow)"
            )
        tokens = np.concatenate([prompt.tokens_P, rollout.tokens_S, added])
        requests = [Request(tokens, sampling, noise_key(shared.seed, prompt.id, s), taken) for s in siblings]
        completions = await self._complete(prompt, requests)
        return [self._joined(rollout, s, added, c) for s, c in zip(siblings, completions, strict=True)]

    def _joined(self, start: Rollout, sibling: int, added: Ints, end: Completion) -> Rollout:
        """start + added (not the policy's) + end, as one sample."""
        num, fresh = len(added), len(start.tokens_S) == 0
        tokens_S = end.tokens_S if fresh and not num else np.concatenate([start.tokens_S, added, end.tokens_S])
        before = start.versions_S[-1:] if len(start.versions_S) else end.versions_S[:1]
        return Rollout(
            prompt=start.prompt,
            sibling=sibling,
            tokens_S=tokens_S,
            logprobs_S=np.concatenate([start.logprobs_S, np.zeros(num, np.float32), end.logprobs_S]),
            mask_S=np.concatenate([start.mask_S, np.zeros(num, np.bool_), np.ones(len(end.tokens_S), np.bool_)]),
            text=self._shared.tokenizer.decode(tokens_S, skip_special_tokens=True),
            versions_S=np.concatenate([start.versions_S, np.repeat(before, num), end.versions_S]).astype(np.int32),
            finish=end.finish,
            temperature=start.temperature,
            kept=Kept.joined((start.kept, len(start.tokens_S)), (None, num), (end.kept, len(end.tokens_S))),
        )
