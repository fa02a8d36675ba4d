"""Router replay on several trainer ranks: copies, shards and ranks that share a sequence use the recorded experts."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gcore.config.tree import Config
from gcore.content.tokens import Tokens
from gcore.generation.embedded import EmbeddedBackend
from gcore.generation.engine_shell import SteppedEngine
from gcore.generation.noise import noise_key
from gcore.models.decoders import find_expert_routers
from gcore.training.backend import NewNetwork
from gcore.training.fsdp import FsdpBackend
from gcore.training.objective import StepData
from gcore.types import MicroBatch, Request, Sample, SamplingParams
from tests.ranks import finish_ranks, start_ranks
from tests.unit.test_training import CPU, config_of, network_of

BUILD = {"architecture": "qwen3_moe", "hidden_size": 32, "intermediate_size": 24, "experts": 6, "active_experts": 2}
BUILD |= {"layers": 2, "heads": 2, "kv_heads": 2, "max_length": 64, "alphabet": "0123456789+="}
WORLDS = {"one": (1, 1, 1), "copies": (2, 1, 1), "shards": (2, 2, 1), "shared": (2, 2, 2)}  # ranks, shard, context


def policy(config: Config, moved: float) -> Any:
    """Large weights, so that experts matter. `moved`: routers of the trainer differ from those of the engine."""
    network, generator = network_of(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        for router in find_expert_routers(network):
            router.weight.add_(torch.randn(router.weight.shape, generator=generator) * moved)
    return network


def sampled(config: Config) -> list[Sample]:
    engine = SteppedEngine(EmbeddedBackend(policy(config, 0.0), max_concurrent=4, max_length=64))
    rng, requests = np.random.default_rng(0), []
    for i, (prompt, steps) in enumerate([(5, 6), (9, 3), (2, 9), (12, 12)]):
        content = Tokens(rng.integers(4, 16, prompt).astype(np.int32))
        requests.append(Request(content, SamplingParams(steps, keep_experts=True), noise_key(0, i)))
    found = asyncio.run(engine.generate(requests))
    engine.close()
    contents = [request.content.extended(c.content) for request, c in zip(requests, found, strict=True)]
    return [
        Sample(i, 0, content, np.ones(content.num_steps, bool), completion.logprobs_S)
        for i, (content, completion) in enumerate(zip(contents, found, strict=True))
    ]


def member(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    config = config_of(model={"build": BUILD})
    samples = sampled(config)
    for name, (size, shard, context) in WORLDS.items():
        if rank >= size:
            continue
        store = dist.FileStore(str(Path(folder) / f"{name}.store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
        found = {}
        for moved in (0.0, 2.0):
            networks = {"policy": NewNetwork(lambda moved=moved: policy(config, moved))}
            backend = FsdpBackend(config, networks, CPU, torch.float32, shard, context=context)
            own = samples if size == context else samples[rank::size]
            micros = [MicroBatch((tuple(s.key for s in own),), 64, context)]
            data = StepData({s.key: s for s in own})
            values = backend.outputs("policy", micros, data)
            found[str(moved)] = {str(key[0]): value.tolist() for key, value in values.items()}
        (Path(folder) / f"{name}-{rank}.json").write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    finish_ranks(start_ranks(2, member, str(folder)))
    return folder


def read(folder: Path, world: str, moved: str) -> dict[str, list[float]]:
    parts = [json.loads((folder / f"{world}-{rank}.json").read_text())[moved] for rank in range(WORLDS[world][0])]
    return {key: value for part in parts for key, value in part.items()}


@pytest.mark.release
@pytest.mark.parametrize("world", WORLDS)
def test_with_the_same_weights_all_ranks_have_the_engines_logprobs(results: Path, world: str):
    found = read(results, world, "0.0")
    for sample in sampled(config_of(model={"build": BUILD})):
        assert np.allclose(found[str(sample.prompt_id)], sample.rollout_logprobs_S, atol=1e-5)


@pytest.mark.release
@pytest.mark.parametrize("world", [name for name in WORLDS if name != "one"])
def test_with_other_routers_all_ranks_replay_as_one(results: Path, world: str):
    found, alone, before = read(results, world, "2.0"), read(results, "one", "2.0"), read(results, "one", "0.0")
    for key, value in alone.items():
        assert np.allclose(found[key], value, atol=1e-5)
    assert max(np.abs(np.array(alone[key]) - before[key]).max() for key in alone) > 0.05
