"""The folder of a run: an older run is renamed, and the driver says so. Checkpoints that a restart loads."""

from pathlib import Path

import pytest

from gcore.checkpoint import store
from gcore.config import load_config
from gcore.controller.heal import RestartBudget
from gcore.controller.run_folder import Restarts, open_folder
from tests.e2e.helpers import write_recipe


def test_an_older_run_is_renamed_with_a_note(tmp_path, capsys):
    config = load_config(write_recipe(tmp_path), [])
    folder = open_folder(config)
    (folder / "metrics.jsonl").write_text("{}\n")
    assert capsys.readouterr().out == ""
    for number in (1, 2):
        assert open_folder(config) == folder and [path.name for path in folder.iterdir()] == ["config.yaml"]
        assert capsys.readouterr().out == f"{folder} existed; it was renamed to {folder}.{number}\n"
    assert (folder.with_name(f"{folder.name}.1") / "metrics.jsonl").is_file()
    open_folder(load_config(write_recipe(tmp_path), ["observe.progress=none"]))
    assert capsys.readouterr().out == ""


def checkpoint(folder: Path, step: int) -> Path:
    return store.commit(store.begin(folder, step, 0), {}, {}, {"kind": "step", "step": step})


@pytest.mark.parametrize("other", [2, 9])
@pytest.mark.parametrize("same_folder", [True, False])
def test_a_rollback_does_not_load_checkpoints_of_an_older_run(tmp_path, other, same_folder):
    """The run starts from a given checkpoint, and one of its processes dies before the later ones are renamed."""
    config = load_config(write_recipe(tmp_path), ["run.name=demo"])
    start = checkpoint(config.run.folder if same_folder else tmp_path / "other", 4)
    checkpoint(config.run.folder, other)
    config = load_config(write_recipe(tmp_path), ["run.name=demo", f"run.resume={start}"])
    restarts = Restarts(config, RestartBudget(1))
    assert restarts.from_last_checkpoint(config) == config
    if other > 4:
        store.set_aside(config.run.folder / f"step_{other}")  # as the resumed run does
        assert restarts.from_last_checkpoint(config) == config
    checkpoint(config.run.folder, 9)
    assert restarts.from_last_checkpoint(config).run.resume == "auto"


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_rollback_loads_the_last_checkpoint(tmp_path, resume):
    config = load_config(write_recipe(tmp_path), ["run.name=demo", f"run.resume={resume}"])
    restarts = Restarts(config, RestartBudget(1))
    assert restarts.from_last_checkpoint(config) == config
    checkpoint(open_folder(config), 2)
    assert restarts.from_last_checkpoint(config).run.resume == "auto"
