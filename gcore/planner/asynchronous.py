"""`gcore plan --staleness K`: the plan under asynchronous rollout, simulated for a few steps (simulate/pipeline.py).

Closed formulas do not answer this: how long a batch waits for its longest group depends on the steps before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gcore.placement.grid import POLICY, TRAINER
from gcore.planner.inputs import VERDICT_SIGMA, at_least_one
from gcore.planner.plan import PlanResult
from gcore.simulate.run import SPLIT
from gcore.simulate.scenario import Drift, Lengths, Scenario, Server, SimulatedJudge
from gcore.types import UserError

STEPS = 6  # and those that fill and empty the pipeline


def asynchronous(result: PlanResult, model: str, judges: Sequence[str], staleness: int) -> tuple[Scenario, list[str]]:
    """The scenario of a plan that fits, and the rules to compare. `model`, `judges`: as given to the plan. Engines have
    the whole memory of their GPUs, and the trainer makes one pass for logprobs."""
    at_least_one("--staleness", staleness)
    best, work = result.best, result.workload
    if best is None:
        raise UserError("--staleness needs a plan that fits")
    names = list(best.tp)[1:]
    verdicts = Lengths(
        start=work.verdict_length, sigma=min(work.sigma, VERDICT_SIGMA), shared=0.0, longest=work.longest_verdict
    )
    scenario = Scenario(
        name=f"asynchronous rollout, staleness {staleness}",
        slots=result.gpus,
        gpu=result.gpu.name,
        steps=STEPS + 2 * (1 + staleness),
        prompts=work.prompts,
        samples=work.samples,
        prompt_length=work.prompt_length,
        policy=Server(model=model, tensor_parallel=best.tp[POLICY]),
        judges=tuple(
            SimulatedJudge(
                name=name, model=judge, tensor_parallel=best.tp[name], verdict=verdicts, repeats=work.repeats
            )
            for name, judge in zip(names, judges, strict=True)
        ),
        lengths=Lengths(start=work.response_length, sigma=work.sigma, longest=work.max_response_length),
        acceptance=Drift(start=work.acceptance),
        staleness=staleness,
    )
    apart = result.of("disaggregated")
    rules = ["dynamic", "colocated"]
    if apart is not None and apart.tp == best.tp and set(apart.split) == {*best.tp, TRAINER}:
        block = scenario.grid.slots_per_block
        counts = "-".join(str(apart.split[role] // block) for role in (POLICY, *names, TRAINER))
        rules.append(f"{SPLIT}:{counts}")
    return scenario, rules
