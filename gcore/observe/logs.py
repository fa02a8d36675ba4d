"""Output of processes: one file per role, runs/NAME/logs/ROLE.log, of bounded size.

    stdout and stderr of a role ──> logs/ROLE.log ──watch──> over the limit: the middle is removed
    driver ──OutputPreview──> the first lines that rewards and workflows print, once
           ──Masks──> secrets are overwritten with stars, within a second
           ──last_lines──> the output of a role before it died

Processes append to the file themselves. So no output is lost when a process is killed, and a print never blocks.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gcore.config.secrets import mask
from gcore.observe.files import no_link, own_file

MAX_BYTES = 20 << 20  # of one log
CHECK_S = 0.2  # interval between checks of the size
CUT = re.compile(rb"^--- ([\d,]+) bytes were cut here", re.MULTILINE)
HEADER = b"--- "  # our own line: names the process that writes the following lines
# the stacks that faulthandler writes, the innermost line first
THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*\(most recent call first\):\n", re.MULTILINE)
FRAME = re.compile(r'(?:  File ".*", line \d+ in .*\n?)+')
PLACE = re.compile(r'  File "(.*)", line (\d+) in (.*)')
LOOPS = ("asyncio/base_events.py", "controller/run_prompts.py")  # the latter: uvloop, in C, has no frames
STACKS_BYTES = 1 << 20
NOT_USERS = (Path(__file__).parents[1], Path(re.__file__).parents[1])  # G-Core and Python
PREVIEW_LINES = 3  # shown on the terminal
MASK_BYTES, MASK_OVERLAP = 1 << 20, 4 << 10  # looked at per poll and log; a secret may be cut at the end of a part


class Log:
    """Log(Path("runs/a/logs/engine-0.log")): open for appending, kept below `max_bytes` while this process lives."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.max_bytes = path, max_bytes
        self.descriptor = own_file(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        weakref.finalize(self, os.close, self.descriptor)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"log {path.name}", daemon=True)
        self._thread.start()

    def take_over(self, name: str) -> None:
        """Redirects the output of this process and its children to the log, including output of C code."""
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):
            os.write(self.descriptor, HEADER + f"{name}, process {os.getpid()}, {when}\n".encode())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(self.descriptor, 1)
        os.dup2(self.descriptor, 2)
        print_without_errors()

    def close(self) -> None:
        """Called by the parent of the writing processes after they have ended."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            trim(self.path, self.max_bytes)

    def _watch(self) -> None:
        while not self._closed.wait(CHECK_S):
            with contextlib.suppress(OSError):  # the disk is full, or the folder was moved: retried later
                trim(self.path, self.max_bytes)


def print_without_errors() -> None:
    """A full disk costs what this process prints; it must not fail the code that prints. A line is in the log when it
    is printed, also if the process is killed later."""
    sys.stdout, sys.stderr = _output(1), _output(2)


class _Output(io.FileIO):
    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or 0
        return len(data)


def _output(descriptor: int) -> io.TextIOWrapper:
    raw = _Output(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


def trim(path: Path, max_bytes: int = MAX_BYTES) -> bool:
    """Removes the middle of a log over the limit: a tenth of the limit stays at the beginning, a half at the end.

    Other processes may append at the same time; what they write during the cut is lost and counts as cut.
    """
    if path.stat().st_size <= max_bytes:
        return False
    with open(path, "r+b", opener=no_link) as file:
        head = file.read(max_bytes // 10)
        head = head[: head.rfind(b"\n") + 1] or head
        before = CUT.search(head + file.read(200))  # the note of an earlier cut
        head = head[: before.start()] if before else head
        file.seek(-(max_bytes // 2), os.SEEK_END)
        tail = file.read()
        tail = tail[tail.find(b"\n") + 1 :]
        cut = os.fstat(file.fileno()).st_size - len(head) - len(tail)
        cut += int(before[1].replace(b",", b"")) if before else 0
        file.truncate(len(head))
    note = f"--- {cut:,} bytes were cut here: a log holds at most {max_bytes:,} ---\n"
    with open(path, "ab", buffering=0, opener=no_link) as file:
        file.write(note.encode() + tail)
    return True


def last_lines(path: Path, num: int = 12) -> list[str]:
    """The last lines of a log, shortened; empty if there is no log or no line in it."""
    return _shown(_tail(path, 32 << 10).split(b"\n"))[-num:]


def _tail(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read()
    except OSError:
        return b""


def _shown(lines: Iterable[bytes]) -> list[str]:
    """What processes have printed, shortened; without our own lines."""
    return [_printable(line) for line in lines if line.strip() and not line.startswith(HEADER)]


class Masks:
    """Overwrites secrets in the logs of a folder, in place: their length stays the same, so that processes can append
    at the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[Path, int] = {}  # bytes that have been looked at

    def poll(self) -> bool:
        """Look at the next part of every log. True: there is more."""
        return sum(self._mask(path) for path in sorted(self._folder.glob("*.log"))) > 0

    def _mask(self, path: Path) -> bool:
        with contextlib.suppress(OSError), open(path, "r+b", buffering=0, opener=no_link) as file:
            size, done = os.fstat(file.fileno()).st_size, self._done.get(path, 0)
            if size == done:
                return False
            start = max(0, done - MASK_OVERLAP) if size > done else 0  # smaller: its middle was removed
            data = os.pread(file.fileno(), MASK_BYTES, start)
            masked = mask(data)
            for part in re.finditer(rb"\*+", masked):
                if data[part.start() : part.end()] != part[0]:
                    os.pwrite(file.fileno(), part[0], start + part.start())
            self._done[path] = start + len(data)
            return start + len(data) < size
        return False


