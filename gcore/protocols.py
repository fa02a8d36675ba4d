"""The interfaces between processes, and the small values that they exchange.

driver ──start──> Runtime ──> controllers ──call──> Engine, Scorer, Trainer    (Handle: a role behind RPC)
                                  └──all_gather──> controllers                 (Group: metadata only)

A *role* is a kind of process: engine, judge, scorer, trainer, controller. A *replica* is one process of a role. Every
call between processes is async, and every role has its own event loop. clients.py has a typed client per role.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from gcore.types import (
    Completion,
    Ints,
    Key,
    Message,
    Prompt,
    Request,
    Rollout,
    Sample,
    Scored,
    TrainBatch,
    UserError,
)

Weights = Mapping[str, Any]  # name (Hugging Face; PEFT for adapters) -> array, or packed: see weights/bucket.py
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """How a trainer publishes its weights. WeightPlan(num_buckets=15, every_rank=False)"""

    num_buckets: int  # more than one, so that no process holds a second copy of all weights
    every_rank: bool  # each rank publishes, to the engines on its GPU; else only rank 0


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
    busy_s: float  # seconds with at least one request, since the start
    generated_tokens: float  # since the start
    running_tokens: float = 0.0  # generated so far for the requests in the batch


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Result of a sleep (memory freed) or a wake (memory allocated). MemoryChange(seconds=0.04, gigabytes=12.5)"""

    seconds: float
    gigabytes: float


@dataclass(frozen=True, slots=True)
class RoleReport:
    """Requests of one controller to one role of engines, for placement. RoleReport(requests=12, waiting=4, calls=2)"""

    requests: int = 0  # sent to a replica
    waiting: int = 0  # in the queue, sent to no replica yet
    calls: int = 0  # groups of siblings, or single questions to a judge
    ended: tuple[int, ...] = ()  # lengths of the requests that ended since the last report
    longest: tuple[int, ...] = ()  # longest request of each call
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

    num_parameters: int  # trained ones, over all ranks
    hidden_size: int


