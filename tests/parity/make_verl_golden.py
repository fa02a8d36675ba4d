r"""Writes verl_golden.json: random batches and what verl computes from them. Run it in an environment of its own:

    python -m venv verlenv
    verlenv/bin/pip install torch==2.13.0
    verlenv/bin/pip install --no-deps verl==0.9.1
    verlenv/bin/pip install "transformers>=5.5.3,<5.11" tensordict==0.10.0 ray==2.60.0 hydra-core \
        omegaconf pandas codetiming
    verlenv/bin/python tests/parity/make_verl_golden.py

The tests (tests/unit/test_advantages.py, test_losses.py, test_preparation.py) read only the file, so verl is not
needed to run them.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import FSDPActorConfig

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LOSSES = ("vanilla", "gspo", "cispo", "sapo", "gpg")
GAE = ((1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0))  # gamma, lambda
TAU = {"tau_pos": 1.3, "tau_neg": 2.1}  # of SAPO
KL = ("k1", "k2", "k3", "k1+", "k3+")
KL_COEF = 0.05
THRESHOLDS = {"truncate": 1.5, "mask": "0.6_1.5"}  # a single bound is TIS, two are IcePop
MAX_RESPONSE_LENGTH = 12  # the divisor of seq-mean-token-sum-norm; wider than any response here


def batch(seed: int, groups: int, siblings: int, width: int) -> dict[str, Any]:
    """Ratios from far below to far above any clip, both signs of advantages, holes in the masks (tool tokens)."""
    rng = np.random.default_rng(seed)
    n = groups * siblings
    old = -rng.exponential(1.5, (n, width))
    log = np.minimum(old + rng.normal(0, 0.6, (n, width)), -1e-3)
    ref = np.minimum(log + rng.normal(0, 0.5, (n, width)), -1e-3)
    lengths = rng.integers(1, width + 1, n)
    mask = np.arange(width) < lengths[:, None]
    holes = rng.random((n, width)) < 0.15
    holes[:, 0] = False  # verl leaves a response without any action out of the mean; G-Core counts it
    later = np.random.default_rng([seed, 1])  # so that older columns stay as they are
    rollout = old + later.normal(0, 0.3, (n, width))
    rollout[0, 0] -= 25  # beyond the bound of e^20
    critic = np.random.default_rng([seed, 2])
    rewards = rng.normal(0.3, 1.0, n).round(3)
    spreadless = rewards.copy()  # the first group has no spread, for GPG; verl counts rewards of 0 instead
    spreadless[:siblings] = 0.0
    return {
        "group": np.repeat(np.arange(groups), siblings).tolist(),
        "rewards": rewards.tolist(),
        "spreadless_rewards": spreadless.tolist(),
        "parts": {"a": critic.normal(0, 3, n).round(3).tolist(), "b": critic.integers(0, 2, n).astype(float).tolist()},
        "weights": {"a": 0.5, "b": 2.0},
        "baselines": np.repeat(critic.normal(0, 1, groups).round(3), siblings).tolist(),
        "values": critic.normal(0.2, 0.6, (n, width)).round(4).tolist(),
        "old_values": critic.normal(0.2, 0.6, (n, width)).round(4).tolist(),
        "returns": critic.normal(0.2, 0.8, (n, width)).round(4).tolist(),
        "lengths": lengths.tolist(),
        "mask": (mask & ~holes).astype(int).tolist(),
        "log_prob": log.round(4).tolist(),
        "old_log_prob": old.round(4).tolist(),
        "ref_log_prob": ref.round(4).tolist(),
        "rollout_log_prob": rollout.round(4).tolist(),
        "advantages": rng.normal(0, 1, n).round(3).tolist(),
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": [3.0, 1.7, 1e9][seed % 3],  # 1e9: dual clip off
        "max_response_length": MAX_RESPONSE_LENGTH,
    }


def answers(b: dict[str, Any]) -> dict[str, Any]:
    mask = torch.tensor(b["mask"], dtype=torch.float64)
    log_prob, old, ref, rollout = (
        torch.tensor(b[k], dtype=torch.float64)
        for k in ("log_prob", "old_log_prob", "ref_log_prob", "rollout_log_prob")
    )
    found: dict[str, Any] = {"advantages": estimates(b, mask, torch.zeros_like(mask))}
    found["low_var_kl"] = core_algos.kl_penalty(log_prob, ref, "low_var_kl").tolist()
    found["kl_in_reward"] = {name: kl_in_reward(b, mask, old, ref, name) for name in ("k1", "k2", "k3")}
    found["importance"] = {
        level: {
            mode: rollout_corr_helper.compute_rollout_correction_weights(old - rollout, mask, level, bounds)[0].tolist()
            for mode, bounds in THRESHOLDS.items()
        }
        for level in ("token", "sequence")
    }
    found["geometric_kept"] = rollout_corr_helper.compute_rollout_rejection_mask(
        rollout - old,
        mask,
        "seq_mean_k1",
        "0.8_1.25",  # its k1 is minus what it is given
    )[0].tolist()
    found["critic"] = critic(b, mask, old, ref)
    advantages = torch.tensor(b["advantages"], dtype=torch.float64)[:, None].expand_as(mask)
    found["losses"] = {
        loss: {mode: policy_loss(b, loss, mode, log_prob, old, advantages, mask) for mode in AGGREGATIONS}
        for loss in LOSSES
    }
    return found


def estimates(b: dict[str, Any], mask: torch.Tensor, penalty: torch.Tensor) -> dict[str, Any]:
    """Advantages of all estimators; each step's reward is less by `penalty`, the last action also has the score."""
    rewards = token_rewards(b["rewards"], mask, penalty)
    index, parts = np.array(b["group"]), {name: np.array(values) for name, values in b["parts"].items()}
    spreadless = token_rewards(b["spreadless_rewards"], mask, torch.zeros_like(mask))
    width = mask.shape[1]
    gdpo = {
        "config": AlgoConfig(gdpo_reward_keys=list(parts), gdpo_reward_weights=[b["weights"][name] for name in parts]),
        "non_tensor_batch": parts,
        "batch": {"prompts": torch.zeros(len(mask), 1), "attention_mask": torch.ones(len(mask), 1 + width).long()},
    }
    found = {
        # its positions of the scores assume that all tokens of a response count; only their sum matters
        "gdpo": core_algos.compute_gdpo_outcome_advantage(rewards, mask, index, **gdpo),
        "opo": core_algos.compute_opo_outcome_advantage(rewards, mask, index),
        "gpg": core_algos.compute_gpg_outcome_advantage(spreadless, mask, index),
        "remax": core_algos.compute_remax_outcome_advantage(
            rewards, torch.tensor(b["baselines"], dtype=torch.float64), mask
        ),
        "grpo": core_algos.compute_grpo_outcome_advantage(rewards, mask, index),
        "dr_grpo": core_algos.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False),
        "rloo": core_algos.compute_rloo_outcome_advantage(rewards, mask, index),
        "reinforce_pp": core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, AlgoConfig(gamma=1.0)),
        "reinforce_pp_discounted": core_algos.compute_reinforce_plus_plus_outcome_advantage(
            rewards, mask, AlgoConfig(gamma=0.9)
        ),
        "reinforce_pp_baseline": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards, mask, index
        ),
    }
    return {name: value[0].tolist() for name, value in found.items()}


