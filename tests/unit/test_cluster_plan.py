"""The plan of a run on several nodes: which node and which GPUs every process gets."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from gcore.config.load import load_config
from gcore.driver import heal
from gcore.launch.auto_placement import choose_mode
from gcore.launch.gpu_assignment import TRAINER, GpuAssignment, separate_gpus, shared_gpus, within_nodes
from gcore.launch.machines import Cluster, Machine, cluster_of, see_cluster
from gcore.launch.plan import Plan, make_plan
from gcore.launch.preflight import light_checks
from gcore.placement.grid import DeviceGrid
from gcore.types import UserError
from gcore.weights.publisher import choose_method
from tests.e2e.helpers import RECIPE
from tests.faults.test_kill import EMULATED

AUTO = ("placement.trainer.ranks=auto", "placement.trainer.threads=auto")
VLLM = "generation.engine=vllm"


def gpu_nodes(*gpus: int, cores: int = 64) -> Cluster:
    return Cluster(tuple(Machine(cores, n, address=f"10.0.0.{i}", node_id=f"id{i}") for i, n in enumerate(gpus)))


def cpu_nodes(*cores: int, memory_mb: int = 0) -> Cluster:
    nodes = (Machine(n, 0, memory_mb, address=f"10.0.0.{i}", node_id=f"id{i}") for i, n in enumerate(cores))
    return Cluster(tuple(nodes))


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def make(*overrides: str, judges: int = 0, **judge: Any) -> Any:
        spec = {"model": {"build": RECIPE["model"]["build"]}, "template": "{{ response }}", **judge}
        found = [{"name": f"critic{i}", **spec} for i in range(judges)]
        path = tmp_path / "recipe.yaml"
        run = {**RECIPE["run"], "dir": str(tmp_path / "runs")}
        rewards = {**RECIPE["rewards"], "judges": found}
        path.write_text(yaml.safe_dump({**RECIPE, "run": run, "rewards": rewards}))
        return load_config(path, [*AUTO, *overrides])

    return make


def nodes_of_gpus(plan: Plan, kind: str) -> list[list[int]]:
    """The nodes of the GPUs of every replica."""
    found = plan.gpu_assignment
    return [[found.nodes[bundle] for bundle in bundles] for bundles in found.replicas[kind]]


def test_a_node_that_leaves_while_it_is_checked_does_not_end_the_run(config, monkeypatch):
    run, plan = config("checkpoint.every=2"), make_plan(config(), cpu_nodes(8))
    answers: list[Cluster | Exception] = [UserError("the nodes changed while they were checked"), cpu_nodes(8, 8)]

    def see(config: Any) -> Cluster:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    saved = iter([[], ["step_2"]])
    monkeypatch.setattr(heal, "NODES_S", 0.01)
    monkeypatch.setattr(heal.store, "complete_checkpoints", lambda folder: next(saved))
    with pytest.raises(heal.NodesChanged, match=r"new: 10\.0\.0\.1"):
        asyncio.run(asyncio.wait_for(heal.watch_for_new_nodes(plan, run, see), 60))
    assert not answers


# ---- the nodes that Ray lists ---------------------------------------------------------------------------------------


def ray_node(name: str, address: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": address, "Alive": alive, "Resources": resources}


def test_the_drivers_node_is_the_first():
    gib = 2**30
    first = ray_node("a", "10.0.0.9", CPU=8.0, memory=20.0 * gib, object_store_memory=4.0 * gib)
    second = ray_node("b", "10.0.0.1", CPU=16.0, GPU=8.0, **{"accelerator_type:H100": 1.0})
    dead, headless = ray_node("c", "10.0.0.2", alive=False, CPU=4.0), ray_node("d", "10.0.0.3", memory=1.0)
    found = cluster_of([second, dead, headless, first], "a")
    assert found.nodes == (
        Machine(8, 0, 24 * 1024, address="10.0.0.9", node_id="a"),
        Machine(16, 8, address="10.0.0.1", node_id="b", gpu_name="H100"),
    )
    assert (found.cores, found.gpus, found.is_joined) == (24, 8, True)
    with pytest.raises(UserError, match=r"has 2 node\(s\), and none of them is alive and has a CPU"):
        cluster_of([dead, headless], "d")


def test_without_a_cluster_there_is_this_machine(config, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = see_cluster(config())
    assert len(found.nodes) == 1 and not found.is_joined
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert not see_cluster(config("runtime=local", "placement.trainer.ranks=1")).is_joined


def test_a_cluster_that_does_not_answer(config, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(UserError, match=r"^RAY_ADDRESS=127\.0\.0\.1:9: cannot join .*refused.*unset RAY_ADDRESS"):
        see_cluster(config())


@pytest.mark.parametrize(("last", "reason"), [("127.0.0.1:9", "refused, at 127.0.0.1:9"), (None, "Could not find any")])
def test_auto_fails_at_once_if_the_last_cluster_is_gone(config, monkeypatch, last, reason):
    """The file in which Ray keeps the address of the last `ray start` stays when the cluster ends."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: set())
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: last)
    with pytest.raises(UserError, match=rf"^RAY_ADDRESS=auto: cannot join .*{reason}.*unset RAY_ADDRESS"):
        see_cluster(config())


