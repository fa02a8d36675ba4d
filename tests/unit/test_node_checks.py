"""What is compared between the nodes of a cluster, without a cluster: the facts are made up."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from gcore import user_files
from gcore.config.load import load_config
from gcore.launch import node_checks
from gcore.launch.machines import Cluster, Machine
from gcore.launch.node_checks import Difference, NodeGate, check_nodes, differences, needed_files, sent_files
from gcore.runtime import nodes as probes
from gcore.runtime.protocol import NodeFacts
from gcore.runtime.ray_cluster import interface_of
from gcore.types import UserError
from tests.e2e.helpers import write_recipe

VERSIONS = {"python": "3.11.7", "gcore": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.19.0", "ray": "2.60.0"}
DRIVER = NodeFacts("", "head", versions=VERSIONS, code="c0de")
NODE = replace(DRIVER, address="10.0.0.2", host="host2", interface="eth0")


def shown(node: NodeFacts, **options: object) -> list[tuple[str, bool]]:
    found = differences(DRIVER, [replace(NODE, address="10.0.0.1", host="host1"), node], **options)
    assert all(difference.text.startswith("node 10.0.0.2 (host2): ") for difference in found)
    return [(difference.text.partition("): ")[2], difference.breaks) for difference in found]


def test_equal_nodes_have_no_differences():
    assert shown(NODE) == []


@pytest.mark.parametrize(
    ("versions", "text", "breaks"),
    [
        ({"torch": "2.9.1+cpu"}, "torch 2.9.1+cpu, expected 2.13.0+cpu as on the driver's machine", True),
        ({"torch": "2.13.0+cu130"}, "torch 2.13.0+cu130, expected 2.13.0+cpu", False),  # another build of the release
        ({"python": "3.12.1"}, "python 3.12.1, expected 3.11.7", True),
        ({"python": "3.11.9"}, "python 3.11.9, expected 3.11.7", False),
        ({"ray": "2.59.0"}, "ray 2.59.0, expected 2.60.0", True),
        ({"safetensors": "0.8.0"}, "safetensors 0.8.0, expected none", False),
        ({"vllm": "0.24.0"}, "vllm 0.24.0, expected none", False),
    ],
)
def test_versions(versions, text, breaks):
    ((found, is_broken),) = shown(replace(NODE, versions={**VERSIONS, **versions}))
    assert found.startswith(text) and is_broken == breaks


def test_an_engine_breaks_a_run_only_if_the_run_uses_it():
    node = replace(NODE, versions={**VERSIONS, "vllm": "0.24.0"})
    assert [breaks for _, breaks in shown(node, engines={"embedded"})] == [False]
    assert [breaks for _, breaks in shown(node, engines={"vllm"})] == [True]


def test_code_network_folder_and_clock():
    assert shown(replace(NODE, code="0ther"))[0][0].startswith("other code of G-Core (0.1.0, digest 0ther)")
    assert "10.0.0.2" in shown(replace(NODE, interface=""))[0][0]
    assert "Connection refused" in shown(replace(NODE, link="Connection refused, port 41211"))[0][0]
    ((text, breaks),) = shown(replace(NODE, folder="it does not exist"), folder="run.dir=/tmp/runs")
    assert text.startswith("run.dir=/tmp/runs: it does not exist; ") and breaks
    ((text, breaks),) = shown(replace(NODE, clock_s=-3.0, clock_error_s=0.1))
    assert "3.0 s behind" in text and not breaks
    assert shown(replace(NODE, clock_s=3.0, clock_error_s=2.5)) == []  # not certain
    ((text, breaks),) = shown(replace(NODE, link_mb_s=12.0))
    assert "only 12 MB/s" in text and not breaks


def test_a_node_that_cannot_be_looked_at_and_gpus_of_two_kinds():
    ((text, breaks),) = shown(NodeFacts("10.0.0.2", "host2", failure="ModuleNotFoundError: No module named 'gcore'"))
    assert "No module named 'gcore'" in text and breaks
    found = differences(DRIVER, [replace(NODE, gpus=("H100, 570",)), replace(NODE, gpus=("A100, 570",))])
    assert [difference.breaks for difference in found] == [False] and "A100, 570, H100, 570" in found[0].text


def test_files_that_nodes_need(tmp_path):
    files = {"model.path": "/models/qwen", "data.train.path": "/data/train.jsonl"}
    driver = replace(DRIVER, sizes={"/models/qwen": 0, "/data/train.jsonl": 100})
    node = replace(NODE, sizes={"/models/qwen": -1, "/data/train.jsonl": 90})
    first, second = differences(driver, [node], files=files)
    assert "model.path=/models/qwen: no such file or folder there" in first.text and first.breaks
    assert "data.train.path=/data/train.jsonl: another file there, 90 bytes instead of 100" in second.text


def test_small_files_and_code_are_sent_and_folders_are_needed(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "model").mkdir()
    overrides = [f"data.train={{path: {tmp_path}/train.jsonl}}", "data.eval=null", f"workflow={tmp_path}/flow.py:run"]
    overrides += [f"model={{path: {tmp_path}/model}}"]
    config = load_config(write_recipe(tmp_path), overrides)
    sent = sent_files(config)
    assert sent == [f"{tmp_path}/flow.py", f"{tmp_path}/train.jsonl"]
    assert needed_files(config, sent) == {"model.path": f"{tmp_path}/model"}


def test_a_run_is_refused_with_the_name_of_the_node_and_only_if_it_uses_it(monkeypatch, tmp_path):
    config = load_config(write_recipe(tmp_path))
    nodes = tuple(Machine(2, 0, address=f"10.0.0.{i}", node_id=f"id{i}") for i in (1, 2))
    bad = replace(NODE, versions={**VERSIONS, "torch": "2.9.1"})

    def look(nodes, *args):
        return DRIVER, [bad if node.address == "10.0.0.2" else NODE for node in nodes]

    monkeypatch.setattr(node_checks, "look_at_nodes", look)
    with pytest.raises(UserError, match=r"1 problem.*\n  node 10\.0\.0\.2 \(host2\): torch 2\.9\.1, expected"):
        check_nodes(config, SimpleNamespace(nodes=nodes, role_nodes={"engine": (0, 1)}))
    assert check_nodes(config, SimpleNamespace(nodes=nodes, role_nodes={"engine": (0, 0)})) == []


def test_a_node_that_joins_later_and_would_break_the_run_is_left_out(monkeypatch, tmp_path):
    first, good, bad = (Machine(2, 0, address=f"10.0.0.{i}", node_id=f"id{i}") for i in (1, 2, 3))
    asked: list[str] = []

    def compare(config, nodes, trains):
        asked.extend(node.address for node in nodes)
        return [Difference("node 10.0.0.3: torch")] if nodes == [bad] else [Difference("a note", breaks=False)]

    monkeypatch.setattr(node_checks, "compare_nodes", compare)
    notes: list[str] = []
    gate = NodeGate(lambda config: Cluster((first, good, bad)), [first])
    gate.note = notes.append
    for _ in range(2):
        assert gate.see(load_config(write_recipe(tmp_path))).nodes == (first, good)
    assert asked == ["10.0.0.2", "10.0.0.3"]  # each one once
    assert notes == ["node 10.0.0.3: torch; the run does not use this node"]


def test_the_clock_of_another_machine():
    offset, error = probes.measure_clock(lambda: time.time() + 30)
    assert abs(offset - 30) <= error + 1e-5  # rounding of times since 1970


def test_facts_of_this_machine(tmp_path):
    (tmp_path / "file").write_bytes(b"123")
    found = probes.look_here([str(tmp_path), str(tmp_path / "file"), str(tmp_path / "none")])
    assert list(found.sizes.values()) == [0, 3, -1]
    assert {"python", "gcore", "torch", "ray"} <= set(found.versions) and len(found.code) == 12


def test_the_code_of_the_user_arrives_in_another_process(tmp_path, monkeypatch):
    """The copy of the driver wins over a file of the same name, and the modules that it imports come with it."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project / "helpers_of_user", elsewhere):
        folder.mkdir(parents=True)
    (project / "rewards.py").write_text("from helpers_of_user.points import full\nscore = full\n")
    (project / "helpers_of_user" / "__init__.py").write_text("")
    (project / "helpers_of_user" / "points.py").write_text("def full():\n    return 7\n")
    (elsewhere / "rewards.py").write_text("score = 'an old version'\n")
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    __import__("helpers_of_user.points")
    archive = user_files.pack(["rewards.py", "missing.py"])
    assert archive.data == user_files.pack(["rewards.py"]).data and archive.left_out == {}
    (tmp_path / "archive").write_bytes(archive.data)
    code = (
        "import sys; from pathlib import Path; from gcore import user_files\n"
        "user_files.unpack(Path(sys.argv[1]).read_bytes()); print(user_files.load_function('rewards.py:score')())"
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    for _ in range(2):  # the second process finds the folder
        command = [sys.executable, "-c", code, str(tmp_path / "archive")]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=elsewhere)
        assert done.stdout == "7\n", done.stderr


def test_a_large_file_is_not_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(user_files, "MAX_MB", 1)
    (tmp_path / "large.jsonl").write_bytes(bytes(2 << 20))
    name = str(tmp_path / "large.jsonl")
    assert user_files.pack([name]).left_out[name] == 2


@pytest.mark.parametrize(("address", "expected"), [("127.0.0.3", "lo"), ("192.0.2.7", None), ("a-host-name", None)])
def test_the_interface_of_an_address(monkeypatch, address, expected):
    listed = {"lo": [SimpleNamespace(address="127.0.0.1")], "eth0": [SimpleNamespace(address="10.0.0.2")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: listed)
    assert interface_of(address) == expected and interface_of("10.0.0.2") == "eth0"
