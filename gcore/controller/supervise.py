"""The driver: starts the processes of a run, shows its progress, restarts dead replicas, and stops all processes.

    preflight -> engines, judges, scorers, trainers -> controllers -> (run | watch | poll status) -> stop -> report

No samples or weights pass through the driver. A run ends when all controllers are done, when a role raises an
exception, when a process dies that cannot be restarted, or with Ctrl-C.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from gcore.checkpoint import store
from gcore.clients import ControllerClient, EngineClient, ScorerClient, TrainerClient
from gcore.config import Config, dump_config
from gcore.controller.auto_placement import choose_mode
from gcore.controller.build import (
    Roles,
    build_controller,
    build_engine,
    build_judge,
    build_runtime,
    build_scorer,
    build_trainer,
    import_controller,
    log_folder,
    see_cluster,
)
from gcore.controller.engines_per_gpu import choose_engines
from gcore.controller.gpu_memory import Decided, decide
from gcore.controller.pins import check_models, fetch, pin
from gcore.controller.plan import Plan, make_plan
from gcore.controller.preflight import model_megabytes, preflight
from gcore.controller.start_report import reporting_start
from gcore.observe.logs import OutputPreview
from gcore.observe.metrics import read_rows
from gcore.observe.page import write_report
from gcore.observe.progress import Progress, Status
from gcore.observe.report import plot_reward
from gcore.observe.trace import merge_traces
from gcore.protocols import Handle, RoleDied, RoleError, Runtime

POLL_S = {"live": 0.25}  # seconds between two polls of the controllers, by progress view
DEFAULT_POLL_S = 0.5  # other views print one line per step
GRACE_S = 1.5  # after the first failure, how long to wait for failures that explain it better
Mode = Literal["train", "eval"]
C = TypeVar("C")
REVIVABLE = ("engine-", "judge-", "scorer-")  # roles without state except weights
MAX_REVIVALS = 3  # restarts of one replica per run


def run(config: Config, mode: Mode = "train") -> Any:
    """The whole run. Returns the row of an evaluation. Raises UserError, RoleError, RoleDied or KeyboardInterrupt."""
    cluster = see_cluster(config)
    config = pin(config)
    check_models(config)
    config, why = choose_mode(config, cluster)
    config, why_engines = choose_engines(config, cluster)
    memory = decide(config, make_plan(config, cluster)) if mode == "train" else Decided(config)
    config, notes = memory.config, [*filter(None, (why, why_engines)), *memory.notes]
    checked = preflight(config, make_plan(config, cluster), mode == "train")
    fetch(config)
    plan = make_plan(config, cluster, model_megabytes(config))
    if mode == "eval":
        changes = {"trace": False, "logs": config.observe.logs and config.run.folder.is_dir()}
        config = config.model_copy(update={"observe": config.observe.model_copy(update=changes)})
    if mode == "train":
        open_folder(config)
    try:
        return asyncio.run(_run(config, plan, mode, [*notes, *checked.warnings]))
    except asyncio.CancelledError:  # by SIGTERM
        raise KeyboardInterrupt from None
    except RoleError as error:
        if (logs := log_folder(config)) is not None and (log := logs / f"{error.role}.log").is_file():
            error.add_note(f"the output of {error.role} is in {log}")
        raise
    finally:
        if mode == "train":
            for write in (merge_traces, plot_reward, write_report):
                try:
                    write(config.run.folder)
                except Exception as error:  # must not hide the error of the run
                    print(f"gcore: {write.__name__} failed: {error}", file=sys.stderr)


def open_folder(config: Config) -> Path:
    """Create the run's folder. An older run of the same name is renamed, never overwritten."""
    folder = config.run.folder
    is_new = config.run.resume == "never" or (config.run.resume == "auto" and not store.complete(folder))
    if is_new and folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        shutil.move(folder, aside)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))
    return folder


