"""The seams between processes. Everything that crosses one is async; every role runs on an event loop of its own.

driver ──start──> Runtime ──> controllers ──call──> Engine, Trainer        (Handle: a role behind RPC)
                                  └──all_gather──> controllers             (Group: metadata only)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from gcore.types import Completion, Ints, Key, KlSums, Message, Prompt, Request, Rollout, Sample, Scored, TrainBatch

Weights = Mapping[str, Any]  # name -> array, or packed (weights/bucket.py); names of Hugging Face, of PEFT for adapters
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """How a trainer publishes its weights. WeightPlan(num_buckets=15, every_rank=False)"""

    num_buckets: int  # more than one, so that no process holds a second copy of all weights
    every_rank: bool  # each rank has them, for the engines on its GPU; else rank 0 alone


@dataclass(frozen=True, slots=True)
class Receivers:
    """The engines that a weight update goes to. Receivers(("engine-0", "engine-1"), restarted=False)"""

    names: tuple[str, ...]
    restarted: bool = False  # some of them are new processes since the last update


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of one engine. EngineStats(running=12, waiting=0, busy_s=31.5, generated_tokens=20480)"""

    running: float  # requests in the batch
    waiting: float  # requests in the engine's queue
    busy_s: float  # seconds with something to do, since the start
    generated_tokens: float  # since the start
    running_tokens: float = 0.0  # generated so far by the requests in the batch


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Result of a sleep (memory freed) or a wake (memory allocated). MemoryChange(seconds=0.04, gigabytes=12.5)"""

    seconds: float
    gigabytes: float


@dataclass(frozen=True, slots=True)
class RoleReport:
    """One controller's part in a role of engines, for placement. RoleReport(requests=12, waiting=4, calls=2)"""

    requests: int = 0  # at replicas
    waiting: int = 0  # at no replica yet
    calls: int = 0  # groups of siblings, or single questions to a judge
    ended: tuple[int, ...] = ()  # lengths of the requests that ended since the last report
    longest: tuple[int, ...] = ()  # the longest of each call
    replicas: Mapping[int, EngineStats] = field(default_factory=dict)  # of the replicas that this controller polls


@dataclass(frozen=True, slots=True)
class ScorerStats:
    """Counters of one scalar reward model. ScorerStats(scored=4096, busy_s=12.5, running=32, waiting=0)"""

    scored: int  # texts since the start
    busy_s: float  # seconds of scoring, since the start
    running: int  # texts in the current wave
    waiting: int


@dataclass(frozen=True, slots=True)
class TrainerInfo:
    """TrainerInfo(num_parameters=494032768, hidden_size=896)"""

    num_parameters: int  # those that are trained, over all ranks
    hidden_size: int


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Sums over the mini-batches of an update. UpdateStats(updates=2, grad_norm=0.8, lr=2e-6, sums={"loss": 0.1})"""

    updates: int = 0  # optimizer steps, with those that were skipped
    skipped: int = 0  # because gradients were NaN or infinite
    grad_norm: float = 0.0  # the same on every rank, as all fields above and `lr`
    lr: float = 0.0
    sums: Mapping[str, float] = field(default_factory=dict)  # of this rank's samples, to add over ranks: "loss", ...

    def __add__(self, other: UpdateStats) -> UpdateStats:
        added = {name: self.sums.get(name, 0.0) + value for name, value in other.sums.items()}
        return UpdateStats(
            self.updates + other.updates,
            self.skipped + other.skipped,
            self.grad_norm + other.grad_norm,
            self.lr + other.lr,
            {**self.sums, **added},
        )


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """What a controller is doing, with what it has to say since the last status.

    ControllerStatus("controller-1", "generation", "31/64 samples", step=12)
    """

    role: str
    stage: str
    detail: str
    step: int
    rows: Sequence[dict[str, Any]] = ()  # of metrics
    notes: Sequence[str] = ()  # for the user


class Engine(Protocol):
    """Generates. Implementations: generation/embedded.py. Contract: tests/contract/test_engine.py."""

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        """Completions in the order of the requests. A request's tokens depend on nothing but itself and the weights."""
        ...

    async def abort(self, ticket: str) -> None:
        """End the requests that came with this ticket: their slots are free, their `generate` answers at once with
        what there is, finish="abort". A ticket that is not (or no longer) known is nothing to abort."""
        ...

    async def load_weights(self, version: int, weights: Weights, bucket: tuple[int, int] = (0, 1)) -> int:
        """Replace the weights between two decoding steps; later tokens are stamped with `version`.

        They may come in buckets, (index, count), in order: nothing is decoded between the first and the last. Returns
        the version that is served now. What weights/bucket.py packed is unpacked, and its checksum verified.
        """
        ...

    async def sleep(self, level: int) -> MemoryChange:
        """Free memory; refused while requests are in progress. Level 1 keeps the weights in host memory, level 2 drops
        them: load them again after `wake`. Requests queue while the engine sleeps."""
        ...

    async def wake(self, *tags: str) -> MemoryChange:
        """Allocate the memory again: all of it, or by tags: "weights", "kv_cache"."""
        ...

    async def stats(self) -> EngineStats: ...


