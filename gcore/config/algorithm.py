"""Section `algorithm`: advantages, loss, importance weights, KL.

`algorithm.preset` sets the keys of a paper that the recipe does not set: presets.py. It is applied before validation,
so `config.yaml` of a run shows the resulting values. `advice.py` warns where a recipe differs from its preset.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from gcore.config.base import Count, Fraction, NonNegative, PositiveInt, Section
from gcore.config.presets import Preset

KlEstimator = Literal["k1", "k2", "k3", "k1+", "k3+", "exact", "velocity"]
Positive = Annotated[float, Field(gt=0)]
LOSSES = ("ppo", "gspo", "cispo", "sapo", "reinforce")


@dataclass(frozen=True, slots=True)
class EstimatorNeeds:
    """What an estimator needs, beside its function of a group (preparation/advantages.py)."""

    siblings: bool = True  # compares the samples of a prompt: at least 2
    greedy: bool = False  # needs the reward of a greedy response to each prompt
    # What follows on the trainer ranks (training/step_advantages.py):
    whiten: bool = False  # normalize over all steps of the batch that are trained
    step_rewards: bool = False  # each step has its reward: the last one the score of the sample, and each its own KL
    critic: bool = False  # generalized advantage estimation, with a value network
    rescale: bool = False  # times (samples of the batch) / (samples with an advantage other than 0)


ESTIMATORS = {
    "grpo": EstimatorNeeds(),
    "dr_grpo": EstimatorNeeds(),
    "rloo": EstimatorNeeds(),
    "opo": EstimatorNeeds(),
    "gpg": EstimatorNeeds(rescale=True),
    "gdpo": EstimatorNeeds(whiten=True),
    "reinforce_pp": EstimatorNeeds(siblings=False, whiten=True, step_rewards=True),
    "reinforce_pp_baseline": EstimatorNeeds(whiten=True),
    "remax": EstimatorNeeds(siblings=False, greedy=True, step_rewards=True),
    "gae": EstimatorNeeds(siblings=False, whiten=True, step_rewards=True, critic=True),
}
OWN_ESTIMATOR = EstimatorNeeds(siblings=False)  # of a user's function


def _one_of(names: Collection[str]) -> AfterValidator:
    """A name of a table, or the path of a user's function."""

    def check(name: str) -> str:
        if name in names or ":" in name:
            return name
        near = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"got {name!r}; expected one of {', '.join(names)}, or file.py:function{hint}")

    return AfterValidator(check)


class AdaptiveKl(Section):
    """1909.08593: after each step `kl_coef` grows if the mean KL per token is above the target, and shrinks if it is
    below."""

    target: Positive
    """Mean KL per token."""
    horizon: PositiveInt = 10_000
    """Samples in which `kl_coef` changes by at most 20 %."""


class AdaptiveEntropy(Section):
    """2505.22312: after each step `entropy_coef` grows if the mean entropy per token is below the target, else it
    shrinks, to 0 at least. There is no bonus in a step after one whose entropy was above the target."""

    target: Positive
    """Mean entropy per token."""
    change: Positive = 0.005
    """Change of `entropy_coef` per step."""


class ImportanceWeights(Section):
    level: Literal["token", "sequence", "geometric", "none"] = "token"
    """`token`: the ratio of each token; `sequence`: the product of the ratios of a sample, unbiased but of high
    variance; `geometric`: their geometric mean, which is biased but does not depend on the length; `none`: no
    weights."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Treatment of weights outside [`floor`, `cap`]. `truncate`: set to the nearest bound (TIS); `mask`: set to 0, so
    that these tokens or samples do not train (IcePop by token, MIS by sequence)."""
    cap: Positive = 2.0
    """Upper bound of the weights."""
    floor: NonNegative = 0.0
    """Lower bound of the weights; 0: none. IcePop: `mode: mask`, 0.5 and `cap: 5`."""

    @model_validator(mode="after")
    def _bounds(self) -> ImportanceWeights:
        if self.floor >= self.cap:
            raise ValueError(f"floor={self.floor} must be below cap={self.cap}")
        return self


class Overlong(Section):
    buffer: Count = 0
    """Soft penalty (DAPO): the reward falls linearly over the last `buffer` tokens before
    `generation.max_response_length`; 0: off. Applied after `sampling.filter`."""
    penalty: NonNegative = 1.0
    """Penalty of a response of full length."""
    mask: bool = False
    """Overlong filtering: samples cut at the length limit do not count in the loss. Their rewards still count in
    their group's mean and standard deviation."""


