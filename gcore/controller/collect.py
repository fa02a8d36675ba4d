"""The rollout phase of one controller: makes the groups of a training step.

    draw a prompt ──run its workflow──> group ──filter──> kept, or dropped and replaced by another prompt
    all controllers: exchange progress until enough groups are kept ──> the same chosen prompts on every controller

    prompt_ledger.py   the prompts of this controller and the state of each one: draw, keep, drop, take, ...
    run_prompts.py     the tasks that run their workflows
    this module        the exchange of progress, and from it the prompts that the step trains on

Controllers exchange prompt numbers 20 to 100 times per second and stop together when the *global* target is met. With
`sampling.max_staleness` above 0 the workflows of the next steps continue while the trainer works.

Terms of config/sampling.py: `fixed` steps train on the next `prompts_per_step` prompts, without a filter; `strict`
(deterministic) steps take the first groups that pass in prompt order; `window` is the maximum number of prompts of a
step; `staleness` is the maximum age of samples, in policy versions.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from gcore.config.sampling import Sampling, acceptance_rate
from gcore.config.tree import Config
from gcore.controller.prompt_ledger import FAILURES, NO_SPREAD, Collected, ProgressReport, PromptLedger
from gcore.controller.run_prompts import Filter, PromptRunner
from gcore.placement.monitor import RolloutProgress
from gcore.prompts.curriculum import CurriculumOrder
from gcore.prompts.source import PromptSource
from gcore.protocols import ControllerGroup
from gcore.types import SampleMeta, Scored, UserError
from gcore.workflows.context import SharedContext, Workflow

EXCHANGE_INTERVAL_S = (0.01, 0.05)  # shortest and longest time between two exchanges


def no_filter(group: list[Scored]) -> tuple[bool, str]:
    return True, ""


def spread(group: list[Scored]) -> tuple[bool, str]:
    """Drop groups whose rewards are all exactly equal: they have no gradient."""
    return any(s.reward != group[0].reward for s in group), NO_SPREAD


class StepLedger:
    """`strict`: a step takes the first groups that pass the filter, in prompt order. Otherwise a step ends when enough
    groups are kept, and takes those of the oldest policy version first, then in prompt order. Order of arrival would
    prefer short responses, and long ones would become too old."""

    def __init__(self, target: int, strict: bool) -> None:
        self.target, self.strict = target, strict
        self.kept: dict[int, int] = {}  # prompt -> version; not yet taken by a step
        self.dropped: dict[int, str] = {}  # prompt -> reason, reported in this step
        self.num_passed = 0  # groups that passed the filter, reported in this step
        self._base = self._window = 0
        self._idle, self._due = False, 0
        self._running = 0  # groups in progress on all controllers, as of the last exchange
        self._exchanges = 0
        self._frontier: int | None = None

    def begin(self, base: int, window: int) -> None:
        """Start a step. Strict: its prompts are among the `window` numbers from `base` on."""
        self._base, self._window = base, window
        self.dropped = {}
        self._idle, self._due = False, 0
        self.num_passed, self._frontier = 0, None

    def add(self, report: ProgressReport) -> None:
        """Add the merged report of one exchange. The order in which reports were merged makes no difference."""
        for number in report.withdrawn:
            self.kept.pop(number, None)
        self.kept |= dict(sorted(report.kept))
        self.dropped |= dict(sorted(report.dropped))
        self.num_passed += len(report.kept)
        self._frontier = None
        self._idle, self._due, self._running = report.idle, report.due, report.running
        self._exchanges += 1

    def chosen(self) -> list[int] | None:
        """The prompts of this step; None: not decided yet. Fewer than the target if no more prompts may be drawn."""
        if self.strict:
            return self._prefix()
        if (len(self.kept) >= self.target and not self._due) or self._idle:
            return sorted(self.kept, key=lambda number: (self.kept[number], number))[: self.target]
        return None

    def take(self, chosen: Sequence[int]) -> None:
        """End the step with these prompts. Other kept groups wait for the next steps."""
        for number in chosen:
            del self.kept[number]

    def clear(self) -> None:
        """End the step. No controller keeps other groups, finished or in progress."""
        self.kept.clear()
        self._running = 0

    def missing(self, wanted: float, rate: float, rank: int, size: int) -> int:
        """How many more groups controller `rank` of `size` should start so that `wanted` groups pass the filter, if a
        fraction `rate` passes; negative if too many are in progress. The numbers of all controllers add up to the gap.
        """
        if wanted <= len(self.kept):
            return -self._running  # start no more, not even to replace dropped groups
        gap = math.ceil((wanted - len(self.kept)) / rate - 1e-9) - self._running
        turn = (rank + self._exchanges) % size  # the remainder goes to another controller after each exchange
        return _ceil_div(gap * (turn + 1), size) - _ceil_div(gap * turn, size)

    def frontier(self) -> int:
        """Strict: all prompts up to this number must be started, because a later one is already decided. If enough
        groups are kept, the step needs no prompt after it."""
        if self._frontier is None:  # cached: read after every group, changes only with an exchange
            kept = sorted(self.kept)
            enough = len(kept) >= self.target
            last = max((*kept, *self.dropped), default=self._base - 1)
            self._frontier = kept[self.target - 1] if enough else last
        return self._frontier

    def _prefix(self) -> list[int] | None:
        """The first kept groups in prompt order; None while an earlier prompt is undecided."""
        chosen: list[int] = []
        for number in range(self._base, self._base + self._window):
            if number in self.kept:
                chosen.append(number)
                if len(chosen) == self.target:
                    return chosen
            elif number not in self.dropped:
                return None
        return chosen


async def check_failures(
    config: Config,
    controllers: ControllerGroup,
    note: Callable[[str], None],
    step: int,
    metas: Sequence[SampleMeta],
    collected: Collected,
) -> None:
    """Whether too many prompts of the step failed (no reward, or the workflow raised), which ends the run. `metas`: of
    all samples of the step. The causes are gathered, so all controllers raise the same error."""
    sampling, limit = config.sampling, config.rewards.max_error_frac
    failed, decided = collected.failed_globally, collected.decided_globally
    if failed:
        causes = await controllers.all_gather(f"failures of step {step}", collected.cause)
        cause = next((c for c in causes if c is not None), "unknown")
        if failed / decided > limit or failed == decided:
            raise UserError(
                f"step {step}: {failed} of {decided} prompts failed (rewards.max_error_frac={limit}); "
                f"first cause: {cause}"
            )
        note(f"step {step}: {failed} of {decided} prompts failed and were dropped; first cause: {cause}")
    trained, wanted = len({meta.prompt_id for meta in metas}), sampling.prompts_per_step
    if trained < wanted and not sampling.fixed:
        note(
            f"step {step}: trains on {trained} of {wanted} groups; the {sampling.window} prompts of "
            "sampling.max_draws are used up"
        )


class Collector:
    """One per controller, for the whole run. `version`: the policy version that the engines serve now."""

    def __init__(
        self,
        workflow: Workflow,
        shared: SharedContext,
        group: ControllerGroup,
        sampling: Sampling,
        keep: Filter,
        report: Callable[[str], None],
        source: PromptSource,
        version: Callable[[], int],
        curriculum: CurriculumOrder | None = None,
    ) -> None:
        self._sampling, self._report, self._group = sampling, report, group.subgroup()
        self.rate = 1.0  # fraction of groups that pass the filter, as of the last step
        self.prompts = PromptLedger(group.rank, group.size)
        self.step_ledger = StepLedger(sampling.prompts_per_step, sampling.strict)
        self._target_running = 0  # groups that this controller should have in progress
        self._version = version
        self.begun_again = 0  # prompts of a checkpoint that were in progress, of all controllers
        self._runner = PromptRunner(workflow, shared, keep, source, curriculum, self.prompts, self._start_prompts)

    # ---- a step ---------------------------------------------------------------------------------------------------

    async def step(self, step: int) -> Collected:
        """Make the groups of one training step. Returns the groups of this controller."""
        self._begin(step)
        chosen = await self._agree(step)
        collected = self._end(chosen)
        if (curriculum := self._runner.curriculum) is not None:  # learns from groups that were dropped too
            own, self._runner.passed = list(self._runner.passed.values()), {}
            parts = await self._group.all_gather(f"pass rates of step {step}", own)
            curriculum.update(passed for part in parts for passed in part)
            collected.measured = curriculum.metrics()
        target = self.step_ledger.target
        if len(chosen) < target and not self._sampling.fixed and self._sampling.on_exhausted == "stop":
            counts = Counter(self.step_ledger.dropped.values())
            why = ", ".join(f"{reason} {count}" for reason, count in counts.most_common()) or "no group was finished"
            raise UserError(
                f"step {step}: {len(chosen)} of {target} groups from {self._sampling.window} prompts "
                f"({why}); increase sampling.max_draws, use prompts of another difficulty, or set "
                "sampling.on_exhausted=train"
            )
        return collected

    def _begin(self, step: int) -> None:
        sampling = self._sampling
        self.prompts.begin_step(sampling.window, sampling.strict)
        self.step_ledger.begin(self.prompts.step_start, sampling.window)
        self.prompts.expire(oldest=step - 1 - sampling.staleness)
        if (curriculum := self._runner.curriculum) is not None:
            start = self.prompts.step_start
            self._runner.source.give_order(start, curriculum.order(start))
        self._set_target_running(sampling.prompts_per_step * (1 + sampling.max_staleness))

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
            failed = asyncio.ensure_future(self._runner.failed.wait())
            await asyncio.wait({exchange, failed}, return_when=asyncio.FIRST_COMPLETED)
            failed.cancel()
            self._runner.check()
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
        self._runner.check()
        if self._sampling.fixed:
            while self._runner.busy:
                self._runner.changed.clear()
                await self._runner.changed.wait()
                self._runner.check()
                done = self.prompts.num_ready + self.prompts.num_dropped
                self._report(f"{done}/{done + self.prompts.num_running} prompts")
            return
        least, most = EXCHANGE_INTERVAL_S
        await asyncio.sleep(max(0.0, last_exchange + least - _now()))
        enough = len(self.step_ledger.kept) >= self.step_ledger.target  # kept in earlier steps
        unreported = self.prompts.unreported
        if not (enough or unreported.kept or unreported.dropped):
            self._runner.changed.clear()
            try:
                async with asyncio.timeout(most):
                    await self._runner.changed.wait()
            except TimeoutError:
                pass
        self._runner.check()

    def _end(self, chosen: list[int]) -> Collected:
        """Take the chosen groups. prompt_ledger.py explains what happens to the other prompts."""
        prompts, ledger, sampling = self.prompts, self.step_ledger, self._sampling
        dropped, num_passed = ledger.dropped, max(ledger.num_passed, len(chosen))  # some passed in earlier steps
        prompts.take(chosen)
        self.rate = self._rate_now()
        if sampling.strict:
            last = chosen[-1] if len(chosen) == ledger.target else prompts.step_start + sampling.window - 1
            dropped = {number: reason for number, reason in dropped.items() if number <= last}
            num_passed = len(chosen)
            self._runner.cancel()
            prompts.forget_after(last)
            self._runner.passed = {number: each for number, each in self._runner.passed.items() if number <= last}
            ledger.clear()
        else:
            if sampling.staleness:
                ledger.take(chosen)
            else:
                self._runner.cancel()
                prompts.return_rest()
                ledger.clear()
            self._set_target_running(sampling.prompts_per_step * sampling.max_staleness)
        collected = prompts.end_step()
        collected.stage_s = self._runner.shared.clock.take()
        collected.tool_calls = self._runner.shared.take_calls()
        collected.failed_globally = sum(reason in FAILURES for reason in dropped.values())
        collected.decided_globally = num_passed + len(dropped)
        return collected

    def close(self) -> None:
        """Cancel the running workflows. The collector cannot be used after this."""
        self._runner.cancel()

    def progress(self) -> RolloutProgress:
        """Progress of this controller in the rollout, for placement, which looks as far ahead as groups are started."""
        prompts = self.prompts
        share = self.step_ledger.target * (1 + self._sampling.max_staleness) / prompts.size
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
        """As many as should run now."""
        while self.prompts.draws_left and self._should_start_more():
            self._runner.start(self.prompts.draw(self._version()))

    def _should_start_more(self) -> bool:
        if self._sampling.fixed:
            return True
        if self._sampling.strict and self.prompts.head <= self.step_ledger.frontier():
            return True  # later prompts are already decided, so the step cannot end without this one
        # A group that passed the filter reduces the number still needed; a dropped group does not.
        unreported = len(self.prompts.unreported.kept) / self._least_rate()
        return self.prompts.num_running + unreported < self._target_running

    def _least_rate(self) -> float:
        return max(self._rate_now(), 1 / self._sampling.max_oversampling)

    def _rate_now(self) -> float:
        ledger = self.step_ledger
        return acceptance_rate(self.rate, ledger.num_passed, len(ledger.dropped), ledger.target)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """What a checkpoint has beside the places: the same on all controllers."""
        return {} if self._runner.curriculum is None else {"curriculum": self._runner.curriculum.state()}

    def restore(self, state: dict[str, Any], ready: Sequence[list[Scored]]) -> None:
        """Take this controller's part of a checkpoint, which any number of controllers can have made. `ready`: the
        groups of all controllers that were ready for a later step."""
        if self._sampling.strict and (state.get("pending") or state.get("undrawn") or ready):
            raise UserError(
                "the checkpoint has groups kept for later steps; resume with the sampling.surplus and "
                "sampling.max_staleness it was made with, or with sampling.deterministic=false"
            )
        self.rate = state.get("rate", 1.0)
        if self._runner.curriculum is not None and "curriculum" in state:
            self._runner.curriculum.restore(state["curriculum"])
        groups = sorted(ready, key=lambda group: group[0].rollout.prompt.id)
        self.prompts.restore(state, groups)
        self.begun_again = len(state.get("pending", ()))
        self.step_ledger.kept = {g[0].rollout.prompt.id: min(s.rollout.version for s in g) for g in groups}


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _now() -> float:
    return asyncio.get_running_loop().time()
