"""GPU memory of a run: what stands beside the trainer, what `auto` becomes, what is refused, what --dry-run prints."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from gcore.config.load import load_config
from gcore.cost.costs import SHAPES
from gcore.cost.denoisers import DENOISERS
from gcore.cost.training_memory import adapter_parameters
from gcore.launch import gpu_memory
from gcore.launch.footprint import copies_moments, parts
from gcore.launch.gpu_memory import engines_beside, memory_lines, plan_critic_memory, plan_memory, rank_of
from gcore.launch.machines import Machine
from gcore.launch.plan import make_plan
from gcore.modalities.table import kind_of
from gcore.protocols import TrainerInfo
from gcore.runtime import nodes
from gcore.types import SampleMeta, SampleWork, UserError
from tests.e2e.helpers import RECIPE, gcore, write_recipe

ONE, EIGHT = Machine(16, 1), Machine(64, 8)
H200 = 139 * 2.0**30
ASLEEP = 5.7e9
VLLM = {"engine": "vllm", "max_response_length": 8}


def folder_of(size: str, at: Any) -> str:
    """A folder with the config.json of a shape."""
    shape, folder = SHAPES[size], at / size
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen2",
                "num_hidden_layers": shape.layers,
                "hidden_size": shape.hidden,
                "intermediate_size": shape.intermediate,
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.kv_heads,
                "vocab_size": shape.vocab,
                "tie_word_embeddings": shape.tied,
            }
        )
    )
    return str(folder)


@pytest.fixture
def config(tmp_path):
    def make(size: str = "7B", *overrides: str, **top: Any) -> Any:
        path = tmp_path / "recipe.yaml"
        placement = {"placement": {}} if "placement" not in top else {}
        tree = {**RECIPE, "generation": VLLM, "model": {"path": folder_of(size, tmp_path)}, **placement, **top}
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return load_config(path, list(overrides))

    return make


def chosen(config: Any, machine: Machine = ONE, total: float = H200) -> tuple[Any, Any]:
    found = plan_memory(config, make_plan(config, machine), total).config.training
    return found.activation_checkpointing, found.offload


def test_auto_becomes_what_fits(config):
    assert chosen(config("1.5B")) == (False, "none")
    assert chosen(config("7B")) == (True, "optimizer")
    assert chosen(config("7B", "algorithm.kl_coef=0.1")) == (True, "optimizer")
    assert (
        chosen(config("7B", "algorithm.kl_coef=0.1", "generation.gpu_memory_utilization=0.1"), total=115e9)[1] == "all"
    )
    assert chosen(config("7B", "training.max_tokens_per_gpu=4096")) == (False, "optimizer")
    assert chosen(config("7B"), EIGHT) == (False, "none")  # one copy on eight GPUs
    assert chosen(config("7B", "model.lora={}")) == (False, "none")
    assert chosen(config("7B", "training.offload=all")) == (True, "all")
    assert chosen(config("1.5B", "training.activation_checkpointing=true")) == (True, "none")


def test_without_a_gpu_nothing_is_planned(config):
    cpu = Machine(8, 0)
    assert chosen(config("7B", "training.offload=all"), cpu) == (False, "none")
    assert chosen(config("7B", "training.device=cpu", "training.activation_checkpointing=true")) == (True, "none")
    found = plan_memory(config("7B"), make_plan(config("7B"), cpu))
    assert (found.choice, found.notes, memory_lines(found)) == (None, [], [])
    emulated = {"backend": "emulated", "emulated": {}}
    device = {"engine": "emulated", "emulated": {}, "max_response_length": 8}
    asked = config("7B", training=emulated, generation=device)
    assert plan_memory(asked, make_plan(asked, ONE), H200).config == asked


def test_unknown_gpus_are_left_to_the_ranks(config, monkeypatch):
    monkeypatch.setattr(gpu_memory, "detect_gpu_bytes", lambda: None)
    asked = config("7B")
    found = plan_memory(asked, make_plan(asked, ONE))
    assert found.config == asked and "decided by each trainer rank at its start" in found.note
    fixed = config("7B", "training.offload=none", "training.activation_checkpointing=true")
    assert plan_memory(fixed, make_plan(fixed, ONE)).note == "GPU memory is unknown on this machine: nothing is checked"


def test_a_model_that_the_planner_does_not_know_trains_without_a_plan(config, tmp_path):
    asked = config("7B")
    (tmp_path / "7B" / "config.json").write_text('{"kv_lora_rank": 512}')
    found = plan_memory(asked, make_plan(asked, ONE), H200)
    assert (found.config.training.activation_checkpointing, found.config.training.offload) == (False, "none")
    assert found.note.startswith("GPU memory is not planned: model.path") and "kv_lora_rank" in found.note


def pictures(tmp_path, denoising: dict[str, Any]) -> Path:
    """A recipe with the shape of Stable Diffusion 3.5 medium."""
    about = {"_class_name": "SD3Transformer2DModel", "patch_size": 2, "num_layers": 24}
    about |= {"num_attention_heads": 24, "attention_head_dim": 64}
    (tmp_path / "pipe" / "transformer").mkdir(parents=True)
    (tmp_path / "pipe" / "transformer" / "config.json").write_text(json.dumps(about))
    tree = {
        "run": {"name": "tiny"},
        "model": {"path": str(tmp_path / "pipe")},
        "data": {"train": {"task": "draw_digits"}, "max_prompt_length": 64},
        "generation": {"denoising": denoising},
        "rewards": RECIPE["rewards"],
    }
    recipe: Path = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree))
    return recipe


ALL_STEPS = {"steps": 20, "guidance_scale": 4.5}
WINDOW = {**ALL_STEPS, "window": {"size": 4}}
UNGUIDED = {"steps": 20, "guidance_scale": 1.0, "window": {"size": 10}}


@pytest.mark.parametrize(  # 19 steps x 2 passes x 1,357 tokens x 1,536 x 24 x 76 bytes, half of it compiled
    ("denoising", "compiled", "eager"), [(ALL_STEPS, 72.2, 144.5), (WINDOW, 15.2, 30.4), (UNGUIDED, 19.0, 38.0)]
)
def test_a_denoiser_keeps_the_choice_for_its_trainer(tmp_path, denoising, compiled, eager):
    recipe = pictures(tmp_path, denoising)
    for override, kept in (("auto", compiled), ("false", eager)):
        tree = load_config(recipe, [f"training.compile={override}"])
        assert chosen(tree) == ("auto", "none")
        note = plan_memory(tree, make_plan(tree, ONE), H200).note
        assert f"a sample needs {kept} of 149 GB for activations" in note
    for wanted in ("true", "false"):
        fixed = load_config(recipe, [f"training.activation_checkpointing={wanted}"])
        assert chosen(fixed) == (wanted == "true", "none")


@pytest.mark.parametrize("denoising", [ALL_STEPS, WINDOW, UNGUIDED])
def test_the_flops_of_a_known_denoiser_are_those_of_its_passes(tmp_path, denoising):
    """For perf/mfu. With guidance, two passes for each trained step: neither attends to the other."""
    config = load_config(pictures(tmp_path, denoising), [])
    spec = config.generation.denoising
    trained, passes = (spec.window.size if spec.window else spec.steps - 1), (1 if spec.guidance_scale == 1 else 2)
    cost = kind_of(config).cost_model(TrainerInfo(0, 1536))
    meta = SampleMeta(0, 0, SampleWork(1357 * passes, passes=trained), trained)
    expected = trained * passes * DENOISERS["sd3.5-medium"].pass_flops(512)
    assert cost.knows_flops and cost.of_sample(meta) * cost.flops == pytest.approx(expected)


def test_the_memory_of_this_machine(monkeypatch):
    class Query:
        returncode, stdout = 0, "143771\n81559\n"

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(nodes.subprocess, "run", lambda *args, **keys: Query)
    assert gpu_memory.detect_gpu_bytes() == 81559 * 2**20  # the smallest
    monkeypatch.setattr(Query, "stdout", "")
    assert gpu_memory.detect_gpu_bytes() is None
    monkeypatch.setattr(Query, "stdout", "143771\n")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert gpu_memory.detect_gpu_bytes() is None  # of a cluster, not of this machine


def test_the_rank_of_a_recipe(config):
    asked = config(
        "7B",
        "placement.trainer={ranks: 8, shard: 4, tensor_parallel: 2}",
        "training.max_tokens_per_gpu=5000",
        "algorithm.kl_coef=0.1",
        "training.compile=false",
        "training.dtype=float32",
        "model.lora={rank: 4, targets: [q_proj]}",
    )
    rank = rank_of(asked, make_plan(asked, EIGHT), SHAPES["7B"])
    assert (rank.shard, rank.tensor_parallel, rank.max_tokens, rank.kl) == (4, 2, 5000, True)
    assert (rank.compiled, rank.float32, rank.cpu) == (False, True, False)
    assert rank.adapters == adapter_parameters(SHAPES["7B"], 4, ["q_proj"])


# ---- beside the trainer


def beside(config: Any, machine: Machine = ONE) -> tuple[float, float, float]:
    found = engines_beside(config, make_plan(config, machine), SHAPES["7B"], 100e9)
    return found.rollout, found.training, found.update


def test_policy_engines(config):
    weights = SHAPES["7B"].weight_bytes
    assert beside(config("7B")) == (40e9, ASLEEP, ASLEEP + weights)
    assert beside(config("7B", "generation.sleep=0")) == (40e9, 40e9, 40e9)
    awake = "sampling.max_staleness=1", "sampling.deterministic=false"
    assert beside(config("7B", *awake)) == (40e9, 40e9, 40e9)
    two = config("7B", "placement.policy.replicas=2")
    assert beside(two) == (40e9, 2 * ASLEEP, 40e9)  # they divide it, and neither ever has more than its share
    wide = config("7B", "generation.tensor_parallel=4", "placement.policy.replicas=2")
    assert beside(wide, EIGHT) == (40e9, ASLEEP, ASLEEP + weights / 4)
    assert beside(config("7B", "placement.mode=disaggregated"), EIGHT) == (0, 0, 0)
    assert beside(config("7B", "training.device=cpu")) == (0, 0, 0)


def test_the_embedded_engine_keeps_weights_and_cache(config):
    shape = SHAPES["7B"]
    held = shape.weight_bytes + 48 * (12 + 8) * shape.kv_bytes_per_token  # 12 prompts x 4 of up to 20 tokens
    asked = config("7B", generation={"engine": "embedded", "max_response_length": 8})
    assert beside(asked) == (held, held, held)


def test_judges_stay_awake_unless_they_share_slots(config, tmp_path):
    build = {"build": RECIPE["model"]["build"]}
    judge = {"name": "critic", "model": build, "template": "{{ response }}", "engine": "vllm"}
    judge["gpu_memory_utilization"] = 0.3
    rewards = {**RECIPE["rewards"], "judges": [judge]}
    weights = SHAPES["7B"].weight_bytes
    assert beside(config("7B", rewards=rewards)) == (70e9, ASLEEP + 30e9, ASLEEP + weights + 30e9)
    sharing = config("7B", rewards=rewards, placement={"mode": "colocated"})
    assert beside(sharing) == (40e9 + ASLEEP, 2 * ASLEEP, 2 * ASLEEP + weights)


# ---- refused, warned, printed


def refused(config: Any, machine: Machine = ONE, total: float = H200) -> str:
    with pytest.raises(UserError) as error:
        plan_memory(config, make_plan(config, machine), total)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_fit_is_refused_with_the_keys_to_change(config):
    said = refused(config("32B"))
    assert said.startswith(
        "this run does not fit on its GPUs: the phase `backward` needs 365 of 149 GB per GPU (weights 131, gradients "
        "131, bf16 copy 66, temporary 20, activations 12, engines 6) with training.activation_checkpointing=true and "
        "training.offload=optimizer; use more GPUs (placement.trainer.ranks, shard=1) or train adapters (model.lora)"
    )
    given = refused(config("7B", "training.offload=none", "training.activation_checkpointing=false"))
    assert "set training.offload=auto" in given and "set training.activation_checkpointing=auto" in given
    assert "lower training.max_tokens_per_gpu=16384 (at least 20)" in given
    shares = refused(config("7B", "generation.gpu_memory_utilization=0.95", "training.offload=optimizer"))
    assert "the phase `start` needs 175" in shares and "; lower generation.gpu_memory_utilization=0.95" in shares
    awake = refused(config("7B", "generation.sleep=0"))
    assert "set generation.sleep=auto" in awake


def test_close_calls_are_warned_of(config):
    asked = config("1.5B", "generation.gpu_memory_utilization=0.92")
    found = plan_memory(asked, make_plan(asked, ONE), H200)
    assert found.choice is not None and found.choice.fits
    assert found.note.startswith("GPU memory is close to its limit: the phase `start` needs 147 of 149 GB per GPU (")
    assert "if it runs out of memory, lower generation.gpu_memory_utilization=0.92" in found.note
    assert plan_memory(config("1.5B"), make_plan(config("1.5B"), ONE), H200).note == ""


def test_the_lines_of_a_dry_run(config):
    asked = config("7B")
    assert memory_lines(plan_memory(asked, make_plan(asked, ONE), H200)) == [
        "149 GB per GPU, at most 97 GB used; 61 GB of host memory per rank; GB by part:",
        "                weights  gradients  moments  bf16 copy  activations  temporary  buckets  engines   sum",
        "start              30.5          ·        ·          ·            ·          ·      3.2     59.7  93.4",
        "rollout            30.5          ·        ·          ·            ·          ·        ·     59.7  90.2",
        "backward           30.5       30.5        ·       15.2          4.1       11.1        ·      5.7  97.1",
        "optimizer step     30.5       30.5      6.5          ·            ·          ·        ·      5.7  73.1",
        "weight update      30.5          ·        ·          ·            ·          ·      3.2     20.9  54.6",
        "training.activation_checkpointing=true: without it, the phase `backward` needs 161 of 149 GB",
        "training.offload=optimizer: with none, the phase `backward` needs 158 of 149 GB",
    ]


def test_a_dry_run_prints_and_refuses(tmp_path, monkeypatch):
    recipe = str(write_recipe(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the driver counts one GPU; nothing is started on it
    monkeypatch.setattr(gpu_memory, "detect_gpu_bytes", lambda: H200)
    done = gcore("train", recipe, "--dry-run")
    assert done.returncode == 0 and "\nGPU memory   at most 0.0 of 149 GB per GPU\n" in done.stdout
    monkeypatch.setattr(gpu_memory, "detect_gpu_bytes", lambda: 1e6)
    for command in (["train", recipe, "--dry-run"], ["train", recipe]):
        done = gcore(*command)
        assert done.returncode == 2 and done.stderr.startswith("gcore: this run does not fit on its GPUs: the phase ")
        assert not (tmp_path / "runs" / "tiny").exists()


def test_off_loaded_state_counts_in_host_memory(config, tmp_path):
    """2 MiB of bfloat16 weights: 1 Mi parameters."""
    asked = config("7B", "algorithm.kl_coef=0.1")
    (tmp_path / "7B" / "model.safetensors").write_bytes(b"\0" * 2 * 2**20)
    for level, per_parameter in (("none", 0), ("optimizer", 8), ("all", 8 + 4 + 2)):
        training = asked.training.model_copy(update={"offload": level})
        moved = asked.model_copy(update={"training": training})
        for machine, shard in ((ONE, 1), (EIGHT, 8)):
            found = {part.what: part.each_mb for part in parts(moved, make_plan(moved, machine))}
            copy = 4 + 8 + 2  # for checkpoints
            assert found["trainer rank"] == 295 + per_parameter / shard
            assert found["copy for checkpoints"] == copy / shard


def test_off_loaded_moments_are_copied_for_checkpoints_only_where_they_fit(config, tmp_path):
    """A rank of 8 GiB of moments in host memory, beside 4 GiB of weights on the GPU."""
    config("7B")
    (tmp_path / "7B" / "model.safetensors").touch()
    os.truncate(tmp_path / "7B" / "model.safetensors", 2 * 2**30)  # 1 Gi parameters in bfloat16; no bytes on the disk

    def copied(memory_mb: int, *changes: str, kept: float = 0.0) -> float:
        """`kept`: MB of moments that stay on the GPU."""
        changes = (*changes, f"training.offload_keep_gb={kept * 2**20 / 1e9}")
        asked = config("7B", "training.offload=optimizer", *changes)
        plan = make_plan(asked, replace(ONE, memory_mb=memory_mb))
        found = {part.what: part.each_mb for part in parts(asked, plan)}
        assert found["trainer rank"] == pytest.approx(295 + 8 * 1024 - kept)
        if kept:
            return found["copy for checkpoints"]
        assert found.get("copy for checkpoints", 0) in (0, 4096, 4096 + 8192)
        assert copies_moments(asked, plan) == (found.get("copy for checkpoints", 0) != 4096)
        return found.get("copy for checkpoints", 0)

    assert copied(64 * 1024) == copied(0) == 4096 + 8192
    assert copied(20 * 1024) == 4096
    assert copied(20 * 1024, "checkpoint.asynchronous=false") == 0
    assert copied(20 * 1024, kept=1024) == pytest.approx(4096 + 1024)


# ---- a critic with ranks of its own ----

APART = (
    "algorithm.preset=ppo",
    "placement.mode=disaggregated",
    "placement.trainer.ranks=4",
    "placement.critic.ranks=1",
)


def critic_of(config: Any, total: float = H200) -> tuple[Any, Any]:
    """As in a run: the driver decides for the trainer before a critic rank starts."""
    plan = make_plan(config, EIGHT)
    found = plan_critic_memory(plan_memory(config, plan, total).config, plan, total).training
    return found.activation_checkpointing, found.offload


def test_a_critic_rank_needs_not_what_the_trainer_needs(config):
    """Four trainer ranks share one copy, the critic has a whole one."""
    assert chosen(config("7B", *APART), EIGHT) == (False, "none") and critic_of(config("7B", *APART)) == (
        True,
        "optimizer",
    )
    assert critic_of(config("1.5B", *APART)) == (False, "none")
    with pytest.raises(UserError, match=r"the critic does not fit on its GPUs: .* raise placement\.critic\.ranks"):
        critic_of(config("7B", *APART), 80e9)


def test_critic_ranks_do_not_share_long_samples(config):
    long = {"engine": "vllm", "max_response_length": 65524}
    parts = ("training.context_parallel=4", "training.max_tokens_per_gpu=16384")
    assert chosen(config("1.5B", *APART, *parts, generation=long), EIGHT) == (False, "none")
    assert critic_of(config("1.5B", *APART, *parts, generation=long))[0] is True
