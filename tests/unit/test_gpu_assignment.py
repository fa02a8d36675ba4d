"""Who sits on which GPU, and placement.mode=auto: both before anything starts."""

from __future__ import annotations

import pytest
import yaml

from gcore.config.load import dump_config, load_config
from gcore.launch.auto_placement import choose_mode
from gcore.launch.gpu_assignment import GpuAssignment, separate_gpus, shared_gpus
from gcore.launch.machines import Machine
from gcore.launch.plan import make_plan
from gcore.planner import plan as planner
from gcore.types import UserError
from tests.e2e.helpers import RECIPE

EIGHT = Machine(cores=64, gpus=8)


@pytest.fixture
def config(tmp_path):
    """A recipe with one judge of the policy's kind."""

    def make(*overrides: str, judges: int = 1, **judge):
        spec = {"model": {"build": RECIPE["model"]["build"]}, "template": "{{ response }}", **judge}
        found = [{"name": f"critic{i}" if i else "critic", **spec} for i in range(judges)]
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**RECIPE, "runtime": "ray", "rewards": {**RECIPE["rewards"], "judges": found}}))
        return load_config(path, list(overrides))

    return make


def test_together_replica_i_of_every_kind_is_on_gpu_i():
    gpu_assignment = shared_gpus([2], {"engine": 3, "judge-critic": 1, "trainer": 2})
    found = {"engine": ((0,), (1,), (0,)), "judge-critic": ((0,),), "trainer": ((0,), (1,))}
    assert gpu_assignment == GpuAssignment((1, 1), (0, 0), found, share=0.2375)  # three on GPU 0, and a judge
    assert gpu_assignment.of("engine", 2) == ((0,), 0.2375)
    assert gpu_assignment.of("controller", 0) == ((), 0.0)


def test_more_replicas_than_gpus_take_smaller_shares():
    assert shared_gpus([2], {"engine": 4, "trainer": 2}).share == round(0.95 / 3, 4)  # two engines and a rank on each


def test_apart_every_replica_has_its_own():
    gpu_assignment = separate_gpus(
        [8], {"engine": 2, "judge-critic": 1, "trainer": 2}, {"engine": 1, "judge-critic": 4}
    )
    assert gpu_assignment.bundles == (1, 1, 4, 1, 1)
    places = [
        gpu_assignment.of("engine", 1),
        gpu_assignment.of("judge-critic", 0),
        gpu_assignment.of("trainer", 0),
        gpu_assignment.of("trainer", 1),
    ]
    assert places == [((1,), 1.0), ((2,), 4.0), ((3,), 1.0), ((4,), 1.0)]


def test_apart_refuses_what_does_not_fit():
    with pytest.raises(UserError, match=r"engine 2 x 4, trainer 2 x 1 = 10 GPUs, got 8 .*placement\.trainer\.ranks"):
        separate_gpus([8], {"engine": 2, "trainer": 2}, {"engine": 4})


def test_disaggregated_shares_the_gpus_out(config):
    auto = "placement.trainer.ranks=auto", "placement.policy.replicas=auto"
    plan = make_plan(config("placement.mode=disaggregated", *auto, tensor_parallel=2, replicas=1), EIGHT)
    assert (plan.engines, plan.judges, plan.trainers, plan.gpus) == (3, {"critic": 1}, 3, 8)
    assert plan.gpu_assignment.bundles == (1, 1, 1, 2, 1, 1, 1) and plan.grid is None
    said = plan.lines(config())
    assert "devices      8 GPU(s): engine 3, judge-critic 2, trainer 3" in said


def test_disaggregated_keeps_what_is_given(config):
    given = "placement.mode=disaggregated", "placement.trainer.ranks=4", "generation.tensor_parallel=2"
    plan = make_plan(config(*given), EIGHT)
    assert (plan.trainers, plan.engines) == (4, 1)  # one GPU is the judge's, three are left, an engine takes two
    assert sum(plan.gpu_assignment.bundles) == 7


def test_disaggregated_on_a_cpu_is_shared(config):
    shared = make_plan(config(), Machine(8, 0))
    assert make_plan(config("placement.mode=disaggregated"), Machine(8, 0)) == shared


