"""Checkpoints of whole runs: kills and full disks in the middle of a save, damaged files, what a resume refuses."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from gcore.checkpoint import memory, pending_groups, store, writer
from tests.e2e.helpers import gcore, rows, steps, train, untimed, write_recipe

HERE = ("runtime=local", "controllers=2", "observe.trace=false", "observe.trackers=[]")
DYNAMIC = ("sampling.filter=spread", "training.warm_start.steps=20", "algorithm.kl_coef=0.05", "run.steps=6")
EVERY = ("checkpoint.every=1", "checkpoint.keep_last=3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saves only at its end."""
    folder = tmp_path_factory.mktemp("whole")
    found = train(folder, "whole", *HERE, *DYNAMIC, "checkpoint.every=0")
    prompts = store.read_state(folder / "runs" / "whole" / "step_6")["prompts"]
    drawn = [row["sampling/drawn"] for row in steps(found)]
    assert sum(drawn) // prompts > sum(drawn[:3]) // prompts  # what is resumed from step 3 reaches another epoch
    return folder / "runs" / "whole"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    train(folder, "whole", *HERE, *DYNAMIC, *EVERY)
    return folder / "runs" / "whole"


def plain(run: Path) -> list[dict[str, Any]]:
    return [untimed(row) for row in rows(run)]


def resume(run: Path, *overrides: str) -> Any:
    recipe = write_recipe(run.parents[1])
    return gcore("train", str(recipe), f"run.name={run.name}", *HERE, *DYNAMIC, *EVERY, "run.resume=auto", *overrides)


def test_saves_at_every_step_change_nothing(whole, saved):
    assert plain(saved) == plain(whole)
    assert [path.name for path in store.complete_checkpoints(saved)] == ["step_4", "step_5", "step_6"]
    found = [store.read_manifest(path) for path in store.complete_checkpoints(saved)]
    assert [manifest["parent"] for manifest in found] == ["step_3", "step_4", "step_5"]
    assert found[0]["topology"] == {"controllers": 2, "trainers": 1, "tensor_parallel": 1, "engines": 1}
    for name in ("weights/0-0.safetensors", "optimizer/0-0.safetensors", "state.json"):  # invariant 9
        assert len({manifest["files"][name]["sha256"] for manifest in found}) == 3
    measured = [row for row in steps(rows(saved)) if "checkpoint/stall_s" in row]
    assert measured and all(row["checkpoint/bytes"] > 100_000 for row in measured)


class Killed(BaseException):
    pass


MOMENTS: dict[str, Any] = {
    "before a file of the trainer": (writer, "weights/0-0.safetensors"),
    "after all files of the trainer": (store, "state.json"),
    "before the manifest": (store, "manifest.json"),
}


SLOW = pytest.mark.release  # repeats what the first shows, at another moment


@pytest.mark.parametrize("moment", [pytest.param(m, marks=SLOW if i else ()) for i, m in enumerate(MOMENTS)])
def test_a_kill_during_a_save_is_resumed_exactly(tmp_path, monkeypatch, whole, moment):
    """Nothing of the save of step 4 counts; the run had gone on meanwhile. Dynamic sampling, over an epoch boundary."""
    module, name = MOMENTS[moment]
    real = store.write_file

    def dying(path: Path, contents: Any) -> Any:
        if path.as_posix().endswith(f"step_4.partial/{name}"):
            raise Killed
        return real(path, contents)

    run = tmp_path / "runs" / "part"
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_file", dying)
        with pytest.raises(BaseException) as died:
            resume(run, "run.resume=never")
            raise AssertionError("the run did not die")
    assert not isinstance(died.value, AssertionError)
    assert [path.name for path in store.complete_checkpoints(run)][-1] == "step_3"
    assert (run / "step_4.partial").is_dir() and steps(rows(run))[-1]["step"] >= 4
    done = resume(run, "controllers=3")
    assert done.returncode == 0 and "step_3 at step 3" in done.stdout, done.stdout + done.stderr
    assert plain(run) == plain(whole)
    assert not list(run.glob("*.partial"))


