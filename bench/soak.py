"""Runs that are broken on purpose, compared with the same runs left alone. Half an hour on two idle cores; Linux.

    python bench/soak.py                              all experiments of EXPERIMENTS, but `long-steps`
    python bench/soak.py --only driver,disk           some of them
    python bench/soak.py --seconds 300                a rehearsal: fewer faults and steps
    python bench/soak.py --json soak.json --markdown  the numbers in a file; the tables as in docs/recovery.md

Each experiment is a row of EXPERIMENTS: a recipe, what is broken and when, and a function that does it. Runs are small
and deterministic. Moments and victims are chosen by `--seed`. A fault counts if its process was alive.

In every experiment a run must reach its end, where needed with `run.resume=auto`, and then

- samples: every step is there once; no prompt was trained twice; prompts drawn = trained + filtered + failed
- equal: samples and metrics are those of the undisturbed run (except clocks, memory, traffic and retries)
- orphans: 30 s after the end of a driver none of its processes is left, nor a checkpoint in shared memory
- files: rows are whole, every checkpoint has the checksums of its manifest, the last one is of the last step
- cause: a run that ends early has the documented exit code and names its cause in a line, without a traceback

`growth` is one long run: the slope of the memory of each process over its later two thirds, in MB per 1,000 steps
(Theil-Sen; RssAnon + VmSwap, so neither shared memory nor pages of files), is at most 1.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
BESIDE = re.compile(r"gcore: \S+/(trace\.json|reward\.png|report\.html) is not written ")  # no cause of an end
sys.path.insert(0, str(ROOT))

from bench.common import markdown, merged, step_rows, write_json  # noqa: E402
from bench.soak_run import Run, anonymous_mb, damaged_files, left_in_memory, signalled, theil_sen  # noqa: E402
from gcore.observe.events import read_events  # noqa: E402
from gcore.observe.samples import read_samples  # noqa: E402

WHOLE_S = 1800.0  # of all experiments; `--seconds` scales them
HANG_S = 10  # run.hang_s
END_S = 120.0  # for a run that must end by itself after a fault
GROWTH_MB = 1.0  # per 1,000 steps
GROWTH_STEPS = 3000  # in a shorter run caches still fill: its growth is shown and not judged
TIMED = ("timing_s/", "perf/", "controller/", "checkpoint/", "link/")  # link: which replica answers depends on times
HEALED = ("reward/retries", "reward/timeouts", "reward/worker_restarts")  # what a fault of a reward worker leaves
ASKED = ("reward/verdicts", "reward/unparsed")  # also about groups that the step did not need in the end
SAMPLED = ("step", "samples_digest", "sampling/", "reward/mean", "reward/grader")  # what placement must not change
RAW_RAY = re.compile(r"RayActorError|ActorDiedError|The actor|actor died unexpectedly|ray\.exceptions")

# ---- recipes --------------------------------------------------------------------------------------------------------

ALPHABET = "0123456789+=?"
SUMS = {"min": 11, "max": 99, "zeros": False, "min_answer": 110, "sloppy": 0.8}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "max_length": 32}
BUILD = {**SMALL, "alphabet": ALPHABET}
PARTS = '''
import asyncio


def length(completions, answer, **_):
    """From 0 to 2. Some prompts cannot be scored: their groups fail and are counted."""
    if int(answer[0]) % 37 == 0:
        raise ValueError("this prompt has no score")
    return [len(str(completion)) % 3 for completion in completions]


async def alternating(ctx, prompt):
    """The judge has one question about an answer, and in every second five steps eight more."""
    group = await ctx.generate(prompt)
    more = 8 if prompt.id // 40 % 2 else 0
    words = [{"role": "user", "content": "1+1="}]
    draws = (rollout.sibling * 8 + i for rollout in group for i in range(more))
    await asyncio.gather(*(ctx.ask("grader", words, draw=draw) for draw in draws))
    return await ctx.reward(group)
'''
JUDGE = {
    "name": "grader",
    "model": {"build": BUILD},
    "template": "{{ prompt }}{{ response }}?",
    "verdict": r"^\D*(\d?)",  # an untrained judge may say anything, also nothing
    "values": {"": 0, **{f"{digit}": digit / 9 for digit in range(10)}},
    "max_prompt_length": 24,
    "max_response_length": 4,
}


def device(step_s: float) -> dict[str, Any]:
    return {"engine": "emulated", "emulated": {"base_s": step_s, "mean_tokens": 4}}


def trainer(seconds_per_token: float) -> dict[str, Any]:
    return {"backend": "emulated", "emulated": {"seconds_per_token": seconds_per_token}, "warm_start": None}


COMPUTED = {  # a small policy learns sums, as in recipes/quickstart.yaml
    "run": {"seed": 0, "max_restarts": 10_000, "hang_s": HANG_S},
    "model": {"build": {**BUILD, "hidden_size": 64, "intermediate_size": 256, "heads": 4, "kv_heads": 4}},
    "data": {"train": {"task": "arithmetic", "args": SUMS}, "max_prompt_length": 16},
    "controllers": 2,
    "generation": {"max_response_length": 5},
    "rewards": {"functions": [{"name": "exact", "path": "gcore.rewarding.rules:exact_answer"}]},
    "sampling": {"prompts_per_step": 12, "samples_per_prompt": 8, "filter": "spread"},
    "training": {"lr": 1.0e-3, "warm_start": {"steps": 150, "batch_size": 96, "lr": 3.0e-3}},
    "placement": {"policy": {"replicas": 2}, "trainer": {"ranks": 2, "threads": 1}},
    "checkpoint": {"every": 1},
    "observe": {"progress": "plain", "samples_per_step": 12},
}
EMULATED = merged(  # engines and trainers only wait: about a third of a second per step
    COMPUTED,
    {
        "model": {"build": BUILD},
        "generation": device(0.03),
        "rewards": {"functions": [{"name": "length", "path": "parts.py:length"}], "max_error_frac": 1.0},
        "sampling": {"prompts_per_step": 8, "samples_per_prompt": 4},
        "training": trainer(1e-4),
    },
)
JUDGED = {
    "rewards": {"judges": [{**JUDGE, "replicas": 2}], "models": [{"name": "scorer", "model": {}, "max_length": 32}]}
}
RECIPES = {
    "computed": COMPUTED,
    "judged": merged(COMPUTED, {**JUDGED, "training": {"warm_start": {"steps": 20}}}),
    "emulated": EMULATED,
    "moved": merged(  # blocks follow the work, which alternates
        EMULATED,
        {
            "workflow": "parts.py:alternating",
            "generation": {**device(0.04), "max_concurrent": 4},
            "rewards": {"judges": [{**JUDGE, **device(0.01), "max_concurrent": 4}]},
            "placement": {"mode": "dynamic", "slots": 4},
        },
    ),
    "fast": merged(
        EMULATED,
        {
            "generation": device(0.001),
            "rewards": {"judges": [{**JUDGE, **device(0.001)}]},
            "sampling": {"prompts_per_step": 4},
            "training": trainer(1e-6),
            "checkpoint": {"every": 100},
            "observe": {"samples_per_step": 2},
        },
    ),
    "long": merged(EMULATED, {"generation": device(0.8), "training": trainer(4.0 / 480)}),
}

# ---- an experiment --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    name: str
    recipe: str
    faults: int  # in half an hour for all experiments
    limit_s: float  # no more faults after this time
    breaks: str
    play: Callable[[Scene], object]
    steps: float = 1.5  # per fault
    is_default: bool = True


@dataclass
class Scene:
    """An experiment while it runs, and what it found."""

    experiment: Experiment
    folder: Path
    chance: random.Random
    alone: Callable[[str, int], list[dict[str, Any]]]  # recipe, steps -> the rows of the undisturbed run
    scale: float
    done: Counter[str] = field(default_factory=Counter)  # faults
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    _starts: list[Run] = field(default_factory=list)
    began: float | None = None  # the first start of a run, or its first step

    @property
    def faults(self) -> int:
        return max(1, round(self.experiment.faults * self.scale))

    @property
    def steps(self) -> int:
        return 8 + math.ceil(self.experiment.steps * self.faults)

    @property
    def limit_s(self) -> float:
        """Of one start of a run. At the end of it, the run is ended."""
        return 240 + 2 * self.experiment.limit_s * max(self.scale, 0.2)

    @property
    def may_break(self) -> bool:
        spent_s = time.monotonic() - (self.began or time.monotonic())
        return self.done.total() < self.faults and spent_s < self.experiment.limit_s * max(self.scale, 0.2)

    def start(self, *overrides: str, name: str = "run", folder: Path | None = None) -> Run:
        self.began = self.began or time.monotonic()
        recipe = write_recipe(self.experiment.recipe, self.folder)
        run = Run(recipe, self.folder, (folder or self.folder / "d") / name, f"run.steps={self.steps}", *overrides)
        self._starts.append(run)
        return run

    def problem(self, text: str, run: Run | None = None) -> None:
        where = "" if run is None else f" ({run.output})"
        self.problems.append(text)
        print(f"    {self.experiment.name}: {text}{where}", flush=True)

    def end_of(
        self, run: Run, *codes: int, limit_s: float | None = None, naming: str = "", after: str = ""
    ) -> int | None:
        """Wait for the end of a run that must end with one of these exit codes. `naming`: what its cause must name, if
        it does not end with 0. Then no process of it may be left. `after`: what was done to it."""
        after = after and f"after {after}: "
        limit_s = self.limit_s if limit_s is None else limit_s
        if (code := run.wait(limit_s)) is None:
            self.problem(f"{after}not at its end after {limit_s:.0f} s: {run.last_line()!r}", run)
            run.kill()
            return None
        if left := run.left():
            self.problem(f"{after}left behind: {', '.join(left)}", run)
        if code not in codes:
            expected = " or ".join(map(str, codes))
            self.problem(f"{after}exit code {code}, expected {expected}: {run.last_line()!r}", run)
        elif code > 0:
            self._judge_cause(run, naming, after)
        return code

    def _judge_cause(self, run: Run, naming: str, after: str) -> None:
        lines = [line for line in run.text.splitlines() if line.startswith("gcore: ")]
        causes = [line for line in lines if not BESIDE.match(line)]
        if "Traceback (most recent" in run.text:
            self.problem(f"{after}a traceback instead of a line", run)
        if len(causes) != 1:
            self.problem(f"{after}{len(causes)} lines name a cause, expected 1: {causes}", run)
        elif not re.search(naming, causes[0]) or RAW_RAY.search(causes[0]):
            self.problem(f"{after}the cause does not name {naming!r}, or is Ray's own text: {causes[0]!r}", run)

    def judge(self, run: Run, keys: tuple[str, ...] = (), only: set[int] | None = None) -> None:
        """A run that has ended with its last step. `keys`: what is equal to the undisturbed run; default: all. `only`:
        the steps whose rows are written, if a full disk cost some of them."""
        if run.process.returncode:
            return  # a problem already
        rows = step_rows(run.folder)
        wanted = sorted(only) if only is not None else list(range(1, self.steps + 1))
        if [row["step"] for row in rows] != wanted:
            self.problem(f"steps {missing([row['step'] for row in rows], wanted)}", run)
        if only is None:
            for text in lost_samples(run.folder, rows):
                self.problem(text, run)
        expected = {row["step"]: row for row in self.alone(self.experiment.recipe, self.steps)}
        differing = [
            row["step"] for row in rows if compared(row, keys) != compared(expected.get(row["step"], {}), keys)
        ]
        if differing:
            self.problem(f"step {differing[0]} and {len(differing) - 1} more differ from the undisturbed run", run)
        for text in damaged_files(run.folder, self.steps):
            self.problem(text, run)

    def close(self) -> None:
        for run in self._starts:
            run.kill()
        if left := left_in_memory(self.folder):
            self.problem(f"in /dev/shm: {', '.join(left)}")


def write_recipe(name: str, folder: Path) -> Path:
    """Beside the recipe are the functions that it names."""
    (folder / "parts.py").write_text(PARTS)
    tree = RECIPES[name]
    models = [
        {**m, "model": {"path": str(scorer(folder.parent / "scorer"))}} for m in tree["rewards"].get("models", ())
    ]
    path = folder / f"{name}.yaml"
    text = yaml.safe_dump(merged(tree, {"rewards": {"models": models}}))
    path.write_text(text.replace("parts.py:", f"{folder}/parts.py:"))
    return path


def scorer(folder: Path) -> Path:
    """A scalar reward model that was never trained."""
    if not folder.exists():
        import torch

        from gcore.config.base import BuildModel, Model
        from gcore.models.networks import load_scorer
        from gcore.prompts.tokenizer import build_char_tokenizer

        model, tokenizer = Model(build=BuildModel.model_validate(BUILD)), build_char_tokenizer(ALPHABET)
        cpu = torch.device("cpu")
        load_scorer(model, 0, torch.float32, cpu, tokenizer=tokenizer, new_head=True).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def compared(row: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    if keys:
        return {key: value for key, value in row.items() if key.startswith(keys)}
    return {key: value for key, value in row.items() if not key.startswith((*TIMED, *HEALED, *ASKED))}


def missing(found: list[int], wanted: list[int]) -> str:
    twice = [step for step, times in Counter(found).items() if times > 1]
    lost, more = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    return f"missing {lost[:9]}, twice {twice[:9]}, too many {more[:9]}"


def lost_samples(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Prompts drawn = trained + filtered + failed. No prompt has two groups in the log of samples, which has all."""
    problems = []
    drawn = sum(row["sampling/drawn"] for row in rows)
    trained = sum(row["sampling/trained"] for row in rows)
    dropped = sum(value for row in rows for key, value in row.items() if key.startswith("sampling/dropped_"))
    if drawn != trained + dropped:
        problems.append(f"{drawn} prompts drawn, {trained} trained, {dropped} dropped")
    prompts = [row["prompt"] for row in read_samples(folder) if row["phase"] == "train"]
    if twice := [prompt for prompt, times in Counter(prompts).items() if times > 1]:
        problems.append(f"prompts {twice[:9]} were trained twice")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    logs_all = config["observe"]["samples_per_step"] >= config["sampling"]["prompts_per_step"] and len(rows) <= 160
    if logs_all and (len(prompts) != trained or any(prompt >= drawn for prompt in prompts)):
        problems.append(f"{len(prompts)} prompts of {trained} are in the log of samples, from {drawn} drawn")
    return problems


