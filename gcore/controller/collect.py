"""The rollout phase of one controller: makes the groups of a training step.

    draw a prompt ──run its workflow──> group ──filter──> kept, or dropped and replaced by another prompt
    all controllers: exchange progress until enough groups are kept ──> the same chosen prompts on every controller

    prompt_ledger.py   the prompts of this controller and the state of each one: draw, keep, drop, take, ...
    step_ledger.py     the progress of all controllers in this step, and which prompts the step trains on
    this module        the tasks that run the workflows, and the exchange of progress

Workflows of many prompts run at the same time and do not wait for each other. Controllers exchange prompt numbers 20 to
100 times per second and stop together when the *global* target is met. With `sampling.max_staleness` above 0 the
workflows of the next steps continue while the trainer works.

Terms of config/sampling.py: `fixed` steps train on the next `prompts_per_step` prompts, without a filter; `strict`
(deterministic) steps take the first groups that pass in prompt order; `window` is the maximum number of prompts of a
step; `staleness` is the maximum age of samples, in policy versions.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gcore.config.sampling import Sampling, acceptance_rate
from gcore.controller.prompt_ledger import Place, PromptLedger, merge_places
from gcore.controller.run_workflow import reason_of, run_workflow
from gcore.controller.step_ledger import FAILURES, NO_SPREAD, ProgressReport, StepLedger
from gcore.placement.monitor import RolloutProgress
from gcore.prompts.curriculum import CurriculumOrder, Passed
from gcore.prompts.source import PromptSource
from gcore.protocols import Group
from gcore.types import Prompt, RewardError, Scored, UserError, WorkflowError
from gcore.workflows.context import SharedContext, Workflow

__all__ = ["Collected", "Collector", "Filter", "answer_all", "merge_places", "no_filter", "spread"]

EXCHANGE_INTERVAL_S = (0.01, 0.05)  # shortest and longest time between two exchanges
Filter = Callable[[list[Scored]], tuple[bool, str]]


@dataclass(slots=True)
class Collected:
    """One controller's part of a step: its groups in prompt order, and the counts of its other prompts."""

    groups: list[list[Scored]] = field(default_factory=list)
    drawn: int = 0  # prompts drawn for the first time
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    pending: int = 0  # prompts drawn, and neither trained on nor dropped yet
    rewards: list[float] = field(default_factory=list)  # of all finished samples, including dropped groups
    cause: str | None = None  # message of the first RewardError or WorkflowError on this controller
    stage_s: dict[str, float] = field(default_factory=dict)  # seconds with at least one prompt in each stage
    tokens_passed: int = 0  # in groups that passed the filter, trained on or not
    samples_passed: int = 0
    failed_globally: int = 0  # failed groups, over all controllers
    decided_globally: int = 0  # groups kept, dropped or failed, over all controllers
    measured: dict[str, float] = field(default_factory=dict)  # metrics, the same on all controllers


def no_filter(group: list[Scored]) -> tuple[bool, str]:
    return True, ""


def spread(group: list[Scored]) -> tuple[bool, str]:
    """Drop groups whose rewards are all exactly equal: they have no gradient."""
    return any(s.reward != group[0].reward for s in group), NO_SPREAD


