"""The disk of the run folder is full for some steps: the run goes on, and its files have all lines when there is space
again."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.helpers import gcore_process, rows, steps, write_recipe
from tests.faults.test_kill import EMULATED

FILLS = """from pathlib import Path

def fill(path):
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(b"0" * size)
            except OSError:
                pass

async def workflow(ctx, prompt):
    if prompt.id == {first}:
        fill(Path({path!r}))
    if prompt.id == {last}:
        Path({path!r}).unlink()
    return await ctx.reward(await ctx.generate(prompt))
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """40 MB, because a checkpoint wants 16 MB to be free."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_a_full_disk(tmp_path: Path, small_disk: Path, on_failure: str) -> None:
    flow, run = tmp_path / "fills.py", small_disk / "tiny"
    flow.write_text(FILLS.format(path=str(small_disk / "filler"), first=60, last=240))
    done = gcore_process(
        *("train", str(write_recipe(tmp_path)), f"run.dir={small_disk}", f"workflow={flow}:workflow"),
        *("run.steps=25", "runtime=local", "observe.min_free_disk_mb=0", f"checkpoint.on_failure={on_failure}"),
        *EMULATED,
    )
    screen = done.stdout + done.stderr
    assert "Traceback" not in screen, screen
    if on_failure == "stop":
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 2 and "No space left on device" in last and "checkpoint.on_failure=stop" in last
        return
    assert done.returncode == 0, screen
    for name in ("metrics.jsonl", "samples/controller-0.jsonl"):
        told = rf"^{re.escape(str(run / name))} is not written \(No space left on device\); the run goes on$"
        assert len(re.findall(told, done.stdout, re.MULTILINE)) == 1, screen
    assert [row["step"] for row in steps(rows(run))] == list(range(1, 26))
