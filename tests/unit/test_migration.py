"""docs/migration.md: the recipe and the scripts of TRL and verl say the same; the names in messages exist."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gcore.cli import main
from gcore.config.load import _nearest_key, all_keys, load_config, parse_yaml
from gcore.config.names import _ALL, TABLES, key_of, leaves, own_name
from gcore.config.tree import Config
from gcore.rewarding.signatures import load_reward
from gcore.types import UserError
from gcore.user_files import load_function
from tests.e2e.helpers import write_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
KEYS = set(all_keys())
TRL, VERL = TABLES["TRL"], TABLES["verl"]
GPUS = 8  # of the page


def block(start: str) -> str:
    (found,) = (text for text in re.findall(r"```\w*\n(.*?)```", PAGE, re.S) if text.startswith(start))
    return str(found)


@pytest.fixture
def recipe(tmp_path: Path) -> Config:
    (tmp_path / "gsm8k.yaml").write_text(block("# gsm8k.yaml"))
    return load_config(tmp_path / "gsm8k.yaml")


def value_of(config: Config, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def calls(name: str) -> dict[str, ast.expr]:
    """The keywords of the call of a class in TRL's script."""
    tree = ast.walk(ast.parse(block("# train.py")))
    (call,) = (node for node in tree if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name)
    return {str(keyword.arg): keyword.value for keyword in call.keywords}


def test_the_script_has_names_of_the_installed_trl_and_the_values_of_the_recipe(recipe: Config) -> None:
    trl = pytest.importorskip("trl")
    given = {name: ast.literal_eval(value) for name, value in calls("GRPOConfig").items()}
    args = trl.GRPOConfig(**{**given, "use_cpu": True, "bf16": False})  # unknown names and impossible values raise
    assert set(calls("GRPOTrainer")) <= set(inspect.signature(trl.GRPOTrainer.__init__).parameters)

    prompts = given["per_device_train_batch_size"] * GPUS * given["gradient_accumulation_steps"]
    assert prompts == recipe.sampling.prompts_per_step * given["num_generations"]
    assert args.steps_per_generation == given["gradient_accumulation_steps"]  # one update per step
    assert (recipe.algorithm.mini_batches, recipe.algorithm.epochs) == (1, args.num_iterations)
    assert (given["adam_beta1"], given["adam_beta2"]) == recipe.training.betas
    assert given["lr_scheduler_type"] == "constant_with_warmup" and recipe.training.schedule == "constant"
    assert (given["loss_type"], recipe.algorithm.loss_aggregation) == ("dapo", "token_mean")
    assert (given["scale_rewards"], recipe.algorithm.adv_estimator) == ("group", "grpo")
    assert given["vllm_importance_sampling_mode"] == "token_truncate"
    assert (recipe.algorithm.importance.level, recipe.algorithm.importance.mode) == ("token", "truncate")
    assert given["use_vllm"] and recipe.generation.engine == "vllm"
    assert given["bf16"] and recipe.training.dtype == "auto"  # bfloat16 on GPUs
    elsewhere = {"per_device_train_batch_size", "gradient_accumulation_steps", "adam_beta1", "adam_beta2", "bf16",
                 "lr_scheduler_type", "loss_type", "scale_rewards", "use_vllm", "vllm_mode", "eval_strategy",
                 "vllm_importance_sampling_mode"}  # fmt: skip
    compared = {name: key_of(TRL[name]) for name in given if name not in elsewhere}
    assert {name: value_of(recipe, key) for name, key in compared.items()} == {name: given[name] for name in compared}
    assert len(compared) > 15


def test_the_file_of_verl_has_the_values_of_the_recipe(recipe: Config) -> None:
    tree = parse_yaml(block("# python3 -m verl"))
    given = {}
    for path in (path.partition(".")[2] for path in leaves(tree, "")):
        node = tree
        for name in path.split("."):
            node = node[name]
        given[path] = node
    other = {  # name -> what the recipe has
        "data.train_files": "openai/gsm8k", "data.val_files": "openai/gsm8k", "data.filter_overlong_prompts": 512,
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
        "actor_rollout_ref.actor.optim.betas": (0.9, 0.999),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 1, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16384,
        "actor_rollout_ref.actor.loss_agg_mode": "token_mean", "actor_rollout_ref.actor.use_kl_loss": "loss",
        "actor_rollout_ref.actor.kl_loss_type": "k3", "algorithm.norm_adv_by_std_in_grpo": "grpo",
        "algorithm.use_kl_in_reward": "loss", "trainer.n_gpus_per_node": "auto", "trainer.nnodes": "auto",
    }  # fmt: skip
    assert given["actor_rollout_ref.actor.ppo_mini_batch_size"] == recipe.sampling.prompts_per_step  # one update
    for path, value in given.items():
        key = path if path in KEYS else key_of(own_name(path, KEYS) or "")
        if not path.startswith("custom_reward_function."):
            assert value_of(recipe, key) == other.get(path, value), path
    assert "rewards.functions.path" in (own_name("custom_reward_function.path", KEYS) or "") and len(given) > 30


