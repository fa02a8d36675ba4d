"""Megatron-Core trains as FSDP2 does, in every layout that has no counterpart there, and shares its checkpoints.

Two processes with gloo run all cases, one after another, with each backend. One rank of FSDP2 is test_trainer.py's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

from gcore.config.tree import Config
from gcore.cost.workload import CostModel
from gcore.models.networks import make_empty
from gcore.observe.trace import Tracer
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import metas_of
from gcore.protocols import Receivers, Rendezvous
from gcore.runtime.gloo import join
from gcore.training.backend import NewNetwork
from gcore.training.fsdp import FsdpBackend
from gcore.training.rank import TrainerRank
from gcore.training.state import TrainedName
from gcore.types import MicroBatch, Topology
from gcore.weights.bucket import unpack_bucket
from gcore.weights.pretrained import open_weights
from tests.contract.test_trainer import metrics_of
from tests.ranks import finish_ranks, free_address, start_ranks
from tests.unit.test_training import CPU, config_of, samples_of, save_state

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core and mbridge")

SIZES: dict[str, Any] = {
    "vocab_size": 21,  # odd: the matrix is padded for two ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}),
    "qwen3 tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3 deep": ("Qwen3", {"num_hidden_layers": 6}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "qwen3_moe normalised": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
}


class Case(NamedTuple):
    model: str
    topology: Topology
    training: Mapping[str, Any] = MappingProxyType({})

    @property
    def name(self) -> str:
        _, *degrees = dataclasses.astuple(self.topology)
        return f"{self.model} {'-'.join(map(str, degrees))} {' '.join(self.training)}".strip()


RECOMPUTED = {"activation_checkpointing": True}
CASES = [
    Case("llama", Topology(2, tensor=2)),
    Case("qwen3 tied", Topology(2, pipeline=2), RECOMPUTED),
    Case("qwen2", Topology(2), {"context_parallel": 2}),
    Case("qwen3_moe", Topology(2, expert=2), RECOMPUTED),
    Case("qwen3_moe normalised", Topology(2, pipeline=2)),
]

STAGES = [  # two chunks of layers per stage; 1, 2 and 1 layers
    Case("qwen3 deep", Topology(3, pipeline=3, virtual=2)),
    Case("qwen2", Topology(3, pipeline=3)),
]


def config_for(folder: Path, case: Case) -> Config:
    model = {"build": None, "path": str(folder / case.model)}
    training = {"lr": 1e-3, "eps": 1e-4, "max_grad_norm": 0.05, "weight_decay": 0.1, **case.training}
    return config_of(model=model, training=training, algorithm={"kl_coef": 0.1, "entropy_coef": 0.01})


def trainer_of(config: Config, topology: Topology | None, rank: int) -> TrainerRank:
    """Without a topology: FSDP2."""
    make, context = partial(make_empty, config.model, None), config.training.context_parallel
    weights = partial(open_weights, model=config.model, seed=0, tokenizer=None)
    networks: dict[TrainedName, NewNetwork] = {"policy": NewNetwork(make, open=weights)}
    backend: Any = partial(FsdpBackend, config, networks, CPU, torch.float32, dist.get_world_size(), 1, context)
    if topology is not None:
        from gcore.training.megatron.backend import MegatronBackend

        backend = partial(MegatronBackend, config, networks, CPU, torch.float32, topology, context)
    return TrainerRank(config, backend, rank, 1, Tracer(None, f"trainer-{rank}"))


async def step(trainer: TrainerRank, topology: Topology, rank: int, number: int, context: int) -> dict[str, Any]:
    samples = samples_of(number, prompts=6)
    layout = make_layout(
        metas_of(samples),
        step=number,
        num_ranks=topology.data_parallel,
        mini_batches=1,
        max_tokens=60,
        cost=CostModel(100.0),
    )
    if context > 1:  # the micro-batches of both ranks, each computed by both
        micros = tuple(
            MicroBatch(micro.rows, micro.width, context=context)
            for batch in layout
            for micro in batch.mini_batches[0].micro_batches
        )
        mini = dataclasses.replace(layout[0].mini_batches[0], micro_batches=micros)
        layout = [dataclasses.replace(layout[0], mini_batches=(mini,))] * topology.data_parallel
    batch = layout[topology.data_rank(rank)]
    batch = dataclasses.replace(batch, advantages={s.key: s.reward for s in samples if s.key in batch.keys})
    await trainer.push(0, [s for s in samples if s.key in batch.advantages])
    await trainer.compute_logprobs(batch)
    columns = {str(key): values.tolist() for key, values in trainer._data.columns["ref_logprobs"].items()}
    stats = await trainer.update(batch)
    metrics = {name: dataclasses.astuple(metric) for name, metric in stats.metrics.items()}
    return {"norm": stats.grad_norm, "logprobs": columns, **metrics}


async def weights_of(trainer: TrainerRank) -> dict[str, Any]:
    found = unpack_bucket(await trainer.weight_bucket(0, Receivers(())))
    return {name: values.tolist() for name, values in found.items()}


def run_case(folder: Path, case: Case, rank: int) -> dict[str, Any]:
    """Three updates with each backend; then each loads what the other has saved, and makes one more."""
    config, context = config_for(folder, case), case.training.get("context_parallel", 1)
    results: dict[str, Any] = {}
    for name, topology in (("fsdp", None), ("megatron", case.topology)):
        trainer = trainer_of(config, topology, rank)
        used = topology or Topology(case.topology.ranks)
        saved = folder / f"{case.name} {name}"
        saved.mkdir(exist_ok=True)

        async def run(trainer: TrainerRank = trainer, used: Topology = used) -> dict[str, Any]:
            await trainer.end_warm_start()
            rows = [await step(trainer, used, rank, number, context) for number in range(3)]
            return {"rows": rows, "weights": await weights_of(trainer)}

        results[name] = asyncio.run(run())
        save_state(trainer, saved)
        dist.barrier()
    for name, topology, source in (("fsdp", None, "megatron"), ("megatron", case.topology, "fsdp")):
        trainer = trainer_of(config, topology, rank)
        used, saved = topology or Topology(case.topology.ranks), folder / f"{case.name} {source}"

        async def resume(trainer: TrainerRank = trainer, used: Topology = used, saved: Path = saved) -> dict[str, Any]:
            await trainer.load(str(saved))
            assert trainer.trained["policy"].updates == 3
            return {"rows": [await step(trainer, used, rank, 3, context)], "weights": await weights_of(trainer)}

        results[f"{name} resumes"] = asyncio.run(resume())
    return results


def member(rank: int, size: int, address: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    join(Rendezvous(rank, size, address), "gloo", timeout_s=120)
    for case in CASES if size == 2 else STAGES:
        results = run_case(Path(folder), case, rank)
        (Path(folder) / f"{case.name} {rank}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the models."""
    folder = tmp_path_factory.mktemp("megatron")
    for name, (family, options) in MODELS.items():
        torch.manual_seed(len(name))
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder / name)
    return folder