class Scorer(Protocol):
    """A scalar reward model. Implementation: rewarding/scalar.py."""

    async def score(self, texts_tokens: Sequence[Ints]) -> list[float]:
        """One number per text, in their order."""
        ...

    async def stats(self) -> ScorerStats: ...


class ReplicaPool(Protocol):
    """A controller's view of the replicas of one role. Implementation: generation/replica_pool.py."""

    def mark_dead(self, name: str) -> None:
        """Send nothing to the replica until `mark_alive`. A name that is not in the pool is ignored, here and there."""
        ...

    def mark_alive(self, name: str) -> None: ...

    async def check(self, timeout_s: float) -> dict[str, bool]:
        """Poll every replica. Returns the names of those that changed, and whether they answer now."""
        ...


class Rewarder(Protocol):
    """Scores the siblings of one prompt together."""

    pools: Sequence[ReplicaPool]  # of the judges and reward models that it calls

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]:
        """Raises RewardError when a reward cannot be had."""
        ...

    async def score(self, name: str, group: Sequence[Rollout]) -> list[float | None]:
        """One of the rewards alone, unweighted."""
        ...

    async def ask(self, judge: str, messages: Sequence[Message], key: tuple[object, ...], **params: Any) -> str:
        """What a generative judge answers. `key` names the sampling noise."""
        ...

    def take_counts(self) -> dict[str, int]:
        """What happened since the last call: retries, timeouts, verdicts that could not be read, ..."""
        ...

    def close(self) -> None: ...


class Trainer(Protocol):
    """One rank. All ranks are called for each method (they meet in collectives), except `push`."""

    async def info(self) -> TrainerInfo: ...

    async def begin(self) -> None:
        """Reinforcement learning starts from the policy as it is now: reference of the KL, fresh optimizer."""
        ...

    async def push(self, source: int, samples: Sequence[Sample]) -> None:
        """Take the samples that controller `source` holds for this rank."""
        ...

    async def prepare(self, batch: TrainBatch) -> Mapping[Key, KlSums]:
        """Logprobs of the policy before the update and of the reference model, where the algorithm asks for them.
        Returns the KL of each of this rank's samples where it is part of the reward, else nothing."""
        ...

    async def update(self, batch: TrainBatch) -> UpdateStats:
        """One optimizer step per mini-batch."""
        ...

    async def weight_plan(self) -> WeightPlan:
        """The number of buckets, and which ranks have the weights. It is the same during the whole run."""
        ...

    async def weight_bucket(self, index: int, receivers: Receivers) -> Weights:
        """Bucket `index` of the full weights, packed, if engines read from this rank; else empty."""
        ...

    async def save(self, folder: str) -> None: ...

    async def load(self, folder: str, begun: bool = True) -> None:
        """What `save` wrote. `begun` is False where it was written during the warm start: `begin` is still to come."""
        ...


class Group(Protocol):
    """The controllers among themselves. One primitive; sums, maxima and barriers are made from it."""

    rank: int
    size: int

    async def all_gather(self, name: str, value: Any) -> list[Any]:
        """Everyone's value, by rank. `name` is what a time-out reports, with the ranks that are missing."""
        ...

    def subgroup(self) -> Group:
        """A second, independent line among the same members; all must ask for their lines in the same order."""
        ...


class Ref(Protocol[T_co]):
    """A value that lives where it was made. Given to a Handle, the callee receives the value itself."""

    def __await__(self) -> Generator[Any, None, T_co]: ...


class Handle(Protocol):
    """A role in another process (or, in the local runtime, in this one)."""

    name: str  # "engine-0"

    def submit(self, method: str, *args: Any) -> Ref[Any]:
        """Start a call; the answer stays with the callee until it is awaited or passed to another call."""
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
        """Role -> process id, for messages and debuggers; also of roles that are still being built."""
        ...

    def ready(self) -> set[str]:
        """Roles that are built, where they have processes of their own."""
        ...

    async def watch(self) -> None:
        """Returns never; raises RoleDied as soon as a started role is gone."""
        ...

    async def revive(self, name: str) -> None:
        """Start a role that died again, from what it was built of. Handles to it stay good."""
        ...

    def stop(self) -> None:
        """End every process this runtime started."""
        ...


class Context(Protocol):
    """What a workflow may do for its sample. See controller/workflow.py."""

    async def generate(self, prompt: Prompt, n: int | None = None, **params: Any) -> list[Rollout]:
        """`n` more responses to the prompt, siblings of those before."""
        ...

    async def proceed(self, rollout: Rollout, said: str | Sequence[Message] = "", **params: Any) -> Rollout:
        """Append what a tool or a judge said (masked from the loss) and let the policy go on from there."""
        ...

    async def branch(self, rollout: Rollout, n: int, **params: Any) -> list[Rollout]:
        """`n` different continuations of the same beginning, each a new sibling."""
        ...

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]:
        """All rewards of the recipe, blended."""
        ...

    async def score(self, name: str, group: Sequence[Rollout]) -> list[float | None]:
        """One reward of the recipe alone."""
        ...

    async def ask(self, judge: str, messages: Sequence[Message], **params: Any) -> str:
        """What a judge of the recipe says to a conversation of one's own."""
        ...


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