@dataclass(frozen=True, slots=True)
class Metric:
    """A part of a metric, from one micro-batch, update or rank. Parts are added. Metric(total=12.5, weight=100.0)

    `mean`: the value is total / weight. `max`: the value is the largest total.
    """

    total: float
    weight: float = 1.0
    reducer: Literal["mean", "max"] = "mean"

    def __add__(self, other: Metric) -> Metric:
        assert self.reducer == other.reducer
        if self.reducer == "max":
            return self if self.total >= other.total else other
        return Metric(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        if self.reducer == "max":
            return self.total
        return self.total / self.weight if self.weight else 0.0


def add_metrics(*parts: Mapping[str, Metric]) -> dict[str, Metric]:
    """Parts of several micro-batches, updates or ranks, by name."""
    found: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            found[name] = found[name] + metric if name in found else metric
    return found


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Of the mini-batches of an update. UpdateStats(updates=2, grad_norm=0.8, lr=2e-6, metrics={"actor/loss": ...})"""

    updates: int = 0  # optimizer steps, including skipped ones
    skipped: int = 0  # gradients were NaN or infinite
    grad_norm: float = 0.0  # sum over the updates; the same on every rank, like `updates`, `skipped` and `lr`
    lr: float = 0.0  # sum over the updates
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # of this rank's samples

    def __add__(self, other: UpdateStats) -> UpdateStats:
        return UpdateStats(
            self.updates + other.updates,
            self.skipped + other.skipped,
            self.grad_norm + other.grad_norm,
            self.lr + other.lr,
            add_metrics(self.metrics, other.metrics),
        )


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """What a controller is doing, and its rows and notes since the last status.

    ControllerStatus("controller-1", "generation", "31/64 samples", step=12)
    """

    role: str
    stage: str
    detail: str
    step: int
    rows: Sequence[dict[str, Any]] = ()  # metrics
    notes: Sequence[str] = ()  # messages for the user


class Engine(Protocol):
    """Generates completions. Implementations: generation/embedded.py, vllm.py, sglang.py, simulate/engine.py. Contract:
    tests/contract/test_engine.py."""

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        """Completions in the order of the requests. Each one depends only on its request and the weights."""
        ...

    async def abort(self, ticket: str) -> None:
        """Abort the requests of this ticket. Their `generate` returns at once with the steps so far and
        finish="abort". An unknown ticket is ignored."""
        ...

    async def load_weights(self, version: int, weights: Weights, bucket: tuple[int, int] = (0, 1)) -> int:
        """Replace the weights between two decoding steps; later tokens have this `version`.

        `bucket`: (index, count). Buckets come in order; the engine decodes nothing between the first and the last.
        Buckets that weights/bucket.py packed are unpacked and their checksums verified. Returns the version that the
        engine serves now.
        """
        ...

    async def sleep(self, level: int) -> MemoryChange:
        """Free GPU memory; refused while requests are in progress. Level 1 keeps the weights in host memory. Level 2
        drops them: load them again after `wake`. Requests queue while the engine sleeps."""
        ...

    async def wake(self, *tags: str) -> MemoryChange:
        """Allocate the memory again: all, or only some of the tags "weights" and "kv_cache"."""
        ...

    async def stats(self) -> EngineStats: ...


class Scorer(Protocol):
    """A scalar reward model. Implementation: rewarding/scalar.py."""

    async def score(self, texts_tokens: Sequence[Ints]) -> list[float]:
        """One number per text, in the same order."""
        ...

    async def stats(self) -> ScorerStats: ...


class ReplicaPool(Protocol):
    """A controller's view of the replicas of one role. Implementation: generation/replica_pool.py."""

    def mark_dead(self, name: str) -> None:
        """Send nothing to the replica until `mark_alive`. Both ignore names that are not in the pool."""
        ...

    def mark_alive(self, name: str) -> None: ...

    async def check(self, timeout_s: float) -> dict[str, bool]:
        """Poll every replica. Returns the replicas whose state changed, and whether each one answers now."""
        ...


class Rewarder(Protocol):
    """Scores the siblings of one prompt together. Implementation: rewarding/rewarder.py."""

    pools: Sequence[ReplicaPool]  # of the judges and reward models that it calls

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]:
        """The weighted sum of all rewards of the recipe. Raises RewardError when a reward could not be computed."""
        ...

    async def score(self, name: str, group: Sequence[Rollout]) -> list[float | None]:
        """One reward of the recipe, unweighted."""
        ...

    async def ask(self, judge: str, messages: Sequence[Message], key: tuple[object, ...], **params: Any) -> str:
        """The answer of a generative judge. `key` determines the sampling noise."""
        ...

    def take_counts(self) -> dict[str, int]:
        """Events since the last call: retries, timeouts, verdicts that could not be parsed, ..."""
        ...

    def close(self) -> None: ...


class Trainer(Protocol):
    """One rank. Except for `push`, each method is called on all ranks, because the ranks meet in collectives."""

    async def info(self) -> TrainerInfo: ...

    async def begin(self) -> None:
        """Start reinforcement learning from the current weights: they are the KL reference; the optimizer is reset."""
        ...

    async def push(self, source: int, samples: Sequence[Sample]) -> None:
        """Store the samples that controller `source` has for this rank."""
        ...

    async def prepare(self, batch: TrainBatch) -> Mapping[Key, float]:
        """Compute logprobs of the policy before the update and of the reference model, if the algorithm needs them.
        Returns the KL of each sample of this rank, if siblings are compared by reward - KL; else an empty mapping."""
        ...

    async def update(self, batch: TrainBatch) -> UpdateStats:
        """One optimizer step per mini-batch. The batch has the advantages of its samples."""
        ...

    async def weight_plan(self) -> WeightPlan:
        """The number of buckets, and which ranks publish. It does not change during the run."""
        ...

    async def weight_bucket(self, index: int, receivers: Receivers) -> Weights:
        """Bucket `index` of the full weights, packed, if this rank publishes; else empty."""
        ...

    async def save(self, folder: str) -> None: ...

    async def load(self, folder: str, begun: bool = True) -> None:
        """Read what `save` wrote. `begun`: False for checkpoints of the warm start, which ends with `begin`."""
        ...