async def answer_all(
    workflow: Workflow, shared: SharedContext, prompts: Sequence[Prompt], report: Callable[[str], None]
) -> Collected:
    """Run every prompt exactly once, without filter and replacement: for evaluations."""
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
    """One per controller, for the whole run. `version`: the policy version that the engines serve now."""

    def __init__(
        self,
        workflow: Workflow,
        shared: SharedContext,
        group: Group,
        sampling: Sampling,
        keep: Filter,
        report: Callable[[str], None],
        source: PromptSource,
        version: Callable[[], int],
        curriculum: CurriculumOrder | None = None,
    ) -> None:
        self._workflow, self._shared, self._sampling = workflow, shared, sampling
        self._filter, self._report, self._group = keep, report, group.subgroup()
        self._source, self._version, self._curriculum = source, version, curriculum
        self._passed: dict[int, Passed] = {}  # groups of this step, by prompt number; with a curriculum
        self.rate = 1.0  # fraction of groups that pass the filter, as of the last step
        self.prompts = PromptLedger(group.rank, group.size)
        self.step_ledger = StepLedger(sampling.prompts_per_step, sampling.strict)
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of the running prompts
        self._target_running = 0  # groups that this controller should have in progress
        self._changed, self._failed = asyncio.Event(), asyncio.Event()
        self._failure: BaseException | None = None  # ends the run; other failures only drop their group

    @property
    def ready(self) -> dict[int, list[Scored]]:
        """Groups that are ready for a later step, by prompt number."""
        return self.prompts.ready

    # ---- a step ---------------------------------------------------------------------------------------------------

    async def step(self, step: int) -> Collected:
        """Make the groups of one training step. Returns the groups of this controller."""
        self._begin(step)
        chosen = await self._agree(step)
        collected = self._end(chosen)
        if self._curriculum is not None:
            await self._learn_pass_rates(step, self._curriculum)
            collected.measured = self._curriculum.metrics()
        target = self.step_ledger.target
        if len(chosen) < target and not self._sampling.fixed and self._sampling.on_exhausted == "stop":
            raise UserError(
                f"step {step}: {len(chosen)} of {target} groups from {self._sampling.window} prompts "
                f"({self._why_dropped()}); increase sampling.max_draws, use prompts of another difficulty, or set "
                "sampling.on_exhausted=train"
            )
        return collected

    def _begin(self, step: int) -> None:
        sampling = self._sampling
        self.prompts.begin_step(sampling.window, sampling.strict)
        self.step_ledger.begin(self.prompts.step_start, sampling.window)
        self.prompts.expire(oldest=step - 1 - sampling.staleness)
        if self._curriculum is not None:
            self._source.give_order(self.prompts.step_start, self._curriculum.order(self.prompts.step_start))
        self._set_target_running(sampling.prompts_per_step * (1 + sampling.max_staleness))

    async def _learn_pass_rates(self, step: int, curriculum: CurriculumOrder) -> None:
        """From the groups of all controllers that the step has decided, also those that were dropped."""
        own, self._passed = list(self._passed.values()), {}
        parts = await self._group.all_gather(f"pass rates of step {step}", own)
        curriculum.update(passed for part in parts for passed in part)

    async def _agree(self, step: int) -> list[int]:
        """Exchange progress until all controllers know which prompts the step trains on."""
        sampling, ledger, last_exchange = self._sampling, self.step_ledger, 0.0
        # Groups that started with this version or an older one can be trained on only in this step, so the step waits
        # for them. Without staleness, groups in progress are aborted at the end.
        due_version = step - 1 - sampling.staleness if sampling.staleness else None
        while True:
            await self._wait_until_exchange(last_exchange)
            report = self.prompts.report(due_version)
            merged = self._group.reduce(f"progress of step {step}", report, ProgressReport.merged)
            exchange = asyncio.ensure_future(merged)
            failed = asyncio.ensure_future(self._failed.wait())
            await asyncio.wait({exchange, failed}, return_when=asyncio.FIRST_COMPLETED)
            failed.cancel()
            self._raise_failure()
            last_exchange = _now()
            ledger.add(exchange.result())
            chosen = ledger.chosen()
            if not sampling.fixed:
                self._report(f"{len(ledger.kept)}/{ledger.target} groups, {len(ledger.dropped)} dropped")
            if chosen is not None:
                return chosen
            self._set_target_running(sampling.prompts_per_step * (1 + sampling.max_staleness))

    async def _wait_until_exchange(self, last_exchange: float) -> None:
        """Fixed-size steps have one exchange, when all prompts are finished. Other steps have one when this controller
        kept or dropped a group, or after the longest interval, because an exchange needs every controller."""
        self._raise_failure()
        if self._sampling.fixed:
            while self._tasks:
                self._changed.clear()
                await self._changed.wait()
                self._raise_failure()
            return
        least, most = EXCHANGE_INTERVAL_S
        await asyncio.sleep(max(0.0, last_exchange + least - _now()))
        enough = len(self.step_ledger.kept) >= self.step_ledger.target  # kept in earlier steps
        if not (enough or self.prompts.has_unreported):
            self._changed.clear()
            try:
                async with asyncio.timeout(most):
                    await self._changed.wait()
            except TimeoutError:
                pass
        self._raise_failure()

    def _end(self, chosen: list[int]) -> Collected:
        """Take the chosen groups. prompt_ledger.py explains what happens to the other prompts."""
        prompts, ledger, sampling = self.prompts, self.step_ledger, self._sampling
        dropped, num_passed = ledger.dropped, max(ledger.num_passed, len(chosen))  # some passed in earlier steps
        groups = prompts.take(chosen)
        self.rate = self._rate_now()
        if sampling.strict:
            last = chosen[-1] if len(chosen) == ledger.target else prompts.step_start + sampling.window - 1
            dropped = {number: reason for number, reason in dropped.items() if number <= last}
            num_passed = len(chosen)
            self._cancel_tasks()
            prompts.forget_after(last)
            self._passed = {number: passed for number, passed in self._passed.items() if number <= last}
            ledger.clear()
        else:
            if sampling.staleness:
                ledger.take(chosen)
            else:
                self._cancel_tasks()
                prompts.return_rest()
                ledger.clear()
            self._set_target_running(sampling.prompts_per_step * sampling.max_staleness)
        summary = prompts.end_step()
        return Collected(
            groups=groups,
            drawn=summary.drawn,
            dropped=summary.dropped,
            pending=summary.pending,
            rewards=summary.rewards,
            cause=summary.cause,
            stage_s=self._shared.clock.take(),
            tokens_passed=summary.tokens_passed,
            samples_passed=summary.samples_passed,
            failed_globally=sum(reason in FAILURES for reason in dropped.values()),
            decided_globally=num_passed + len(dropped),
        )

    def close(self) -> None:
        """Cancel the running workflows. The collector cannot be used after this."""
        self._cancel_tasks()

    def progress(self) -> RolloutProgress:
        """Progress of this controller in the rollout, for placement."""
        prompts, share = self.prompts, self.step_ledger.target / self.prompts.size
        return RolloutProgress(share, prompts.num_ready, prompts.num_decided, prompts.num_running, self._rate_now())

    # ---- prompts --------------------------------------------------------------------------------------------------

    def _set_target_running(self, wanted: int) -> None:
        """Start this controller's share of the groups that are missing until all controllers have kept `wanted`."""
        prompts = self.prompts
        extra = self._sampling.extra_groups if wanted else 0.0
        missing = self.step_ledger.missing(wanted + extra, self._least_rate(), prompts.rank, prompts.size)
        self._target_running = prompts.reported_running + missing
        self._start_prompts()

    def _start_prompts(self) -> None:
        while self.prompts.draws_left and self._should_start_more():
            number = self.prompts.draw(self._version())
            self._tasks[number] = asyncio.ensure_future(self._run_prompt(number))

    def _should_start_more(self) -> bool:
        if self._sampling.fixed:
            return True
        if self._sampling.strict and self.prompts.head <= self.step_ledger.frontier():
            return True  # later prompts are already decided, so the step cannot end without this one
        # A group that passed the filter reduces the number still needed; a dropped group does not.
        unreported = self.prompts.num_unreported_kept / self._least_rate()
        return self.prompts.num_running + unreported < self._target_running

    def _least_rate(self) -> float:
        return max(self._rate_now(), 1 / self._sampling.max_oversampling)

    def _rate_now(self) -> float:
        ledger = self.step_ledger
        return acceptance_rate(self.rate, ledger.num_passed, len(ledger.dropped), ledger.target)

    async def _run_prompt(self, number: int) -> None:
        group, failure, row = list[Scored](), None, None
        try:
            prompt = self._source.at(number)
            row = prompt.row
            group = await run_workflow(self._workflow, self._shared, prompt)
            keep, reason = self._filter(group)
        except Exception as error:
            keep, reason, failure = False, reason_of(error), error
        if self._tasks.get(number) is not asyncio.current_task():
            return  # the task was cancelled, but the workflow caught the cancellation
        del self._tasks[number]
        counted = isinstance(failure, RewardError | WorkflowError)
        if failure is not None and not counted:
            self._failure = self._failure or failure
            self._failed.set()
        if self._curriculum is not None and row is not None:
            rate = self._curriculum.passed([scored.reward for scored in group]) if group else None
            self._passed[number] = number, row, rate
        if keep:
            self.prompts.keep(number, group)
        else:
            self.prompts.drop(number, group, reason, cause=str(failure) if counted else None)
        if self._sampling.fixed:
            done = self.prompts.num_ready + self.prompts.num_dropped
            self._report(f"{done}/{done + self.prompts.num_running} prompts")
        self._start_prompts()
        self._changed.set()

    def _cancel_tasks(self) -> None:
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _why_dropped(self) -> str:
        counts = Counter(self.step_ledger.dropped.values())
        return ", ".join(f"{reason} {count}" for reason, count in counts.most_common()) or "no group was finished"

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def place(self) -> Place:
        """The place of this controller in the prompt order. `merge_places` makes one state from all places."""
        return self.prompts.place(self.rate)

    def saved(self) -> dict[str, Any]:
        """What a checkpoint has beside the places: the same on all controllers."""
        return {} if self._curriculum is None else {"curriculum": self._curriculum.state()}

    def restore(self, state: dict[str, Any], ready: Sequence[list[Scored]]) -> None:
        """Take this controller's part of a checkpoint, which any number of controllers can have made. `ready`: the
        groups of all controllers that were ready for a later step."""
        if self._sampling.strict and (state.get("pending") or state.get("undrawn") or ready):
            raise UserError(
                "the checkpoint has groups kept for later steps; resume with the sampling.surplus and "
                "sampling.max_staleness it was made with, or with sampling.deterministic=false"
            )
        self.rate = state.get("rate", 1.0)
        if self._curriculum is not None and "curriculum" in state:
            self._curriculum.restore(state["curriculum"])
        groups = sorted(ready, key=lambda group: group[0].rollout.prompt.id)
        self.prompts.restore(state, groups)
        self.step_ledger.restore({g[0].rollout.prompt.id: min(s.rollout.version for s in g) for g in groups})


def _now() -> float:
    return asyncio.get_running_loop().time()
