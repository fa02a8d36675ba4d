"""The folders of checkpoints: `step_N/`, and `warm_N/` during the warm start. Each is complete or does not exist.

    begin -> step_N.partial/ -> files of all processes, each on disk -> commit: state.json, manifest.json, rename

The manifest names every file with its size and checksum and is written last; then the folder is renamed. A crash
leaves a `.partial` folder, which is never read and which the next save removes. This module alone knows the names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from gcore import faults
from gcore.observe.files import no_link
from gcore.types import FileEntry, UserError

MANIFEST, STATE, EXPORTS = "manifest.json", "state.json", "hf"
FORMAT = 4  # version of the checkpoint format
Kind = Literal["warm", "step"]
KINDS: tuple[Kind, ...] = ("warm", "step")  # in the order in which a run makes them


# ---- writing --------------------------------------------------------------------------------------------------------


def begin(folder: Path, step: int, need_bytes: int, kind: Kind = "step") -> Path:
    """An empty folder to write into. UserError if the disk is too full. `kind`: "warm" during the warm start."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (path for name in KINDS for path in folder.glob(f"{name}_*.partial")):
        remove(stale)
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        what = f"step {step}" if kind == "step" else f"warm start step {step}"
        last = complete_checkpoints(folder)[-1:]
        kept = f"the last complete checkpoint, {last[0].name}, is kept" if last else "no earlier checkpoint is there"
        raise UserError(
            f"{folder}: checkpoint of {what} needs {need_bytes / 2**20:.0f} MB, {free / 2**20:.0f} MB are free; {kept} "
            "(keys: run.dir, checkpoint.keep_last, checkpoint.memory_every)"
        )
    partial = folder / f"{kind}_{step}.partial"
    partial.mkdir()
    return partial


def write_file(path: Path, contents: Iterable[Any]) -> FileEntry:
    """Write a file to disk and read it again. The checksum is that of the bytes in memory. OSError if they differ."""
    faults.reach("file")
    digest, size = hashlib.sha256(), 0
    with open(path, "wb", buffering=0, opener=no_link) as file:
        for content in contents:
            view = memoryview(content).cast("B")
            digest.update(view)
            size += len(view)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # so that it is read from the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    entry = FileEntry(bytes=size, sha256=digest.hexdigest())
    if entry_of(path) != entry:
        raise OSError(f"{path} was written, but what is read from it differs")
    faults.reach("written", path)
    return entry


def entry_of(path: Path) -> FileEntry:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(bytes=file.tell(), sha256=digest)


def commit(
    partial: Path, files: Mapping[str, FileEntry], state: Mapping[str, Any], about: Mapping[str, Any] | None = None
) -> Path:
    """Make the folder a complete checkpoint. `files`: what all processes wrote. `about`: more for the manifest."""
    for name, entry in files.items():
        if not (partial / name).is_file() or (partial / name).stat().st_size != entry["bytes"]:
            raise UserError(
                f"{partial} lacks {name}, which another process wrote; expected a folder that the machines of all "
                "trainer ranks and controllers share (key: run.dir)"
            )
    state_entry = write_file(partial / STATE, [json.dumps(state, indent=1).encode()])
    for path in partial.rglob("*"):
        if path.is_dir():
            _to_disk(path)
    listed = dict(sorted({**files, STATE: state_entry}.items()))
    manifest: dict[str, Any] = {"format": FORMAT, **(about or {}), "files": listed}
    write_file(partial / MANIFEST, [_sealed(manifest).encode()])
    _to_disk(partial)
    final = partial.with_suffix("")
    if final.exists():
        set_aside(final)
    partial.rename(final)
    _to_disk(partial.parent)
    return final


def _sealed(manifest: Mapping[str, Any]) -> str:
    """The text of a manifest, which ends with a checksum of the rest."""
    text = json.dumps(manifest, indent=1)
    return json.dumps({**manifest, "sha256": hashlib.sha256(text.encode()).hexdigest()}, indent=1)


def set_aside(checkpoint: Path, suffix: str = "old") -> Path:
    """Rename step_N to step_N.old, so that `resume=auto` ignores it."""
    old = checkpoint.with_name(f"{checkpoint.name}.{suffix}")
    remove(old)
    return checkpoint.rename(old)


