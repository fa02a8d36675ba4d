"""The workflow: the async function that makes the scored group of one prompt, and the context that it calls.

    async def workflow(ctx, prompt) -> list[Scored]        replace it with `workflow: package.module:function`

    ctx.generate, proceed, branch ──> engines of the policy        ctx.reward, score, ask ──> rewarder

Thousands of workflows run at the same time in each controller, and do not wait for each other. Tokens that an engine
generated are never tokenised again, even if a tool or a judge adds text between two turns (content/text.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gcore.config.tree import Config
from gcore.content.base import Content, Modality
from gcore.content.text import TextModality, last_turn, text_modality
from gcore.environments.hosts import Hosts
from gcore.generation.noise import noise_key
from gcore.generation.pool import EnginePool
from gcore.prompts.answers import ANSWERS, LABEL
from gcore.protocols import Context, Rewarder
from gcore.sandbox.base import Sandbox
from gcore.sandbox.pool import SandboxPool
from gcore.types import Completion, Message, Prompt, Request, Rollout, SamplingParams, Scored, UserError
from gcore.workflows.endpoint import Endpoint
from gcore.workflows.session import Session
from gcore.workflows.tool_formats import AssistantTurn, Schemas, ToolCall, ToolFormat, format_of

PIECE = 16  # tokens of a turn that is streamed: a request of the engine for each piece
Tell = Callable[[Content, Completion], Awaitable[None]]  # the content before a turn, and what is generated of it so far
Workflow = Callable[[Context, Prompt], Awaitable[list[Scored]]]


async def generate_and_reward(ctx: Context, prompt: Prompt) -> list[Scored]:
    """The default workflow: sampling.samples_per_prompt responses, scored together."""
    group = await ctx.generate(prompt)
    return await ctx.reward(group)


async def stored_answers(ctx: Context, prompt: Prompt) -> list[Scored]:
    """The workflow of offline training: the answers of the dataset. The first one is preferred. With labels (KTO), its
    reward is its label, and that of the second one, which only the KL needs, is -1."""
    group = await ctx.given(prompt, prompt.columns[ANSWERS])
    if LABEL in prompt.columns and len(group) == 2:
        rewards = [float(prompt.columns[LABEL]), -1.0]
    else:
        rewards = [float(i == 0) for i in range(len(group))]
    return [Scored(rollout, reward) for rollout, reward in zip(group, rewards, strict=True)]


def least_siblings(config: Config) -> int:
    """The minimum group size of the advantage estimator, or of a pair."""
    if config.objective != "policy":
        return 1 + config.needs.pairs
    return 2 if config.algorithm.estimator.siblings and config.rewards.compares else 1


class StageClock:
    """Measures overlapping stages: the seconds in which at least one workflow is in a stage."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._inside: Counter[str] = Counter()  # workflows in each stage
        self._last = 0.0

    @contextlib.contextmanager
    def within(self, stage: str) -> Iterator[None]:
        self._count()
        self._inside[stage] += 1
        try:
            yield
        finally:
            self._count()
            self._inside[stage] -= 1

    def take(self) -> dict[str, float]:
        """Seconds per stage since the last call."""
        self._count()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _count(self) -> None:
        """Adds the time since the last event to the stages that went on."""
        now = time.perf_counter()
        for stage, inside in self._inside.items():
            if inside:
                self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now