# ---- CPUs -----------------------------------------------------------------------------------------------------------


def test_one_machine_is_a_cluster_of_one_node(config):
    machine = Machine(8, 0)
    assert make_plan(config(), machine) == make_plan(config(), Cluster((machine,)))
    plan = make_plan(config(), machine)
    assert plan.role_nodes == {"engine": (0,) * 4, "trainer": (0,) * 4, "controller": (0,) * 4}
    assert not any(line.startswith(("nodes", "storage")) for line in plan.lines(config()))


def test_roles_are_spread_over_the_nodes(config):
    plan = make_plan(config(), cpu_nodes(8, 8))
    assert (plan.trainers, plan.engines, plan.controllers) == (8, 8, 8)
    assert plan.role_nodes == dict.fromkeys(("engine", "trainer", "controller"), (0, 1, 0, 1, 0, 1, 0, 1))
    assert (plan.trainer_threads, plan.reward_workers) == (2, 2)  # 8 cores for 4 ranks, and for 4 controllers
    uneven = make_plan(config("placement.trainer.ranks=1", "controllers=2"), cpu_nodes(4, 2))
    assert uneven.role_nodes == {"engine": (0, 0, 1, 0, 0, 1), "trainer": (0,), "controller": (0, 0)}
    assert uneven.trainer_threads == 4


def test_the_lines_of_the_dry_run(config):
    lines = make_plan(config(), cpu_nodes(2, 2, 1)).lines(config())
    at = lines.index("nodes        3 of the Ray cluster")
    assert lines[at + 1 : at + 4] == [
        "             10.0.0.0: 2 core(s): engine 0, 2, trainer 0, 2, controller 0, 2",
        "             10.0.0.1: 2 core(s): engine 1, 3, trainer 1, 3, controller 1, 3",
        "             10.0.0.2: 1 core(s): engine 4, trainer 4, controller 4",
    ]
    assert lines[at + 4].startswith("storage      all nodes must see the same files under run.dir=")


def test_memory_is_checked_for_every_node(config):
    found, small = config(), cpu_nodes(4, 4, memory_mb=3_000)
    warnings, _ = light_checks(found, make_plan(found, cpu_nodes(4, 4, memory_mb=8_000)))
    assert warnings == []
    with pytest.raises(UserError, match=r"^node 10\.0\.0\.0: this run needs at least 3\.6 GB of memory.*driver"):
        light_checks(found, make_plan(found, small))
    first, second = small.nodes
    big_first = Cluster((Machine(4, 0, 99_000, address=first.address, node_id="a"), second))
    with pytest.raises(
        UserError, match=r"^node 10\.0\.0\.1: this run needs at least 3\.2 GB .*\(counts of this node\)$"
    ):
        light_checks(found, make_plan(found, big_first))


