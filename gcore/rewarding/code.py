"""Runs programs written by a model against tests, in a sandbox.

    completion ──last ```python block──> program ──bwrap──> launcher: limits, then the program ──output──> passed?

The sandbox is bubblewrap: no network, no files except the interpreter's, nothing writable except a small /tmp, and
limits on CPU time, memory, processes and files. Programs can import only the standard library.
If the sandbox does not start, this is an error, never a reward of 0.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import json
import marshal
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gcore.rewarding.processes import has_exited, kill_group
from gcore.rewarding.rules import text_of
from gcore.rewarding.source import short
from gcore.types import UserError

FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?:python|py)[\d.]*[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.I
)
OUTPUT_BYTES = 1 << 20  # a program that writes more has failed
FILE_BYTES, TMP_BYTES, PROCESSES, OPEN_FILES = 16 << 20, 64 << 20, 16, 64
READABLE = ("/usr", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

# Runs inside the sandbox. It reports its start, then runs the program and writes one token per assert that passes. The
# token is secret, so that a program cannot report success itself.
LAUNCHER = r"""
import builtins, marshal, os, resource, sys, types
uid, orphan, cpu, memory, size, processes, files, fd = map(int, sys.argv[1:])
if uid:
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
if orphan:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
for what, limit in ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
                    (resource.RLIMIT_NPROC, processes), (resource.RLIMIT_NOFILE, files), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(what, (limit, limit))
def run():
    with open(fd, "rb") as blob:
        program, tests, token = marshal.load(blob)
    null = os.open("/dev/null", os.O_WRONLY)
    os.write(1, token)
    report = os.dup(1)
    os.dup2(null, 2)
    if tests is None:
        os.close(report)
    else:
        os.dup2(null, 1)
    builtins.exit = builtins.quit = sys.exit
    sys.argv = ["program.py"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "program.py", "exec"), main.__dict__)
    if tests is None:
        return
    import ast
    statements = ast.parse(tests).body
    whole = not any(isinstance(s, ast.Assert) for s in statements)
    for statement in statements:
        code = compile(ast.Module([statement], []), "tests.py", "exec")
        if isinstance(statement, ast.Assert):
            try:
                exec(code, main.__dict__)
            except BaseException:
                continue
            os.write(report, token)
        else:
            exec(code, main.__dict__)
    if whole:
        os.write(report, token)
    os._exit(0)
run()
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run of a program. Limits(sandbox="bwrap", cpu_s=2, wall_s=10.0, memory_mb=512)"""

    sandbox: str
    cpu_s: int
    wall_s: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of one run. RunResult(output=b"85\\n", code=0); the code is None if the program was killed."""

    output: bytes
    code: int | None


def python_tests(
    prompts: Any,
    completions: Sequence[Any],
    tests: Sequence[Any],
    partial: bool = True,
    sandbox: str = "bwrap",
    cpu_s: int = 2,
    wall_s: float | None = None,
    memory_mb: int = 512,
    parallel: int = 4,
    **_: Any,
) -> list[float]:
    """The fraction of tests that a completion's program passes. Without `partial`: 1 if all pass, else 0.

    `tests` is a list of {"input": stdin, "output": stdout}, or assert statements, or the JSON text of either.
    `cpu_s` is the CPU time limit per run of the program; `wall_s` defaults to five times that.
    """
    _require(sandbox)
    limits = Limits(sandbox, cpu_s, 5.0 * cpu_s if wall_s is None else wall_s, memory_mb)
    known = [_read_tests(value) for value in tests]
    with ThreadPoolExecutor(max_workers=min(parallel, len(completions))) as pool:
        passed = list(pool.map(lambda c, t: _passed(_program(text_of(c)), t, partial, limits), completions, known))
    return passed if partial else [float(fraction == 1) for fraction in passed]


def _preflight(args: Mapping[str, Any]) -> None:
    _require(args.get("sandbox", "bwrap"))


cast(Any, python_tests).preflight = _preflight


def _require(sandbox: str) -> None:
    if sandbox not in ("bwrap", "rlimits"):
        raise UserError(f"python_tests: args.sandbox={sandbox!r}; expected bwrap or rlimits")
    if sandbox == "bwrap" and (problem := _bwrap_problem()):
        raise UserError(
            f"python_tests runs model-written programs inside bubblewrap, but {problem}; install bubblewrap 0.7 or "
            "newer on a machine that allows namespaces, or set the function's args to {sandbox: rlimits}: then time, "
            "memory and processes are limited, but the programs can access the network and all your files"
        )


