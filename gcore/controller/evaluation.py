"""Evaluation: answers to the held-out prompts, scored, as one row of metrics (`eval/...`).

    held-out prompts, split over controllers ──workflow──> groups ──all_gather of sums──> row ──> Recorder

With evaluation.samples=1 each prompt has one greedy response; otherwise the workflow runs once per sampled response,
and pass@k and mean@k are estimated from all of them. Sums are exact, so results do not depend on the number of
controllers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import comb
from typing import TYPE_CHECKING, Any

from gcore.config.run import Evaluation
from gcore.controller.prompt_ledger import Collected
from gcore.controller.record import exact_sum
from gcore.controller.run_prompts import reason_of, run_workflow
from gcore.observe.values import Row
from gcore.placement.monitor import RolloutProgress
from gcore.preparation.samples import to_sample
from gcore.prompts.source import PromptSource
from gcore.task_group import task_group
from gcore.types import Prompt, RewardError, Scored, WorkflowError
from gcore.workflows.context import SharedContext, Workflow, stored_answers

if TYPE_CHECKING:
    from gcore.controller.services import Services

Sums = dict[str, tuple[Fraction, int]]  # metric -> sum, number of values
Groups = list[list[Scored]]
Prompts = Mapping[str, Sequence[Prompt]]  # of this controller, by name of the evaluation set


class Evaluator:
    """`held_out`: prompts by name of the evaluation set; without any, evaluations do nothing."""

    def __init__(self, services: Services, held_out: Mapping[str, PromptSource]) -> None:
        self._services, self._held_out = services, held_out
        self._contexts, self._stored_context = services.eval_contexts(), services.sample_context()
        self._evaluated: tuple[int, dict[str, Any]] = 0, {}  # the step of the last call, and its row

    async def evaluate_if_due(self, step: int, last: bool = False) -> float | None:
        """The value of checkpoint.best_metric, if there was an evaluation. `last`: of the run; a second call for the
        same step, if the user ended the run after the first."""
        config = self._services.config
        every, is_last = config.observe.eval_every, last or step == config.run.total_steps
        if self._evaluated[0] != step:
            due = is_last or (every and step % every == 0)
            self._evaluated = (step, await self.evaluate(step)) if due else (0, {})
        return self._evaluated[1].get(config.checkpoint.best_metric)

    async def evaluate(self, step: int) -> dict[str, Any]:
        """The row of metrics. `step`: the last completed step."""
        if not self._held_out:
            return {}
        services = self._services
        with services.status.timed("eval", step):
            size, rank = services.controllers.size, services.controllers.rank
            prompts = {
                name: [source.at(i) for i in range(rank, len(source), size)] for name, source in self._held_out.items()
            }
            evaluate = self._stored if services.config.trains_on_answers("eval") else self._generated
            sets, groups = await evaluate(step, prompts)
        row = {**rows_of(sets), "timing_s/eval": services.status.take_seconds("eval")}
        services.recorder.record_evaluation(step, row, groups)
        return row

    async def _generated(self, step: int, prompts: Prompts) -> tuple[dict[str, Row], dict[str, Groups]]:
        """The metrics of each set, and the groups of this controller. All sets and attempts run at the same time."""
        services = self._services
        evaluation, accuracy = services.config.evaluation, services.config.rewards.accuracy_name
        num_prompts, done = sum(map(len, prompts.values())), 0

        def report(_: str) -> None:
            nonlocal done
            done += 1
            services.status.report(f"{done}/{num_prompts * len(self._contexts)} prompts")

        jobs = [(name, shared) for name in prompts for shared in self._contexts]
        # For placement, all prompts are in progress until the end.
        progress = RolloutProgress(float(num_prompts), 0, 0, num_prompts, 1.0)
        async with services.placement.during(lambda: progress, step, keep_split=True), task_group() as tasks:
            answers = [
                tasks.create_task(answer_all(services.workflow, shared, prompts[name], report)) for name, shared in jobs
            ]
        by_prompt: dict[str, dict[int, list[Scored]]] = {name: {} for name in prompts}
        failed: Counter[str] = Counter()
        for (name, _), answered in zip(jobs, answers, strict=True):
            failed[name] += answered.result().dropped.total()
            for group in answered.result().groups:
                siblings = by_prompt[name].setdefault(group[0].rollout.prompt.id, [])
                siblings += [_as_sibling(scored, len(siblings) + i) for i, scored in enumerate(group)]
        groups = {name: [numbered[i] for i in sorted(numbered)] for name, numbered in by_prompt.items()}
        sums = {name: (sums_of(groups[name], accuracy, evaluation), failed[name]) for name in prompts}
        parts = await services.controllers.all_gather("evaluation", sums)
        return {name: _set_row([part[name] for part in parts], evaluation) for name in prompts}, groups

    async def _stored(self, step: int, prompts: Prompts) -> tuple[dict[str, Row], dict[str, Groups]]:
        """The objective of the held-out answers, computed by the trainer: nothing is generated."""
        services, sets, groups = self._services, dict[str, Row](), dict[str, Groups]()
        for name, of_set in prompts.items():
            collected = await answer_all(stored_answers, self._stored_context, of_set, services.status.report)
            samples = [to_sample(s) for group in collected.groups for s in group]
            metas, batches = await services.dispatcher.dispatch_samples(step, samples, services.config.objective)
            metrics = await services.dispatcher.evaluate(batches) if batches else {}
            values = {metric.partition("/")[2]: value.value for metric, value in metrics.items()}
            sets[name] = {**values, "prompts": len({meta.prompt_id for meta in metas})}
            groups[name] = collected.groups
        return sets, groups


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

    async with task_group() as tasks:
        for prompt in prompts:
            tasks.create_task(one(prompt))
    collected.groups = [results[prompt.id] for prompt in prompts if prompt.id in results]
    return collected


def _as_sibling(scored: Scored, number: int) -> Scored:
    return dataclasses.replace(scored, rollout=dataclasses.replace(scored.rollout, sibling=number))


def pass_at_k(num_samples: int, num_passed: int, k: int) -> Fraction:
    """Probability that at least one of k responses passes, if `num_passed` of `num_samples` did: the unbiased estimate,
    over all ways to choose k of them."""
    return 1 - Fraction(comb(num_samples - num_passed, k), comb(num_samples, k))


def sums_of(groups: Sequence[Sequence[Scored]], accuracy: str, evaluation: Evaluation) -> Sums:
    """Sums over the groups of one controller. pass@k and mean@k count prompts. A response that failed does not count:
    mean@k is over those that are left, and pass@k omits prompts with fewer than k of them."""
    scored = [s for group in groups for s in group]
    values = [[s.parts[accuracy] for s in group if accuracy in s.parts] for group in groups]
    sums: Sums = {
        "accuracy": _sum([value for group in values for value in group]),
        "reward_mean": _sum([s.reward for s in scored]),
        "response_length": _sum([float(s.rollout.length) for s in scored]),
        "prompts": (Fraction(len(groups)), 1),
    }
    for k in evaluation.ks:
        estimates = [pass_at_k(len(g), sum(v >= evaluation.success for v in g), k) for g in values if len(g) >= k]
        sums[f"pass@{k}"] = (sum(estimates, Fraction(0)), len(estimates))
    if evaluation.sampled:
        means = [exact_sum(group) / len(group) for group in values if group]
        sums[f"mean@{evaluation.samples}"] = (sum(means, Fraction(0)), len(means))
    return sums


def _sum(values: Sequence[float]) -> tuple[Fraction, int]:
    return exact_sum(values), len(values)


def _set_row(parts: Sequence[tuple[Sums, int]], evaluation: Evaluation) -> Row:
    """The metrics of one set, over all controllers. None: no response could be counted."""
    row: Row = {}
    for name in parts[0][0]:
        total, count = (sum(sums[name][i] for sums, _ in parts) for i in range(2))
        row[name] = int(total) if name == "prompts" else float(total / count) if count else None
    return {**row, "failed": sum(failed for _, failed in parts)}


def rows_of(sets: Mapping[str, Row]) -> Row:
    """One row. Of several sets: `eval/NAME/METRIC`, and `eval/METRIC`, the mean over the sets (a sum for counts)."""
    if set(sets) == {""}:
        return {f"eval/{metric}": value for metric, value in sets[""].items()}
    row: Row = {}
    for metric in next(iter(sets.values())):
        values = [own[metric] for own in sets.values() if own.get(metric) is not None]
        total = sum(values)
        mean = total if metric in ("prompts", "failed") else total / len(values) if values else None
        row[f"eval/{metric}"] = mean
    return row | {f"eval/{name}/{metric}": value for name, own in sets.items() for metric, value in own.items()}
