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

import numpy as np
import numpy.typing as npt

from gcore.config.environments import REWARD, TURN_CREDIT
from gcore.content.text import PromptTooLong, text_modality
from gcore.environments.base import FINAL, OTHERS, Call, Observation, Policy
from gcore.environments.hosts import EpisodeClient, Hosts
from gcore.generation.noise import noise_key
from gcore.types import Bools, EnvironmentFailure, Message, Prompt, Rollout, Scored, SessionLeft, UserError
from gcore.workflows.session import Session
from gcore.workflows.tool_formats import Schemas

if TYPE_CHECKING:
    from gcore.workflows.context import SampleContext

EPSILON = 1e-6  # as in preparation/advantages.py
MOST_EVICTIONS = 20  # of one sample: a safety net, since they are not counted as retries


@dataclasses.dataclass(slots=True)
class Trajectory:
    """One sample: its rollout, and what each of its turns has earned."""

    rollout: Rollout
    ends: list[int] = dataclasses.field(default_factory=list)  # steps until the end of each turn
    rewards: list[float] = dataclasses.field(default_factory=list)  # of each turn
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    measured: bool = False  # the environment gave a reward

    def add(self, rollout: Rollout, seen: Observation) -> None:
        self.rollout = rollout
        self.ends.append(rollout.num_steps)
        self.rewards.append(seen.reward or 0.0)
        self.metrics |= seen.metrics
        self.measured = self.measured or seen.reward is not None

    @property
    def turns(self) -> int:
        return len(self.ends)

    @property
    def reward(self) -> float | None:
        return sum(self.rewards) if self.measured else None


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
    counts, tried, evicted, suspected = hosts.counts, 0, 0, 0
    counts["episodes"] += 1
    while True:
        try:
            async with hosts.episode(alone=suspected > 1) as episode, asyncio.timeout(hosts.spec.episode_s):
                return await _episode(ctx, hosts, episode, prompt, sibling, params)
        except TimeoutError:
            failure = EnvironmentFailure("timeout", f"the episode took longer than {hosts.spec.episode_s:g} s")
        except EnvironmentFailure as error:
            failure = error
        if (failure.cause in OTHERS or failure.suspect) and evicted < MOST_EVICTIONS:
            evicted, suspected = evicted + 1, suspected + failure.suspect
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
        calls = calls_of(ctx, rollout, opening.tools, spec.calls)
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
    shared, counts = ctx.shared, episode.host.hosts.counts
    session = Session(ctx, text_modality(shared.modality, "environment"), prompt, sibling)
    try:
        async with shared.endpoint.open([session]):
            policy = Policy(session.base_url, session.api_key, session.model, sampling)
            seen = await episode.run(row, seed, policy)
    except SessionLeft as error:
        raise EnvironmentFailure("agent_crashed", str(error)) from error
    if not session.rollouts:
        raise EnvironmentFailure("agent_crashed", "the environment ended without a request to the policy")
    trajectory = Trajectory(session.rollout)
    trajectory.add(session.rollout, seen)
    counts["turns"] += sum(num_turns(segment.mask_S[segment.shared :]) for segment in session.rollout.trajectory)
    return trajectory


def num_turns(mask_S: Bools) -> int:
    """Of the policy: runs of its steps."""
    return int(np.count_nonzero(np.diff(mask_S.astype(np.int8), prepend=0) == 1))