class OutputPreview:
    """The first lines that rewards and workflows print in this run, for the terminal; each kind is shown once."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._masks = folder, None if folder is None else Masks(folder)
        self._waiting = {"rewards": "rewards", "controller": "the workflow and the controllers"}
        self._seen = {path: path.stat().st_size for path in self._logs("*")}  # sizes before a resume

    def poll(self) -> list[str]:
        """Lines to show now; nearly always empty."""
        if self._masks is not None:
            self._masks.poll()
        notes: list[str] = []
        for kind, writer in list(self._waiting.items()):
            for path in self._logs(f"{kind}-*"):
                if lines := self._new_lines(path):
                    del self._waiting[kind]
                    shown = [*lines[:PREVIEW_LINES], *(["..."] if len(lines) > PREVIEW_LINES else [])]
                    notes += [f"{writer} print to {path}:", *(f"  {line}" for line in shown)]
                    break
        return notes

    def mask_all(self) -> None:
        """At the end of a run."""
        while self._masks is not None and self._masks.poll():
            pass

    def _logs(self, pattern: str) -> list[Path]:
        return sorted(self._folder.glob(f"{pattern}.log")) if self._folder is not None else []

    def _new_lines(self, path: Path) -> list[str]:
        """Complete lines since the beginning of this run."""
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(self._seen.get(path, 0))
            data = file.read(8192)
            return _shown(data.split(b"\n")[: None if len(data) == 8192 else -1])  # a line may fill the whole window
        return []


def _printable(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").rstrip()
    text = "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= 200 else text[:200] + " ..."


def blocking_line(path: Path) -> str:
    """The line of the user's code in which an event loop stood when the process wrote its stacks to this log, such as
    `flow.py:12 in workflow`. Empty if there is none."""
    for stack in reversed(THREAD.split(_tail(path, STACKS_BYTES).decode(errors="replace"))[1:]):
        frames = FRAME.match(stack)
        places = PLACE.findall(frames[0]) if frames else []
        if any(file.endswith(LOOPS) for file, _, _ in places):
            for file, line, name in places:  # the innermost first
                if not any(Path(file).is_relative_to(folder) for folder in NOT_USERS) and "site-packages" not in file:
                    return f"{Path(file).name}:{line} in {name}"
    return ""
