"""The code reward: what a program's tests say, and what a program cannot do."""

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest

from gcore.config.rewards import RewardFunction, Rewards
from gcore.rewarding import code, programs
from gcore.rewarding.code import python_tests
from gcore.rewarding.functions import FunctionSource
from gcore.rewarding.programs import RunResult, SandboxLimits
from gcore.rewarding.workers import WorkerPool
from gcore.sandbox import inside, isolation
from gcore.types import UserError
from tests.unit.test_reward_workers import group_of

BWRAP_PROBLEM = code._bwrap_problem()
needs_bwrap = pytest.mark.skipif(BWRAP_PROBLEM is not None, reason=f"bwrap is not usable: {BWRAP_PROBLEM}")
SANDBOXES = pytest.mark.parametrize("sandbox", [pytest.param("bwrap", marks=needs_bwrap), "rlimits"])
DOUBLE = "print(int(input()) * 2)"
PAIRS = [{"input": "1\n", "output": "2\n"}, {"input": "2", "output": "4"}, {"input": "3", "output": "6"}]


@pytest.fixture(params=["ours", "of a user"])
def walls(request, monkeypatch):
    """Root builds the sandbox without a user namespace; here it builds both kinds."""
    if BWRAP_PROBLEM is not None:
        pytest.skip(f"bwrap is not usable: {BWRAP_PROBLEM}")
    if request.param == "of a user":
        if os.geteuid() != 0:
            pytest.skip("the same as ours")
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    isolation.bwrap_command.cache_clear()
    yield request.param
    isolation.bwrap_command.cache_clear()


def run(program: str, sandbox: str = "bwrap", cpu_s: int = 5, wall_s: float = 30.0, given: str = "") -> RunResult:
    return code._output(program, given, SandboxLimits(sandbox, cpu_s, wall_s, 512))


def said(program: str, sandbox: str = "bwrap") -> str:
    ran = run(program, sandbox)
    assert ran.code == 0, ran
    return ran.output.decode().strip()


def attempt(what: str) -> str:
    """A program that says what came of it."""
    return f"try:\n    {what}\n    print('done')\nexcept OSError as error:\n    print(type(error).__name__)\n"


def someone_runs(marker: str) -> bool:
    """Is there a process with this argument?"""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"\0{marker}\0" in path.read_text():
                return True
        except OSError:
            continue
    return False


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


def score(completion: str, tests, **args) -> float:
    (value,) = python_tests(None, [completion], [tests], **args)
    return value


# --- tests and scores


@needs_bwrap
@pytest.mark.parametrize(
    ("program", "share"),
    [
        (DOUBLE, 1.0),
        ("n = int(input())\nprint(n * 2 if n < 3 else 0)", 2 / 3),
        ("n = int(input())\nprint(n * 2, end='  \\n\\n')", 1.0),
        (" print('indented')", 0.0),
        ("print(int(input()) * 2); exit(1)", 0.0),
        ("print(int(input()) * 2); exit()", 1.0),
        ("", 0.0),
        ("I would multiply by two.", 0.0),
    ],
)
def test_input_and_output(program, share):
    assert score(f"Here:\n```python\nprint('not this')\n```\nor\n```python\n{program}\n```\n", PAIRS) == share
    assert score(program, json.dumps(PAIRS), partial=False) == float(share == 1)


@needs_bwrap
def test_asserts():
    tests = "import math\nassert double(1) == 2\nassert double(2) == math.factorial(2)\nassert double(0) == 0\n"
    assert score("def double(x): return 2 * x", tests) == 2 / 3
    assert score("def double(x): return 2 * x", json.dumps(tests), partial=False) == 0.0
    assert score("def double(x): return {1: 2, 2: 2, 0: 0}[x]", tests, partial=False) == 1.0
    whole = "def check(f):\n    assert f(1) == 2\n    assert f(2) == 4\ncheck(double)"  # one test
    assert score("def double(x): return 2 * x", whole) == 1.0
    assert score("def double(x): return 2", whole) == 0.0


