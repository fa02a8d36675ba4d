"""What an adapter of environments implements, and what crosses the socket between a controller and an environment.

workflow (controller) ──reset(row, seed)──> Opening    ──step(text, calls)──> Observation ... until it is done
environments that talk to the policy themselves:  ──run(row, seed, policy)──> Observation
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gcore.types import Message

Row = Mapping[str, Any]
Said = str | Sequence[Message] | None  # text of the environment, or messages for the chat template
CAUSES = {  # why an episode failed
    "not_started": "its process did not start",
    "died": "its process died",
    "hung": "a call did not end, and its process was killed",
    "evicted": "its process was killed because of another episode",
    "timeout": "a call took too long, and could be cancelled",
    "tool_timeout": "the same, of tool calls",
    "raised": "it raised an error",
    "bad_answer": "it returned something else than the protocol says",
    "agent_crashed": "it ended without a request to the policy",
    "context_exceeded": "the conversation is longer than generation.max_response_length",
}
OTHERS = ("evicted",)  # not the fault of the episode: it begins again, and its retries are not counted
FINAL = ("context_exceeded",)  # the same again would end the same


class Trouble(RuntimeError):
    """What an adapter raises for a failure with a name of CAUSES."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class BadAnswer(Trouble):
    """The environment answered something else than the protocol says."""

    def __init__(self, message: str) -> None:
        super().__init__("bad_answer", message)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the policy. Call("add", {"a": 27, "b": 58}). `error`: why the text is not a call."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Opening:
    """Opening("You are in a maze.", tools=[...]). `said` is None: the prompt of the dataset's row."""

    said: Said = None
    tools: Sequence[Mapping[str, Any]] = ()  # schemas in OpenAI's form


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy reads next, and what its turn has earned. Observation("<", reward=0.0)"""

    said: Said = None
    reward: float | None = None  # None: nothing was measured
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged as reward/NAME
    tool_errors: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """An OpenAI-compatible endpoint of the policy, for one episode."""

    base_url: str
    api_key: str
    model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)


class Episode(Protocol):
    """One conversation. Its calls come one after the other."""

    async def reset(self, row: Row, seed: int) -> Opening: ...

    async def step(self, text: str, calls: Sequence[Call]) -> Observation: ...

    async def run(self, row: Row, seed: int, policy: Policy) -> Observation: ...

    async def close(self) -> None: ...


class Environment(Protocol):
    """What a process of environments has loaded. `runs`: its episodes talk to the policy themselves."""

    runs: bool

    def rows(self, split: str, size: int | None) -> Sequence[Row] | Awaitable[Sequence[Row] | None] | None:
        """Its dataset; None: it has none."""

    def episode(self) -> Episode: ...
