"""Runs on several hosts, each in namespaces of its own (bench/hosts.py): own address, own /tmp, own processes. What the
hosts share is one folder. Ray authenticates every connection."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from bench.hosts import SHARED, Host, Hosts, make_hosts, why_not
from gcore.observe.events import read_events
from tests.e2e.helpers import RECIPE, rows, steps, train
from tests.e2e.test_cluster import node_of_each_role, wait_for_step
from tests.faults.test_kill import EMULATED

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces are permitted")]
ROLES = ("controllers=2", "placement.policy.replicas=2", "placement.trainer.ranks=2", "training.device=cpu")
ADDRESSES = {"10.77.0.1", "10.77.0.2"}
REWARDS = """
from points import full

def score(completions, answer, **columns):
    return [full() if text.strip() == str(right) else 0.0 for text, right in zip(completions, answer)]
"""
POINTS = """
def full():
    return 1.0
"""


@contextlib.contextmanager
def cluster(folder: Path, count: int = 2, env: Sequence[Mapping[str, str]] = ()) -> Iterator[Hosts]:
    with make_hosts(count, folder, env) as hosts:
        hosts.start_ray()
        yield hosts


def gcore(host: Host, *words: str, cwd: str = "/tmp") -> subprocess.CompletedProcess[str]:
    return host.run(sys.executable, "-m", "gcore.cli", *words, cwd=cwd, timeout=500)


def write_project(host: Host) -> str:
    """A recipe with its own reward, which imports another file: only on this host."""
    path = "/tmp/project"
    functions = [{"name": "exact", "path": "rewards.py:score"}]
    recipe = {**RECIPE, "rewards": {"functions": functions}}
    recipe["run"] = {**RECIPE["run"], "dir": str(SHARED / "runs")}
    host.write(f"{path}/tiny.yaml", yaml.safe_dump(recipe))
    host.write(f"{path}/rewards.py", REWARDS)
    host.write(f"{path}/points.py", POINTS)
    return path


def test_a_run_with_code_of_the_head_computes_what_one_machine_computes(tmp_path):
    with cluster(tmp_path) as hosts:
        project = write_project(hosts[0])
        assert hosts[1].run("test", "-e", project).returncode != 0
        done = gcore(hosts[0], "train", "tiny.yaml", "run.name=two", *ROLES, cwd=project)
        assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "two"
    nodes = node_of_each_role(folder)
    assert {nodes[f"controller-{i}"] for i in range(2)} == ADDRESSES == set(nodes.values())
    expected = steps(train(tmp_path, "one", *ROLES))  # its reward is G-Core's own, with the same values
    assert [row["samples_digest"] for row in steps(rows(folder))] == [row["samples_digest"] for row in expected]


def test_a_host_with_another_torch_is_refused_by_name(tmp_path):
    stub = tmp_path / "stub" / "torch-2.9.1.dist-info"
    stub.mkdir(parents=True)
    (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
    changed = {"PYTHONPATH": f"{SHARED / 'stub'}:{Path(__file__).parents[2]}"}
    with cluster(tmp_path, env=[{}, changed]) as hosts:
        project = write_project(hosts[0])
        done = gcore(hosts[0], "train", "tiny.yaml", *ROLES, cwd=project)
        assert done.returncode == 2 and "node 10.77.0.2 (host2): torch 2.9.1, expected 2." in done.stderr, done.stderr
        assert not (tmp_path / "runs" / "tiny").exists()  # no role has started
        doctor = gcore(hosts[0], "doctor", "--cluster", "--run-dir", "/tmp/runs")
        assert doctor.returncode == 2, doctor.stdout + doctor.stderr
        problems = [line for line in doctor.stdout.splitlines() if line.startswith("PROBLEM")]
        assert len(problems) == 2 and "torch 2.9.1" in problems[0] and "--run-dir" in problems[1], doctor.stdout


def test_the_doctor_finds_nothing_on_equal_hosts(tmp_path):
    with cluster(tmp_path) as hosts:
        doctor = gcore(hosts[0], "doctor", "--cluster", "--run-dir", str(SHARED / "runs"))
    assert doctor.returncode == 0 and "PROBLEM" not in doctor.stdout, doctor.stdout + doctor.stderr
    assert "10.77.0.1 -> 10.77.0.2" in doctor.stdout and "10.77.0.2 -> 10.77.0.1" in doctor.stdout
    assert f"run folder  {SHARED / 'runs'} is the same folder on all nodes" in doctor.stdout
    assert not list((tmp_path / "runs").iterdir())  # its files are removed


@pytest.mark.parametrize("silent", [False, True], ids=["closes its connections", "loses its power"])
def test_a_run_survives_the_death_of_a_host(tmp_path, silent):
    emulated = [text for text in EMULATED if not text.startswith("training.emulated")]
    slow = "training.emulated={seconds_per_token: 1.0e-2}"  # some seconds per step
    overrides = (*emulated, slow, "checkpoint.every=1", "run.steps=8", "training.device=cpu", "observe.eval_every=0")
    auto = ("controllers=auto", "placement.policy.replicas=auto", "placement.trainer.ranks=auto")
    with cluster(tmp_path) as hosts:
        project = write_project(hosts[0])
        command = [sys.executable, "-m", "gcore.cli", "train", "tiny.yaml", "run.name=healed", *overrides, *auto]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with hosts[0].popen(command, cwd=project, **pipes) as process:
            folder = tmp_path / "runs" / "healed"
            try:
                wait_for_step(folder, 2, process)
            except AssertionError:
                process.kill()
                pytest.fail(process.communicate()[0])
            assert set(node_of_each_role(folder).values()) == ADDRESSES
            killed = time.monotonic()
            hosts.kill(1, silent)
            shown, _ = process.communicate(timeout=500)
            print(f"{time.monotonic() - killed:.0f} s from the death of the host to the end of the run")
            assert process.returncode == 0, shown
    assert "lost: 10.77.0.2: the run continues on 1 node(s)" in shown, shown
    assert any(event["event"] == "rollback" for event in read_events(folder))
    expected = train(tmp_path, "still", *EMULATED, "run.steps=8", "observe.eval_every=0", "runtime=local")
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["samples_digest"] for row in steps(found)] == [row["samples_digest"] for row in steps(expected)]


# ---- recipes/launch/slurm.sh, with a srun that starts one task per host ---------------------------------------------

SRUN = """#!/bin/bash
# asks the test to start the tasks, and waits for their exit code
while [[ "$1" == --* ]]; do shift; done
{ env -0 | grep -z -e ^GCORE_ -e ^RAY_ -e ^SLURM_ ; printf '\\0'; printf '%s\\0' "$@"; } > "$FAKE/request.new"
mv "$FAKE/request.new" "$FAKE/request"
while [ ! -e "$FAKE/code" ]; do sleep 0.2; done
exit "$(cat "$FAKE/code")"
"""


def start_tasks(hosts: Hosts, request: Path, log: Path) -> list[subprocess.Popen]:
    """As srun does: the same words on every host, with the environment of the batch script and a number."""
    variables, _, words = request.read_text().partition("\0\0")
    env = dict(line.split("=", 1) for line in variables.split("\0"))
    command = words.rstrip("\0").split("\0")
    return [
        host.popen(command, {**env, "SLURM_PROCID": str(i)}, cwd="/tmp", stdout=log.open("w"), stderr=subprocess.STDOUT)
        if i
        else host.popen(
            command, {**env, "SLURM_PROCID": "0"}, cwd="/tmp/project", stdout=log.with_name("head").open("w")
        )
        for i, host in enumerate(hosts.all)
    ]


def test_the_slurm_script_starts_ray_and_the_run_on_all_hosts(tmp_path):
    fake, script = tmp_path / "fake", Path(__file__).parents[2] / "recipes" / "launch" / "slurm.sh"
    fake.mkdir()
    (fake / "srun").write_text(SRUN)
    (fake / "srun").chmod(0o755)
    path = f"{SHARED / 'fake'}:{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    common = {"PATH": path, "FAKE": str(SHARED / "fake"), "RAY_ADDRESS": "", "RAY_AUTH_TOKEN": "", "RAY_AUTH_MODE": ""}
    common["PYTHONPATH"] = f"/tmp/project:{Path(__file__).parents[2]}"  # the command gcore does not look in its folder
    with make_hosts(2, tmp_path, [common, common]) as hosts:
        write_project(hosts[0])
        slurm = {"SLURM_NNODES": "2", "SLURM_CPUS_ON_NODE": "2", "GCORE_INTERFACE": "eth0"}
        words = ["train", "tiny.yaml", "run.name=slurm", "run.steps=2", *ROLES]
        with hosts[0].popen(["bash", str(script), *words], slurm, cwd="/tmp") as batch:
            while not (fake / "request").exists():
                assert batch.poll() is None
                time.sleep(0.1)
            head, *others = start_tasks(hosts, fake / "request", tmp_path / "others")
            code = head.wait(500)
            shown = (tmp_path / "head").read_text()
            assert code == 0, shown
            assert [other.wait(60) for other in others] == [0], (tmp_path / "others").read_text()
            (fake / "code").write_text(str(code))
            assert batch.wait(30) == 0
    assert "2 nodes have joined Ray" in shown
    assert set(node_of_each_role(tmp_path / "runs" / "slurm").values()) == ADDRESSES