class SharedContext:
    """What all workflows of a controller share.

    For evaluations, which make one response per prompt: `greedy`, or `attempt`, the number of a sampled response.
    """

    def __init__(
        self,
        config: Config,
        pool: EnginePool,
        rewarder: Rewarder,
        modality: Modality,
        *,
        greedy: bool = False,
        attempt: int | None = None,
        version: Callable[[], int] = lambda: 0,
        sandboxes: SandboxPool | None = None,
        environment: Hosts | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        self.config, self.environment = config, environment
        self.pool, self.rewarder, self.modality, self.greedy = pool, rewarder, modality, greedy
        self.sandboxes = sandboxes
        self.version, self.objective = version, config.objective
        self.evaluates = greedy or attempt is not None
        self.noise_root = (config.run.seed,) if attempt is None else (config.run.seed, "eval", attempt)
        self.n = 1 if self.evaluates else config.sampling.samples_per_prompt
        self.least_siblings = 1 if self.evaluates else least_siblings(config)
        self.clock = StageClock()
        self.endpoint = endpoint or Endpoint(config.endpoint)  # of workflows that call `serve`
        template = modality.chat_template if isinstance(modality, TextModality) else None
        self.tool_format = format_of(template, config.model.tool_format)
        self._tool_calls: Counter[str] = Counter()
        self.baseline: SharedContext | None = None  # for one more, greedy response to each prompt (ReMax)
        if config.algorithm.estimator.greedy and not self.evaluates:
            parts: dict[str, Any] = {"environment": environment, "endpoint": self.endpoint, "sandboxes": sandboxes}
            self.baseline = SharedContext(config, pool, rewarder, modality, greedy=True, **parts)
            self.baseline.clock = self.clock

    def count_calls(self, calls: Sequence[ToolCall]) -> None:
        errors = sum(bool(call.error) for call in calls)
        self._tool_calls += Counter(calls=len(calls), unparsed_calls=errors)

    def take_calls(self) -> Counter[str]:
        """Tool calls of the policy since the last call, and those of them that could not be parsed."""
        counts, self._tool_calls = self._tool_calls, Counter()
        return counts


class SampleContext:
    """Implements protocols.Context for one run of a workflow, and numbers the siblings."""

    __slots__ = ("_branches", "_issued", "_shared")

    def __init__(self, shared: SharedContext) -> None:
        self._shared = shared
        self._issued = 0  # siblings drawn so far
        self._branches: Counter[tuple[int, int]] = Counter()  # number of branches from (sibling, step)

    @property
    def shared(self) -> SharedContext:
        return self._shared

    async def generate(
        self,
        prompt: Prompt,
        n: int | None = None,
        *,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **params: Any,
    ) -> list[Rollout]:
        """`n` more responses (default: sampling.samples_per_prompt), each with its own random numbers.

        `messages`: instead of those of the prompt; `tools`: their schemas, for the chat template.
        `params` replace fields of SamplingParams; `stop="]"` also ends a turn at that token. In evaluations it is
        always one response, greedy unless evaluation.samples is above 1.
        """
        shared = self._shared
        content = prompt.content
        if messages is not None or tools is not None:
            modality = text_modality(shared.modality, "ctx.generate with messages or tools")
            content = modality.opening(prompt.messages if messages is None else messages, tools)
        siblings = self.issue(n)
        return await self.first_turn(prompt, siblings, content, params)

    @contextlib.asynccontextmanager
    async def serve(self, prompt: Prompt, n: int | None = None) -> AsyncIterator[list[Session]]:
        """`n` sessions of an OpenAI-compatible endpoint, each with its own address, for agents that only know HTTP.

        What the agent samples in a session is recorded as a rollout, `session.rollout`: see workflows/endpoint.py.
        """
        shared = self._shared
        siblings = self.issue(n)
        modality = text_modality(shared.modality, "ctx.serve")
        sessions = [Session(self, modality, prompt, sibling) for sibling in siblings]
        async with shared.endpoint.open(sessions):
            yield sessions

    @contextlib.asynccontextmanager
    async def sandbox(self, folder: str | None = None) -> AsyncIterator[Sandbox]:
        """A sandbox of its own, with a copy of the files of `folder`."""
        if self._shared.sandboxes is None:
            raise UserError("ctx.sandbox: the recipe has none; expected the section `sandbox: {kind: bubblewrap}`")
        async with self._shared.sandboxes.one(folder) as box:
            yield box

    async def first_turn(
        self,
        prompt: Prompt,
        siblings: Sequence[int],
        content: Content,
        params: Mapping[str, Any],
        tell: Tell | None = None,
    ) -> list[Rollout]:
        sampling = self._shared.modality.params(params, greedy=self._shared.greedy)
        start = Rollout(
            prompt,
            sibling=0,
            content=content,
            logprobs_S=np.zeros(0, np.float32),
            mask_S=np.zeros(0, np.bool_),
            output="",
            versions_S=np.zeros(0, np.int32),
            finish="stop",
            temperature=sampling.temperature or 1.0,
        )
        return await self._continue(start, siblings, None, sampling, tell)

    async def given(self, prompt: Prompt, answers: Sequence[str | Sequence[Message]]) -> list[Rollout]:
        """Siblings with answers that no policy generated: strings, or messages, of which the assistant's are trained
        on. Not for `objective: policy`, because they have no logprobs of a policy that sampled them."""
        modality = self._shared.modality
        if self._shared.objective == "policy" or not isinstance(modality, TextModality):
            raise UserError(
                f"ctx.given: objective={self._shared.objective} trains on samples of the policy; expected an objective "
                "of demonstrations or pairs (keys: workflow, objective)"
            )
        given = [modality.answer(prompt, answer) for answer in answers]
        outputs = await modality.outputs([content for content, _ in given])
        siblings = self.issue(len(given), exactly=True)
        version = self._shared.version()
        return [
            Rollout(
                prompt,
                sibling,
                content,
                logprobs_S=np.zeros(len(mask_S), np.float32),
                mask_S=mask_S,
                output=output,
                versions_S=np.full(len(mask_S), version, np.int32),
                finish="stop",
            )
            for sibling, (content, mask_S), output in zip(siblings, given, outputs, strict=True)
        ]

    async def proceed(self, rollout: Rollout, feedback: str | Sequence[Message] = "", **params: Any) -> Rollout:
        """Append the feedback of a tool or a judge (masked from the loss), then let the policy continue, within the
        same length limit.

        `feedback` is text that is used as it is, or messages for the chat template. If the length limit leaves no step
        for the policy, the rollout is returned unchanged, with finish="length".
        """
        return (await self.next_turns(rollout, [rollout.sibling], feedback, params))[0]

    def read(self, rollout: Rollout, tools: Schemas | None = ()) -> AssistantTurn:
        """What the policy said in the last turn: thought, content and tool calls, as the family of its chat template
        writes them (model.tool_format). `tools`: their schemas, for the types of arguments; None: parse no calls."""
        turn = self._said(rollout, tools)
        self._shared.count_calls(turn.calls)
        return turn

    @property
    def tool_format(self) -> ToolFormat:
        return self._shared.tool_format

    def _said(self, rollout: Rollout, tools: Schemas | None = ()) -> AssistantTurn:
        text = self._turn_text(rollout.content, last_turn(rollout.mask_S), str(rollout.turn))
        return self._shared.tool_format.read(text, tools)

    def read_so_far(self, content: Content, own: int, clean: str, tools: Schemas | None) -> AssistantTurn:
        """Of a turn that goes on, the last `own` steps: only what its end cannot change, and no calls. `clean`: its
        text."""
        return self._shared.tool_format.so_far(self._turn_text(content, own, clean.rstrip("\ufffd")), tools)

    def _turn_text(self, content: Content, own: int, clean: str) -> str:
        row = self._shared.tool_format
        modality = text_modality(self._shared.modality, "ctx.read")
        return modality.turn_text(content, own, clean, row.special, row.thought[0])

    async def branch(self, rollout: Rollout, n: int, **params: Any) -> list[Rollout]:
        """`n` continuations of the same rollout, as new siblings with their own noise."""
        place = (rollout.sibling, rollout.num_steps)  # determines the sibling numbers, so branches may run in parallel
        first, more = self._branches[place], 1 if self._shared.evaluates else n
        self._branches[place] += more
        siblings = [noise_key("branch", *place, i) >> 16 for i in range(first, first + more)]
        return await self.next_turns(rollout, siblings, None, params)

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]:
        with self._shared.clock.within("rewarding"):
            return await self._shared.rewarder.reward(group)

    async def score(self, name: str, group: Sequence[Rollout]) -> list[float | None]:
        with self._shared.clock.within("rewarding"):
            return await self._shared.rewarder.score(name, group)

    async def ask(self, judge: str, messages: Sequence[Message], *, draw: int = 0, **params: Any) -> str:
        """The same messages get the same answer; another `draw` is another sample."""
        digest = hashlib.blake2b(json.dumps([dict(m) for m in messages]).encode(), digest_size=8).hexdigest()
        with self._shared.clock.within("rewarding"):
            return await self._shared.rewarder.ask(judge, messages, ("ask", digest, draw), **params)

    def issue(self, n: int | None, exactly: bool = False) -> range:
        """Numbers of `n` more siblings (default: sampling.samples_per_prompt); in evaluations of one, if not
        `exactly`."""
        if not exactly:
            n = self._shared.n if n is None or self._shared.evaluates else n
        first, self._issued = self._issued, self._issued + (n or 0)
        return range(first, self._issued)

    async def next_turns(
        self,
        rollout: Rollout,
        siblings: Sequence[int],
        feedback: str | Sequence[Message] | None,
        params: Mapping[str, Any],
        excess: int = 0,
        tell: Tell | None = None,
    ) -> list[Rollout]:
        """One more turn for each sibling, all after the same steps and feedback. None: the same turn goes on. `excess`:
        tokens of the context that count as steps, because it is longer than a prompt. `tell`: of a single sibling,
        called while the turn is generated."""
        shared, modality = self._shared, self._shared.modality
        added = None
        if feedback is not None:
            added = modality.between_turns(rollout.content, self._with_calls(rollout, feedback))
        num_steps = rollout.num_steps + (added.num_steps if added is not None else 0)
        sampling = modality.next_params(
            params, greedy=shared.greedy, temperature=rollout.temperature, num_steps=num_steps + excess
        )
        if sampling is None:
            return [dataclasses.replace(rollout, sibling=s, finish="length") for s in siblings]
        return await self._continue(rollout, siblings, added, sampling, tell)

    def _with_calls(self, rollout: Rollout, feedback: str | Sequence[Message]) -> str | Sequence[Message]:
        """Before results of tools, the calls that they answer: some chat templates repeat their names or ids."""
        if isinstance(feedback, str) or not feedback or feedback[0].get("role") != "tool":
            return feedback
        calls = [{"id": call.id, "function": {"name": call.name}} for call in self._said(rollout).calls]
        return [{"role": "assistant", "tool_calls": calls}, *feedback]

    async def _continue(
        self,
        start: Rollout,
        siblings: Sequence[int],
        added: Content | None,
        params: SamplingParams,
        tell: Tell | None = None,
    ) -> list[Rollout]:
        """Generate one turn per sibling after `start` and `added`.

        The priority is the prompt number, so earlier prompts and their later turns are served first. The key sends
        siblings and later turns to the replica that has the prompt in its cache; evaluations number prompts separately.
        """
        shared, prompt = self._shared, start.prompt
        content = start.content if added is None else start.content.extended(added)
        requests = [Request(content, params, noise_key(*shared.noise_root, prompt.id, s)) for s in siblings]
        with shared.clock.within("generation"):
            line: dict[str, Any] = {"priority": prompt.id, "key": (shared.evaluates, prompt.id)}
            if tell is None:
                completions = await shared.pool.generate(requests, **line)
            else:
                completions = [await self._in_pieces(request, line, partial(tell, content)) for request in requests]
        wholes = [content.extended(c.content) for c in completions]
        outputs = turns = await shared.modality.outputs(wholes)
        if content.num_steps:
            turns = await shared.modality.outputs([c.content for c in completions])
        between = content.num_steps - start.num_steps  # feedback
        parts = zip(siblings, completions, wholes, outputs, turns, strict=True)
        return [_joined(start, s, between, c, whole, output, turn) for s, c, whole, output, turn in parts]

    async def _in_pieces(
        self, request: Request, line: Mapping[str, Any], tell: Callable[[Completion], Awaitable[None]]
    ) -> Completion:
        """The same completion, as several requests: each continues at the end of the one before, with the same noise,
        as requests do that move to another replica."""
        whole, left = None, request
        while True:
            params = dataclasses.replace(left.params, max_tokens=min(PIECE, left.params.max_tokens))
            (piece,) = await self._shared.pool.generate([dataclasses.replace(left, params=params)], **line)
            whole = piece if whole is None else whole.joined(piece)
            left = left.after(piece)
            if piece.finish != "length" or left.params.max_tokens <= 0:
                return whole
            await tell(whole)


def _joined(
    start: Rollout, sibling: int, between: int, end: Completion, whole: Content, output: Any, turn: Any
) -> Rollout:
    """One rollout of three parts: `start`, `between` masked steps (feedback), and `end`."""
    new = end.content.num_steps
    before = start.versions_S[-1:] if start.num_steps else end.versions_S[:1]
    return dataclasses.replace(
        start,
        sibling=sibling,
        content=whole,
        logprobs_S=np.concatenate([start.logprobs_S, np.zeros(between, np.float32), end.logprobs_S]),
        mask_S=np.concatenate([start.mask_S, np.zeros(between, np.bool_), whole.actions_S[whole.num_steps - new :]]),
        output=output,
        versions_S=np.concatenate([start.versions_S, np.repeat(before, between), end.versions_S]).astype(np.int32),
        finish=end.finish,
        turn=turn,
    )
