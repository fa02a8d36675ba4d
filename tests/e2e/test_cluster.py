"""A run on a Ray cluster of two nodes: roles are where the plan puts them, and results are those of one machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gcore.observe.events import read_events
from tests.e2e.helpers import rows, steps, train, write_recipe
from tests.e2e.ray_nodes import ADDRESSES, two_nodes
from tests.faults.test_kill import EMULATED

pytestmark = pytest.mark.release
ROOT = Path(__file__).parents[2]
ROLES = ("controllers=2", "placement.policy.replicas=2", "placement.trainer.ranks=2", "training.device=cpu")


@pytest.fixture(scope="module")
def cluster():
    with two_nodes(cpus=2, gpus=(2, 2)) as nodes:
        yield nodes.env


def run(env: dict[str, str], *command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, *command], env=env, cwd=cwd, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def node_of_each_role(folder: Path) -> dict[str, str]:
    """From the first lines of the logs, which the roles themselves wrote."""
    heads = (path.read_text().partition("\n")[0] for path in (folder / "logs").glob("*.log"))
    found = (re.match(r"--- (\S+) on node (\S+), process", head) for head in heads)
    return {match[1]: match[2] for match in found if match}


def test_the_dry_run_shows_the_nodes(cluster, tmp_path):
    shown = run(cluster, "-m", "gcore.cli", "train", str(write_recipe(tmp_path)), "--dry-run", *ROLES)
    for i, address in enumerate(ADDRESSES):
        roles = f"engine {i}, trainer {i}, controller {i}"
        assert f"{address}: 2 core(s), 2 GPU(s): {roles}\n" in shown
        assert re.search(rf"memory .*{address} at least \S+ [MG]B of \S+ GB", shown)
    assert f"all nodes must see the same files under run.dir={tmp_path / 'runs'}" in shown


@pytest.mark.parametrize("method", ["host", "broadcast"])
def test_two_nodes_compute_what_one_computes(cluster, tmp_path, one_node, method):
    """Weights cross the nodes by either method. The paths are relative to the driver's folder."""
    recipe = write_recipe(tmp_path)
    overrides = (f"run.name={method}", "run.dir=runs", f"placement.weights={method}", *ROLES)
    run(cluster, "-m", "gcore.cli", "train", recipe.name, *overrides, cwd=tmp_path)
    folder = tmp_path / "runs" / method
    kinds = ("engine", "trainer", "controller")
    assert node_of_each_role(folder) == {f"{kind}-{i}": ADDRESSES[i] for kind in kinds for i in range(2)}
    found = steps(rows(folder))
    assert [row["samples_digest"] for row in found] == [row["samples_digest"] for row in one_node]
    for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in one_node], abs=1e-6)


@pytest.fixture(scope="module")
def one_node(tmp_path_factory):
    return steps(train(tmp_path_factory.mktemp("one"), "one", *ROLES))


def test_the_quickstart_learns_on_two_nodes(cluster, tmp_path):
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    shorter = ("run.steps=30", "training.warm_start.steps=200", f"run.dir={tmp_path}")
    run(cluster, "-m", "gcore.cli", "train", recipe, *shorter, *ROLES)
    found = rows(tmp_path / "quickstart")
    accuracy = [row["eval/accuracy"] for row in found if "eval/accuracy" in row]
    assert accuracy[0] <= 0.5 and accuracy[-1] >= 0.85, accuracy
    assert set(node_of_each_role(tmp_path / "quickstart").values()) == set(ADDRESSES)


# ---- nodes that leave and join --------------------------------------------------------------------------------------


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not (folder / "metrics.jsonl").exists() or not any(row["step"] >= step for row in steps(rows(folder))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)


