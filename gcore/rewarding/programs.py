"""Runs programs that a model wrote, each once in a sandbox of its own.

    Script ──bwrap──> interpreter: limits, then sandboxed.py ──output──> RunResult
                      memory of all its processes: a cgroup where one can be made, else a watch

What isolates the sandbox is in gcore/sandbox/isolation.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from gcore.processes import has_exited, kill_group
from gcore.sandbox.inside import STARTED
from gcore.sandbox.isolation import boot, bwrap_command, packed, system_calls
from gcore.sandbox.memory import has_killed, memory_of, new_group, remove_group

OUTPUT_BYTES = 1 << 20  # a program that writes more has failed
MAIN, TESTS = "gcore.rewarding.sandboxed", "gcore.rewarding.remote_tests"


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of one run of a program. SandboxLimits(sandbox="bwrap", cpu_s=2, wall_s=10.0, memory_mb=512)"""

    sandbox: str
    cpu_s: int
    wall_s: float
    memory_mb: int

    @property
    def memory_bytes(self) -> int:
        return self.memory_mb << 20


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of one run. RunResult(output=b"85\\n", code=0); the code is None if the program was killed."""

    output: bytes
    code: int | None


@dataclass(frozen=True, slots=True)
class Script:
    """What runs in one sandbox: see sandboxed.main. Script({"source": "print(1)"}, stdin="")"""

    task: Mapping[str, Any]
    stdin: str = ""
    socket: socket.socket | None = None


def run(scripts: Sequence[Script], limits: SandboxLimits) -> RunResult:
    """Runs the scripts at the same time, each in its own sandbox, until the first one ends: its output is returned.
    RuntimeError if a sandbox does not start."""
    with contextlib.ExitStack() as stack:
        boxes = [stack.enter_context(_started(script, limits)) for script in scripts]
        for script in scripts:
            if script.socket is not None:
                script.socket.close()  # it is theirs: each must see the end of the other
        code = _watch(boxes, limits)
        for box in boxes:
            if not box.output.startswith(STARTED):
                errors = (box.process.stderr.read() if box.process.stderr else b"").decode(errors="replace").strip()
                raise RuntimeError(f"the sandbox did not start: {errors or f'no output within {limits.wall_s:g} s'}")
        return RunResult(bytes(boxes[0].output[len(STARTED) :]), code)


@dataclass(slots=True)
class _Box:
    """A running sandbox."""

    process: subprocess.Popen[bytes]
    group: Path | None  # its memory cgroup
    output: bytearray = field(default_factory=bytearray)

    def read(self) -> bytes | None:
        """More output. Empty: its end; None: none yet."""
        assert self.process.stdout
        chunk = self.process.stdout.read(1 << 16)
        self.output += chunk or b""
        return chunk

    def too_large(self, memory_bytes: int) -> bool:
        if self.group is not None:
            return has_killed(self.group)
        return memory_of(self.process.pid, memory_bytes) > memory_bytes

    def end(self) -> None:
        kill_group(self.process)
        self.process.wait()
        if self.group is not None:
            remove_group(self.group)


@contextlib.contextmanager
def _started(script: Script, limits: SandboxLimits) -> Iterator[_Box]:
    unconfined = limits.sandbox == "rlimits"
    # If we are root, each run gets another unprivileged user: the limit on processes is per user.
    uid = 20_000 + (os.getpid() + next(_runs)) % 40_000 if os.geteuid() == 0 and not unconfined else 0
    sockets = [] if script.socket is None else [script.socket.fileno()]
    task = {
        **script.task,
        "limits": (uid, unconfined, limits.cpu_s, limits.memory_bytes),
        "socket": sockets[0] if sockets else None,
    }
    with contextlib.ExitStack() as stack:
        blob, stdin = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        modules = ("gcore.sandbox.inside", MAIN, *([TESTS] if sockets else []))
        blob.write(packed(modules, MAIN, task))
        stdin.write(script.stdin.encode(errors="replace"))
        files = [blob, stdin]
        command = boot(blob.fileno())
        if not unconfined:
            if filtered := system_calls():
                files.append(stack.enter_context(tempfile.TemporaryFile()))
                files[-1].write(filtered)
            command = [*bwrap_command(), *(["--seccomp", str(files[2].fileno())] if filtered else []), "--", *command]
        for file in files:
            file.seek(0)
        if (group := new_group(limits.memory_bytes)) is not None:
            # a shell moves itself into the group before anything of the program runs
            command = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        cwd = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)) if unconfined else "/"
        process = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[*(file.fileno() for file in files if file is not stdin), *sockets],
                cwd=cwd,
                env={"PATH": "/usr/bin:/bin", "HOME": cwd},
                start_new_session=True,
            )
        )
        assert process.stdout
        os.set_blocking(process.stdout.fileno(), False)
        box = _Box(process, group)
        try:
            yield box
        finally:
            box.end()


def _watch(boxes: Sequence[_Box], limits: SandboxLimits) -> int | None:
    """Reads until the first box ends; kills all if it exceeds its time or writes too much, or if one takes too much
    memory. Returns the exit code, None if it was killed."""
    first, deadline, ended = boxes[0], time.monotonic() + limits.wall_s, False
    check_at = 0.0
    while not ended and len(first.output) <= OUTPUT_BYTES and (now := time.monotonic()) < deadline:
        exited = has_exited(first.process)  # checked before the last read, so that no output is lost
        select.select([cast(Any, first.process.stdout)], [], [], 0 if exited else 0.02)
        chunk = first.read()
        ended = exited and not chunk
        for box in boxes[1:]:
            box.read()
        if now >= check_at and not exited:
            check_at = now + 0.02
            if any(box.too_large(limits.memory_bytes) for box in boxes):
                break
        if chunk == b"" and not exited:  # it closed its output and is still running
            time.sleep(0.005)
    if ended and any(box.too_large(limits.memory_bytes) for box in boxes if box.group is not None):
        ended = False
    for box in boxes:
        kill_group(box.process)
        box.process.wait()
    for box in boxes[1:]:
        box.read()
    killed = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the latter: by bwrap
    return None if not ended or first.process.returncode in killed else first.process.returncode


_runs = itertools.count()
