"""The folder of a run: `run.dir/run.name`, created by the driver before any process starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from gcore.checkpoint import memory
from gcore.checkpoint.remote import Remote
from gcore.config import Config, dump_config


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
