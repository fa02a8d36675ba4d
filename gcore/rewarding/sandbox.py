"""Runs untrusted code in sandboxes with limits.

    Script ──bwrap──> interpreter: limits, then sandboxed.py ──output──> RunResult
                      memory of all its processes: a cgroup where one can be made, else a watch

The sandbox is bubblewrap: no network, no files except the interpreter's, nothing writable except a small /tmp, no
/proc, and limits on CPU time, memory, processes and files. A filter of system calls closes what would pass these
limits: memory that belongs to no process, new namespaces, and access to other processes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import marshal
import os
import platform
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from gcore.processes import has_exited, kill_group
from gcore.rewarding.memory import has_killed, memory_of, new_group, remove_group
from gcore.rewarding.sandboxed import STARTED

OUTPUT_BYTES = 1 << 20  # a program that writes more has failed
TMP_BYTES = 64 << 20
READABLE = ("/usr", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
BOOT = """
import marshal, sys, types
with open(int(sys.argv[1]), "rb") as file:
    modules, task = marshal.load(file)
for name, code in modules:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(code, module.__dict__)
sys.modules["gcore.rewarding.sandboxed"].main(task)
"""
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # numbers of architectures for seccomp
REFUSED = {  # system calls: their numbers on the machines
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "pidfd_getfd": (438, 438),
}
CLONE, CLONE3, NEW_NAMESPACES = {"x86_64": 56, "aarch64": 220}, 435, 0x7E020000
SETSOCKOPT, SOL_SOCKET, SO_SNDBUF, SO_RCVBUF = {"x86_64": 54, "aarch64": 208}, 1, 7, 8  # larger buffers


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
        blob.write(marshal.dumps((_modules(script.socket is not None), task)))
        stdin.write(script.stdin.encode(errors="replace"))
        files = [blob, stdin]
        command = [_interpreter(), "-I", "-S", "-X", "utf8", "-c", BOOT, str(blob.fileno())]
        if not unconfined:
            if filtered := _system_calls():
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


@functools.cache
def _modules(with_tests: bool) -> list[tuple[str, Any]]:
    """The code that a sandbox needs, in the order of its imports."""
    files = ["sandboxed.py", *(["remote_tests.py"] if with_tests else [])]
    modules: list[tuple[str, Any]] = [(name, compile("", name, "exec")) for name in ("gcore", "gcore.rewarding")]
    for file in files:
        path = Path(__file__).with_name(file)
        modules.append((f"gcore.rewarding.{path.stem}", compile(path.read_text(), file, "exec")))
    return modules


def _interpreter() -> str:
    """The base interpreter, not the virtual environment's, which is inside the project's files."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def bwrap_command() -> list[str]:
    prefix = Path(sys.base_prefix).resolve()
    if os.geteuid() == 0:  # root needs no user namespace; sandboxed.py drops the privileges
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
    options += ["--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin"]
    return [shutil.which("bwrap") or "bwrap", *options]


@functools.cache
def _system_calls() -> bytes:
    """A program of classic BPF for seccomp. Other architectures have no filter."""
    if (machine := platform.machine()) not in MACHINES:
        return b""
    architecture, column = MACHINES[machine], list(MACHINES).index(machine)
    load, equal, any_bit, at_least, ret = 0x20, 0x15, 0x45, 0x35, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # EPERM; ENOSYS: libc then calls clone
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (ret, 0, 0, refuse), (load, 0, 0, 0)]
    lines += [(at_least, 0, 1, 0x40000000), (ret, 0, 0, refuse)]  # the second table of x86_64
    for numbers in REFUSED.values():
        lines += [(equal, 0, 1, numbers[column]), (ret, 0, 0, refuse)]
    lines += [(equal, 0, 7, SETSOCKOPT[machine]), (load, 0, 0, 24), (equal, 0, 4, SOL_SOCKET), (load, 0, 0, 32)]
    lines += [(equal, 1, 0, SO_SNDBUF), (equal, 0, 1, SO_RCVBUF), (ret, 0, 0, refuse), (ret, 0, 0, allow)]
    lines += [(equal, 0, 1, CLONE3), (ret, 0, 0, unknown), (equal, 0, 3, CLONE[machine])]
    lines += [(load, 0, 0, 16), (any_bit, 0, 1, NEW_NAMESPACES), (ret, 0, 0, refuse), (ret, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