def test_the_reward_of_the_page(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text(block("# my_reward.py"))
    gold, answers = "So 40 + 2.\n#### 1,042", ["1042", "It is 1,042.", "1042 or 43", "no number"]
    for form in (answers, [[{"role": "assistant", "content": text}] for text in answers]):
        assert load_function(f"{file}:correct")(completions=form, answer=[gold] * 4) == [1.0, 1.0, 0.0, 0.0]
    score = load_function(f"{file}:compute_score")
    assert [score("gsm8k", text, gold) for text in answers] == [1.0, 1.0, 0.0, 0.0]
    assert [load_reward(f"{file}:{name}", {}).style for name in ("correct", "compute_score")] == ["trl", "verl"]


@pytest.mark.parametrize("trainer", TABLES)
def test_every_answer_is_a_key(trainer: str) -> None:
    for name, answer in TABLES[trainer].items():
        assert key_of(answer) in KEYS and own_name(name, KEYS) == answer, name
        for key in re.findall(r"\b[a-z]+\.[a-z_.]{3,}\b", answer.removeprefix(key_of(answer))):
            assert key in KEYS, answer


def test_names_of_trl_are_fields_of_its_configurations() -> None:
    trl = pytest.importorskip("trl")
    kinds = (trl.GRPOConfig, trl.SFTConfig, trl.DPOConfig)
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert set(TRL) - known == set()


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("actor_rollout_ref.actor.optim.lr", "training.lr"),
        ("critic.optim.lr", "critic.lr"),
        ("actor_rollout_ref.model.path", "model.path"),  # the end is a key of ours
        ("actor_rollout_ref.actor.clip_ratio_low", "algorithm.clip_ratio_low"),  # one key has this name
        ("actor_rollout_ref.rollout.n", "sampling.samples_per_prompt"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "evaluation.samples"),
        ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef"),
        ("trainer.total_epochs", "run.epochs"),
        ("actor.adam.lr", "training.lr"),  # OpenRLHF
        ("critic_learning_rate", "critic.lr"),
        ("algo.kl.init_coef", "algorithm.kl_coef"),
        ("rollout.n_samples_per_prompt", "sampling.samples_per_prompt"),
    ],
)
def test_names_of_other_trainers_are_answered(tmp_path: Path, name: str, answer: str) -> None:
    recipe = write_recipe(tmp_path)
    with pytest.raises(UserError) as error:
        load_config(recipe, [f"{name}=3"])
    assert str(error.value) == f"{recipe}: {name}: unknown key; did you mean {answer}?"


def test_no_similar_key_comes_before_the_answer_of_a_table() -> None:
    """`num_generations` is similar to `generation`."""
    keys, names = list(all_keys()), [name for table in TABLES.values() for name in table if name not in KEYS]
    assert len(names) > 100 and [name for name in names if _nearest_key(name, keys) != _ALL[name]] == []


def test_a_remark_follows_where_more_than_the_name_differs(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    with pytest.raises(UserError) as error:
        load_config(recipe, ["actor_rollout_ref.actor.ppo_mini_batch_size=64"])
    assert str(error.value).endswith("did you mean algorithm.mini_batches? (their number per step, not their size)")


def test_a_whole_file_of_verl_is_answered_key_by_key(tmp_path: Path) -> None:
    tree = yaml.safe_load(block("# python3 -m verl"))
    tree["actor_rollout_ref"]["actor"]["fsdp_config"] = {"forward_prefetch": True, "wrap_policy": {}}
    tree["actor_rollout_ref"]["hybrid_engine"] = True
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError) as error:
        load_config(tmp_path / "verl.yaml")
    lines = str(error.value).splitlines()
    assert "  actor_rollout_ref.actor.optim.lr: unknown key; did you mean training.lr?" in lines
    assert "  critic_warmup: unknown key" not in lines
    rest = "actor.fsdp_config.forward_prefetch, actor.fsdp_config.wrap_policy, hybrid_engine"
    assert f"  actor_rollout_ref: no key for {rest}" in lines
    answered = sum("did you mean" in line for line in lines)
    paths = [path.partition(".")[2] for path in leaves(tree, "")]
    assert answered == sum(path not in KEYS and own_name(path, KEYS) is not None for path in paths) > 25


def test_a_similar_key_of_the_same_section_comes_first(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    with pytest.raises(UserError, match=r"model\.build\.max_len: unknown key; did you mean model\.build\.max_length\?"):
        load_config(recipe, ["model.build.max_len=9"])


def test_flags_are_answered_with_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        with pytest.raises(SystemExit) as error:
            main(["train", str(write_recipe(tmp_path)), *words])
        assert error.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert refused("--learning_rate", "1e-6", "--actor.adam.lr=1", "--per-device-train-batch-size", "4").endswith(
        " 4 (keys are set without dashes: training.lr=VALUE sampling.prompts_per_step=VALUE)"
    )
    assert refused("--qqq").endswith("unrecognized arguments: --qqq")
    assert set(VERL) & set(TRL) == {"lr_scheduler_type"}
