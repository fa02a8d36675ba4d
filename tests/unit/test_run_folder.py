"""The folder of a run: an older run is renamed, and the driver says so. Checkpoints that a restart loads."""

import contextlib
import errno
import os
import shutil
from pathlib import Path

import pytest

from gcore import __version__
from gcore.checkpoint import memory, store
from gcore.checkpoint.export import export, locate
from gcore.config.load import dump_config, load_config, parse_yaml
from gcore.config.run import Observe
from gcore.driver.heal import RestartBudget
from gcore.driver.run_folder import (
    WRITTEN,
    Restarts,
    check_resume,
    open_evaluation_folder,
    open_folder,
    write_private,
)
from gcore.launch.pins import pin
from gcore.launch.preflight import DatasetCheck, _disk, light_checks
from gcore.observe import trackers
from gcore.observe.events import EventLog
from gcore.observe.files import LineFile, keep_lines
from gcore.observe.logs import Log, Masks, trim
from gcore.observe.metrics import MetricsWriter
from gcore.observe.page import write_report
from gcore.observe.report import plot_reward
from gcore.observe.trace import Tracer, merge_traces
from gcore.training import bad_batches
from gcore.types import UserError
from tests.e2e.helpers import write_recipe
from tests.unit.test_full_disk import no_file_above


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


# ---- symbolic links -------------------------------------------------------------------------------------------------


def elsewhere(tmp_path: Path) -> Path:
    """A folder of the user, with a checkpoint in it."""
    found = tmp_path / "elsewhere"
    checkpoint(found, 5)
    (found / "precious").write_text("text")
    return found


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("resume", ["never", "auto"])
@pytest.mark.parametrize("every", [0, 1])
def test_a_link_in_the_place_of_the_memory_is_never_followed(tmp_path, resume, every):
    """`ln -s /somewhere runs/demo/memory`: nothing is deleted there, or read as a checkpoint."""
    more = ["run.name=demo", f"run.resume={resume}", f"checkpoint.memory_every={every}"]
    config = load_config(write_recipe(tmp_path), more)
    given, folder = elsewhere(tmp_path), config.run.folder
    before = contents(given)
    folder.mkdir(parents=True)
    checkpoint(folder, 1)
    (folder / memory.LINK).symlink_to(given)
    assert memory.complete_checkpoints(folder) == [folder / "step_1"]
    if every and resume == "auto":
        with pytest.raises(UserError, match=r"memory: got a link to .*elsewhere.*move it away"):
            open_folder(config)
    else:
        open_folder(config)
    memory.drop(folder)
    memory.close_memory(folder)
    assert contents(given) == before
    aside = folder.with_name("demo.1") if resume == "never" else folder
    assert (aside / memory.LINK).is_symlink()


@pytest.mark.parametrize("name", [*WRITTEN, "logs/engine-0.log", "samples/controller-0.jsonl"])
def test_a_run_writes_through_no_link(tmp_path, name):
    config = load_config(write_recipe(tmp_path), ["run.name=demo", "run.resume=auto"])
    given, link = elsewhere(tmp_path), config.run.folder / name
    checkpoint(config.run.folder, 1)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(given / "precious" if "." in name else given)
    with pytest.raises(UserError, match=rf"{name}: got a symbolic link to .*elsewhere.*remove the link"):
        open_folder(config)
    assert (given / "precious").read_text() == "text"


@pytest.mark.parametrize("name", ["eval", "eval/start", "eval/step_1", "eval/step_1/logs/engine-0.log"])
def test_an_evaluation_writes_through_no_link(tmp_path, name):
    """Its logs would be appended to, and its config.yaml would replace another one."""
    config = load_config(write_recipe(tmp_path), ["run.name=demo", "run.resume=runs/demo/step_1"])
    given, link = elsewhere(tmp_path), config.run.folder / name
    before = contents(given)
    link.parent.mkdir(parents=True)
    link.symlink_to(given / "precious" if "." in name else given)
    with pytest.raises(UserError, match=rf"{name}: got a symbolic link to .*elsewhere.*remove the link"):
        open_evaluation_folder(config)
    assert contents(given) == before and (given / "precious").read_text() == "text"


@pytest.mark.parametrize(("content", "message"), [(None, "got a folder"), ("a: [", "not valid YAML"), ("x", "got str")])
def test_a_damaged_configuration_of_a_run_that_is_continued_is_named(tmp_path, content, message):
    config = load_config(write_recipe(tmp_path), ["run.name=demo", "run.resume=auto"])
    file = config.run.folder / "config.yaml"
    file.parent.mkdir(parents=True)
    file.mkdir() if content is None else file.write_text(content)
    with pytest.raises(UserError, match=rf"demo/config\.yaml: {message}"):
        pin(config)


