"""Files of a run: some get lines at their end (metrics, samples, spans, placement), others are replaced as a whole.

None of them is written through a symbolic or hard link, also not through one that was put there after the start of the
run, nor in a folder that became a symbolic link; only `replacing` makes its new files there.
A disk that is full or a share that is gone never ends a run by these files. The lines wait in memory until they can be
written, the newest MAX_WAITING bytes of them. What is not written is said once per file: `take_notes`, for the
progress view. A run with checkpoint.on_failure=stop asks `problem`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from gcore.observe.values import Row

MAX_WAITING = 8 << 20  # bytes of one file
_problems: dict[Path, str] = {}  # by file: why it is not written now
_notes: list[str] = []  # for the user, not taken yet
_are_taken = False  # this process is asked for its notes


class LineFile:
    """LineFile(Path("runs/a/metrics.jsonl")).append(['{"step": 1}']). One process writes to a file at a time."""

    _end = b"\n"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []
        self._is_new = True
        _problems.pop(path, None)

    def append(self, lines: Iterable[str]) -> None:
        """The lines are in the file when this returns, or wait."""
        self._append([f"{line}\n".encode("utf-8", "replace") for line in lines])

    def _append(self, records: list[bytes]) -> None:
        self._waiting += records
        if not self._waiting:
            return
        while sum(map(len, self._waiting)) > MAX_WAITING:
            self._waiting.pop(0)
        with told(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+b", buffering=0, opener=own_file) as file:
                end = file.seek(0, os.SEEK_END)
                data = b"".join(self._waiting)
                if self._is_new and end and os.pread(file.fileno(), 1, end - 1) != self._end:
                    data = self._end + data  # a kill cut the last line
                try:
                    if (written := file.write(data)) < len(data):  # the last bytes of a disk: the next write says why
                        file.write(data[written:])
                        if file.seek(0, os.SEEK_END) < end + len(data):
                            raise OSError("it was written only in part")
                except OSError:
                    with contextlib.suppress(OSError):
                        file.truncate(end)
                    raise
            self._waiting, self._is_new = [], False


class RecordFile(LineFile):
    """A new file of binary records."""

    _end = b""

    def write(self, record: bytes) -> None:
        self._append([record])


def no_link(path: str, flags: int) -> int:
    """An opener: OSError for a symbolic link, or in a folder that is one. Only that of the run itself may be one."""
    folder = os.path.dirname(path)
    if os.path.islink(folder) and not os.path.exists(os.path.join(folder, "config.yaml")):
        raise OSError(errno.ELOOP, "its folder is a symbolic link")
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def own_file(path: str, flags: int) -> int:
    """The same for a file that gets data. One with hard links is first replaced by a copy: the others stay."""
    descriptor = no_link(path, flags)
    if os.fstat(descriptor).st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    with open(path, "rb") as old, replacing(Path(path)) as new:
        shutil.copyfileobj(old, new)
    return no_link(path, flags)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Around the writing of a whole file: others see the old one or the new one. A link is replaced, not followed."""
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # a run that ends and `gcore report` may both write it
    temp.unlink(missing_ok=True)  # of a killed process, or a link
    try:
        with open(temp, "xb") as file:
            yield file
        temp.replace(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Around a write that must not end the run. An OSError is told once, until a write to this file succeeds."""
    try:
        yield
    except OSError as error:
        if path not in _problems:
            _problems[path] = f"{path} is not written ({error.strerror or error})"
            tell(f"{_problems[path]}; the run goes on")
    else:
        _problems.pop(path, None)


def tell(text: str) -> None:
    """On the driver's screen, if this process is the driver or a controller; otherwise in the log of the process."""
    _notes.append(text)
    if not _are_taken:
        with contextlib.suppress(OSError):  # the log may be on a full disk
            print(f"gcore: {text}", file=sys.stderr, flush=True)


def take_notes() -> list[str]:
    """What was told in this process since the last call."""
    global _are_taken
    _are_taken = True
    notes, _notes[:] = _notes[:], []
    return notes


def problem(folder: Path) -> str:
    """A file of this run that cannot be written now, and why; empty if there is none."""
    return next((text for path, text in _problems.items() if folder in path.parents), "")


def whole_lines(path: Path) -> Iterator[tuple[bytes, Row]]:
    """The lines of a file that are JSON objects, raw and parsed."""
    if not path.is_file():
        return
    for line in path.read_bytes().split(b"\n"):
        if (row := parsed_line(line)) is not None:
            yield line, row


def parsed_line(line: str | bytes) -> Row | None:
    """None for a line that a kill or a full disk cut off."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def keep_lines(path: Path, stays: Callable[[Row], bool]) -> int:
    """Drops the other lines of a file that are JSON objects. Returns their number."""
    lines = list(whole_lines(path))
    kept = [line for line, row in lines if stays(row)]
    if path.is_file():
        replace_lines(path, kept)
    return len(lines) - len(kept)


def replace_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Replaces a file atomically: a kill leaves the old file or the new one."""
    data = b"".join(line + b"\n" for line in lines)
    with open(path, "r+b", opener=own_file) as file:
        if file.read().startswith(data):  # as a rule; it needs no space, on a disk that may be full
            file.truncate(len(data))
            return
    with replacing(path) as new:
        new.write(data)
        new.flush()
        os.fsync(new.fileno())