def test_cuda_needs_a_node_with_a_gpu(config):
    found = config("training.device=cuda")
    with pytest.raises(UserError, match=r"training\.device=cuda: no node of the Ray cluster has a GPU"):
        light_checks(found, make_plan(found, cpu_nodes(4, 4)))
    light_checks(found, make_plan(found, gpu_nodes(0, 4)))  # the driver's node needs none


# ---- tensor parallelism of the trainer ------------------------------------------------------------------------------


def test_trainer_groups_stay_within_a_node(config):
    tp = "placement.trainer.tensor_parallel=2"
    plan = make_plan(config(tp), gpu_nodes(8, 8))
    assert (plan.trainers, plan.topology.tensor, plan.topology.data_parallel, plan.shard) == (16, 2, 8, 8)
    assert plan.controllers == 8 and plan.role_nodes["controller"] == (0, 0, 0, 0, 1, 1, 1, 1)
    assert make_plan(config(tp, "controllers=2"), gpu_nodes(8, 8)).role_nodes["controller"] == (0, 1)
    assert "16 trainer rank(s) x 8 thread(s) in tensor-parallel groups of 2" in "\n".join(plan.lines(config(tp)))
    odd = make_plan(config(tp), gpu_nodes(3, 5))
    assert (odd.trainers, odd.role_nodes["trainer"]) == (6, (0, 0, 1, 1, 1, 1))  # a GPU of each node is not used
    assert (odd.engines, odd.role_nodes["engine"]) == (8, (0, 0, 0, 1, 1, 1, 1, 1))
    on_cpu = make_plan(config(tp), cpu_nodes(3, 3))
    assert (on_cpu.trainers, on_cpu.topology.data_parallel, on_cpu.shard, on_cpu.controllers) == (4, 2, 1, 2)
    assert on_cpu.role_nodes["trainer"] == (0, 0, 1, 1) and on_cpu.role_nodes["controller"] == (0, 1)


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            [],
            ["12 prompts x 4 = 48 samples, at most 960 tokens", "1 mini-batch(es) of 48 samples", "= 60 prompts, 240"],
        ),
        (["objective=sft"], ["12 rows = 12 samples, at most 240 tokens", "of 12 samples", "= 60 rows, 60 samples"]),
        (["objective=dpo"], ["12 pairs = 24 samples, at most 480 tokens", "of 24 samples", "= 60 rows, 120 samples"]),
        (
            ["objective=kto"],
            ["12 rows, each with the answer to another row for the KL = 24 samples", "of 24", "60 rows"],
        ),
        (
            ["objective=dpo", "preference.pairs=rollouts"],
            [
                "= 48 samples, of which 24 are trained on (one pair per prompt), at most 960 tokens",
                "of 24",
                "60 prompts",
            ],
        ),
    ],
)
def test_the_size_of_a_step_depends_on_the_objective(config, overrides, lines):
    found = make_plan(config(*overrides), cpu_nodes(2)).lines(config(*overrides))
    assert all(words in line for words, line in zip(lines, found, strict=False)), found