def test_a_full_disk_at_the_start_is_named(tmp_path, monkeypatch):
    config = load_config(write_recipe(tmp_path), ["run.name=demo"])
    with no_file_above(0), pytest.raises(UserError, match=r"runs/demo: cannot write to it: File too large"):
        open_folder(config)
    assert not list(config.run.folder.iterdir())
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path / "shm")
    config = load_config(write_recipe(tmp_path), ["run.name=other", "checkpoint.memory_every=1"])
    with pytest.raises(UserError, match=r"checkpoint\.memory_every: .*shm: cannot write to it: No such file"):
        open_folder(config)


def test_an_evaluation_that_cannot_write_says_so(tmp_path):
    config = load_config(write_recipe(tmp_path), ["run.name=demo"])
    config.run.folder.mkdir(parents=True)
    (config.run.folder / "eval").write_text("")
    with pytest.raises(UserError, match=r"eval/start: cannot write to it: Not a directory"):
        open_evaluation_folder(config)


def write_everything(folder: Path) -> None:
    """What a run writes after its start; an error of one file leaves the others."""
    metrics = MetricsWriter(folder, Observe(trackers=[]), "run", {})
    metrics.log({"step": 1, "reward/mean": 0.5})
    tracer = Tracer(folder, "engine-0")
    with tracer.span("generation"):
        pass
    tracer.flush()
    EventLog(folder).add("died", role="engine-0")
    with contextlib.suppress(OSError):
        keep_lines(folder / "samples" / "controller-0.jsonl", lambda row: False)
    with contextlib.suppress(OSError):
        Log(folder / "logs" / "engine-0.log").close()
    with contextlib.suppress(OSError):
        trim(folder / "logs" / "engine-1.log", 10)
    Masks(folder / "logs").poll()
    trackers._keep_id(folder, "wandb", "an id")
    merge_traces(folder)
    plot_reward(folder)
    write_report(folder)
    bad_batches.dump(folder, (1, 0, 0), [], {})
    with contextlib.suppress(OSError):
        store.write_file(folder / "step_1.partial" / "state.json", [b"state"])


def test_what_is_written_follows_no_link_that_comes_later(tmp_path):
    """Links in the place of all files that a run writes, put there after the check of its start."""
    folder, text = tmp_path / "runs" / "demo", "password sk-proj-abcdefghijklmnopqrstuvwxyz\n" * 9
    write_everything(folder)
    assert {"report.html", "trace.json", "reward.png"} <= contents(folder)
    own = str(os.getpid())
    files = [name for name in contents(folder) if (folder / name).is_file()]
    files += ["trace/engine-0.jsonl", "logs/engine-1.log", "samples/controller-0.jsonl", "step_1.partial/state.json"]
    files += [f"{name}.{own}.tmp" for name in files]
    for name in files:
        given, link = tmp_path / name.replace("/", "_"), folder / name
        given.write_text(text)
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(given)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')  # there is something to draw
    write_everything(folder)
    changed = [name for name in files if (tmp_path / name.replace("/", "_")).read_text() != text]
    assert changed == []
    assert len(files) > 20


@pytest.mark.parametrize("name", ["logs", "samples", "trace", "step_1.partial"])
def test_nothing_is_written_in_a_folder_that_becomes_a_link(tmp_path, name):
    folder, given = tmp_path / "runs" / "demo", elsewhere(tmp_path)
    write_everything(folder)
    before = contents(given)
    store.remove(folder / name)
    (folder / name).symlink_to(given)
    write_everything(folder)
    LineFile(folder / "samples" / "controller-0.jsonl").append(["{}"])
    assert contents(given) == before and (given / "precious").read_text() == "text"


def test_the_folder_of_a_run_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "demo").symlink_to(tmp_path / "disk")
    write_private(tmp_path / "demo" / "config.yaml", "")
    write_everything(tmp_path / "demo")
    assert {"metrics.jsonl", "events.jsonl", "trace/engine-0.jsonl"} <= contents(tmp_path / "disk")


def test_other_names_of_a_file_keep_their_content(tmp_path):
    """`cp -al runs/demo runs/backup`, and the run is resumed."""
    folder, backup = tmp_path / "runs" / "demo", tmp_path / "runs" / "backup"
    write_everything(folder)
    Log(folder / "logs" / "engine-0.log").close()
    lines = ["metrics.jsonl", "events.jsonl", "trace/engine-0.jsonl", "samples/controller-0.jsonl"]
    (folder / "samples").mkdir()
    (folder / lines[-1]).write_text("{}\n")
    shutil.copytree(folder, backup, copy_function=os.link)
    before = {path: path.read_bytes() for path in backup.rglob("*") if path.is_file()}
    write_everything(folder)
    assert {path: path.read_bytes() for path in before} == before
    assert (folder / "metrics.jsonl").read_bytes() == 2 * (backup / "metrics.jsonl").read_bytes()
    assert all((folder / name).stat().st_nlink == 1 for name in lines)


