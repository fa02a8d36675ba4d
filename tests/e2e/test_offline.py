"""Runs on demonstrations and pairs: learning, any number of controllers, resume, export, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.helpers import RECIPE, gcore, rows, steps, train, untimed, write_recipe

PAIRED = {"training": {"lr": 3e-3}, "sampling": {"prompts_per_step": 12}}
TASK = {"min": 0, "max": 9, "operations": ["+"], "eval_size": 20, "pairs": True}


@pytest.fixture
def recipe(tmp_path) -> Path:
    """Pairs in a file: right sums, and sums with a sign before them. Held-out pairs without rewards."""
    for name, last in (("train", 7), ("eval", 10)):
        sums = [(a, b) for a in range(10) for b in range(last - 7 if name == "train" else 7, last)]
        lines = [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"+{a + b}"} for a, b in sums]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {split: {"path": str(tmp_path / f"{split}.jsonl")} for split in ("train", "eval")}
    tree = {**PAIRED, "data": {**data, "max_prompt_length": 12}, "rewards": {}, "objective": "dpo", "runtime": "local"}
    return write_recipe(tmp_path, **tree)


def run(recipe: Path, name: str, *overrides: str):
    done = gcore("train", str(recipe), f"run.name={name}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return rows(recipe.parent / "runs" / name)


@pytest.mark.parametrize("objective", ["dpo", "sft"])
def test_results_do_not_depend_on_the_number_of_controllers(recipe, objective):
    """And a run without engines says so. To the last bit."""
    answers = [f"data.{split}.answer_column=chosen" for split in ("train", "eval")] if objective == "sft" else []
    given = [f"objective={objective}", *answers, "algorithm.mini_batches=2"]
    one, three = (run(recipe, f"c{n}", *given, f"controllers={n}") for n in (1, 3))
    assert [untimed(row) for row in one] == [untimed(row) for row in three]
    assert len(steps(one)) == 5 and not any(key.startswith("reward/") for row in one for key in row)
    losses = [row["eval/loss"] for row in one if "eval/loss" in row]
    assert len(losses) == 2 and losses[0] != losses[1]


def test_resuming_is_exact_and_the_policy_is_exported(recipe, tmp_path):
    whole = run(recipe, "whole", "checkpoint.every=2")
    folder = tmp_path / "runs" / "whole"
    shutil.copytree(folder, tmp_path / "runs" / "again")
    shutil.rmtree(tmp_path / "runs" / "again" / "step_5")
    again = run(recipe, "again", "checkpoint.every=2", "run.resume=auto", "controllers=2")
    assert [untimed(row) for row in again] == [untimed(row) for row in whole]
    assert gcore("export", str(folder), str(tmp_path / "hf")).returncode == 0
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_pairs_of_rollouts(tmp_path):
    """Online: the policy's own answers, the best against the worst; groups with equal rewards are replaced."""
    online = [
        "objective=dpo",
        "preference.pairs=rollouts",
        "runtime=local",
        "run.steps=2",
        "sampling.prompts_per_step=6",
    ]
    found = steps(train(tmp_path, "online", *online))
    assert all(row["batch/samples"] == 4 * row["sampling/trained"] > 0 for row in found)  # 2 of 4 are trained on
    assert all(row["reward/zero_spread_frac"] == 0 for row in found)
    assert found[0]["preference/loss"] == pytest.approx(0.693147, abs=1e-5) and "reward/mean" in found[0]


def test_dpo_separates_the_answers(recipe):
    found = run(
        recipe, "learns", "run.steps=40", "training.lr=3e-3", "preference.sft_coef=1.0", "observe.eval_every=40"
    )
    evaluated = [row for row in found if "eval/accuracy" in row]
    assert evaluated[0]["eval/margin"] == 0.0
    assert steps(found)[-1]["preference/accuracy"] > 0.8 and steps(found)[-1]["preference/margin"] > 0.05


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["objective=dpp"], "objective"),
        (["data.train.chosen_column=good"], "data.train: row 0: column 'good' is not there; the row has "),
        (["preference.pairs=rollouts"], "rewards: got no reward"),
        (["training.max_tokens_per_gpu=30"], "the longest pair would not fit"),
        (["sampling.max_staleness=1"], "trains on answers of the dataset"),
        (["generation.max_response_length=1"], "longer than data.max_prompt_length=12 or answers over"),
    ],
)
def test_one_line_for_what_cannot_be(recipe, overrides, words):
    done = gcore("train", str(recipe), *overrides)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_a_workflow_of_reinforcement_learning_cannot_use_given_answers(tmp_path):
    (tmp_path / "flow.py").write_text(
        "async def workflow(ctx, prompt):\n    return await ctx.reward(await ctx.given(prompt, ['1']))\n"
    )
    path = write_recipe(tmp_path, workflow=f"{tmp_path / 'flow.py'}:workflow", runtime="local")
    done = gcore("train", str(path))
    assert done.returncode == 2 and "ctx.given: objective=policy" in done.stderr


def test_the_task_has_pairs(tmp_path):
    sums = {"train": {"task": "arithmetic", "args": TASK}, "max_prompt_length": 12}
    tree = {**PAIRED, "data": sums, "rewards": {}, "objective": "orpo", "runtime": "local"}
    found = run(write_recipe(tmp_path, **tree), "task", "run.steps=1")
    assert found[-1]["batch/samples"] == 24 and RECIPE["run"]["seed"] == 3


def test_a_student_approaches_its_teacher(tmp_path):
    """Distillation without any other reward: the reverse KL of the student's own samples falls."""
    import torch

    from gcore.models.networks import load_model
    from gcore.prompts.tokenizer import load_tokenizer
    from tests.unit.test_training import CPU, config_of

    config = config_of()
    tokenizer = load_tokenizer(config.model)
    network = load_model(config.model, tokenizer, 5, torch.float32, CPU)
    with torch.no_grad():
        network.get_output_embeddings().weight.mul_(20)  # it prefers some tokens
    network.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    teacher = {"name": "teacher", "mode": "teacher", "model": {"path": str(tmp_path / "teacher")}}
    tree = {"rewards": {"judges": [teacher]}, "training": {"lr": 1e-2}, "runtime": "local"}
    sizes = {"prompts_per_step": 32, "samples_per_prompt": 1}
    data = {**RECIPE["data"], "eval": None}
    found = steps(run(write_recipe(tmp_path, **tree, sampling=sizes, data=data), "student", "run.steps=25"))
    divergences = [row["reward/teacher/reverse_kl"] for row in found]
    assert sum(divergences[-5:]) < 0.5 * sum(divergences[:5])
