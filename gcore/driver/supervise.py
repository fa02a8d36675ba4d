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
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from gcore.checkpoint import memory, store
from gcore.clients import ControllerClient, CriticClient, EngineClient, ScorerClient, TrainerClient
from gcore.config import Config
from gcore.config.secrets import hide, learn
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
from gcore.driver.on_step import call_after_steps, open_on_step
from gcore.driver.run_folder import Restarts, check_resume, open_evaluation_folder, open_folder, say
from gcore.driver.run_lock import hold
from gcore.driver.start_report import reporting_start
from gcore.launch.build import Roles, build_engine, build_judge, build_runtime, build_scorer, log_folder
from gcore.launch.build_controller import build_controller, import_controller
from gcore.launch.build_ranks import build_critic, build_trainer
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
from gcore.protocols import ControllerStatus, Handle, RoleDied, RoleError
from gcore.runtime.protocol import Runtime
from gcore.user_files import pack

POLL_S = {"live": 0.25}  # seconds between two polls of the controllers, by progress view
DEFAULT_POLL_S = 0.5  # other views print one line per step
GRACE_S = 1.5  # after the first failure, how long to wait for failures that explain it better
LAST_STATUS_S = 2.0  # for the last status of controllers before a rollback
Mode = Literal["train", "eval"]
C = TypeVar("C")
T = TypeVar("T")


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
        check_resume(config, next(data for data in ready.checked.datasets if data.key == "data.train"))
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
            supervisor = Supervisor(config, plan, mode, runtime, progress, preview, events, watch)
            return await supervisor.run(started, restarts, gate, on_step)
        finally:
            runtime.stop()
            preview.mask_all()


