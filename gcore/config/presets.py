"""The algorithms of papers, as one table: each entry names its paper and the keys of `algorithm` that the paper uses.

    algorithm: {preset: NAME}  ──implied──>  the keys of the entry  ──filled──>  those that the recipe does not set

The formulas are in preparation/advantages.py and training/step_advantages.py (estimators) and training/objective.py
(losses). docs/algorithms.md explains the entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

OVERLONG_SHARE = 5  # DAPO: a buffer of 4,096 for responses of 20,480 tokens


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry("DAPO", "2503.14476", {"adv_estimator": "grpo", "clip_ratio_high": 0.28, ...})"""

    title: str
    paper: str  # number on arXiv
    keys: Mapping[str, Any]


def _keys(
    estimator: str,
    loss: str,
    aggregation: str,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: tuple[float, str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    return {
        "adv_estimator": estimator,
        "policy_loss": loss,
        "loss_aggregation": aggregation,
        "clip_ratio_low": clip[0],
        "clip_ratio_high": clip[1],
        **({"kl_coef": 0.0} if kl is None else dict(zip(("kl_coef", "kl_estimator", "kl_in"), kl, strict=True))),
        **more,
    }


ALGORITHMS: dict[str, Entry] = {
    "grpo": Entry("GRPO", "2402.03300", _keys("grpo", "ppo", "sequence_mean", kl=(0.04, "k3", "loss"))),
    "dr_grpo": Entry("Dr.GRPO", "2503.20783", _keys("dr_grpo", "ppo", "fixed_length")),
    "dapo": Entry(
        "DAPO",
        "2503.14476",
        _keys("grpo", "ppo", "token_mean", (0.2, 0.28), overlong={"penalty": 1.0, "mask": False}),
    ),
    "gspo": Entry("GSPO", "2507.18071", _keys("grpo", "gspo", "sequence_mean", (3e-4, 4e-4))),
    # the ratio has no lower bound and is at most 5
    "cispo": Entry("CISPO", "2506.13585", _keys("grpo", "cispo", "token_mean", (1.0, 4.0))),
    "sapo": Entry("SAPO", "2511.20347", _keys("grpo", "sapo", "sequence_mean", sapo_tau=(1.0, 1.05))),
    "gdpo": Entry("GDPO", "2601.05242", _keys("gdpo", "ppo", "token_mean")),
    "opo": Entry("OPO", "2505.23585", _keys("opo", "reinforce", "fixed_length", entropy_coef=0.0)),
    "gpg": Entry("GPG", "2504.02546", _keys("gpg", "reinforce", "token_mean")),
    "rloo": Entry("RLOO", "2402.14740", _keys("rloo", "ppo", "fixed_length", kl=(0.05, "k1", "reward"))),
    "reinforce_pp": Entry(
        "REINFORCE++", "2501.03262", _keys("reinforce_pp", "ppo", "token_mean", kl=(0.001, "k1", "reward"))
    ),
    "reinforce_pp_baseline": Entry(
        "REINFORCE++ baseline",
        "2501.03262",
        _keys("reinforce_pp_baseline", "ppo", "token_mean", kl=(0.001, "k2", "loss")),
    ),
    "remax": Entry("ReMax", "2310.10505", _keys("remax", "reinforce", "fixed_length", kl=(0.001, "k1", "reward"))),
    "ppo": Entry(
        "PPO",
        "1707.06347",
        _keys("gae", "ppo", "token_mean", kl=(0.02, "k1", "reward"), gamma=1.0, gae_lambda=0.95),
    ),
}
if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(ALGORITHMS)]


def preset_values(preset: str, max_response_length: int) -> dict[str, dict[str, Any]]:
    """The keys that a preset sets, by section: {"algorithm": {...}, "sampling": {...}}."""
    algorithm = dict(ALGORITHMS[preset].keys)
    if preset != "dapo":
        return {"algorithm": algorithm}
    algorithm["overlong"] = {"buffer": max_response_length // OVERLONG_SHARE, **algorithm["overlong"]}
    return {"algorithm": algorithm, "sampling": {"filter": "spread"}}


def implied_by_preset(tree: Mapping[str, Any], max_response_length: int) -> Mapping[str, Any]:
    """What the preset of a parsed recipe sets. `max_response_length`: if the recipe does not say it."""
    match tree:
        case {"algorithm": {"preset": str() as preset}} if preset in ALGORITHMS:
            match tree:
                case {"generation": {"max_response_length": int() as length}}:
                    return preset_values(preset, length)
            return preset_values(preset, max_response_length)
    return {}