def test_trainer_groups_that_do_not_divide_the_ranks(config):
    with pytest.raises(UserError, match=r"placement\.trainer: tensor_parallel=2 .* must divide the number of ranks, 3"):
        make_plan(config("placement.trainer={ranks: 3, tensor_parallel: 2}"), gpu_nodes(8))
    with pytest.raises(UserError, match=r"runtime=local has one process .*tensor_parallel=2 \(use runtime=ray\)"):
        config("runtime=local", "placement.trainer.tensor_parallel=2")
    shards = config("placement.trainer={ranks: 8, tensor_parallel: 2, shard: 8}")
    with pytest.raises(UserError, match=r"shard=8 must divide the number of ranks / tensor_parallel, 4"):
        make_plan(shards, gpu_nodes(8))
    context = config("placement.trainer={ranks: 6, tensor_parallel: 2}", "training.context_parallel=2")
    with pytest.raises(UserError, match=r"context_parallel=2 must divide the number of data-parallel ranks, 3"):
        make_plan(context, gpu_nodes(8))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ((VLLM, "generation.tensor_parallel=8"), "generation.tensor_parallel=8"),
        (("placement.trainer.tensor_parallel=8",), "placement.trainer.tensor_parallel=8"),
    ],
)
@pytest.mark.parametrize("mode", ["shared", "disaggregated"])
def test_groups_wider_than_the_largest_node(config, overrides, key, mode):
    with pytest.raises(UserError) as caught:
        make_plan(config(*overrides, f"placement.mode={mode}"), gpu_nodes(4, 6, 4))
    assert str(caught.value) == (
        f"{key}: a tensor-parallel group stays within a node, and the largest node has 6 GPU(s); expected at most 6"
    )


def test_a_judge_wider_than_the_largest_node(config):
    wide = config(judges=2, engine="vllm", tensor_parallel=4)
    with pytest.raises(UserError, match=r"^rewards\.judges\.0\.tensor_parallel=4: .* the largest node has 2 GPU"):
        make_plan(wide, gpu_nodes(2, 2))


# ---- shared GPUs ----------------------------------------------------------------------------------------------------


def test_gpus_are_numbered_node_by_node(config):
    plan = make_plan(config(), gpu_nodes(2, 0, 3))
    assert plan.gpu_assignment.nodes == (0, 0, 2, 2, 2) and plan.gpus == 5
    assert plan.role_nodes == dict.fromkeys(("engine", "trainer", "controller"), (0, 0, 2, 2, 2))
    assert plan.gpu_assignment.engines_share_gpus
    few = make_plan(config("placement.trainer.ranks=2", "placement.policy.replicas=2"), gpu_nodes(8, 8))
    assert few.gpus == 2 and set(few.role_nodes["engine"]) == {0}


def test_tensor_parallel_engines_on_shared_gpus(config):
    plan = make_plan(config(VLLM, "generation.tensor_parallel=2"), gpu_nodes(3, 2))
    assert (plan.engines, plan.trainers) == (2, 5)
    assert plan.gpu_assignment.replicas["engine"] == ((0, 1), (3, 4))
    assert plan.gpu_assignment.of("engine", 1) == ((3, 4), 0.475)
    assert not plan.gpu_assignment.engines_share_gpus


def test_blocks_of_slots_stay_within_a_node(config):
    made = config(
        *(VLLM, "generation.tensor_parallel=2", "placement.mode=dynamic"), judges=1, engine="vllm", tensor_parallel=4
    )
    plan = make_plan(made, gpu_nodes(6, 8))
    assert plan.grid == DeviceGrid(12, {"policy": 2, "critic0": 4})
    assert plan.gpu_assignment.replicas["engine"] == ((0, 1), (2, 3), (6, 7), (8, 9), (10, 11), (12, 13))
    assert plan.gpu_assignment.replicas["judge-critic0"] == ((0, 1, 2, 3), (6, 7, 8, 9), (10, 11, 12, 13))


def test_auto_mode_on_a_cluster(config):
    nodes = [Machine(8, 4, address=a, node_id=a, gpu_name=n) for a, n in (("a", "H100"), ("b", "H100"), ("c", "A100"))]
    asked = config("placement.mode=auto", judges=1)
    assert "on 8 x NVIDIA H100" in choose_mode(asked, Cluster(tuple(nodes[:2])))[1]
    assert "no data for" in choose_mode(asked, Cluster(tuple(nodes)))[1]  # the GPUs differ


def test_engines_sleep_by_the_gpus_of_the_cluster(config):
    """Not by those of the machine that asks."""
    found = config(VLLM)
    assert make_plan(found, gpu_nodes(0, 2)).sleep_level == 2
    assert make_plan(found, cpu_nodes(4, 4)).sleep_level == 0


