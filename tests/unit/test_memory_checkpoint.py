"""Checkpoints in the memory of the machine: which folders exist, and which count."""

from __future__ import annotations

import shutil

import pytest

from gcore.checkpoint import memory, store
from gcore.types import UserError


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    memory.open_memory(folder)
    return folder


def save(folder, step):
    return store.commit(store.begin(folder, step, 0), {}, {"step": step})


def test_the_newest_checkpoint_of_both_places_is_last(run):
    for folder, step in ((run, 2), (run / memory.LINK, 3), (run / memory.LINK, 2)):
        save(folder, step)
    found = [(path.name, memory.is_in_memory(path)) for path in memory.complete_checkpoints(run)]
    assert found == [("step_2", True), ("step_2", False), ("step_3", True)]
    assert all(store.first_damaged_file(path) is None for path in memory.complete_checkpoints(run))
    memory.drop(run)
    assert [path.name for path in memory.complete_checkpoints(run)] == ["step_2"]


def test_a_run_that_is_opened_again_keeps_what_is_in_memory(run):
    save(run / memory.LINK, 3)
    memory.open_memory(run)
    assert [path.name for path in memory.complete_checkpoints(run)] == ["step_3"]
    memory.close_memory(run)
    assert not memory.complete_checkpoints(run) and not list(memory.SHARED_MEMORY.iterdir())


def test_a_machine_that_was_started_again_has_an_empty_memory(run):
    save(run / memory.LINK, 3)
    shutil.rmtree((run / memory.LINK).resolve())
    assert not memory.complete_checkpoints(run)
    memory.open_memory(run)
    assert save(run / memory.LINK, 1).is_dir()


def test_the_memory_of_a_deleted_run_is_freed_and_never_resumed(run):
    save(run / memory.LINK, 3)
    shutil.rmtree(run)
    run.mkdir()
    memory.open_memory(run)
    assert not memory.complete_checkpoints(run) and len(list(memory.SHARED_MEMORY.iterdir())) == 1


def test_the_memory_of_a_run_that_cannot_be_seen_is_kept(run):
    """As of a container that shares /dev/shm, but not the folders of runs."""
    save(run / memory.LINK, 3)
    held, other = (run / memory.LINK).resolve(), run.parents[1] / "elsewhere" / "tiny"
    run.parent.rename(run.parents[1] / "hidden")
    other.mkdir(parents=True)
    memory.open_memory(other)
    assert (held / "step_3").is_dir()


def test_a_folder_whose_owner_could_not_be_written_breaks_no_later_run(run):
    """As a full /dev/shm leaves it."""
    folder = memory.SHARED_MEMORY / f"{memory.PREFIX}full"
    folder.mkdir()
    (folder / memory.OWNER).touch()
    memory.open_memory(run)
    assert save(run / memory.LINK, 1).is_dir()


def test_the_memory_of_another_run_is_neither_used_nor_deleted(run):
    """As `cp -a` of a run's folder leaves it."""
    save(run / memory.LINK, 3)
    held, copy = (run / memory.LINK).resolve(), run.with_name("copy")
    shutil.copytree(run, copy, symlinks=True)
    assert memory.complete_checkpoints(copy) == []
    memory.drop(copy)
    memory.close_memory(copy)
    memory.open_memory(copy)
    save(copy / memory.LINK, 7)
    assert [path.name for path in held.iterdir() if path.is_dir()] == ["step_3"]
    assert [path.name for path in memory.complete_checkpoints(run)] == ["step_3"]
    assert [path.name for path in memory.complete_checkpoints(copy)] == ["step_7"]


@pytest.mark.parametrize("name", [f"{memory.PREFIX}link", "other"])
def test_only_folders_that_a_run_has_made_are_deleted(run, tmp_path, name):
    """A link in shared memory, and a folder of another name, both with an owner file that names this run."""
    given = tmp_path / "elsewhere"
    given.mkdir()
    (given / memory.OWNER).write_text(str(run / memory.LINK))
    memory.close_memory(run)
    target = memory.SHARED_MEMORY / name
    target.symlink_to(given) if name != "other" else shutil.copytree(given, target)
    (run / memory.LINK).symlink_to(target)
    memory.close_memory(run)
    assert (target / memory.OWNER).is_file() and (given / memory.OWNER).is_file()
    memory._delete_abandoned()
    assert (target / memory.OWNER).is_file() and (given / memory.OWNER).is_file()


def test_a_kill_before_the_owner_is_written(run):
    ((run / memory.LINK).resolve() / memory.OWNER).unlink()
    memory.open_memory(run)
    assert save(run / memory.LINK, 1).is_dir() and len(memory.complete_checkpoints(run)) == 1


def test_nodes_share_no_memory(run, monkeypatch):
    memory.check_memory(1)
    with pytest.raises(UserError, match=r"checkpoint.memory_every: got a run on 2 nodes"):
        memory.check_memory(2)
    monkeypatch.setattr(memory, "SHARED_MEMORY", run / "none")
    with pytest.raises(UserError, match=r"this machine has no .*none"):
        memory.check_memory(1)