@functools.cache
def _bwrap_problem() -> str | None:
    """Why bwrap does not work here (found by a trial run); None if it works."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        result = _run("print(6 * 7)", None, "", Limits("bwrap", 10, 30.0, 512))
    except RuntimeError as error:
        return str(error)
    return None if result.output == b"42\n" else f"a trial program printed {result.output!r}"


def _program(text: str) -> str:
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else text


def _read_tests(value: Any) -> list[tuple[str, str]] | str:
    """Tests that cannot be parsed are an error of the dataset, not of the program."""
    expected = 'expected a list of {"input": ..., "output": ...}, or assert statements, or the JSON text of either'
    if isinstance(value, str):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
    try:
        if isinstance(value, str):
            if ast.parse(value).body:
                return value
        else:
            pairs = [(test["input"], test["output"]) for test in value]
            if pairs and all(isinstance(text, str) for pair in pairs for text in pair):
                return pairs
    except (SyntaxError, TypeError, KeyError) as error:
        raise ValueError(f"tests: got {short(value)} ({type(error).__name__}: {error}); {expected}") from None
    raise ValueError(f"tests: got {short(value)}; {expected}")


def _passed(program: str, tests: list[tuple[str, str]] | str, partial: bool, limits: Limits) -> float:
    if not program.strip():
        return 0.0
    if isinstance(tests, str):
        num = sum(isinstance(s, ast.Assert) for s in ast.parse(tests).body) or 1
        return len(_run(program, tests, "", limits).output) / num
    passed = 0
    for given, expected in tests:
        result = _run(program, None, given, limits)
        correct = result.code == 0 and _lines(result.output.decode(errors="replace")) == _lines(expected)
        passed += correct
        if result.code is None or not (correct or partial):  # a program that was killed is not run again
            break
    return passed / len(tests)


def _lines(text: str) -> list[str]:
    """Lines without trailing spaces and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _run(program: str, tests: str | None, given: str, limits: Limits) -> RunResult:
    """Runs a program once. With asserts, the output has one byte per assert that passed. Raises RuntimeError if the
    sandbox does not start."""
    token = secrets.token_bytes(16)
    unconfined = limits.sandbox == "rlimits"
    with contextlib.ExitStack() as stack:
        blob, stdin = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        blob.write(marshal.dumps((program.encode(errors="replace"), tests, token)))
        stdin.write(given.encode(errors="replace"))
        for file in (blob, stdin):
            file.seek(0)
        cwd = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)) if unconfined else "/"
        process = stack.enter_context(
            subprocess.Popen(
                [*([] if unconfined else _bwrap_command()), *_launcher(limits, blob.fileno())],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[blob.fileno()],
                cwd=cwd,
                env={"PATH": "/usr/bin:/bin", "HOME": cwd},
                start_new_session=True,
            )
        )
        output, code = _watch(process, limits)
        if not output.startswith(token):
            stderr = (process.stderr.read() if process.stderr else b"").decode(errors="replace").strip()
            raise RuntimeError(f"the sandbox did not start: {stderr or f'no output within {limits.wall_s:g} s'}")
    output = output[len(token) :]
    return RunResult(output if tests is None else b"." * output.count(token), code)


def _watch(process: subprocess.Popen[bytes], limits: Limits) -> tuple[bytes, int | None]:
    """Reads until the program exits, exceeds its time or writes too much. Then kills its whole process group."""
    assert process.stdout
    os.set_blocking(process.stdout.fileno(), False)
    deadline = time.monotonic() + limits.wall_s
    output, ended = b"", False
    try:
        while not ended and len(output) <= OUTPUT_BYTES and time.monotonic() < deadline:
            exited = has_exited(process)  # checked before the last read, so that no output is lost
            select.select([process.stdout], [], [], 0 if exited else 0.02)
            chunk = process.stdout.read(1 << 16)
            output += chunk or b""
            ended = exited and not chunk
            if chunk == b"" and not exited:  # it closed its output and is still running
                time.sleep(0.005)
    finally:
        kill_group(process)
        process.wait()
    stopped = not ended or process.returncode in (
        -signal.SIGKILL,
        128 + signal.SIGKILL,
    )  # the latter: bwrap
    return output, None if stopped else process.returncode


_runs = itertools.count()


def _launcher(limits: Limits, fileno: int) -> list[str]:
    """If we are root, each run gets another unprivileged user: the limit on processes is per user."""
    unconfined = limits.sandbox == "rlimits"
    uid = 20_000 + (os.getpid() + next(_runs)) % 40_000 if os.geteuid() == 0 and not unconfined else 0
    numbers = (uid, int(unconfined), limits.cpu_s, limits.memory_mb << 20, FILE_BYTES, PROCESSES, OPEN_FILES, fileno)
    return [_interpreter(), "-I", "-S", "-X", "utf8", "-c", LAUNCHER, *map(str, numbers)]


def _interpreter() -> str:
    """The base interpreter, not the virtual environment's, which is inside the project's files."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def _bwrap_command() -> list[str]:
    prefix = Path(sys.base_prefix).resolve()
    if os.geteuid() == 0:  # root needs no user namespace; the launcher drops its privileges
        options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options = ["--unshare-all", "--unshare-user", "--cap-drop", "ALL"]
    options += ["--die-with-parent", "--new-session", "--clearenv"]
    places = [*map(Path, (*READABLE, *DEVICES)), prefix]
    for parent in sorted({parent for place in places for parent in place.parents} - {Path("/")}):
        options += ["--perms", "0755", "--dir", str(parent)]  # directories made by bwrap would be closed to other users
    for place in places:
        options += ["--dev-bind" if str(place) in DEVICES else "--ro-bind-try", str(place), str(place)]
    options += ["--size", str(TMP_BYTES), "--perms", "1777", "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
    return [
        shutil.which("bwrap") or "bwrap",
        *options,
        "--setenv",
        "HOME",
        "/tmp",
        "--setenv",
        "PATH",
        "/usr/bin",
        "--",
    ]
