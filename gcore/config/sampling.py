"""The part of the configuration that says which groups a training step takes: dynamic and asynchronous sampling."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gcore.config.base import Auto, Count, PositiveInt, Section

MAX_OVERSAMPLING = 4.0  # default of sampling.max_oversampling
PRIOR_SHARE = 0.25  # weight of the last step's acceptance rate, as a share of the groups of a step


def acceptance_rate(last: float, passed: int, dropped: int, groups_per_step: float) -> float:
    """Share of groups that pass the filter: that of the last step, weighed against the groups of this step."""
    prior = PRIOR_SHARE * groups_per_step
    return (prior * last + passed) / (prior + passed + dropped)


class Sampling(Section):
    prompts_per_step: PositiveInt = 32
    """Prompts of a training step, over all controllers. The one unit of batch size."""
    samples_per_prompt: PositiveInt = 8
    """Responses to each prompt: the group that advantages are computed in."""
    filter: str = "none"
    """Dynamic sampling: which groups are worth training on. `none`: all; `spread`: those whose rewards are not all
    equal; or a function `package.module:f` or `file.py:f` from the list of Scored to `(keep, reason)`. For a group
    that is dropped, its controller draws another prompt at once."""
    max_draws: Annotated[float, Field(ge=1)] = 10.0
    """Dynamic sampling draws at most this many times `prompts_per_step` prompts per step."""
    on_exhausted: Literal["train", "stop"] = "train"
    """When that many were drawn and groups are still missing: train on what there is, or end the run."""
    oversampling: Annotated[float, Field(ge=1)] | Auto = "auto"
    """Dynamic sampling: start this many times `prompts_per_step` groups, beyond what the acceptance rate asks for, so
    that the step does not wait for the slowest. `surplus` says what happens to the groups beyond the target. `auto`:
    1.25 where they are kept for the next step and cost nothing, else 1."""
    max_oversampling: Annotated[float, Field(ge=1)] = MAX_OVERSAMPLING
    """How many times the missing groups may be started at once; how many are follows from the share accepted lately."""
    surplus: Literal["abort", "keep"] | Auto = "auto"
    """What happens to groups that are unfinished when the step has enough. `keep`: they continue from their tokens in
    the next step, and every token is stamped with the policy version that sampled it. `abort`: they are thrown away and
    their prompts are drawn again, which prefers short responses (see docs/sampling.md). `auto`: `keep` where
    `deterministic: false` and a filter are set."""
    max_staleness: Count = 0
    """Generation may run up to this many policy versions ahead of training (asynchronous rollout); importance weights
    correct for it. 0: every step trains on samples of the current policy alone. Above 0 nothing is aborted."""
    deterministic: bool | Auto = "auto"
    """Samples do not depend on the number of controllers or on timing: a step takes the first good groups in the order
    of the prompts, not in that of arrival, and so waits for stragglers. `auto`: as long as neither `max_staleness` nor
    `surplus: keep` lets timing decide."""

    @property
    def keeps_surplus(self) -> bool:
        if self.surplus == "auto":
            return self.deterministic is False and self.filter != "none"
        return self.surplus == "keep"

    @property
    def staleness(self) -> int:
        """Most policy versions between a sample's oldest token and the policy that trains on it."""
        return max(self.max_staleness, int(self.keeps_surplus))

    @property
    def extra_groups(self) -> float:
        """Groups to start beyond those that a step needs."""
        auto = 1.25 if self.keeps_surplus and not self.max_staleness else 1.0
        return ((auto if self.oversampling == "auto" else self.oversampling) - 1) * self.prompts_per_step

    @property
    def prefers_short(self) -> bool:
        """The groups that finish first are trained on, and the others are started again."""
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
        """Prompts a step may draw."""
        return self.prompts_per_step if self.fixed else math.ceil(self.prompts_per_step * self.max_draws)

    @model_validator(mode="after")
    def _timing(self) -> Sampling:
        if self.deterministic is True and self.staleness:
            raise ValueError(
                "sampling.deterministic=true and sampling.max_staleness > 0 or sampling.surplus=keep exclude each "
                "other: there, timing decides which policy a token comes from"
            )
        return self