def test_a_checkpoint_in_memory_is_resumed_exactly(tmp_path, monkeypatch, whole):
    """The run dies while step 6 is written to disk. Step 5 is in memory, step 3 on disk."""
    real = store.write_file

    def dying(path: Path, contents: Any) -> Any:
        if path.as_posix().endswith("step_6.partial/weights/0-0.safetensors"):
            raise Killed
        return real(path, contents)

    run = tmp_path / "runs" / "part"
    often = ("checkpoint.every=3", "checkpoint.memory_every=1")
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_file", dying)
        with pytest.raises(BaseException) as died:
            resume(run, "run.resume=never", *often)
            raise AssertionError("the run did not die")
    assert not isinstance(died.value, AssertionError)
    assert [path.name for path in memory.complete_checkpoints(run)][-2:] == ["step_3", "step_5"]
    held = (run / "memory").resolve()
    assert held.is_relative_to(memory.SHARED_MEMORY) and store.first_damaged_file(run / "memory" / "step_5") is None
    done = resume(run, "controllers=3", *often)
    assert done.returncode == 0 and "memory/step_5 at step 5" in done.stdout, done.stdout + done.stderr
    assert plain(run) == plain(whole)
    assert not held.exists() and not (run / "memory").is_symlink()


def test_a_run_saved_at_the_end_of_an_epoch_goes_on_with_the_next(tmp_path):
    sizes = ("sampling.prompts_per_step=20", "sampling.samples_per_prompt=2", "training.warm_start.steps=2")
    expected = train(tmp_path, "whole", *HERE, *sizes, "run.steps=6")
    train(tmp_path, "part", *HERE, *sizes, "run.steps=4")
    state = store.read_state(tmp_path / "runs" / "part" / "step_4")
    assert state["cursor"] == state["prompts"] == 80
    found = train(tmp_path, "part", *HERE, *sizes, "run.steps=6", "run.resume=auto", "controllers=1")
    digests = [row["samples_digest"] for row in steps(expected)]
    assert [row["samples_digest"] for row in steps(found)] == digests and len(set(digests)) == 6


# --- damage


