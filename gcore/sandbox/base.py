"""The interface of sandboxes.

    Sandboxes ──start──> Sandbox ──run, read, write, put, snapshot, restore──> Result, bytes
                            └── reach: one address of this machine; nothing else of any network

What a program in a sandbox does never raises here: it is a Result, with the cause of a failure by its name. Only a
sandbox that is itself at its end raises, a SandboxError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Command = str | Sequence[str]  # a string is a line for /bin/sh
WORK = "/sandbox"  # the folder of programs: relative paths start here

# causes of failures
TIME, MEMORY, DISK, OUTPUT, PROCESSES = "time", "memory", "disk", "output", "processes"
KILLED, START = "killed", "start"  # of the sandbox itself


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a command. Result(code=0, output=b"42\\n"), Result(code=None, output=b"", cause="time")"""

    code: int | None  # as of subprocess (containers: 128 + signal); None: the command was stopped, for the cause
    output: bytes  # stdout and stderr
    cause: str = ""  # of a failure: a limit (time, memory, disk, output, processes), or killed, with its sandbox
    cut: int = 0  # bytes left out in the middle of the output

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")


class SandboxError(RuntimeError):
    """A sandbox that did not start, or is at its end."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"sandbox: {cause}: {detail}")
        self.cause = cause


class Sandbox(Protocol):
    """One sandbox. Its files stay between commands; one command runs at a time, and files can be read and written while
    it runs. A command that fails by its time, output, memory or processes ends with all processes of the sandbox."""

    @property
    def alive(self) -> bool: ...

    async def run(
        self,
        command: Command,
        *,
        seconds: float | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> Result: ...

    async def read(self, path: str, most: int = 16 << 20) -> bytes:
        """OSError as of `open`; also if the file is no regular one, or has more than `most` bytes."""

    async def write(self, path: str, data: bytes) -> None:
        """Makes the folders of the path. OSError as of `open`."""

    async def put(self, folder: str) -> None:
        """Copies the files of a folder of this machine into the working folder."""

    async def snapshot(self) -> str:
        """The id of a copy of all files, until this sandbox stops."""

    async def restore(self, snapshot: str) -> None:
        """Files as in the snapshot, of this sandbox or another one of its kind. All processes end."""

    async def reach(self, host: str, port: int) -> tuple[str, int]:
        """Makes this address reachable by TCP, at the returned address inside."""

    async def stop(self) -> None:
        """Ends all processes and removes all files."""


class Sandboxes(Protocol):
    """A kind of sandbox, made from the section `sandbox`: Class(settings)."""

    def problem(self) -> str | None:
        """Why they do not work on this machine; None if they do. Called before a run."""

    async def start(self) -> Sandbox: ...
