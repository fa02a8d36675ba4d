"""The seams between processes. Everything that crosses one is async; every role runs on an event loop of its own.

driver ──start──> Runtime ──> controllers ──call──> Engine, Trainer        (Handle: a role behind RPC)
                                  └──all_gather──> controllers             (Group: metadata only)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gcore.types import Completion, Prompt, Request, Rollout, Sample, Scored, TrainBatch

Weights = Mapping[str, Any]  # name -> array; names as in the Hugging Face checkpoint
Stats = dict[str, float]


class Engine(Protocol):
    """Generates. Implementations: generation/embedded.py. Contract: tests/contract/test_engine.py."""

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests. A request's tokens depend on nothing but itself and the weights."""
        ...

    async def load_weights(self, version: int, weights: Weights) -> int:
        """Replace the weights between two decoding steps; later tokens are stamped with `version`. Returns it."""
        ...

    async def stats(self) -> Stats: ...


class Rewarder(Protocol):
    """Scores the siblings of one prompt together."""

    async def score(self, group: Sequence[Rollout]) -> list[Scored]:
        """Raises RewardError when a reward cannot be had."""
        ...


class Trainer(Protocol):
    """One rank. All ranks are called for each method (they meet in collectives), except `push`."""

    async def info(self) -> Stats:
        """`num_parameters` and `hidden_size`, for sizes and costs."""
        ...

    async def begin(self) -> None:
        """Reinforcement learning starts from the policy as it is now: reference of the KL, fresh optimizer."""
        ...

    async def push(self, source: int, samples: Sequence[Sample]) -> None:
        """Take the samples that controller `source` holds for this rank."""
        ...

    async def prepare(self, batch: TrainBatch) -> None:
        """Logprobs of the policy before the update and of the reference model, where the algorithm asks for them."""
        ...

    async def update(self, batch: TrainBatch) -> Stats:
        """One optimizer step a mini-batch. Returns sums over this rank's samples."""
        ...

    async def weights(self) -> Weights:
        """The full weights on rank 0, empty elsewhere."""
        ...

    async def save(self, folder: str) -> None: ...

    async def load(self, folder: str) -> None: ...


class Group(Protocol):
    """The controllers among themselves. One primitive; sums, maxima and barriers are made from it."""

    rank: int
    size: int

    async def all_gather(self, name: str, value: Any) -> list[Any]:
        """Everyone's value, by rank. `name` is what a time-out reports, with the ranks that are missing."""
        ...


class Ref(Protocol):
    """A value that lives where it was made. Given to a Handle, the callee receives the value itself."""

    def __await__(self) -> Any: ...


class Handle(Protocol):
    """A role in another process (or, in the local runtime, in this one)."""

    name: str  # "engine-0"

    def submit(self, method: str, *args: Any) -> Ref:
        """Start a call; the answer stays with the callee until somebody awaits it or passes it on."""
        ...

    async def call(self, method: str, *args: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the members of a group find each other: rank, size, and where. Given to a role's factory as last argument."""

    rank: int
    size: int
    address: str | None  # host:port of rank 0; None when all members share one process
    hub: Any = None  # their meeting point in that case


class Runtime(Protocol):
    """Starts roles and watches them. Implementations: runtime/local.py, runtime/ray.py."""

    async def start_group(
        self, kind: str, factory: Callable[..., Any], args: Sequence[tuple[Any, ...]]
    ) -> Sequence[Handle]:
        """Build `factory(*args[i], rendezvous)` as `KIND-i`, each in a process of its own."""
        ...

    def processes(self) -> dict[str, int]:
        """Role -> process id, for messages and debuggers."""
        ...

    async def watch(self) -> None:
        """Returns never; raises RoleDied as soon as a started role is gone."""
        ...

    def stop(self) -> None:
        """End every process this runtime started."""
        ...


class Context(Protocol):
    """What a workflow may do for its sample. See controller/workflow.py."""

    async def generate(self, prompt: Prompt, n: int | None = None, **params: Any) -> list[Rollout]: ...

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]: ...


class RoleError(RuntimeError):
    """A role raised. Carries its name and the first traceback; `user_error` says the user can mend it."""

    def __init__(self, role: str, message: str, traceback: str, user_error: bool = False):
        super().__init__(role, message, traceback, user_error)
        self.role, self.message, self.traceback, self.user_error = role, message, traceback, user_error

    def __str__(self) -> str:
        return f"{self.role}: {self.message}"


class RoleDied(RuntimeError):
    """A process is gone: killed, crashed or out of memory."""

    def __init__(self, role: str, detail: str):
        super().__init__(role, detail)
        self.role, self.detail = role, detail

    def __str__(self) -> str:
        return f"{self.role} died: {self.detail}"
