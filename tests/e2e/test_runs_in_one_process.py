"""Several runs one after another in one process, as in a notebook."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio
from gcore.runtime.ray import RayRuntime

class Role:
    def __init__(self, word, rendezvous):
        self.word = word

    async def say(self):
        return self.word

def run(word):
    async def main():
        runtime = RayRuntime(128)
        try:
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