# ---- what is broken -------------------------------------------------------------------------------------------------


def random_faults(
    scene: Scene,
    *,
    roles: str = "",
    at_once: int = 1,
    every: int = 1,
    jitter_s: float = 0.5,
    keys: tuple[str, ...] = (),
) -> Run:
    """Processes of one run are killed and stopped while it goes on, `every` steps after the last fault. Faults can hit
    a run that still heals from the one before. `roles`: an expression; default: all."""
    expected = scene.alone(scene.experiment.recipe, scene.steps)
    run, chance = scene.start(), scene.chance
    next_step, due_s, until_s = max(1, every), None, time.monotonic() + scene.limit_s
    first_s = last_s = None
    while not run.ended and time.monotonic() < until_s:
        time.sleep(0.1)
        now, step = time.monotonic(), run.steps()
        if first_s is None and step:
            first_s = scene.began = now  # on a busy machine a start takes longer than the time for faults
        last_s = now if last_s is None and step == scene.steps else last_s
        if not scene.may_break or step < next_step or last_s is not None:
            continue
        due_s = now + chance.uniform(0, jitter_s) if due_s is None else due_s
        if now < due_s:
            continue
        alive = {role: process for role, process in run.announced().items() if re.match(roles, role)}
        if len(kinds := sorted({role.partition("-")[0] for role in alive})) and len(alive) >= at_once:
            # a kind of role first: there are more reward workers than trainer ranks
            firsts = [chance.choice([r for r in sorted(alive) if r.startswith(kind)]) for kind in kinds]
            chance.shuffle(firsts)
            rest = [role for role in sorted(alive) if role not in firsts]
            for role in [*firsts, *rest][:at_once]:
                kind = chance.choice(("kill", "kill", "stop"))
                if signalled(alive[role], kind):
                    scene.done[f"{role.partition('-')[0]} {kind}"] += 1
            next_step, due_s = step + every, None
    scene.end_of(run, 0, limit_s=max(0.0, until_s - time.monotonic()))
    scene.judge(run, keys)
    events = Counter(event["event"] for event in read_events(run.folder))
    scene.notes.append(f"{events['rollback']} rollbacks, {events['restarted']} replicas restarted alone")
    if first_s is not None and last_s is not None:
        alone_s = sum(row["timing_s/step"] for row in expected[1:])
        scene.notes.append(f"{last_s - first_s:.0f} s from the first step to the last, {alone_s:.0f} s undisturbed")
    return run


