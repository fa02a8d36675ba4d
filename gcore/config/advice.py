"""Warnings for valid settings that contradict each other or the recipe's preset. Pure function: config -> lines.

Shown when a run starts and by `--dry-run`. The validators reject settings that cannot work.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

from gcore.config.algorithm import Algorithm
from gcore.config.base import Section
from gcore.config.engines import engines_with
from gcore.config.leaves import leaves_of
from gcore.config.presets import preset_values
from gcore.config.tree import Config

SMALL_CLIP, LARGE_CLIP = 0.01, 0.05  # ratios of whole samples are clipped at about 4e-4, those of tokens at 0.2


def warnings(config: Config) -> list[str]:
    """One line per contradiction."""
    algorithm = config.algorithm
    return [
        *_departures(config),
        *_loss(algorithm),
        *_kl(algorithm),
        *_samples(config),
        *_unused(config),
        *_reachable(config),
    ]


def _changed(section: Section, *names: str) -> list[str]:
    """The keys with other values than the defaults, of `names` or of all: a saved configuration contains every key."""
    fields = type(section).model_fields
    return sorted(n for n in names or fields if getattr(section, n) != fields[n].get_default(call_default_factory=True))


def _departures(config: Config) -> Iterator[str]:
    preset = config.algorithm.preset
    if preset is None:
        return
    own = config.model_dump()
    for key, value in leaves_of(preset_values(preset, config.generation.max_response_length)):
        got = functools.reduce(operator.getitem, key.split("."), own)
        if got != value:
            yield f"{key}={got} differs from algorithm.preset={preset} ({value}); {got} is used"


def _loss(algorithm: Algorithm) -> Iterator[str]:
    loss, clip = algorithm.policy_loss, max(algorithm.clip_ratio_low, algorithm.clip_ratio_high)
    if loss == "gspo" and algorithm.loss_aggregation != "sequence_mean":
        yield (
            f"algorithm.policy_loss=gspo has one ratio per sample, but loss_aggregation={algorithm.loss_aggregation} "
            "weighs samples by their length; GSPO uses sequence_mean"
        )
    if loss == "gspo" and clip > LARGE_CLIP:
        yield (
            f"algorithm.policy_loss=gspo with clip_ratio_low={algorithm.clip_ratio_low}, clip_ratio_high="
            f"{algorithm.clip_ratio_high}: the ratio of a whole sample rarely reaches these bounds, so clipping has "
            "almost no effect; GSPO uses 3e-4 and 4e-4"
        )
    if loss == "ppo" and clip < SMALL_CLIP:
        yield (
            f"algorithm.policy_loss=ppo with clip_ratio_low={algorithm.clip_ratio_low}, clip_ratio_high="
            f"{algorithm.clip_ratio_high} clips nearly every token; such small ranges are for policy_loss=gspo"
        )
    if loss in ("gspo", "cispo", "sapo") and algorithm.mini_batches * algorithm.epochs == 1:
        yield (
            f"algorithm.policy_loss={loss} with mini_batches=1: with one update per step all ratios are 1, so the "
            "gradient is the same as with policy_loss=ppo"
        )
    if loss == "reinforce" and algorithm.mini_batches * algorithm.epochs > 1:
        yield (
            f"algorithm.policy_loss=reinforce with {algorithm.mini_batches * algorithm.epochs} updates per step: it "
            "has no ratio, so later updates train as if the current policy had sampled; use policy_loss=ppo"
        )
    if algorithm.adv_estimator == "dr_grpo" and algorithm.loss_aggregation == "sequence_mean":
        yield (
            "algorithm.adv_estimator=dr_grpo with loss_aggregation=sequence_mean: dividing by the length of each "
            "sample favours short correct and long wrong answers; Dr.GRPO uses fixed_length"
        )


def _kl(algorithm: Algorithm) -> Iterator[str]:
    estimator = algorithm.kl_estimator
    if algorithm.kl_coef == 0:
        return
    if algorithm.kl_in == "loss" and estimator == "k1":
        yield (
            "algorithm.kl_estimator=k1 with kl_in=loss: its gradient is 0 on average, so it does not keep the policy "
            "near the reference; use k2, k1+ or k3+, or kl_in=reward"
        )
    if algorithm.kl_in == "reward" and estimator.endswith("+"):
        yield (
            f"algorithm.kl_estimator={estimator} with kl_in=reward: a reward has no gradient, so this is "
            f"{estimator.removesuffix('+')}"
        )
    if algorithm.kl_in == "reward" and algorithm.adv_estimator == "grpo":
        yield (
            "algorithm.kl_in=reward with adv_estimator=grpo: if all rewards of a group are equal, the KL is divided by "
            "its own standard deviation, so kl_coef has no effect; use kl_in=loss, or another adv_estimator"
        )


def _unused(config: Config) -> Iterator[str]:
    """Keys that the objective, the estimator or the loss does not read."""
    algorithm, is_policy, critic = config.algorithm, config.objective == "policy", config.algorithm.estimator.critic
    estimator, loss = f"algorithm.adv_estimator={algorithm.adv_estimator}", algorithm.policy_loss
    unread = algorithm.model_copy(update={"overlong": algorithm.overlong.model_copy(update={"mask": False})})
    others = [name for name in _changed(unread) if name not in ("preset", "mini_batches")]
    kl_keys = [] if algorithm.preset else _changed(algorithm, "kl_estimator", "kl_in")
    for has_no_effect, section, names, cause in (
        (not critic, "critic", _changed(config.critic), f"{estimator}; gae has a critic"),
        (not critic, "placement.critic", _changed(config.placement.critic, "ranks"), f"{estimator}; gae has a critic"),
        (not is_policy, "algorithm", others, f"objective={config.objective}"),
        (is_policy, "preference", _changed(config.preference), "objective=policy"),
        (is_policy and algorithm.kl_coef == 0, "algorithm", kl_keys, "algorithm.kl_coef=0"),
        (is_policy and not algorithm.estimator.step_rewards, "algorithm", _changed(algorithm, "gamma"), estimator),
        (is_policy and not critic, "algorithm", _changed(algorithm, "gae_lambda"), estimator),
        (
            is_policy and algorithm.mini_batches * algorithm.epochs == 1,
            *("algorithm", _changed(algorithm, "early_stop_kl"), "one update per step"),
        ),
        (
            is_policy and loss in ("cispo", "sapo", "reinforce"),
            *("algorithm", _changed(algorithm, "clip_ratio_dual"), f"policy_loss={loss}"),
        ),
    ):
        if has_no_effect and names:
            yield f"{section}.{' and '.join(names)}: no effect with {cause}"


def _reachable(config: Config) -> Iterator[str]:
    endpoint = config.endpoint
    if not endpoint.is_local and endpoint.tls_certificate is None:
        yield (
            f"endpoint.host={endpoint.host} without endpoint.tls_certificate: prompts, responses and the tokens of "
            "sessions cross the network unencrypted"
        )


def _samples(config: Config) -> Iterator[str]:
    algorithm, generation = config.algorithm, config.generation
    if generation.temperature == 0 and config.objective == "policy" and algorithm.estimator.siblings:
        yield (
            "generation.temperature=0: all siblings of a group are the same response, so no group has an advantage; "
            "use temperature=1"
        )
    if config.sampling.prefers_short:
        yield (
            "sampling.deterministic=false with surplus=abort prefers short responses: those that finish first are "
            "trained on, the others are discarded; use surplus=keep (docs/sampling.md), and watch rollout/length_bias"
        )
    if algorithm.importance.level == "none" and config.sampling.staleness:
        yield (
            f"algorithm.importance.level=none with samples up to {config.sampling.staleness} version(s) old "
            "(sampling.max_staleness, sampling.surplus): they train as if the current policy had sampled them"
        )
    if algorithm.overlong.mask and algorithm.overlong.buffer:
        yield (
            "algorithm.overlong.mask=true with overlong.buffer > 0: samples of full length get a penalty in their "
            "group, but do not train; DAPO uses only one of the two"
        )
    is_truncated = (generation.top_p < 1 or generation.top_k > 0) and generation.temperature > 0
    if is_truncated and not generation.keep_sampling_mask:
        yield (
            f"generation.top_p={generation.top_p}, top_k={generation.top_k}: importance weights compare full "
            "distributions and do not correct for tokens that are never sampled; use top_p=1 and top_k=0, or "
            f"keep_sampling_mask=true with engine={engines_with('sampling_mask')}"
        )