def test_the_check_of_the_disk_writes_to_no_file_of_the_user(tmp_path):
    config = load_config(write_recipe(tmp_path), ["run.name=demo"])
    given = elsewhere(tmp_path) / "precious"
    config.run.folder.parent.mkdir()
    (config.run.folder.parent / ".writable").symlink_to(given)
    _disk(config)
    assert given.read_text() == "text" and [path.name for path in Path(config.run.dir).iterdir()] == [".writable"]
    with no_file_above(0), pytest.raises(UserError, match=r"run\.dir=.*: cannot write to it: File too large"):
        _disk(config)


def test_links_of_the_user_are_no_problem(tmp_path):
    config = load_config(write_recipe(tmp_path), ["run.name=demo", "run.resume=auto"])
    checkpoint(config.run.folder, 1)
    (config.run.folder / "latest").symlink_to("step_1")
    (config.run.folder / "notes").symlink_to(elsewhere(tmp_path))
    open_folder(config)


def test_of_a_linked_checkpoint_only_the_link_is_deleted(tmp_path):
    """A checkpoint that was moved to another disk."""
    given, folder = elsewhere(tmp_path), tmp_path / "runs" / "demo"
    before = contents(given)
    folder.mkdir(parents=True)
    (folder / "step_5").symlink_to(given / "step_5")
    (folder / "step_6.partial").symlink_to(given)
    store.retain(checkpoint(folder, 7), last=1)
    assert [path.name for path in folder.iterdir()] == ["step_7"] and contents(given) == before
    (folder / "step_5").symlink_to(given / "step_5")
    (folder / "step_5.damaged").symlink_to(given)
    store.set_aside(folder / "step_5", "damaged")
    assert sorted(path.name for path in folder.iterdir()) == ["step_5.damaged", "step_7"] and contents(given) == before


def test_of_a_linked_run_only_the_link_is_renamed(tmp_path):
    config = load_config(write_recipe(tmp_path), ["run.name=demo"])
    given = elsewhere(tmp_path)
    before = contents(given)
    config.run.folder.parent.mkdir()
    config.run.folder.symlink_to(given)
    open_folder(config)
    assert contents(given) == before and config.run.folder.with_name("demo.1").is_symlink()
    assert not config.run.folder.is_symlink()


def test_the_configuration_is_private_and_replaces_a_link(tmp_path):
    (tmp_path / "config.yaml").symlink_to(tmp_path / "other")
    (tmp_path / "other").write_text("text")
    write_private(tmp_path / "config.yaml", "new")
    assert (tmp_path / "config.yaml").read_text() == "new" and (tmp_path / "other").read_text() == "text"
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "other"]


# ---- what a resume refuses ------------------------------------------------------------------------------------------

TRAIN, SHORTER, OTHER = (
    DatasetCheck("data.train", rows, rows, (), 5, None, digest)
    for rows, digest in ((80, "digest"), (50, "x"), (80, "x"))
)


def saved(made_by, **changes) -> Path:
    state = {"config": parse_yaml(dump_config(made_by)), "version": __version__, "rows": 80, "sampled": "digest"}
    state = {name: value for name, value in {**state, **changes}.items() if value is not None}
    return store.commit(store.begin(made_by.run.folder, 4, 0), {}, state)


@pytest.mark.parametrize(
    ("override", "train", "state", "message"),
    [
        ("run.seed=9", TRAIN, {}, "run.seed: 3 -> 9"),
        ("model.build.layers=1", TRAIN, {}, "model.build.layers: 2 -> 1"),
        (
            "run.steps=9",
            DatasetCheck("data.train", 50, 50, (), 5, None, "x"),
            {},
            "data.train now has 50 rows, before 80",
        ),
        ("run.steps=9", OTHER, {}, "data.train: the content"),
        ("run.steps=9", TRAIN, {"version": "0.1"}, "the version of G-Core: 0.1 -> "),
    ],
)
@pytest.mark.parametrize("resume", ["auto", "step"])
def test_a_changed_run_is_refused_before_anything_is_written(tmp_path, override, train, state, message, resume):
    first = load_config(write_recipe(tmp_path), ["run.name=demo"])
    made = saved(first, **state)
    resume = "auto" if resume == "auto" else str(made)
    config = load_config(write_recipe(tmp_path), ["run.name=demo", f"run.resume={resume}", override])
    with pytest.raises(UserError, match=rf"step_4 was made by a run that differs: {message}.*run\.resume_anyway=true"):
        check_resume(config, train)
    check_resume(load_config(write_recipe(tmp_path), ["run.name=demo", override]), train)  # a new run
    anyway = [f"run.resume={resume}", "run.resume_anyway=true", override]
    check_resume(load_config(write_recipe(tmp_path), ["run.name=demo", *anyway]), train)


