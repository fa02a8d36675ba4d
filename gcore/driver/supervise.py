"""The driver: starts the processes of a run, shows its progress, restarts what dies, and stops all processes.

    preflight -> engines, judges, scorers, trainers -> controllers -> (run | watch | poll status) -> stop -> report
                                        └──── rollback: one of these died or hangs ──┘

No samples or weights pass through the driver. A run ends when all controllers are done, when a role raises an
exception, when processes die too often (heal.py), or with Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from gcore.checkpoint import memory, store
from gcore.clients import ControllerClient, CriticClient, EngineClient, ScorerClient, TrainerClient
from gcore.config.secrets import hide, learn
from gcore.config.tree import Config
from gcore.driver.heal import (
    NodesChanged,
    ProgressWatch,
    RestartBudget,
    RoleWatch,
    first_cause,
    is_healable,
    lost_nodes,
    wait_for_cause,
    watch_for_new_nodes,
    with_notes,
)
from gcore.driver.interrupt import end_at_signals
from gcore.driver.on_step import OnStep, call_after_steps, open_on_step
from gcore.driver.run_folder import Restarts, check_resume, open_evaluation_folder, open_folder, say
from gcore.driver.run_lock import hold
from gcore.driver.start_report import reporting_start
from gcore.launch.build import (
    Roles,
    build_controller,
    build_engine,
    build_judge,
    build_runtime,
    build_scorer,
    import_controller,
    log_folder,
    see_cluster,
)
from gcore.launch.build_ranks import build_critic, build_trainer
from gcore.launch.epochs import with_steps
from gcore.launch.machines import Cluster
from gcore.launch.node_checks import NodeGate, check_nodes, sent_files
from gcore.launch.pins import check_models, find_weights, pin
from gcore.launch.plan import Plan
from gcore.launch.preflight import make_ready
from gcore.observe.events import EventLog
from gcore.observe.files import take_notes
from gcore.observe.logs import OutputPreview
from gcore.observe.metrics import read_rows
from gcore.observe.page import write_report
from gcore.observe.progress import Progress, Status
from gcore.observe.report import plot_reward
from gcore.observe.trace import merge_traces
from gcore.protocols import ControllerStatus, Handle, RoleDied, RoleError
from gcore.runtime.protocol import Runtime
from gcore.user_files import pack

POLL_S = {"live": 0.25}  # seconds between two polls of the controllers, by progress view
DEFAULT_POLL_S = 0.5  # other views print one line per step
GRACE_S = 1.5  # after the first failure, how long to wait for failures that explain it better
LAST_STATUS_S = 2.0  # for the last status of controllers before a rollback
Mode = Literal["train", "eval"]
C = TypeVar("C")


def run(config: Config, mode: Mode = "train") -> Any:
    """The whole run. Returns the row of an evaluation. Raises UserError, RoleError, RoleDied or KeyboardInterrupt."""
    learn(config.model_dump(mode="json"))
    if mode == "train":
        config, on_step = open_on_step(config)
        with hold(config.run.folder, partial(say, config)) as lock:
            return _run_alone(config, mode, lock, on_step)
    resume = config.run.resume
    with store.reading(Path(resume)) if resume not in ("auto", "never") else contextlib.nullcontext():
        return _run_alone(config, mode)


def _run_alone(config: Config, mode: Mode, lock: Sequence[int] = (), on_step: OnStep | None = None) -> Any:
    """`lock`: descriptors of the lock of the run folder. An evaluation needs none: its output is in another folder, and
    it only reads the checkpoint."""
    cluster, config = see_cluster(config), pin(config)
    check_models(config)
    decided, plan, notes = _make_ready(config, cluster, mode)
    gate = NodeGate(see_cluster, cluster.nodes)
    if mode == "train":
        counted, about_steps = with_steps(decided)
        open_folder(decided)  # its config.yaml keeps run.epochs, so that a longer one can be resumed
        decided, config = (each.model_copy(update={"run": counted}) for each in (decided, config))
        notes = [*about_steps, *notes]
    restarts = Restarts(config, RestartBudget(config.run.max_restarts if mode == "train" else 0))
    try:
        while True:
            try:
                result = asyncio.run(_run(decided, plan, mode, notes, restarts, gate, on_step, lock))
                if mode == "train":
                    memory.close_memory(decided.run.folder)
                return result
            except NodesChanged as change:
                config = restarts.from_last_checkpoint(config)
                decided, plan, notes = _make_ready(config, gate.see(config), mode)
                notes = [f"{change}: the run continues on {len(plan.nodes)} node(s)", *notes]
    except asyncio.CancelledError:  # by SIGTERM
        raise KeyboardInterrupt from None
    except RoleError as error:
        if (logs := log_folder(config)) is not None and (log := logs / f"{error.role}.log").is_file():
            error.add_note(f"the output of {error.role} is in {log}")
        raise
    finally:
        if mode == "train":
            writers = {"trace.json": merge_traces, "reward.png": plot_reward, "report.html": write_report}
            for name, write in writers.items():
                try:
                    write(config.run.folder)
                except Exception as error:  # must not hide the error of the run
                    why = error.strerror if isinstance(error, OSError) else error
                    print(f"gcore: {config.run.folder / name} is not written ({why})", file=sys.stderr)


def _make_ready(config: Config, cluster: Cluster, mode: Mode) -> tuple[Config, Plan, list[str]]:
    """Configuration, plan and notes for the user, of a run that can work on these machines."""
    ready = make_ready(config, cluster, mode == "train")
    config = ready.config
    if mode == "train":
        check_resume(config, next(data for data in ready.checked.datasets if data.key == "data.train"))
    find_weights(config, of_hub=True)
    differences = check_nodes(config, ready.plan, mode == "train")
    if mode == "eval":
        config = open_evaluation_folder(config)
    return config, ready.plan, [*ready.notes, *differences]


async def _run(
    config: Config,
    plan: Plan,
    mode: Mode,
    notes: Sequence[str],
    restarts: Restarts,
    gate: NodeGate,
    on_step: OnStep | None,
    lock: Sequence[int],
) -> Any:
    end_at_signals()
    warm = config.training.warm_start
    history = read_rows(config.run.folder) if config.run.resume != "never" else []
    with Progress(
        config.observe.progress,
        config.run.name,
        config.run.total_steps,
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
            files = pack(sent_files(config)).data if Cluster(plan.nodes).is_joined else b""
            runtime = build_runtime(config, plan, files, lock)
            end_at_signals()  # again: Ray has replaced the handler
            runtime.prepare("controller", plan.controllers, import_controller)
            return await _run_to_the_end(
                runtime, config, plan, mode, progress, preview, restarts, gate, on_step, started
            )
        finally:
            if runtime is not None:
                runtime.stop()
                preview.mask_all()


async def _run_to_the_end(
    runtime: Runtime,
    config: Config,
    plan: Plan,
    mode: Mode,
    progress: Progress,
    preview: OutputPreview,
    restarts: Restarts,
    gate: NodeGate,
    on_step: OnStep | None,
    started: float,
) -> Any:
    """Start the roles and wait for the controllers. If one of them or a trainer rank dies, start these again: they
    continue from the last checkpoint."""
    events = EventLog(config.run.folder if mode == "train" else None)
    watch = RoleWatch(runtime, progress, events, config.run, log_folder(config))
    gate.note = progress.note
    starting: Coroutine[Any, Any, tuple[Roles, list[ControllerClient]]] = _start(runtime, config, plan, mode)
    roles: Roles | None = None
    while True:
        try:
            roles, controllers = await reporting_start(starting, runtime, _wanted(plan, mode), progress)
            progress.note(_ready_line(plan, mode, time.monotonic() - started))
            if pids := runtime.processes():
                progress.note("process ids: " + ", ".join(f"{name} {pid}" for name, pid in pids.items()))
            others = [watch.watch(controllers), watch_for_new_nodes(plan, config, gate.see)]
            if on_step is not None:
                others.append(call_after_steps(controllers, on_step))
            seen = watch.check_reachable, ProgressWatch(runtime, config.run)
            return await _supervise(controllers, progress, mode, preview, others, *seen)
        except (RoleDied, RoleError) as error:
            if roles is None or not is_healable(error):
                raise
            if not restarts.budget.take():
                if mode == "train":
                    events.add("gave_up", cause=str(error))
                    limit = f"run.max_restarts={config.run.max_restarts}"
                    error.add_note(f"the run is not restarted again: at most {limit} times per hour")
                raise
            with contextlib.suppress(Exception):  # what those that are alive have not told yet
                await asyncio.wait_for(_show(controllers, progress, preview), LAST_STATUS_S)
            started, config = time.monotonic(), restarts.from_last_checkpoint(config)
            events.add("rollback", cause=str(error))
            if lost := lost_nodes(plan, partial(see_cluster, config)):
                raise NodesChanged(f"{error}; lost: {', '.join(node.address for node in lost)}") from error
            who = "controllers, trainer and critic ranks" if plan.critics else "controllers and trainer ranks"
            progress.note(with_notes(error, f"; {who} are restarted and load the last checkpoint"))
            starting = watch.guard_start(_start_again(runtime, config, plan, roles, watch))


def _ready_line(plan: Plan, mode: Mode, seconds: float) -> str:
    return (
        f"{plan.controllers} controller(s), {plan.engines} engine(s), "
        f"{plan.trainers if mode == 'train' else 0} trainer rank(s)"
        + (f", {plan.critics} critic rank(s)" if plan.critics and mode == "train" else "")
        + "".join(f", judge {name}" for name in plan.judges)
        + "".join(f", scorer {name}" for name in plan.scorers)
        + (f" on {len(plan.nodes)} nodes" if len(plan.nodes) > 1 else "")
        + f" ready in {seconds:.1f} s"
    )


async def _start(runtime: Runtime, config: Config, plan: Plan, mode: Mode) -> tuple[Roles, list[ControllerClient]]:
    """Start all roles that serve requests at the same time, then the controllers, which call them."""

    async def judges() -> dict[str, list[EngineClient]]:
        groups = (
            _group(runtime, f"judge-{name}", EngineClient, build_judge, (config, plan, name), count)
            for name, count in plan.judges.items()
        )
        return dict(zip(plan.judges, await asyncio.gather(*groups), strict=True))

    async def scorers() -> dict[str, list[ScorerClient]]:
        groups = (
            _group(runtime, f"scorer-{name}", ScorerClient, build_scorer, (config, plan, i), count)
            for i, (name, count) in enumerate(plan.scorers.items())
        )
        return dict(zip(plan.scorers, await asyncio.gather(*groups), strict=True))

    served = await asyncio.gather(
        _group(runtime, "engine", EngineClient, build_engine, (config, plan), plan.engines),
        _trainers(runtime, config, plan, plan.trainers if mode == "train" else 0),
        judges(),
        scorers(),
        _critics(runtime, config, plan, plan.critics if mode == "train" else 0),
    )
    roles = Roles(*served)
    return roles, await _controllers(runtime, config, plan, roles)


async def _start_again(
    runtime: Runtime, config: Config, plan: Plan, roles: Roles, watch: RoleWatch
) -> tuple[Roles, list[ControllerClient]]:
    """Start controllers, trainer and critic ranks again. Other roles keep their processes and drop their requests."""

    async def reset_engines() -> None:
        await watch.revive_dead()
        engines = (*roles.engines, *itertools.chain.from_iterable(roles.judges.values()))
        answers = await asyncio.gather(*(engine.reset() for engine in engines), return_exceptions=True)
        for engine, failed in zip(engines, answers, strict=True):
            if isinstance(failed, RoleDied):  # it has its old requests, or is dead: `watch` restarts it
                runtime.kill(engine.name)
            elif failed is not None:
                raise failed

    await asyncio.gather(*(runtime.stop_group(kind) for kind in ("controller", "trainer", "critic")))
    runtime.prepare("controller", plan.controllers, import_controller)
    try:
        async with asyncio.TaskGroup() as tasks:  # if one of them fails, the other must not run into the next restart
            tasks.create_task(reset_engines())
            trainers = tasks.create_task(_trainers(runtime, config, plan, plan.trainers))
            critics = tasks.create_task(_critics(runtime, config, plan, plan.critics))
    except* Exception as errors:
        raise errors.exceptions[0] from None
    roles = dataclasses.replace(roles, trainers=trainers.result(), critics=critics.result())
    return roles, await _controllers(runtime, config, plan, roles)


async def _trainers(runtime: Runtime, config: Config, plan: Plan, count: int) -> list[TrainerClient]:
    return await _group(runtime, "trainer", TrainerClient, build_trainer, (config, plan), count)


async def _critics(runtime: Runtime, config: Config, plan: Plan, count: int) -> list[CriticClient]:
    return await _group(runtime, "critic", CriticClient, build_critic, (config, plan), count)


async def _controllers(runtime: Runtime, config: Config, plan: Plan, roles: Roles) -> list[ControllerClient]:
    args = config, plan, roles
    return await _group(runtime, "controller", ControllerClient, build_controller, args, plan.controllers)


async def _group(
    runtime: Runtime,
    kind: str,
    client: Callable[[Handle], C],
    factory: Callable[..., Any],
    args: tuple[Any, ...],
    count: int,
) -> list[C]:
    return [client(handle) for handle in await runtime.start_group(kind, factory, [args] * count)]


def _wanted(plan: Plan, mode: Mode) -> dict[str, int]:
    """Number of processes per kind, by the names that the runtime uses, in the order in which they start."""
    trains = mode == "train"
    served = {"engine": plan.engines, "trainer": plan.trainers * trains, "critic": plan.critics * trains}
    judges = {f"judge-{name}": count for name, count in plan.judges.items()}
    scorers = {f"scorer-{name}": count for name, count in plan.scorers.items()}
    return {**served, **judges, **scorers, "controller": plan.controllers}


async def _supervise(
    controllers: Sequence[ControllerClient],
    progress: Progress,
    mode: Mode,
    preview: OutputPreview,
    watches: Sequence[Coroutine[Any, Any, None]],
    check_reachable: Callable[[Sequence[ControllerStatus]], None],
    progress_watch: ProgressWatch,
) -> Any:
    """Wait until all controllers are done. The first failure is raised: the error that explains the others best.
    `watches`: they never return, and raise if the run cannot continue as it is."""
    runs: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(c.run() if mode == "train" else c.evaluate()) for c in controllers
    ]
    poll = _poll(controllers, progress, preview, check_reachable, progress_watch)
    others = [asyncio.ensure_future(watch) for watch in (*watches, poll)]
    try:
        waiting = {*runs, *others}
        while not all(task.done() for task in runs):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(task.exception() for task in done):
                await wait_for_cause((*runs, *others), GRACE_S)
                raise first_cause([t.exception() for t in (*runs, *others) if t.done() and t.exception()])
        await _show(controllers, progress, preview)
        return runs[0].result()
    finally:
        for task in (*runs, *others):
            task.cancel()
        await asyncio.gather(*runs, *others, return_exceptions=True)


async def _poll(
    controllers: Sequence[ControllerClient],
    progress: Progress,
    preview: OutputPreview,
    check_reachable: Callable[[Sequence[ControllerStatus]], None],
    progress_watch: ProgressWatch,
) -> None:
    while True:
        await asyncio.sleep(POLL_S.get(progress.mode, DEFAULT_POLL_S))
        answers = await _show(controllers, progress, preview)
        check_reachable(answers)
        await progress_watch.seen(_statuses(answers))


def _statuses(answers: Sequence[ControllerStatus]) -> list[Status]:
    return [Status(answer.role, answer.stage, answer.detail, answer.step) for answer in answers]


async def _show(
    controllers: Sequence[ControllerClient], progress: Progress, preview: OutputPreview
) -> Sequence[ControllerStatus]:
    """Poll the controllers and show what they report."""
    answers = await asyncio.gather(*(c.status() for c in controllers))
    statuses = _statuses(answers)
    for line in (*preview.poll(), *take_notes()):
        progress.note(line)
    for answer in answers:
        for text in answer.notes:
            progress.note(text)
        for row in answer.rows:
            progress.update(statuses, row)
    progress.update(statuses, None)
    return answers


def exit_code(error: BaseException) -> int:
    """2: user error; 130: interrupted; 1: all other errors."""
    if isinstance(error, RoleError) and error.user_error:
        return 2
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def explain(error: BaseException) -> None:
    """Print why a run ended early: the first traceback and the name of the role."""
    if isinstance(error, RoleError):
        if not error.user_error:
            print(f"\nfirst traceback, from {error.role}:\n{hide(error.traceback)}", file=sys.stderr)
        print(f"gcore: {hide(error.message if error.user_error else with_notes(error))}", file=sys.stderr)
    elif isinstance(error, RoleDied):
        print(
            "gcore: " + hide(with_notes(error, "; run.resume=auto continues from the last checkpoint, if any")),
            file=sys.stderr,
        )