def moves(scene: Scene) -> None:
    run = random_faults(scene, roles="engine|judge|trainer|controller", keys=SAMPLED)
    moved = sum(row.get("placement/moves", 0) for row in step_rows(run.folder))
    scene.notes.append(f"{moved:.0f} moves of blocks")
    if not moved:
        scene.problem("no block was moved", run)


def driver(scene: Scene) -> None:
    """A third of the kills hit within 0.6 s of the start of Ray, a third before the first step, a third later."""
    chance, resumed = scene.chance, ("run.resume=auto", "checkpoint.every=5", "checkpoint.memory_every=1")
    for moment in itertools.cycle(("Ray starts", "start", "steps")):
        if not scene.may_break:
            break
        run = scene.start(*resumed)
        before = run.steps()
        if moment == "Ray starts":
            reached = run.wait_for(lambda run=run: "gcs_server" in run.processes(), END_S)
            time.sleep(chance.uniform(0, 0.6))
        elif moment == "start":
            reached = run.wait_for(lambda run=run: "starting Ray" in run.text, END_S)
            time.sleep(chance.uniform(0, 8))
        else:
            reached = run.wait_for(lambda run=run, before=before: run.steps() > before + 1, END_S)
            time.sleep(chance.uniform(0, 1.5))
        if not reached or run.ended:
            scene.problem(f"it ended before it was killed: exit code {run.process.poll()}", run)
            break
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        scene.done[moment] += 1
        if left := run.left():
            scene.problem(f"after kill -9 of the driver ({moment}): left behind: {', '.join(left)}", run)
    run = scene.start(*resumed)
    scene.end_of(run, 0)
    scene.judge(run)