def test_an_unchanged_run_is_resumed(tmp_path):
    """Also from checkpoints of earlier versions of this code: with secrets, and without a digest of a sample."""
    secret = "rewards.functions.0.args.openai_key=hush-hush"
    config = load_config(write_recipe(tmp_path), ["run.name=demo", "run.resume=auto", secret])
    saved(config)
    check_resume(config, TRAIN)
    saved(config, config=config.model_dump(mode="json"), sampled=None, rows=None)
    check_resume(config, TRAIN)


# ---- a folder that another run is writing ---------------------------------------------------------------------------


def test_an_evaluation_writes_into_a_folder_of_its_own(tmp_path):
    config = load_config(write_recipe(tmp_path), ["run.name=demo"])
    assert open_evaluation_folder(config).run.folder == config.run.folder and not config.run.folder.exists()
    made = checkpoint(config.run.folder, 4)
    config = load_config(write_recipe(tmp_path), ["run.name=demo", f"run.resume={made}"])
    found = open_evaluation_folder(config)
    assert found.run.folder == config.run.folder / "eval" / "step_4" and found.run.resume == str(made)
    assert sorted(path.name for path in config.run.folder.iterdir()) == ["eval", "step_4"]


def test_files_of_another_user_are_one_line(tmp_path, monkeypatch):
    """config.yaml is private. Tests may run as root, who can read everything."""
    config = load_config(write_recipe(tmp_path), ["run.name=demo"])
    made = checkpoint(open_folder(config), 4)
    config = load_config(write_recipe(tmp_path), ["run.name=demo", f"run.resume={made}"])
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert pin(config) == config  # without the commits of the other run
    found = open_evaluation_folder(config)
    assert found.run.folder == config.run.folder and not found.observe.logs
    read = Path.read_text

    def private(path: Path) -> str:
        if path.name == "config.yaml":
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_text", private)
    with pytest.raises(UserError, match=r"config\.yaml: cannot be read: Permission denied"):
        export(config.run.folder, tmp_path / "out")


def test_a_checkpoint_that_a_run_deletes_while_it_is_read(tmp_path, monkeypatch):
    run = tmp_path / "demo"
    old, damage = checkpoint(run, 4), store.first_damaged_file

    def deleted(path):
        if path == old:
            checkpoint(run, 5)
            store.remove(old)
        return damage(path)

    monkeypatch.setattr(store, "first_damaged_file", deleted)
    assert locate(run) == (run, run / "step_5")  # the newer one is used
    monkeypatch.setattr(store, "first_damaged_file", damage)
    with pytest.raises(UserError, match=r"step_5: deleted while it was read.*keep_last"), store.reading(run / "step_5"):
        store.remove(run / "step_5")
        (run / "step_5" / "weights").read_text()
    with pytest.raises(FileNotFoundError), store.reading(checkpoint(run, 6)):
        (run / "none").read_text()


def test_an_export_of_a_checkpoint_that_is_deleted_is_one_line(tmp_path, monkeypatch):
    config = load_config(write_recipe(tmp_path), ["run.name=demo"])
    made = checkpoint(open_folder(config), 4)
    monkeypatch.setattr("gcore.models.networks.make_empty", lambda *_, **__: store.remove(made))
    with pytest.raises(UserError, match="step_4: deleted while it was read"):
        export(config.run.folder, tmp_path / "out")


def test_what_a_run_has_not_saved_must_be_given(tmp_path):
    secrets = ["rewards.functions.0.args.openai_key=hush-hush", "data.train.args.hf_token=hush-hush"]
    secrets.append("checkpoint.copy_to=memory://key:hush@bucket")
    path = open_folder(load_config(write_recipe(tmp_path), ["run.name=demo", *secrets])) / "config.yaml"
    assert "hush" not in path.read_text()
    with pytest.raises(UserError, match=r"expected the value of rewards\.functions\.0\.args\.openai_key \(on the"):
        light_checks(load_config(path), None, trains=False)
    with pytest.raises(UserError, match=r"expected the value of data\.train\.args\.hf_token \(on the"):
        light_checks(load_config(path, [secrets[0], secrets[2]]), None)
