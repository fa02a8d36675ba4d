"""Runs the workflow for one prompt and checks the group that it returns. Used by controller/collect.py.

prompt ──workflow──> list[Scored], checked
              └────> WorkflowError or RewardError: the group is dropped and counted
              └────> UserError, or an error in G-Core itself: the run ends
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import traceback
from pathlib import Path

import gcore
from gcore.controller.step_ledger import REWARD_ERROR, WORKFLOW_ERROR
from gcore.protocols import RoleDied, RoleError
from gcore.rewarding.source import is_finite
from gcore.types import Prompt, RewardError, Scored, UserError, WorkflowError
from gcore.workflows.context import SampleContext, SharedContext, Workflow


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
    except (UserError, RewardError, RoleError, RoleDied):
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
    return WORKFLOW_ERROR if isinstance(error, WorkflowError) else REWARD_ERROR


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
    if unusual := [s.reward for s in group if not is_finite(s.reward)]:
        raise UserError(
            f"workflow returned the reward {unusual[0]!r} for prompt {prompt.id}; expected a finite number "
            "(key: workflow)"
        )
    if any(len(s.rollout.versions_S) == 0 for s in group):
        raise UserError(f"workflow returned a sample without steps for prompt {prompt.id} (key: workflow)")
    keys = {(s.rollout.prompt.id, s.rollout.sibling) for s in group}
    if len(keys) < len(group) or any(prompt_id != prompt.id for prompt_id, _ in keys):
        raise UserError(
            f"workflow returned a sample twice, or one of another prompt, for prompt {prompt.id} (key: workflow)"
        )
    if len(group) < least:
        raise UserError(
            f"workflow returned {len(group)} sample for prompt {prompt.id}; algorithm.adv_estimator compares at least "
            f"{least} siblings (keys: workflow, algorithm.adv_estimator)"
        )
    return group
