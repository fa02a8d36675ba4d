"""The folder of a run: `run.dir/run.name`, created by the driver before any process starts. Which of its checkpoints a
restart loads, and whether the run may continue from it. The caller holds the lock of the folder (run_lock.py)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gcore import __version__
from gcore.checkpoint import memory, store
from gcore.checkpoint.remote import Remote
from gcore.config.load import dump_config, parse_yaml
from gcore.config.resume import changes, refusal
from gcore.config.secrets import hide
from gcore.config.tree import Config
from gcore.driver.heal import RestartBudget
from gcore.launch.preflight import DatasetCheck
from gcore.types import UserError, writing

WRITTEN = (  # by a run, beside checkpoints
    *("config.yaml", "metrics.jsonl", "events.jsonl", "placement.jsonl", "trackers.json"),
    *("trace.json", "report.html", "samples.html", "reward.png", "tensorboard", "tensorboard/warm_start"),
    *("trace", "logs", "samples", "bad_batches", "latents", "media", "hf", "eval", "saving"),
)


def say(config: Config, line: str) -> None:
    """On the terminal, before there is a progress view."""
    if config.observe.progress != "none":
        print(line, flush=True)


def open_folder(config: Config) -> Path:
    """Create the run's folder. An older run of the same name is renamed, never overwritten. A newer copy at a URL is
    fetched: here and not after a rollback, when copies of later steps are those of an older run."""
    folder = config.run.folder
    is_new = config.run.resume == "never" or (config.run.resume == "auto" and not memory.complete_checkpoints(folder))
    if is_new and os.path.lexists(folder):
        memory.close_memory(folder)
        say(config, f"{folder} existed; it was renamed to {set_aside(folder)}")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    refuse_links(folder)
    if config.checkpoint.memory_every:
        memory.open_memory(folder)
    if config.run.resume == "auto" and (url := config.checkpoint.copy_to) is not None:
        say(config, f"looking for checkpoints at {hide(url)}")
        if (fetched := Remote(url, config.run.name).fetch(folder)) is not None:
            say(config, f"fetched {fetched.name} from {hide(url)}")
    with writing(folder):
        write_private(folder / "config.yaml", dump_config(config))
    return folder


def open_evaluation_folder(config: Config) -> Config:
    """An evaluation of a run writes to `eval/step_N` in its folder, where it disturbs neither training nor evaluations
    of other checkpoints. Without a run, or in the folder of another user, there is no log."""
    run = config.run
    can_write = run.folder.is_dir() and os.access(run.folder, os.W_OK)
    config = config.changed("observe", trace=False, logs=config.observe.logs and can_write)
    if not can_write:
        return config
    name = "start" if run.resume in ("auto", "never") else Path(run.resume).name
    refuse_links(run.folder, ["eval"])
    config = config.changed("run", dir=str(run.folder / "eval"), name=name)
    with writing(config.run.folder):
        config.run.folder.mkdir(parents=True, exist_ok=True)
        write_private(config.run.folder / "config.yaml", dump_config(config))
    return config


def set_aside(folder: Path) -> Path:
    """Rename the folder of an older run; of a symbolic link only the link. Returns its new path."""
    number = 1
    while os.path.lexists(aside := folder.with_name(f"{folder.name}.{number}")):
        number += 1
    try:
        return folder.rename(aside)
    except OSError as error:  # a mount point, ...
        raise UserError(f"run.dir: cannot rename {folder} to {aside}: {error.strerror or error}") from None


def refuse_links(folder: Path, written: Sequence[str] = WRITTEN) -> None:
    """UserError if a file or folder that a run writes is a symbolic link: to append, to cut back or to delete would
    change what it points to. Of TensorBoard each run makes new files, so that others may be linked there."""
    for name in written:
        path = folder / name
        walked = not name.startswith("tensorboard") and path.is_dir() and not path.is_symlink()
        inside = path.rglob("*") if walked else ()
        for link in (one for one in (path, *inside) if one.is_symlink()):
            raise UserError(
                f"{link}: got a symbolic link to {os.readlink(link)}; expected a file or folder of this run, which "
                "writes there: remove the link, or choose another folder (keys: run.dir, run.name)"
            )


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only its owner can read. A link is replaced, not followed."""
    descriptor, temp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temp, path)
    except OSError:
        os.unlink(temp)
        raise


def check_resume(config: Config, train: DatasetCheck) -> None:
    """UserError if the run would continue one that differs: before any process starts, and before its config.yaml is
    overwritten. `train`: what was read of data.train; the controllers compare all prompts, and look for damage."""
    resume = config.run.resume
    saved = memory.candidates(resume, config.run.folder)
    if not saved or config.run.resume_anyway:
        return
    try:
        state = store.read_state(saved[0])
        before, version = state["config"], state["version"]
    except (OSError, ValueError, KeyError):
        return
    listed = changes(before, parse_yaml(dump_config(config)))
    if "sampled" in state and train.num_rows != state["rows"]:
        listed.append(f"data.train now has {train.num_rows} rows, before {state['rows']}")
    elif "sampled" in state and train.digest != state["sampled"]:
        listed.append("data.train: the content of the prompts, answers or columns")
    if version != __version__:
        listed.append(f"the version of G-Core: {version} -> {__version__}")
    if listed:
        raise refusal(saved[0], listed)


class Restarts:
    """Restarts of a run that has been opened. A run that starts from a given checkpoint may find others in its folder,
    older or newer, which are not its own: a restart loads none of them."""

    def __init__(self, config: Config, budget: RestartBudget) -> None:
        self.budget = budget
        given = config.run.resume not in ("auto", "never")
        self._others = set(map(_identity, memory.complete_checkpoints(config.run.folder))) if given else set()

    def from_last_checkpoint(self, config: Config) -> Config:
        """The configuration of a restart. Without a checkpoint of its own, the run starts as it did."""
        if all(_identity(saved) in self._others for saved in memory.complete_checkpoints(config.run.folder)):
            return config
        return config.changed("run", resume="auto")


def _identity(checkpoint: Path) -> tuple[Path, int]:
    """A run that makes a step again makes another checkpoint of the same name."""
    try:
        return checkpoint, (checkpoint / store.MANIFEST).stat().st_mtime_ns
    except OSError:  # the run deletes it at this moment: it is its own
        return checkpoint, 0