def test_weights_of_engines_on_other_gpus(config):
    """A CUDA handle opens only on the GPU of the rank that wrote it."""
    placement, on_gpu = config().placement, {"one_process": False, "on_gpu": True}
    assert choose_method(placement, **on_gpu) == "cuda_ipc"
    assert choose_method(placement, **on_gpu, same_gpu=False) == "host_memory"
    apart = config("placement.mode=disaggregated").placement
    assert choose_method(apart, **on_gpu, same_gpu=False) == "broadcast"


# ---- separate GPUs --------------------------------------------------------------------------------------------------


def test_separate_gpus_are_packed_within_nodes(config):
    apart = (VLLM, "placement.mode=disaggregated", "generation.tensor_parallel=4")
    plan = make_plan(config(*apart), gpu_nodes(8, 8))
    assert (plan.trainers, plan.engines, plan.gpus) == (8, 2, 16)
    assert plan.role_nodes["engine"] == (0, 0) and plan.role_nodes["trainer"] == (1,) * 8
    assert plan.role_nodes["controller"] == (1,) * 8  # near the ranks
    assert "devices      16 GPU(s): engine 8, trainer 8" in plan.lines(config(*apart))


def test_separate_counts_shrink_until_they_fit(config):
    """Two nodes of three GPUs have room for two pairs, not for three."""
    apart = (VLLM, "placement.mode=disaggregated", "generation.tensor_parallel=2")
    plan = make_plan(config(*apart, "placement.trainer.tensor_parallel=2"), gpu_nodes(3, 3))
    assert (plan.trainers, plan.engines) == (2, 1)
    assert plan.role_nodes == {"engine": (0,), "trainer": (1, 1), "controller": (1,)}


def test_separate_gpus_that_do_not_fit_say_why(config):
    apart = (VLLM, "placement.mode=disaggregated", "generation.tensor_parallel=2", "placement.policy.replicas=3")
    given = (*apart, "placement.trainer.ranks=1")
    assert make_plan(config(*given), gpu_nodes(3, 4)).role_nodes["engine"] == (0, 1, 1)
    with pytest.raises(UserError) as caught:
        make_plan(config(*given), gpu_nodes(3, 3, 1))
    assert str(caught.value) == (
        "placement.mode=disaggregated: no node has 2 GPUs left for engine-2, and tensor-parallel groups stay within a "
        "node; nodes with 3, 3, 1 GPUs, needed: engine 3 x 2, trainer 1 x 1 (keys: placement.trainer.ranks, "
        "placement.policy.replicas, rewards.judges.N.replicas)"
    )


# ---- for any sizes --------------------------------------------------------------------------------------------------


def checked(found: GpuAssignment, node_gpus: list[int], counts: dict[str, int], widths: dict[str, int], group: int):
    """Every replica has its GPUs, those of a group are on one node, and no node gives more GPUs than it has."""
    for kind, count in counts.items():
        replicas = found.replicas[kind]
        assert len(replicas) == count
        for bundles in replicas:
            assert sum(found.bundles[i] for i in bundles) == widths.get(kind, 1)
            assert len({found.nodes[i] for i in bundles}) == 1 and len(set(bundles)) == len(bundles)
    ranks = [found.node_of(TRAINER, rank) for rank in range(counts[TRAINER])]
    assert all(len(set(ranks[first : first + group])) == 1 for first in range(0, len(ranks), group))
    for node, gpus in enumerate(node_gpus):
        assert sum(n for n, at in zip(found.bundles, found.nodes, strict=True) if at == node) <= gpus


