"""Several replicas of the policy on one GPU (placement.policy.replicas), and what --dry-run says about decoding."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from gcore.config.load import load_config
from gcore.cost.costs import SHAPES
from gcore.generation.routing import own_replicas
from gcore.launch import gpu_memory
from gcore.launch.gpu_memory import choose, engines_beside, rank_of
from gcore.launch.machines import Cluster, Machine
from gcore.launch.plan import make_plan
from tests.e2e.helpers import RECIPE, gcore, write_recipe
from tests.unit.test_gpu_memory import ASLEEP, EIGHT, H200, ONE, folder_of

MANY = {"prompts_per_step": 32, "samples_per_prompt": 8}


@pytest.fixture
def config(tmp_path):
    def make(*overrides: str) -> Any:
        path = tmp_path / "recipe.yaml"
        generation = {"engine": "vllm", "max_response_length": 512}
        tree = {**RECIPE, "runtime": "ray", "sampling": {**RECIPE.get("sampling", {}), **MANY}, "placement": {}}
        tree |= {"generation": generation, "model": {"path": folder_of("1.5B", tmp_path)}}
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return load_config(path, list(overrides))

    return make


def test_two_engines_on_every_gpu(config):
    """Engines i and i + 8 are on GPU i, with rank i, and belong to controller i: weights go by CUDA IPC."""
    plan = make_plan(config("placement.policy.replicas=16"), EIGHT)
    assert (plan.engines, plan.trainers, plan.engines_per_gpu, plan.gpus) == (16, 8, 2, 8)
    places = plan.gpu_assignment
    assert [places.of("engine", i)[0] for i in (0, 8, 15)] == [(0,), (0,), (7,)] and places.engines_share_gpus
    assert places.share == round(0.95 / 3, 4) and own_replicas(3, plan.controllers, plan.engines) == {3, 11}
    assert "8 GPU(s), 2 engines and trainer rank i share GPU i" in "\n".join(plan.lines(config()))


def test_two_engines_per_gpu_on_several_nodes(config):
    nodes = Cluster(tuple(Machine(16, gpus, node_id=f"{gpus}", address=f"10.0.0.{gpus}") for gpus in (1, 2)))
    plan = make_plan(config("placement.policy.replicas=6"), nodes)
    assert plan.role_nodes["engine"] == (0, 1, 1) * 2 and plan.role_nodes["trainer"] == (0, 1, 1)


def test_one_engine_per_gpu_by_default(config):
    assert make_plan(config(), ONE).engines_per_gpu == make_plan(config(), Machine(8, 0)).engines_per_gpu == 1
    plan = make_plan(config("placement.policy.replicas=3"), ONE)
    assert (plan.engines, plan.engines_per_gpu) == (3, 3)


def test_two_engines_hold_what_one_held(config):
    """Awake they divide the share; asleep and in a weight update each has its own."""
    one, two = config(), config("placement.policy.replicas=2")
    shape = SHAPES["1.5B"]
    single, double = (engines_beside(c, make_plan(c, ONE), shape, H200) for c in (one, two))
    assert single.rollout == double.rollout == pytest.approx(0.4 * H200)
    assert (single.training, double.training) == (ASLEEP, 2 * ASLEEP)
    assert double.update == pytest.approx(2 * (ASLEEP + shape.weight_bytes))
    rank, training = rank_of(two, make_plan(two, ONE), shape), two.training
    assert choose(rank, double, H200, training.activation_checkpointing, training.offload).fits


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "vLLM launches up to 8 decoding steps at once (generation.decode_steps)"),
        (["generation.decode_steps=1"], "vLLM launches up to 1 decoding steps at once"),
        (["generation.tensor_parallel=2"], "vLLM's scheduler is called for every decoding step: tensor_parallel=2"),
    ],
)
def test_a_dry_run_says_how_vllm_decodes(tmp_path, monkeypatch, overrides, line):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # the driver counts the GPUs; nothing is started on them
    monkeypatch.setattr(gpu_memory, "detect_gpu_bytes", lambda: H200)
    recipe = str(write_recipe(tmp_path))
    done = gcore("train", recipe, "--dry-run", "runtime=ray", "generation.engine=vllm", "placement={}", *overrides)
    assert done.returncode == 0, done.stderr
    assert f"\n             {line}" in done.stdout
