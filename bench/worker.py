"""Runs parts of a GPU bench in processes of their own: with a time limit, with results that survive a failure.

    run_worker(script, "gcore", arguments, folder, limit_s) ──> the JSON that the worker wrote, however it ended

A worker calls `save` whenever it has a new result. A worker that fails, hangs or runs out of memory loses only what it
had not saved, and the GPU is free again for the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 20  # between SIGTERM and SIGKILL
STARTED = "BENCH_STARTED"  # environment: when the worker was started, in seconds of time.time()
TARGET = "BENCH_TARGET"  # environment: where `save` writes
LOG_LINES = 25  # of a failed worker, printed
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_failed: list[str] = []  # workers that did not end well


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What benches with workers have."""
    parser.add_argument("--limit", type=float, default=240, help="seconds per part; default %(default)s")
    parser.add_argument("--folder", type=Path, help="of the model; by default it is made in --work")
    parser.add_argument("--work", type=Path, help="folder of logs and of the model; by default a temporary one")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)


def run_worker(
    script: str,
    name: str,
    arguments: Sequence[str],
    folder: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs `script --worker name arguments`. Its output goes to folder/name.log. Returns what it saved, with "error" if
    it did not end well."""
    folder.mkdir(parents=True, exist_ok=True)
    label = name.replace(" ", "_").replace("/", "_")
    target, log = folder / f"{label}.json", folder / f"{label}.log"
    target.unlink(missing_ok=True)
    variables = {**os.environ, STARTED: repr(time.time()), TARGET: str(target), **(environment or {})}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables.setdefault("PYTHONUNBUFFERED", "1")
    command = [sys.executable, script, "--worker", name, *arguments]
    print(f"{name}: started, at most {limit_s:.0f} s, output in {log}", file=sys.stderr, flush=True)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # a time limit of the caller: end the worker too
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env=variables,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            code: int | str = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = f"not finished after {limit_s:.0f} s"
        finally:
            _end(process)
    found: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    if code != 0:
        found["error"] = code if isinstance(code, str) else f"exit code {code}"
        _failed.append(name)
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        print(f"{name}: {found['error']}\n  " + "\n  ".join(lines), file=sys.stderr, flush=True)
    print(f"{name}: ended after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return found


def finish() -> None:
    """The end of a bench: exit code 1 if a worker failed. What the others saved is printed before."""
    if _failed:
        sys.exit(f"failed: {', '.join(_failed)}")


def _end_with_parent() -> None:
    """Linux: if this script is killed, the worker gets SIGTERM. It would keep its memory on the GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the worker, if it runs, and the processes of its session that outlive it."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group that the worker leads, and nothing else
    process.wait()


# ---- in the worker ---------------------------------------------------------------------------------------------------


def started_at() -> float:
    return float(os.environ.get(STARTED, time.time()))


def save(result: Mapping[str, Any]) -> None:
    """Replaces the result of this worker."""
    target = Path(os.environ[TARGET])
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(result, default=str))
    partial.replace(target)


if __name__ == "__main__":  # a part of other benches
    print(__doc__)
