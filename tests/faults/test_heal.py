"""A controller or a trainer rank dies or hangs: the run rolls back to its last checkpoint by itself, and its metrics
are those of a run without the fault."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from gcore.config.load import load_config
from gcore.config.run import Run
from gcore.driver import supervise
from gcore.driver.heal import RestartBudget, RoleWatch, is_healable
from gcore.driver.start import Processes
from gcore.launch.build import Roles
from gcore.observe.events import EventLog, read_events
from gcore.protocols import ControllerStatus, RoleDied, RoleError
from gcore.types import UserError
from tests.e2e.helpers import RECIPE, gcore_process, held, rows, steps, train, untimed, write_recipe
from tests.faults.test_kill import EMULATED, Running

SHAPE = ("controllers=2", "placement.policy.replicas=2", "placement.trainer.ranks=2", "checkpoint.every=2")
CASES = {
    "kill a trainer": {"kind": "kill", "role": "trainer-1", "at": "update", "nth": 3},
    "stop a trainer": {"kind": "stop", "role": "trainer-0", "at": "update", "nth": 4},
    "kill a controller": {"kind": "kill", "role": "controller-1", "at": "rollout", "nth": 4},
    "stop a controller": {"kind": "stop", "role": "controller-0", "at": "weights", "nth": 3},
    "before any checkpoint": {"kind": "kill", "role": "controller-0", "at": "training", "nth": 1},
    "during a checkpoint": {"kind": "kill", "role": "trainer-0", "at": "write", "nth": 2},
    "during a weight update": {"kind": "kill", "role": "trainer-0", "at": "weight_bucket", "nth": 4},
}
FAST = ("kill a controller",)
HANG = "run.hang_s=30"  # not shorter: on a busy machine processes that are well do not answer for seconds


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return [untimed(row) for row in steps(train(tmp_path_factory.mktemp("plain"), "plain", *SHAPE, *EMULATED))]


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.release) for c in CASES])
def test_a_healed_run_equals_one_without_the_fault(tmp_path, expected, case):
    fault = CASES[case]
    hang = HANG if fault["kind"] == "stop" else "run.hang_s=300"
    found = train(tmp_path, "healed", *SHAPE, *EMULATED, f"faults.plan={json.dumps([fault])}", hang)
    events = read_events(tmp_path / "runs" / "healed")
    assert [event["kind"] for event in events if event["event"] == "fault"] == [fault["kind"]]
    rollbacks = [event["cause"] for event in events if event["event"] == "rollback"]
    assert len(rollbacks) == 1 and rollbacks[0].startswith(f"{fault['role']} died")
    assert [untimed(row) for row in steps(found)] == expected


@pytest.mark.release
def test_a_rollback_to_a_checkpoint_in_memory(tmp_path, expected):
    """The only checkpoint on disk would be that of the end."""
    fault = CASES["kill a controller"]
    often = ("checkpoint.every=0", "checkpoint.memory_every=1")
    command = ("train", str(write_recipe(tmp_path)), "run.name=healed", *SHAPE, *EMULATED, *often)
    run = gcore_process(*command, f"faults.plan={json.dumps([fault])}")
    folder = tmp_path / "runs" / "healed"
    assert run.returncode == 0 and "memory/step_" in run.stdout, run.stdout + run.stderr
    assert [event["event"] for event in read_events(folder)] == ["fault", "rollback"]
    assert [untimed(row) for row in steps(rows(folder))] == expected
    assert not (folder / "memory").is_symlink()


@pytest.mark.release
def test_a_healed_run_trains_the_same_weights(tmp_path):
    """With a real trainer and warm start. The engines keep their processes and get the weights of the checkpoint."""
    fault = {"kind": "kill", "role": "trainer-1", "at": "update", "nth": 6 + 3}  # 6 updates of the warm start
    plain, healed = (
        train(tmp_path, name, *SHAPE, *faults)
        for name, faults in (("plain", ()), ("healed", (f"faults.plan={json.dumps([fault])}",)))
    )
    assert [event["event"] for event in read_events(tmp_path / "runs" / "healed")] == ["fault", "rollback"]
    assert [untimed(row) for row in steps(healed)] == [untimed(row) for row in steps(plain)]


@pytest.mark.release
def test_a_critic_rank_that_dies(tmp_path):
    """It is started again with the controllers and the trainer ranks, from the same checkpoint."""
    ppo = ("controllers=2", "algorithm.preset=ppo", "critic.lr=1e-3", "placement.critic.ranks=2", "data.eval=null")
    fault = {"kind": "kill", "role": "critic-1", "at": "update", "nth": 4}
    plain, healed = (
        train(tmp_path, name, *ppo, "checkpoint.every=2", *faults)
        for name, faults in (("plain", ()), ("healed", (f"faults.plan={json.dumps([fault])}",)))
    )
    events = read_events(tmp_path / "runs" / "healed")
    assert [event["event"] for event in events] == ["fault", "rollback"]
    assert events[1]["cause"].startswith("critic-1 died")
    assert [untimed(row) for row in steps(healed)] == [untimed(row) for row in steps(plain)]


@pytest.mark.release
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_an_engine_heals_alone(tmp_path, expected, kind):
    fault = {"kind": kind, "role": "engine-1", "at": "generate", "nth": 8}
    faults, run = f"faults.plan={json.dumps([fault])}", tmp_path / "runs" / "healed"
    restarted = f"'restarted' in Path({str(run / 'events.jsonl')!r}).read_text()"
    hold, _ = held(tmp_path, first=4 * RECIPE["sampling"]["prompts_per_step"], until=restarted)  # before the last step
    found = train(tmp_path, "healed", *SHAPE, *EMULATED, hold, faults, HANG, "checkpoint.every=0")
    events = [event["event"] for event in read_events(run)]
    assert events[0] == "fault" and "restarted" in events and "rollback" not in events
    assert ("hung" in events) == (kind == "stop")
    assert [untimed(row) for row in steps(found)] == expected


@pytest.mark.release
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_an_engine_that_fails_during_a_rollback(tmp_path, expected, kind):
    """The rollback must not wait for an engine that does not answer."""
    plan = [
        {"kind": "kill", "role": "controller-1", "at": "rollout", "nth": 4},
        {"kind": kind, "role": "engine-1", "at": "reset"},
    ]
    found = train(tmp_path, "healed", *SHAPE, *EMULATED, f"faults.plan={json.dumps(plan)}", "run.hang_s=10")
    events = read_events(tmp_path / "runs" / "healed")
    assert [event["role"] for event in events if event["event"] == "fault"] == ["controller-1", "engine-1"]
    assert [event["role"] for event in events if event["event"] == "hung"] == ["engine-1"] * (kind == "stop")
    assert "engine-1" in [event["role"] for event in events if event["event"] == "died"]
    assert [untimed(row) for row in steps(found)] == expected


WAITS = """import asyncio
from pathlib import Path