@needs_bwrap
@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "exit()"])
def test_a_program_that_leaves_before_the_asserts_passes_none(leave):
    assert score(f"def f(): return 1\n{leave}", "assert f() == 1") == 0.0
    assert score(f"def f():\n    {leave}", "assert f() == 1\nassert True") == (0.0 if "_exit" in leave else 0.5)


@needs_bwrap
def test_what_was_stopped_is_not_tried_again():
    assert score("n = int(input())\nwhile n == 2: pass\nprint(2 * n)", PAIRS, cpu_s=1) == 1 / 3
    asserts = "assert f(1)\nassert f(2)\nassert f(1)"
    assert score("def f(n):\n    while n > 1: pass\n    return True", asserts, cpu_s=1) == 1 / 3


@pytest.mark.parametrize(
    "tests", ["", "[]", "assert (", "[1]", [{"input": "1"}], [], None, 7, [{"input": 1, "output": 2}]]
)
def test_tests_that_cannot_be_read_are_no_zero(tests):
    with pytest.raises(ValueError, match=r"tests: got .*expected a list of"):
        score(DOUBLE, tests, sandbox="rlimits")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("a\n```python\nx = 1\n```\nb", "x = 1\n"),
        ("```py\nx = 1\n```\n```Python3\nx = 2\n```\n```\nx = 3\n```", "x = 2\n"),
        ("```python\nx = 1", "x = 1"),
        ("1.\n  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("x = 1", "x = 1"),
    ],
)
def test_the_last_python_block(text, program):
    assert code._program(text) == program


@SANDBOXES
def test_from_a_worker_and_from_a_thread(sandbox):
    spec = RewardFunction(name="code", path="gcore.rewarding.code:python_tests", args={"sandbox": sandbox})
    group = group_of(DOUBLE, "print(4)", tests=PAIRS)
    worker = WorkerPool(Rewards(functions=[spec]), 1).sources
    for source in (*worker, FunctionSource(spec, 1, "rewards.functions.0")):
        source.check(["tests"])
        assert asyncio.run(source.answer(group)).values == [1.0, 1 / 3]
        source.close()


# --- the sandbox


