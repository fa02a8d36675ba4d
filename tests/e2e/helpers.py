"""A run small enough for a test: a 30k-parameter model that adds one-digit numbers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import yaml

from gcore import cli

RECIPE: dict[str, Any] = {
    "run": {"name": "tiny", "steps": 5, "seed": 3},
    "model": {
        "build": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "layers": 2,
            "heads": 2,
            "kv_heads": 1,
            "max_length": 24,
            "alphabet": "0123456789+=",
        }
    },
    "data": {
        "train": {"task": "arithmetic", "args": {"min": 0, "max": 9, "operations": ["+"], "eval_size": 20}},
        "eval": {
            "task": "arithmetic",
            "args": {"min": 0, "max": 9, "operations": ["+"], "eval_size": 20, "split": "eval"},
        },
        "max_prompt_length": 12,
    },
    "generation": {"max_response_length": 8},
    "rewards": {"functions": [{"name": "exact", "path": "gcore.rewarding.rules:exact_answer"}]},
    "sampling": {"prompts_per_step": 12, "samples_per_prompt": 4},
    "training": {"lr": 3e-3, "warm_start": {"steps": 6, "batch_size": 24, "lr": 1e-2}},
    "placement": {"trainer": {"ranks": 1, "threads": 1}},
    "observe": {"progress": "plain"},
}
HELD = """import asyncio
from pathlib import Path

async def workflow(ctx, prompt):
    group = await ctx.generate(prompt)
    while prompt.id >= {first} and not ({until}):
        await asyncio.sleep(0.02)
    return await ctx.reward(group)
"""
UNTIMED = ("timing_s/", "perf/", "controller/", "checkpoint/", "link/")


def write_recipe(folder: Path, **top: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **top, "run": {**RECIPE["run"], "dir": str(folder / "runs")}}))
    return path


def held(folder: Path, first: int, until: str = "") -> tuple[str, Path]:
    """An override, with which prompts from number `first` on wait for a file, and the path of this file: the run is not
    over too soon, on no machine. `until`: another condition to wait for, a Python expression."""
    flow, go = folder / "held.py", folder / "go"
    flow.write_text(HELD.format(first=first, until=until or f"Path({str(go)!r}).exists()"))
    return f"workflow={flow}:workflow", go


def gcore(*args: str) -> subprocess.CompletedProcess[str]:
    """The command line in this process: most of the time of a small run is the import of torch in a new process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _as_a_process():
        try:
            code = cli.main(args)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(["gcore", *args], code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _as_a_process() -> Iterator[None]:
    """What a process would have of its own: its environment, its thread count, and an exit that ends only the run."""
    import torch

    threads = torch.get_num_threads()

    def leave(code: int) -> None:
        raise SystemExit(code)

    exits = SimpleNamespace(environ=os.environ, _exit=leave)
    with mock.patch.dict(os.environ), mock.patch.object(cli, "os", exits):
        os.environ.pop("RAY_ADDRESS", None)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def gcore_process(*args: str, timeout: float = 570) -> subprocess.CompletedProcess[str]:
    """The command line as a user starts it, where the process itself is the subject."""
    return subprocess.run(
        [sys.executable, "-m", "gcore.cli", *args], capture_output=True, text=True, timeout=timeout, env=environment()
    )


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}


def train(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """Run and return the rows of metrics. Under Ray the driver is a process of its own:
    Ray keeps the token settings that it reads at its first import, and vLLM may have imported it in this one."""
    start = gcore if "runtime=local" in overrides else gcore_process
    done = start("train", str(write_recipe(folder)), f"run.name={name}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return rows(folder / "runs" / name)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in found if "samples_digest" in row]


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    """What must be equal between equal runs: everything but clocks, memory, and bytes that depend on processes."""
    return {k: v for k, v in row.items() if not k.startswith(UNTIMED)}
