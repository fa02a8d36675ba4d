"""Checkpoints on disk: complete or not at all, and any flipped byte is noticed."""

import errno
import json
import shutil
from collections import namedtuple
from pathlib import Path
from unittest import mock

import pytest

from gcore.checkpoint import memory, store
from gcore.types import UserError

FILE = "weights/0-0.safetensors"


def save(folder: Path, step: int, content: bytes = b"weights", **about) -> Path:
    partial = store.begin(folder, step, 0)
    (partial / "weights").mkdir()
    files = {FILE: store.write_file(partial / FILE, [content, b" %d" % step])}
    return store.commit(partial, files, {"step": step, "seed": 7}, {"step": step, **about})


def names(folder: Path) -> list[str]:
    return [path.name for path in store.complete_checkpoints(folder)]


def test_round_trip(tmp_path):
    final = save(tmp_path / "runs" / "a", 3, parent="step_2")
    assert final == tmp_path / "runs" / "a" / "step_3"
    assert store.read_state(final) == {"step": 3, "seed": 7}
    manifest = store.read_manifest(final)
    assert (manifest["format"], manifest["step"], manifest["parent"]) == (store.FORMAT, 3, "step_2")
    assert set(manifest["files"]) == {FILE, "state.json"}
    assert manifest["files"][FILE]["bytes"] == 9
    assert store.verify(final) == final
    assert sorted(path.name for path in final.parent.iterdir()) == ["step_3"]


def test_a_partial_checkpoint_is_never_counted(tmp_path):
    save(tmp_path, 1)
    partial = store.begin(tmp_path, 2, 0)
    (partial / "half").write_bytes(b"half")
    assert partial.name == "step_2.partial"
    assert names(tmp_path) == ["step_1"]
    assert memory.candidates("auto", tmp_path) == [tmp_path / "step_1"]
    (tmp_path / "step_9").mkdir()  # a folder with the right name but no manifest
    (tmp_path / "step_x").mkdir()
    assert names(tmp_path) == ["step_1"]
    with pytest.raises(UserError, match="no complete checkpoint"):
        memory.candidates(str(partial), tmp_path)


class Killed(BaseException):
    pass


def test_a_kill_at_any_call_of_commit_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch):
    """Every system call of a save is a moment at which the process may die."""
    calls = [(store.os, "fsync"), (store.Path, "rename"), (store.Path, "unlink"), (store.shutil, "rmtree")]
    moments = [(module, name, number) for module, name in calls for number in range(9)]
    died = 0
    for place, (module, name, number) in enumerate(moments):
        folder, seen, real = tmp_path / str(place), 0, getattr(module, name)
        save(folder, 1)

        def dying(*args, real=real, number=number, **kwargs):
            nonlocal seen
            seen += 1
            if seen > number:
                raise Killed
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, dying)
            try:
                store.retain(save(folder, 2), last=1)
            except Killed:
                died += 1
        found = names(folder)
        assert found in (["step_1"], ["step_2"], ["step_1", "step_2"]), (name, number)
        for checkpoint in store.complete_checkpoints(folder):
            store.verify(checkpoint)
        save(folder, 3)
        assert names(folder)[-1] == "step_3" and not list(folder.glob("*.partial"))
    assert died >= 8


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_none_that_is_damaged(tmp_path, monkeypatch):
    def dying(folder, ignore_errors=False):
        (folder / FILE).unlink()
        raise Killed

    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    monkeypatch.setattr(store.shutil, "rmtree", dying)
    with pytest.raises(Killed):
        store.retain(newest, last=1)
    assert names(tmp_path) == ["step_2"]
    store.verify(newest)


def test_the_manifest_is_written_after_all_other_files_are_on_disk(tmp_path, monkeypatch):
    order, real = [], store.write_file
    monkeypatch.setattr(store, "write_file", lambda path, parts: order.append(path.name) or real(path, parts))
    save(tmp_path, 1)
    assert order == ["0-0.safetensors", "state.json", "manifest.json"]


