"""The interfaces between processes, and the small values that they exchange.

driver ──start──> Runtime ──> Controller ──call──> Engine, Scorer, Trainer  (Handle: a role behind RPC)
                                  └──all_gather──> other controllers             (ControllerGroup: metadata only)

A *role* is a kind of process: engine, judge, scorer, trainer, critic, controller. A *replica* is one process of a role.
Every call between processes is async, and every role has its own event loop. clients.py has a typed client per role.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from gcore.types import (
    Completion,
    Floats,
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
    Written,
)

ExchangedColumn = Literal["values", "penalties"]  # per step, between trainer ranks and critic ranks
Weights = Mapping[str, Any]  # name (Hugging Face; PEFT for adapters) -> array, or packed: see weights/bucket.py
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


# ---- what a caller of a role in another process gets if the role fails


@dataclass(eq=False, repr=False)
class RoleError(RuntimeError):
    """A role raised an exception."""

    role: str
    message: str
    traceback: str  # the first one
    user_error: bool = False  # the user can fix it
    kind: str = ""  # name of the exception's class, for callers that handle it

    @classmethod
    def of(cls, role: str, error: Exception, traceback: str) -> RoleError:
        kind, is_users = type(error).__name__, isinstance(error, UserError)
        return cls(role, str(error) if is_users else f"{kind}: {error}", traceback, is_users, kind)

    def __str__(self) -> str:
        return f"{self.role}: {self.message}"


@dataclass(eq=False, repr=False)
class RoleDied(RuntimeError):
    """A process died: killed, crashed or out of memory."""

    role: str
    detail: str
    observed: bool = False  # by the runtime itself; other reports of deaths may be consequences of it

    def __str__(self) -> str:
        return f"{self.role} died: {self.detail}"


class BroadcastError(RuntimeError):
    """A member of the group of a broadcast of weights died or is late."""


# ---- values


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """How a trainer publishes its weights. WeightPlan(num_buckets=15, every_rank=False)"""

    num_buckets: int  # more than one, so that no process holds a second copy of all weights
    every_rank: bool  # each rank publishes, to the engines on its GPU; else only rank 0
    critic_buckets: int = 1  # number of buckets if the receivers are critic ranks


@dataclass(frozen=True, slots=True)
class Receivers:
    """The engines that a weight update goes to. Receivers(("engine-0", "engine-1"), restarted=False)"""

    names: tuple[str, ...]
    restarted: bool = False  # some of them are new processes since the last update, or it failed
    are_critics: bool = False  # ranks instead of engines: they get float32, through host memory


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
    ended: tuple[tuple[int, ...], ...] = ()  # calls that ended since the last report: lengths of their requests
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
    padded: bool = True  # micro-batches are computed as rows with a mask; False: sample by sample, without padding
    sharded: bool = False  # ranks share weights, so they wait for each other in every micro-batch
    device: str = ""  # name of its GPU
    shares: bool = False  # training.share_prefixes: neighbours in a row share their prefixes


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
    added: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            added[name] = added[name] + metric if name in added else metric
    return added


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Of the mini-batches of an update. UpdateStats(updates=2, grad_norm=0.8, lr=2e-6, metrics={"actor/loss": ...})"""

    updates: int = 0  # optimizer steps, including skipped ones
    skipped: int = 0  # gradients were NaN or infinite
    grad_norm: float = 0.0  # sum over the updates; the same on every rank, like `updates`, `skipped` and `lr`
    lr: float = 0.0  # sum over the updates
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # of this rank's samples
    wall_s: float = field(default=0.0, compare=False)  # seconds of the updates, with waiting for other ranks
    busy_s: float = field(default=0.0, compare=False)  # without waiting; 0: unknown, as on GPUs: kernels wait there
    bad_in_a_row: int = 0  # skipped ones at the end, with those of earlier steps
    mini_batches: int = 0  # that were computed, by the policy and a critic beside it

    def __add__(self, other: UpdateStats) -> UpdateStats:
        return UpdateStats(
            self.updates + other.updates,
            self.skipped + other.skipped,
            self.grad_norm + other.grad_norm,
            self.lr + other.lr,
            add_metrics(self.metrics, other.metrics),
            self.wall_s + other.wall_s,
            self.busy_s + other.busy_s,
            other.bad_in_a_row if other.updates else self.bad_in_a_row,
            self.mini_batches + other.mini_batches,
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
    unreachable: Mapping[str, str] = field(default_factory=dict)  # replica -> "dead" or "suspect", for this controller


class Engine(Protocol):
    """Generates completions. Implementations: generation/embedded.py, vllm.py, sglang.py, emulate/engine.py. Contract:
    tests/contract/test_engine.py."""

    async def generate(self, requests: Sequence[Request], ticket: str = "") -> list[Completion]:
        """Completions in the order of the requests. Each one depends only on its request and the weights."""

    async def abort(self, ticket: str) -> None:
        """Abort the requests of this ticket. Their `generate` returns at once with the steps so far and
        finish="abort". An unknown ticket is ignored."""

    async def load_weights(self, version: int, weights: Weights, bucket: tuple[int, int] = (0, 1)) -> int:
        """Replace the weights between two decoding steps; later tokens have this `version`.

        `bucket`: (index, count). Buckets come in order; the engine decodes nothing between the first and the last.
        Buckets that weights/bucket.py packed are unpacked and their checksums verified. Returns the version that the
        engine serves now.
        """

    async def sleep(self, level: int) -> MemoryChange:
        """Free GPU memory; refused while requests are in progress. Level 1 keeps the weights in host memory. Level 2
        drops them: load them again after `wake`. Requests queue while the engine sleeps."""

    async def wake(self, *tags: str) -> MemoryChange:
        """Allocate the memory again: all, or only some of the tags "weights" and "kv_cache"."""

    async def reset(self) -> None:
        """New controllers take over: abort all requests, wake, and forget an incomplete weight update. The engine then
        waits for whole weights before it decodes."""

    async def stats(self) -> EngineStats: ...


class Scorer(Protocol):
    """A scalar reward model. Implementation: rewarding/scalar.py."""

    async def score(self, texts_tokens: Sequence[Ints]) -> list[float]:
        """One number per text, in the same order."""

    async def stats(self) -> ScorerStats: ...


class ReplicaPool(Protocol):
    """A controller's view of the replicas of one role. Implementation: generation/pool.py."""

    def mark_dead(self, name: str) -> None:
        """Send nothing to the replica until `mark_alive`. Both ignore names that are not in the pool."""

    def mark_alive(self, name: str) -> None: ...

    async def check(self, timeout_s: float) -> dict[str, bool]:
        """Poll every replica. Returns the replicas whose state changed, and whether each one answers now."""

    def unreachable(self) -> dict[str, str]:
        """Replicas whose last call did not arrive ("dead"), or that do not answer health checks ("suspect")."""


class Rewarder(Protocol):
    """Scores the siblings of one prompt together. Implementation: rewarding/rewarder.py."""

    pools: Sequence[ReplicaPool]  # of the judges and reward models that it calls

    def check(self, columns: Collection[str]) -> None: ...  # UserError if a reward needs others than these

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]:
        """The weighted sum of all rewards of the recipe. Raises RewardError when a reward could not be computed."""

    async def score(self, name: str, group: Sequence[Rollout]) -> list[float | None]:
        """One reward of the recipe, unweighted."""

    async def ask(self, judge: str, messages: Sequence[Message], key: tuple[object, ...], **params: Any) -> str:
        """The answer of a generative judge. `key` determines the sampling noise."""

    def take_counts(self) -> dict[str, int]:
        """Events since the last call: retries, timeouts, verdicts that could not be parsed, ..."""

    def close(self) -> None: ...