def test_no_files_but_the_interpreters(walls, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("x")
    places = [str(secret), __file__, str(Path.home()), "/etc/passwd", "/proc/self/environ", "/var"]
    program = f"import os\nfor place in {places!r}: print(os.access(place, os.R_OK) and os.path.isfile(place))"
    assert said(program).split() == ["False"] * 6
    assert said(program, "rlimits").split()[:2] == ["True", "True"]  # the test can tell
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert "SECRET_TOKEN" not in said("import os; print(dict(os.environ))")


def test_nothing_can_be_written_but_tmp(walls, tmp_path):
    assert said(attempt("open('/tmp/x', 'w').write('x')")) == "done"
    for place in ("/x", "/usr/x", "/etc/x", "/dev/x", f"{isolation.interpreter()}.x"):
        assert said(attempt(f"open({place!r}, 'w')")) in ("OSError", "PermissionError"), place
    assert said(attempt("import os; os.mkdir('/x')")) in ("OSError", "PermissionError")
    assert said("import os; print(os.listdir('/tmp'))") == "[]"  # each run has its own
    fill = "for i in range(9):\n        with open(f'/tmp/{i}', 'wb') as f: f.write(bytes(10 << 20))"
    assert said(attempt(fill)) == "OSError"
    assert said(attempt("f = open('/tmp/x', 'wb'); f.write(bytes(20 << 20)); f.close()")) == "OSError"


def test_no_network(walls):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        port = server.getsockname()[1]
        connect = attempt(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
        assert said(connect) == "ConnectionRefusedError"
        with pytest.raises(BlockingIOError):
            server.accept()
        assert said(connect, "rlimits") == "done"  # the test can tell
        server.accept()[0].close()


def test_no_user_inside_is_root_outside(walls):
    answer = said(attempt("import os; os.setuid(0); os.mkdir('/usr/x')"))
    assert answer in ("OSError", "PermissionError")


FORKS = """
import os, time
n = 0
try:
    while n < 200:
        if os.fork() == 0:
            time.sleep(1000)
        n += 1
except OSError as error:
    print(n, type(error).__name__, flush=True)
os._exit(0)
"""


def test_a_fork_bomb_is_bounded_and_gone(walls):
    if walls == "of a user" and os.getuid() == 0:
        pytest.skip("the kernel does not limit processes of root")
    num, error = said(FORKS).split()
    assert 0 < int(num) < inside.PROCESSES
    assert error == "BlockingIOError"


def test_a_memory_bomb_fails(walls):
    ran = run("x = bytearray(1 << 30)\nprint('done')")
    assert (ran.output, ran.code) == (b"", 1)
    assert said("x = bytearray(1 << 28)\nprint('done')") == "done"


@SANDBOXES
@pytest.mark.parametrize(
    ("program", "wall_s"),
    [("while True: pass", 30.0), ("import time; time.sleep(1000)", 1.0), ("import os; os.close(1)\nwhile 1: 0", 1.0)],
)
def test_an_endless_loop_ends(sandbox, program, wall_s):
    assert run(f"print('begun', flush=True)\n{program}", sandbox, cpu_s=1, wall_s=wall_s) == RunResult(b"begun\n", None)


@SANDBOXES
def test_a_flood_of_output_is_cut(sandbox):
    ran = run("while True: print('x' * 1000)", sandbox, cpu_s=20)
    assert ran.code is None
    assert programs.OUTPUT_BYTES - 20 < len(ran.output) <= programs.OUTPUT_BYTES + (1 << 16)
    assert run("import sys\nfor _ in range(10**4): print('x' * 1000, file=sys.stderr)", sandbox) == RunResult(b"", 0)


@SANDBOXES
def test_what_a_program_starts_ends_with_it(sandbox):
    marker = f"90{os.getpid()}" + ("1" if sandbox == "bwrap" else "2")
    program = f"import subprocess; subprocess.Popen(['/usr/bin/sleep', '{marker}']); print('done')"
    assert said(program, sandbox) == "done"
    asyncio.run(until(lambda: not someone_runs(marker)))


@SANDBOXES
def test_programs_end_with_the_worker_that_is_killed(sandbox):
    marker = f"80{os.getpid()}" + ("1" if sandbox == "bwrap" else "2")
    args = {"sandbox": sandbox, "wall_s": 1000.0}
    spec = RewardFunction(name="code", path="gcore.rewarding.code:python_tests", args=args)
    (source,) = WorkerPool(Rewards(functions=[spec]), 1).sources
    program = f"import os\nos.execv('/usr/bin/sleep', ['sleep', '{marker}'])"

    async def cancel():
        call = asyncio.create_task(source.answer(group_of(program, tests=PAIRS)))
        await until(lambda: someone_runs(marker))
        call.cancel()
        await until(lambda: not someone_runs(marker))

    asyncio.run(cancel())
    assert source.counts == {"worker_restarts": 1}
    source.close()


# --- before the run


def source():
    spec = RewardFunction(name="code", path="gcore.rewarding.code:python_tests", args={"sandbox": "bwrap"})
    return FunctionSource(spec, 1, "rewards.functions.0")


@pytest.fixture
def fresh():
    code._bwrap_problem.cache_clear()
    isolation.bwrap_command.cache_clear()
    yield
    code._bwrap_problem.cache_clear()
    isolation.bwrap_command.cache_clear()


def test_a_missing_bwrap_is_found_before_the_run(fresh, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        UserError, match=r"bwrap is not installed; install .*or set the function's args to {sandbox: rlimits}"
    ):
        source().check(["tests"])
    with pytest.raises(UserError, match="bwrap is not installed"):
        score(DOUBLE, PAIRS)


def test_a_bwrap_that_does_not_work_is_found_before_the_run(fresh, monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match=r"the sandbox did not start: bwrap: No permissions.*{sandbox: rlimits}"):
        source().check(["tests"])


def test_sandboxes_there_are():
    with pytest.raises(UserError, match=r"args\.sandbox='none'; expected bwrap or rlimits"):
        score(DOUBLE, PAIRS, sandbox="none")
