"""Checkpoints on disk: complete or not at all."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from gcore.checkpoint import store
from gcore.types import UserError

FILE = "weights/__0_0.distcp"


def save(folder: Path, step: int, keep: int = 10, content: bytes = b"weights") -> Path:
    partial = store.begin(folder, step, 0)
    (partial / "weights").mkdir()
    (partial / "weights" / ".metadata").write_bytes(b"hidden")
    (partial / FILE).write_bytes(content + b" %d" % step)
    return store.commit(partial, {"step": step, "seed": 7}, keep)


def names(folder: Path) -> list[str]:
    return [path.name for path in store.complete(folder)]


def test_round_trip(tmp_path):
    final = save(tmp_path / "runs" / "a", 3)
    assert final == tmp_path / "runs" / "a" / "step_3"
    assert store.read_state(final) == {"step": 3, "seed": 7}
    manifest = json.loads((final / store.MANIFEST).read_text())
    assert set(manifest["files"]) == {FILE, "weights/.metadata", "state.json"}
    assert manifest["files"][FILE]["bytes"] == 9
    assert store.verify(final) == final
    assert sorted(path.name for path in final.parent.iterdir()) == ["step_3"]


def test_a_partial_checkpoint_is_never_counted(tmp_path):
    save(tmp_path, 1)
    partial = store.begin(tmp_path, 2, 0)
    (partial / "half").write_bytes(b"half")
    assert partial.name == "step_2.partial"
    assert names(tmp_path) == ["step_1"]
    assert store.find("auto", tmp_path) == tmp_path / "step_1"
    (tmp_path / "step_9").mkdir()  # a folder with the right name but no manifest
    (tmp_path / "step_x").mkdir()
    assert names(tmp_path) == ["step_1"]
    with pytest.raises(UserError, match="no complete checkpoint"):
        store.find(str(partial), tmp_path)


def test_a_crash_in_commit_leaves_no_complete_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def crash(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert names(tmp_path) == ["step_1"]
    save(tmp_path, 2)
    assert names(tmp_path) == ["step_1", "step_2"] and not list(tmp_path.glob("*.partial"))


def test_begin_clears_what_a_crash_left(tmp_path):
    (store.begin(tmp_path, 4, 0) / "old").write_text("x")
    assert list(store.begin(tmp_path, 4, 0).iterdir()) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 5, content=b"first")
    final = save(tmp_path, 5, content=b"second")
    assert (final / FILE).read_bytes() == b"second 5"
    assert names(tmp_path) == ["step_5"]
    store.verify(final)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "one bit": lambda c: flip(c / FILE),
    "truncated": lambda c: (c / FILE).write_bytes(b"w"),
    "missing": lambda c: (c / FILE).unlink(),
    "hidden": lambda c: flip(c / "weights" / ".metadata"),
    "state": lambda c: flip(c / "state.json"),
    "manifest": lambda c: (c / store.MANIFEST).write_text('{"format": 1, "fil'),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("how", ["auto", "path"])
def test_a_damaged_checkpoint_is_refused(tmp_path, damage, how):
    save(tmp_path, 1)
    last = save(tmp_path, 2)
    DAMAGES[damage](last)
    with pytest.raises(UserError, match=r"damaged or missing.*step_2.*run\.resume"):
        store.find("auto" if how == "auto" else str(last), tmp_path)
    shutil.rmtree(last)  # what the message advises
    assert store.find("auto", tmp_path) == tmp_path / "step_1"


@pytest.mark.parametrize(("keep", "left"), [(1, ["step_12"]), (2, ["step_10", "step_12"]), (9, None)])
def test_keep(tmp_path, keep, left):
    for step in (8, 9, 10, 12):  # 9 < 10 as numbers, not as text
        save(tmp_path, step, keep)
    assert names(tmp_path) == (left or ["step_8", "step_9", "step_10", "step_12"])


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keep_never_drops_what_was_just_saved(tmp_path, keep):
    """A run resumed from an earlier step saves beside later steps of its former course."""
    for step in (2, 10):
        save(tmp_path, step)
    final = save(tmp_path, 4, keep)
    assert final in store.complete(tmp_path) and len(names(tmp_path)) == keep


def test_resume(tmp_path):
    assert store.find("auto", tmp_path) is None
    assert store.find("never", tmp_path) is None
    for step in (2, 10):
        save(tmp_path, step)
    assert store.find("never", tmp_path) is None
    assert store.find("auto", tmp_path) == tmp_path / "step_10"
    assert store.find(str(tmp_path / "step_2"), tmp_path / "elsewhere") == tmp_path / "step_2"
    with pytest.raises(UserError, match=r"run\.resume=.*step_3: no complete checkpoint there"):
        store.find(str(tmp_path / "step_3"), tmp_path)


def test_the_warm_start_comes_before_all_steps(tmp_path):
    for kind, step in (("warm", 20), ("warm", 100), ("step", 0), ("step", 3)):
        partial = store.begin(tmp_path, step, 0, kind)
        (partial / "model").write_text("x")
        store.commit(partial, {"step": 0}, keep=3)
    assert names(tmp_path) == ["warm_100", "step_0", "step_3"]
    assert store.find("auto", tmp_path) == tmp_path / "step_3"
    (tmp_path / "warm_7.partial").mkdir()
    store.begin(tmp_path, 4, 0)
    assert not (tmp_path / "warm_7.partial").exists()


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    save(tmp_path, 1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100 << 20, 90 << 20, 10 << 20))
    with pytest.raises(UserError, match="step 2 needs 11 MB, 10 MB are free"):
        store.begin(tmp_path, 2, 11 << 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1"]
    assert store.begin(tmp_path, 2, 10 << 20).is_dir()
