"""Runs of the algorithms that change more than a formula: a critic, greedy baselines, and code of the user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.helpers import gcore, rows, steps, train, untimed, write_recipe

LOCAL = ("runtime=local", "run.steps=2", "data.eval=null", "training.warm_start.steps=2")
MINE = """
def advantages(group):
    return group.rewards - group.rewards.max(), {"best": group.rewards.max()}


def loss(steps, algorithm):
    return -steps.advantages_S * steps.logprobs_S, {"magnitude": steps.advantages_S.abs()}
"""


def test_ppo_resumes_to_the_last_bit(tmp_path: Path):
    """Critic, reference and the adapted coefficient are in the checkpoint."""
    ppo = (
        "algorithm.preset=ppo",
        "algorithm.epochs=2",
        "algorithm.adaptive_kl.target=0.001",
        "algorithm.adaptive_kl.horizon=100",
    )
    whole = steps(train(tmp_path, "whole", *LOCAL, *ppo, "run.steps=3", "critic.lr=1e-3"))
    train(tmp_path, "parts", *LOCAL, *ppo, "run.steps=2", "critic.lr=1e-3")
    parts = steps(train(tmp_path, "parts", *LOCAL, *ppo, "run.steps=3", "critic.lr=1e-3", "run.resume=auto"))
    assert [untimed(row) for row in parts] == [untimed(row) for row in whole]
    last = whole[-1]
    assert last["critic/loss"] > 0 and last["actor/kl_coef"] != whole[0]["actor/kl_coef"]
    checkpoint = tmp_path / "runs" / "parts" / "step_3"
    assert (checkpoint / "critic").is_dir() and (checkpoint / "critic_optimizer").is_dir()
    assert json.loads((checkpoint / "trainer.json").read_text())["counters"]["critic_updates"] == 6
    # another algorithm on this checkpoint is refused: its results would not be those of one run
    done = gcore("train", str(write_recipe(tmp_path)), "run.name=parts", *LOCAL, "run.steps=4", "run.resume=auto")
    assert done.returncode == 2 and "algorithm.adv_estimator: gae -> grpo" in done.stderr


@pytest.mark.release
@pytest.mark.parametrize("lora", [(), ("model.lora.rank=4",)], ids=["whole", "lora"])
def test_ppo_under_ray(tmp_path: Path, lora: tuple[str, ...]):
    """Two controllers and two trainer ranks, which share the critic, compute what one process does."""
    ppo = ("algorithm.preset=ppo", "critic.lr=1e-3", "data.eval=null", "run.steps=2", "training.warm_start.steps=2")
    one = steps(train(tmp_path, "one", "runtime=local", "controllers=1", *ppo, *lora))
    ranks = ("placement.policy.replicas=1", "placement.trainer.ranks=2", "placement.trainer.shard=2")
    found = steps(train(tmp_path, "ray", "controllers=2", *ranks, *ppo, *lora))
    for a, b in zip(found, one, strict=True):
        assert a["samples_digest"] == b["samples_digest"]
        for name in ("actor/loss", "critic/loss", "critic/value_mean", "actor/kl"):
            assert a[name] == pytest.approx(b[name], abs=1e-5), name


def test_remax_compares_with_a_greedy_response(tmp_path: Path):
    found = steps(train(tmp_path, "remax", *LOCAL, "algorithm.preset=remax", "sampling.samples_per_prompt=1"))
    assert [row["batch/samples"] for row in found] == [12, 12]  # the greedy responses do not train
    assert all(row["actor/kl"] is not None for row in found)


def test_an_estimator_and_a_loss_of_the_user(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    own = (f"algorithm.adv_estimator={file}:advantages", f"algorithm.policy_loss={file}:loss")
    found = steps(train(tmp_path, "mine", *LOCAL, *own))
    for row in found:
        assert 0 <= row["advantages/best"] <= 1 and "actor/clip_frac" not in row
        assert row["actor/magnitude"] == pytest.approx(row["advantages/best"] - row["reward/mean"], abs=0.2)
    assert rows(tmp_path / "runs" / "mine")
    file.write_text("def advantages(a, b):\n    return a\n")
    done = gcore("train", str(write_recipe(tmp_path)), "run.name=bad", *LOCAL, own[0].replace("mine", "other"))
    assert done.returncode == 2 and "algorithm.adv_estimator: no such file" in done.stderr


# ---- a critic with ranks of its own ---------------------------------------------------------------------------------

PPO = ("algorithm.preset=ppo", "critic.lr=1e-3", "algorithm.epochs=2", "algorithm.adaptive_kl.target=0.001")
OWN = "placement.critic.ranks=1"


def test_a_critic_on_its_own_rank_computes_the_same(tmp_path: Path):
    """To the last bit, with a KL in the reward whose coefficient changes."""
    on_trainer = steps(train(tmp_path, "on_trainer", *LOCAL, *PPO, "algorithm.adaptive_kl.horizon=100"))
    apart = steps(train(tmp_path, "apart", *LOCAL, *PPO, "algorithm.adaptive_kl.horizon=100", OWN))
    assert [untimed(row) for row in apart] == [untimed(row) for row in on_trainer]
    assert on_trainer[-1]["critic/loss"] > 0 and on_trainer[0]["actor/kl_coef"] != on_trainer[1]["actor/kl_coef"]
    for a, b in zip(apart, on_trainer, strict=True):  # each sample is sent twice; then values and penalties
        assert a["link/samples_within_mb"] > 2 * b["link/samples_within_mb"]


def test_checkpoints_do_not_depend_on_where_the_critic_is(tmp_path: Path):
    """A run continues with the critic on the trainer ranks, and one that had it there with the critic apart."""
    whole = steps(train(tmp_path, "whole", *LOCAL, *PPO, "run.steps=3"))
    for name, first, then in (("out", (), (OWN,)), ("back", (OWN,), ())):
        train(tmp_path, name, *LOCAL, *PPO, *first)
        warm = tmp_path / "runs" / name / "warm_2"  # before there is a critic
        assert (warm / "weights").is_dir() and not list(warm.glob("critic*"))
        found = steps(train(tmp_path, name, *LOCAL, *PPO, "run.steps=3", "run.resume=auto", *then))
        assert [untimed(row) for row in found] == [untimed(row) for row in whole]
        step_2 = tmp_path / "runs" / name / "step_2"
        about = step_2 / ("critic.json" if first else "trainer.json")
        assert json.loads(about.read_text())["counters"]["critic_updates"] == 4
        assert (step_2 / "critic").is_dir() and (step_2 / "critic_optimizer").is_dir()


@pytest.mark.release
@pytest.mark.parametrize("start", [(), ("model.lora.rank=4",)], ids=["copy of the policy", "from its folder"])
@pytest.mark.parametrize("critics", [1, 2])
def test_critic_ranks_under_ray(tmp_path: Path, critics: int, start: tuple[str, ...]):
    """Two controllers, two trainer ranks in a tensor-parallel group, and critic ranks that share one copy."""
    ppo = (*PPO, "data.eval=null", "run.steps=2", "training.warm_start.steps=2", "model.build.kv_heads=2", *start)
    one = steps(train(tmp_path, "one", "runtime=local", "controllers=1", *ppo))
    ranks = ("placement.policy.replicas=1", "placement.trainer.ranks=2", "placement.trainer.tensor_parallel=2")
    own = (f"placement.critic.ranks={critics}", f"placement.critic.shard={critics}")
    ranks = ranks if not start else ("placement.policy.replicas=1", "placement.trainer.ranks=2")
    found = steps(train(tmp_path, "ray", "controllers=2", *ranks, *own, *ppo))
    for a, b in zip(found, one, strict=True):
        assert a["samples_digest"] == b["samples_digest"]
        for name in ("actor/loss", "critic/loss", "critic/value_mean", "critic/explained_variance", "actor/kl"):
            assert a[name] == pytest.approx(b[name], abs=1e-5), name
    # the checkpoint of one layout continues in another one
    more = (*ppo, "run.steps=3", "run.resume=auto")
    one = steps(train(tmp_path, "one", "runtime=local", "controllers=1", *more))
    found = steps(
        train(tmp_path, "ray", "controllers=1", "placement.trainer.ranks=1", "placement.critic.ranks=3", *more)
    )
    for name in ("actor/loss", "critic/loss", "critic/value_mean", "actor/kl"):
        assert found[-1][name] == pytest.approx(one[-1][name], abs=1e-5), name
