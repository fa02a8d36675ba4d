"""From placement.* to slots, replicas and the first split; invalid values are rejected in one line with their key."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from gcore.config.load import load_config
from gcore.launch.machines import Machine
from gcore.launch.plan import first_split, make_plan
from gcore.placement.grid import POLICY, DeviceGrid, Split
from gcore.types import UserError
from tests.e2e.helpers import RECIPE

MACHINE = Machine(cores=8, gpus=0)


def judge(name: str = "critic", **keys: Any) -> dict[str, Any]:
    return {"name": name, "model": {"build": RECIPE["model"]["build"]}, "template": "{{ response }}", **keys}


@pytest.fixture
def config(tmp_path):
    def make(*judges: dict[str, Any], placement: dict[str, Any] | None = None, **top: Any) -> Any:
        path = tmp_path / "recipe.yaml"
        rewards = {**RECIPE["rewards"], "judges": list(judges)}
        path.write_text(
            yaml.safe_dump({**RECIPE, "rewards": rewards, **top, "placement": placement or {}}, sort_keys=False)
        )
        return load_config(path, [])

    return make


def refused(act: Any) -> str:
    with pytest.raises(UserError) as error:
        act()
    return str(error.value)


def test_shared_has_no_grid(config):
    plan = make_plan(config(judge(replicas=3), placement={"policy": {"replicas": 2}}), MACHINE)
    assert (plan.grid, plan.engines, plan.judges) == (None, 2, {"critic": 3})


@pytest.mark.parametrize("mode", ["static", "dynamic", "colocated"])
def test_every_role_has_a_replica_on_every_block(config, mode):
    placement = {"mode": mode, "slots": 4, "policy": {"replicas": 2}}
    plan = make_plan(config(judge(replicas=3), placement=placement), MACHINE)
    assert plan.grid == DeviceGrid(4, {POLICY: 1, "critic": 1})
    assert (plan.engines, plan.judges) == (4, {"critic": 4})
    assert f"placement    {mode}: 4 slots in 4 blocks" in plan.lines(config(judge(), placement=placement))


def test_auto_slots_are_the_gpus_or_the_cores(config):
    found = config(judge(), placement={"mode": "dynamic"})
    assert make_plan(found, MACHINE).grid == DeviceGrid(8, {POLICY: 1, "critic": 1})
    on_gpus = make_plan(config(judge(), placement={"mode": "dynamic"}), Machine(cores=64, gpus=2))
    assert on_gpus.grid == DeviceGrid(2, {POLICY: 1, "critic": 1}) and on_gpus.engines == 2


def test_wide_replicas_make_wide_blocks(config):
    made = config(
        judge(engine="vllm", tensor_parallel=4),
        judge("other"),
        placement={"mode": "dynamic", "slots": 16, "split": {"policy": 4, "critic": 8, "other": 4}},
        generation={**RECIPE["generation"], "engine": "vllm", "tensor_parallel": 2},
    )
    plan = make_plan(made, MACHINE)
    assert (plan.engines, plan.judges) == (8, {"critic": 4, "other": 16})
    assert plan.grid is not None
    assert first_split(made, plan.grid) == Split((POLICY, "critic", "critic", "other"))


@pytest.mark.parametrize(
    ("placement", "owners"),
    [
        ({"mode": "static", "slots": 4}, "ppcc"),
        ({"mode": "dynamic", "slots": 5}, "pppcc"),
        ({"mode": "dynamic", "slots": 2}, "pc"),
        ({"mode": "static", "slots": 4, "split": {"critic": 1, "policy": 3}}, "pppc"),
        ({"mode": "colocated", "slots": 4}, "pppp"),
        ({"mode": "colocated", "slots": 1}, "p"),
        ({"mode": "colocated", "slots": 4, "split": {"critic": 1, "policy": 3}}, "pppp"),
    ],
)
def test_the_first_split(config, placement, owners):
    made = config(judge(), placement=placement)
    grid = make_plan(made, MACHINE).grid
    assert grid is not None
    assert first_split(made, grid) == Split(tuple({"p": POLICY, "c": "critic"}[owner] for owner in owners))


# ---- rejected


def test_no_judge_to_share_with(config):
    message = refused(lambda: config(placement={"mode": "dynamic"}))
    assert message.endswith(
        "placement.mode=dynamic divides slots between the policy and judges, but rewards.judges has no judge "
        "with a model; expected at least one"
    )
    elsewhere = {"name": "critic", "url": "http://127.0.0.1:1/v1", "template": "{{ response }}"}
    assert refused(lambda: config(elsewhere, placement={"mode": "static"})).endswith(
        "no judge with a model; expected at least one"
    )


def test_the_trainer_owns_the_devices_between_steps(config):
    found = {**RECIPE["sampling"], "deterministic": False, "max_staleness": 1}
    message = refused(lambda: config(judge(), placement={"mode": "colocated"}, sampling=found))
    assert "placement.mode=colocated needs sampling.max_staleness=0, got 1" in message
    assert len(message.splitlines()) == 1
    for mode in ("dynamic", "static"):
        config(judge(), placement={"mode": mode}, sampling={**found, "max_staleness": 0, "surplus": "keep"})
        config(judge(), placement={"mode": mode}, sampling=found)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ({"policy": 3, "critc": 1}, "placement.split: got ['critc']; expected names among ['policy', 'critic']"),
        ({"policy": 4}, "placement.split: got {'policy': 4}; expected all of ['policy', 'critic']"),
        ({"policy": 3, "critic": 0}, "placement.split.critic"),
    ],
)
def test_a_split_that_names_the_wrong_roles(config, split, words):
    message = refused(lambda: config(judge(), placement={"mode": "static", "slots": 4, "split": split}))
    assert words in message and len(message.splitlines()) == 1


def test_a_split_that_does_not_add_up(config):
    made = config(judge(), placement={"mode": "static", "slots": 4, "split": {"policy": 3, "critic": 2}})
    assert refused(lambda: make_plan(made, MACHINE)) == (
        "placement.split={'policy': 3, 'critic': 2}: expected multiples of 1, the widest tensor_parallel, that add up "
        "to placement.slots=4"
    )


def wide(config: Any, slots: int, policy: int, critic: int, **placement: Any) -> Any:
    made = config(
        judge(engine="vllm", tensor_parallel=critic),
        placement={"mode": "dynamic", "slots": slots, **placement},
        generation={**RECIPE["generation"], "engine": "vllm", "tensor_parallel": policy},
    )
    return refused(lambda: make_plan(made, MACHINE))


def test_a_split_through_the_middle_of_a_replica(config):
    assert wide(config, 8, 1, 4, split={"policy": 6, "critic": 2}) == (
        "placement.split={'policy': 6, 'critic': 2}: expected multiples of 4, the widest tensor_parallel, that add up "
        "to placement.slots=8"
    )


def test_slots_that_replicas_do_not_fill(config):
    assert wide(config, 6, 1, 4) == "placement.slots=6 is not a multiple of 4, the largest tensor_parallel"
    assert wide(config, 2, 1, 4) == "placement.slots=2 is not a multiple of 4, the largest tensor_parallel"


def test_replicas_that_do_not_fill_a_block(config):
    assert wide(config, 12, 2, 3) == (
        "replicas of {'policy': 2} slots do not fill a block of 3: the widest role's tensor_parallel must be a "
        "multiple of the others'"
    )


def test_fewer_blocks_than_roles(config):
    words = "placement.slots={} make 1 block(s) for 2 roles; use placement.mode=colocated, or more slots"
    assert wide(config, 4, 1, 4) == words.format(4)
    made = config(judge(), placement={"mode": "static", "slots": 1})
    assert refused(lambda: make_plan(made, MACHINE)) == words.format(1)
