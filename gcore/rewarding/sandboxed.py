"""The first code that runs inside a sandbox: it sets the limits, then runs a program, or tests of one.

It imports only the standard library, and is sent as code, because a sandbox has no files of G-Core.
"""

from __future__ import annotations

import builtins
import os
import sys
import types

from gcore.sandbox.inside import STARTED, limit

PASSED = b"."  # the output of tests: one per test that passes
TYPE_CHECKING = False  # modules that only annotations use: a sandbox starts in half the time without them
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def main(task: Mapping[str, Any]) -> None:
    limit(*task["limits"])
    os.write(1, STARTED)
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, 2)
    if task["socket"] is None:
        run_program(task["source"])
        return
    report = os.dup(1)
    os.dup2(null, 1)
    from gcore.rewarding.remote_tests import run_tests, serve_program

    if task["is_tests"]:
        run_tests(task["source"], task["socket"], report)
    else:
        os.close(report)
        serve_program(task["source"], task["socket"])
    os._exit(0)


def run_program(source: str | bytes) -> dict[str, Any]:
    namespace = main_module()
    exec(compile(source, "program.py", "exec"), namespace)
    return namespace


def main_module() -> dict[str, Any]:
    setattr(builtins, "exit", sys.exit)  # noqa: B010
    setattr(builtins, "quit", sys.exit)  # noqa: B010
    sys.argv = ["program.py"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    return module.__dict__
