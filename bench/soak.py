"""A run whose processes are killed and stopped at random, compared with the same run left alone.

    python bench/soak.py --faults 100 --steps 400
    python bench/soak.py --faults 10 --every-steps 10 --emulate-step-s 8    # share of the time that is not lost

The run is small and deterministic: 2 controllers, 2 engines, 2 trainer ranks, dynamic sampling. Every few seconds, or
every `--every-steps` steps, one process is chosen by the seed: an engine, a trainer rank, a controller, or a reward
worker of a controller. It gets SIGKILL or SIGSTOP. A fault counts if the process was alive.

Reported: faults by role and kind; restarts and rollbacks from events.jsonl; the digests of all steps compared with the
undisturbed run (if they are equal, no sample was lost, trained twice or changed); held-out accuracy of both; and the
share of useful time: time of the undisturbed run / time of this one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gcore.observe.events import read_events  # noqa: E402
from gcore.observe.metrics import read_rows  # noqa: E402

ROLES = ("engine-0", "engine-1", "trainer-0", "trainer-1", "controller-0", "controller-1", "worker")


def recipe(args: argparse.Namespace, folder: Path) -> Path:
    """One-digit sums. With `--emulate-step-s`, engines and trainers only wait."""
    sums = {"min": 0, "max": 9, "operations": ["+"], "eval_size": 50}
    tree: dict[str, Any] = {
        "run": {
            "dir": str(folder),
            "steps": args.steps,
            "seed": args.seed,
            "max_restarts": 10_000,
            "hang_s": args.hang_s,
        },
        "model": {
            "build": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "layers": 2,
                "heads": 2,
                "kv_heads": 1,
                "max_length": 24,
                "alphabet": "0123456789+=",
            }
        },
        "data": {
            "train": {"task": "arithmetic", "args": sums},
            "eval": {"task": "arithmetic", "args": {**sums, "split": "eval"}},
            "max_prompt_length": 12,
        },
        "controllers": 2,
        "generation": {"max_response_length": 8},
        "rewards": {"functions": [{"name": "exact", "path": "gcore.rewarding.rules:exact_answer"}]},
        "sampling": {"prompts_per_step": 12, "samples_per_prompt": 8},
        "training": {"lr": 2.0e-3, "warm_start": {"steps": 60, "batch_size": 48, "lr": 1.0e-2}},
        "placement": {"policy": {"replicas": 2}, "trainer": {"ranks": 2, "threads": 1}},
        "checkpoint": {"every": args.checkpoint_every},
        "observe": {"progress": "plain", "eval_every": args.steps},
    }
    if args.emulate_step_s:
        tree["generation"] |= {"engine": "emulated", "emulated": {"base_s": args.emulate_step_s / 16, "mean_tokens": 4}}
        tree["training"] = {
            "backend": "emulated",
            "emulated": {"seconds_per_token": args.emulate_step_s / 2 / 500},
        }
        tree["data"]["eval"] = None
    path = folder / "soak.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


class Run:
    """`gcore train` as a process. Its output tells the process ids of its roles."""

    def __init__(self, path: Path, name: str, folder: Path) -> None:
        command = [sys.executable, "-m", "gcore.cli", "train", str(path), f"run.name={name}"]
        self.folder, self.output = folder / name, folder / f"{name}.out"
        self._file = self.output.open("w")
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=self._file, stderr=subprocess.STDOUT)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def pids(self) -> dict[str, int]:
        """Of the living processes: later lines replace earlier ones."""
        found: dict[str, int] = {}
        for line in self.output.read_text().splitlines():
            if line.startswith("process ids: "):
                found |= {role: int(pid) for role, pid in re.findall(r"(\S+) (\d+)(?:,|$)", line)}
            elif match := re.match(r"(\S+) is restarted, .* process (\d+)", line):
                found[match[1]] = int(match[2])
        return found

    def steps(self) -> int:
        rows = [row for row in read_rows(self.folder) if "samples_digest" in row] if self.folder.exists() else []
        return int(rows[-1]["step"]) if rows else 0

    def hit(self, role: str, kind: str, chance: random.Random) -> bool:
        """Send the signal. False: there is no such process now."""
        with contextlib.suppress(psutil.Error, KeyError, ProcessLookupError, IndexError):
            if role == "worker":
                controller = psutil.Process(self.pids()[f"controller-{chance.randrange(2)}"])
                process = chance.choice([p for p in controller.children() if "worker" in " ".join(p.cmdline())])
            else:
                process = psutil.Process(self.pids()[role])
            if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                return False
            os.kill(process.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            return True
        return False


def disturbed(args: argparse.Namespace, path: Path, folder: Path) -> tuple[Run, Counter[str], float]:
    chance, done, hits = random.Random(args.seed), Counter[str](), 0
    run, started = Run(path, "disturbed", folder), time.monotonic()
    next_step, next_s = args.every_steps or 0, 0.0
    while not run.ended:
        time.sleep(0.2)
        if hits == args.faults or run.steps() < max(next_step, 1) or time.monotonic() < next_s:
            continue
        role, kind = chance.choice(ROLES), chance.choice(("kill", "kill", "stop"))
        if run.hit(role, kind, chance):
            hits += 1
            done[f"{role.rpartition('-')[0] or role} {kind}"] += 1
            next_step = run.steps() + args.every_steps if args.every_steps else 0
            next_s = time.monotonic() + (0 if args.every_steps else chance.expovariate(1 / args.every_s))
    return run, done, time.monotonic() - started


def summary(folder: Path) -> tuple[list[Any], float | None]:
    rows = read_rows(folder)
    digests = [(row["step"], row["samples_digest"]) for row in rows if "samples_digest" in row]
    accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    return digests, accuracy[-1] if accuracy else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every-s", type=float, default=8.0, help="mean seconds between two faults")
    parser.add_argument("--every-steps", type=int, default=0, help="steps between two faults, instead of seconds")
    parser.add_argument("--emulate-step-s", type=float, default=0.0)
    parser.add_argument("--checkpoint-every", type=int, default=5)
    parser.add_argument("--hang-s", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    path = recipe(args, folder)
    alone, began = Run(path, "alone", folder), time.monotonic()
    alone.process.wait()
    alone_s = time.monotonic() - began
    run, done, disturbed_s = disturbed(args, path, folder)
    (expected, accuracy), (found, accuracy_found) = summary(alone.folder), summary(run.folder)
    events = Counter(event["event"] for event in read_events(run.folder))
    result = {
        "exit_code": run.process.returncode,
        "faults": dict(sorted(done.items())),
        "events": dict(sorted(events.items())),
        "steps": len(found),
        "digests_equal": found == expected,
        "accuracy": [accuracy, accuracy_found],
        "seconds": [round(alone_s, 1), round(disturbed_s, 1)],
        "useful_time": round(alone_s / disturbed_s, 3),
        "output": str(run.output),
    }
    for name, value in result.items():
        print(f"{name:14} {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return 0 if run.process.returncode == 0 and found == expected else 1


if __name__ == "__main__":
    sys.exit(main())