def test_no_group_straddles_nodes_whatever_their_sizes():
    chance, placed = random.Random(7), 0
    for _ in range(600):
        node_gpus = [chance.randrange(0, 9) for _ in range(chance.randrange(1, 5))]
        largest = max(node_gpus)
        if not largest:
            continue
        widest = chance.choice([largest, min(largest, 2)])
        widths = {"engine": chance.randint(1, widest), "judge-a": chance.randint(1, widest)}
        group = chance.randint(1, widest)
        counts = {"engine": chance.randint(1, 6), "judge-a": chance.randint(1, 3), "scorer-b": 1}
        counts[TRAINER] = group * chance.randint(1, 4)
        shared = shared_gpus(node_gpus, counts, widths, group)
        checked(shared, node_gpus, counts, widths, group)
        load = [0.0] * len(shared.bundles)
        for kind, count in counts.items():
            for rank in range(count):
                (first, *_), share = shared.of(kind, rank)
                load[first] += share
        assert max(load) <= 0.96  # Ray can schedule them all
        try:
            separate = separate_gpus(node_gpus, counts, widths, group)
        except UserError:
            continue
        placed += 1
        checked(separate, node_gpus, counts, widths, group)
        used = [bundle for replicas in separate.replicas.values() for bundles in replicas for bundle in bundles]
        assert sorted(used) == list(range(len(separate.bundles)))  # nobody shares
    assert placed > 50


@pytest.mark.parametrize(
    ("node_gpus", "width", "block", "found"),
    [
        ([3, 2], 2, 1, [(0, 1), (3, 4)]),
        ([3, 5], 1, 2, [(0,), (1,), (3,), (4,), (5,), (6,)]),
        ([1, 1], 2, 1, []),
        ([0, 2], 1, 1, [(0,), (1,)]),
    ],
)
def test_sets_of_gpus_within_nodes(node_gpus, width, block, found):
    assert within_nodes(node_gpus, width, block) == found


# ---- a critic with ranks of its own ----

PPO = ("algorithm.preset=ppo", "placement.critic.ranks=2")


def test_critic_ranks_have_gpus_of_their_own(config):
    found = make_plan(config(*PPO, VLLM, "placement.mode=disaggregated"), gpu_nodes(4, 4))
    assert (found.critics, found.critic_shard, found.trainers, found.engines) == (2, 2, 3, 3)
    taken = [bundle for bundles in found.gpu_assignment.replicas.values() for each in bundles for bundle in each]
    assert len(taken) == len(set(taken)) == 8
    assert "2 critic rank(s)" in "\n".join(found.lines(config(*PPO)))
    with pytest.raises(UserError, match=r"placement\.critic\.ranks=2: on GPUs .*disaggregated, got shared"):
        make_plan(config(*PPO, VLLM), gpu_nodes(4, 4))
    chosen, why = choose_mode(config(*PPO, VLLM, "placement.mode=auto", judges=1), gpu_nodes(4, 4))
    assert chosen.placement.mode == "disaggregated" and "the critic has its own ranks" in why
    with pytest.raises(UserError, match=r"critic 7 x 1 = 9 GPUs, got 8 .*placement\.critic\.ranks"):
        many = ("placement.trainer.ranks=1", "placement.policy.replicas=1", "placement.critic.ranks=7")
        make_plan(config(*PPO, VLLM, "placement.mode=disaggregated", *many), gpu_nodes(4, 4))


def test_critic_ranks_share_the_cores_with_trainer_ranks(config):
    found = make_plan(config(*PPO, "placement.trainer.ranks=2"), cpu_nodes(8, 8))
    assert found.role_nodes["critic"] == found.role_nodes["trainer"] == (0, 1)
    assert (found.trainer_threads, found.critic_shard) == (4, 1)
    without = make_plan(config("placement.critic.ranks=2", "placement.trainer.ranks=2"), cpu_nodes(8, 8))
    assert without.critics == 0 and "critic" not in without.role_nodes and without.trainer_threads == 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("runtime=local", "placement.trainer.ranks=1"), "runtime=local has one process; expected 0 or 1"),
        (EMULATED, "training.backend=emulated has no critic"),
        (("placement.critic.shard=3",), "shard=3 must divide ranks=2"),
    ],
)
def test_where_a_critic_cannot_have_ranks_of_its_own(config, overrides, message):
    with pytest.raises(UserError, match=message):
        config(*PPO, *overrides)
