"""Evaluation: greedy answers to the held-out prompts, scored, as one row of metrics (`eval/...`).

held-out prompts, split over controllers ──workflow (greedy)──> groups ──all_gather of sums──> row ──> Recorder
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gcore.controller.collect import answer_all
from gcore.controller.record import Recorder, exact_sum
from gcore.controller.setup import Setup
from gcore.placement.monitor import RolloutProgress
from gcore.prompts.source import PromptSource


class Evaluator:
    """`held_out`: None if the recipe has no held-out prompts; then evaluations do nothing."""

    def __init__(self, setup: Setup, recorder: Recorder, held_out: PromptSource | None) -> None:
        self._config, self._group, self._status = setup.config, setup.controllers, setup.status
        self._workflow, self._placement = setup.workflow, setup.placement
        self._greedy = setup.sample_context(greedy=True)
        self._recorder, self._held_out = recorder, held_out

    async def evaluate_if_due(self, step: int) -> float | None:
        """The accuracy, if there was an evaluation."""
        every, row = self._config.observe.eval_every, dict[str, Any]()
        if step == self._config.run.steps or (every and step % every == 0):
            row = await self.evaluate(step)
        return row.get("eval/accuracy")

    async def evaluate(self, step: int) -> dict[str, Any]:
        """The row of metrics. `step`: the last completed step."""
        if self._held_out is None:
            return {}
        with self._status.timed("eval", step):
            size, rank = self._group.size, self._group.rank
            prompts = [self._held_out.at(i) for i in range(len(self._held_out)) if i % size == rank]
            async with self._placement.during(_all_of(len(prompts)), step):
                collected = await answer_all(self._workflow, self._greedy, prompts, self._status.report)
            name = self._config.rewards.accuracy_name
            scored = [s for group in collected.groups for s in group]
            judged = [s.parts[name] for s in scored if name in s.parts]
            sums = (
                exact_sum(judged),
                len(judged),
                exact_sum(s.reward for s in scored),
                len(scored),
                collected.dropped.total(),
            )
            parts = await self._group.all_gather("evaluation", sums)
        accuracy, judged_count, reward, count, failed = (sum(part[i] for part in parts) for i in range(5))
        row = {
            "eval/accuracy": float(accuracy / judged_count) if judged_count else None,
            "eval/reward_mean": float(reward / count) if count else None,
            "eval/prompts": count,
            "eval/failed": failed,
            "timing_s/eval": self._status.take_seconds("eval"),
        }
        self._recorder.record_evaluation(step, row, collected.groups)
        return row


def _all_of(num_prompts: int) -> Callable[[], RolloutProgress]:
    """The progress of an evaluation, for placement: all prompts are in progress until the end."""
    return lambda: RolloutProgress(float(num_prompts), 0, 0, num_prompts, 1.0)
