"""Checkpoints in the memory of the machine, between those on disk. They outlive every process, but not the machine.

    runs/NAME/memory ──symbolic link──> /dev/shm/gcore-checkpoint-XXXX/step_N      the newest one

A process that dies takes its own memory with it, so the copy is in shared memory, which belongs to the kernel. Its
format is that of a checkpoint on disk. It is deleted when the run ends, and when a newer checkpoint is on disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from gcore.checkpoint import store
from gcore.types import UserError, writing

SHARED_MEMORY = Path("/dev/shm")
PREFIX, LINK, OWNER = "gcore-checkpoint-", "memory", "owner"


def check_memory(num_nodes: int) -> None:
    """UserError if a run on these machines cannot have checkpoints in memory."""
    key = "checkpoint.memory_every"
    if num_nodes > 1:
        raise UserError(f"{key}: got a run on {num_nodes} nodes, which share no memory; expected one, or {key}=0")
    if not SHARED_MEMORY.is_dir():
        raise UserError(f"{key}: this machine has no {SHARED_MEMORY}; expected Linux, or {key}=0")


def open_memory(run_folder: Path) -> None:
    """Make the folder in shared memory, or keep that of the run before, which may have a checkpoint."""
    _delete_abandoned()
    link = run_folder / LINK
    if _held(run_folder) is not None:
        return
    if os.path.lexists(link):
        if not link.is_symlink() or not _is_named(Path(os.readlink(link))):
            got = f"a link to {os.readlink(link)}" if link.is_symlink() else "a file or folder"
            raise UserError(
                f"{link}: got {got}, which the run has not made; expected nothing there: move it away, or set "
                "checkpoint.memory_every=0"
            )
        link.unlink()  # the machine was started again, or this folder is a copy of another run
    with writing(f"checkpoint.memory_every: {SHARED_MEMORY}"):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY))
        link.symlink_to(folder)
        (folder / OWNER).write_text(str(link.absolute()))


def close_memory(run_folder: Path) -> None:
    """Delete the checkpoints in memory, if there are any. A link that is not of this run stays as it is."""
    if (held := _held(run_folder)) is not None:
        shutil.rmtree(held, ignore_errors=True)
        (run_folder / LINK).unlink()


def complete_checkpoints(run_folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first. If one step has two, that on disk comes after that in memory."""
    return sorted([*_in_memory(run_folder), *store.complete_checkpoints(run_folder)], key=store.position)


def candidates(resume: str, run_folder: Path) -> list[Path]:
    """The checkpoints that `run.resume` allows, the preferred one first; none: start from the beginning."""
    if resume == "never":
        return []
    if resume == "auto":
        return complete_checkpoints(run_folder)[::-1]
    if not (Path(resume) / store.MANIFEST).is_file():
        raise UserError(
            f"run.resume={resume}: no complete checkpoint there (expected `auto`, `never` or a folder step_N or warm_N)"
        )
    return [Path(resume)]


def is_in_memory(checkpoint: Path) -> bool:
    return checkpoint.parent.name == LINK


def drop(run_folder: Path) -> None:
    """Delete the checkpoints in memory: a newer one is on disk, or the run continues from an earlier step."""
    for checkpoint in _in_memory(run_folder):
        store.remove(checkpoint)


def _in_memory(run_folder: Path) -> list[Path]:
    return store.complete_checkpoints(run_folder / LINK) if _held(run_folder) is not None else []


def _held(run_folder: Path) -> Path | None:
    """The folder in shared memory that the link names, if it was made for this run."""
    link = run_folder / LINK
    if not link.is_symlink():
        return None
    folder = Path(os.readlink(link))
    try:
        named = Path((folder / OWNER).read_text()) if _is_own(folder) else Path()
    except (OSError, UnicodeDecodeError):
        return None
    return folder if named.name == LINK and named.parent.resolve() == run_folder.resolve() else None


def _is_named(folder: Path) -> bool:
    return folder.parent == SHARED_MEMORY and folder.name.startswith(PREFIX)


def _is_own(folder: Path) -> bool:
    """A folder as `open_memory` makes them, and no link."""
    about = folder.lstat()
    return _is_named(folder) and stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()


def _delete_abandoned() -> None:
    """Folders of runs that were deleted or renamed. If `run.dir` is not here either, the run may be that of a container
    that shares this memory."""
    for owner in SHARED_MEMORY.glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError):  # another run deletes it at this moment
            link = owner.read_text()  # empty: it is being written, or the memory was full
            gone = bool(link) and Path(link).parents[1].is_dir() and Path(link).resolve() != owner.parent.resolve()
            if gone and _is_own(owner.parent):
                shutil.rmtree(owner.parent, ignore_errors=True)
