"""The state of every prompt of one controller. Pure: no tasks, no clock, no communication.

    Undrawn ──draw──> Running ──keep──> Ready ──take──> Taken
                       ^ │ │              │
                       │ │ └──drop──> Dropped
                  draw │ └──────┬───────┘
                       │        │ return_rest (Running, Ready), expire (Ready)
                       └── Returned: runs again, before any prompt that was never drawn

    drawn = taken + dropped + pending,      pending = running + ready + returned

At the end of a step, prompts that the step does not train on are treated according to the mode:

    forget_after   deterministic: prompts after the last one of the step become Undrawn again, even if Dropped, so
                   that timing has no influence on later steps.
    return_rest    surplus=abort: running and ready prompts become Returned, so that every step trains only on samples
                   of the current policy.
    (neither)      surplus=keep or max_staleness > 0: running prompts stay Running and ready ones stay Ready for the
                   next steps, until `expire` returns those that became too old.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from gcore.types import EnvironmentFailure, RewardError, Scored, SessionLeft, WorkflowError

REWARD_ERROR, NO_SPREAD = RewardError.reason, "no_spread"
# counted against rewards.max_error_frac
FAILURES = (REWARD_ERROR, *(kind.reason for kind in (WorkflowError, SessionLeft, EnvironmentFailure)))


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """One controller since the last exchange. ProgressReport(kept=[(130, 2)], dropped=[(134, "no_spread")])"""

    kept: list[tuple[int, int]] = field(default_factory=list)  # prompt, oldest policy version in its group
    dropped: list[tuple[int, str]] = field(default_factory=list)  # prompt, reason
    withdrawn: list[int] = field(default_factory=list)  # kept before, but too old now
    idle: bool = False  # no group is in progress, and no more prompts may be drawn
    due: int = 0  # groups in progress that would be too old for the next step
    running: int = 0  # groups in progress

    def merged(self, other: ProgressReport) -> ProgressReport:
        """Of two sets of controllers, in any order."""
        return ProgressReport(
            self.kept + other.kept,
            self.dropped + other.dropped,
            self.withdrawn + other.withdrawn,
            self.idle and other.idle,
            self.due + other.due,
            self.running + other.running,
        )


@dataclass(frozen=True, slots=True)
class Undrawn:
    """Never drawn. The ledger stores nothing for these prompts."""


@dataclass(frozen=True, slots=True)
class Running:
    """Its workflow runs."""

    version: int  # of the policy when the workflow started


@dataclass(frozen=True, slots=True)
class Ready:
    """Its group passed the filter and waits for a training step."""

    group: list[Scored]

    @property
    def version(self) -> int:
        """The oldest policy version in the group."""
        return min(s.rollout.version for s in self.group)


@dataclass(frozen=True, slots=True)
class Returned:
    """Aborted, or too old to train on. It was drawn before, so the next draw does not count it again."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Its group did not pass the filter, or failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Taken:
    """A step trains on its group."""

    group: list[Scored]


PromptState = Undrawn | Running | Ready | Returned | Dropped | Taken
PENDING = (Running, Ready, Returned)
TRANSITIONS: dict[type[PromptState], tuple[type[PromptState], ...]] = {
    Undrawn: (Running,),
    Running: (Ready, Dropped, Returned, Undrawn),
    Ready: (Taken, Returned, Undrawn),
    Returned: (Running,),
    Dropped: (Undrawn,),
    Taken: (),
}


@dataclass(frozen=True, slots=True)
class Decision:
    """A group that was kept or dropped in this step."""

    rewards: list[float]
    tokens_passed: int = 0  # 0 if the group did not pass the filter
    samples_passed: int = 0