def test_a_flipped_byte_in_any_file_of_a_run_is_noticed(tmp_path):
    """Also in the groups that wait for a later step."""
    keep = ("sampling.surplus=keep", "sampling.oversampling=1.5", "run.steps=2", "checkpoint.every=1")
    train(tmp_path, "pending", *HERE, *DYNAMIC, *keep)
    checkpoint = store.complete_checkpoints(tmp_path / "runs" / "pending")[-1]
    kinds = set()
    for file in (path for path in checkpoint.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            assert store.first_damaged_file(checkpoint) == file.relative_to(checkpoint).as_posix()
        file.write_bytes(content)
        kinds.add(file.name if file.parent == checkpoint else file.parent.name)
    assert kinds >= {"weights", "optimizer", "reference", "trainer.json", "state.json", "manifest.json"}
    assert any(kind.startswith("pending-") for kind in kinds) and store.first_damaged_file(checkpoint) is None


def test_a_damaged_checkpoint_is_skipped_and_the_user_is_told(tmp_path, saved):
    run = tmp_path / "runs" / "whole"
    shutil.copytree(saved, run)
    for step, name in ((6, "optimizer/0-0.safetensors"), (5, "manifest.json")):
        file = run / f"step_{step}" / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    done = resume(run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step_6/optimizer/0-0.safetensors is damaged or missing: step_6 is renamed" in done.stdout
    assert "step_5/manifest.json is damaged or missing" in done.stdout and "step_4 at step 4" in done.stdout
    assert plain(run) == plain(saved)
    assert {path.name for path in run.glob("*.damaged")} == {"step_5.damaged", "step_6.damaged"}
    explicit = resume(run, f"run.resume={run}/step_6.damaged")
    assert explicit.returncode == 2 and "damaged or missing" in explicit.stderr
    for checkpoint in store.complete_checkpoints(run):
        (checkpoint / "trainer.json").unlink()
    none = resume(run)
    assert none.returncode == 2 and "all checkpoints are damaged" in none.stderr, none.stderr


# --- disks


def full_at(step: int, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The disk is full while the checkpoint of a step is made."""
    if how == "preflight":
        usage, real_begin = namedtuple("usage", "total used free"), store.begin

        def begin(folder: Path, number: int, num_bytes: int, kind: store.Kind) -> Path:
            with pytest.MonkeyPatch.context() as patch:
                if (kind, number) == ("step", step):
                    patch.setattr(store.shutil, "disk_usage", lambda path: usage(9, 9, 0))
                return real_begin(folder, number, num_bytes, kind)

        monkeypatch.setattr(store, "begin", begin)
        return
    real = store.write_file

    def write(path: Path, contents: Any) -> Any:
        if f"step_{step}.partial" in path.parts and path.name == how:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device", str(path))
        return real(path, contents)

    for module in (store, writer, pending_groups):
        monkeypatch.setattr(module, "write_file", write)


@pytest.mark.parametrize(
    "how", ["0-0.safetensors", *(pytest.param(h, marks=SLOW) for h in ("preflight", "manifest.json"))]
)
def test_after_a_full_disk_the_run_goes_on(tmp_path, monkeypatch, whole, how):
    run = tmp_path / "runs" / "full"
    full_at(4, monkeypatch, how)
    done = resume(run, "run.resume=never")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checkpoint not written, the run goes on" in done.stdout
    assert [path.name for path in store.complete_checkpoints(run)] == ["step_3", "step_5", "step_6"]
    assert plain(run) == plain(whole) and not list(run.glob("*.partial"))


def test_after_a_full_disk_the_run_ends_if_asked_to(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "full"
    full_at(2, monkeypatch, "preflight")
    done = resume(run, "run.resume=never", "checkpoint.on_failure=stop")
    assert done.returncode == 2 and "checkpoint of step 2 needs" in done.stderr, done.stderr
    assert "checkpoint not written, the run ends: " in done.stdout and "goes on" not in done.stdout
    assert [path.name for path in store.complete_checkpoints(run)][-1] == "step_1"


def test_a_run_whose_last_checkpoint_fails_says_so(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "full"
    full_at(2, monkeypatch, "0-0.safetensors")
    done = resume(run, "run.resume=never", "run.steps=2")
    assert done.returncode == 2 and "the last checkpoint of the run was not written" in done.stderr, done.stderr
    assert [path.name for path in store.complete_checkpoints(run)][-1] == "step_1"


# --- what a resume refuses


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """Two steps on a dataset in a file."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(9)))
    done = resume(tmp_path / "runs" / "short", "run.resume=never", f"data.train={{path: {data}}}", "run.steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    return data


def test_what_would_make_the_resume_wrong_is_refused(tmp_path, short, monkeypatch):
    run = tmp_path / "runs" / "short"
    again = (f"data.train={{path: {short}}}", "run.steps=3")
    refused = resume(run, *again, "training.lr=1e-2", "run.seed=4", "controllers=1", "observe.eval_every=1")
    assert refused.returncode == 2, refused.stdout
    assert "differs: run.seed: 3 -> 4; training.lr: 0.003 -> 0.01. The results" in refused.stderr
    longer = resume(run, *again, "training.schedule=linear")
    assert longer.returncode == 2 and "run.steps: 2 -> 3; training.schedule: constant -> linear" in longer.stderr
    content = short.read_text()
    short.write_text(content.replace('"answer": "5"', '"answer": "6"'))
    changed = resume(run, *again)
    assert changed.returncode == 2 and "data.train: the content of the prompts, answers" in changed.stderr
    short.write_text(content)
    monkeypatch.setattr("gcore.controller.checkpointing.__version__", "0.0.1")
    version = resume(run, *again)
    assert version.returncode == 2 and "the version of G-Core: " in version.stderr and "0.0.1" in version.stderr
    anyway = resume(run, *again, "training.lr=1e-2", "run.resume_anyway=true")
    assert anyway.returncode == 0, anyway.stdout + anyway.stderr
    assert "resumed although this changed (run.resume_anyway): training.lr: 0.003 -> 0.01; the ver" in anyway.stdout


# --- exports


@pytest.mark.release
def test_an_export_at_save_time_lives_as_long_as_its_checkpoint(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tmp_path / "runs" / "exported"
    done = resume(run, "run.resume=never", "run.steps=2", "checkpoint.export=true", "checkpoint.keep_last=1")
    assert done.returncode == 0 and "not exported" not in done.stdout, done.stdout + done.stderr
    assert [path.name for path in (run / "hf").iterdir() if path.name[0] != "."] == ["step_2"]
    network = AutoModelForCausalLM.from_pretrained(run / "hf" / "step_2")
    from gcore.checkpoint.tensors import read

    for name, value in read(run / "step_2" / "weights", dict(network.named_parameters())).items():
        assert (network.get_parameter(name) == value).all(), name
    assert len(AutoTokenizer.from_pretrained(run / "hf" / "step_2")) > 10


def test_a_run_continues_from_the_copy_at_a_url(tmp_path, whole):
    """The machine and its disk are lost after step 3."""
    copies = f"checkpoint.copy_to=file://{tmp_path}/copies"
    train(tmp_path, "whole", *HERE, *DYNAMIC, *EVERY, copies, "run.steps=3")
    shutil.rmtree(tmp_path / "runs")
    run = tmp_path / "runs" / "whole"
    resumed = resume(run, copies)
    assert resumed.returncode == 0 and "fetched step_3 from" in resumed.stdout, resumed.stdout + resumed.stderr
    assert steps(plain(run)) == [row for row in steps(plain(whole)) if row["step"] > 3]
    assert sorted(path.name for path in (tmp_path / "copies" / "whole").iterdir()) == ["step_4", "step_5", "step_6"]
