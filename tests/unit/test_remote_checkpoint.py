"""Copies of checkpoints at a URL: complete or not there, fetched if newer, deleted with their originals."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from gcore.checkpoint import store
from gcore.checkpoint.remote import Remote
from gcore.config.load import load_config
from gcore.controller.checkpointing import Checkpointer
from gcore.driver import supervise
from gcore.driver.heal import RestartBudget
from gcore.driver.run_folder import Restarts
from gcore.protocols import Rendezvous
from gcore.runtime.local import Hub, LocalGroup
from gcore.types import UserError
from tests.e2e.helpers import write_recipe


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    if request.param == "memory":
        files = fsspec.filesystem("memory")
        files.rm("/copies", recursive=True) if files.exists("/copies") else None
        return "memory://copies"
    return f"file://{tmp_path}/copies"


def checkpoint(folder: Path, step: int, kind: store.Kind = "step") -> Path:
    partial = store.begin(folder, step, 0, kind)
    (partial / "weights").mkdir()
    entry = store.write_file(partial / "weights/0-0.safetensors", [bytes([step]) * 100])
    return store.commit(partial, {"weights/0-0.safetensors": entry}, {"step": step}, {"kind": kind, "step": step})


def test_the_newest_copy_is_fetched_whole(tmp_path, url):
    remote = Remote(url, "demo")
    remote.check()
    for step, kind in ((9, "warm"), (2, "step"), (10, "step")):
        remote.copy_out(checkpoint(tmp_path / "a", step, kind))
    assert remote.names() == ["warm_9", "step_2", "step_10"]
    fetched = Remote(url, "demo").fetch(tmp_path / "b")
    assert fetched == tmp_path / "b" / "step_10"
    assert store.first_damaged_file(fetched) is None and store.read_state(fetched) == {"step": 10}
    assert remote.fetch(tmp_path / "b") is None, "it is there already"
    assert Remote(url, "other").fetch(tmp_path / "c") is None


def test_a_copy_writes_nothing_beside_itself(tmp_path, monkeypatch):
    """Keys of object stores may hold any text."""
    remote = Remote(f"file://{tmp_path}/copies", "demo")
    remote.copy_out(checkpoint(tmp_path / "a", 1))
    found = remote._files.find
    monkeypatch.setattr(remote._files, "find", lambda path: [*found(path), f"{path}/../step_1/../../../planted"])
    with pytest.raises(UserError, match=r"got a file .*planted there; expected only files of checkpoints"):
        remote.fetch(tmp_path / "b" / "c")
    assert not store.complete_checkpoints(tmp_path / "b" / "c") and not list(tmp_path.rglob("planted"))


def test_a_copy_without_its_manifest_does_not_count(tmp_path, url, monkeypatch):
    remote, first = Remote(url, "demo"), checkpoint(tmp_path / "a", 1)
    remote.copy_out(first)
    second = checkpoint(tmp_path / "a", 2)
    put = remote._files.put_file

    def failing(source, target, **options):
        if source.endswith(store.MANIFEST):
            raise OSError("connection lost")
        return put(source, target, **options)

    monkeypatch.setattr(remote._files, "put_file", failing)
    with pytest.raises(OSError, match="connection lost"):
        remote.copy_out(second)
    monkeypatch.undo()
    assert remote.names() == ["step_1"]
    fetched = remote.fetch(tmp_path / "b")
    assert fetched is not None and fetched.name == "step_1"


def test_a_fetch_replaces_what_is_left_of_a_deleted_checkpoint(tmp_path, url):
    Remote(url, "demo").copy_out(checkpoint(tmp_path / "run", 4))
    (checkpoint(tmp_path / "here", 4) / store.MANIFEST).unlink()  # killed while it was deleted
    (tmp_path / "here/step_4/weights/0-0.safetensors").write_bytes(b"old")
    assert Remote(url, "demo").fetch(tmp_path / "here") == tmp_path / "here/step_4"
    assert store.first_damaged_file(tmp_path / "here/step_4") is None


def test_copies_are_deleted_with_their_checkpoints(tmp_path, url):
    remote = Remote(url, "demo")
    for step in (1, 2, 3):
        newest = checkpoint(tmp_path / "a", step)
        store.retain(newest, last=2)
        remote.copy_out(newest)
    assert remote.names() == ["step_2", "step_3"]


def test_incomplete_copies_are_deleted_with_their_checkpoints(tmp_path, url):
    """The process was killed while it copied step 1."""
    remote = Remote(url, "demo")
    for step in (1, 2, 3):
        newest = checkpoint(tmp_path / "a", step)
        store.retain(newest, last=1)
        remote.copy_out(newest)
        if step == 1:
            remote._files.rm_file(f"{remote._root}/step_1/{store.MANIFEST}")
    assert [Path(path).name for path in remote._files.ls(remote._root, detail=False)] == ["step_3"]


def test_a_damaged_copy_is_noticed_after_the_fetch(tmp_path, url):
    remote = Remote(url, "demo")
    remote.copy_out(checkpoint(tmp_path / "a", 1))
    remote._files.pipe_file(f"{remote._root}/step_1/weights/0-0.safetensors", b"x" * 100)
    fetched = remote.fetch(tmp_path / "b")
    assert fetched is not None and store.first_damaged_file(fetched) == "weights/0-0.safetensors"
    assert json.loads((fetched / store.MANIFEST).read_text())["format"] == store.FORMAT


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_rollback_does_not_fetch_the_copies_of_an_older_run(tmp_path, resume):
    """A new run has made step 2 when one of its processes dies. Copies of a run before it are still at the URL."""
    url = f"checkpoint.copy_to=file://{tmp_path}/copies"
    config = load_config(write_recipe(tmp_path), [url, "run.name=demo", f"run.resume={resume}"])
    Remote(f"file://{tmp_path}/copies", "demo").copy_out(checkpoint(tmp_path / "older", 9))
    folder = supervise.open_folder(config)
    found = [folder / "step_9"] if resume == "auto" else []
    assert store.complete_checkpoints(folder) == found, "fetched at the start, if at all"
    if resume == "never":
        found = [checkpoint(folder, 2)]
    restarted = Restarts(config, RestartBudget(1)).from_last_checkpoint(config)
    assert restarted.run.resume == "auto"
    status = SimpleNamespace(show=print, note=print)
    one: Any = SimpleNamespace(
        _config=restarted, _group=LocalGroup(Rendezvous(0, 1, None, Hub(1))), _folder=folder, _status=status
    )
    assert asyncio.run(Checkpointer.find(one)) == found[0]


@pytest.mark.parametrize("bad", ["nosuch://bucket", "s3://bucket"])
def test_a_url_without_a_driver_is_refused(bad):
    with pytest.raises(UserError, match=r"checkpoint.copy_to=.*cannot be opened"):
        Remote(bad, "demo")


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write there"):
        Remote(f"file://{tmp_path}/file", "demo").check()
