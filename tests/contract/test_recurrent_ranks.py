"""Models with recurrent layers: two ranks that share the weights, or have copies, train as one rank does; with
activation checkpointing, with adapters on all projections, and with a KL reference. So do two ranks that split the
matrices, by all styles of the plans of transformers that are supported."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3nTextConfig

from gcore.config.tree import Config
from gcore.modalities.language import Language
from gcore.models import recurrent
from gcore.protocols import Rendezvous
from gcore.runtime.gloo import join
from gcore.training import tensor_parallel
from gcore.types import Topology, UserError
from tests.contract.test_families import TODAY
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
    "olmo2": {"architecture": "olmo2", "layers": 2, "config": {}},
    "glm4": {"architecture": "glm4", "layers": 2, "config": {}},
}
CASES = [("qwen3_5", {}), ("qwen3_5", {"lora": {"rank": 4}}), ("nemotron_h", {}), ("nemotron_h", {"lora": {"rank": 4}})]
CASES += [("olmo2", {}), ("glm4", {})]
NAMES = [f"{name}{'-lora' if more else ''}" for name, more in CASES]
WORLDS = [World("fsdp", Topology(2), shard) for shard in (1, 2)]
SPLIT = World("fsdp", Topology(2, tensor=2))
SPLITTABLE = [number for number, (name, more) in enumerate(CASES) if name != "nemotron_h" and not more]
RUNS = [(world, number) for world in WORLDS for number in range(4)] + [(SPLIT, number) for number in SPLITTABLE]


def config_for(number: int) -> Config:
    name, more = CASES[number]
    training = {"max_grad_norm": 0.05, "lr": 1e-2, "activation_checkpointing": True, "eps": 1e-5}
    alphabet = config_of().model.build.alphabet  # type: ignore[union-attr]
    model = {"build": {**BUILD, **MODELS[name], "alphabet": alphabet}, **more}
    return config_of(model=model, training=training, algorithm={"kl_coef": 0.1, "mini_batches": 2})


def train_all(rank: int, folder: Path, world: World) -> None:
    for number in [number for at, number in RUNS if at == world] or range(len(CASES)):
        result = train(config_for(number), rank, world)
        (folder / f"{world.name}-{number}-{rank}.json").write_text(json.dumps(result))


def member(rank: int, address: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    join(Rendezvous(rank, 2, address), "gloo", timeout_s=120)
    for world in (*WORLDS, SPLIT):
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


@pytest.mark.parametrize(("world", "number"), RUNS, ids=[f"{world.name}-{NAMES[number]}" for world, number in RUNS])
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
    wanted = {"qwen3_5": "linear_attn", "nemotron_h": "mixer.in_proj"}.get(CASES[number][0], "self_attn")
    assert any(wanted in name for name in alone["weights"])


def test_embeddings_per_layer_are_not_split():
    with pytest.raises(UserError, match="tensor_parallel=2: a model of type gemma3n_text has embeddings per layer"):
        tensor_parallel.check(Gemma3nTextConfig(), 2)


def test_adapters_are_not_split():
    with pytest.raises(UserError, match=r"tensor_parallel=2: the matrices of adapters .* expected 1, or no model.lora"):
        Language(config_for(1)).check(Topology(2, tensor=2), True)


def test_kernels_are_tried_without_a_trace_in_the_network():
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(TODAY["qwen3_5"]())
    mixer, before = recurrent.mixers_of(network)[0], torch.get_rng_state()
    seen: list[torch.Tensor] = []
    called = type(mixer).forward

    def forward(self, hidden_states, cu_seq_lens_q=None, **others):
        seen.append(cu_seq_lens_q)
        output = called(self, hidden_states, **others)
        output.register_hook(seen.append)
        return output

    with mock.patch.object(type(mixer), "forward", forward):
        recurrent.choose_variants(mixer, network.config.hidden_size, "cpu", torch.bfloat16, width=64)
    assert seen[0].tolist() == [0, 16, 32, 48, 64] and seen[1].dtype == torch.bfloat16  # forward and backward
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.is_meta and p.grad is None for p in network.parameters())
