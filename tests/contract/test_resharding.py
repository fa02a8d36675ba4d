"""A checkpoint of any world of trainer ranks is loaded by any other: the next step is the same.

Four processes form one world after another; those that are not in it wait for the next.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gcore.checkpoint import tensors
from gcore.cost.workload import CostModel
from gcore.observe.trace import Tracer
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import meta_of
from gcore.protocols import Metric, add_metrics
from gcore.training.rank import TrainerRank
from gcore.types import Topology
from tests.contract.test_trainer import QWEN3, World, backend_of
from tests.ranks import finish_ranks, start_ranks
from tests.unit.test_training import config_of, samples_of, save_state

FSDP = {"1": (1, 1, 1), "2": (2, 2, 1), "4": (4, 4, 1), "2 x 2": (4, 2, 2)}  # ranks, shard, tensor
MEGATRON = {"megatron 3": Topology(3), "megatron 2 x 2": Topology(4, tensor=2, pipeline=2)}
FOUND = {name: World("megatron", ways) for name, ways in MEGATRON.items() if importlib.util.find_spec("megatron")}
BOTH = {name: World("fsdp", Topology(ranks, tensor), shard) for name, (ranks, shard, tensor) in FSDP.items()} | FOUND
SAVED = BOTH | {"4 in 2 copies": World("fsdp", Topology(4), shard=2)}
LOADED = BOTH | {"3": World("fsdp", Topology(3), shard=3)}
STEPS = 3  # before the save
PARTS = ("weights", "optimizer", "reference", "critic", "critic_optimizer")


def trainer_of(rank: int, world: World, seed: int) -> TrainerRank:
    algorithm = {"adv_estimator": "gae", "kl_coef": 0.1, "kl_in": "reward"}
    algorithm |= {"adaptive_kl": {"target": 0.01, "horizon": 100}}
    training, critic = {"lr": 1e-2}, {"lr": 1e-2}
    config = config_of(model=QWEN3, algorithm=algorithm, training=training, critic=critic, run={"seed": seed})
    return TrainerRank(config, backend_of(config, world), rank, 1, Tracer(None, f"trainer-{rank}"))


async def step(trainer: TrainerRank, number: int, rank: int, topology: Topology) -> list[dict[str, Any]]:
    """Metrics of every data-parallel rank."""
    samples = samples_of(number, prompts=6)
    layout = make_layout(
        [meta_of(s) for s in samples],
        step=number + 1,  # from 1, as in a run
        num_ranks=topology.data_parallel,
        mini_batches=1,
        max_tokens=60,
        cost=CostModel(100.0),
    )
    batch = layout[topology.data_rank(rank)]
    batch = dataclasses.replace(batch, advantages={s.key: s.reward for s in samples if s.key in batch.keys})
    await trainer.push(0, [s for s in samples if s.key in batch.advantages])
    await trainer.compute_logprobs(batch)
    stats = await trainer.update(batch)
    own = {name: dataclasses.astuple(metric) for name, metric in stats.metrics.items()} | {"norm": stats.grad_norm}
    found: list[Any] = [None] * topology.ranks
    dist.all_gather_object(found, own)
    return [found[topology.ranks_of(data_rank)[0]] for data_rank in range(topology.data_parallel)]


def member(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    here = Path(folder)
    worlds = [("saved", *item) for item in SAVED.items()] + [("loaded", *item) for item in LOADED.items()]
    for kind, name, world in worlds:
        size = world.topology.ranks
        if rank >= size:
            continue
        store = dist.FileStore(str(here / f"{kind} {name}.store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=240))
        sources = [""] if kind == "saved" else list(SAVED)
        for source in sources:
            trainer = trainer_of(rank, world, seed=3 if kind == "saved" else 99)
            result = asyncio.run(one(trainer, kind, here, name, source, (rank, world.topology)))
            if rank == 0:
                (here / f"{kind}, {name}, {source}.json").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()


async def one(trainer: TrainerRank, kind: str, here: Path, name: str, source: str, place: tuple[int, Topology]) -> Any:
    """A world that saves goes on with the next step too, so that its loss is the one to expect."""
    if kind == "saved":
        await trainer.end_warm_start()
        for number in range(STEPS):
            await step(trainer, number, *place)
        (here / name).mkdir(exist_ok=True)
        await asyncio.to_thread(save_state, trainer, here / name)
        dist.barrier()
    else:
        await trainer.load(str(here / source))
        assert trainer.trained["policy"].updates == trainer.trained["critic"].updates == STEPS
    return [await step(trainer, number, *place) for number in (STEPS, STEPS + 1)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resharding")
    finish_ranks(start_ranks(4, member, str(folder)), limit_s=500)
    return folder


def losses(file: Path) -> list[dict[str, float]]:
    found = []
    for ranks in json.loads(file.read_text()):
        parts = [{name: Metric(*value) for name, value in r.items() if name != "norm"} for r in ranks]
        found.append({name: metric.value for name, metric in add_metrics(*parts).items()} | {"norm": ranks[0]["norm"]})
    return found


@pytest.mark.release
@pytest.mark.parametrize("source", list(SAVED))
@pytest.mark.parametrize("name", list(LOADED))
def test_the_next_steps_are_those_of_the_world_that_saved(results: Path, source: str, name: str):
    expected, found = losses(results / f"saved, {source}, .json"), losses(results / f"loaded, {name}, {source}.json")
    assert abs(expected[0]["actor/loss"]) > 1e-3
    for now, before in zip(found, expected, strict=True):
        assert now["actor/loss"] == pytest.approx(before["actor/loss"], abs=1e-6)
        assert now == pytest.approx(before, abs=1e-5)


@pytest.mark.release
def test_no_value_is_stored_twice(results: Path):
    """Also with copies of the weights, and of norms within a tensor-parallel group."""
    sizes = {}
    for name in SAVED:
        for part in PARTS:
            files = list((results / name / part).glob(tensors.FILES))
            sizes[name, part] = sum(_values(file) for file in files)
            assert len(files) == SAVED[name].topology.ranks or "optimizer" in part
    for part in PARTS:
        assert len({sizes[name, part] for name in SAVED}) == 1


def _values(file: Path) -> int:
    with open(file, "rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
