"""What processes print: into bounded files, and only a few lines to the screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gcore.observe.logs import MAX_BYTES
from tests.e2e.helpers import gcore_process, write_recipe
from tests.faults.test_kill import EMULATED

LOUD = """
import sys
def loud(prompts, completions, **_):
    for i in range(2000):
        print("flood", i, "x" * 1000)
    print("to stderr", file=sys.stderr)
    return [float(len(c)) for c in completions]
"""
DIES = """
import os
async def workflow(ctx, prompt):
    if prompt.id > 30:
        print("the last words")
        os._exit(3)
    return await ctx.reward(await ctx.generate(prompt))
"""


def test_a_reward_that_prints_does_not_flood_the_screen(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    recipe = write_recipe(
        tmp_path, rewards={"functions": [{"name": "loud", "path": f"{tmp_path / 'loud.py'}:loud"}], "workers": 2}
    )
    done = gcore_process("train", str(recipe), "controllers=1", "run.steps=2", "placement.policy.replicas=1", *EMULATED)
    screen = done.stdout + done.stderr
    assert done.returncode == 0, screen[-2000:]
    logs = tmp_path / "runs" / "tiny" / "logs"
    assert f"rewards print to {logs / 'rewards-0.log'}:\n  flood 0 xxx" in screen
    assert screen.count("flood") <= 3 and len(screen) < 20_000  # fewer if the driver looked after the first line
    assert {path.name for path in logs.iterdir()} >= {f"{r}-0.log" for r in ("controller", "engine", "trainer")}
    text = (logs / "rewards-0.log").read_bytes()
    assert b"to stderr\n" in text and b"bytes were cut here" in text and len(text) <= MAX_BYTES
    assert text.startswith(b"flood 0 xxx")


@pytest.mark.release
def test_a_process_that_dies_shows_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    recipe = write_recipe(tmp_path, workflow=f"{tmp_path / 'dies.py'}:workflow")
    done = gcore_process("train", str(recipe), "controllers=1", "placement.policy.replicas=1", *EMULATED)
    assert done.returncode == 1, done.stdout + done.stderr
    log = tmp_path / "runs" / "tiny" / "logs" / "controller-0.log"
    assert re.search(rf"gcore: controller-0 died: .*its output is in {log};", done.stderr), done.stderr
    assert f"last lines of {log}:\n  the last words" in done.stderr
