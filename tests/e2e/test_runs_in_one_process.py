"""Several runs one after another in one process, as in a notebook. Their role is in a prepared process."""

from __future__ import annotations

import subprocess
import sys

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


def test_a_second_cluster_starts_in_the_same_process(tmp_path):
    """Ray keeps the first token that it reads: each cluster of a process must ask for the same."""
    file = tmp_path / "two.py"
    file.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.split() == ["first", "second"], done.stderr[-2000:]