def test_what_the_disk_does_not_return_is_no_checkpoint(tmp_path, monkeypatch):
    """A short write, or a byte that flips on the way: found before the checkpoint counts and older ones are deleted."""
    real = store.entry_of
    monkeypatch.setattr(store, "entry_of", lambda path: {**real(path), "sha256": "0"})
    with pytest.raises(OSError, match="what is read from it differs"):
        save(tmp_path, 1)
    assert names(tmp_path) == []


def test_begin_clears_what_a_crash_left(tmp_path):
    (store.begin(tmp_path, 4, 0) / "old").write_text("x")
    assert list(store.begin(tmp_path, 4, 0).iterdir()) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 5, content=b"first")
    final = save(tmp_path, 5, content=b"second")
    assert (final / FILE).read_bytes() == b"second 5"
    assert names(tmp_path) == ["step_5"]
    store.verify(final)


# --- damage


def test_every_flipped_byte_is_noticed(tmp_path):
    checkpoint = save(tmp_path, 1, score=0.5)
    for file in (path for path in checkpoint.rglob("*") if path.is_file()):
        name, content = file.relative_to(checkpoint).as_posix(), file.read_bytes()
        for place in range(len(content)):
            for flip in (1, 0x20, 0xFF):
                file.write_bytes(content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :])
                assert store.first_damaged_file(checkpoint) == name, (name, place)
        file.write_bytes(content)
    assert store.first_damaged_file(checkpoint) is None


DAMAGES = {
    "truncated": (FILE, lambda c: (c / FILE).write_bytes(b"w")),
    "missing": (FILE, lambda c: (c / FILE).unlink()),
    "half a manifest": (store.MANIFEST, lambda c: (c / store.MANIFEST).write_text('{"format": 4, "fil')),
    "an empty manifest": (store.MANIFEST, lambda c: (c / store.MANIFEST).write_text("")),
    "a manifest of another kind": (store.MANIFEST, lambda c: (c / store.MANIFEST).write_text("[]")),
}


@pytest.mark.parametrize("what", list(DAMAGES))
def test_a_damaged_checkpoint_is_refused(tmp_path, what):
    last = save(tmp_path, 2)
    name, damage = DAMAGES[what]
    damage(last)
    assert store.first_damaged_file(last) == name
    with pytest.raises(UserError, match=rf"step_2/{name}: damaged or missing; use an older checkpoint.*run\.resume"):
        store.verify(last)


def test_a_file_that_the_disk_cannot_read_is_damaged(tmp_path, monkeypatch):
    last = save(tmp_path, 2)
    monkeypatch.setattr(store, "entry_of", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    assert store.first_damaged_file(last) is not None


def test_the_files_are_shared_out_for_verification(tmp_path):
    checkpoint = save(tmp_path, 1)
    (checkpoint / FILE).write_bytes(b"other")
    assert sorted(map(str, (store.first_damaged_file(checkpoint, part, 2) for part in range(2)))) == ["None", FILE]


@pytest.mark.parametrize("found", [{"format": 3, "files": {}}, {"format": 5, "files": {}}])
def test_another_format_is_refused(tmp_path, found):
    checkpoint = save(tmp_path, 1)
    text = json.dumps(found) if found["format"] < 4 else store._sealed(found)
    (checkpoint / store.MANIFEST).write_text(text)
    with pytest.raises(UserError, match=rf"has checkpoint format {found['format']}; this version reads 4"):
        store.first_damaged_file(checkpoint)


# --- which remain


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({"last": 1}, [12]),
        ({"last": 2}, [10, 12]),
        ({"last": 4}, [8, 9, 10, 12]),
        ({"last": 5}, [4, 8, 9, 10, 12]),
        ({"last": 9}, [4, 8, 9, 10, 12]),
        ({"last": 1, "every": 4}, [4, 8, 12]),
        ({"last": 1, "best": 1}, [9, 12]),
        ({"last": 1, "best": 2}, [8, 9, 12]),
        ({"last": 2, "every": 8, "best": 1}, [8, 9, 10, 12]),
    ],
)
def test_retention(tmp_path, keep, left):
    scores = {4: 0.1, 8: 0.5, 9: 0.7, 10: None, 12: 0.3}
    for step, score in scores.items():  # 9 < 10 as numbers, not as text
        newest = save(tmp_path, step, score=score)
        (tmp_path / "hf" / newest.name).mkdir(parents=True)
        (tmp_path / "hf" / f"{newest.name}-adapter").mkdir()
        store.retain(newest, **keep)
    assert names(tmp_path) == [f"step_{step}" for step in left]
    exports = [f"step_{step}{end}" for step in left for end in ("", "-adapter")]
    assert {path.name for path in (tmp_path / "hf").iterdir()} == set(exports)


