"""The folder of a run: `run.dir/run.name`, created by the driver before any process starts. Which of its checkpoints a
restart loads."""

from __future__ import annotations

import shutil
from pathlib import Path

from gcore.checkpoint import memory, store
from gcore.checkpoint.remote import Remote
from gcore.config import Config, dump_config
from gcore.controller.heal import RestartBudget


def open_folder(config: Config) -> Path:
    """Create the run's folder. An older run of the same name is renamed, never overwritten. A newer copy at a URL is
    fetched: here and not after a rollback, when copies of later steps are those of an older run."""
    folder = config.run.folder
    is_new = config.run.resume == "never" or (config.run.resume == "auto" and not memory.complete(folder))
    if is_new and folder.exists():
        memory.close_memory(folder)
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        shutil.move(folder, aside)
        if config.observe.progress != "none":
            print(f"{folder} existed; it was renamed to {aside}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))
    if config.checkpoint.memory_every:
        memory.open_memory(folder)
    if config.run.resume == "auto" and (url := config.checkpoint.copy_to) is not None:
        print(f"looking for checkpoints at {url}", flush=True)
        if (fetched := Remote(url, config.run.name).fetch(folder)) is not None:
            print(f"fetched {fetched.name} from {url}", flush=True)
    return folder


class Restarts:
    """Restarts of a run that has been opened. A run that starts from a given checkpoint may find others in its folder,
    older or newer, which are not its own: a restart loads none of them."""

    def __init__(self, config: Config, budget: RestartBudget) -> None:
        self.budget = budget
        given = config.run.resume not in ("auto", "never")
        self._others = set(map(_identity, memory.complete(config.run.folder))) if given else set()

    def from_last_checkpoint(self, config: Config) -> Config:
        """The configuration of a restart. Without a checkpoint of its own, the run starts as it did."""
        if all(_identity(found) in self._others for found in memory.complete(config.run.folder)):
            return config
        return config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})})


def _identity(checkpoint: Path) -> tuple[Path, int]:
    """A run that makes a step again makes another checkpoint of the same name."""
    try:
        return checkpoint, (checkpoint / store.MANIFEST).stat().st_mtime_ns
    except OSError:  # the run deletes it at this moment: it is its own
        return checkpoint, 0