def remove(folder: Path) -> None:
    """Delete a folder, if it exists. Of a symbolic link, such as to a checkpoint that was moved to another disk, only
    the link."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


# ---- which remain ---------------------------------------------------------------------------------------------------


def retain(newest: Path, last: int, every: int = 0, best: int = 0) -> None:
    """Delete checkpoints, with their exports, except the `last` newest ones, the steps that are multiples of `every`,
    and the `best` ones by score. `newest` was just saved: it is kept, even if checkpoints of later steps are left from
    an earlier run."""
    checkpoints = complete_checkpoints(newest.parent)
    others = [path for path in checkpoints if path != newest]
    kept = {newest, *others[max(0, len(others) - last + 1) :]}
    if every:
        steps = [path for path in others if path.name.startswith("step")]
        kept |= {path for path in steps if position(path)[1] % every == 0}
    if best:
        scores = {path: read_manifest(path).get("score") for path in checkpoints}
        scored = [(score, position(path), path) for path, score in scores.items() if score is not None]
        kept |= {path for _, _, path in sorted(scored, reverse=True)[:best]}
    for old in checkpoints:
        if old in kept:
            continue
        # Without its manifest a folder is no checkpoint, so a kill in the middle leaves none that is damaged.
        if not old.is_symlink():
            (old / MANIFEST).unlink(missing_ok=True)
        remove(old)
        for export in (old.name, f"{old.name}-adapter"):
            remove(old.parent / EXPORTS / export)


# ---- reading --------------------------------------------------------------------------------------------------------


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    found = [p for name in KINDS for p in folder.glob(f"{name}_*") if p.name[5:].isdigit()]
    return sorted((p for p in found if (p / MANIFEST).is_file()), key=position)


def position(checkpoint: Path) -> tuple[int, int]:
    """Sort key in the order of a run: warm_100 < step_0 < step_50."""
    kind, _, number = checkpoint.name.partition("_")
    return [str(name) for name in KINDS].index(kind), int(number)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Empty if any byte of the manifest is damaged."""
    try:
        text = (checkpoint / MANIFEST).read_text()
        manifest: dict[str, Any] = json.loads(text)
        manifest.pop("sha256")
        return manifest if _sealed(manifest) == text else {}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def first_damaged_file(checkpoint: Path, part: int = 0, parts: int = 1) -> str | None:
    """The first file that differs from the manifest; None if there is none. `part`: check only this share of the files,
    because that takes long. UserError if the checkpoint has another format."""
    manifest = read_manifest(checkpoint)
    _check_format(checkpoint, manifest)
    if not manifest:
        return MANIFEST
    for name, entry in list(manifest["files"].items())[part::parts]:
        file = checkpoint / name
        try:
            same = file.stat().st_size == entry["bytes"] and entry_of(file) == entry
        except OSError:  # missing, or the disk cannot read it
            same = False
        if not same:
            return str(name)
    return None


def _check_format(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """UserError if the manifest was written by another version. Those of formats before 4 have no checksum."""
    try:
        found = manifest or json.loads((checkpoint / MANIFEST).read_text())
        known = found["format"] == FORMAT or (not manifest and "sha256" in found)
    except (OSError, ValueError, KeyError, TypeError):
        return
    if not known:
        raise UserError(
            f"{checkpoint} has checkpoint format {found['format']}; this version reads {FORMAT}: resume with the "
            "version that wrote it (key: run.resume)"
        )


def verify(checkpoint: Path) -> Path:
    """Check that every file has the size and checksum of the manifest. UserError if not."""
    if (name := first_damaged_file(checkpoint)) is not None:
        raise damage_error(checkpoint, name)
    return checkpoint


def damage_error(checkpoint: Path, name: str) -> UserError:
    return UserError(
        f"{checkpoint / name}: damaged or missing; use an older checkpoint, or run.resume=auto, which does (key: "
        "run.resume)"
    )


@contextlib.contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """UserError if the checkpoint is deleted in this block: a run that is training deletes old ones."""
    try:
        yield
    except Exception as error:
        if (checkpoint / MANIFEST).is_file():
            raise
        raise UserError(
            f"{checkpoint}: deleted while it was read, by a run that is training; read a newer one, or keep more "
            "(keys: checkpoint.keep_last, checkpoint.keep_every)"
        ) from error


def read_state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text())
    return state


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
