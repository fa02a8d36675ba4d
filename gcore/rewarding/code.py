"""Programs that a model wrote, run against tests, in a sandbox.

    completion ──last ```python block──> program ──bwrap──> launcher: limits, then the program ──output──> passed?

The sandbox is bubblewrap: no network, no files but the interpreter's, nothing writable but a small /tmp, and limits on
processor time, memory, processes and files. Programs have the standard library and nothing else.
A sandbox that does not start is an error, never a zero.
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

# Runs inside. It says that it started, then turns into the program; asserts report each that holds. The token keeps a
# program from saying so itself.
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
    """Of one run of a program. Limits(sandbox="bwrap", cpu_s=2, wall_s=10.0, memory_mb=512)"""

    sandbox: str
    cpu_s: int
    wall_s: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run left. Ran(output=b"85\\n", code=0); the code is None if it was stopped."""

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
    """The share of its tests that a completion's program passes; without `partial`, 1 for all of them and 0 for fewer.

    `tests` is a list of {"input": stdin, "output": stdout}, or assert statements, or the JSON text of either.
    `cpu_s` is for each run of the program, in processor time; `wall_s` is five times that unless set.
    """
    _require(sandbox)
    limits = Limits(sandbox, cpu_s, 5.0 * cpu_s if wall_s is None else wall_s, memory_mb)
    known = [_read_tests(value) for value in tests]
    with ThreadPoolExecutor(max_workers=min(parallel, len(completions))) as pool:
        shares = list(pool.map(lambda c, t: _share(_program(text_of(c)), t, partial, limits), completions, known))
    return shares if partial else [float(share == 1) for share in shares]


def _preflight(args: Mapping[str, Any]) -> None:
    _require(args.get("sandbox", "bwrap"))


cast(Any, python_tests).preflight = _preflight


def _require(sandbox: str) -> None:
    if sandbox not in ("bwrap", "rlimits"):
        raise UserError(f"python_tests: args.sandbox={sandbox!r}; expected bwrap or rlimits")
    if sandbox == "bwrap" and (complaint := _complaint()):
        raise UserError(
            f"python_tests runs model-written programs inside bubblewrap, and {complaint}; install bubblewrap 0.7 or "
            "newer where it may make namespaces, or set the function's args to {sandbox: rlimits}: time, memory and "
            "processes are limited then, but the network and all your files are within reach of the programs"
        )


@functools.cache
def _complaint() -> str | None:
    """Why bwrap cannot be used here, by trying."""
    if shutil.which("bwrap") is None:
        return "there is no bwrap"
    try:
        ran = _run("print(6 * 7)", None, "", Limits("bwrap", 10, 30.0, 512))
    except RuntimeError as error:
        return str(error)
    return None if ran.output == b"42\n" else f"a first program printed {ran.output!r}"


def _program(text: str) -> str:
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else text


def _read_tests(value: Any) -> list[tuple[str, str]] | str:
    """What cannot be read as tests is an error of the dataset, not of the program."""
    wanted = 'expected a list of {"input": ..., "output": ...}, or assert statements, or the JSON text of either'
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
        raise ValueError(f"tests: got {short(value)} ({type(error).__name__}: {error}); {wanted}") from None
    raise ValueError(f"tests: got {short(value)}; {wanted}")


def _share(program: str, tests: list[tuple[str, str]] | str, partial: bool, limits: Limits) -> float:
    if not program.strip():
        return 0.0
    if isinstance(tests, str):
        num = sum(isinstance(s, ast.Assert) for s in ast.parse(tests).body) or 1
        return len(_run(program, tests, "", limits).output) / num
    passed = 0
    for given, expected in tests:
        ran = _run(program, None, given, limits)
        right = ran.code == 0 and _lines(ran.output.decode(errors="replace")) == _lines(expected)
        passed += right
        if ran.code is None or not (right or partial):  # a program that had to be stopped gets no further tries
            break
    return passed / len(tests)


def _lines(text: str) -> list[str]:
    """Spaces at the ends of lines and empty lines at the end do not count."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _run(program: str, tests: str | None, given: str, limits: Limits) -> Ran:
    """Run it once. With asserts, the output is a byte for each that held. Raises RuntimeError if it did not start."""
    token = secrets.token_bytes(16)
    weak = limits.sandbox == "rlimits"
    with contextlib.ExitStack() as stack:
        blob, stdin = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        blob.write(marshal.dumps((program.encode(errors="replace"), tests, token)))
        stdin.write(given.encode(errors="replace"))
        for file in (blob, stdin):
            file.seek(0)
        cwd = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)) if weak else "/"
        process = stack.enter_context(
            subprocess.Popen(
                [*([] if weak else _walls()), *_launcher(limits, blob.fileno())],
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
            said = (process.stderr.read() if process.stderr else b"").decode(errors="replace").strip()
            raise RuntimeError(f"the sandbox did not start: {said or f'no sign of it within {limits.wall_s:g} s'}")
    output = output[len(token) :]
    return Ran(output if tests is None else b"." * output.count(token), code)


def _watch(process: subprocess.Popen[bytes], limits: Limits) -> tuple[bytes, int | None]:
    """Read until it ends, or until it has had its time or written too much; then nothing of it is left."""
    assert process.stdout
    os.set_blocking(process.stdout.fileno(), False)
    deadline = time.monotonic() + limits.wall_s
    output, ended = b"", False
    try:
        while not ended and len(output) <= OUTPUT_BYTES and time.monotonic() < deadline:
            exited = has_exited(process)  # asked before the last read
            select.select([process.stdout], [], [], 0 if exited else 0.02)
            chunk = process.stdout.read(1 << 16)
            output += chunk or b""
            ended = exited and not chunk
            if chunk == b"" and not exited:  # it closed its output and goes on
                time.sleep(0.005)
    finally:
        kill_group(process)
        process.wait()
    stopped = not ended or process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)  # the latter is bwrap's way
    return output, None if stopped else process.returncode


_runs = itertools.count()


def _launcher(limits: Limits, fileno: int) -> list[str]:
    """A root outside is somebody without rights inside, another one each time: limits of processes are by user."""
    weak = limits.sandbox == "rlimits"
    uid = 20_000 + (os.getpid() + next(_runs)) % 40_000 if os.geteuid() == 0 and not weak else 0
    numbers = (uid, int(weak), limits.cpu_s, limits.memory_mb << 20, FILE_BYTES, PROCESSES, OPEN_FILES, fileno)
    return [_interpreter(), "-I", "-S", "-X", "utf8", "-c", LAUNCHER, *map(str, numbers)]


def _interpreter() -> str:
    """Not the virtual environment's: its packages are in the project."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def _walls() -> list[str]:
    prefix = Path(sys.base_prefix).resolve()
    if os.geteuid() == 0:  # a real root makes namespaces without a user's, and gives up its rights in the launcher
        walls = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        walls += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        walls = ["--unshare-all", "--unshare-user", "--cap-drop", "ALL"]
    walls += ["--die-with-parent", "--new-session", "--clearenv"]
    places = [*map(Path, (*READABLE, *DEVICES)), prefix]
    for parent in sorted({parent for place in places for parent in place.parents} - {Path("/")}):
        walls += ["--perms", "0755", "--dir", str(parent)]  # bwrap's own would be closed to other users
    for place in places:
        walls += ["--dev-bind" if str(place) in DEVICES else "--ro-bind-try", str(place), str(place)]
    walls += ["--size", str(TMP_BYTES), "--perms", "1777", "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
    return [shutil.which("bwrap") or "bwrap", *walls, "--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin", "--"]
