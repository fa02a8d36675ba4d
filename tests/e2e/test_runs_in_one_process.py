"""Several runs one after another in one process, as in a notebook. Their role is in a prepared process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import ray

from gcore.runtime.ray import RayRuntime
from gcore.types import UserError

SCRIPT = """
import asyncio, sys, time
from gcore.runtime.ray import RayRuntime

def prepare():
    import wave

class Role:
    def __init__(self, word, rendezvous):
        deadline = time.monotonic() + 30
        while "wave" not in sys.modules and time.monotonic() < deadline:
            time.sleep(0.01)
        self.word = word if "wave" in sys.modules else "unprepared"

    async def say(self):
        return self.word

def run(word):
    async def main():
        runtime = RayRuntime(128)
        try:
            runtime.prepare("role", 1, prepare)
            (role,) = await runtime.start_group("role", Role, [(word,)])
            print(await role.call("say"), flush=True)
        finally:
            runtime.stop()
    asyncio.run(main())

run("first")
run("second")
"""


RECORDED = """
import asyncio
from gcore.runtime.ray import RayRuntime

class Role:
    def __init__(self, rendezvous):
        pass

    async def say(self):
        pass

async def main():
    runtime = RayRuntime(128)
    try:
        (role,) = await runtime.start_group("role", Role, [()])
        for _ in range(100):
            await role.call("say")
        from ray._private.state import state  # not before the runtime has chosen a token
        await asyncio.sleep(3)  # processes report once per second
        print(len(list(state._connect_and_get_accessor().get_task_events())))
    finally:
        runtime.stop()

asyncio.run(main())
"""


def test_ray_keeps_no_record_of_the_calls(tmp_path):
    """Its GCS would grow with every call of a role: by 50 MB per 1,000 steps of a small run."""
    file = tmp_path / "recorded.py"
    file.write_text(RECORDED)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and int(done.stdout) < 5, done.stdout + done.stderr[-2000:]


def test_a_second_cluster_starts_in_the_same_process(tmp_path):
    """Ray keeps the first token that it reads: each cluster of a process must ask for the same."""
    file = tmp_path / "two.py"
    file.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.split() == ["first", "second"], done.stderr[-2000:]


def test_a_ray_that_does_not_start_is_one_line_and_leaves_no_process(monkeypatch):
    started = []

    def init(*_, **__):
        started.append(subprocess.Popen(["sleep", "600"]))
        raise Exception("The current node timed out during startup.")

    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(
        UserError, match=r"not start .* timed out during startup\. .*session_\*_\d+/logs.*runtime=local needs no Ray"
    ):
        RayRuntime(128)
    assert started[0].wait(timeout=60) != 0