@pytest.mark.parametrize("last", [1, 2, 3])
def test_what_was_just_saved_is_never_dropped(tmp_path, last):
    """A run resumed from an earlier step saves beside later steps of its former course."""
    for step in (2, 10):
        save(tmp_path, step)
    final = save(tmp_path, 4)
    store.retain(final, last)
    assert final in store.complete_checkpoints(tmp_path) and len(names(tmp_path)) == last


def test_resume(tmp_path):
    assert memory.candidates("auto", tmp_path) == []
    for step in (2, 10):
        save(tmp_path, step)
    assert memory.candidates("never", tmp_path) == []
    assert memory.candidates("auto", tmp_path) == [tmp_path / "step_10", tmp_path / "step_2"]
    assert memory.candidates(str(tmp_path / "step_2"), tmp_path / "elsewhere") == [tmp_path / "step_2"]
    with pytest.raises(UserError, match=r"run\.resume=.*step_3: no complete checkpoint there"):
        memory.candidates(str(tmp_path / "step_3"), tmp_path)


def test_the_warm_start_comes_before_all_steps(tmp_path):
    for kind, step in (("warm", 20), ("warm", 100), ("step", 0), ("step", 3)):
        partial = store.begin(tmp_path, step, 0, kind)
        store.retain(store.commit(partial, {}, {"step": 0}), 3, every=10)
    assert names(tmp_path) == ["warm_100", "step_0", "step_3"]  # keep_every counts steps, not the warm start
    (tmp_path / "warm_7.partial").mkdir()
    store.begin(tmp_path, 4, 0)
    assert not (tmp_path / "warm_7.partial").exists()


# --- disks


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    save(tmp_path, 1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100 << 20, 90 << 20, 10 << 20))
    with pytest.raises(UserError, match="10 MB are free; the last complete checkpoint, step_1, is kept"):
        store.begin(tmp_path, 2, 11 << 20)
    with pytest.raises(UserError, match="10 MB are free; no earlier checkpoint is there"):
        store.begin(tmp_path / "empty", 2, 11 << 20)
    (tmp_path / "empty").rmdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1"]
    assert store.begin(tmp_path, 2, 10 << 20).is_dir()


def test_short_writes_are_continued(tmp_path, monkeypatch):
    class Slow:
        """A file that takes at most three bytes at a time, as a pipe or a network file system may."""

        def __init__(self, file):
            self.file, self.fileno = file, file.fileno

        def write(self, view):
            return self.file.write(view[:3])

        def __enter__(self):
            return self

        def __exit__(self, *args):
            self.file.close()

    real = open
    monkeypatch.setattr(
        store, "open", lambda path, mode, **more: Slow(real(path, mode, **more)) if mode == "wb" else real(path, mode),
        raising=False,
    )  # fmt: skip
    assert store.write_file(tmp_path / "a", [b"0123456789", b"ab"])["bytes"] == 12
    assert (tmp_path / "a").read_bytes() == b"0123456789ab"


def test_a_full_disk_in_the_middle_is_an_oserror(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 1)
    assert names(tmp_path) == []
