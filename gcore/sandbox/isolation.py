"""What isolates a sandbox of bubblewrap: its files, namespaces, a filter of system calls, the code that starts in it.

No network, no files except the interpreter's, nothing writable except a small /tmp, no /proc. The filter of system
calls closes what would pass the limits: memory that belongs to no process, new namespaces, access to other processes.
Limits on CPU time, memory, processes and files are set from inside (inside.py), before anything else runs there.
"""

from __future__ import annotations

import functools
import marshal
import os
import platform
import shutil
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
TMP_BYTES = 64 << 20
READABLE = ("/usr", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
BOOT = """
import marshal, sys, types
with open(int(sys.argv[1]), "rb") as file:
    modules, main, task = marshal.load(file)
for name, code in modules:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(code, module.__dict__)
sys.modules[main].main(task)
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
REFUSED_TOO = {"sched_setaffinity": (203, 122)}  # where CPUs are limited by it
CLONE, CLONE3, NEW_NAMESPACES = {"x86_64": 56, "aarch64": 220}, 435, 0x7E020000
SETSOCKOPT, SOL_SOCKET, SO_SNDBUF, SO_RCVBUF = {"x86_64": 54, "aarch64": 208}, 1, 7, 8  # larger buffers


def boot(blob: int) -> list[str]:
    """The command that runs what `packed` has written to this file descriptor."""
    return [interpreter(), "-I", "-S", "-X", "utf8", "-c", BOOT, str(blob)]


def packed(modules: tuple[str, ...], main: str, task: Mapping[str, Any]) -> bytes:
    """Code and task of a sandbox, which has no files of G-Core: these modules, and which of them has `main(task)`."""
    return marshal.dumps((_code_of(modules), main, dict(task)))


@functools.cache
def _code_of(names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """The code of these modules of G-Core, in the order of their imports, each after its packages, left empty."""
    packages = {"gcore": "", **{name.rpartition(".")[0]: "" for name in names}}
    modules: list[tuple[str, Any]] = [(name, compile("", name, "exec")) for name in packages]
    for name in names:
        path = PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")
        modules.append((name, compile(path.read_text(), path.name, "exec")))
    return modules


def interpreter() -> str:
    """The base interpreter, not the virtual environment's, which is inside the project's files."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def bwrap_command() -> list[str]:
    """The command of a sandbox for one program."""
    options = [*namespaces(), *readable(DEVICES)]
    options += ["--size", str(TMP_BYTES), "--perms", "1777", "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
    options += ["--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin"]
    return [shutil.which("bwrap") or "bwrap", *options]


def namespaces(*capabilities: str) -> list[str]:
    """Options for its own namespaces. `capabilities`: more of root's, for the first process."""
    if os.geteuid() == 0:  # root needs no user namespace; sandboxed.py drops the privileges
        options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--cap-drop", "ALL"]
        for name in ("CAP_SETUID", "CAP_SETGID", *capabilities):
            options += ["--cap-add", name]
    else:
        options = ["--unshare-all", "--unshare-user", "--cap-drop", "ALL"]
    return [*options, "--die-with-parent", "--new-session", "--clearenv"]


def readable(more: Sequence[str]) -> list[str]:
    """Options for the files of this machine that programs can read: the interpreter's, and `more`."""
    options, places = list[str](), [*map(Path, (*READABLE, *more)), Path(sys.base_prefix).resolve()]
    for parent in sorted({parent for place in places for parent in place.parents} - {Path("/")}):
        options += ["--perms", "0755", "--dir", str(parent)]  # directories made by bwrap would be closed to other users
    for place in places:
        options += ["--dev-bind" if str(place) in DEVICES else "--ro-bind-try", str(place), str(place)]
    return options


@functools.cache
def system_calls(*more: str) -> bytes:
    """A program of classic BPF for seccomp. `more`: names in REFUSED_TOO. Other architectures have no filter."""
    if (machine := platform.machine()) not in MACHINES:
        return b""
    architecture, column = MACHINES[machine], list(MACHINES).index(machine)
    load, equal, any_bit, at_least, ret = 0x20, 0x15, 0x45, 0x35, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # EPERM; ENOSYS: libc then calls clone
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (ret, 0, 0, refuse), (load, 0, 0, 0)]
    lines += [(at_least, 0, 1, 0x40000000), (ret, 0, 0, refuse)]  # the second table of x86_64
    for numbers in (*REFUSED.values(), *(REFUSED_TOO[name] for name in more)):
        lines += [(equal, 0, 1, numbers[column]), (ret, 0, 0, refuse)]
    lines += [(equal, 0, 7, SETSOCKOPT[machine]), (load, 0, 0, 24), (equal, 0, 4, SOL_SOCKET), (load, 0, 0, 32)]
    lines += [(equal, 1, 0, SO_SNDBUF), (equal, 0, 1, SO_RCVBUF), (ret, 0, 0, refuse), (ret, 0, 0, allow)]
    lines += [(equal, 0, 1, CLONE3), (ret, 0, 0, unknown), (equal, 0, 3, CLONE[machine])]
    lines += [(load, 0, 0, 16), (any_bit, 0, 1, NEW_NAMESPACES), (ret, 0, 0, refuse), (ret, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
