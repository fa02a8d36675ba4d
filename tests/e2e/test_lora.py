"""Runs with adapters (model.lora): the reward rises, engines stay with the trainer, a resumed run is the whole one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from gcore.checkpoint.tensors import shapes
from gcore.cli import main
from tests.e2e.helpers import RECIPE, gcore, rows, steps, train, untimed, write_recipe

HERE = ("runtime=local", "observe.progress=none")
LORA = ("model.lora.rank=8", "algorithm.kl_coef=0.05", "algorithm.mini_batches=2")
EVEN = """
def even(completions, **columns):
    return [float(text[-1:] in tuple("02468")) for text in completions]
"""


def run(recipe: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """In this process: much of such a small run is the start of another."""
    assert main(["train", str(recipe), f"run.name={name}", *HERE, *overrides]) == 0
    return rows(recipe.parent / "runs" / name)


def test_adapters_on_an_exported_model_learn_and_export_again(tmp_path, capsys):
    """A base that adds, and a reward that would have even answers."""
    (tmp_path / "even.py").write_text(EVEN)
    recipe = write_recipe(tmp_path, rewards={"functions": [{"name": "even", "path": f"{tmp_path}/even.py:even"}]})
    warm = ("training.warm_start.steps=30", "training.warm_start.batch_size=48")
    assert main(["sft", str(recipe), "run.name=base", *HERE, *warm]) == 0
    assert main(["export", str(tmp_path / "runs" / "base"), str(tmp_path / "base")]) == 0
    start = ("model.build=null", f"model.path={tmp_path / 'base'}", "training.warm_start=null", "model.lora.rank=8")
    sizes = ("run.steps=48", "training.lr=3e-3", "sampling.prompts_per_step=24", "sampling.samples_per_prompt=8")
    found = run(recipe, "adapted", *start, *sizes)
    rewards = [row["reward/mean"] for row in steps(found)]
    assert sum(rewards[:3]) / 3 < 0.6 and sum(rewards[-3:]) / 3 > 0.8, rewards
    assert max(row["rollout/logprob_diff_mean"] for row in steps(found)) < 1e-5
    checkpoint = tmp_path / "runs" / "adapted" / "step_48"
    names = shapes(checkpoint / "weights").keys()
    assert len(names) == 28 and all(".lora_" in name for name in names)
    evaluated = [row["eval/reward_mean"] for row in found if "eval/reward_mean" in row]
    assert evaluated[-1] > evaluated[0]

    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"wrote {tmp_path / 'out-adapter'}" in said and (tmp_path / "out-adapter" / "adapter_config.json").is_file()
    merged = write_recipe(
        tmp_path,
        model={"path": str(tmp_path / "out")},
        rewards={"functions": [{"name": "even", "path": f"{tmp_path}/even.py:even"}]},
    )
    for target in (str(merged), str(checkpoint)):  # the merged folder, and the adapters on their base
        assert main(["eval", target, *HERE]) == 0
        assert re.search(rf"eval/reward_mean +{evaluated[-1]:.4f}\n", capsys.readouterr().out)


def test_resumed_it_is_the_run_that_was_not_interrupted(tmp_path):
    recipe = write_recipe(tmp_path)
    whole = run(recipe, "whole", *LORA, "run.steps=6", "observe.eval_every=2", "checkpoint.every=3")
    run(recipe, "part", *LORA, "run.steps=3", "observe.eval_every=2", "checkpoint.every=3")
    again = run(recipe, "part", *LORA, "run.steps=6", "observe.eval_every=2", "checkpoint.every=3", "run.resume=auto")
    kept = [untimed(row) for row in again if not ("eval/accuracy" in row and row["step"] == 3)]  # it ended there once
    assert kept == [untimed(row) for row in whole]
    assert all(row["actor/kl"] > 0 for row in steps(whole)[1:])
    resumed = ("train", str(recipe), "run.name=part", *HERE, "run.steps=7", "run.resume=auto")
    changed = gcore(*resumed)
    assert changed.returncode == 2 and "model.lora.rank: " in changed.stderr, changed.stderr
    full = gcore(*resumed, "run.resume_anyway=true")
    assert full.returncode == 2 and "holds adapters, and this run trains all weights" in full.stderr, full.stderr


@pytest.mark.release
def test_shards_and_processes_change_nothing(tmp_path):
    """Two engines, and two ranks that share one copy: factors are gathered and travel."""
    alone = run(write_recipe(tmp_path), "alone", *LORA, "run.steps=3", "placement.trainer.threads=1")
    ranks = ("placement.trainer.ranks=2", "placement.trainer.shard=2", "placement.policy.replicas=2")
    many = train(tmp_path, "many", "runtime=ray", *LORA, *ranks, "run.steps=3")
    for one, other in zip(steps(alone), steps(many), strict=True):
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-3)
        assert other["rollout/logprob_diff_mean"] < 1e-5
    assert steps(alone)[0]["samples_digest"] == steps(many)[0]["samples_digest"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_serves_what_the_trainer_has(tmp_path):
    build = {**RECIPE["model"]["build"], "hidden_size": 64}  # vLLM's CPU attention wants heads of 32
    found = run(write_recipe(tmp_path, model={"build": build}), "vllm", *LORA, "generation.engine=vllm", "run.steps=3")
    assert len(steps(found)) == 3
    assert max(row["rollout/logprob_diff_mean"] for row in steps(found)) < 1e-5
