"""Checks how many prompts of a step failed (no reward, or the workflow raised). Too many failures end the run."""

from __future__ import annotations

from collections.abc import Sequence

from gcore.controller.collect import Collected
from gcore.controller.services import Services
from gcore.types import SampleMeta, UserError


async def check_failures(services: Services, step: int, metas: Sequence[SampleMeta], collected: Collected) -> None:
    """`metas`: of all samples of the step. The causes are gathered, so all controllers raise the same error."""
    sampling, limit = services.config.sampling, services.config.rewards.max_error_frac
    failed, decided = collected.failed_globally, collected.decided_globally
    if failed:
        causes = await services.controllers.all_gather(f"failures of step {step}", collected.cause)
        cause = next((c for c in causes if c is not None), "unknown")
        if failed / decided > limit or failed == decided:
            raise UserError(
                f"step {step}: {failed} of {decided} prompts failed (rewards.max_error_frac={limit}); "
                f"first cause: {cause}"
            )
        services.status.note(
            f"step {step}: {failed} of {decided} prompts failed and were dropped; first cause: {cause}"
        )
    trained, wanted = len({meta.prompt_id for meta in metas}), sampling.prompts_per_step
    if trained < wanted and not sampling.fixed:
        services.status.note(
            f"step {step}: trains on {trained} of {wanted} groups; the {sampling.window} prompts of "
            "sampling.max_draws are used up"
        )
