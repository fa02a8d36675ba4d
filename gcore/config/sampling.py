"""Section `sampling`: which groups a training step uses; dynamic and asynchronous sampling."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gcore.config.base import Auto, Count, PositiveInt, Section
from gcore.config.objects import FunctionPath

MAX_OVERSAMPLING = 4.0  # default of sampling.max_oversampling
PRIOR_SHARE = 0.25  # weight of the last step's acceptance rate, as a fraction of the groups of a step


def acceptance_rate(last: float, passed: int, dropped: int, groups_per_step: float) -> float:
    """Fraction of groups that pass the filter: a weighted mean of the last step's rate and this step's groups."""
    prior = PRIOR_SHARE * groups_per_step
    return (prior * last + passed) / (prior + passed + dropped)


class Curriculum(Section):
    order: Literal["near_half", "easy_first"] = "near_half"
    """`near_half`: prompts are drawn at random, and those whose pass rate is near 0.5 more often: with weight
    4 p (1 - p), at least 0.1, so that those of pass rate 0 or 1 are tried again. `easy_first`: each pass over the
    prompts goes from the highest pass rate to the lowest."""
    pass_reward: float = 0.5
    """A response passes if its reward is at least this."""
    column: str | None = None
    """Column of `data.train` with a pass rate from 0 to 1 to start with, measured by another model or an earlier run.
    A prompt that was never drawn and has none starts at 0.5."""


class Sampling(Section):
    prompts_per_step: PositiveInt = 32
    """Prompts per training step, over all controllers. The only unit of batch size."""
    samples_per_prompt: PositiveInt = 8
    """Responses per prompt. They form the group in which advantages are computed."""
    filter: FunctionPath = "none"
    """Dynamic sampling: which groups are trained on. `none`: all; `spread`: those whose rewards are not all equal; or a
    function `package.module:f` or `file.py:f` from the list of Scored to `(keep, reason)`. The controller replaces a
    dropped group with another prompt immediately."""
    max_draws: Annotated[float, Field(ge=1)] = 10.0
    """Dynamic sampling draws at most `max_draws * prompts_per_step` prompts per step."""
    on_exhausted: Literal["train", "stop"] = "train"
    """If groups are missing after `max_draws`: `train`: train on the groups so far; `stop`: end the run."""
    oversampling: Annotated[float, Field(ge=1)] | Auto = "auto"
    """Dynamic sampling: start `oversampling * prompts_per_step` groups, in addition to those that the acceptance rate
    requires, so that the step does not wait for the slowest. For the groups beyond the target see `surplus`. `auto`:
    1.25 if they are kept for the next step and so cost nothing, else 1."""
    max_oversampling: Annotated[float, Field(ge=1)] = MAX_OVERSAMPLING
    """At most `max_oversampling` times the missing groups are started at once; the number depends on the recent
    acceptance rate."""
    surplus: Literal["abort", "keep"] | Auto = "auto"
    """What happens to unfinished groups when the step has enough. `keep`: they continue from their tokens in the next
    step, and every token records the policy version that sampled it. `abort`: they are discarded and their prompts are
    drawn again, which prefers short responses (see docs/sampling.md). `auto`: `keep` if `deterministic: false` and a
    filter are set."""
    max_staleness: Count = 0
    """Maximum number of policy versions that generation may run ahead of training (asynchronous rollout); importance
    weights correct for it. 0: every step trains only on samples of the current policy. Above 0, no group is aborted."""
    deterministic: bool | Auto = "auto"
    """Samples do not depend on the number of controllers or on timing: a step takes the first accepted groups in the
    order of the prompts, not of arrival, and so waits for slow ones. `auto`: true unless `max_staleness` or
    `surplus: keep` is set."""

    curriculum: Curriculum | None = None
    """Draw prompts by how often the policy solves them, see docs/sampling.md. `{}` uses the defaults. Default: every
    prompt once per epoch."""

    @property
    def keeps_surplus(self) -> bool:
        if self.surplus == "auto":
            return self.deterministic is False and self.filter != "none"
        return self.surplus == "keep"

    @property
    def staleness(self) -> int:
        """Maximum number of policy versions between a sample's oldest token and the policy that trains on it."""
        return max(self.max_staleness, int(self.keeps_surplus))

    @property
    def extra_groups(self) -> float:
        """Groups to start in addition to those that a step needs."""
        auto = 1.25 if self.keeps_surplus and not self.max_staleness else 1.0
        return ((auto if self.oversampling == "auto" else self.oversampling) - 1) * self.prompts_per_step

    @property
    def prefers_short(self) -> bool:
        """The groups that finish first are trained on, and the others are discarded and started again."""
        return not self.fixed and not self.strict and not self.staleness

    @property
    def strict(self) -> bool:
        if self.fixed:
            return True
        return self.staleness == 0 if self.deterministic == "auto" else self.deterministic

    @property
    def fixed(self) -> bool:
        """A step is the next `prompts_per_step` prompts, whether they succeed or fail."""
        return self.filter == "none" and self.staleness == 0

    @property
    def window(self) -> int:
        """Maximum number of prompts that a step draws."""
        return self.prompts_per_step if self.fixed else math.ceil(self.prompts_per_step * self.max_draws)

    @model_validator(mode="after")
    def _timing(self) -> Sampling:
        if self.deterministic is True and self.staleness:
            raise ValueError(
                "sampling.deterministic=true excludes sampling.max_staleness > 0 and sampling.surplus=keep: with "
                "them, timing decides which policy version samples a token"
            )
        if self.curriculum is not None and not self.strict:
            raise ValueError(
                "sampling.curriculum needs steps that do not depend on timing, because the pass rates of a step decide "
                "which prompts the next one draws; expected sampling.max_staleness=0, surplus other than keep, and "
                "deterministic other than false"
            )
        return self