class Trainer(Protocol):
    """A rank that trains the policy, or a critic, or both. Except for `push`, `write` and `abandon`, all ranks are
    called, because they meet in collectives. Implementations: training/rank.py, emulate/trainer.py."""

    async def info(self) -> TrainerInfo: ...

    async def end_warm_start(self) -> None:
        """Start reinforcement learning from the current weights: they are the KL reference; the optimizer is reset."""

    async def push(self, source: int, samples: Sequence[Sample]) -> None:
        """Store the samples that controller `source` has for this rank."""

    async def compute_logprobs(self, batch: TrainBatch) -> Mapping[Key, float]:
        """Compute logprobs of the policy before the update and of the reference model, and values of the critic, as far
        as the algorithm needs them. Returns the KL of each sample of this rank, if siblings are compared by reward -
        KL; else an empty mapping."""

    async def column(self, name: ExchangedColumn, keys: Sequence[Key]) -> Mapping[Key, Floats]: ...  # after `prepare`

    async def take_column(self, name: ExchangedColumn, values: Mapping[Key, Floats]) -> None: ...  # before `update`

    async def update(self, batch: TrainBatch) -> UpdateStats:
        """One optimizer step per mini-batch. The batch has the advantages of its samples."""

    async def evaluate(self, batch: TrainBatch) -> Mapping[str, Metric]: ...  # of answers to train on, no update

    async def weight_plan(self) -> WeightPlan:
        """The number of buckets, and which ranks publish. It does not change during the run."""

    async def weight_bucket(self, index: int, receivers: Receivers) -> Weights:
        """Bucket `index` of the full weights of the policy, packed, if this rank publishes; else empty."""

    async def load_policy(self, weights: Weights) -> None:
        """On a critic rank, a bucket of the policy's weights. Before `begin`, if the critic starts as a copy of it."""

    async def snapshot(self) -> int:
        """Start to copy the state to host memory; returns its bytes. Calls that would change it wait for the copy."""

    async def write(self, folder: str) -> Written: ...  # of the snapshot, to files; other calls go on

    async def abandon(self) -> None: ...  # drops the snapshot; a `write` that runs is stopped

    async def load(self, folder: str, after_warm_start: bool = True) -> None:
        """Bring the rank to what `write` wrote. `after_warm_start`: False during it, see `end_warm_start`."""


