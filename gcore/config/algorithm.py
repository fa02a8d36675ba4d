"""Section `algorithm`: advantages, loss, importance weights, KL, and presets with the values of papers.

A preset sets the keys that the recipe does not set. It is applied before validation, so `config.yaml` of a run shows
the resulting values. `advice.py` warns where a recipe differs from its preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gcore.config.base import Count, NonNegative, PositiveInt, Section

Preset = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp", "reinforce_pp_baseline", "rloo"]
KlEstimator = Literal["k1", "k2", "k3", "k1+", "k3+"]


@dataclass(frozen=True, slots=True)
class Estimator:
    """What follows the comparison of siblings (preparation/advantages.py), on the trainer ranks."""

    whiten: bool = False  # normalize over all actions of the batch
    per_step: bool = False  # KL in the reward: each step is charged with its KL to come, not with the KL of the sample


ESTIMATORS = {
    "grpo": Estimator(),
    "dr_grpo": Estimator(),
    "rloo": Estimator(),
    "reinforce_pp": Estimator(whiten=True, per_step=True),
    "reinforce_pp_baseline": Estimator(whiten=True),
}


class Algorithm(Section):
    preset: Preset | None = None
    """Sets the keys of this section that the recipe does not set to the values of a paper, see docs/algorithms.md.
    `dapo` also sets `sampling.filter: spread`."""
    adv_estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = "grpo"
    """How advantages are computed from rewards. `grpo`: (reward - mean of the group) / its standard deviation;
    `dr_grpo`: reward - mean of the group; `rloo`: reward - mean of the other siblings; `reinforce_pp`: reward, whitened
    over the batch; `reinforce_pp_baseline`: reward - mean of the group, whitened over the batch."""
    policy_loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """The surrogate loss, see training/losses.py."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """`token_mean`: every token of the global batch weighs the same (DAPO); `sequence_mean`: every sample weighs the
    same (the GRPO paper); `fixed_length`: sum of tokens over samples x max_response_length (Dr.GRPO)."""
    clip_ratio_low: NonNegative = 0.2
    """Lower clipping range of the probability ratio."""
    clip_ratio_high: NonNegative = 0.2
    """Upper clipping range of the probability ratio (0.28 in DAPO's clip-higher)."""
    clip_ratio_dual: float | None = Field(default=None, gt=1)
    """Dual clip: upper bound of the ratio for negative advantages; default: off."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL penalty to the initial policy; above 0, a reference model is loaded."""
    kl_estimator: KlEstimator = "k3"
    """Estimate of the KL per token, with d = log p_policy - log p_reference. `k1`: d; `k2`: d^2 / 2; `k3`: exp(-d) + d
    - 1, at most 10. `k1+` and `k3+` have the value of k1 and k3, and in the loss the gradient of k2, which is the
    gradient of the KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: the KL is a term of the loss, weighted by the importance weights; `reward`: it is subtracted from the
    reward before advantages are computed, with the policy before the update; needs one more forward pass."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    importance: Literal["token", "sequence", "geometric", "none"] = "token"
    """Importance weights p_trainer / p_engine of the sampled tokens: they correct for stale samples and for numerical
    differences of engines. `token`: the ratio of each token; `sequence`: the product of the ratios of a sample,
    unbiased but of high variance; `geometric`: their geometric mean, which is biased but does not depend on the length;
    `none`: no weights."""
    importance_mode: Literal["truncate", "mask"] = "truncate"
    """Treatment of weights outside [`importance_floor`, `importance_cap`]. `truncate`: set to the nearest bound (TIS);
    `mask`: set to 0, so that these tokens or samples do not train (IcePop by token, MIS by sequence)."""
    importance_cap: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of the weights."""
    importance_floor: NonNegative = 0.0
    """Lower bound of the weights; 0: none. IcePop: `importance_mode: mask`, 0.5 and `importance_cap: 5`."""
    overlong_buffer: Count = 0
    """Soft overlong penalty (DAPO): the reward falls linearly over the last `overlong_buffer` tokens before
    `generation.max_response_length`; 0: off. Applied after `sampling.filter`."""
    overlong_penalty: NonNegative = 1.0
    """Penalty of a response of full length, see `overlong_buffer`."""
    mask_truncated: bool = False
    """Overlong filtering: samples cut at the length limit do not count in the loss. Their rewards still count in
    their group's mean and standard deviation."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per training step; must not exceed `sampling.prompts_per_step`."""

    @property
    def needs_old_logprobs(self) -> bool:
        """Needs a separate pass for the logprobs of the policy before the update."""
        return self.mini_batches > 1 or self.kl_in_reward

    @property
    def needs_logprobs(self) -> bool:
        """Needs old or reference logprobs. With one mini-batch and no KL, the update's forward pass is enough."""
        return self.needs_old_logprobs or self.kl_coef > 0

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def kl_per_step(self) -> bool:
        """The KL in the reward is charged to each step. Otherwise to the sample, before siblings are compared."""
        return self.kl_in_reward and self.estimator.per_step

    @property
    def estimator(self) -> Estimator:
        return ESTIMATORS[self.adv_estimator]

    @model_validator(mode="after")
    def _bounds(self) -> Algorithm:
        if self.importance_floor >= self.importance_cap:
            raise ValueError(
                f"importance_floor={self.importance_floor} must be below importance_cap={self.importance_cap}"
            )
        return self


_GROUPS = {"adv_estimator": "grpo", "kl_coef": 0.0}
_PPO = {"policy_loss": "ppo", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        **_PPO,
        "adv_estimator": "grpo",
        "loss_aggregation": "sequence_mean",
        **{"kl_coef": 0.04, "kl_estimator": "k3", "kl_in": "loss"},
    },
    "dr_grpo": {**_PPO, "adv_estimator": "dr_grpo", "loss_aggregation": "fixed_length", "kl_coef": 0.0},
    "dapo": {
        **_PPO,
        **_GROUPS,
        "loss_aggregation": "token_mean",
        "clip_ratio_high": 0.28,
        "overlong_penalty": 1.0,
        "mask_truncated": False,
    },
    "gspo": {
        **_GROUPS,
        "policy_loss": "gspo",
        "loss_aggregation": "sequence_mean",
        **{"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    },
    "cispo": {
        **_GROUPS,
        "policy_loss": "cispo",
        "loss_aggregation": "token_mean",
        **{"clip_ratio_low": 1.0, "clip_ratio_high": 4.0},  # the ratio has no lower bound and is at most 5
    },
    "reinforce_pp": {
        **_PPO,
        "adv_estimator": "reinforce_pp",
        "loss_aggregation": "token_mean",
        **{"kl_coef": 0.001, "kl_estimator": "k1", "kl_in": "reward"},
    },
    "reinforce_pp_baseline": {
        **_PPO,
        "adv_estimator": "reinforce_pp_baseline",
        "loss_aggregation": "token_mean",
        **{"kl_coef": 0.001, "kl_estimator": "k2", "kl_in": "loss"},
    },
    "rloo": {
        **_PPO,
        "adv_estimator": "rloo",
        "loss_aggregation": "fixed_length",
        **{"kl_coef": 0.05, "kl_estimator": "k1", "kl_in": "reward"},
    },
}
OVERLONG_SHARE = 5  # DAPO: a buffer of 4,096 for responses of 20,480 tokens


def preset_values(preset: str, max_response_length: int) -> dict[str, dict[str, Any]]:
    """The keys that a preset sets, by section: {"algorithm": {...}, "sampling": {...}}."""
    algorithm = dict(PRESETS[preset])
    if preset != "dapo":
        return {"algorithm": algorithm}
    algorithm["overlong_buffer"] = max_response_length // OVERLONG_SHARE
    return {"algorithm": algorithm, "sampling": {"filter": "spread"}}


def with_preset(tree: Mapping[str, Any], max_response_length: int) -> dict[str, Any]:
    """The parsed configuration plus the keys of its preset. `max_response_length`: used if the key is not set.

    Values of a wrong type are unchanged, so that the validation reports them.
    """
    found = dict(tree)
    algorithm, generation = (found.get(name) for name in ("algorithm", "generation"))
    preset = algorithm.get("preset") if isinstance(algorithm, dict) else None
    if not isinstance(preset, str) or preset not in PRESETS:
        return found
    length = generation.get("max_response_length") if isinstance(generation, dict) else None
    for name, values in preset_values(preset, length if isinstance(length, int) else max_response_length).items():
        given = found.get(name, {})
        if isinstance(given, dict):
            found[name] = {**values, **given}
    return found
