"""Models with recurrent layers: two ranks that share the weights, or have copies, train as one rank does; with
activation checkpointing, with adapters on all projections, and with a KL reference."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gcore.config.tree import Config
from gcore.protocols import Rendezvous
from gcore.runtime.gloo import join
from gcore.types import Topology
from tests.contract.test_trainer import World, metrics_of, read, train
from tests.ranks import finish_ranks, free_address, start_ranks
from tests.unit.test_training import config_of, network_of

DELTA = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4)
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 4}
BUILD = {"hidden_size": 32, "intermediate_size": 48, "heads": 4, "kv_heads": 2, "max_length": 64}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "architecture": "qwen3_5_text",
        "layers": 2,
        "config": {**DELTA, "layer_types": ["linear_attention", "full_attention"]},
    },
    "nemotron_h": {
        "architecture": "nemotron_h",
        "layers": 3,
        "config": {**MAMBA, "layer_types": ["linear_attention", "mlp", "full_attention"]},
    },
}
CASES = [("qwen3_5", {}), ("qwen3_5", {"lora": {"rank": 4}}), ("nemotron_h", {}), ("nemotron_h", {"lora": {"rank": 4}})]
NAMES = [f"{name}{'-lora' if more else ''}" for name, more in CASES]
WORLDS = [World("fsdp", Topology(2), shard) for shard in (1, 2)]


def config_for(number: int) -> Config:
    name, more = CASES[number]
    training = {"max_grad_norm": 0.05, "lr": 1e-2, "activation_checkpointing": True, "eps": 1e-5}
    alphabet = config_of().model.build.alphabet  # type: ignore[union-attr]
    model = {"build": {**BUILD, **MODELS[name], "alphabet": alphabet}, **more}
    return config_of(model=model, training=training, algorithm={"kl_coef": 0.1, "mini_batches": 2})


def train_all(rank: int, folder: Path, world: World) -> None:
    for number in range(len(CASES)):
        result = train(config_for(number), rank, world)
        (folder / f"{world.name}-{number}-{rank}.json").write_text(json.dumps(result))


def member(rank: int, address: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    join(Rendezvous(rank, 2, address), "gloo", timeout_s=120)
    for world in WORLDS:
        train_all(rank, Path(folder), world)


def one(rank: int, address: str, folder: str) -> None:
    torch.set_num_threads(1)
    join(Rendezvous(0, 1, address), "gloo", timeout_s=120)
    train_all(0, Path(folder), World("fsdp", Topology(1)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    finish_ranks(start_ranks(2, member, free_address(), str(folder)))
    finish_ranks(start_ranks(1, one, free_address(), str(folder)))
    return folder


@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
@pytest.mark.parametrize("world", WORLDS, ids=[world.name for world in WORLDS])
def test_two_ranks_train_as_one(trained: Path, world: World, number: int):
    (alone,), ranks = read(trained, World("fsdp", Topology(1)), number), read(trained, world, number)
    for step in range(2):
        expected = metrics_of([alone], step)
        assert metrics_of(ranks, step) == pytest.approx(expected, abs=2e-5, rel=2e-5)
        assert abs(expected["actor/loss"]) > 1e-4
    start = {name: value.detach().numpy() for name, value in network_of(config_for(number)).named_parameters()}
    changed = 0
    for name, value in alone["weights"].items():
        assert np.allclose(ranks[0]["weights"][name], value, atol=5e-4, rtol=0), name
        changed += name not in start or not np.allclose(start[name], value, atol=1e-3, rtol=0)
    assert changed > 8
    wanted = "linear_attn" if CASES[number][0] == "qwen3_5" else "mixer.in_proj"
    assert any(wanted in name for name in alone["weights"])