class Controller(Protocol):
    """Runs the training loop on its share of the prompts; the driver calls it. Implementation: controller/loop.py."""

    async def run(self) -> None: ...  # `gcore train`: until the end of the run

    async def evaluate(self) -> dict[str, Any]: ...  # `gcore eval`: the metrics

    async def status(self) -> ControllerStatus: ...

    async def mark_dead(self, name: str) -> None: ...  # an engine, judge or scorer died

    async def begin_restart(self, name: str) -> None: ...  # only on controller 0; returns when it may be started

    async def restore(self, name: str) -> bool: ...  # only on controller 0, after the restart. False: it died again

    async def mark_alive(self, name: str) -> None: ...

    async def finished_step(self) -> dict[str, Any]:
        """Only on controller 0, with run.on_step. Waits for the metrics of the next step."""

    async def go_on(self, stop: bool) -> None: ...  # after `finished_step`. `stop`: the run ends


class ControllerGroup(Protocol):
    """Communication among the controllers. A timeout reports the name of the collective and the missing ranks."""

    rank: int
    size: int

    async def all_gather(self, name: str, value: Any) -> list[Any]:
        """The values of all members, by rank."""

    async def reduce(self, name: str, value: T, merge: Callable[[T, T], T]) -> T:
        """One value, merged from those of all members, on every member; cheap for any number of members."""

    async def barrier(self, name: str) -> None: ...  # returns when all members have called it

    def subgroup(self) -> ControllerGroup:
        """An independent group of the same members. All members must create their subgroups in the same order."""


class Ref(Protocol[T_co]):
    """A value that stays in the process that made it. Passed to a Handle, the callee receives the value itself."""

    def __await__(self) -> Generator[Any, None, T_co]: ...


class Handle(Protocol):
    """A role in another process (or, in the local runtime, in this one)."""

    name: str  # "engine-0"

    def submit(self, method: str, *args: Any) -> Ref[Any]:
        """Start a call. The result stays in the callee's process until it is awaited or passed to another call."""

    async def call(self, method: str, *args: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How the members of a group find each other. The runtime passes it to a role's factory as last argument."""

    rank: int
    size: int
    address: str | None  # host:port of rank 0; None when all members share one process
    hub: Any = None  # object that they share in that case
    listener: Any = None  # rank 0: the socket that listens on `address`; it is open since the port was chosen
    secret: bytes = b""  # of the group: members prove that they have it


class Context(Protocol):
    """The methods that a workflow can call for its prompt. Implementation: workflows/context.py."""

    async def generate(self, prompt: Prompt, n: int | None = None, **params: Any) -> list[Rollout]:
        """`n` more responses to the prompt, siblings of the earlier ones."""

    def serve(self, prompt: Prompt, n: int | None = None) -> Any: ...  # sessions by HTTP: workflows/endpoint.py

    def sandbox(self, folder: str | None = None) -> Any: ...  # a place for programs: sandbox/base.py

    async def given(self, prompt: Prompt, answers: Sequence[str | Sequence[Message]]) -> list[Rollout]: ...

    async def proceed(self, rollout: Rollout, feedback: str | Sequence[Message] = "", **params: Any) -> Rollout:
        """Append the feedback of a tool or a judge (masked from the loss), then let the policy continue."""

    def read(self, rollout: Rollout, tools: Sequence[Mapping[str, Any]] | None = ()) -> Any:
        """The last turn as thought, content and tool calls: an AssistantTurn of workflows/tool_formats.py."""

    async def branch(self, rollout: Rollout, n: int, **params: Any) -> list[Rollout]:
        """`n` different continuations of the same rollout, each a new sibling."""

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]:
        """The weighted sum of all rewards of the recipe."""

    async def score(self, name: str, group: Sequence[Rollout]) -> list[float | None]: ...  # by one reward, unweighted

    async def ask(self, judge: str, messages: Sequence[Message], **params: Any) -> str: ...  # a judge of the recipe