class Algorithm(Section):
    preset: Preset | None = None
    """Sets the keys of this section that the recipe does not set to the values of a paper, see docs/algorithms.md.
    `dapo` also sets `sampling.filter: spread`."""
    adv_estimator: Annotated[str, _one_of(ESTIMATORS)] = "grpo"
    """How advantages are computed from rewards. `grpo`: (reward - mean of the group) / its standard deviation;
    `dr_grpo`: reward - mean of the group; `rloo`: reward - mean of the other siblings; `opo`: reward - mean weighted by
    length; `gpg`: as `dr_grpo`, scaled up for groups without a spread; `gdpo`: each reward of the recipe
    normalized as in `grpo`, then their weighted sum, whitened over the batch; `reinforce_pp`: reward, whitened over the
    batch; `reinforce_pp_baseline`: reward - mean of the group, whitened over the batch; `remax`: reward - reward of a
    greedy response; `gae`: generalized advantage estimation with a value network (PPO), see `critic`. Or a function of
    yours, `file.py:f` or `package.module:f`, see docs/algorithms.md."""
    policy_loss: Annotated[str, _one_of(LOSSES)] = "ppo"
    """The surrogate loss: `ppo`, `gspo`, `cispo`, `sapo` or `reinforce`, see docs/algorithms.md. Or a function of
    yours, `file.py:f` or `package.module:f`."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """`token_mean`: every token of the global batch weighs the same (DAPO); `sequence_mean`: every sample weighs the
    same (the GRPO paper); `fixed_length`: sum of tokens over samples x max_response_length (Dr.GRPO)."""
    clip_ratio_low: NonNegative = 0.2
    """Lower clipping range of the probability ratio."""
    clip_ratio_high: NonNegative = 0.2
    """Upper clipping range of the probability ratio (0.28 in DAPO's clip-higher)."""
    clip_ratio_dual: float | None = Field(default=None, gt=1)
    """Dual clip: upper bound of the ratio for negative advantages; default: off."""
    sapo_tau: tuple[Positive, Positive] = (1.0, 1.05)
    """`sapo`: steepness of the soft gate for positive and for negative advantages."""
    gamma: Fraction = 1.0
    """Discount per step. Only for estimators with rewards per step: `gae`, `reinforce_pp` and `remax`."""
    gae_lambda: Fraction = 0.95
    """`gae`: 1 uses the whole return of a sample (high variance), 0 only the next value (biased)."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL penalty to the initial policy; above 0, a reference model is loaded."""
    kl_estimator: KlEstimator = "k3"
    """Estimate of the KL per token, with d = log p_policy - log p_reference. `k1`: d; `k2`: d^2 / 2; `k3`: exp(-d) + d
    - 1, at most 10. `k1+` and `k3+` have the value of k1 and k3, and in the loss the gradient of k2, which is the
    gradient of the KL. Diffusion models have two more, see docs/diffusion.md. `exact`: the KL of the two Gaussians of a
    step; `velocity`: half the squared difference of the two predictions."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: the KL is a term of the loss, weighted by the importance weights; `reward`: it is subtracted from the
    reward before advantages are computed, with the policy before the update; needs one more forward pass."""
    adaptive_kl: AdaptiveKl | None = None
    """Change `kl_coef`, which is its start, during the run. Default: fixed."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    adaptive_entropy: AdaptiveEntropy | None = None
    """Change `entropy_coef` during the run. Default: fixed."""
    importance: ImportanceWeights = ImportanceWeights()
    """Importance weights p_trainer / p_engine of the sampled tokens: they correct for stale samples and for numerical
    differences of engines."""
    overlong: Overlong = Overlong()
    """Responses near or at the length limit."""
    mini_batches: PositiveInt = 1
    """Mini-batches per training step; must not exceed `sampling.prompts_per_step`. Each one is an optimizer step."""
    epochs: PositiveInt = 1
    """Times that a training step passes over its mini-batches: `mini_batches` x `epochs` optimizer steps."""
    early_stop_kl: Positive | None = None
    """Stop the updates of the policy in a training step when the KL between the policy before the step and the current
    one, measured on a mini-batch before its update, is above this value. Default: never."""

    @property
    def needs_old_logprobs(self) -> bool:
        """Needs a separate pass for the logprobs of the policy before the update."""
        return self.mini_batches * self.epochs > 1 or self.kl_in_reward

    @property
    def needs_passes(self) -> bool:
        """Needs old or reference logprobs, or values. With one mini-batch, no KL and no critic, the update's forward
        pass is enough."""
        return self.needs_old_logprobs or self.kl_coef > 0 or self.estimator.critic

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def kl_of_gaussians(self) -> bool:
        """The KL is computed from the predictions of both networks, not estimated from logprobs."""
        return self.kl_estimator in ("exact", "velocity")

    @property
    def kl_per_step(self) -> bool:
        """The KL in the reward is charged to each step. Otherwise to the sample, before siblings are compared."""
        return self.kl_in_reward and self.estimator.step_rewards

    @property
    def estimator(self) -> EstimatorNeeds:
        return ESTIMATORS.get(self.adv_estimator, OWN_ESTIMATOR)

    @model_validator(mode="after")
    def _adapts(self) -> Algorithm:
        if self.adaptive_kl is not None and self.kl_coef == 0:
            raise ValueError("adaptive_kl changes kl_coef, which is 0; expected kl_coef above 0, its start")
        return self