def test_a_run_shrinks_and_grows_with_the_cluster(tmp_path):
    """A node dies: the run continues on the other one from its last checkpoint. A node joins: the run uses it after
    the next checkpoint. The samples are those of a run that nothing disturbed."""
    emulated = [text for text in EMULATED if not text.startswith("training.emulated")]
    slow = "training.emulated={seconds_per_token: 1.0e-2}"  # some seconds per step
    overrides = (*emulated, slow, "checkpoint.every=1", "run.steps=20", "training.device=cpu", "observe.eval_every=0")
    auto = ("controllers=auto", "placement.policy.replicas=auto", "placement.trainer.ranks=auto")
    with two_nodes(cpus=2) as nodes:
        command = [sys.executable, "-m", "gcore.cli", "train", str(write_recipe(tmp_path)), "run.name=moved"]
        folder = tmp_path / "runs" / "moved"
        with subprocess.Popen(
            [*command, *overrides, *auto], env=nodes.env, cwd=ROOT, text=True, stdout=subprocess.PIPE
        ) as process:
            wait_for_step(folder, 2, process)
            assert set(node_of_each_role(folder).values()) == set(ADDRESSES)
            nodes.change("remove")
            wait_for_step(folder, 6, process)
            nodes.change("add")
            shown, _ = process.communicate(timeout=500)
            assert process.returncode == 0, shown
    assert "the run continues on 1 node(s)" in shown and "the run continues on 2 node(s)" in shown, shown
    # One rollback, or two if Ray noticed the loss of the node later than that of its processes. Growing loses nothing.
    assert sum(event["event"] == "rollback" for event in read_events(folder)) in (1, 2)
    expected = train(tmp_path, "still", *overrides, "controllers=1")
    assert [row["samples_digest"] for row in steps(rows(folder))] == [row["samples_digest"] for row in steps(expected)]


# ---- GPUs that Ray only counts --------------------------------------------------------------------------------------


class Witness:
    """A role that says where it runs."""

    def __init__(self, *args: Any) -> None:
        pass

    async def place(self) -> tuple[str, str, int]:
        import ray

        return ray.util.get_node_ip_address(), os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.getpid()


def probe(tensor_parallel: int) -> None:
    """Runs in a process that joins the cluster. Prints the place of every role, also of an engine that died."""
    from gcore.config.load import load_config
    from gcore.launch.build import build_runtime
    from gcore.launch.machines import see_cluster
    from gcore.launch.plan import make_plan

    wide = ("generation.engine=vllm", f"generation.tensor_parallel={tensor_parallel}")
    auto = ("placement.trainer.ranks=auto", "observe.logs=false")
    config = load_config(Path(sys.argv[1]), [*auto, *(wide if tensor_parallel > 1 else ())])
    plan = make_plan(config, see_cluster(config))

    async def witness() -> dict[str, list[Any]]:
        runtime = build_runtime(config, plan)
        try:
            counts = {"engine": plan.engines, "trainer": plan.trainers, "controller": plan.controllers}
            found = {}
            for kind, count in counts.items():
                handles = await runtime.start_group(kind, Witness, [()] * count)
                found |= {handle.name: await handle.call("place") for handle in handles}
                if kind == "engine":
                    last = handles[-1]
            os.kill(found[last.name][2], signal.SIGKILL)
            await asyncio.sleep(1)
            await runtime.revive(last.name)
            found["restarted"] = await last.call("place")
            assert found["restarted"][2] != found[last.name][2]
            return {name: [address, gpus] for name, (address, gpus, _) in found.items()}
        finally:
            runtime.stop()

    print(json.dumps(asyncio.run(witness())))


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_replicas_get_the_gpus_of_the_plan(cluster, tmp_path, tensor_parallel):
    """Engine i shares the GPU of rank i. A tensor-parallel engine has both GPUs of one node, also after a restart."""
    code = f"from tests.e2e.test_cluster import probe; probe({tensor_parallel})"
    found = json.loads(run(cluster, "-c", code, str(write_recipe(tmp_path))).splitlines()[-1])
    first, second = ADDRESSES
    gpus = [[first, "0"], [first, "1"], [second, "0"], [second, "1"]]
    engines = gpus if tensor_parallel == 1 else [[first, "0,1"], [second, "0,1"]]
    assert [found[f"trainer-{i}"] for i in range(4)] == gpus
    assert [found[f"engine-{i}"] for i in range(len(engines))] == engines
    assert [found[f"controller-{i}"][0] for i in range(4)] == [first, first, second, second]
    assert found["restarted"] == engines[-1]
