"""The rollout phase of one controller: draw prompts, run their workflows all at once, agree with the others on the end.

    draw ──> workflow (generate, reward) ──> filter ──keep──> ready ──take──> the step's groups
      ^                                        └─drop: counted, and another prompt is drawn here, now
      └── first in line: prompts whose group was aborted or grew too old

No prompt waits for another. Controllers exchange prompt numbers at ticks, off the event loop (step_ledger.py), and stop
together when the *global* target is met. With `sampling.max_staleness` above 0 the collector goes on while the trainer
works: the next steps' groups are under way already.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gcore.config.tree import Sampling
from gcore.controller.attempt import reason_of, run_workflow
from gcore.controller.step_ledger import FAILURES, NO_SPREAD, ProgressReport, StepLedger
from gcore.controller.workflow import SharedContext, Workflow
from gcore.placement.monitor import RolloutProgress
from gcore.prompts.source import PromptSource
from gcore.protocols import Group
from gcore.types import Prompt, RewardError, Scored, UserError, WorkflowError

TICK_S = (0.01, 0.05)  # least and most time between two ticks
PRIOR = 0.25  # the last step's acceptance rate counts as much as so many times a step's groups
Filter = Callable[[list[Scored]], tuple[bool, str]]


@dataclass(slots=True)
class Collected:
    """What one controller brings to a step: its groups in prompt order, and what became of its other prompts."""

    groups: list[list[Scored]] = field(default_factory=list)
    drawn: int = 0  # prompts drawn for the first time
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    pending: int = 0  # drawn, and neither trained on nor dropped so far
    rewards: list[float] = field(default_factory=list)  # of all samples it decided on, also those it dropped
    cause: str | None = None  # of the first failure here: no reward, or the workflow raised
    stage_s: dict[str, float] = field(default_factory=dict)  # in which at least one prompt was in each stage
    passed: tuple[int, int] = (0, 0)  # tokens and samples of the groups that passed the filter
    failed_everywhere: int = 0  # groups that failed, and groups decided on, over all controllers
    decided_everywhere: int = 0


def no_filter(group: list[Scored]) -> tuple[bool, str]:
    return True, ""


def spread(group: list[Scored]) -> tuple[bool, str]:
    """Equal rewards have no gradient; equality is exact."""
    return any(s.reward != group[0].reward for s in group), NO_SPREAD


async def answer_all(
    workflow: Workflow, shared: SharedContext, prompts: Sequence[Prompt], report: Callable[[str], None]
) -> Collected:
    """Every prompt once, as evaluations do."""
    collected, results = Collected(drawn=len(prompts)), dict[int, list[Scored]]()

    async def one(prompt: Prompt) -> None:
        try:
            results[prompt.id] = await run_workflow(workflow, shared, prompt)
        except (RewardError, WorkflowError) as error:
            collected.dropped[reason_of(error)] += 1
            collected.cause = collected.cause or str(error)
        report(f"{len(results) + collected.dropped.total()}/{len(prompts)} prompts")

    try:
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(one(prompt))
    except* Exception as errors:
        raise errors.exceptions[0] from None
    collected.stage_s = shared.clock.take()
    collected.groups = [results[prompt.id] for prompt in prompts if prompt.id in results]
    return collected


class Collector:
    """Lives as long as the run. `version` is the policy the engines serve; the loop sets it."""

    def __init__(
        self,
        workflow: Workflow,
        shared: SharedContext,
        group: Group,
        sampling: Sampling,
        keep: Filter,
        report: Callable[[str], None],
    ) -> None:
        self._workflow, self._shared, self._sampling = workflow, shared, sampling
        self._filter, self._report = keep, report
        self._rank, self._size = group.rank, group.size
        self._group = group.subgroup()
        self.source: PromptSource | None = None
        self.version = 0
        self.board = StepLedger(sampling.prompts_per_step, sampling.strict)
        self.rate = 1.0  # share of groups that pass the filter, lately
        self.base = 0  # strict: where the next step's prompts begin
        self._head = group.rank  # the next prompt of this controller's share: every N-th of the global order
        self._first: deque[int] = deque()  # prompts that go first
        self._fresh: set[int] = set()  # those among them that were never drawn
        self.ready: dict[int, list[Scored]] = {}  # groups that passed, waiting for their step
        self._running: dict[int, tuple[asyncio.Task[None], int]] = {}  # prompt -> task, version at its start
        self._kept: list[tuple[int, int]] = []  # news
        self._dropped: list[tuple[int, str]] = []
        self._withdrawn: list[int] = []
        self._causes: dict[int, str] = {}
        self._rewards: dict[int, list[float]] = {}
        self._allowed, self._drawn, self._settled = 0, 0, Counter[str]()
        self._goal = self._told = 0  # groups to have under way; those that the others know of
        self._lengths: dict[int, tuple[int, int]] = {}  # prompt -> tokens and samples of the groups that passed
        self._changed, self._broken = asyncio.Event(), asyncio.Event()
        self._failure: BaseException | None = None

    # ---- a step ---------------------------------------------------------------------------------------------------

    async def step(self, step: int) -> Collected:
        """The groups of one training step: this controller's share of them."""
        self._begin(step)
        chosen = await self._agree(step)
        collected = self._take(step, chosen)
        if len(chosen) < self.board.target and not self._sampling.fixed and self._sampling.on_exhausted == "stop":
            raise UserError(
                f"step {step}: {len(chosen)} of {self.board.target} groups from {self._sampling.window} prompts "
                f"({self._why_dropped()}); raise sampling.max_draws, choose prompts of another difficulty, or set "
                "sampling.on_exhausted=train"
            )
        return collected

    def _begin(self, step: int) -> None:
        sampling = self._sampling
        if self.board.strict:
            self._head = self.base + (self._rank - self.base) % self._size
            self._allowed = len(range(self._head, self.base + sampling.window, self._size))
        else:
            self._allowed = -(-sampling.window // self._size)
        self.board.begin(self.base, sampling.window)
        oldest = step - 1 - sampling.staleness
        for cursor, group in list(self.ready.items()):
            if min(s.rollout.version for s in group) < oldest:
                del self.ready[cursor]
                self._kept = [entry for entry in self._kept if entry[0] != cursor]
                self._withdrawn.append(cursor)
                self._first.append(cursor)
        self._aim(sampling.prompts_per_step * (1 + sampling.max_staleness))

    async def _agree(self, step: int) -> list[int]:
        last = 0.0
        while True:
            await self._until_worth_telling(last)
            tick = asyncio.ensure_future(
                self._group.all_gather(f"progress of step {step}", self._progress_report(step))
            )
            broken = asyncio.ensure_future(self._broken.wait())
            await asyncio.wait({tick, broken}, return_when=asyncio.FIRST_COMPLETED)
            broken.cancel()
            self._raise_failure()
            last = _now()
            self.board.add(tick.result())
            chosen = self.board.chosen()
            if not self._sampling.fixed:
                self._report(f"{len(self.board.kept)}/{self.board.target} groups, {len(self.board.dropped)} dropped")
            if chosen is not None:
                return chosen
            self._aim(self._sampling.prompts_per_step * (1 + self._sampling.max_staleness))

    async def _until_worth_telling(self, last: float) -> None:
        """Fixed steps have one thing to tell: done. Others speak when something happened, or so that others can."""
        self._raise_failure()
        if self._sampling.fixed:
            while self._running:
                self._changed.clear()
                await self._changed.wait()
                self._raise_failure()
            return
        least, most = TICK_S
        await asyncio.sleep(max(0.0, last + least - _now()))
        enough = len(self.board.kept) >= self.board.target  # left over from the steps before
        if not (enough or self._kept or self._dropped):
            self._changed.clear()
            try:
                async with asyncio.timeout(most):
                    await self._changed.wait()
            except TimeoutError:
                pass
        self._raise_failure()

    def _progress_report(self, step: int) -> ProgressReport:
        due = 0
        if self._sampling.staleness:  # else what is under way at the end is aborted
            due = sum(version <= step - 1 - self._sampling.staleness for _, version in self._running.values())
        idle = not self._running and not self._allowed
        self._told = len(self._running)
        news = ProgressReport(self._kept, self._dropped, self._withdrawn, idle, due, self._told)
        self._kept, self._dropped, self._withdrawn = [], [], []
        return news

    def _take(self, step: int, chosen: list[int]) -> Collected:
        board, sampling = self.board, self._sampling
        collected = Collected(stage_s=self._shared.clock.take())
        collected.decided_everywhere = max(board.seen, len(chosen)) + len(board.dropped)  # some waited from before
        collected.failed_everywhere = sum(reason in FAILURES for reason in board.dropped.values())
        mine = sorted(cursor for cursor in chosen if cursor in self.ready)
        collected.groups = [self.ready.pop(cursor) for cursor in mine]
        self.rate = self._rate_now()
        if board.strict:  # what came after the last prompt of the step never was
            last = chosen[-1] if len(chosen) == board.target else self.base + sampling.window - 1
            own = range(self.base + (self._rank - self.base) % self._size, last + 1, self._size)
            decided = {cursor: reason for cursor, reason in board.dropped.items() if cursor <= last}
            self._settled = Counter(reason for cursor, reason in decided.items() if cursor in own)
            self._drawn = len(own)
            collected.decided_everywhere = len(decided) + len(chosen)
            collected.failed_everywhere = sum(reason in FAILURES for reason in decided.values())
            causes = [self._causes[cursor] for cursor in sorted(self._causes) if cursor <= last]
            self._rewards = {cursor: found for cursor, found in self._rewards.items() if cursor <= last}
            self._lengths = {cursor: found for cursor, found in self._lengths.items() if cursor <= last}
            self._forget_the_rest()
            self.base = last + 1
        else:
            causes = [cause for cursor, cause in self._causes.items() if cursor in board.dropped]
            for cursor in chosen:
                board.kept.pop(cursor)
            if not sampling.staleness:
                self._return_the_rest()
            self._aim(sampling.prompts_per_step * sampling.max_staleness)
        collected.cause = causes[0] if causes else None
        collected.rewards = [reward for found in self._rewards.values() for reward in found]
        collected.passed = sum(t for t, _ in self._lengths.values()), sum(n for _, n in self._lengths.values())
        collected.drawn, collected.dropped = self._drawn, self._settled
        collected.pending = len(self.ready) + len(self._running) + sum(c not in self._fresh for c in self._first)
        self._causes = {cursor: self._causes[cursor] for cursor, _ in self._dropped if cursor in self._causes}  # untold
        self._drawn, self._settled, self._rewards, self._lengths = 0, Counter(), {}, {}
        return collected

    def _forget_the_rest(self) -> None:
        self._cancel()
        self.ready.clear()
        self.board.kept.clear()
        self._kept, self._dropped = [], []

    def _return_the_rest(self) -> None:
        """Aborted and surplus groups: their prompts are first in line for the next step."""
        for cursor in self.ready:
            self._rewards.pop(cursor, None)
        self._first.extend(sorted([*self._cancel(), *self.ready]))
        self.ready.clear()
        self.board.kept.clear()
        self._kept = []

    def _cancel(self) -> list[int]:
        running, self._running = self._running, {}
        self._told = self.board.running = 0  # every controller does the same
        for task, _ in running.values():
            task.cancel()
        return list(running)

    def close(self) -> None:
        self._cancel()

    def progress(self) -> RolloutProgress:
        """For placement: this controller's share of the rollout."""
        target, decided = self.board.target / self._size, len(self._rewards)
        return RolloutProgress(target, len(self.ready), decided, len(self._running), self._rate_now())

    # ---- prompts --------------------------------------------------------------------------------------------------

    def _aim(self, horizon: int) -> None:
        """Start this controller's share of what is missing until `horizon` groups are there, over all controllers."""
        extra = self._sampling.extra_groups if horizon else 0.0
        self._goal = self._told + self.board.missing(horizon + extra, self._least_rate(), self._rank, self._size)
        self._fill()

    def _fill(self) -> None:
        while self._allowed and self._wants():
            cursor = self._draw()
            self._allowed -= 1
            task = asyncio.ensure_future(self._one(cursor))
            self._running[cursor] = (task, self.version)

    def _wants(self) -> bool:
        if self._sampling.fixed:
            return True
        if self.board.strict and self._head <= self.board.frontier():
            return True  # others wait for this one: it stands before groups that are done
        untold = len(self._kept) / self._least_rate()  # one that passed makes others unnecessary; one dropped does not
        return len(self._running) + untold < self._goal

    def _least_rate(self) -> float:
        return max(self._rate_now(), 1 / self._sampling.max_oversampling)

    def _rate_now(self) -> float:
        """Share of groups that pass: the last step's, and more and more what this step has seen."""
        prior, board = PRIOR * self.board.target, self.board
        return (prior * self.rate + board.seen) / (prior + board.seen + len(board.dropped))

    def _draw(self) -> int:
        if self._first:
            cursor = self._first.popleft()
            if cursor in self._fresh:
                self._fresh.discard(cursor)
                self._drawn += 1
            return cursor
        cursor = self._head
        self._head += self._size
        self._drawn += 1
        return cursor

    async def _one(self, cursor: int) -> None:
        group, failure = list[Scored](), None
        try:
            assert self.source is not None
            group = await run_workflow(self._workflow, self._shared, self.source.at(cursor))
            keep, reason = self._filter(group)
        except Exception as error:
            keep, reason, failure = False, reason_of(error), error
        if self._running.get(cursor, (None,))[0] is not asyncio.current_task():
            return  # it was aborted, and the workflow would not hear of it
        if isinstance(failure, RewardError | WorkflowError):
            self._causes[cursor] = str(failure)
        elif failure is not None:
            self._failure = self._failure or failure
            self._broken.set()
        self._rewards[cursor] = [s.reward for s in group]
        if keep:
            self._lengths[cursor] = sum(len(s.rollout.tokens_S) for s in group), len(group)
            self.ready[cursor] = group
            self._kept.append((cursor, min(s.rollout.version for s in group)))
        else:
            self._dropped.append((cursor, reason))
            self._settled[reason] += 1
        del self._running[cursor]
        if self._sampling.fixed:
            done = len(self.ready) + self._settled.total()
            self._report(f"{done}/{done + len(self._running)} prompts")
        self._fill()
        self._changed.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _why_dropped(self) -> str:
        counts = Counter(self.board.dropped.values())
        return ", ".join(f"{reason} {count}" for reason, count in counts.most_common()) or "none was decided"

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def place(self) -> dict[str, Any]:
        """Where this controller stands among the prompts; `merge_places` makes one of all."""
        stale = [c for c in self._first if c not in self._fresh]
        return {
            "base": self.base,
            "head": self._head,
            "pending": [*stale, *self._running] if not self.board.strict else [],
            "fresh": sorted(self._fresh),
            "rate": self.rate,
            "drawn": self._drawn,  # since the last step's row of metrics
            "dropped": dict(self._settled),
        }

    def restore(self, state: dict[str, Any], pool: Sequence[list[Scored]]) -> None:
        """Take this controller's part of a checkpoint made by any number of them."""
        self.base, self.rate = state["cursor"], state.get("rate", 1.0)
        self._head = self.base + (self._rank - self.base) % self._size
        pending, undrawn = state.get("pending", []), state.get("undrawn", [])
        self._first = deque([*pending[self._rank :: self._size], *undrawn[self._rank :: self._size]])
        self._fresh = set(undrawn[self._rank :: self._size])
        if self._rank == 0:  # what happened between the last row of metrics and the checkpoint
            self._drawn, self._settled = state.get("drawn", 0), Counter(state.get("dropped", {}))
        groups = sorted(pool, key=lambda group: group[0].rollout.prompt.id)
        self.board.kept = {g[0].rollout.prompt.id: min(s.rollout.version for s in g) for g in groups}
        self.ready = {g[0].rollout.prompt.id: g for g in groups[self._rank :: self._size]}
        if self.board.strict and (self._first or groups):
            raise UserError(
                "the checkpoint holds groups kept for later steps; resume with the sampling.surplus and "
                "sampling.max_staleness it was made with, or sampling.deterministic=false"
            )


def _now() -> float:
    return asyncio.get_running_loop().time()


def merge_places(places: Sequence[dict[str, Any]], strict: bool) -> dict[str, Any]:
    """One state for any number of controllers: prompts from `cursor` on are untouched, these below it are not done.

    `pending` were drawn before; `undrawn` are what the slower controllers' shares had not come to yet.
    """
    if strict:
        return {"cursor": places[0]["base"], "rate": places[0]["rate"]}
    top = max(place["head"] for place in places)
    behind = [cursor for place in places for cursor in range(place["head"], top, len(places))]
    return {
        "cursor": top,
        "rate": places[0]["rate"],
        "pending": sorted(cursor for place in places for cursor in place["pending"]),
        "undrawn": sorted([*behind, *(cursor for place in places for cursor in place["fresh"])]),
        "drawn": sum(place["drawn"] for place in places),
        "dropped": dict(sum((Counter(place["dropped"]) for place in places), Counter[str]())),
    }
