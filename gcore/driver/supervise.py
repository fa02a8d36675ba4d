"""The driver: starts the processes of a run, shows its progress, restarts what dies, and stops all processes.

    preflight -> engines, judges, scorers, trainers -> controllers -> (run | watch | poll status) -> stop -> report
                                        └──── rollback: one of these died or hangs ──┘

No samples or weights pass through the driver. A run ends when all controllers are done, when a role raises an
exception, when processes die too often (heal.py), or with Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gcore.checkpoint import memory, store
from gcore.clients import ControllerClient
from gcore.config.secrets import hide, learn
from gcore.config.tree import Config
from gcore.driver.heal import (
    NodesChanged,
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
from gcore.driver.on_step import call_after_steps, open_on_step
from gcore.driver.run_folder import Restarts, check_resume, open_evaluation_folder, open_folder, say
from gcore.driver.run_lock import hold
from gcore.driver.start import Mode, Processes, reporting_start
from gcore.launch.build import build_runtime, log_folder
from gcore.launch.epochs import with_steps
from gcore.launch.machines import Cluster, see_cluster
from gcore.launch.node_checks import NodeGate, sent_files
from gcore.launch.pins import find_weights, pin
from gcore.launch.plan import Plan
from gcore.launch.preflight import make_ready
from gcore.launch.user_code import OnStep
from gcore.observe.events import EventLog
from gcore.observe.files import take_notes
from gcore.observe.logs import OutputPreview
from gcore.observe.metrics import read_rows
from gcore.observe.page import write_report
from gcore.observe.progress import Progress, Status
from gcore.observe.report import plot_reward
from gcore.observe.trace import merge_traces
from gcore.protocols import ControllerStatus, RoleDied, RoleError
from gcore.user_files import pack

POLL_S = {"live": 0.25}  # seconds between two polls of the controllers, by progress view
DEFAULT_POLL_S = 0.5  # other views print one line per step
GRACE_S = 1.5  # after the first failure, how long to wait for failures that explain it better
LAST_STATUS_S = 2.0  # for the last status of controllers before a rollback


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
    planned, plan, notes = _make_ready(config, cluster, mode)
    if mode == "train":
        counted, about_steps = with_steps(planned)
        open_folder(planned)  # its config.yaml keeps run.epochs, so that a longer one can be resumed
        planned, config = (each.model_copy(update={"run": counted}) for each in (planned, config))
        notes = [*about_steps, *notes]
    restarts = Restarts(config, RestartBudget(config.run.max_restarts if mode == "train" else 0))
    gate = NodeGate(see_cluster, cluster.nodes)
    try:
        while True:
            try:
                result = asyncio.run(_run_plan(planned, plan, mode, notes, restarts, gate, on_step, lock))
                if mode == "train":
                    memory.close_memory(planned.run.folder)
                return result
            except NodesChanged as change:
                config = restarts.from_last_checkpoint(config)
                planned, plan, notes = _make_ready(config, gate.see(config), mode)
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
        check_resume(config, next(data for data in ready.datasets if data.key == "data.train"))
    find_weights(config, of_hub=True)
    if mode == "eval":
        config = open_evaluation_folder(config)
    return config, ready.plan, ready.notes


async def _run_plan(
    config: Config,
    plan: Plan,
    mode: Mode,
    notes: Sequence[str],
    restarts: Restarts,
    gate: NodeGate,
    on_step: OnStep | None,
    lock: Sequence[int],
) -> Any:
    """All processes of the plan, from their start to their end."""
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
        for text in notes:
            progress.note(text)
        progress.note("starting " + ("one process" if config.runtime == "local" else "Ray and the processes"))
        started, preview, gate.note = time.monotonic(), OutputPreview(log_folder(config)), progress.note
        files = pack(sent_files(config)).data if Cluster(plan.nodes).is_joined else b""
        runtime = build_runtime(config, plan, files, lock)
        try:
            end_at_signals()  # again: Ray has replaced the handler
            events = EventLog(config.run.folder if mode == "train" else None)
            watch = RoleWatch(runtime, progress, events, config.run, log_folder(config))
            supervisor = Supervisor(Processes(runtime, config, plan, mode), progress, preview, events, watch)
            return await supervisor.run(started, restarts, gate, on_step)
        finally:
            runtime.stop()
            preview.mask_all()


@dataclass
class Supervisor:
    """Waits for the controllers. If one of them or a trainer rank dies, these are started again, and continue from the
    last checkpoint."""

    processes: Processes
    progress: Progress
    preview: OutputPreview
    events: EventLog
    watch: RoleWatch

    async def run(self, started: float, restarts: Restarts, gate: NodeGate, on_step: OnStep | None) -> Any:
        """`started`: since when the user waits."""
        processes, note = self.processes, self.progress.note
        plan, runtime, train = processes.plan, processes.runtime, processes.mode == "train"
        starting, roles = processes.start(), None
        while True:
            try:
                roles, controllers = await reporting_start(starting, runtime, processes.counts, self.progress)
                note(f"{processes.listed} ready in {time.monotonic() - started:.1f} s")
                if pids := runtime.processes():
                    note("process ids: " + ", ".join(f"{name} {pid}" for name, pid in pids.items()))
                others = [self.watch.watch(controllers), watch_for_new_nodes(plan, processes.config, gate.see)]
                if on_step is not None:
                    others.append(call_after_steps(controllers, on_step))
                return await self.wait_for(controllers, others)
            except (RoleDied, RoleError) as error:
                if roles is None or not is_healable(error):
                    raise
                if not restarts.budget.take():
                    if train:
                        self.events.add("gave_up", cause=str(error))
                        limit = f"run.max_restarts={processes.config.run.max_restarts}"
                        error.add_note(f"the run is not restarted again: at most {limit} times per hour")
                    raise
                with contextlib.suppress(Exception):  # what those that are alive have not told yet
                    await asyncio.wait_for(self._show(controllers), LAST_STATUS_S)
                started, processes.config = time.monotonic(), restarts.from_last_checkpoint(processes.config)
                self.events.add("rollback", cause=str(error))
                if lost := lost_nodes(plan, partial(see_cluster, processes.config)):
                    raise NodesChanged(f"{error}; lost: {', '.join(node.address for node in lost)}") from error
                who = "controllers, trainer and critic ranks" if plan.critics else "controllers and trainer ranks"
                note(with_notes(error, f"; {who} are restarted and load the last checkpoint"))
                starting = self.watch.guard_start(processes.start_again(roles, self.watch.revive_dead))

    async def wait_for(
        self, controllers: Sequence[ControllerClient], watches: Sequence[Coroutine[Any, Any, None]]
    ) -> Any:
        """Wait until all controllers are done. The first failure is raised: the error that explains the others best.
        `watches`: they never return, and raise if the run cannot continue as it is."""
        runs: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(c.run() if self.processes.mode == "train" else c.evaluate()) for c in controllers
        ]
        others = [asyncio.ensure_future(watch) for watch in (*watches, self._poll(controllers))]
        try:
            waiting = {*runs, *others}
            while not all(task.done() for task in runs):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if any(task.exception() for task in done):
                    await wait_for_cause((*runs, *others), GRACE_S)
                    raise first_cause([t.exception() for t in (*runs, *others) if t.done() and t.exception()])
            await self._show(controllers)
            return runs[0].result()
        finally:
            for task in (*runs, *others):
                task.cancel()
            await asyncio.gather(*runs, *others, return_exceptions=True)

    async def _poll(self, controllers: Sequence[ControllerClient]) -> None:
        while True:
            await asyncio.sleep(POLL_S.get(self.progress.mode, DEFAULT_POLL_S))
            answers = await self._show(controllers)
            self.watch.check_reachable(answers)
            await self.watch.check_progress(_statuses(answers))

    async def _show(self, controllers: Sequence[ControllerClient]) -> Sequence[ControllerStatus]:
        """Poll the controllers and show what they report."""
        answers = await asyncio.gather(*(c.status() for c in controllers))
        statuses = _statuses(answers)
        for line in (*self.preview.poll(), *take_notes()):
            self.progress.note(line)
        for answer in answers:
            for text in answer.notes:
                self.progress.note(text)
            for row in answer.rows:
                self.progress.update(statuses, row)
        self.progress.update(statuses, None)
        return answers


def _statuses(answers: Sequence[ControllerStatus]) -> list[Status]:
    return [Status(answer.role, answer.stage, answer.detail, answer.step) for answer in answers]


def explain(error: RoleError | RoleDied) -> int:
    """Print why a run ended early: the first traceback and the name of the role. Returns the exit code: 2 if the user
    can fix it, else 1."""
    if isinstance(error, RoleDied):
        text = with_notes(error, "; run.resume=auto continues from the last checkpoint, if any")
    elif error.user_error:
        text = error.message
    else:
        print(f"\nfirst traceback, from {error.role}:\n{hide(error.traceback)}", file=sys.stderr)
        text = with_notes(error)
    print(f"gcore: {hide(text)}", file=sys.stderr)
    return 2 if isinstance(error, RoleError) and error.user_error else 1
