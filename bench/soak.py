"""A run whose processes are killed and stopped at random, compared with the same run left alone.

    python bench/soak.py --faults 100 --every-steps 1 --steps 150 --checkpoint-every 1 --jitter-s 0.5
    python bench/soak.py --faults 6 --every-steps 10 --steps 66 --checkpoint-every 1 --emulate-step-s 8 --jitter-s 8

The run is small and deterministic: 2 controllers, 2 engines, 2 trainer ranks, dynamic sampling. Every few seconds, or
every `--every-steps` steps, one process is chosen by the seed: an engine, a trainer rank, a controller, or a reward
worker of a controller. It gets SIGKILL or SIGSTOP. A fault counts if the process was alive. Faults can hit a run that
still heals from the one before.

Reported: faults by role and kind; restarts and rollbacks from events.jsonl; whether all steps are there once, with the
samples and the metrics of the undisturbed run (all except clocks, memory, traffic and retries): then no sample was
lost, trained twice or changed; held-out accuracy of both; and the share of useful time: seconds of the undisturbed run
divided by seconds of this one, from the end of the first step to the end of the last.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gcore.observe.events import read_events  # noqa: E402
from gcore.observe.metrics import read_rows  # noqa: E402

TAIL_BYTES = 32768  # of metrics.jsonl: more than one row
TIMED = ("timing_s/", "perf/", "controller/", "checkpoint/", "link/")  # link: which replica answers depends on times
HEALED = ("reward/retries", "reward/timeouts", "reward/worker_restarts")  # what a fault of a reward worker leaves
ROLES = ("engine-0", "engine-1", "trainer-0", "trainer-1", "controller-0", "controller-1", "worker")


def recipe(args: argparse.Namespace, folder: Path) -> Path:
    """Sums of two-digit numbers, as in recipes/quickstart.yaml but smaller. With `--emulate-step-s`, engines and
    trainers only wait."""
    sums = {"min": 11, "max": 99, "zeros": False, "min_answer": 110, "sloppy": 0.8}
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
                "intermediate_size": 256,
                "layers": 2,
                "heads": 4,
                "kv_heads": 4,
                "max_length": 32,
                "alphabet": "0123456789+=",
            }
        },
        "data": {
            "train": {"task": "arithmetic", "args": sums},
            "eval": {"task": "arithmetic", "args": {**sums, "split": "eval"}},
            "max_prompt_length": 16,
        },
        "controllers": 2,
        "generation": {"max_response_length": 5},
        "rewards": {"functions": [{"name": "exact", "path": "gcore.rewarding.rules:exact_answer"}]},
        "sampling": {"prompts_per_step": 12, "samples_per_prompt": 8, "filter": "spread"},
        "training": {"lr": 1.0e-3, "warm_start": {"steps": args.warm_start_steps, "batch_size": 96, "lr": 3.0e-3}},
        "placement": {"policy": {"replicas": 2}, "trainer": {"ranks": 2, "threads": 1}},
        "checkpoint": {"every": args.checkpoint_every},
        "observe": {"progress": "plain", "eval_every": args.steps},
    }
    if args.emulate_step_s:
        tree["generation"] |= {"engine": "emulated", "emulated": {"base_s": args.emulate_step_s / 10, "mean_tokens": 4}}
        tree["training"] = {"backend": "emulated", "emulated": {"seconds_per_token": args.emulate_step_s / 2 / 480}}
        tree["sampling"]["filter"] = "none"  # the answers are random: hardly any is correct
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
        """Steps whose metrics are written."""
        with contextlib.suppress(FileNotFoundError), (self.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            for line in reversed(file.read().split(b"\n")[:-1]):
                if b'"samples_digest"' in line and line.startswith(b"{"):
                    return int(json.loads(line)["step"])
        return 0

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


class Faults:
    """Chooses processes by the seed and hits them, every `every_s` seconds in the mean or every `every_steps` steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.done: Counter[str] = Counter()
        self._args, self._chance = args, random.Random(args.seed)
        self._next_step, self._next_s = max(1, args.every_steps), 0.0
        self._due_s: float | None = None
        self._until_s = float("inf")

    def tick(self, run: Run, step: int) -> None:
        args, chance = self._args, self._chance
        now = time.monotonic()
        if step and not self.done:
            self._until_s = min(self._until_s, now + args.fault_s)
        if self.done.total() == args.faults or step < self._next_step or now < self._next_s or now > self._until_s:
            return
        if args.every_steps and self._due_s is None:  # not always at the same moment of a step
            self._due_s = now + chance.uniform(0, args.jitter_s)
        if self._due_s is not None and now < self._due_s:
            return
        role, kind = chance.choice(ROLES), chance.choice(("kill", "kill", "stop"))
        if run.hit(role, kind, chance):
            self.done[f"{role.rpartition('-')[0] or role} {kind}"] += 1
            self._next_step, self._due_s = step + args.every_steps if args.every_steps else 1, None
            self._next_s = now + (0 if args.every_steps else chance.expovariate(1 / args.every_s))