def daemons(scene: Scene) -> None:
    """The run must end with a line that names Ray, and resume."""
    victims = itertools.cycle(itertools.product(("raylet", "gcs_server"), ("kill", "stop")))
    while scene.may_break:
        victim, kind = next(victims)
        run = scene.start("run.resume=auto", "checkpoint.every=5")
        before = run.steps()
        if not run.wait_for(lambda run=run, before=before: run.steps() > before + 1, END_S):
            scene.problem("it did not get to its steps", run)
            run.kill()
            break
        time.sleep(scene.chance.uniform(0, 1))
        processes = run.processes()[victim]
        signalled(processes[0], kind)
        scene.done[f"{victim} {kind}"] += 1
        scene.end_of(run, 1, limit_s=END_S, naming=r"(?i)\bray|raylet|gcs", after=f"{kind} of {victim}")
    run = scene.start("run.resume=auto", "checkpoint.every=5")
    scene.end_of(run, 0)
    scene.judge(run)


def start(scene: Scene) -> None:
    """A role is killed between the start of its process and the first step. The run goes on, or ends and names it."""
    roles, number = itertools.cycle(("engine-0", "trainer-1", "controller-0", "trainer-0", "engine-1")), 0
    run = None
    while scene.may_break and number < 3 * scene.faults:
        number, role = number + 1, next(roles)
        run = scene.start("run.resume=auto", "checkpoint.every=5")
        before = run.steps()
        run.wait_for(lambda run=run, role=role: role in run.processes(), END_S)
        run.wait_for(lambda run=run: "process ids: " in run.text, scene.chance.uniform(0, 5))
        found = run.processes().get(role, ())
        if run.steps() == before and found and signalled(found[0], "kill"):
            scene.done[role.partition("-")[0]] += 1
        elif run.ended:
            scene.problem(f"it ended before {role} was killed: exit code {run.process.poll()}", run)
            break
        run.wait_for(lambda run=run, before=before: run.steps() > before + 1, END_S)
        if not run.ended:  # it went on
            run.process.terminate()
            scene.end_of(run, 130, limit_s=END_S, naming="interrupted")
        else:
            scene.end_of(run, 1, naming=rf"\b{role}\b", after=f"kill of {role} during start-up")
    run = scene.start("run.resume=auto", "checkpoint.every=5")
    scene.end_of(run, 0)
    scene.judge(run)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Any:
    """A disk of its own at the folder, if this user may mount one. Gives whether it is."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
    mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("ab", buffering=0) as file:
        for size in (2**16, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass


def disk(scene: Scene) -> None:
    """The disk of run.dir is full for some steps: with checkpoint.on_failure=continue and =stop."""
    keys = "observe.min_free_disk_mb=0", "checkpoint.every=2"
    with small_disk(scene.folder / "disk", 64) as mounted:
        scene.notes.append("a tmpfs of 64 MB" if mounted else "injected errors: tmpfs cannot be mounted here")
        for on_failure in ("continue", "stop"):
            folder = scene.folder / "disk"
            options: dict[str, Any] = {"folder": folder, "name": on_failure}
            failing = f"checkpoint.on_failure={on_failure}"
            plan = "faults.plan=[{kind: disk_full, role: trainer-0, at: file, nth: 3}]"
            run = scene.start(*keys, failing, *(() if mounted else (plan,)), **options)
            if mounted:
                run.wait_for(lambda run=run: run.steps() >= 4, END_S)
                until = time.monotonic() + 6
                while not run.ended and time.monotonic() < until:
                    fill(folder)  # again and again: what the run deletes is taken too
                    time.sleep(0.05)
                (folder / "filler").unlink(missing_ok=True)
            scene.done[f"{on_failure}"] += 1
            code = scene.end_of(run, *((0, 1) if on_failure == "continue" else (1, 2)), naming="disk|space|written")
            if "not written" not in run.text and not re.search(r"(?i)no space|disk", run.text):
                scene.problem(f"{on_failure}: nothing tells that the disk was full", run)
            if code:
                run = scene.start("run.resume=auto", *keys, failing, **options)
                scene.end_of(run, 0)
            written = {row["step"] for row in step_rows(run.folder)}
            if lacks := set(range(1, scene.steps + 1)) - written:
                scene.notes.append(f"{on_failure}: {len(lacks)} rows of metrics not written")
            # rows may be lost while the disk is full; a run that resumed has all of them
            scene.judge(run, only=written if mounted and not code else None)
            shutil.rmtree(run.folder)


def two_runs(scene: Scene) -> None:
    """The second is refused with exit code 2, the first goes on. A driver that was killed holds nothing."""
    pair = [scene.start(name="twins") for _ in range(2)]
    until_s = time.monotonic() + END_S
    while not any(run.ended for run in pair) and time.monotonic() < until_s and not all(run.steps() for run in pair):
        time.sleep(0.1)
    scene.done["at the same moment"] += 1
    first = next((run for run in pair if not run.ended), pair[0])
    (other,) = (run for run in pair if run is not first)
    scene.end_of(other, 2, limit_s=1.0, naming="process|pid|lock", after="two starts at the same moment")
    for resume in ("never", "auto"):
        if not first.wait_for(lambda: first.steps() >= 2, END_S):
            break
        late = scene.start(f"run.resume={resume}", name="twins")
        scene.done[f"later, resume={resume}"] += 1
        late.wait_for(lambda late=late: "starting Ray" in late.text, END_S)
        refused = scene.end_of(late, 2, limit_s=1.0, naming=str(first.process.pid), after=f"a start, resume={resume}")
        if refused != 2:
            late.kill()
    scene.end_of(first, 0)
    if (aside := first.folder.with_name("twins.1")).exists():
        scene.problem(f"the folder of the first run was renamed to {aside.name}", first)
    scene.judge(first)
    killed = scene.start("run.resume=auto", name="next")
    killed.wait_for(lambda: killed.steps() >= 2, END_S)
    os.kill(killed.process.pid, signal.SIGKILL)
    scene.done["after kill -9"] += 1
    again = scene.start("run.resume=auto", name="next")
    scene.end_of(again, 0)
    scene.judge(again)
    killed.left()


def growth(scene: Scene) -> None:
    """One long run that nothing disturbs."""
    steps = max(400, round(6000 * scene.scale))
    limit_s = scene.experiment.limit_s * scene.scale
    run = scene.start(f"run.steps={steps}")
    until_s, every_s = time.monotonic() + max(limit_s, 60.0), max(0.5, limit_s / 240)
    points: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    while not run.ended and time.monotonic() < until_s:
        time.sleep(every_s)
        if not (step := run.steps()):
            continue
        for name, processes in run.processes().items():
            for process in processes:
                if (size := anonymous_mb(process)) is not None:
                    points[name, process.pid].append((step, size))
    if not run.ended and run.steps() < steps:  # else it ends by itself
        run.process.terminate()
    scene.end_of(run, 0, 130, naming="interrupted")
    rows = step_rows(run.folder)
    if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
        scene.problem("not every step is there once", run)
    for text in lost_samples(run.folder, rows):
        scene.problem(text, run)
    scene.done["steps"] = len(rows)
    (scene.folder / "memory.json").write_text(
        json.dumps({f"{name} {pid}": found for (name, pid), found in points.items()})
    )
    scene.tables.append(growth_table(scene, points, len(rows)))


def growth_table(scene: Scene, points: Mapping[tuple[str, int], list[tuple[int, float]]], steps: int) -> str:
    """Of the processes that were there for at least half of the later two thirds of the steps. Those of a name that
    were replaced before (a cancelled call ends its reward worker) count as one."""
    series: dict[str, list[tuple[int, float]]] = {}
    for name in sorted({name for name, _ in points}):
        of_name = {pid: _later(found, steps) for (other, pid), found in points.items() if other == name}
        if lasting := {pid: found for pid, found in of_name.items() if _spans(found, steps)}:
            series |= {f"{name} ({pid})" if len(lasting) > 1 else name: found for pid, found in lasting.items()}
        elif _spans(joined := sorted(itertools.chain.from_iterable(of_name.values())), steps):
            series[f"{name} ({len(of_name)} processes)"] = joined
        else:
            scene.notes.append(f"too short-lived to be judged: {name}")
    lines = []
    for label, found in series.items():
        slope = 1000 * theil_sen(*zip(*found, strict=True))
        lines.append([label, f"{found[0][1]:.1f}", f"{found[-1][1]:.1f}", f"{slope:+.2f}"])
        if slope > GROWTH_MB and steps >= GROWTH_STEPS:
            scene.problem(f"{label} grows by {slope:.2f} MB per 1,000 steps, the limit is {GROWTH_MB:g}")
    if not series:
        scene.problem("no process was there long enough")
    if steps < GROWTH_STEPS:
        scene.notes.append(f"growth is not judged below {GROWTH_STEPS:,} steps")
    return markdown(["process", "MB after a third", "MB at the end", "MB per 1,000 steps"], lines)


def _later(found: list[tuple[int, float]], steps: int) -> list[tuple[int, float]]:
    return [(step, size) for step, size in found if step > steps / 3]


def _spans(found: list[tuple[int, float]], steps: int) -> bool:
    return len(found) > 2 and found[-1][0] - found[0][0] > steps / 3


judges = functools.partial(random_faults, roles="judge|scorer|engine")
pairs = functools.partial(random_faults, at_once=2)
long_steps = functools.partial(random_faults, every=10, jitter_s=8.0)

ALL = "engines, trainer ranks, controllers, reward workers: kill or stop"
MOVES = "blocks move between policy and judge; all roles: kill or stop"
DRIVER = "kill -9 of the driver as Ray starts, before the first step, in steps"
EXPERIMENTS = [
    Experiment("roles", "computed", 16, 260, ALL, random_faults),
    Experiment("pairs", "computed", 16, 160, "two of these at the same moment", pairs, steps=1.0),
    Experiment("judges", "judged", 8, 120, "judges, scorers, engines: kill or stop", judges),
    Experiment("moves", "moved", 8, 120, MOVES, moves, steps=3),
    Experiment("driver", "emulated", 9, 160, DRIVER, driver, steps=6),
    Experiment("start", "emulated", 5, 100, "kill of a role before the first step", start, steps=6),
    Experiment("ray", "emulated", 4, 120, "raylet and GCS: kill and stop", daemons, steps=60),
    Experiment("disk", "emulated", 2, 60, "the disk of run.dir is full for 6 s", disk, steps=20),
    Experiment("folder", "emulated", 4, 90, "more than one run in a folder", two_runs, steps=6),
    Experiment("growth", "fast", 1, 480, "nothing; memory of every process", growth),
    Experiment("long-steps", "long", 6, 600, "one fault every 10 steps of 8 s", long_steps, steps=10, is_default=False),
]


# ---- all of them ----------------------------------------------------------------------------------------------------


class Undisturbed:
    """The runs that nothing breaks, one per recipe, as long as its longest experiment."""

    def __init__(self, folder: Path, steps: Mapping[str, int]) -> None:
        self._folder, self._steps = folder, steps
        self._rows: dict[str, list[dict[str, Any]]] = {}

    def rows(self, recipe: str, steps: int) -> list[dict[str, Any]]:
        if recipe not in self._rows:
            scratch = self._folder / f"a-{recipe}"
            scratch.mkdir()
            run = Run(
                write_recipe(recipe, scratch), scratch, scratch / "d" / "alone", f"run.steps={self._steps[recipe]}"
            )
            try:
                if run.wait(1200) != 0:
                    raise SystemExit(f"the undisturbed run of {recipe} failed, see {run.output}")
            finally:
                run.kill()
            self._rows[recipe] = step_rows(run.folder)
        return self._rows[recipe][:steps]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of experiments, joined by commas")
    parser.add_argument("--seconds", type=float, default=WHOLE_S, help="of all experiments; scales faults and steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the folder also if all is well")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = {e.name for e in EXPERIMENTS if e.is_default} if args.only is None else set(args.only.split(","))
    if unknown := names - {e.name for e in EXPERIMENTS}:
        parser.error(f"--only {','.join(unknown)}: expected of {', '.join(e.name for e in EXPERIMENTS)}")
    chosen = [e for e in EXPERIMENTS if e.name in names]
    folder, scale = Path(tempfile.mkdtemp(prefix="soak-")), args.seconds / WHOLE_S
    print(f"{', '.join(e.name for e in chosen)}: in {folder}", flush=True)
    blank = {e: Scene(e, folder, random.Random(), lambda *_: [], scale) for e in chosen}
    longest = {e.recipe: max(s.steps for other, s in blank.items() if other.recipe == e.recipe) for e in chosen}
    undisturbed, results, began = Undisturbed(folder, longest), [], time.monotonic()
    for experiment in chosen:
        place, started = folder / experiment.name, time.monotonic()
        place.mkdir()
        chance = random.Random(f"{args.seed} {experiment.name}")
        scene = Scene(experiment, place, chance, undisturbed.rows, scale)
        try:
            experiment.play(scene)
            if not scene.done:
                scene.problem("nothing was broken")
            elif scene.done.total() < scene.faults:
                scene.notes.append(f"time for {scene.done.total()} of {scene.faults} faults")
        except Exception as error:  # the other experiments go on
            scene.problem(f"the experiment failed: {error!r}")
        finally:
            scene.close()
        results.append(result_of(scene, time.monotonic() - started))
        show(results[-1], scene)
    seconds = time.monotonic() - began
    problems = sum(len(result["problems"]) for result in results)
    print(f"\n{seconds:.0f} s, {problems} problems")
    if args.markdown:
        print(table(results))
    write_json(args.json, {"seconds": round(seconds), "experiments": results})
    if not problems and not args.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if problems else 0


def result_of(scene: Scene, seconds: float) -> dict[str, Any]:
    return {
        "name": scene.experiment.name,
        "breaks": scene.experiment.breaks,
        "seconds": round(seconds),
        "faults": dict(sorted(scene.done.items())),
        "notes": scene.notes,
        "problems": scene.problems,
        "tables": scene.tables,
    }


def show(result: Mapping[str, Any], scene: Scene) -> None:
    verdict = f"{len(result['problems'])} PROBLEMS" if result["problems"] else "ok"
    faults = ", ".join(f"{what} {times}" for what, times in result["faults"].items())
    print(
        f"{result['name']:10} {result['seconds']:4} s  {verdict:11} {faults}; {'; '.join(result['notes'])}", flush=True
    )
    for text in result["tables"]:
        print(text, flush=True)


def table(results: list[dict[str, Any]]) -> str:
    lines = []
    for result in results:
        faults = ", ".join(f"{what} {times}" for what, times in result["faults"].items())
        outcome = "; ".join([*(result["problems"] or ["as promised"]), *result["notes"]])
        lines.append([f"`{result['name']}`", result["breaks"], faults, outcome, f"{result['seconds']} s"])
    summary = markdown(["experiment", "what is broken", "faults", "result", "time"], lines)
    return "\n".join([summary, *(f"\n{text}" for result in results for text in result["tables"])])


if __name__ == "__main__":
    sys.exit(main())
