"""The folders of checkpoints: `step_N/`, and `warm_N/` during the warm start. Each is complete or does not exist.

    begin -> step_N.partial/ ... files ... -> state.json -> manifest.json (sizes, checksums) -> rename to step_N/

The manifest is written last, and then the folder is renamed, so a folder named `step_N` is always complete. A crash
leaves a `.partial` folder, which is never read and which the next save removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

from gcore.types import UserError

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT = 3  # version of the checkpoint format
Kind = Literal["warm", "step"]
KINDS: tuple[Kind, ...] = ("warm", "step")  # in the order in which a run makes them


def begin(folder: Path, step: int, need_bytes: int, kind: Kind = "step") -> Path:
    """An empty folder to write into. UserError if the disk is too full. `kind`: "warm" during the warm start."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (path for name in KINDS for path in folder.glob(f"{name}_*.partial")):
        shutil.rmtree(stale, ignore_errors=True)
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        what = f"step {step}" if kind == "step" else f"warm start step {step}"
        raise UserError(
            f"{folder}: checkpoint of {what} needs {need_bytes / 2**20:.0f} MB, {free / 2**20:.0f} MB are free; "
            "the last complete checkpoint is kept (keys: run.dir, checkpoint.keep)"
        )
    partial = folder / f"{kind}_{step}.partial"
    partial.mkdir()
    return partial


def commit(partial: Path, state: dict[str, Any], keep: int) -> Path:
    """Make the folder a complete checkpoint. Only the newest `keep` remain; this one always does, even if checkpoints
    of later steps are left from an earlier run."""
    (partial / STATE).write_text(json.dumps(state, indent=1))
    for path in partial.rglob("*"):
        _to_disk(path)
    found = sorted(path for path in partial.rglob("*") if path.is_file())
    files = {f.relative_to(partial).as_posix(): {"bytes": f.stat().st_size, "sha256": _checksum(f)} for f in found}
    (partial / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
    _to_disk(partial / MANIFEST)
    _to_disk(partial)
    final = partial.with_suffix("")
    if final.exists():
        set_aside(final)
    partial.rename(final)
    _to_disk(partial.parent)
    others = [p for p in complete(partial.parent) if p != final]
    for old in others[: max(0, len(others) - keep + 1)]:
        shutil.rmtree(old)
    return final


def set_aside(checkpoint: Path) -> None:
    """Rename step_N to step_N.old, so that `resume=auto` ignores it."""
    old = checkpoint.with_name(checkpoint.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    checkpoint.rename(old)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    found = [p for name in KINDS for p in folder.glob(f"{name}_*") if p.name[5:].isdigit()]
    return sorted((p for p in found if (p / MANIFEST).is_file()), key=position)


def position(checkpoint: Path) -> tuple[int, int]:
    """Sort key in the order of a run: warm_100 < step_0 < step_50."""
    kind, _, number = checkpoint.name.partition("_")
    return [str(name) for name in KINDS].index(kind), int(number)


def find(resume: str, folder: Path) -> Path | None:
    """The checkpoint that `run.resume` selects, verified; None: start from the beginning."""
    if resume == "never":
        return None
    if resume == "auto":
        found = complete(folder)
        return verify(found[-1]) if found else None
    path = Path(resume)
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"run.resume={resume}: no complete checkpoint there (expected `auto`, `never` or a folder step_N or warm_N)"
        )
    return verify(path)


def verify(checkpoint: Path) -> Path:
    """Check that every file has the size and checksum of the manifest. UserError if not."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        files = manifest["files"]
    except (ValueError, KeyError):
        manifest, files = {"format": FORMAT}, {MANIFEST: {"bytes": -1}}
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{checkpoint} has checkpoint format {manifest.get('format')}; this version reads {FORMAT}: resume with "
            "the version that wrote it (key: run.resume)"
        )
    for name, entry in files.items():
        file = checkpoint / name
        if not file.is_file() or file.stat().st_size != entry["bytes"] or _checksum(file) != entry["sha256"]:
            raise UserError(
                f"{file}: damaged or missing; remove {checkpoint} to resume from an older one (key: run.resume)"
            )
    return checkpoint


def read_state(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text())
    return state


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