@dataclass(slots=True)
class Collected:
    """One controller's part of a step: its groups in prompt order, and the counts of its other prompts. Pending before
    the step + drawn = taken + dropped + pending after it."""

    groups: list[list[Scored]] = field(default_factory=list)  # taken
    drawn: int = 0  # prompts drawn for the first time
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    pending: int = 0  # prompts drawn, and neither taken nor dropped yet
    rewards: list[float] = field(default_factory=list)  # of all finished samples, including dropped groups
    tokens_passed: int = 0  # in groups that passed the filter, taken or not
    samples_passed: int = 0
    cause: str | None = None  # message of the first RewardError or WorkflowError that was reported in this step
    stage_s: dict[str, float] = field(default_factory=dict)  # seconds with at least one prompt in each stage
    tool_calls: Counter[str] = field(default_factory=Counter)  # that workflows have read, by result
    failed_globally: int = 0  # failed groups, over all controllers
    decided_globally: int = 0  # groups kept, dropped or failed, over all controllers
    measured: dict[str, float] = field(default_factory=dict)  # metrics, the same on all controllers


class Place(TypedDict):
    """The place of one controller in the prompt order, for a checkpoint; see `merge_places`."""

    base: int  # first prompt of the next step (deterministic mode)
    head: int  # the next prompt of the share
    pending: list[int]
    undrawn: list[int]  # below the head, never drawn
    rate: float  # acceptance rate of the last step
    drawn: int  # since the last row of metrics
    dropped: dict[str, int]