def run_world(folder: Path, size: int) -> Path:
    finish_ranks(start_ranks(size, member, size, free_address(), str(folder)))
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Path:
    return run_world(folder, 2)


def read(folder: Path, case: Case, name: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{case.name} {rank}.json").read_text())[name] for rank in range(case.topology.ranks)]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Metrics, norms, logprobs of all samples, and weights, to 1e-5."""
    for number, row in enumerate(expected[0]["rows"]):
        metrics = metrics_of(expected, number)
        assert metrics_of(found, number) == pytest.approx(metrics, abs=1e-5) and abs(metrics["actor/loss"]) > 1e-3
        assert [rank["rows"][number]["norm"] for rank in found] == pytest.approx([row["norm"]] * len(found), rel=1e-5)
        logprobs, wanted = (
            {k: v for rank in side for k, v in rank["rows"][number]["logprobs"].items()} for side in (found, expected)
        )
        assert logprobs.keys() == wanted.keys()
        for key, values in wanted.items():
            assert logprobs[key] == pytest.approx(values, abs=1e-5)
    weights, wanted_weights = found[0]["weights"], expected[0]["weights"]
    assert weights.keys() == wanted_weights.keys()
    for name, values in wanted_weights.items():
        assert np.allclose(weights[name], values, atol=1e-5, rtol=0), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_three_updates_are_those_of_fsdp(results: Path, case: Case):
    assert_same(read(results, case, "megatron"), read(results, case, "fsdp"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_backend_resumes_from_the_other(results: Path, case: Case):
    """The fourth update from the checkpoint of the other backend: weights, reference, moments and step counts."""
    found, expected = read(results, case, "megatron resumes"), read(results, case, "fsdp resumes")
    assert_same(found, expected)
    before, after = read(results, case, "fsdp")[0]["weights"], found[0]["weights"]
    assert not all(np.allclose(before[name], after[name], atol=1e-4) for name in before)


@pytest.mark.release
def test_pipelines_of_three_stages(folder: Path):
    run_world(folder, 3)
    for case in STAGES:
        for name in ("", " resumes"):
            assert_same(read(folder, case, f"megatron{name}"), read(folder, case, f"fsdp{name}"))