class Group(Protocol):
    """Communication among the controllers. One primitive; sums, maxima and barriers are made from it."""

    rank: int
    size: int

    async def all_gather(self, name: str, value: Any) -> list[Any]:
        """The values of all members, by rank. A timeout reports `name` and the missing ranks."""
        ...

    def subgroup(self) -> Group:
        """An independent group of the same members. All members must create their subgroups in the same order."""
        ...


class Ref(Protocol[T_co]):
    """A value that stays in the process that made it. Passed to a Handle, the callee receives the value itself."""

    def __await__(self) -> Generator[Any, None, T_co]: ...


class Handle(Protocol):
    """A role in another process (or, in the local runtime, in this one)."""

    name: str  # "engine-0"

    def submit(self, method: str, *args: Any) -> Ref[Any]:
        """Start a call. The result stays in the callee's process until it is awaited or passed to another call."""
        ...

    async def call(self, method: str, *args: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the members of a group find each other. The runtime passes it to a role's factory as last argument."""

    rank: int
    size: int
    address: str | None  # host:port of rank 0; None when all members share one process
    hub: Any = None  # object that they share in that case


class Runtime(Protocol):
    """Starts and monitors roles. Implementations: runtime/local.py, runtime/ray.py."""

    def prepare(self, kind: str, count: int, imports: Callable[[], None]) -> None:
        """Start the processes of a group that `start_group` will build later. Meanwhile they call `imports`."""
        ...

    async def start_group(
        self, kind: str, factory: Callable[..., Any], args: Sequence[tuple[Any, ...]]
    ) -> Sequence[Handle]:
        """Build `factory(*args[i], rendezvous)` as `KIND-i`, each in its own process."""
        ...

    def processes(self) -> dict[str, int]:
        """Role -> process id, for messages and debuggers. Includes roles that are still being built."""
        ...

    def ready(self) -> set[str]:
        """Roles that are built, if roles have their own processes."""
        ...

    async def watch(self) -> None:
        """Never returns; raises RoleDied as soon as a started role dies."""
        ...

    async def revive(self, name: str) -> None:
        """Start a dead role again, with the same factory and arguments. Handles to it stay valid."""
        ...

    def stop(self) -> None:
        """End every process this runtime started."""
        ...


class Context(Protocol):
    """The methods that a workflow can call for its prompt. Implementation: controller/workflow.py."""

    async def generate(self, prompt: Prompt, n: int | None = None, **params: Any) -> list[Rollout]:
        """`n` more responses to the prompt, siblings of the earlier ones."""
        ...

    async def proceed(self, rollout: Rollout, feedback: str | Sequence[Message] = "", **params: Any) -> Rollout:
        """Append the feedback of a tool or a judge (masked from the loss), then let the policy continue."""
        ...

    async def branch(self, rollout: Rollout, n: int, **params: Any) -> list[Rollout]:
        """`n` different continuations of the same rollout, each a new sibling."""
        ...

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]:
        """The weighted sum of all rewards of the recipe."""
        ...

    async def score(self, name: str, group: Sequence[Rollout]) -> list[float | None]:
        """One reward of the recipe, unweighted."""
        ...

    async def ask(self, judge: str, messages: Sequence[Message], **params: Any) -> str:
        """The answer of a judge of the recipe to these messages."""
        ...


class RoleError(RuntimeError):
    """A role raised an exception. `traceback`: the first one. `user_error`: the user can fix it. `kind`: name of the
    exception's class, for callers that handle it."""

    def __init__(self, role: str, message: str, traceback: str, user_error: bool = False, kind: str = ""):
        super().__init__(role, message, traceback, user_error, kind)
        self.role, self.message, self.traceback, self.user_error = role, message, traceback, user_error
        self.kind = kind

    @classmethod
    def of(cls, role: str, error: Exception, traceback: str) -> RoleError:
        kind, is_users = type(error).__name__, isinstance(error, UserError)
        return cls(role, str(error) if is_users else f"{kind}: {error}", traceback, is_users, kind)

    def __str__(self) -> str:
        return f"{self.role}: {self.message}"


class RoleDied(RuntimeError):
    """A process died: killed, crashed or out of memory."""

    def __init__(self, role: str, detail: str):
        super().__init__(role, detail)
        self.role, self.detail = role, detail

    def __str__(self) -> str:
        return f"{self.role} died: {self.detail}"
