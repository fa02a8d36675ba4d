"""Copies of checkpoints at a URL that fsspec can open (`s3://`, `gs://`, ...), for machines whose disks do not last.

    step_N/ on disk, complete ──copy_out──> URL/NAME/step_N/: all files, then the manifest
    an empty run folder       <──fetch────  the newest copy that has a manifest; renamed when all files are there

An object store has no atomic rename. So the manifest decides here too: it is written last and deleted first, and a copy
without it does not count. Checksums are verified after a fetch, like those of any checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gcore.checkpoint import store
from gcore.types import UserError

KEY = "checkpoint.copy_to"


class Remote:
    """The copies of one run. Remote("s3://bucket/runs", "quickstart")"""

    def __init__(self, url: str, run_name: str) -> None:
        import fsspec

        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"{KEY}={url}: cannot be opened: {error}; expected a URL that fsspec knows") from None
        self._root = f"{root.rstrip('/')}/{run_name}"

    def check(self) -> None:
        """UserError if nothing can be written there."""
        probe = f"{self._root}/.gcore"
        try:
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(probe, b"")
            self._files.rm_file(probe)
        except Exception as error:  # every driver has its own
            raise UserError(f"{KEY}={self._root}: cannot write there: {type(error).__name__}: {error}") from None

    def copy_out(self, checkpoint: Path) -> None:
        """Copy a complete checkpoint, then delete the copies of those that are no longer in its folder."""
        target = f"{self._root}/{checkpoint.name}"
        self._delete(target)
        names = [str(path.relative_to(checkpoint)) for path in sorted(checkpoint.rglob("*")) if path.is_file()]
        for name in [name for name in names if name != store.MANIFEST] + [store.MANIFEST]:
            self._files.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(checkpoint / name), f"{target}/{name}")
        kept = {path.name for path in store.complete_checkpoints(checkpoint.parent)}
        for name in self._all_names():  # also of copies that a kill has left incomplete
            if name not in kept:
                self._delete(f"{self._root}/{name}")

    def names(self) -> list[str]:
        """Of the complete copies, oldest first."""
        found = [name for name in self._all_names() if self._files.exists(f"{self._root}/{name}/{store.MANIFEST}")]
        return sorted(found, key=lambda name: store.position(Path(name)))

    def _all_names(self) -> list[str]:
        if not self._files.exists(self._root):
            return []
        found = [Path(str(path)).name for path in self._files.ls(self._root, detail=False)]
        return [name for name in found if name[:5] in ("step_", "warm_") and name[5:].isdigit()]

    def fetch(self, folder: Path) -> Path | None:
        """Bring the newest copy into the run folder, if it is newer than the checkpoints there. None: nothing to do."""
        names, have = self.names(), store.complete_checkpoints(folder)
        if not names or (have and store.position(have[-1]) >= store.position(Path(names[-1]))):
            return None
        partial = folder / f"{names[-1]}.partial"
        store.remove(partial)
        partial.mkdir(parents=True)
        source = f"{self._root}/{names[-1]}"
        for path in self._files.find(source):
            name = str(path).partition(f"{source.lstrip('/')}/")[2]
            if not name or ".." in Path(name).parts:  # it would be written beside the checkpoint
                raise UserError(f"{KEY}: got a file {path} there; expected only files of checkpoints")
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(path, str(partial / name))
        store.remove(folder / names[-1])  # the rest of one that a kill has left without a manifest
        return partial.rename(folder / names[-1])

    def _delete(self, copy: str) -> None:
        manifest: Any = f"{copy}/{store.MANIFEST}"
        if self._files.exists(manifest):
            self._files.rm_file(manifest)
        if self._files.exists(copy):
            self._files.rm(copy, recursive=True)
