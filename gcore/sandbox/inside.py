"""The first code that runs inside a sandbox: it sets the limits.

It imports only the standard library, and is sent as code, because a sandbox has no files of G-Core.
"""

from __future__ import annotations

import os
import resource

STARTED = b"started\n"  # the first output: the sandbox works, and what follows is the program's
FILE_BYTES, PROCESSES, OPEN_FILES = 16 << 20, 16, 64


def limit(uid: int, dies_with_parent: bool, cpu_s: int, memory: int) -> None:
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    if dies_with_parent:
        import ctypes

        ctypes.CDLL(None).prctl(1, 9)
    for what, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