def calls_of(ctx: SampleContext, rollout: Rollout, tools: Schemas, patterns: Mapping[str, str]) -> list[Call]:
    """The tool calls of a turn, in their order: by the patterns of the recipe, or as the family of the model writes
    them (model.tool_format)."""
    if not tools:
        return []
    if not patterns:
        return [Call(call.name, call.arguments, call.error) for call in ctx.read(rollout, tools).calls]
    text = rollout.turn
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
    rollouts = [trajectory.rollout for trajectory in made]
    judged = await ctx.reward(rollouts) if config.rewards.sources else [Scored(rollout, 0.0) for rollout in rollouts]
    scored = []
    for one in judged:
        reward, parts = own[one.rollout.sibling]
        scored.append(dataclasses.replace(one, reward=one.reward + reward, parts={**one.parts, **parts}))
    if hosts.spec.credit == "turn":
        of_sibling = {trajectory.rollout.sibling: trajectory for trajectory in made}
        turns = [of_sibling[one.rollout.sibling] for one in scored]
        return with_turn_credit(scored, turns, hosts.spec.discount, TURN_CREDIT.get(config.algorithm.adv_estimator))
    return scored


def with_turn_credit(
    scored: Sequence[Scored], made: Sequence[Trajectory], discount: float, divides: bool | None
) -> list[Scored]:
    """With rewards of the steps (Scored.step_rewards_S), which trainers add to the advantages, so that the tokens of a
    turn are credited with what it and later turns have earned. Rewards of the recipe belong to the last turn.

    `divides`: whether the estimator divides by the spread of the group. Then A_k = (G_k - mean G_k) / spread, where G_k
    are the discounted rewards from turn k on, and the mean is over the siblings that have such a turn. None: the
    estimator takes a reward per step and discounts it itself; each turn's reward moves to its last token.
    """
    if any(one.rollout.segments for one in scored):  # of agents: no turn has a reward of its own
        return list(scored)
    earned = []
    for one, trajectory in zip(scored, made, strict=True):
        rewards = np.array(trajectory.rewards or [0.0], np.float64)
        rewards[-1] += one.reward - rewards.sum()
        earned.append(rewards)
    if divides is None:
        return [_with_steps(one, _moved(r, one, t)) for one, t, r in zip(scored, made, earned, strict=True)]
    totals = np.array([one.reward for one in scored], np.float64)
    returns = [_returns(rewards, discount) for rewards in earned]
    spread = 1.0
    if divides and len(totals) > 1:  # that of equal totals is 0: then of all returns
        spread = float(totals.std(ddof=1) or np.concatenate(returns).std() or 1.0) + EPSILON
    credited = []
    for one, trajectory, own in zip(scored, made, returns, strict=True):
        means = np.array([np.mean([other[k] for other in returns if len(other) > k]) for k in range(len(own))])
        more = ((own - means) - (one.reward - totals.mean())) / spread
        starts = [0, *trajectory.ends]
        steps_S = np.zeros(one.rollout.num_steps)
        for k, value in enumerate(more):
            last = k == len(more) - 1
            steps_S[starts[k] : one.rollout.num_steps if last else starts[k + 1]] = value
        credited.append(_with_steps(one, steps_S))
    return credited


def _returns(rewards: npt.NDArray[np.float64], discount: float) -> npt.NDArray[np.float64]:
    returns, after = np.zeros_like(rewards), 0.0
    for k in reversed(range(len(rewards))):
        returns[k] = after = rewards[k] + discount * after
    return returns


def _moved(rewards: npt.NDArray[np.float64], one: Scored, trajectory: Trajectory) -> npt.NDArray[np.float64]:
    """From the last action, which has the whole reward, to the last action of each turn."""
    steps_S, actions = np.zeros(one.rollout.num_steps), np.flatnonzero(one.rollout.mask_S)
    for end, reward in zip(trajectory.ends[:-1], rewards[:-1], strict=True):
        steps_S[actions[actions < end][-1]] += reward
        steps_S[actions[-1]] -= reward
    return steps_S


def _with_steps(one: Scored, steps_S: npt.NDArray[np.float64]) -> Scored:
    before = 0.0 if one.step_rewards_S is None else one.step_rewards_S
    masked_S = np.where(one.rollout.mask_S, steps_S, 0.0)
    return dataclasses.replace(one, step_rewards_S=(masked_S + before).astype(np.float32))
