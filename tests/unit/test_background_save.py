"""Checkpoints written in the background are of one moment, whatever the rank does meanwhile. Each test fails if the
guard that it describes is removed."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from gcore.checkpoint import tensors, writer
from gcore.checkpoint.tensors import Hold, Shard, ShardFiles, assign
from gcore.checkpoint.writer import BackgroundWriter, HostMemory, Snapshot
from gcore.training import state
from gcore.training.rank import TrainerRank
from tests.unit.test_training import (
    CPU,
    batch_of,
    config_of,
    same,
    samples_of,
    save_state,
    trainer_of,
    update,
    weights_of,
)

LIMIT_S = 60
KL: dict[str, Any] = {"algorithm": {"kl_coef": 0.1}}
LORA: dict[str, Any] = {**KL, "model": {"lora": {"rank": 2}}}


pytestmark = pytest.mark.usefixtures("one_rank")


def trained(config: Any, updates: int = 2) -> TrainerRank:
    trainer = trainer_of(config)
    asyncio.run(trainer.end_warm_start())
    for seed in range(updates):
        update(trainer, samples_of(seed), batch_of(samples_of(seed)))
    return trainer


def files_of(trainer: TrainerRank, folder: Path) -> dict[str, str]:
    """Checksums of a save of now."""
    folder.mkdir()
    return {name: entry["sha256"] for name, entry in save_state(trainer, folder).files.items()}


class SlowCopy:
    """The copy of a snapshot begins only when `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        real = BackgroundWriter._copy

        def copy(own: BackgroundWriter, names: Any) -> None:
            assert self.go.wait(LIMIT_S)
            real(own, names)

        monkeypatch.setattr(BackgroundWriter, "_copy", copy)

    def start_at_the_fence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = BackgroundWriter.fence

        def fence(own: BackgroundWriter) -> None:
            self.go.set()
            real(own)

        monkeypatch.setattr(BackgroundWriter, "fence", fence)


CHANGES = {"update": KL, "reference pass of adapters": LORA, "update of adapters": LORA}


@pytest.mark.parametrize("what", list(CHANGES))
def test_whatever_changes_the_state_waits_for_the_copy(tmp_path, monkeypatch, what):
    """Adam of step N + 1 with weights of N; adapters of the reference in place of those of the policy."""
    trainer = trained(config_of(**CHANGES[what]))
    expected = files_of(trainer, tmp_path / "expected")
    slow, samples = SlowCopy(monkeypatch), samples_of(9)

    async def run() -> Any:
        await trainer.snapshot()
        slow.start_at_the_fence(monkeypatch)
        if what == "reference pass of adapters":
            await trainer.push(0, samples)
            await in_the_reference_pass(trainer, slow, batch_of(samples))
        else:
            await asyncio.to_thread(update, trainer, samples, batch_of(samples))
        slow.go.set()  # at the latest: then nobody waited for the copy
        return await trainer.write(str(tmp_path))

    written = asyncio.run(run())
    assert {name: entry["sha256"] for name, entry in written.files.items()} == expected


async def in_the_reference_pass(trainer: TrainerRank, slow: SlowCopy, batch: Any) -> None:
    """While the adapters of the reference are in the policy, the copy goes on, if nobody waits for it."""
    real = trainer.backend.networks["policy"].model.forward

    def forward(*args: Any) -> Any:
        slow.go.set()
        trainer._writer._copied.exception()  # type: ignore[union-attr]
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.backend.networks["policy"].model, "forward", forward)
        await trainer.compute_logprobs(batch)


def test_a_snapshot_is_of_its_moment_though_it_is_written_later(tmp_path):
    """Weights, moments, the step counter of Adam and that of the schedule are copied, not referred to."""
    trainer = trained(config_of(**KL))
    expected = files_of(trainer, tmp_path / "expected")

    async def run() -> Any:
        await trainer.snapshot()
        for seed in (7, 8):
            await asyncio.to_thread(update, trainer, samples_of(seed), batch_of(samples_of(seed)))
        return await trainer.write(str(tmp_path))

    written = asyncio.run(run())
    assert {name: entry["sha256"] for name, entry in written.files.items()} == expected
    assert trainer.trained["policy"].updates == 4
    again = trainer_of(config_of(**KL))
    asyncio.run(again.load(str(tmp_path)))
    assert again.trained["policy"].updates == 2


def test_storage_that_is_moved_before_the_copy_is_saved_as_it_was(tmp_path, monkeypatch):
    """As an off-load does: the tensor gets other memory. References to the tensor would read what comes next."""
    moved, values = torch.arange(6.0), torch.arange(6.0)
    shards = state.shards_of({"moved": moved})
    moved.data = torch.zeros(6)
    assert torch.equal(shards[0].values, values)
    slow = SlowCopy(monkeypatch)
    saver = BackgroundWriter(0, CPU)
    saver.stage(Snapshot({"weights": shards}))
    moved.data = torch.ones(6)
    slow.go.set()
    saver.write(tmp_path).result()
    assert torch.equal(tensors.read(tmp_path / "weights", ["moved"])["moved"], values)


def test_copied_shards_keep_no_memory_alive():
    """Else an off-load would not free the memory of the device until the files are written."""
    saver, tensor = BackgroundWriter(0, CPU), torch.zeros(4)
    saver.stage(Snapshot({"weights": [Shard("a", (4,), (0,), tensor)]}))
    saver.fence()
    assert all(shard.values.is_meta for shards in saver._snapshot.shards.values() for shard in shards)


def test_without_a_copy_the_shards_are_written_as_they_are_and_no_memory_is_kept(tmp_path):
    """checkpoint.asynchronous=false: the caller waits for the files."""
    saver, tensor = BackgroundWriter(0, CPU, copies=False), torch.arange(6.0).reshape(2, 3)
    assert saver.stage(Snapshot({"weights": [Shard("a", (2, 3), (0, 0), tensor)]})) == 24
    written = saver.write(tmp_path)
    saver.fence()
    assert written.done() and not written.result().error and saver.host_bytes == 0 and not saver._snapshot.shards
    assert torch.equal(tensors.read(tmp_path / "weights", ["a"])["a"], tensor)


def test_without_a_copy_shards_that_change_before_they_are_written_are_not_saved(tmp_path):
    saver = BackgroundWriter(0, CPU, copies=False)
    saver.stage(Snapshot({"weights": [Shard("a", (4,), (0,), torch.zeros(4))]}))
    saver.fence()  # as every function of the compute thread calls it
    assert "Abandoned" in saver.write(tmp_path).result().error


def test_a_second_snapshot_does_not_overwrite_the_one_that_is_written(tmp_path):
    saver = BackgroundWriter(0, CPU)
    saver.stage(Snapshot({"weights": [Shard("a", (4,), (0,), torch.zeros(4))]}))
    with pytest.raises(AssertionError, match="one save at a time"):
        saver.stage(Snapshot({"weights": [Shard("a", (4,), (0,), torch.ones(4))]}))
    assert not saver.write(tmp_path).result().error
    saver.stage(Snapshot({"weights": [Shard("a", (4,), (0,), torch.ones(4))]}))
    saver.abandon()


def test_consecutive_checkpoints_differ_after_an_update(tmp_path):
    """Invariant 9. The reference is the same, and is not copied again until it changes."""
    trainer, found = trained(config_of(**KL)), []
    copied: list[str] = []
    real = trainer._writer._copy
    trainer._writer._copy = lambda names: copied.extend(names) or real(names)  # type: ignore[method-assign]
    for step in range(3):
        update(trainer, samples_of(step + 10), batch_of(samples_of(step + 10)))
        found.append(files_of(trainer, tmp_path / str(step)))
    for name in ("weights/0-0.safetensors", "optimizer/0-0.safetensors", "trainer.json"):
        assert len({files[name] for files in found}) == 3, name
    assert len({files["reference/0-0.safetensors"] for files in found}) == 1
    assert copied.count("reference") == 1 and copied.count("weights") == 3
    asyncio.run(trainer.end_warm_start())  # the policy of now is the reference
    found.append(files_of(trainer, tmp_path / "begun"))
    assert found[-1]["reference/0-0.safetensors"] != found[0]["reference/0-0.safetensors"]


def test_saves_at_every_step_change_nothing(tmp_path):
    alone, saving, folder = trained(config_of(**KL)), trained(config_of(**KL)), tmp_path / "saved"
    folder.mkdir()

    async def step(seed: int) -> Any:
        await saving.snapshot()
        writing = asyncio.ensure_future(saving.write(str(folder)))
        stats = await asyncio.to_thread(update, saving, samples_of(seed), batch_of(samples_of(seed)))
        assert not (await writing).error
        return stats

    for seed in range(5, 9):
        expected = update(alone, samples_of(seed), batch_of(samples_of(seed)))
        assert asyncio.run(step(seed)) == expected
    assert same(weights_of(saving), weights_of(alone))


# --- off-loaded moments: they are in host memory, and are written from there

OFF: dict[str, Any] = {**KL, "training": {"offload": "optimizer"}}


def test_off_loaded_moments_are_written_without_a_copy(tmp_path):
    plain, moved = trained(config_of(**KL)), trained(config_of(**OFF))
    assert files_of(plain, tmp_path / "plain") == files_of(moved, tmp_path / "moved")
    parameters = sum(p.numel() for p in moved.backend.weights().values())
    steps = len(moved.backend.weights())
    assert plain._writer.host_bytes == 4 * (4 * parameters + steps)  # weights, reference, moments
    assert moved._writer.host_bytes == 4 * (2 * parameters + steps)
    update(moved, samples_of(7), batch_of(samples_of(7)))  # nothing holds the moments any more


def test_an_update_waits_for_moments_that_are_not_written_yet(tmp_path, monkeypatch):
    trainer = trained(config_of(**OFF))
    expected = files_of(trainer, tmp_path / "expected")
    go, real_wait, real_write = threading.Event(), Hold.wait, writer.write_file

    def wait(hold: Hold) -> None:
        go.set()
        real_wait(hold)

    def write(path: Path, contents: Any) -> Any:
        if path.parent.name == "optimizer":
            assert go.wait(LIMIT_S)
        return real_write(path, contents)

    def update_now() -> None:
        update(trainer, samples_of(9), batch_of(samples_of(9)))
        go.set()  # at the latest: then nobody waited

    async def run() -> Any:
        await trainer.snapshot()
        writing = asyncio.ensure_future(trainer.write(str(tmp_path)))
        await asyncio.to_thread(update_now)
        return await writing

    monkeypatch.setattr(Hold, "wait", wait)
    monkeypatch.setattr(writer, "write_file", write)
    written = asyncio.run(run())
    assert {name: entry["sha256"] for name, entry in written.files.items()} == expected
    assert written.waited_s > 0


@pytest.mark.parametrize("end", ["abandoned", "full disk"])
def test_moments_are_free_after_a_save_that_failed(tmp_path, monkeypatch, end):
    trainer = trained(config_of(**OFF))

    def full(path: Path, contents: Any) -> Any:
        raise OSError(28, "No space left on device")

    async def run() -> None:
        await trainer.snapshot()
        if end == "abandoned":
            return await trainer.abandon()
        monkeypatch.setattr(writer, "write_file", full)
        assert "No space left" in (await trainer.write(str(tmp_path))).error

    asyncio.run(run())
    assert not any(hold._readers for hold in trainer.backend.networks["policy"].optimizer.holds.values())
    update(trainer, samples_of(9), batch_of(samples_of(9)))


def test_held_shards_are_written_first_and_are_free_one_by_one(tmp_path, monkeypatch):
    holds, seen = [Hold(), Hold()], list[tuple[str, list[int]]]()
    values = torch.arange(6.0)
    held = [Shard(f"m{i}", (6,), (0,), values + i, hold) for i, hold in enumerate(holds)]
    copied = Shard("step", (), (), torch.tensor(3.0))

    def write(path: Path, contents: Any) -> Any:
        parts = []
        for content in contents:
            seen.append((path.parent.name, [hold._readers for hold in holds]))
            parts.append(bytes(memoryview(content).cast("B")))
        return real(path, parts)

    real = writer.write_file
    monkeypatch.setattr(writer, "write_file", write)
    monkeypatch.setattr(writer, "WRITER_THREADS", 1)
    saver = BackgroundWriter(0, CPU)
    saver.stage(Snapshot({"weights": [Shard("w", (6,), (0,), values)], "optimizer": [held[0], copied, held[1]]}))
    saver.fence()
    copied.values.zero_()  # it is not held: the copy has the value of before
    assert not saver.write(tmp_path).result().error and saver.host_bytes == 4 + 24
    order = [("optimizer", [1, 1])] * 2 + [("optimizer", [0, 1])] * 2  # header, m0, step, m1
    assert seen == order + [("weights", [0, 0])] * 2
    found = tensors.read(tmp_path / "optimizer", ["m0", "m1", "step"])
    assert torch.equal(found["m1"], values + 1) and found["step"] == 3.0


# --- abandoned saves, and loads at any time


def test_after_abandon_nothing_is_written_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PIECE_BYTES", 8)
    started, go = threading.Event(), threading.Event()
    real = writer.write_file

    def slow(path: Path, contents: Any) -> Any:
        started.set()
        assert go.wait(LIMIT_S)
        return real(path, contents)

    monkeypatch.setattr(writer, "write_file", slow)
    saver = BackgroundWriter(0, CPU)
    saver.stage(Snapshot({"weights": [Shard("a", (40,), (0,), torch.zeros(40))]}))
    writing = saver.write(tmp_path)
    assert started.wait(LIMIT_S)
    threading.Timer(0.2, go.set).start()
    saver.abandon()
    assert writing.done() and "Abandoned" in writing.result().error
    assert (tmp_path / "weights" / "0-0.safetensors").stat().st_size < 160
    saver.stage(Snapshot({"weights": [Shard("a", (4,), (0,), torch.ones(4))]}))
    assert not saver.write(tmp_path).result().error


@pytest.mark.parametrize("sections", [KL, LORA], ids=["all weights", "adapters"])
def test_a_load_brings_a_living_rank_exactly_to_the_saved_state(tmp_path, sections):
    """In the middle of a step and of a save."""
    config = config_of(**sections)
    trainer = trained(config)
    save_state(trainer, tmp_path)
    fresh = trainer_of(config)
    asyncio.run(fresh.load(str(tmp_path)))
    samples = samples_of(3)

    async def disturb() -> None:
        await asyncio.to_thread(update, trainer, samples_of(5), batch_of(samples_of(5)))
        await trainer.push(0, samples)  # samples that nobody trains on
        await trainer.compute_logprobs(batch_of(samples))
        batch = dataclasses.replace(batch_of(samples), advantages={s.key: s.reward for s in samples})
        mini = batch.mini_batches[0]
        trainer._fill_targets(batch)
        objective = trainer._objective(batch, mini)  # gradients without a step
        await trainer.compute(trainer.backend.forward_backward, mini.micro_batches, trainer._data, objective)
        trainer.trained["policy"].bad_in_a_row = 2
        await trainer.snapshot()
        await trainer.load(str(tmp_path))

    asyncio.run(disturb())
    assert (trainer.trained["policy"].updates, trainer.trained["policy"].bad_in_a_row) == (2, 0)
    for seed in (3, 4):
        assert update(trainer, samples_of(seed), batch_of(samples_of(seed))) == update(
            fresh, samples_of(seed), batch_of(samples_of(seed))
        )
    assert same(weights_of(trainer), weights_of(fresh))


def test_a_full_disk_is_reported_and_the_next_save_works(tmp_path, monkeypatch):
    trainer = trained(config_of())
    real = writer.write_file

    def full(path: Path, contents: Any) -> Any:
        raise OSError(28, "No space left on device")

    async def run() -> Any:
        await trainer.snapshot()
        return await trainer.write(str(tmp_path))

    monkeypatch.setattr(writer, "write_file", full)
    assert "No space left" in asyncio.run(run()).error
    monkeypatch.setattr(writer, "write_file", real)
    assert not asyncio.run(run()).error


def test_a_copy_that_fails_is_reported_and_the_next_save_works(tmp_path, monkeypatch):
    """The host memory of a copy cannot be allocated: no reason to end a run that goes on without checkpoints."""
    saver, tensor = BackgroundWriter(0, CPU), torch.arange(4.0)
    real = HostMemory.reserve

    def full(own: HostMemory, num_bytes: int) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(HostMemory, "reserve", full)
    saver.stage(Snapshot({"weights": [Shard("a", (4,), (0,), tensor)]}))
    saver.fence()
    assert "can't allocate memory" in saver.write(tmp_path).result().error and not saver._snapshot.shards
    monkeypatch.setattr(HostMemory, "reserve", real)
    saver.stage(Snapshot({"weights": [Shard("a", (4,), (0,), tensor)]}))
    assert not saver.write(tmp_path).result().error
    assert torch.equal(tensors.read(tmp_path / "weights", ["a"])["a"], tensor)


@pytest.mark.parametrize("copies", [True, False])
def test_an_abandoned_save_keeps_no_memory_alive(copies):
    """The disk is full: nothing is written until the next save."""
    saver, tensor = BackgroundWriter(0, CPU, copies), torch.zeros(4)
    saver.stage(Snapshot({"weights": [Shard("a", (4,), (0,), tensor)]}))
    storage = weakref.ref(tensor)
    saver.abandon()
    del tensor
    assert storage() is None


# --- host memory and files


@pytest.mark.parametrize("block", [8, 12, 64, 2**30])
def test_shards_span_blocks_and_files(tmp_path, monkeypatch, block):
    monkeypatch.setattr(writer, "BLOCK_BYTES", block)
    monkeypatch.setattr(writer, "PIECE_BYTES", 5)
    monkeypatch.setattr(tensors, "FILE_BYTES", 40)
    values = {f"t{n}": torch.randn(n) for n in (1, 3, 9, 2, 20)}
    values |= {"half": torch.randn(3, 5).bfloat16(), "scalar": torch.tensor(3.5), "turned": torch.randn(4, 2).T}
    saver = BackgroundWriter(3, CPU)
    for _ in range(2):  # the memory is reused
        values = {name: value + 1 for name, value in values.items()}
        shards = [Shard(name, tuple(v.shape), (0,) * v.ndim, v) for name, v in values.items()]
        num_bytes = saver.stage(Snapshot({"weights": shards}, about={"a.json": b"{}"}))
        written = saver.write(tmp_path).result()
        assert num_bytes == sum(v.numel() * v.element_size() for v in values.values()) == saver.host_bytes
        assert len(written.files) > 3 and all(name.startswith("weights/3-") for name in list(written.files)[1:])
        found = ShardFiles(tmp_path / "weights")
        for name, value in values.items():
            into = torch.empty_like(value)
            found.read(Shard(name, tuple(value.shape), (0,) * value.ndim, into))
            assert torch.equal(into, value), name


def test_pinned_blocks_are_powers_of_two(monkeypatch):
    """PyTorch rounds pinned memory up; the plan counts what is asked for."""
    made: list[int] = []
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: made.append(size) or real(size, dtype=dtype))
    memory = HostMemory(pinned=True)
    memory.reserve(writer.BLOCK_BYTES // 2**20 + 1)
    memory.reserve(1000)
    assert made == [2048]


def test_every_shard_has_one_writer_and_the_work_is_shared():
    held = [{("a", (0,)): 10, ("b", (rank,)): 5, ("c", (rank // 2,)): 8} for rank in range(4)]
    chosen = [assign(held, rank) for rank in range(4)]
    places = [place for own in chosen for place in own]
    assert len(places) == len(set(places)) == 1 + 4 + 2
    loads = [sum(held[rank][place] for place in own) for rank, own in enumerate(chosen)]
    assert max(loads) == 15 and all(own <= held[rank].keys() for rank, own in enumerate(chosen))


def test_any_part_can_be_read_from_any_shards(tmp_path):
    whole = torch.arange(60.0).reshape(6, 10)
    for rank, (rows, columns) in enumerate([((0, 4), (0, 7)), ((0, 4), (7, 10)), ((4, 6), (0, 10))]):
        values = whole[slice(*rows), slice(*columns)]
        saver = BackgroundWriter(rank, CPU)
        saver.stage(Snapshot({"weights": [Shard("w", (6, 10), (rows[0], columns[0]), values)]}))
        assert not saver.write(tmp_path).result().error
    files = ShardFiles(tmp_path / "weights")
    for rows, columns in [((0, 6), (0, 10)), ((3, 5), (6, 9)), ((5, 6), (0, 1)), ((0, 1), (8, 10))]:
        into = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
        files.read(Shard("w", (6, 10), (rows[0], columns[0]), into))
        assert torch.equal(into, whole[slice(*rows), slice(*columns)])
    with pytest.raises(Exception, match=r"w has shape \(6, 10\), got a model with shape \(6, 12\).*key: model"):
        files.read(Shard("w", (6, 12), (0, 0), torch.empty(6, 12)))
    (tmp_path / "weights" / "2-0.safetensors").unlink()
    with pytest.raises(Exception, match=r"40 of 60 values of w found"):
        ShardFiles(tmp_path / "weights").read(Shard("w", (6, 10), (0, 0), torch.empty(6, 10)))
