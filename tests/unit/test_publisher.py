"""WeightPublisher and its transfer method: what each rank publishes, and which memory it keeps."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from gcore.config.placement import Placement
from gcore.protocols import Receivers, WeightPlan
from gcore.weights import bucket, publisher
from gcore.weights.bucket import PACKED, bucket_names, unpack_bucket
from gcore.weights.publisher import WeightPublisher, choose_method

ENGINES = Receivers(("engine-0",))
PARAMETERS = {f"layer.{i}": torch.arange(4.0) + i for i in range(4)}


@pytest.fixture
def one_each(monkeypatch):
    """Buckets of one parameter."""
    monkeypatch.setattr(bucket, "BUCKET_BYTES", 0)


def test_the_method_of_a_run():
    def chosen(weights: str, mode: str, one_process: bool, on_gpu: bool) -> str:
        return choose_method(Placement.model_construct(weights=weights, mode=mode), one_process, on_gpu)

    for weights, mode, on_gpu in product(("auto", "host", "broadcast"), ("shared", "disaggregated"), (True, False)):
        assert chosen(weights, mode, True, on_gpu) == "in_process"
        if weights != "auto":
            expected = {"host": "host_memory", "broadcast": "broadcast"}[weights]
            assert chosen(weights, mode, False, on_gpu) == expected
    assert chosen("auto", "shared", False, True) == "cuda_ipc"
    assert chosen("auto", "disaggregated", False, True) == "broadcast"
    assert chosen("auto", "shared", False, False) == chosen("auto", "disaggregated", False, False) == "host_memory"


def test_a_bucket_is_closed_when_it_holds_more_than_the_limit(monkeypatch):
    monkeypatch.setattr(bucket, "BUCKET_BYTES", 16)
    assert bucket_names(PARAMETERS, torch.float32) == [["layer.0", "layer.1"], ["layer.2", "layer.3"]]
    assert bucket_names(PARAMETERS, torch.bfloat16) == [["layer.0", "layer.1", "layer.2"], ["layer.3"]]


@pytest.mark.parametrize("method", ["in_process", "host_memory"])
def test_rank_0_publishes_in_the_precision_of_the_engines(one_each, method):
    rank_0, rank_1 = (WeightPublisher(rank, method, torch.bfloat16) for rank in (0, 1))
    assert rank_0.plan(PARAMETERS) == WeightPlan(4, every_rank=False, critic_buckets=4)
    weights = rank_0.bucket(PARAMETERS, 2, ENGINES)
    assert (PACKED in weights) == (method == "host_memory")
    (found,) = unpack_bucket(weights).items()
    assert found[0] == "layer.2" and torch.equal(found[1], PARAMETERS["layer.2"].bfloat16())
    assert rank_1.bucket(PARAMETERS, 2, ENGINES) == {}


def test_factors_of_adapters_travel_in_float32():
    factors = {"q_proj.lora_A.weight": torch.rand(2, 8), "q_proj.lora_B.weight": torch.rand(8, 2)}
    found = unpack_bucket(WeightPublisher(0, "host_memory", torch.bfloat16).bucket(factors, 0, ENGINES))
    assert all(torch.equal(found[name], factors[name]) for name in factors)


def test_with_handles_every_rank_publishes_and_keeps_two_blocks(one_each, monkeypatch):
    """Engines read the blocks of this process. The handle itself needs a GPU."""
    monkeypatch.setattr(publisher, "CudaHandle", lambda block: block.numpy())
    made = WeightPublisher(1, "cuda_ipc")
    assert made.plan(PARAMETERS) == WeightPlan(4, every_rank=True, critic_buckets=4)
    held = []
    for index in range(4):
        assert [*unpack_bucket(made.bucket(PARAMETERS, index, ENGINES))] == [f"layer.{index}"]
        held.append(sorted(made._exported))
    assert held == [[0], [0, 1], [1, 2], [2, 3]]
    made.release()
    assert made._exported == {}


class Sender:
    """Records the calls of a BroadcastSender."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def connect(self, names: tuple[str, ...], restarted: bool) -> None:
        self.log.append((names, restarted))

    def send(self, block: torch.Tensor) -> object:
        self.log.append(len(block))
        return block.numpy()

    def wait_sent(self) -> None:
        self.log.append("sent")


def test_a_broadcast_connects_with_the_first_bucket_of_an_update(one_each):
    sender = Sender()
    made = WeightPublisher(0, "broadcast", sender=sender)
    for index in range(4):
        made.bucket(PARAMETERS, index, Receivers(("engine-1",), restarted=True))
    made.release()
    assert sender.log == [(("engine-1",), True), 16, 16, 16, 16, "sent"]