def follow(run: Run, steps: int, limit_s: float, faults: Faults | None) -> float:
    """Until the run has ended. Returns the seconds from the end of its first step to the end of its last one."""
    began, first, last = time.monotonic(), None, None
    while not run.ended:
        time.sleep(0.1)
        now, step = time.monotonic(), run.steps()
        first = now if first is None and step else first
        last = now if last is None and step == steps else last
        if faults is not None and last is None:
            faults.tick(run, step)
        if now - began > limit_s:
            print(f"{run.folder.name}: not at its end after {limit_s:.0f} s; it is ended", flush=True)
            run.process.terminate()
            run.process.wait()
    return float("nan") if first is None or last is None else last - first


def summary(folder: Path) -> tuple[list[dict[str, Any]], float | None]:
    """What must be equal of each step (see above), and the last held-out accuracy."""
    rows = read_rows(folder)
    steps = [
        {k: v for k, v in row.items() if not k.startswith((*TIMED, *HEALED))} for row in rows if "samples_digest" in row
    ]
    accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    return steps, accuracy[-1] if accuracy else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every-s", type=float, default=8.0, help="mean seconds between two faults")
    parser.add_argument("--every-steps", type=int, default=0, help="steps between two faults, instead of seconds")
    parser.add_argument("--jitter-s", type=float, default=1.0, help="with --every-steps: a random delay up to this")
    parser.add_argument("--fault-s", type=float, default=7200.0, help="no more faults after this time")
    parser.add_argument("--warm-start-steps", type=int, default=150)
    parser.add_argument("--emulate-step-s", type=float, default=0.0)
    parser.add_argument("--checkpoint-every", type=int, default=5)
    parser.add_argument("--hang-s", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=7200.0, help="a run that takes longer is ended")
    parser.add_argument("--at-once", action="store_true", help="both runs at the same time; then the times say nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    path, faults = recipe(args, folder), Faults(args)
    alone = Run(path, "alone", folder)
    with ThreadPoolExecutor(1) as threads:
        following = threads.submit(follow, alone, args.steps, args.limit_s, None)
        if not args.at_once and following.result() and alone.process.returncode:
            print(f"the undisturbed run failed, see {alone.output}")
            return 1
        run = Run(path, "disturbed", folder)
        disturbed_s = follow(run, args.steps, args.limit_s, faults)
        alone_s = following.result()
    (expected, accuracy), (found, accuracy_found) = summary(alone.folder), summary(run.folder)
    events = Counter(event["event"] for event in read_events(run.folder))
    same_samples = [row["samples_digest"] for row in found] == [row["samples_digest"] for row in expected]
    complete = [row["step"] for row in found] == list(range(1, args.steps + 1))
    result = {
        "exit_codes": [alone.process.returncode, run.process.returncode],
        "faults": faults.done.total(),
        "by_role": dict(sorted(faults.done.items())),
        "events": dict(sorted(events.items())),
        "steps_complete": complete,
        "samples_equal": same_samples,
        "metrics_equal": found == expected,
        "accuracy": [accuracy, accuracy_found],
        "seconds": [round(alone_s, 1), round(disturbed_s, 1)],
        "useful_time": round(alone_s / disturbed_s, 3),
        "output": str(run.output),
    }
    for name, value in result.items():
        print(f"{name:14} {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    ok = not any(result["exit_codes"]) and complete and found == expected and faults.done.total() == args.faults
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
