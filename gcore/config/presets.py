"""The algorithms of papers, as one table: each row has the keys of `algorithm` that a paper uses,
and its number on arXiv.

    algorithm: {preset: NAME}  ──implied──>  the keys of the row  ──filled──>  those that the recipe does not set

The formulas are in preparation/advantages.py and training/step_advantages.py (estimators) and training/objective.py
(losses). docs/algorithms.md explains the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

OVERLONG_SHARE = 5  # DAPO: a buffer of 4,096 for responses of 20,480 tokens


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


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": _keys("grpo", "ppo", "sequence_mean", kl=(0.04, "k3", "loss")),  # 2402.03300
    "dr_grpo": _keys("dr_grpo", "ppo", "fixed_length"),  # 2503.20783
    "dapo": _keys("grpo", "ppo", "token_mean", (0.2, 0.28), overlong={"penalty": 1.0, "mask": False}),  # 2503.14476
    "gspo": _keys("grpo", "gspo", "sequence_mean", (3e-4, 4e-4)),  # 2507.18071
    "cispo": _keys("grpo", "cispo", "token_mean", (1.0, 4.0)),  # 2506.13585; no lower bound, the ratio is at most 5
    "sapo": _keys("grpo", "sapo", "sequence_mean", sapo_tau=(1.0, 1.05)),  # 2511.20347
    "gdpo": _keys("gdpo", "ppo", "token_mean"),  # 2601.05242
    "opo": _keys("opo", "reinforce", "fixed_length", entropy_coef=0.0),  # 2505.23585
    "gpg": _keys("gpg", "reinforce", "token_mean"),  # 2504.02546
    "rloo": _keys("rloo", "ppo", "fixed_length", kl=(0.05, "k1", "reward")),  # 2402.14740
    "reinforce_pp": _keys("reinforce_pp", "ppo", "token_mean", kl=(0.001, "k1", "reward")),  # 2501.03262
    "reinforce_pp_baseline": _keys("reinforce_pp_baseline", "ppo", "token_mean", kl=(0.001, "k2", "loss")),  # the same
    "remax": _keys("remax", "reinforce", "fixed_length", kl=(0.001, "k1", "reward")),  # 2310.10505
    "ppo": _keys("gae", "ppo", "token_mean", kl=(0.02, "k1", "reward"), gamma=1.0, gae_lambda=0.95),  # 1707.06347
}
if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(ALGORITHMS)]


def preset_values(preset: str, max_response_length: int) -> dict[str, dict[str, Any]]:
    """The keys that a preset sets, by section: {"algorithm": {...}, "sampling": {...}}."""
    algorithm = dict(ALGORITHMS[preset])
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
