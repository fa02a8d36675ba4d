"""The key `objective` and the section `preference`: training on demonstrations and on pairs of answers.

`OBJECTIVES` says what each objective needs. The formulas are in training/preference.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

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


class ObjectiveView:
    """What the objective of a recipe implies: a part of config.tree.Config."""

    if TYPE_CHECKING:
        objective: Objective
        preference: Preference
        algorithm: Any
        data: Any
        generation: Any
        rewards: Any
        run: Any
        sampling: Any
        training: Any
        placement: Any
        model: Any

    @property
    def needs(self) -> Needs:
        """What the objective trains on."""
        return OBJECTIVES[self.objective]

    @property
    def is_offline(self) -> bool:
        """All samples are answers of the dataset: no policy generates them, no reward scores them."""
        return self.objective != "policy" and not (self.needs.pairs and self.preference.pairs == "rollouts")

    def trains_on_answers(self, split: str) -> bool:
        """The rows of this dataset have answers to train on, or to compute the loss of."""
        return self.is_offline and (split == "train" or not self.rewards.names)

    @property
    def generates(self) -> bool:
        """The run has engines of the policy: for samples, or only to evaluate."""
        return not self.is_offline or (self.data.eval is not None and bool(self.rewards.names))

    @property
    def has_reference(self) -> bool:
        """The trainer keeps the initial policy."""
        return bool(self.algorithm.kl_coef > 0) if self.objective == "policy" else self.needs.reference

    @property
    def needs_passes(self) -> bool:
        """Passes of the trainer before the update."""
        return bool(self.algorithm.needs_passes) if self.objective == "policy" else self.needs.reference

    def check_objective(self) -> None:
        """Raises ValueError if other keys contradict the objective."""
        if not self.run.steps and not (self.training.warm_start and self.training.warm_start.steps):
            raise ValueError("run.steps=0 without training.warm_start: nothing is trained; expected at least 1 step")
        if not self.rewards.names and not self.is_offline:
            raise ValueError(
                "rewards: got no reward; expected one or more of rewards.functions, models, judges, http or by_workflow"
            )
        if self.objective != "policy" and self.algorithm.estimator.critic:
            raise ValueError(
                f"objective={self.objective} has no critic; expected another estimator than "
                f"algorithm.adv_estimator={self.algorithm.adv_estimator}"
            )
        if self.algorithm.adv_estimator == "gdpo" and self.rewards.by_workflow:
            raise ValueError(
                f"algorithm.adv_estimator=gdpo normalizes each reward by itself and then needs its weight, which "
                f"rewards.by_workflow={self.rewards.by_workflow} has not; expected another estimator, such as grpo"
            )
        at_one = [j for j in self.rewards.judges if j.mode == "teacher" and j.traits.scores_at_one]
        if at_one and self.generation.temperature != 1:
            raise ValueError(
                f"generation.temperature={self.generation.temperature}: the teacher {at_one[0].name!r} is on "
                f"engine={at_one[0].engine}, which returns logprobs of given tokens at temperature 1 only; expected 1, "
                "or engine=embedded for the teacher"
            )
        if self.objective == "reward_model":
            self._check_reward_model()
        if self.needs.labels and self.preference.pairs == "rollouts":
            raise ValueError(
                f"objective={self.objective} needs labels of the dataset; expected preference.pairs=dataset"
            )
        if self.is_offline and self.sampling.curriculum is not None:
            raise ValueError(
                f"sampling.curriculum needs rewards of the policy's own samples; objective={self.objective} trains on "
                "answers of the dataset"
            )
        if self.is_offline and self.sampling.staleness:
            raise ValueError(
                f"objective={self.objective} trains on answers of the dataset, which have no policy version; expected "
                "sampling.max_staleness=0 and no sampling.surplus=keep"
            )

    def _check_reward_model(self) -> None:
        training, trainer = self.training, self.placement.trainer
        for key, given, expected in (
            ("rewards", bool(self.rewards.names), "none: nothing is generated"),
            ("preference.pairs", self.preference.pairs == "rollouts", "dataset"),
            ("model.lora", self.model.lora is not None, "none: all weights are trained"),
            ("training.warm_start", training.warm_start is not None, "none"),
            ("training.context_parallel", training.context_parallel > 1, "1"),
            ("placement.trainer.tensor_parallel", trainer.tensor_parallel > 1, "1"),
        ):
            if given:
                raise ValueError(f"objective=reward_model: got {key}; expected {expected}")


def with_pair_filter(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The parsed configuration; with pairs of rollouts, groups without a pair are replaced unless it says otherwise.

    Values of a wrong type are unchanged, so that the validation reports them.
    """
    found = dict(tree)
    section, sampling = found.get("preference"), found.get("sampling", {})
    has_pairs = found.get("objective", "policy") not in ("policy", "sft")
    if has_pairs and isinstance(section, dict) and section.get("pairs") == "rollouts" and isinstance(sampling, dict):
        found["sampling"] = {"filter": "spread", **sampling}
    return found