def test_disaggregated_engines_stay_awake(config):
    asked = "generation.engine=vllm", "generation.sleep=2"
    assert make_plan(config(*asked), EIGHT).sleep_level == 2
    assert make_plan(config(*asked, "placement.mode=disaggregated"), EIGHT).sleep_level == 0


def test_engines_sleep_where_the_trainer_needs_their_memory(config):
    asked = "generation.engine=vllm", "generation.sleep=2", "sampling.max_staleness=1"
    assert make_plan(config(*asked), EIGHT).sleep_level == 0  # they go on while it works
    assert make_plan(config(*asked, "placement.mode=dynamic"), EIGHT).sleep_level == 2


# --- auto


def auto(config, names=("NVIDIA H100 80GB HBM3",) * 8, machine=EIGHT):
    return choose_mode(config, machine, names)


def test_another_mode_is_left_alone(config):
    found = config("placement.mode=static")
    assert auto(found) == (found, "")


def test_auto_takes_what_the_planner_ranks_first(config):
    asked = config("placement.mode=auto")
    found, why = auto(asked)
    assert found.placement.mode in ("dynamic", "static", "colocated")
    steps = dict(part.rsplit(" ", 2)[:2] for part in why.partition("SXM5: ")[2].removesuffix(")").split(", "))
    assert set(steps) == {"dynamic", "static", "colocated"}
    assert float(steps[found.placement.mode]) == min(map(float, steps.values()))
    assert make_plan(found, EIGHT).grid.slots == 8
    again = yaml.safe_load(dump_config(found))
    assert again["placement"]["mode"] == found.placement.mode  # what the run's folder says
    assert found.model_copy(update={"placement": asked.placement}) == asked  # and nothing else has changed


def test_auto_plans_the_degrees_of_the_trainer(config, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "gcore.launch.auto_placement.plan", lambda *args: (seen.append(args[-1]), planner.plan(*args))[1]
    )
    ranks = "placement.trainer.ranks=8", "placement.trainer.tensor_parallel=2"
    auto(config("placement.mode=auto", *ranks, "training.context_parallel=2"))
    assert (seen[0].trainer_tp, seen[0].trainer_context) == (2, 2)


def test_auto_with_a_static_split_names_it(config, monkeypatch):
    monkeypatch.setattr("gcore.launch.auto_placement.SLOT_MODES", ("static",))
    found, _ = auto(config("placement.mode=auto"))
    assert found.placement.mode == "static" and sum(found.placement.split.values()) == 8
    assert set(found.placement.split) == {"policy", "critic"}


@pytest.mark.parametrize(
    ("overrides", "machine", "names", "mode", "why"),
    [
        ((), Machine(8, 0), (), "shared", "no GPU"),
        (("training.device=cpu",), EIGHT, (), "shared", "no GPU"),
        (("sampling.max_staleness=1",), EIGHT, (), "disaggregated", "asynchronous"),
        (("sampling.max_staleness=1",), Machine(8, 2), (), "shared", "asynchronous"),
        ((), EIGHT, ("NVIDIA GeForce RTX 5090",) * 8, "dynamic", "no data for 'NVIDIA GeForce RTX 5090'"),
        ((), Machine(8, 1), ("NVIDIA GeForce RTX 5090",), "colocated", "no data for"),
        ((), EIGHT, ("NVIDIA H100", "NVIDIA A100"), "dynamic", "no data for"),
        ((), EIGHT, (), "dynamic", "name of the GPUs is unknown"),
    ],
)
def test_auto_without_the_planner(config, overrides, machine, names, mode, why):
    found, said = choose_mode(config("placement.mode=auto", *overrides), machine, names)
    assert found.placement.mode == mode and why in said and f"placement.mode=auto: {mode}" in said


def test_auto_without_judges_is_shared(config):
    found, said = auto(config("placement.mode=auto", judges=0))
    assert found.placement.mode == "shared" and "no judge" in said


def test_auto_refuses_what_cannot_fit(config, tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen2", "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 29568, '
        '"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064}'
    )
    asked = config("placement.mode=auto", model={"path": str(tmp_path)})
    with pytest.raises(UserError, match=r"placement\.mode=auto: no placement fits on 1 x .*possible changes"):
        choose_mode(asked, Machine(8, 1), ("NVIDIA H100",))
