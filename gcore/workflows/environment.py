"""The workflow of `environment`: each sample is an episode in a process of environments (gcore/environments/).

    reset ──messages, tools──> policy ──text, calls──> step ──messages, reward──> policy ... ──> Scored
    environments that talk to the policy themselves: a session of the endpoint ──run──> its rollout ──> Scored

What the environment says is masked from the loss. An episode that fails begins again with the same noise; after
`environment.retries` its sample is dropped and counted. It is never scored as a zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gcore.config.environments import REWARD
from gcore.content.text import PromptTooLong, text_modality
from gcore.environments.base import FINAL, OTHERS, Call, Observation, Policy
from gcore.environments.hosts import EpisodeClient, Hosts
from gcore.generation.noise import noise_key
from gcore.types import EnvironmentFailure, Message, Prompt, Rollout, Scored, UserError
from gcore.workflows.endpoint import Session
from gcore.workflows.tools import parse_tool_calls

if TYPE_CHECKING:
    from gcore.workflows.context import SampleContext

MOST_EVICTIONS = 20  # of one sample: a safety net, since they are not counted as retries


@dataclasses.dataclass(slots=True)
class Trajectory:
    """One sample: its rollout, and what each of its turns has earned."""

    rollout: Rollout
    rewards: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # steps until the end of a turn, reward
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    turns: int = 0

    def add(self, rollout: Rollout, seen: Observation) -> None:
        self.rollout, self.turns = rollout, self.turns + 1
        self.metrics |= seen.metrics
        if seen.reward is not None:
            self.rewards.append((rollout.num_steps, seen.reward))

    @property
    def reward(self) -> float | None:
        return sum(reward for _, reward in self.rewards) if self.rewards else None


async def episodes(ctx: Any, prompt: Prompt) -> list[Scored]:
    """The default workflow with `environment`: sampling.samples_per_prompt episodes of the prompt."""
    return await play(ctx, prompt)


async def play(ctx: SampleContext, prompt: Prompt, n: int | None = None, **params: Any) -> list[Scored]:
    """`n` episodes, scored by the environment and by the rewards of the recipe. `params`: of the sampling."""
    shared = ctx.shared
    hosts = shared.environment
    if hosts is None:
        raise UserError("the workflow plays in an environment, and the recipe has none; expected environment.source")
    made = await asyncio.gather(*(_sample(ctx, hosts, prompt, sibling, params) for sibling in ctx.issue(n)))
    kept = [trajectory for trajectory in made if isinstance(trajectory, Trajectory)]
    failed = [failure for failure in made if isinstance(failure, EnvironmentFailure)]
    least = len(made) if hosts.spec.on_failure == "drop_group" else min(shared.least_siblings, len(made))
    if failed and len(kept) < least:
        raise failed[0]
    return await _scored(ctx, kept, hosts)


async def _sample(
    ctx: SampleContext, hosts: Hosts, prompt: Prompt, sibling: int, params: Mapping[str, Any]
) -> Trajectory | EnvironmentFailure:
    """An episode, begun again if it fails."""
    counts, tried, evicted, alone = hosts.counts, 0, 0, False
    counts["episodes"] += 1
    while True:
        try:
            async with hosts.episode(alone) as episode, asyncio.timeout(hosts.spec.episode_s):
                return await _episode(ctx, hosts, episode, prompt, sibling, params)
        except TimeoutError:
            failure = EnvironmentFailure("timeout", f"the episode took longer than {hosts.spec.episode_s:g} s")
        except EnvironmentFailure as error:
            failure = error
        if (failure.cause in OTHERS or failure.suspect) and evicted < MOST_EVICTIONS:
            evicted, alone = evicted + 1, alone or failure.suspect
            counts["evicted"] += 1
            continue
        counts[f"cause_{failure.cause}"] += 1
        tried += 1
        if tried > hosts.spec.retries or failure.cause in FINAL:
            counts[f"failed_{failure.cause}"] += 1
            return failure
        counts["retried"] += 1


async def _episode(
    ctx: SampleContext, hosts: Hosts, episode: EpisodeClient, prompt: Prompt, sibling: int, params: Mapping[str, Any]
) -> Trajectory:
    shared, spec, counts = ctx.shared, hosts.spec, hosts.counts
    row = {"prompt": list(prompt.messages), **prompt.columns}
    seed = int(row["seed"]) if isinstance(row.get("seed"), int) else _seed(shared.noise_root, prompt)
    modality = text_modality(shared.modality, "environment")
    sampling = {**({"stop": spec.stop} if spec.stop else {}), **params}
    if await episode.runs():
        return await _run(ctx, episode, prompt, sibling, row, seed, sampling)
    with shared.clock.within("environment"):
        opening = await episode.reset(row, seed)
    try:
        content = prompt.content
        if opening.said is not None or opening.tools:
            content = modality.opening(_opening(prompt, opening.said), opening.tools or None)
        (rollout,) = await ctx.first_turn(prompt, [sibling], content, _turn_params(sampling, spec.max_turn_tokens))
    except PromptTooLong as error:
        raise EnvironmentFailure("context_exceeded", str(error)) from None
    trajectory = Trajectory(rollout)
    while True:
        if rollout.finish == "length" and modality.is_full(rollout.num_steps):
            return _full(trajectory, rollout, spec.on_context)
        calls = calls_of(rollout.turn, opening.tools, spec.calls)
        with shared.clock.within("environment"):
            seen = await episode.step(rollout.turn, calls)
        trajectory.add(rollout, seen)
        counts["turns"] += 1
        counts["tool_calls"] += len(calls)
        counts["tool_errors"] += seen.tool_errors
        if seen.done or trajectory.turns >= spec.max_turns:
            return trajectory
        said = "" if seen.said is None else seen.said
        if isinstance(said, str) and said and modality.chats:
            said = [{"role": "user", "content": said}]
        turn_params = _turn_params(sampling, spec.max_turn_tokens)
        (later,) = await ctx.next_turns(rollout, [sibling], _as_text(said, modality.chats), turn_params)
        if later.num_steps == rollout.num_steps:  # no room for another turn
            return _full(trajectory, later, spec.on_context)
        rollout = later


async def _run(
    ctx: SampleContext,
    episode: EpisodeClient,
    prompt: Prompt,
    sibling: int,
    row: dict[str, Any],
    seed: int,
    sampling: Mapping[str, Any],
) -> Trajectory:
    """The environment talks to the policy itself, by a session of the endpoint."""
    shared = ctx.shared
    session = Session(ctx, text_modality(shared.modality, "environment"), prompt, sibling)
    async with shared.endpoint.open([session]):
        policy = Policy(session.base_url, session.api_key, session.model, sampling)
        seen = await episode.run(row, seed, policy)
    rollouts = session.rollouts
    if not rollouts:
        raise EnvironmentFailure("agent_crashed", "the environment ended without a request to the policy")
    trajectory = Trajectory(rollouts[-1])
    trajectory.add(rollouts[-1], seen)
    return trajectory


def calls_of(text: str, tools: Sequence[Mapping[str, Any]], patterns: Mapping[str, str]) -> list[Call]:
    """The tool calls of a turn, in their order: by the patterns of the recipe, or as the chat template writes them."""
    if not tools:
        return []
    if not patterns:
        return [Call(call.name, call.arguments, call.error) for call in parse_tool_calls(text)]
    found = [(match.start(), name, match) for name, each in patterns.items() for match in re.finditer(each, text)]
    types = {tool["function"]["name"]: tool["function"].get("parameters", {}).get("properties", {}) for tool in tools}
    return [
        Call(name, {key: _typed(value, types.get(name, {}).get(key, {})) for key, value in match.groupdict().items()})
        for _, name, match in sorted(found, key=lambda each: each[:2])
    ]


def _typed(value: str | None, schema: Mapping[str, Any]) -> Any:
    """A group of a pattern as its schema wants it; what does not fit stays text, and the tool says so."""
    make = {"integer": int, "number": float}.get(str(schema.get("type")))
    with contextlib.suppress(TypeError, ValueError):
        return value if make is None else make(value)  # type: ignore[arg-type]
    return value


def _opening(prompt: Prompt, said: Any) -> Sequence[Message]:
    if said is None:
        return prompt.messages
    return [{"role": "user", "content": said}] if isinstance(said, str) else said


def _as_text(said: Any, chats: bool) -> Any:
    """Messages for a chat template; without one, their texts, one after the other."""
    return said if chats or isinstance(said, str) else "".join(str(message.get("content") or "") for message in said)


def _turn_params(sampling: Mapping[str, Any], most: int | None) -> dict[str, Any]:
    return {**({"max_tokens": most} if most is not None else {}), **sampling}


def _full(trajectory: Trajectory, rollout: Rollout, on_context: str) -> Trajectory:
    """The conversation has no room for another turn."""
    if on_context == "drop":
        raise EnvironmentFailure(
            "context_exceeded",
            f"the conversation has {rollout.num_steps} tokens after its first messages, all that "
            "generation.max_response_length allows (environment.on_context=score keeps it)",
        )
    trajectory.rollout = dataclasses.replace(rollout, finish="length")
    return trajectory


def _seed(root: Sequence[object], prompt: Prompt) -> int:
    """The same for all siblings, which are compared with each other: 31 bits."""
    return noise_key(*root, "environment", prompt.id) >> 33


async def _scored(ctx: SampleContext, made: Sequence[Trajectory], hosts: Hosts) -> list[Scored]:
    """The reward of the environment, if the recipe names it, and those of the recipe."""
    config = ctx.shared.config
    by_environment = REWARD in config.rewards.by_workflow
    own: dict[int, tuple[float, dict[str, float]]] = {}
    for trajectory in made:
        reward, metrics = trajectory.reward, trajectory.metrics
        if by_environment and reward is None:
            if trajectory.rollout.finish != "length" and trajectory.turns < hosts.spec.max_turns:
                raise UserError(
                    f"environment.source={hosts.spec.source} gave no reward; expected one from `step`, or rewards of "
                    "the recipe (key: rewards)"
                )
            reward = 0.0  # it ended before the environment measured anything
        parts = {REWARD: reward, **metrics} if by_environment and reward is not None else dict(metrics)
        own[trajectory.rollout.sibling] = (reward if by_environment and reward is not None else 0.0), parts
    if not config.rewards.sources:
        return [Scored(t.rollout, own[t.rollout.sibling][0], own[t.rollout.sibling][1]) for t in made]
    scored = []
    for one in await ctx.reward([trajectory.rollout for trajectory in made]):
        reward, parts = own[one.rollout.sibling]
        scored.append(dataclasses.replace(one, reward=one.reward + reward, parts={**one.parts, **parts}))
    return scored
