"""Scores programs written by a model: the fraction of tests that they pass.

    completion ──last ```python block──> program ──sandbox──> output, compared here
                                            └──asserts──> tests in a sandbox of their own ──results──> passed?

The process of a program never has the expected values, and nothing that it writes or changes is the score: outputs are
compared here, results of functions in the process of the tests (sandboxed.py). Programs can import only the standard
library. If the sandbox does not start, this is an error, never a reward of 0.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from gcore.rewarding.programs import RunResult, SandboxLimits, Script, run
from gcore.rewarding.remote_tests import names_of
from gcore.rewarding.rules import text_of
from gcore.rewarding.sandboxed import PASSED
from gcore.rewarding.source import short
from gcore.types import UserError

FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?:python|py)[\d.]*[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.I
)

# what runs tests and raises nothing if they fail
RUNNERS = re.compile(r"\b(unittest|pytest)\.main\b|from unittest import .*\bmain\b|\b(TextTestRunner|testmod)\b")


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
    _preflight({"sandbox": sandbox})
    limits = SandboxLimits(sandbox, cpu_s, 5.0 * cpu_s if wall_s is None else wall_s, memory_mb)
    known = [_read_tests(value) for value in tests]
    with ThreadPoolExecutor(max_workers=min(parallel, len(completions))) as pool:
        passed = list(pool.map(lambda c, t: _passed(_program(text_of(c)), t, partial, limits), completions, known))
    return passed if partial else [float(fraction == 1) for fraction in passed]


def _preflight(args: Mapping[str, Any]) -> None:
    sandbox = args.get("sandbox", "bwrap")
    if sandbox not in ("bwrap", "rlimits"):
        raise UserError(f"python_tests: args.sandbox={sandbox!r}; expected bwrap or rlimits")
    if sandbox == "bwrap" and (problem := _bwrap_problem()):
        raise UserError(
            f"python_tests runs model-written programs inside bubblewrap, but {problem}; install bubblewrap 0.7 or "
            "newer on a machine that allows namespaces, or set the function's args to {sandbox: rlimits}: then time, "
            "memory and processes are limited, but the programs can access the network, all your files and the tests"
        )


cast(Any, python_tests).preflight = _preflight


@functools.cache
def _bwrap_problem() -> str | None:
    """Why bwrap does not work here (found by a trial run); None if it works."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        result = _output("print(6 * 7)", "", SandboxLimits("bwrap", 10, 30.0, 512))
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
            tree = ast.parse(value)
            rest = [statement for statement in tree.body if not hasattr(statement, "decorator_list")]  # no definitions
            if not any(isinstance(node, ast.Call | ast.Assert) for part in rest for node in ast.walk(part)):
                raise ValueError("they call nothing, so no failure would be seen")
            if RUNNERS.search(value) and (runner := RUNNERS.search(ast.unparse(tree))):
                raise ValueError(f"{runner[0]} raises nothing if a test fails: use asserts, or call the test functions")
            names_of(value)
            return value
        else:
            pairs = [(test["input"], test["output"]) for test in value]
            if pairs and all(isinstance(text, str) for pair in pairs for text in pair):
                return pairs
    except (SyntaxError, TypeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"tests: got {short(value)} ({type(error).__name__}: {error}); {expected}") from None
    raise ValueError(f"tests: got {short(value)}; {expected}")


def _passed(program: str, tests: list[tuple[str, str]] | str, partial: bool, limits: SandboxLimits) -> float:
    if not program.strip():
        return 0.0
    if isinstance(tests, str):
        num = sum(isinstance(s, ast.Assert) for s in ast.parse(tests).body) or 1
        return min(_asserts_passed(program, tests, limits), num) / num
    passed = 0
    for given, expected in tests:
        result = _output(program, given, limits)
        correct = result.code == 0 and _lines(result.output.decode(errors="replace")) == _lines(expected)
        passed += correct
        if result.code is None or not (correct or partial):  # a program that was killed is not run again
            break
    return passed / len(tests)


def _lines(text: str) -> list[str]:
    """Lines without trailing spaces and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _output(program: str, given: str, limits: SandboxLimits) -> RunResult:
    """Runs a program once, with this standard input."""
    return run([Script({"source": program.encode(errors="replace")}, given)], limits)


def _asserts_passed(program: str, tests: str, limits: SandboxLimits) -> int:
    """The tests run in a process of their own, and ask the process of the program for results."""
    program_task = {"source": program.encode(errors="replace"), "is_tests": False}
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(end) for end in socket.socketpair()]
        scripts = [Script({"source": tests, "is_tests": True}, socket=ends[0]), Script(program_task, socket=ends[1])]
        return run(scripts, limits).output.count(PASSED)
