"""The lock of a run folder: one command at a time writes to it.

    runs/.NAME.lock ──flock──> held by the driver, and freed by the kernel when it ends, however it ends
                    ──record─> {"host": "node1", "pid": 4711, "since": 1790000000.0, ...}: whom to name in messages
                    ──mtime──> changes every BEAT_S seconds: a sign of life for other machines

It lies beside the folder, because an older run is renamed with all that is in it. The guard of the run's processes
(runtime/guard.py) keeps it too: if the driver is killed, it is free when the last of its processes has ended. Roles do
not have it. A file without a lock is what a killed driver leaves, and is taken over:

- from this machine, since it was started: at once. This relies only on `flock` within one machine.
- from another machine: where `flock` works between machines (NFS, Lustre with `-o flock`, GPFS), the lock is proof.
  Whether it does cannot be seen from here, so the time of the file must also stay the same for PATIENCE_S seconds.
  Clocks are not compared.

On a file system without `flock` the record and the sign of life exclude a second run, but not for certain one that
starts within SETTLE_S seconds of the first. A driver that cannot reach a shared file system for longer than PATIENCE_S
may lose its lock to one on another machine. Nothing protects a run whose lock file a person deletes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from gcore.types import UserError, writing

BEAT_S = 5.0
PATIENCE_S = 30.0  # without a sign of life of an owner on another machine
ENDING_S = 10.0  # for the processes of a driver that was killed
SETTLE_S = 1.0
POLL_S = 0.1
BOOT = Path("/proc/sys/kernel/random/boot_id")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner("node1", 4711, since=1790000000.0, boot="6f1c...", started=1789999990.0)"""

    host: str
    pid: int
    since: float
    boot: str  # changes when the machine starts
    started: float  # the process: its id may be used again

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(self.since))
        return f"process {self.pid} on {self.host} since {when}"

    @property
    def is_here(self) -> bool:
        return self.boot == _boot()

    @property
    def is_dead(self) -> bool:
        """For certain. Only known on this machine."""
        if not self.is_here:
            return False
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.started) > 1 or process.status() == psutil.STATUS_ZOMBIE
        return True


@contextlib.contextmanager
def hold(folder: Path, say: Say) -> Iterator[Sequence[int]]:
    """Hold the lock of a run folder, which need not exist. Yields the descriptors that the guard keeps too. UserError
    if another process has it. `say`: prints a line about an owner that has ended."""
    with contextlib.ExitStack() as held:
        descriptors = [held.enter_context(_hold(place, folder, say)) for place in _places(folder)]
        _check_around(folder)
        yield descriptors


def owner(folder: Path) -> Owner | None:
    """The process that writes to a run folder now; also if it is on another machine and may have died."""
    last = next(filter(None, map(_read, _places(folder))), None)
    return None if last is None or last.is_dead else last


def _names(folder: Path) -> list[Path]:
    """Two, if it is a symbolic link to another one."""
    names = [folder.parent.resolve() / folder.name]
    return names + ([folder.resolve()] if folder.is_symlink() and folder.is_dir() else [])


def _places(folder: Path) -> list[Path]:
    return [name.parent / f".{name.name}.lock" for name in _names(folder)]


def _check_around(folder: Path) -> None:
    """UserError if the folder lies in that of another run, or that of another run in this one, as far as two levels
    below: to rename an older run would rename files of the other."""
    for name in _names(folder):
        locks = (lock for depth in ("", "*/") for lock in name.glob(f"{depth}.?*.lock"))
        inside = [lock.with_name(lock.name[1 : -len(".lock")]) for lock in locks]
        for other in (*name.parents, *inside):
            if (who := owner(other)) is not None:
                raise _in_use(other, who)


@contextlib.contextmanager
def _hold(path: Path, folder: Path, say: Say) -> Iterator[int]:
    with writing(f"run.dir={path.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, locked = _wait(path, folder)
    about = os.fstat(descriptor)
    if about.st_nlink > 1 or (about.st_size and _read(path) is None):
        os.close(descriptor)
        got = "a file with hard links" if about.st_nlink > 1 else "a file of something else"
        raise UserError(f"{path}: got {got}; expected the lock of a run: move it away")
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(descriptor, ended), name="run lock", daemon=True)
    me = Owner(socket.gethostname(), os.getpid(), time.time(), _boot(), _started())
    try:
        if (last := _read(path)) is not None:
            _check_gone(path, folder, last, locked, say)
        with writing(f"run.dir={path.parent}"):
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(me)).encode(), 0)
            os.fsync(descriptor)
        if not locked:
            time.sleep(SETTLE_S)  # of two that start together, the later one has it
            if (now := _read(path)) != me:
                raise _in_use(folder, now)
        os.register_at_fork(after_in_child=lambda: None if ended.is_set() else os.close(descriptor))
        beat.start()
        yield descriptor
    finally:
        ended.set()
        if beat.is_alive():
            beat.join(BEAT_S)
        with contextlib.suppress(OSError):
            if (now := _read(path)) is None or now == me:
                path.unlink()
        os.close(descriptor)


def _wait(path: Path, folder: Path) -> tuple[int, bool]:
    """Open and lock the file. False: the file system has no locks."""
    deadline = time.monotonic() + ENDING_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            os.close(descriptor)
            last = _read(path)  # None: it writes its name, or deletes the file, at this moment
            if (last is not None and not last.is_dead) or time.monotonic() > deadline:
                raise _in_use(folder, last) from None
            time.sleep(POLL_S)
            continue
        except OSError:
            locked = False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor, locked
        os.close(descriptor)  # its owner has deleted it between the two calls


def _check_gone(path: Path, folder: Path, last: Owner, locked: bool, say: Say) -> None:
    """UserError if the owner of the file is alive, although this process could lock the file."""
    if last.is_here:
        if not locked and not last.is_dead:
            raise _in_use(folder, last)
    else:
        say(f"{folder} was in use by {last}; waiting {PATIENCE_S:.0f} s for a sign of life")
        seen, deadline = _touched(path), time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            if _touched(path) != seen:
                raise _in_use(folder, last)
    say(f"{folder} was in use by {last}, which ended without releasing it; it is taken over")


def _in_use(folder: Path, who: Owner | None) -> UserError:
    by = "another process" if who is None else str(who)
    if who is not None and who.is_dead:
        return UserError(f"{folder}: {by} was killed, and its processes have not ended yet; try again in a minute")
    return UserError(
        f"{folder}: in use by {by}; wait until it ends, stop it, or choose another folder (keys: run.dir, run.name)"
    )


def _beat(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with contextlib.suppress(OSError):  # a server that is away for a moment
            os.utime(descriptor)


def _touched(path: Path) -> tuple[int, int]:
    """Opened, because NFS may answer `stat` of a path from a cache."""
    with open(path, "rb") as file:
        about = os.fstat(file.fileno())
    return about.st_ino, about.st_mtime_ns


def _read(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _boot() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()


def _started() -> float:
    return psutil.Process().create_time()
