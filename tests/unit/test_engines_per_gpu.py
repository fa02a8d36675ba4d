"""placement.policy.engines_per_gpu: when two engines share a GPU, what they divide, and where there is only one."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from gcore.config import load_config
from gcore.controller import engines_per_gpu, gpu_memory
from gcore.controller.engines_per_gpu import choose_engines, expected_gain
from gcore.controller.gpu_memory import engines_beside, kv_cache_bytes, resolve
from gcore.controller.machines import Cluster
from gcore.controller.plan import Machine, make_plan
from gcore.generation.routing import own_replicas
from gcore.simulate.costs import GPUS, SHAPES
from gcore.types import UserError
from tests.e2e.helpers import RECIPE, gcore, write_recipe
from tests.unit.test_gpu_memory import ASLEEP, EIGHT, H200, ONE, folder_of

NAMES = ["NVIDIA H200"]
MANY = {"prompts_per_step": 32, "samples_per_prompt": 8}


@pytest.fixture
def config(tmp_path):
    def make(size: str = "1.5B", *overrides: str, **top: Any) -> Any:
        path = tmp_path / "recipe.yaml"
        generation = {"engine": "vllm", "max_response_length": 512}
        tree = {**RECIPE, "runtime": "ray", "sampling": {**RECIPE.get("sampling", {}), **MANY}, "placement": {}}
        tree |= {"generation": generation, "model": {"path": folder_of(size, tmp_path)}, **top}
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return load_config(path, list(overrides))

    return make


def chosen(config: Any, machine: Any = ONE, names: Any = NAMES, total: float = H200) -> tuple[Any, str]:
    found, why = choose_engines(config, machine, names, total)
    return found.placement.policy.engines_per_gpu, why


def test_a_small_model_gets_two(config):
    """On the H200, 1.6 to 1.8 times were measured with 1.5B and 256 sequences (docs/benchmarks.md)."""
    times = "per step of 128 sequences, NVIDIA H200 SXM5 0.9 ms, Python 4.3 ms"
    why = f"placement.policy.engines_per_gpu=auto: 2 ({times}: planned to be 1.57 times as fast as 1)"
    assert chosen(config()) == (2, why)
    more = config("1.5B", "sampling.prompts_per_step=256")
    assert chosen(config("0.5B"))[0] == chosen(more, EIGHT, NAMES * 8)[0] == 2


@pytest.mark.parametrize(
    ("size", "overrides", "reason"),
    [
        ("7B", [], "Python 4.3 ms: the GPU is not idle long enough for 2"),
        ("1.5B", ["sampling.prompts_per_step=2"], "2 would be only 1.05 times as fast"),
        ("1.5B", ["generation.max_concurrent=16"], "per step of 8 sequences"),
        ("1.5B", ["generation.tensor_parallel=2"], "generation.tensor_parallel=2"),
        ("1.5B", ["placement.mode=disaggregated"], "placement.mode=disaggregated has one engine"),
        ("1.5B", ["placement.weights=broadcast"], "placement.weights=broadcast has one engine"),
        ("1.5B", ["generation.gpu_memory_utilization=0.1"], "but the KV cache of each would have 0.0 of"),
        ("1.5B", ["generation.gpu_memory_utilization=0.13"], "would have 0.9 of 1.9 GB (key: generation.gpu_mem"),
        ("1.5B", ["generation.gpu_memory_utilization=0.95"], "but the run would not fit on its GPUs"),
    ],
)
def test_one_and_why(config, size, overrides, reason):
    machine = Machine(16, 2) if "disaggregated" in str(overrides) or "parallel" in str(overrides) else ONE
    count, why = chosen(config(size, *overrides), machine, NAMES * machine.gpus)
    assert count == 1 and why.startswith("placement.policy.engines_per_gpu=auto: 1 (") and reason in why


def test_unknown_gpus_get_one(config):
    assert chosen(config(), names=["NVIDIA T4"]) == (
        1,
        "placement.policy.engines_per_gpu=auto: 1 (the planner has no data for 'NVIDIA T4')",
    )
    assert "the name of the GPUs is unknown" in chosen(config(), names=[])[1]


def test_engines_need_cores(config):
    assert chosen(config(), Machine(4, 1))[0] == 2
    assert chosen(config(), Machine(3, 1)) == (
        1,
        "placement.policy.engines_per_gpu=auto: 1 (3 cores are too few for 2 engines; expected 2 for each)",
    )
    mixed = Cluster((Machine(64, 1, node_id="a"), Machine(8, 4, node_id="b"), Machine(2, 0, node_id="c")))
    assert "8 cores are too few for 8 engines" in chosen(config(), mixed)[1]


@pytest.mark.parametrize(
    "overrides",
    [["training.device=cpu"], ["runtime=local"], ["generation.engine=embedded"], ["placement.policy.replicas=2"]],
)
def test_where_there_is_no_choice_nothing_is_said(config, overrides):
    given = config("1.5B", *overrides)
    assert choose_engines(given, ONE, NAMES, H200) == (given, "")
    assert choose_engines(config(), Machine(8, 0), NAMES, H200)[1] == ""


def test_more_python_per_step_makes_a_second_engine_worth_more(config):
    gains = [expected_gain(config(), SHAPES["1.5B"], GPUS["h200"], n)[0] for n in (16, 64, 256, 512)]
    assert gains == sorted(gains) and gains[0] < 1.2 and 1.4 < gains[2] < 1.7 and gains[3] < 2


# ---- the plan ---------------------------------------------------------------------------------------------------


def test_two_engines_on_every_gpu(config):
    """Engines i and i + 8 are on GPU i, with rank i, and belong to controller i: weights go by CUDA IPC."""
    plan = make_plan(config("1.5B", "placement.policy.engines_per_gpu=2"), EIGHT)
    assert (plan.engines, plan.trainers, plan.engines_per_gpu, plan.gpus) == (16, 8, 2, 8)
    places = plan.gpu_assignment
    assert [places.of("engine", i)[0] for i in (0, 8, 15)] == [(0,), (0,), (7,)] and places.engines_share_gpus
    assert places.share == round(0.95 / 3, 4) and own_replicas(3, plan.controllers, plan.engines) == {3, 11}
    assert "8 GPU(s), 2 engines and trainer rank i share GPU i" in "\n".join(plan.lines(config()))


def test_two_engines_per_gpu_on_several_nodes(config):
    nodes = Cluster(tuple(Machine(16, gpus, node_id=f"{gpus}", address=f"10.0.0.{gpus}") for gpus in (1, 2)))
    plan = make_plan(config("1.5B", "placement.policy.engines_per_gpu=2"), nodes)
    assert plan.role_nodes["engine"] == (0, 1, 1) * 2 and plan.role_nodes["trainer"] == (0, 1, 1)


def test_auto_is_one_in_the_plan_and_replicas_are_counted(config):
    assert make_plan(config(), ONE).engines_per_gpu == make_plan(config(), Machine(8, 0)).engines_per_gpu == 1
    plan = make_plan(config("1.5B", "placement.policy.replicas=3"), ONE)
    assert (plan.engines, plan.engines_per_gpu) == (3, 3)


@pytest.mark.parametrize(
    "override",
    ["runtime=local", "placement.mode=disaggregated", "generation.tensor_parallel=2", "placement.weights=broadcast"],
)
def test_what_excludes_two_is_an_error(config, override):
    given = config("1.5B", "placement.policy.engines_per_gpu=2", override)
    with pytest.raises(UserError, match=r"placement.policy.engines_per_gpu=2.*expected"):
        make_plan(given, Machine(16, 2))
    assert make_plan(given, Machine(16, 0)).gpus == 0  # on CPU the key has no effect


def test_replicas_and_engines_per_gpu_exclude_each_other(config):
    with pytest.raises(UserError, match="replicas=2 and engines_per_gpu=2; expected at most one"):
        config("1.5B", "placement.policy.engines_per_gpu=2", "placement.policy.replicas=2")


# ---- memory -----------------------------------------------------------------------------------------------------


def test_two_engines_hold_what_one_held(config):
    """Awake they divide the share; asleep and in a weight update each has its own."""
    one, two = config(), config("1.5B", "placement.policy.engines_per_gpu=2")
    shape = SHAPES["1.5B"]
    single, double = (engines_beside(c, make_plan(c, ONE), shape, H200) for c in (one, two))
    assert single.rollout == double.rollout == pytest.approx(0.4 * H200)
    assert (single.training, double.training) == (ASLEEP, 2 * ASLEEP)
    assert double.update == pytest.approx(2 * (ASLEEP + shape.weight_bytes))
    assert resolve(two, make_plan(two, ONE), shape, H200).fits


def test_the_kv_cache_is_what_weights_and_vllm_leave(config):
    generation, shape = config().generation, SHAPES["1.5B"]
    one, two = (kv_cache_bytes(generation, engines, H200, shape) for engines in (1, 2))
    assert one == pytest.approx(0.4 * H200 - shape.weight_bytes - ASLEEP)
    assert 50e9 < one < 53e9  # 52 GB were measured
    assert two == pytest.approx((one - shape.weight_bytes - ASLEEP) / 2)


def test_a_dry_run_says_how_many_and_why(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the driver counts one GPU; nothing is started on it
    monkeypatch.setattr(gpu_memory, "detect_gpu_bytes", lambda: H200)
    monkeypatch.setattr(engines_per_gpu, "detect_gpu_bytes", lambda: H200)
    monkeypatch.setattr(engines_per_gpu, "detect_gpu_names", lambda cluster: NAMES)
    monkeypatch.setattr(engines_per_gpu, "CORES", 0)
    many = ["sampling.prompts_per_step=64", "sampling.samples_per_prompt=8"]
    recipe = str(write_recipe(tmp_path))
    done = gcore("train", recipe, "--dry-run", "runtime=ray", "generation.engine=vllm", "placement={}", *many)
    assert done.returncode == 0, done.stderr
    assert (
        "\n             placement.policy.engines_per_gpu=auto: 2 (per step of 128 sequences, NVIDIA H200" in done.stdout
    )
    assert "1 GPU(s), 2 engines and trainer rank i share GPU i" in done.stdout and " 2 engine(s) x " in done.stdout
