"""Section `evaluation`: how held-out prompts are answered and counted; and the names of the metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from gcore.config.base import Auto, Count, NonNegative, PositiveInt, Section

OF_A_SET = ("accuracy", "reward_mean", "response_length", "prompts", "failed")  # eval/NAME
SET_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def _set_name(name: str) -> str:
    if not SET_NAME.fullmatch(name) or name in OF_A_SET:
        raise ValueError(
            f"got the name {name!r} of an evaluation set; expected letters, digits, . _ - (and not a metric)"
        )
    return name


SetName = Annotated[str, AfterValidator(_set_name)]


class Evaluation(Section):
    samples: PositiveInt = 1
    """Responses per held-out prompt. 1: one greedy response. More: sampled ones, the workflow runs once for each of
    them, and `eval/pass@K` and `eval/mean@N` are logged; `eval/accuracy` is then the mean over all of them."""
    k: list[PositiveInt] | Auto = "auto"
    """The K of `eval/pass@K`, at most `samples`: the probability that at least one of K responses passes, by the
    unbiased estimator over all `samples`. `auto`: powers of two up to `samples`, and `samples`."""
    success: float = 1.0
    """A response passes if its accuracy (`rewards.accuracy`) is at least this number."""
    temperature: NonNegative | Auto = "auto"
    """Sampling temperature if `samples` is above 1; `auto`: as `generation.temperature`."""
    top_p: Annotated[float, Field(gt=0, le=1)] | Auto = "auto"
    """Nucleus sampling if `samples` is above 1; `auto`: as `generation.top_p`."""
    top_k: Count | Auto = "auto"
    """Sample among the k most likely tokens if `samples` is above 1; `auto`: as `generation.top_k`."""

    @property
    def sampled(self) -> bool:
        return self.samples > 1

    @property
    def ks(self) -> list[int]:
        if not self.sampled:
            return []
        if self.k != "auto":
            return sorted(set(self.k))
        return sorted({*(2**i for i in range(self.samples.bit_length())), self.samples})

    @property
    def sampling(self) -> dict[str, Any]:
        """Keys of `generation` that have other values in evaluations."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        return {"keep_sampling_mask": False, **{name: value for name, value in given.items() if value != "auto"}}

    def metrics(self, sets: Iterable[str]) -> list[str]:
        """Names of the metrics that can select a checkpoint. `sets`: names of the evaluation sets."""
        own = ["accuracy", "reward_mean", *(f"pass@{k}" for k in self.ks)]
        own += [f"mean@{self.samples}"] if self.sampled else []
        return [f"eval/{name}" for name in own] + [f"eval/{s}/{name}" for s in sets if s for name in own]

    @model_validator(mode="after")
    def _enough(self) -> Evaluation:
        if self.k != "auto" and (too_large := [k for k in self.k if k > self.samples]):
            raise ValueError(
                f"k={too_large} exceeds samples={self.samples}: pass@K needs at least K samples per prompt"
            )
        return self
