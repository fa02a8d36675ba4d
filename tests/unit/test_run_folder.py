"""The folder of a run: an older run is renamed, and the driver says so."""

from gcore.config import load_config
from gcore.controller.run_folder import open_folder
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
