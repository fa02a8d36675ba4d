"""No trainer rank ever holds a whole model: four ranks that share one copy start, train, publish, save and load.

The memory of each process (anonymous pages, as Linux counts them) is read every millisecond. Files that are mapped do
not count. A first round with a small model loads all libraries, so that the second one shows the model alone.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gcore.config.tree import Config
from gcore.cost.workload import CostModel
from gcore.models.networks import make_empty
from gcore.observe.trace import Tracer
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import meta_of
from gcore.prompts.tokenizer import load_tokenizer
from gcore.protocols import Receivers, Rendezvous
from gcore.runtime.gloo import join
from gcore.training.backend import NewNetwork
from gcore.training.fsdp import FsdpBackend
from gcore.training.rank import TrainerRank
from gcore.weights import bucket
from gcore.weights.pretrained import open_weights
from gcore.weights.publisher import WeightPublisher
from tests.contract.test_families import family
from tests.unit.test_training import CPU, config_of, samples_of, save_state, update

STATUS = Path("/proc/self/status")
RANKS = 4
BUCKET_BYTES = 6 * 2**20
MODELS: dict[str, dict[str, Any]] = {
    "small": {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64},
    "large": {"num_hidden_layers": 12, "hidden_size": 384, "intermediate_size": 1536, "vocab_size": 4096},
}
# Of one float32 copy. The first number counts what is kept in shards: weights, reference, gradients, two moments; with
# a save also the copy of all but the gradients in host memory. The second is a margin for gathered layers, activations,
# one bucket and its packed block.
LIMITS = {
    "start": 1 / RANKS + 0.2,
    "begin": 2 / RANKS + 0.2,
    "update": 5 / RANKS + 0.4,
    "publish": 4 / RANKS + 0.5,
    "save": 8 / RANKS + 0.4,
    "load": 8 / RANKS + 0.4,
}

pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="reads the memory of a process as Linux shows it")


class Memory:
    """The peak of this process's own memory in each phase, in bytes above the start."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._first, self._phase = self._now(), "start"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def _now() -> int:
        found = re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text())
        assert found
        return int(found[1]) * 1024

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self._measure()

    def _measure(self) -> None:
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self._now() - self._first)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase = name
        yield
        self._measure()

    def close(self) -> dict[str, int]:
        self._stop.set()
        self._thread.join()
        return self.peaks


def trainer_of(rank: int, config: Config) -> TrainerRank:
    tokenizer = load_tokenizer(config_of().model)
    weights = partial(open_weights, model=config.model, seed=0, tokenizer=tokenizer)
    policy = NewNetwork(partial(make_empty, config.model, tokenizer, 24), open=weights)
    backend = partial(FsdpBackend, config, {"policy": policy}, CPU, torch.float32, shard=RANKS)
    return TrainerRank(config, backend, rank, 1, Tracer(None, f"trainer-{rank}"), WeightPublisher(rank))


def run_all(rank: int, model: Path, folder: Path) -> dict[str, int]:
    """Everything that a rank does with weights; returns the peak of each phase."""
    config = config_of(model={"build": None, "path": str(model)}, algorithm={"kl_coef": 0.1})
    folder.mkdir(exist_ok=True)
    memory = Memory()
    with memory.phase("start"):
        trainer = trainer_of(rank, config)
    with memory.phase("begin"):
        asyncio.run(trainer.end_warm_start())
    samples = samples_of(0)
    layout = {"step": 1, "mini_batches": 1, "max_tokens": 20, "cost": CostModel(100.0), "objective": "policy"}
    batch = make_layout([meta_of(s) for s in samples], num_ranks=RANKS, **layout)[rank]
    assert len(batch.mini_batches[0].micro_batches) > 1  # gradients are sharded after each of them
    with memory.phase("update"):
        assert update(trainer, [s for s in samples if s.key in batch.keys], batch).grad_norm > 0
    with memory.phase("publish"):
        num_buckets = asyncio.run(trainer.weight_plan()).num_buckets
        assert num_buckets > 10 or model.name == "small"
        for index in range(num_buckets):
            asyncio.run(trainer.weight_bucket(index, Receivers(())))
    with memory.phase("save"):
        save_state(trainer, folder)
        dist.barrier()
    with memory.phase("load"):
        asyncio.run(trainer.load(str(folder)))
    return memory.close()


def _rank(rank: int, address: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    bucket.BUCKET_BYTES = BUCKET_BYTES
    join(Rendezvous(rank, RANKS, address), "gloo", timeout_s=120)
    here = Path(folder)
    for name in MODELS:
        peaks = run_all(rank, here / name, here / f"saved-{name}")
        time.sleep(0.2)
    (here / f"rank-{rank}.json").write_text(json.dumps(peaks))


def spawn(target: Callable[..., None], *args: Any) -> list[int | None]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=target, args=(i, address, *args), daemon=True) for i in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(240)
        rank.kill()
    return [rank.exitcode for rank in ranks]


@pytest.mark.release
def test_no_rank_holds_a_whole_model(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    for name, sizes in MODELS.items():
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(family("LlamaConfig", **sizes, tie_word_embeddings=True)())
        network.bfloat16().save_pretrained(tmp_path / name)  # read as float32
    whole = sum(parameter.numel() for parameter in network.parameters()) * 4
    assert 90e6 < whole < 120e6
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**16))  # freed memory goes back to the system at once
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(2**16))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert spawn(_rank, str(tmp_path)) == [0] * RANKS
    for rank in range(RANKS):
        peaks = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        copies = {phase: round(peak / whole, 2) for phase, peak in peaks.items()}
        print(rank, copies)
        assert copies.keys() == LIMITS.keys()
        assert all(copies[phase] < limit for phase, limit in LIMITS.items()), (rank, copies, LIMITS)
