"""Runs the workflows of the prompts of one controller, and checks and filters the groups that they return.

prompt ──workflow──> list[Scored], checked ──filter──> kept, or dropped and counted
              └────> WorkflowError or RewardError: the group is dropped and counted
              └────> UserError, or an error in G-Core itself: the run ends
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path

import gcore
from gcore.controller.prompt_ledger import REWARD_ERROR, PromptLedger
from gcore.prompts.curriculum import CurriculumOrder, Passed
from gcore.prompts.source import PromptSource
from gcore.protocols import RoleDied, RoleError
from gcore.rewarding.source import is_finite
from gcore.types import Prompt, RewardError, Scored, UserError, WorkflowError
from gcore.workflows.context import SampleContext, SharedContext, Workflow

Filter = Callable[[list[Scored]], tuple[bool, str]]


class PromptRunner:
    """One task per prompt, for the whole run. Workflows of many prompts run at the same time and do not wait for each
    other. `ended`: called when the state of a prompt in the ledger has changed."""

    def __init__(
        self,
        workflow: Workflow,
        shared: SharedContext,
        keep: Filter,
        source: PromptSource,
        curriculum: CurriculumOrder | None,
        ledger: PromptLedger,
        ended: Callable[[], None],
    ) -> None:
        self.shared, self.source, self.curriculum = shared, source, curriculum
        self._workflow, self._filter, self._ledger, self._ended = workflow, keep, ledger, ended
        self.passed: dict[int, Passed] = {}  # groups of this step, by prompt number; with a curriculum
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of the running prompts
        self.changed, self.failed = asyncio.Event(), asyncio.Event()
        self._failure: BaseException | None = None  # ends the run; other failures only drop their group

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def start(self, number: int) -> None:
        self._tasks[number] = asyncio.ensure_future(self._run(number))

    async def _run(self, number: int) -> None:
        group, failure, row = list[Scored](), None, None
        try:
            prompt = self.source.at(number)
            row = prompt.row
            group = await run_workflow(self._workflow, self.shared, prompt)
            keep, reason = self._filter(group)
        except Exception as error:
            keep, reason, failure = False, reason_of(error), error
        if self._tasks.get(number) is not asyncio.current_task():
            return  # the task was cancelled, but the workflow caught the cancellation
        del self._tasks[number]
        counted = isinstance(failure, RewardError | WorkflowError)
        if failure is not None and not counted:
            self._failure = self._failure or failure
            self.failed.set()
        if self.curriculum is not None and row is not None:
            rate = self.curriculum.passed([scored.reward for scored in group]) if group else None
            self.passed[number] = number, row, rate
        if keep:
            self._ledger.keep(number, group)
        else:
            self._ledger.drop(number, group, reason, cause=str(failure) if counted else None)
        self._ended()
        self.changed.set()

    def cancel(self) -> None:
        """All running workflows."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()

    def check(self) -> None:
        """Raise the failure that ends the run, if there is one."""
        if self._failure is not None:
            raise self._failure


async def run_workflow(workflow: Workflow, shared: SharedContext, prompt: Prompt) -> list[Scored]:
    """The group of the prompt. If the advantage estimator compares with a greedy response, the workflow also runs a
    second time, greedily, as in evaluations; the samples carry its mean reward."""
    if shared.baseline is None:
        return await _run(workflow, shared, prompt)
    tasks = [asyncio.ensure_future(_run(workflow, each, prompt)) for each in (shared, shared.baseline)]
    try:
        group, greedy = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    baseline = sum(s.reward for s in greedy) / len(greedy)
    return [dataclasses.replace(s, baseline=baseline) for s in group]


async def _run(workflow: Workflow, shared: SharedContext, prompt: Prompt) -> list[Scored]:
    """An exception in a user's workflow becomes a WorkflowError with its line."""
    try:
        group = await workflow(SampleContext(shared), prompt)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # the collector cancelled the task
        raise UserError(f"workflow cancelled itself at prompt {prompt.id}; expected a list of Scored") from None
    except (UserError, RewardError, WorkflowError, RoleError, RoleDied):
        raise
    except (Exception, SystemExit) as error:  # sys.exit() in a workflow must not end the process silently
        line = _line_of(workflow, error)
        if line is None:
            raise
        what = f"{line}: {type(error).__name__}: {error}" if str(error) else f"{line}: {type(error).__name__}"
        raise WorkflowError(f"{what} (workflow, prompt {prompt.id})") from error
    return _checked(group, prompt, shared.least_siblings)


def _line_of(workflow: Workflow, error: BaseException) -> str | None:
    """Where a user's workflow raised, as `flow.py:12 in workflow`; None: the workflow is part of G-Core."""
    code = getattr(inspect.unwrap(workflow), "__code__", None)
    if code is None or Path(code.co_filename).is_relative_to(Path(gcore.__file__).parent):
        return None
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == code.co_filename]
    return f"{Path(code.co_filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else code.co_filename


def reason_of(error: Exception) -> str:
    """Under which name the dropped group is counted."""
    return error.reason if isinstance(error, WorkflowError) else REWARD_ERROR


def _described(group: object) -> str:
    """What a workflow has returned instead of its samples: a list of str, a list without items, Rollout"""
    if not isinstance(group, list):
        return type(group).__name__
    others = sorted({type(item).__name__ for item in group if not isinstance(item, Scored)})
    return f"a list of {', '.join(others)}" if others else "a list without items"


def _checked(group: list[Scored], prompt: Prompt, least: int) -> list[Scored]:
    if not isinstance(group, list) or not group or not all(isinstance(s, Scored) for s in group):
        raise UserError(
            f"workflow returned {_described(group)} for prompt {prompt.id}; expected a non-empty list of Scored, "
            "as `await ctx.reward(group)` returns (key: workflow)"
        )
    if unusual := [r for s in group for r in (s.reward, *s.segment_rewards) if not is_finite(r)]:
        raise UserError(
            f"workflow returned the reward {unusual[0]!r} for prompt {prompt.id}; expected a finite number "
            "(key: workflow)"
        )
    segments = [segment for s in group for segment in s.rollout.trajectory]
    if any(len(segment.versions_S) == 0 for segment in segments):
        raise UserError(f"workflow returned a sample without steps for prompt {prompt.id} (key: workflow)")
    keys = {(segment.prompt.id, segment.sibling) for segment in segments}
    if len(keys) < len(segments) or any(prompt_id != prompt.id for prompt_id, _ in keys):
        raise UserError(
            f"workflow returned a sample twice, or one of another prompt, for prompt {prompt.id} (key: workflow)"
        )
    for s in group:
        if s.segment_rewards and len(s.segment_rewards) != len(s.rollout.trajectory):
            raise UserError(
                f"workflow returned {len(s.segment_rewards)} segment_rewards for prompt {prompt.id}; expected none, or "
                f"{len(s.rollout.trajectory)}, one per segment of rollout.trajectory (key: workflow)"
            )
    if len(group) < least:
        raise UserError(
            f"workflow returned {len(group)} sample for prompt {prompt.id}; algorithm.adv_estimator compares at least "
            f"{least} siblings (keys: workflow, algorithm.adv_estimator)"
        )
    return group