@dataclass
class Supervisor:
    """Starts the processes of a plan, and waits for the controllers. If one of them or a trainer rank dies, these are
    started again, and continue from the last checkpoint."""

    config: Config
    plan: Plan
    mode: Mode
    runtime: Runtime
    progress: Progress
    preview: OutputPreview
    events: EventLog
    watch: RoleWatch

    async def run(self, started: float, restarts: Restarts, gate: NodeGate, on_step: OnStep | None) -> Any:
        """`started`: since when the user waits."""
        plan, runtime, note = self.plan, self.runtime, self.progress.note
        starting: Coroutine[Any, Any, tuple[Roles, list[ControllerClient]]] = self._start()
        roles: Roles | None = None
        while True:
            try:
                roles, controllers = await reporting_start(starting, runtime, self._counts, self.progress)
                note(f"{self._ready} ready in {time.monotonic() - started:.1f} s")
                if pids := runtime.processes():
                    note("process ids: " + ", ".join(f"{name} {pid}" for name, pid in pids.items()))
                others = [self.watch.watch(controllers), watch_for_new_nodes(plan, self.config, gate.see)]
                if on_step is not None:
                    others.append(call_after_steps(controllers, on_step))
                return await self.wait_for(controllers, others)
            except (RoleDied, RoleError) as error:
                if roles is None or not is_healable(error):
                    raise
                if not restarts.budget.take():
                    if self.mode == "train":
                        self.events.add("gave_up", cause=str(error))
                        limit = f"run.max_restarts={self.config.run.max_restarts}"
                        error.add_note(f"the run is not restarted again: at most {limit} times per hour")
                    raise
                with contextlib.suppress(Exception):  # what those that are alive have not told yet
                    await asyncio.wait_for(self._show(controllers), LAST_STATUS_S)
                started, self.config = time.monotonic(), restarts.from_last_checkpoint(self.config)
                self.events.add("rollback", cause=str(error))
                if lost := lost_nodes(plan, partial(see_cluster, self.config)):
                    raise NodesChanged(f"{error}; lost: {', '.join(node.address for node in lost)}") from error
                who = "controllers, trainer and critic ranks" if plan.critics else "controllers and trainer ranks"
                note(with_notes(error, f"; {who} are restarted and load the last checkpoint"))
                starting = self.watch.guard_start(self.start_again(roles))

    # ---- start ----------------------------------------------------------------------------------------------------

    @property
    def _counts(self) -> dict[str, int]:
        """Processes by kind."""
        counts = {kind: len(nodes) for kind, nodes in self.plan.role_nodes.items()}
        return counts if self.mode == "train" else {**counts, "trainer": 0, "critic": 0}

    @property
    def _ready(self) -> str:
        counts, nodes = self._counts, len(self.plan.nodes)
        return (
            f"{counts['controller']} controller(s), {counts['engine']} engine(s), {counts['trainer']} trainer rank(s)"
            + (f", {counts['critic']} critic rank(s)" if counts.get("critic") else "")
            + "".join(f", judge {name}" for name in self.plan.judges)
            + "".join(f", scorer {name}" for name in self.plan.scorers)
            + (f" on {nodes} nodes" if nodes > 1 else "")
        )

    async def _group(
        self, kind: str, client: Callable[[Handle], C], build: Callable[..., Any], *more: object
    ) -> list[C]:
        """Start all processes of a kind. `more`: arguments of `build`, after the configuration and the plan."""
        args = [(self.config, self.plan, *more)] * self._counts.get(kind, 0)
        return [client(handle) for handle in await self.runtime.start_group(kind, build, args)]

    async def _start(self) -> tuple[Roles, list[ControllerClient]]:
        """All roles that serve requests at the same time, then the controllers, which call them."""
        self.runtime.prepare("controller", self.plan.controllers, import_controller)
        judges = {name: self._group(f"judge-{name}", EngineClient, build_judge, name) for name in self.plan.judges}
        scorers = {
            name: self._group(f"scorer-{name}", ScorerClient, build_scorer, i)
            for i, name in enumerate(self.plan.scorers)
        }
        served = await asyncio.gather(
            self._group("engine", EngineClient, build_engine),
            self._group("trainer", TrainerClient, build_trainer),
            _by_name(judges),
            _by_name(scorers),
            self._group("critic", CriticClient, build_critic),
        )
        return await self._with_controllers(Roles(*served))

    async def start_again(self, roles: Roles) -> tuple[Roles, list[ControllerClient]]:
        """Controllers, trainer and critic ranks. Other roles keep their processes and drop their requests."""
        await asyncio.gather(*(self.runtime.stop_group(kind) for kind in ("controller", "trainer", "critic")))
        self.runtime.prepare("controller", self.plan.controllers, import_controller)
        try:
            async with asyncio.TaskGroup() as tasks:  # if one of them fails, no other must run into the next restart
                tasks.create_task(self._reset_engines(roles))
                trainers = tasks.create_task(self._group("trainer", TrainerClient, build_trainer))
                critics = tasks.create_task(self._group("critic", CriticClient, build_critic))
        except* Exception as errors:
            raise errors.exceptions[0] from None
        roles = dataclasses.replace(roles, trainers=trainers.result(), critics=critics.result())
        return await self._with_controllers(roles)

    async def _with_controllers(self, roles: Roles) -> tuple[Roles, list[ControllerClient]]:
        return roles, await self._group("controller", ControllerClient, build_controller, roles)

    async def _reset_engines(self, roles: Roles) -> None:
        await self.watch.revive_dead()
        engines = (*roles.engines, *itertools.chain.from_iterable(roles.judges.values()))
        answers = await asyncio.gather(*(engine.reset() for engine in engines), return_exceptions=True)
        for engine, failed in zip(engines, answers, strict=True):
            if isinstance(failed, RoleDied):  # it has its old requests, or is dead: `watch` restarts it
                self.runtime.kill(engine.name)
            elif failed is not None:
                raise failed

    # ---- until the end --------------------------------------------------------------------------------------------

    async def wait_for(
        self, controllers: Sequence[ControllerClient], watches: Sequence[Coroutine[Any, Any, None]]
    ) -> Any:
        """Wait until all controllers are done. The first failure is raised: the error that explains the others best.
        `watches`: they never return, and raise if the run cannot continue as it is."""
        runs: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(c.run() if self.mode == "train" else c.evaluate()) for c in controllers
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
        progress_watch = ProgressWatch(self.runtime, self.config.run)
        while True:
            await asyncio.sleep(POLL_S.get(self.progress.mode, DEFAULT_POLL_S))
            answers = await self._show(controllers)
            self.watch.check_reachable(answers)
            await progress_watch.seen(_statuses(answers))

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


async def _by_name(calls: Mapping[str, Awaitable[T]]) -> dict[str, T]:
    return dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))


def _statuses(answers: Sequence[ControllerStatus]) -> list[Status]:
    return [Status(answer.role, answer.stage, answer.detail, answer.step) for answer in answers]


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