async def workflow(ctx, prompt):
    while '"restarted"' not in Path({events!r}).read_text():
        await asyncio.sleep(0.02)
    return await ctx.reward(await ctx.generate(prompt))
"""


@pytest.mark.release
def test_an_engine_restarted_before_the_checkpoint_is_loaded(tmp_path):
    """It must get the weights of the checkpoint, not those that the trainer started with: while the trainer loads it,
    the engine dies and is restarted. All prompts wait for the restart, so that the engine serves them."""
    plain = steps(train(tmp_path, "plain", *SHAPE, *EMULATED, "checkpoint.keep_last=9"))
    plan = [
        {"kind": "slow", "role": "trainer-0", "at": "load", "seconds": 15.0},
        {"kind": "slow", "role": "controller-0", "at": "to:engine-1:load_weights", "seconds": 5.0},
    ]
    folder, flow = tmp_path / "runs" / "healed", tmp_path / "waits.py"
    flow.write_text(WAITS.format(events=str(folder / "events.jsonl")))
    resume = ("run.name=healed", f"run.resume={tmp_path / 'runs' / 'plain' / 'step_2'}", "run.resume_anyway=true")
    keys = (f"workflow={flow}:workflow", f"run.steps={len(plain)}", f"faults.plan={json.dumps(plan)}")
    run = Running(tmp_path, *SHAPE, *EMULATED, *resume, *keys)
    run.wait_for_line("process ids:")
    run.find("engine-1").kill()
    output = run.end()
    assert run.process.returncode == 0, output
    assert [event["event"] for event in read_events(folder)].count("restarted") == 1
    assert [untimed(row) for row in steps(rows(folder))] == [untimed(row) for row in plain[2:]]


DISK = {  # kind -> the moment, and what the user reads
    "disk_full": ("file", "checkpoint not written, the run goes on: [Errno 28]"),
    "flip_byte": ("written", "step_4.damaged, and an older checkpoint is used"),
    "short_write": ("written", "checkpoint not written, the run goes on"),
}


@pytest.mark.release
@pytest.mark.parametrize("kind", [*DISK])
def test_a_checkpoint_that_cannot_be_used(tmp_path, expected, kind):
    """The file of the second checkpoint is not written, or damaged; then a controller dies. The run continues from the
    first checkpoint."""
    moment, message = DISK[kind]
    faults = [
        {"kind": kind, "role": "trainer-0", "at": moment, "nth": 2},
        {"kind": "kill", "role": "controller-1", "at": "weights", "nth": 5},
    ]
    command = ("train", str(write_recipe(tmp_path)), "run.name=healed", *SHAPE, *EMULATED)
    slow = "training.emulated={seconds_per_token: 5.0e-3}"  # the save ends, and is reported, before the controller dies
    run = gcore_process(*command, slow, f"faults.plan={json.dumps(faults)}")
    assert run.returncode == 0, run.stdout + run.stderr
    assert message in run.stdout and "resumed from" in run.stdout and "step_2 at step 2" in run.stdout
    folder = tmp_path / "runs" / "healed"
    assert [event["event"] for event in read_events(folder)] == ["fault", "fault", "rollback"]
    assert [untimed(row) for row in steps(rows(folder))] == expected


@pytest.mark.release
def test_an_error_is_not_repeated(tmp_path):
    """An exception in the code of a role would occur again after a rollback: it ends the run."""
    fault = {"kind": "error", "role": "trainer-0", "at": "update", "nth": 2}
    run = gcore_process("train", str(write_recipe(tmp_path)), *SHAPE, *EMULATED, f"faults.plan={json.dumps([fault])}")
    assert run.returncode == 1 and "injected error" in run.stderr
    assert [event["event"] for event in read_events(tmp_path / "runs" / "tiny")] == ["fault"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["runtime=local", "faults.plan=[{kind: kill, role: trainer-0, at: update}]"], "expected runtime=ray"),
        (["faults.plan=[{kind: flip_byte, role: trainer-0, at: file}]"], "expected at=written, got at=file"),
    ],
)
def test_faults_that_could_not_occur_are_refused(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(write_recipe(tmp_path), overrides)


def test_restarts_per_hour():
    now = [0.0]
    budget = RestartBudget(2, clock=lambda: now[0])
    assert [budget.take() for _ in range(3)] == [True, True, False]
    now[0] = 3601.0
    assert budget.take()
    assert not RestartBudget(0).take()


def test_what_a_rollback_can_heal():
    assert is_healable(RoleDied("trainer-0", "gone"))
    assert is_healable(RoleError("controller-1", "collective", "", kind="TimeoutError"))
    assert is_healable(RoleError("controller-0", "of a trainer rank", "", kind="ActorUnavailableError"))
    assert is_healable(RoleError("engine-0", "a broadcast failed three times", "", kind="BroadcastError"))
    assert is_healable(RoleError("trainer-1", "trainer-0 died as they met", "", kind="DistStoreError"))
    assert not is_healable(RoleDied("ray", "gone"))
    assert not is_healable(RoleError("trainer-0", "ValueError: x", "", kind="ValueError"))
    assert not is_healable(RoleError("trainer-0", "x", "", user_error=True, kind="TimeoutError"))


@pytest.mark.parametrize("dies", [True, False])
def test_a_death_explains_the_collective_that_it_broke(monkeypatch, dies):
    """Also if it is noticed later than the broken connection: Ray needs seconds for that on a busy machine."""
    monkeypatch.setattr(supervise, "GRACE_S", 0.01)
    monkeypatch.setattr("gcore.driver.heal.DEATH_S", 60.0 if dies else 0.3)

    async def broken() -> None:
        raise RoleError("controller-0", "TimeoutError: the connection to controller-1 broke", "", kind="TimeoutError")

    async def died() -> None:
        await asyncio.sleep(0.5)
        raise RoleDied("controller-1", "gone", observed=True)

    async def works() -> Any:
        await asyncio.Event().wait()

    controllers: Any = [SimpleNamespace(run=broken, status=works), SimpleNamespace(run=works, status=works)]
    others = [died()] if dies else []
    parts: Any = processes_of(None), SimpleNamespace(mode="plain"), None, None, None
    with pytest.raises(RoleDied if dies else RoleError, match=r"controller-1 died" if dies else "controller-0"):
        asyncio.run(supervise.Supervisor(*parts).wait_for(controllers, others))


def processes_of(runtime: Any) -> Processes:
    nodes = {"trainer": (0,), "controller": (0,)}
    plan: Any = SimpleNamespace(controllers=1, role_nodes=nodes, counts=lambda: dict.fromkeys(nodes, 1))
    return Processes(runtime, SimpleNamespace(run=Run()), plan)  # type: ignore[arg-type]


class FakeRuntime:
    def __init__(self) -> None:
        self.killed: list[str] = []

    def processes(self):
        return {"engine-0": 1, "engine-1": 2}

    def kill(self, name: str) -> None:
        self.killed.append(name)


def test_a_replica_that_a_controller_cannot_call(tmp_path, monkeypatch):
    """Restarted once, if the runtime does not report its death first; after `run.hang_s` if it only does not answer."""
    now = [0.0]
    monkeypatch.setattr("gcore.driver.heal.time.monotonic", lambda: now[0])
    runtime, progress = FakeRuntime(), SimpleNamespace(note=lambda text: None)
    watch: Any = RoleWatch(runtime, progress, EventLog(tmp_path), Run(hang_s=60))  # type: ignore[arg-type]

    def report(at_s: float, **unreachable: str) -> None:
        now[0] = at_s
        names = {name.replace("_", "-"): why for name, why in unreachable.items()}
        watch.check_reachable([ControllerStatus("controller-0", "", "", 1, unreachable=names)])

    report(0, engine_0="dead")
    report(4, engine_0="dead")
    report(5)  # it was restarted
    report(6, engine_0="dead", engine_1="suspect")
    report(10, engine_0="dead", engine_1="suspect")
    assert runtime.killed == []
    report(12, engine_0="dead", engine_1="suspect")
    report(20, engine_0="dead", engine_1="suspect")  # the restart is not done yet
    assert runtime.killed == ["engine-0"]
    report(67, engine_1="suspect")
    assert runtime.killed == ["engine-0", "engine-1"]
    assert [event["event"] for event in read_events(tmp_path)] == ["unreachable"] * 2


def test_a_workflow_that_blocks_its_controller_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("gcore.driver.heal.STACKS_S", 0.0)
    frames = [("/mine/flow.py", 3, "slow"), ("/mine/flow.py", 9, "workflow"), (asyncio.base_events.__file__, 1, "run")]
    stack = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in frames)

    class Blocked(FakeRuntime):
        def dump_stacks(self) -> None:
            (tmp_path / "controller-0.log").write_text(f"Thread 0x01 (most recent call first):\n{stack}")

    watch: Any = RoleWatch(Blocked(), SimpleNamespace(), EventLog(tmp_path), Run(), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(
        RoleDied, match=r"for 15 s: flow\.py:3 in slow blocks its event loop; expected code that awaits"
    ):
        asyncio.run(watch._hung("controller-0", 15.0))
    assert [event["event"] for event in read_events(tmp_path)] == ["hung"]


@pytest.mark.parametrize("failures", [2, 9])
def test_a_replica_that_cannot_be_built_again_at_once(tmp_path, monkeypatch, failures):
    """Another role may use the memory that it needs. It is tried again; in the end, a rollback frees the memory."""
    monkeypatch.setattr("gcore.driver.heal.REVIVE_S", 0.0)
    notes, tries = list[str](), list[str]()

    class Full(FakeRuntime):
        async def revive(self, name: str) -> None:
            tries.append(name)
            if len(tries) <= failures:
                raise RoleError(name, "ValueError: no free memory", "", kind="ValueError")

    async def called(name: str) -> bool:
        return True

    runtime, progress = Full(), SimpleNamespace(note=notes.append)
    watch: Any = RoleWatch(runtime, progress, EventLog(tmp_path), Run(max_restarts=3))  # type: ignore[arg-type]
    client = SimpleNamespace(mark_dead=called, begin_restart=called, restore=called, mark_alive=called)
    restart = watch._restart(RoleDied("engine-0", "killed", observed=True), [client])
    if failures == 2:
        asyncio.run(restart)
        assert tries == ["engine-0"] * 3 and runtime.killed == ["engine-0"] * 2 and "is restarted" in notes[-1]
    else:
        with pytest.raises(RoleDied, match="engine-0"):
            asyncio.run(restart)
        assert tries == ["engine-0"] * 3 and "no free memory" in notes[-1]


class Interrupted(FakeRuntime):
    """Two replicas died before a rollback. `failures`: of builds, by role; `hang` never ends."""

    def __init__(self, **failures: list[str]) -> None:
        super().__init__()
        self.failures = {name.replace("_", "-"): found for name, found in failures.items()}
        self.tries, self.ended = list[str](), list[str]()

    def dead(self) -> set[str]:
        return {"engine-1", "judge-strict-0"}

    async def revive(self, name: str) -> None:
        self.tries.append(name)
        found = self.failures.get(name)
        try:
            match found.pop(0) if found else "":
                case "hang":
                    await asyncio.Event().wait()
                case "full":
                    raise RoleError(name, "ValueError: no free memory", "", kind="ValueError")
                case "gone":
                    raise RoleDied(name, "its node has left")
        finally:
            self.ended.append(name)

    async def stop_group(self, kind: str) -> None: ...

    def prepare(self, kind: str, count: int, imports: Any) -> None: ...

    async def start_group(self, kind: str, factory: Any, args: Any) -> list[Any]:
        while not self.tries:
            await asyncio.sleep(0)
        raise RoleDied(f"{kind}-0", "killed")


def watch_of(runtime: FakeRuntime, folder: Any, **run: Any) -> RoleWatch:
    return RoleWatch(runtime, SimpleNamespace(note=lambda text: None), EventLog(folder), Run(**run))  # type: ignore[arg-type]


def test_replicas_that_died_before_a_rollback(tmp_path, monkeypatch):
    """They are built again. A build that fails once is repeated: the memory of its device may not be free yet."""
    monkeypatch.setattr("gcore.driver.heal.REVIVE_S", 0.0)
    runtime = Interrupted(engine_1=["full"])
    asyncio.run(watch_of(runtime, tmp_path).revive_dead())
    assert sorted(runtime.tries) == ["engine-1", "engine-1", "judge-strict-0"] and runtime.killed == ["engine-1"]


@pytest.mark.parametrize("failures", [["gone"], ["full"] * 9])
def test_a_replica_that_cannot_be_restarted_in_a_rollback(tmp_path, monkeypatch, failures):
    """Another rollback may help. The restart of the other replica does not run into it."""
    monkeypatch.setattr("gcore.driver.heal.REVIVE_S", 0.0)

    async def main() -> None:
        runtime = Interrupted(engine_1=failures, judge_strict_0=["hang"])
        with pytest.raises(RoleDied, match="engine-1") as caught:
            await watch_of(runtime, tmp_path).revive_dead()
        assert is_healable(caught.value)
        assert sorted(runtime.ended) == sorted(runtime.tries) and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_rollback_that_fails_leaves_nothing_behind(tmp_path):
    """The trainers do not start while replicas are restarted: the next rollback must not meet these restarts."""

    async def main() -> None:
        runtime = Interrupted(engine_1=["hang"], judge_strict_0=["hang"])
        with pytest.raises(RoleDied, match="trainer-0"):
            await processes_of(runtime).start_again(Roles(), watch_of(runtime, tmp_path).revive_dead)
        assert sorted(runtime.ended) == sorted(runtime.tries) and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_replica_that_cannot_be_called_after_its_restart(tmp_path):
    """It is alive, so the runtime would not report it: it is killed and restarted once more."""
    deaths: asyncio.Queue[RoleDied] = asyncio.Queue()
    restored, alive, done = [False, True], list[str](), asyncio.Event()

    class Restarted(FakeRuntime):
        async def watch(self) -> None:
            raise await deaths.get()

        async def revive(self, name: str) -> None: ...

        async def answers(self, name: str) -> None: ...

        def ready(self) -> set[str]:
            return set()

        dead = ready

        def kill(self, name: str) -> None:
            super().kill(name)
            deaths.put_nowait(RoleDied(name, "killed", observed=True))

    async def called(name: str) -> None: ...

    async def restore(name: str) -> bool:
        return restored.pop(0)

    async def mark_alive(name: str) -> None:
        alive.append(name)

    async def main() -> None:
        progress = SimpleNamespace(note=lambda text: done.set() if "is restarted, with" in text else None)
        runtime = Restarted()
        watch: Any = RoleWatch(runtime, progress, EventLog(tmp_path), Run(hang_s=60))  # type: ignore[arg-type]
        client = SimpleNamespace(mark_dead=called, begin_restart=called, restore=restore, mark_alive=mark_alive)
        deaths.put_nowait(RoleDied("engine-0", "killed", observed=True))
        watching = asyncio.ensure_future(watch.watch([client]))
        await asyncio.wait_for(done.wait(), 10)
        watching.cancel()
        assert runtime.killed == alive == ["engine-0"]

    asyncio.run(main())
    assert [event["event"] for event in read_events(tmp_path)] == ["died", "died", "restarted"]