def token_rewards(scores: list[float], mask: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Each action is less by its penalty; the last one has the score."""
    rewards = -penalty * mask
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)
    rewards[torch.arange(len(mask)), last] += torch.tensor(scores, dtype=torch.float64)
    return rewards


def critic(b: dict[str, Any], mask: torch.Tensor, old: torch.Tensor, ref: torch.Tensor) -> dict[str, Any]:
    """GAE with and without KL in the reward; the value loss and its gradient."""
    values, before, returns = (torch.tensor(b[k], dtype=torch.float64) for k in ("values", "old_values", "returns"))
    found: dict[str, Any] = {}
    for name, penalty in (("plain", torch.zeros_like(mask)), ("kl", KL_COEF * core_algos.kl_penalty(old, ref, "k1"))):
        rewards = token_rewards(b["rewards"], mask, penalty)
        for gamma, lam in GAE:
            answer = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
            found[f"gae/{name}/{gamma}/{lam}"] = {"advantages": answer[0].tolist(), "returns": answer[1].tolist()}
    for clip in (0.2, 1e9):
        leaf = values.clone().requires_grad_()
        loss, clip_frac = core_algos.compute_value_loss(leaf, returns, before, mask, clip)
        loss.backward()
        found[f"loss/{clip}"] = {"loss": loss.item(), "clip_frac": clip_frac.item(), "gradient": leaf.grad.tolist()}
    return found


def adaptive_kl() -> list[list[float]]:
    """[KL of a step, samples of the step, coefficient afterwards], from 0.1 with a target of 0.05, horizon 1000."""
    controller, rows = core_algos.AdaptiveKLController(0.1, 0.05, 1000), []
    for kl, samples in ((0.2, 64), (0.055, 64), (0.05, 10), (0.01, 512), (0.0, 100)):
        controller.update(kl, samples)
        rows.append([kl, samples, float(controller.value)])
    return rows


def kl_in_reward(b: dict[str, Any], mask: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, name: str) -> Any:
    """As verl's apply_kl_penalty: the reward of each step is less by kl_coef times its KL."""
    return estimates(b, mask, KL_COEF * core_algos.kl_penalty(old, ref, name))


def kl_estimates() -> dict[str, Any]:
    """Values and gradients far beyond every bound."""
    log_prob = torch.tensor([-30.0, -24.0, -6.0, -4.0, -3.0, -1.5, -1.0, -0.5, -0.2], dtype=torch.float64)
    ref = torch.tensor([-0.5, -1.0, -0.1, -1.0, -3.0, -1.4, -2.0, -5.0, -40.0], dtype=torch.float64)
    found: dict[str, Any] = {"log_prob": log_prob.tolist(), "ref_log_prob": ref.tolist()}
    for name in KL:
        leaf = log_prob.clone().requires_grad_()
        value = core_algos.kl_penalty(leaf, ref, name)
        value.sum().backward()
        found[name] = {"value": value.tolist(), "gradient": leaf.grad.tolist()}
    return found


def policy_loss(
    b: dict[str, Any],
    loss: str,
    mode: str,
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, Any]:
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=b["clip_ratio_low"],
        clip_ratio_high=b["clip_ratio_high"],
        clip_ratio_c=b["clip_ratio_c"],
        **TAU,
        global_batch_info={"loss_scale_factor": b["max_response_length"]},
    )
    leaf = log_prob.clone().requires_grad_()
    value, metrics = core_algos.get_policy_loss_fn(loss)(old, leaf, advantages, mask, mode, config)
    value.backward()
    return {
        "loss": value.item(),
        "gradient": leaf.grad.tolist(),
        "clip_frac": metrics.get("actor/pg_clipfrac", 0.0),
        "approx_kl": metrics.get("actor/ppo_kl", 0.0),
    }


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 10) if isinstance(value, float) else value


def main() -> None:
    batches = [batch(seed, *shape) for seed, shape in enumerate([(2, 4, 5), (3, 2, 8), (2, 3, 4)])]
    golden: dict[str, Any] = {"verl": version("verl"), "kl": kl_estimates(), "kl_coef": KL_COEF, **TAU}
    golden["adaptive_kl"] = adaptive_kl()
    golden["cases"] = [{"batch": b, **answers(b)} for b in batches]
    path = Path(__file__).with_name("verl_golden.json")
    path.write_text(json.dumps(rounded(golden)) + "\n")
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