class PromptLedger:
    """The share of this controller: prompts `rank`, `rank + size`, `rank + 2 * size`, ... of the global order."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.step_start = 0  # deterministic mode: number of the first prompt of the step
        self.head = rank  # the next prompt of the share
        self.draws_left = 0  # in this step
        self.reported_running = 0  # running prompts as of the last report
        self._queue: deque[int] = deque()  # prompts to draw before `head`: Returned, or Undrawn in a checkpoint
        # pending prompts, and those finished in this step; in the order of their transitions
        self._states: dict[int, PromptState] = {}
        self._sizes: Counter[type[PromptState]] = Counter()  # prompts in each state
        self._decided: dict[int, Decision] = {}  # since the last step ended
        self._causes: dict[int, str] = {}  # messages of failures that are not yet in a summary
        self.unreported = ProgressReport()  # what has changed since the last report
        self._drawn = 0  # in this step, for the first time
        self._pending_before = 0  # when this step began
        # counts from a checkpoint that are not yet in a row of metrics
        self._restored_drawn, self._restored_dropped = 0, Counter[str]()

    # ---- transitions ----------------------------------------------------------------------------------------------

    def begin_step(self, window: int, strict: bool) -> None:
        """All controllers together may draw `window` prompts; strict: the first `window` from `step_start` on."""
        end = self.step_start + window
        self.draws_left = len(range(self.head, end, self.size)) if strict else -(-window // self.size)

    def draw(self, version: int) -> int:
        """Undrawn or Returned -> Running. `version`: of the policy. Returned prompts come first."""
        if self._queue:
            number = self._queue.popleft()
        else:
            number, self.head = self.head, self.head + self.size
        self._drawn += number not in self._states
        self.draws_left -= 1
        self._move(number, Running(version))
        return number

    def keep(self, number: int, group: list[Scored]) -> None:
        """Running -> Ready."""
        ready = Ready(group)
        self._move(number, ready)
        tokens = sum(s.rollout.length for s in group)
        self._decided[number] = Decision([s.reward for s in group], tokens, len(group))
        self.unreported.kept.append((number, ready.version))

    def drop(self, number: int, group: list[Scored], reason: str, cause: str | None = None) -> None:
        """Running -> Dropped. `cause`: the error message if the workflow failed and there is no group."""
        self._move(number, Dropped(reason))
        self._decided[number] = Decision([s.reward for s in group])
        self.unreported.dropped.append((number, reason))
        if cause is not None:
            self._causes[number] = cause

    def expire(self, oldest: int) -> None:
        """Ready -> Returned, for groups with tokens of a policy before version `oldest`."""
        expired = [number for number, ready in self._ready() if ready.version < oldest]
        if not expired:
            return
        for number in expired:
            self._move(number, Returned())
        self._queue.extend(expired)
        kept = [entry for entry in self.unreported.kept if entry[0] not in expired]
        withdrawn = [*self.unreported.withdrawn, *expired]
        self.unreported = dataclasses.replace(self.unreported, kept=kept, withdrawn=withdrawn)

    def take(self, chosen: Iterable[int]) -> None:
        """Ready -> Taken, for the `chosen` prompts of this controller."""
        chosen = set(chosen)
        for number, ready in self._ready():
            if number in chosen:
                self._move(number, Taken(ready.group))

    def forget_after(self, last: int) -> None:
        """Running, Ready or Dropped -> Undrawn, for prompts after `last`. The next step starts with `last + 1`."""
        later = [number for number in self._states if number > last]
        for number in later:
            self._move(number, Undrawn())
            self._decided.pop(number, None)
        self._drawn -= len(later)
        # In prompt order, so that the first failure does not depend on timing.
        self._causes = {number: self._causes[number] for number in sorted(self._causes) if number <= last}
        self.unreported, self.reported_running = ProgressReport(), 0
        self._start_at(last + 1)

    def return_rest(self) -> None:
        """Running or Ready -> Returned. The rewards of ready groups are not counted: their prompts run again."""
        for number, _ in self._ready():
            if number in self._decided:
                self._decided[number] = dataclasses.replace(self._decided[number], rewards=[])
        rest = sorted(number for number, state in self._states.items() if isinstance(state, Running | Ready))
        for number in rest:
            self._move(number, Returned())
        self._queue.extend(rest)
        self.unreported, self.reported_running = dataclasses.replace(self.unreported, kept=[]), 0

    def end_step(self) -> Collected:
        """The groups and counts of the step. Taken and Dropped prompts are removed from the ledger."""
        self.check()
        unreported = {number for number, _ in self.unreported.dropped}
        decided = self._decided.values()
        taken = {number: state.group for number, state in self._states.items() if isinstance(state, Taken)}
        collected = Collected(
            groups=[taken[number] for number in sorted(taken)],
            drawn=self.drawn,
            dropped=self.dropped,
            pending=self.pending,
            rewards=[reward for decision in decided for reward in decision.rewards],
            tokens_passed=sum(decision.tokens_passed for decision in decided),
            samples_passed=sum(decision.samples_passed for decision in decided),
            cause=next((cause for number, cause in self._causes.items() if number not in unreported), None),
        )
        self._states = {number: state for number, state in self._states.items() if isinstance(state, PENDING)}
        self._sizes = Counter(map(type, self._states.values()))
        self._causes = {number: cause for number, cause in self._causes.items() if number in unreported}
        self._decided, self._drawn, self._pending_before = {}, 0, self.pending
        self._restored_drawn, self._restored_dropped = 0, Counter()
        return collected

    def _move(self, number: int, to: PromptState) -> None:
        state = self._states.pop(number, Undrawn())
        assert type(to) in TRANSITIONS[type(state)], f"prompt {number}: {state} -> {to}"
        if not isinstance(state, Undrawn):
            self._sizes[type(state)] -= 1
        if not isinstance(to, Undrawn):
            self._states[number] = to
            self._sizes[type(to)] += 1

    # ---- counts ---------------------------------------------------------------------------------------------------

    @property
    def drawn(self) -> int:
        """Prompts drawn for the first time since the last step ended."""
        return self._restored_drawn + self._drawn

    @property
    def dropped(self) -> Counter[str]:
        """Prompts dropped since the last step ended, by reason."""
        here = Counter(state.reason for state in self._states.values() if isinstance(state, Dropped))
        return self._restored_dropped + here

    @property
    def pending(self) -> int:
        return sum(self._sizes[state] for state in PENDING)

    @property
    def num_running(self) -> int:
        return self._sizes[Running]

    @property
    def num_ready(self) -> int:
        return self._sizes[Ready]

    @property
    def num_dropped(self) -> int:
        """Prompts dropped since the last step ended."""
        return self._restored_dropped.total() + self._sizes[Dropped]

    @property
    def num_decided(self) -> int:
        """Groups kept or dropped since the last step ended."""
        return len(self._decided)

    @property
    def ready(self) -> dict[int, list[Scored]]:
        """The groups that wait for a step, in the order in which they were kept."""
        return {number: ready.group for number, ready in self._ready()}

    def numbers(self, *states: type[PromptState]) -> list[int]:
        """The prompts in these states, in the order of their transitions."""
        return [number for number, state in self._states.items() if isinstance(state, states)]

    def report(self, due_version: int | None) -> ProgressReport:
        """Changes since the last report. Running prompts of `due_version` or older are due; None: none is due."""
        due = 0
        if due_version is not None:
            running = (state for state in self._states.values() if isinstance(state, Running))
            due = sum(state.version <= due_version for state in running)
        idle = not self.num_running and not self.draws_left
        self.reported_running = self.num_running
        report = dataclasses.replace(self.unreported, idle=idle, due=due, running=self.num_running)
        self.unreported = ProgressReport()
        return report

    def check(self) -> None:
        """Check that every drawn prompt is counted exactly once. Called at the end of each step."""
        assert self._sizes == Counter(map(type, self._states.values()))
        finished = self._sizes[Taken] + self._sizes[Dropped]
        assert self._pending_before + self._drawn == finished + self.pending, "drawn != taken + dropped + pending"
        queued = [number for number in self._queue if number in self._states]
        assert sorted(queued) == sorted(self.numbers(Returned)) and len(set(self._queue)) == len(self._queue)

    def _ready(self) -> list[tuple[int, Ready]]:
        return [(number, state) for number, state in self._states.items() if isinstance(state, Ready)]

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def place(self, rate: float) -> Place:
        """The place of this controller in the prompt order. `merge_places` makes one state from all places. Ready
        groups are saved separately."""
        return {
            "base": self.step_start,
            "head": self.head,
            "pending": [*(number for number in self._queue if number in self._states), *self.numbers(Running)],
            "undrawn": sorted(number for number in self._queue if number not in self._states),
            "rate": rate,
            "drawn": self.drawn,
            "dropped": dict(self.dropped),
        }

    def restore(self, state: Mapping[str, Any], groups: Sequence[list[Scored]]) -> None:
        """Undrawn -> Returned or Ready: take this controller's part of a checkpoint, which any number of controllers
        can have made.

        `state`: from `merge_places`. `groups`: the ready groups of all controllers, in prompt order.
        """
        mine = slice(self.rank, None, self.size)
        pending = state.get("pending", [])[mine]
        self._queue = deque([*pending, *state.get("undrawn", [])[mine]])
        ready = {group[0].rollout.prompt.id: Ready(group) for group in groups[mine]}
        self._states = {**{number: Returned() for number in pending}, **ready}
        self._sizes = Counter(map(type, self._states.values()))
        self._pending_before = self.pending
        if self.rank == 0:  # counts of all controllers between the last row of metrics and the checkpoint
            self._restored_drawn = state.get("drawn", 0)
            self._restored_dropped = Counter(state.get("dropped", {}))
        self._start_at(state["cursor"])

    def _start_at(self, number: int) -> None:
        """Continue with the first prompt of the share that is not before `number`."""
        self.step_start = number
        self.head = number + (self.rank - number) % self.size


def merge_places(places: Sequence[Place], strict: bool) -> dict[str, Any]:
    """One state, which any number of controllers can restore.

    Prompts from `cursor` on are undrawn. Before `cursor`, `pending` prompts were drawn and must run again; `undrawn`
    prompts belong to controllers that drew fewer prompts than others; all other prompts are finished or ready.
    """
    if strict:
        return {"cursor": places[0]["base"], "rate": places[0]["rate"]}
    top = max(place["head"] for place in places)
    behind = [number for place in places for number in range(place["head"], top, len(places))]
    return {
        "cursor": top,
        "rate": places[0]["rate"],
        "pending": sorted(number for place in places for number in place["pending"]),
        "undrawn": sorted([*behind, *(number for place in places for number in place["undrawn"])]),
        "drawn": sum(place["drawn"] for place in places),
        "dropped": dict(sum((Counter(place["dropped"]) for place in places), Counter[str]())),
    }
