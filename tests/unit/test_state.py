"""Checkpoints in shards: what N ranks saved, M ranks load, to the last bit. Exports of checkpoints."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from transformers import AutoModelForCausalLM

from gcore.checkpoint import export as exporting
from gcore.checkpoint import store, tensors
from gcore.models.networks import load_model
from gcore.observe.trace import Tracer
from gcore.protocols import Rendezvous
from gcore.runtime.gloo import join
from gcore.training.backend import NewNetwork
from gcore.training.fsdp import FsdpBackend
from gcore.training.rank import TrainerRank
from gcore.types import UserError
from tests.contract.test_families import FAMILIES, save
from tests.ranks import finish_ranks, free_address, start_ranks
from tests.unit.test_training import (
    CPU,
    batch_of,
    config_of,
    load_tokenizer,
    network_of,
    samples_of,
    save_state,
    trainer_of,
    update,
    weights_of,
)

PARTS = ("weights", "optimizer", "reference")
SECTIONS: dict[str, Any] = {"algorithm": {"kl_coef": 0.1}, "training": {"schedule": "linear"}}


pytestmark = pytest.mark.usefixtures("one_rank")


def everything(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for part in PARTS:
        found |= {f"{part}/{k}": v for k, v in tensors.read(folder / part, tensors.shapes(folder / part)).items()}
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _rank(rank: int, address: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    join(Rendezvous(rank, 4, address), "gloo", timeout_s=120)
    config = config_of(**SECTIONS, run={"seed": 99})
    source = Path(folder) / "1"
    for shard in (4, 2):  # one copy; two copies of two shards; each reads what the one before it wrote
        tracer = Tracer(None, f"trainer-{rank}")
        policy = NewNetwork(lambda: network_of(config))
        backend = partial(FsdpBackend, config, {"policy": policy}, CPU, torch.float32, shard)
        trainer = TrainerRank(config, backend, rank, 1, tracer)
        asyncio.run(trainer.load(str(source)))
        assert trainer.trained["policy"].updates == 3
        target = Path(folder) / f"{shard}"
        target.mkdir(exist_ok=True)
        save_state(trainer, target)
        dist.barrier()
        source = target


def test_ranks_load_what_other_numbers_of_ranks_saved(tmp_path):
    trainer = trainer_of(config_of(**SECTIONS))
    asyncio.run(trainer.end_warm_start())
    for seed in range(3):
        update(trainer, samples_of(seed), batch_of(samples_of(seed)))
    (tmp_path / "1").mkdir()
    save_state(trainer, tmp_path / "1")
    finish_ranks(start_ranks(4, _rank, free_address(), str(tmp_path)))
    expected = everything(tmp_path / "1")
    assert len(expected) == 24 * 5
    for shard in ("4", "2"):
        assert_equal(everything(tmp_path / shard), expected)
    sizes = [file.stat().st_size for file in sorted((tmp_path / "4" / "weights").glob("*.safetensors"))]
    assert len(sizes) == 4 and max(sizes) < 0.5 * sum(sizes)  # every rank wrote its part
    again = trainer_of(config_of(**SECTIONS, run={"seed": 99}))
    asyncio.run(again.load(str(tmp_path / "2")))
    samples = samples_of(7)
    assert update(again, samples, batch_of(samples)) == update(trainer, samples, batch_of(samples))
    for name, value in weights_of(trainer).items():
        assert (weights_of(again)[name] == value).all()


def test_before_the_first_update_there_are_no_moments(tmp_path):
    trainer, other = trainer_of(config_of()), trainer_of(config_of(run={"seed": 99}))
    save_state(trainer, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"trainer.json", "weights"}
    samples = samples_of()
    update(other, samples, batch_of(samples))
    asyncio.run(other.load(str(tmp_path)))
    assert other.trained["policy"].updates == 0 and not other.backend.networks["policy"].optimizer.state
    assert update(other, samples, batch_of(samples)) == update(trainer, samples, batch_of(samples))


def test_without_a_reference_a_kl_is_refused(tmp_path):
    save_state(trainer_of(config_of()), tmp_path)
    with pytest.raises(UserError, match=r"has no reference model: it was saved with algorithm\.kl_coef=0"):
        asyncio.run(trainer_of(config_of(**SECTIONS)).load(str(tmp_path)))


def test_a_folder_that_ranks_do_not_share_is_noticed(tmp_path):
    partial = store.begin(tmp_path, 1, 0)
    files = save_state(trainer_of(config_of()), partial).files
    elsewhere = {"weights/1-0.safetensors": {"bytes": 10, "sha256": "0"}}
    with pytest.raises(UserError, match=r"lacks weights/1-0\.safetensors, which another process wrote.*run\.dir"):
        store.commit(partial, {**files, **elsewhere}, {})  # type: ignore[dict-item]


# --- export


def checkpoint_of(tmp_path: Path, config: Any) -> Any:
    """A run with a checkpoint of one update; returns the policy that it holds."""
    trainer, samples = trainer_of(config), samples_of()
    update(trainer, samples, batch_of(samples))
    partial = store.begin(config.run.folder, 1, 0)
    store.commit(partial, save_state(trainer, partial).files, {})
    (config.run.folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    network = network_of(config)
    network.load_state_dict({k: torch.from_numpy(v) for k, v in weights_of(trainer).items()}, strict=False)
    return network


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_an_export_has_the_weights_of_the_checkpoint(tmp_path, name, monkeypatch):
    save(FAMILIES[name](), tmp_path / "start")
    load_tokenizer(config_of().model).save_pretrained(tmp_path / "start")
    model = {"build": None, "path": str(tmp_path / "start")}
    config = config_of(model=model, run={"dir": str(tmp_path), "name": "run"})
    expected = checkpoint_of(tmp_path, config)
    monkeypatch.setattr(exporting, "PART_BYTES", 40_000)
    exporting.export(tmp_path / "run", tmp_path / "out")
    files = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    names = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(names.values()) == {file.name for file in files}
    assert any(".experts.0." in n for n in names) == (name == "mixtral")  # as such checkpoints are stored
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    start = load_model(config.model, None, 0, torch.float32, CPU)
    for key, value in expected.named_parameters():
        assert torch.equal(again.get_parameter(key), value), key
        assert not torch.equal(start.get_parameter(key), value), key
