"""Contract of a trainer rank and its backend: any number of ranks, sharded and split in any way, trains as one rank.

Every world runs in its own processes with gloo. Each process trains the same steps and writes its metrics and the
gathered weights; they are compared with those of one rank of FSDP2. All backends pass the same tests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from gcore.config.tree import Config
from gcore.cost.workload import CostModel
from gcore.models.networks import make_empty
from gcore.observe.trace import Tracer
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import metas_of
from gcore.preparation.step_times import shared_tokens
from gcore.prompts.tokenizer import load_tokenizer
from gcore.protocols import Metric, Receivers, Rendezvous, add_metrics
from gcore.runtime.gloo import join
from gcore.training import tensor_parallel
from gcore.training.backend import NewNetwork
from gcore.training.critic import networks_of
from gcore.training.fsdp import FsdpBackend, FsdpNetwork
from gcore.training.rank import TrainerRank
from gcore.types import Topology, UserError
from gcore.weights.bucket import unpack_bucket
from gcore.weights.pretrained import open_weights
from tests.e2e.helpers import RECIPE
from tests.ranks import finish_ranks, free_address, start_ranks
from tests.unit.test_training import CPU, config_of, network_of, samples_of

TINY = {**RECIPE["model"]["build"], "hidden_size": 32, "heads": 4, "kv_heads": 4}
QWEN3, QWEN2 = ({"build": {**TINY, "architecture": name}} for name in ("qwen3", "qwen2"))  # norms of heads; biases
ALGORITHMS: dict[str, dict[str, Any]] = {
    "kl and entropy": {"mini_batches": 2, "kl_coef": 0.1, "entropy_coef": 0.01, "loss_aggregation": "sequence_mean"},
    "kl in the reward, whitened": {"adv_estimator": "reinforce_pp", "kl_coef": 0.1, "kl_in": "reward"},
    "gspo": {"policy_loss": "gspo", "mini_batches": 3, "clip_ratio_low": 0.01, "clip_ratio_high": 0.01},
    "ppo with a critic": {
        **{
            "adv_estimator": "gae",
            "mini_batches": 2,
            "epochs": 2,
            "gae_lambda": 0.9,
            "adaptive_entropy": {"target": 9.0},
        },
        **{"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
        "adaptive_kl": {"target": 0.01, "horizon": 100},
    },
}
CASES = list(zip(ALGORITHMS, ("qwen3", "qwen2", "qwen3", "qwen3"), strict=True))


class World(NamedTuple):
    """How ranks divide the model. World("fsdp", Topology(4, tensor=2), shard=2)"""

    backend: str
    topology: Topology
    shard: int = 1
    shares: bool = False  # siblings share their prompt

    @property
    def name(self) -> str:
        _, *degrees = dataclasses.astuple(self.topology)
        shares = ["shares"] * self.shares
        return "-".join(map(str, (self.backend, self.topology.ranks, self.shard, *degrees, *shares)))


ALONE = World("fsdp", Topology(1))
FSDP = [(2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 2, 1), (4, 2, 2), (4, 1, 4)]  # ranks, shard, tensor
MEGATRON = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2)]  # ranks, tensor, pipeline; more in test_resharding.py
SHARING = [World("fsdp", Topology(2, tensor), shard, shares=True) for shard, tensor in ((2, 1), (1, 2))]
WORLDS = [
    World("fsdp", Topology(1), shares=True),
    *SHARING,
    *(World("fsdp", Topology(ranks, tensor), shard) for ranks, shard, tensor in FSDP),
    *(World("megatron", Topology(*degrees)) for degrees in MEGATRON if importlib.util.find_spec("megatron")),
]
MORE = [world for world in WORLDS if world.topology.ranks == 4 and (world.shard, world.topology.tensor) != (2, 2)]
FIRST = [world for world in WORLDS if world not in MORE]


def config_for(case: tuple[str, str]) -> Config:
    training, critic = {"max_grad_norm": 0.05, "lr": 1e-2}, {"max_grad_norm": 0.05, "lr": 1e-2}
    model = {"qwen3": QWEN3, "qwen2": QWEN2}[case[1]]
    return config_of(algorithm=ALGORITHMS[case[0]], model=model, training=training, critic=critic)


def backend_of(config: Config, world: World) -> Callable[[], Any]:
    """Makes the backend of a rank, with the starting weights that every world has."""
    tokenizer = load_tokenizer(config.model)
    make = partial(make_empty, config.model, tokenizer)
    weights = partial(open_weights, model=config.model, seed=config.run.seed, tokenizer=tokenizer)
    networks = networks_of(config, NewNetwork(make, open=weights), tokenizer, 64)
    if world.backend == "megatron":
        from gcore.training.megatron.backend import MegatronBackend

        return partial(MegatronBackend, config, networks, CPU, torch.float32, world.topology)
    return partial(FsdpBackend, config, networks, CPU, torch.float32, world.shard, world.topology.tensor)


def parameters_of(critic: Any) -> dict[str, Any]:
    if isinstance(critic, FsdpNetwork):
        return critic.parameters
    from gcore.training.megatron.weights import Gatherer

    return dict(Gatherer(critic.parameters, critic.empty, CPU).tensors())


def train(config: Config, rank: int, world: World) -> dict[str, Any]:
    """Two steps, from the same samples in every world. Metrics of this rank, and all weights."""
    trainer = TrainerRank(config, backend_of(config, world), rank, 1, Tracer(None, f"trainer-{rank}"))

    async def run() -> dict[str, Any]:
        await trainer.end_warm_start()
        rows: list[dict[str, Any]] = []
        for step in (1, 2):
            samples = samples_of(step, prompts=6)
            layout = make_layout(
                metas_of(samples),
                step=step,
                shares=world.shares,
                num_ranks=world.topology.data_parallel,
                mini_batches=config.algorithm.mini_batches,
                max_tokens=60,
                cost=CostModel(100.0),
            )
            assert (shared_tokens(layout, metas_of(samples)) > 0) == world.shares
            batch = layout[world.topology.data_rank(rank)]
            batch = dataclasses.replace(batch, advantages={s.key: s.reward for s in samples if s.key in batch.keys})
            await trainer.push(0, [s for s in samples if s.key in batch.advantages])
            kl = await trainer.compute_logprobs(batch)
            stats = await trainer.update(batch)
            metrics = {name: dataclasses.astuple(metric) for name, metric in stats.metrics.items()}
            rows.append({"norm": stats.grad_norm, "kl": [[*key, value] for key, value in kl.items()], **metrics})
        plan = await trainer.weight_plan()
        weights: dict[str, Any] = {}
        for index in range(plan.num_buckets):
            weights |= unpack_bucket(await trainer.weight_bucket(index, Receivers(())))
        if "critic" in trainer.backend.networks:
            critic = parameters_of(trainer.backend.networks["critic"])
            weights |= {f"critic/{name}": p.full_tensor().detach() for name, p in critic.items()}
        return {"rows": rows, "weights": {name: value.tolist() for name, value in weights.items()}}

    return asyncio.run(run())


def world_member(rank: int, size: int, address: str, folder: str, worlds: list[World]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    join(Rendezvous(rank, size, address), "gloo", timeout_s=120)
    for world in worlds:
        for number, case in enumerate(CASES if world.topology.ranks == size else ()):
            result = train(config_for(case), rank, world)
            (Path(folder) / f"{world.name}-{number}-{rank}.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_worlds(tmp_path_factory.mktemp("worlds"), [ALONE, *FIRST])


@pytest.fixture(scope="module")
def more_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_worlds(tmp_path_factory.mktemp("worlds"), [ALONE, *MORE])


def run_worlds(folder: Path, worlds: list[World]) -> Path:
    """Their files."""
    for size in sorted({world.topology.ranks for world in worlds}):
        finish_ranks(start_ranks(size, world_member, size, free_address(), str(folder), worlds))
    return folder


def read(folder: Path, world: World, number: int) -> list[dict[str, Any]]:
    files = [folder / f"{world.name}-{number}-{rank}.json" for rank in range(world.topology.ranks)]
    return [json.loads(file.read_text()) for file in files]


def metrics_of(ranks: list[dict[str, Any]], step: int) -> dict[str, float]:
    parts = [{name: Metric(*v) for name, v in r["rows"][step].items() if "/" in name} for r in ranks]
    return {name: metric.value for name, metric in add_metrics(*parts).items()}


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(case) for case in CASES])
@pytest.mark.parametrize("world", FIRST, ids=[world.name for world in FIRST])
def test_all_worlds_train_as_one_rank(results: Path, world: World, number: int):
    check_world(results, world, number)


@pytest.mark.release
@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(case) for case in CASES])
@pytest.mark.parametrize("world", MORE, ids=[world.name for world in MORE])
def test_more_worlds(more_results: Path, world: World, number: int):
    check_world(more_results, world, number)


def check_world(folder: Path, world: World, number: int) -> None:
    (alone,), ranks = read(folder, ALONE, number), read(folder, world, number)
    for step in range(2):
        expected = metrics_of([alone], step)
        assert metrics_of(ranks, step) == pytest.approx(expected, abs=1e-5, rel=1e-5)
        assert abs(expected["actor/loss"]) > 1e-3 and len(expected) >= 9
        if "critic" in CASES[number][0] and step == 0:  # values are 0
            assert expected["critic/loss"] > 1e-2 and expected["critic/explained_variance"] == 0
            assert expected["actor/kl_coef"] == pytest.approx(0.1, abs=1e-9)
        elif "critic" in CASES[number][0]:
            assert expected["critic/loss"] > 1e-2 and expected["critic/explained_variance"] != 0
            assert expected["actor/kl_coef"] != 0.1 and expected["actor/entropy_coef"] == pytest.approx(0.005)
        norms = {rank["rows"][step]["norm"] for rank in ranks}
        assert len(norms) == 1 and norms.pop() == pytest.approx(alone["rows"][step]["norm"], rel=1e-4)
        kl = {(prompt, sibling): value for rank in ranks for prompt, sibling, value in rank["rows"][step]["kl"]}
        alone_kl = {(prompt, sibling): value for prompt, sibling, value in alone["rows"][step]["kl"]}
        assert kl == pytest.approx(alone_kl, abs=1e-5)
    assert alone["rows"][0]["norm"] > 0.05  # clipped
    weights, expected_weights = ranks[0]["weights"], alone["weights"]
    assert weights.keys() == expected_weights.keys()
    start = dict(network_of(config_for(CASES[number])).named_parameters())
    start |= {f"critic/{name}": value for name, value in start.items()} | {"critic/score.weight": torch.zeros(1)}
    for name, value in expected_weights.items():
        assert np.allclose(weights[name], value, atol=2e-4, rtol=0), name
        assert not np.allclose(start[name].detach().numpy(), value, atol=1e-3, rtol=0), name


def test_a_model_that_cannot_be_split_is_refused():
    config = network_of(config_of(model=QWEN3)).config
    tensor_parallel.check(config, 2)
    with pytest.raises(UserError, match=r"placement\.trainer\.tensor_parallel=3 must divide num_attention_heads=4"):
        tensor_parallel.check(config, 3)
    config.base_model_tp_plan = None
    with pytest.raises(UserError, match=r"no tensor-parallel plan for a model of type qwen3; expected 1"):
        tensor_parallel.check(config, 2)
    config.base_model_tp_plan = {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}
    with pytest.raises(UserError, match=r"needs packed_colwise, which is not supported"):
        tensor_parallel.check(config, 2)