async def _run(config: Config, plan: Plan, mode: Mode, notes: Sequence[str] = ()) -> Any:
    _end_at_sigterm()
    warm = config.training.warm_start
    history = read_rows(config.run.folder) if config.run.resume != "never" else []
    with Progress(
        config.observe.progress,
        config.run.name,
        config.run.steps,
        warm_steps=warm.steps if warm else 0,
        history=history,
    ) as progress:
        runtime: Runtime | None = None
        try:
            for text in notes:
                progress.note(text)
            progress.note("starting " + ("one process" if config.runtime == "local" else "Ray and the processes"))
            started = time.monotonic()
            preview = OutputPreview(log_folder(config))
            runtime = build_runtime(config, plan)
            _end_at_sigterm()  # again: Ray has replaced the handler
            runtime.prepare("controller", plan.controllers, import_controller)
            controllers = await reporting_start(
                _start(runtime, config, plan, mode), runtime, _wanted(plan, mode), progress
            )
            progress.note(
                f"{plan.controllers} controller(s), {plan.engines} engine(s), "
                f"{plan.trainers if mode == 'train' else 0} trainer rank(s)"
                + "".join(f", judge {name}" for name in plan.judges)
                + "".join(f", scorer {name}" for name in plan.scorers)
                + (f" on {len(plan.nodes)} nodes" if len(plan.nodes) > 1 else "")
                + f" ready in {time.monotonic() - started:.1f} s"
            )
            if pids := runtime.processes():
                progress.note("process ids: " + ", ".join(f"{name} {pid}" for name, pid in pids.items()))
            return await _supervise(runtime, controllers, progress, mode, preview)
        finally:
            if runtime is not None:
                runtime.stop()


