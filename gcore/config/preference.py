"""The key `objective` and the section `preference`: training on demonstrations and on pairs of answers.

`OBJECTIVES` says what each objective needs. The formulas are in training/preference.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from gcore.config.base import NonNegative, Section

Objective = Literal[
    "policy", "sft", "dpo", "ipo", "hinge", "robust_dpo", "apo_zero", "apo_down", "orpo", "simpo", "kto", "reward_model"
]


@dataclass(frozen=True, slots=True)
class Needs:
    """What an objective trains on. Needs(pairs=True, reference=True)"""

    pairs: bool = False  # two answers per prompt, of which one is preferred; both are in the same micro-batch
    reference: bool = False  # logprobs of the initial policy
    labels: bool = False  # one answer per prompt, good or bad. Its partner is the answer of another row, for the KL


OBJECTIVES: dict[Objective, Needs] = {
    "policy": Needs(),
    "sft": Needs(),
    "dpo": Needs(pairs=True, reference=True),
    "ipo": Needs(pairs=True, reference=True),
    "hinge": Needs(pairs=True, reference=True),
    "robust_dpo": Needs(pairs=True, reference=True),
    "apo_zero": Needs(pairs=True, reference=True),
    "apo_down": Needs(pairs=True, reference=True),
    "orpo": Needs(pairs=True),
    "simpo": Needs(pairs=True),
    "kto": Needs(pairs=True, reference=True, labels=True),
    "reward_model": Needs(pairs=True),
}


class Preference(Section):
    pairs: Literal["dataset", "rollouts"] = "dataset"
    """Where the two answers of a pair come from. `dataset`: the columns `chosen` and `rejected` of `data.train`;
    `rollouts`: the policy generates `sampling.samples_per_prompt` answers, `rewards` score them, and the best and the
    worst of a group are a pair (online DPO)."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Scale of the implicit rewards: a small value allows the policy to move far from the reference. IPO: its tau.
    ORPO: the weight of the odds ratio. SimPO: the scale of the mean logprobs (2 in the paper)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a pair is labelled the wrong way. `dpo`: conservative DPO; `robust_dpo`: unbiased under this
    noise."""
    sft_coef: NonNegative = 0.0
    """Weight of a supervised loss on the chosen answers, in addition to the loss of the pairs; a mean over tokens
    (RPO). ORPO always has it, with weight 1."""
    margin: NonNegative = 0.5
    """SimPO: the target margin gamma between chosen and rejected answers."""
    desirable_weight: NonNegative = 1.0
    """KTO: weight of the answers with a true `label`."""
    undesirable_weight: NonNegative = 1.0
    """KTO: weight of the answers with a false `label`."""


def implied_by_pairs(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """With pairs of rollouts, groups without a pair are replaced. `tree`: a parsed recipe."""
    match tree:
        case {"objective": objective, "preference": {"pairs": "rollouts"}} if objective not in ("policy", "sft"):
            return {"sampling": {"filter": "spread"}}
    return {}
