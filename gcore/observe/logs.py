"""Output of processes: one file per role, runs/NAME/logs/ROLE.log, of bounded size.

    stdout and stderr of a role ──> logs/ROLE.log ──watch──> over the limit: the middle is removed
    driver ──OutputPreview──> the first lines that rewards and workflows print, once
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
from pathlib import Path

MAX_BYTES = 20 << 20  # of one log
CHECK_S = 0.2  # interval between checks of the size
CUT = re.compile(rb"^--- ([\d,]+) bytes were cut here", re.MULTILINE)
HEADER = b"--- "  # our own line: names the process that writes the following lines
PREVIEW_LINES = 3  # shown on the terminal


class Log:
    """Log(Path("runs/a/logs/engine-0.log")): open for appending, kept below `max_bytes` while this process lives."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.max_bytes = path, max_bytes
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        weakref.finalize(self, os.close, self.descriptor)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"log {path.name}", daemon=True)
        self._thread.start()

    def take_over(self, name: str) -> None:
        """Redirects the output of this process and its children to the log, including output of C code."""
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(self.descriptor, HEADER + f"{name}, process {os.getpid()}, {when}\n".encode())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)  # a line is in the log when it is printed, also if killed later
        os.dup2(self.descriptor, 1)
        os.dup2(self.descriptor, 2)

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


def trim(path: Path, max_bytes: int = MAX_BYTES) -> bool:
    """Removes the middle of a log over the limit: a tenth of the limit stays at the beginning, a half at the end.

    Other processes may append at the same time; what they write during the cut is lost and counts as cut.
    """
    if path.stat().st_size <= max_bytes:
        return False
    with path.open("r+b") as file:
        head = _until_newline(file.read(max_bytes // 10))
        before = CUT.search(head + file.read(200))  # the note of an earlier cut
        head = head[: before.start()] if before else head
        file.seek(-(max_bytes // 2), os.SEEK_END)
        tail = file.read()
        tail = tail[tail.find(b"\n") + 1 :]
        cut = os.fstat(file.fileno()).st_size - len(head) - len(tail)
        cut += int(before[1].replace(b",", b"")) if before else 0
        file.truncate(len(head))
    note = f"--- {cut:,} bytes were cut here: a log holds at most {max_bytes:,} ---\n"
    with path.open("ab", buffering=0) as file:
        file.write(note.encode() + tail)
    return True


def _until_newline(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1] or data


def last_lines(path: Path, num: int = 12) -> list[str]:
    """The last lines of a log, shortened; empty if there is no log or no line in it."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (32 << 10)))
            data = file.read()
    except OSError:
        return []
    return [_printable(line) for line in data.split(b"\n") if line.strip() and not line.startswith(HEADER)][-num:]


class OutputPreview:
    """The first lines that rewards and workflows print in this run, for the terminal; each kind is shown once."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._waiting = {"rewards": "rewards", "controller": "the workflow and the controllers"}
        self._seen = {path: path.stat().st_size for path in self._logs("*")}  # sizes before a resume

    def poll(self) -> list[str]:
        """Lines to show now; nearly always empty."""
        found: list[str] = []
        for kind, writer in list(self._waiting.items()):
            for path in self._logs(f"{kind}-*"):
                if lines := self._new_lines(path):
                    del self._waiting[kind]
                    shown = [*lines[:PREVIEW_LINES], *(["..."] if len(lines) > PREVIEW_LINES else [])]
                    found += [f"{writer} print to {path}:", *(f"  {line}" for line in shown)]
                    break
        return found

    def _logs(self, pattern: str) -> list[Path]:
        return sorted(self._folder.glob(f"{pattern}.log")) if self._folder is not None else []

    def _new_lines(self, path: Path) -> list[str]:
        """Complete lines since the beginning of this run."""
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(self._seen.get(path, 0))
            lines = _whole_lines(file.read(8192))
            return [_printable(line) for line in lines if line.strip() and not line.startswith(HEADER)]
        return []


def _whole_lines(data: bytes) -> list[bytes]:
    """Complete lines. A line that fills the whole window counts too."""
    return data.split(b"\n")[: None if len(data) == 8192 else -1]


def _printable(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").rstrip()
    text = "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= 200 else text[:200] + " ..."