def _end_at_sigterm() -> None:
    """SIGTERM ends the run like Ctrl-C. It does not raise SIGINT, which processes in the background ignore."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def _start(runtime: Runtime, config: Config, plan: Plan, mode: Mode) -> list[ControllerClient]:
    """Start all roles that serve requests at the same time, then the controllers, which call them."""

    async def group(
        kind: str, client: Callable[[Handle], C], factory: Callable[..., Any], args: tuple[Any, ...], count: int
    ) -> list[C]:
        return [client(handle) for handle in await runtime.start_group(kind, factory, [args] * count)]

    async def judges() -> dict[str, list[EngineClient]]:
        groups = (
            group(f"judge-{name}", EngineClient, build_judge, (config, plan, name), count)
            for name, count in plan.judges.items()
        )
        return dict(zip(plan.judges, await asyncio.gather(*groups), strict=True))

    async def scorers() -> dict[str, list[ScorerClient]]:
        groups = (
            group(f"scorer-{name}", ScorerClient, build_scorer, (config, plan, i), count)
            for i, (name, count) in enumerate(plan.scorers.items())
        )
        return dict(zip(plan.scorers, await asyncio.gather(*groups), strict=True))

    served = await asyncio.gather(
        group("engine", EngineClient, build_engine, (config, plan), plan.engines),
        group("trainer", TrainerClient, build_trainer, (config, plan), plan.trainers if mode == "train" else 0),
        judges(),
        scorers(),
    )
    args = config, plan, Roles(*served)
    return await group("controller", ControllerClient, build_controller, args, plan.controllers)


def _wanted(plan: Plan, mode: Mode) -> dict[str, int]:
    """Number of processes per kind, by the names that the runtime uses, in the order in which they start."""
    served = {"engine": plan.engines, "trainer": plan.trainers if mode == "train" else 0}
    judges = {f"judge-{name}": count for name, count in plan.judges.items()}
    scorers = {f"scorer-{name}": count for name, count in plan.scorers.items()}
    return {**served, **judges, **scorers, "controller": plan.controllers}


async def _supervise(
    runtime: Runtime, controllers: Sequence[ControllerClient], progress: Progress, mode: Mode, preview: OutputPreview
) -> Any:
    """Wait until all controllers are done. The first failure ends the run, with the error that explains it best."""
    runs: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(c.run() if mode == "train" else c.evaluate()) for c in controllers
    ]
    watch = _watch(runtime, controllers, progress)
    others = [asyncio.ensure_future(watch), asyncio.ensure_future(_poll(controllers, progress, preview))]
    try:
        waiting = {*runs, *others}
        while not all(task.done() for task in runs):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(task.exception() for task in done):
                if waiting:
                    await asyncio.wait(waiting, timeout=GRACE_S)
                raise _first_cause([t.exception() for t in (*runs, *others) if t.done() and t.exception()])
        await _show(controllers, progress, preview)
        return runs[0].result()
    finally:
        for task in (*runs, *others):
            task.cancel()
        await asyncio.gather(*runs, *others, return_exceptions=True)


async def _watch(runtime: Runtime, controllers: Sequence[ControllerClient], progress: Progress) -> None:
    """Restart replicas that die; nothing else is restarted. The run ends with RoleDied if a trainer or a controller
    dies, or if one replica dies too often."""
    deaths: Counter[str] = Counter()
    tasks: set[asyncio.Future[None]] = set()  # restarts in progress, and the watch

    async def restart(name: str) -> None:
        await asyncio.gather(*(c.mark_dead(name) for c in controllers))
        await runtime.revive(name)
        if not await controllers[0].restore(name):
            return  # it died again; the runtime reports this death too
        await asyncio.gather(*(c.mark_alive(name) for c in controllers))
        progress.note(f"{name} is restarted, with current weights: process {runtime.processes().get(name)}")

    try:
        while True:
            watching = asyncio.ensure_future(runtime.watch())
            tasks.add(watching)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks -= done
            for task in done - {watching}:
                task.result()
            if watching in done:
                error = watching.exception()
                if not isinstance(error, RoleDied) or not error.role.startswith(REVIVABLE):
                    watching.result()
                assert isinstance(error, RoleDied)
                deaths[error.role] += 1
                if deaths[error.role] > MAX_REVIVALS:
                    raise error
                progress.note(_with_notes(error, "; its requests go to other replicas until it is restarted"))
                tasks.add(asyncio.ensure_future(restart(error.role)))
            else:
                watching.cancel()
                tasks.discard(watching)
    finally:
        for task in tasks:
            task.cancel()


def _first_cause(errors: Sequence[BaseException | None]) -> BaseException:
    """A dead process explains exceptions of other roles; an exception of a role explains a broken collective."""

    def rank(error: BaseException | None) -> int:
        if isinstance(error, RoleDied):
            return 0 if "is gone" in error.detail else 1
        if isinstance(error, RoleError):
            return 3 if "TimeoutError" in error.message else 2
        return 4

    cause = min(errors, key=rank)
    assert cause is not None
    return cause


async def _poll(controllers: Sequence[ControllerClient], progress: Progress, preview: OutputPreview) -> None:
    while True:
        await asyncio.sleep(POLL_S.get(progress.mode, DEFAULT_POLL_S))
        await _show(controllers, progress, preview)


async def _show(controllers: Sequence[ControllerClient], progress: Progress, preview: OutputPreview) -> None:
    answers = await asyncio.gather(*(c.status() for c in controllers))
    statuses = [Status(answer.role, answer.stage, answer.detail, answer.step) for answer in answers]
    for line in preview.poll():
        progress.note(line)
    for answer in answers:
        for text in answer.notes:
            progress.note(text)
        for row in answer.rows:
            progress.update(statuses, row)
    progress.update(statuses, None)


def exit_code(error: BaseException) -> int:
    """2: user error; 130: interrupted; 1: all other errors."""
    if isinstance(error, RoleError) and error.user_error:
        return 2
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def explain(error: BaseException) -> None:
    """Print why a run ended early: the first traceback and the name of the role."""
    if isinstance(error, RoleError):
        if not error.user_error:
            print(f"\nfirst traceback, from {error.role}:\n{error.traceback}", file=sys.stderr)
        print(f"gcore: {error.message if error.user_error else _with_notes(error)}", file=sys.stderr)
    elif isinstance(error, RoleDied):
        print(
            "gcore: " + _with_notes(error, "; run.resume=auto continues from the last checkpoint, if any"),
            file=sys.stderr,
        )


def _with_notes(error: BaseException, then: str = "") -> str:
    """The error, and on the next lines its notes: the last lines of a log, or the path of the log."""
    return "\n".join([f"{error}{then}", *getattr(error, "__notes__", ())])
