"""Weights in FP8: the numbers, against a reference of one block after another; what is sent, and what arrives."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from gcore.config.base import Serving
from gcore.protocols import Receivers
from gcore.weights.bucket import PACKED, Bucket, unpack_bucket
from gcore.weights.fp8 import SCALE, is_quantised, quantised, restored, round_parameters
from gcore.weights.publisher import WeightPublisher
from tests.contract.test_engine import ask, bits, embedded, network_of, prompt, run

ENGINES = Receivers(("engine-0",))


def e4m3() -> np.ndarray:
    """All finite numbers of one sign, by the definition: 4 bits of exponent with bias 7, 3 bits of fraction."""
    found = [m / 8 * 2.0**-6 for m in range(8)]
    found += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array(found[:-1])  # the last one is NaN


def reference(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    table, rounded = e4m3(), np.zeros_like(matrix)
    scales = np.zeros([-(-size // 128) for size in matrix.shape])
    for i, j in np.ndindex(scales.shape):
        part = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        block = matrix[part]
        scales[i, j] = np.abs(block).max() / 448 or 1.0
        distance = np.abs(np.abs(block / scales[i, j])[..., None] - table)
        rounded[part] = np.sign(block) * table[distance.argmin(-1)] * scales[i, j]
    return rounded, scales


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (100, 130), (1, 5)])
def test_numbers_are_the_nearest_of_a_block(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape) * torch.logspace(-3, 3, shape[1])
    matrix[:, -1:] *= 1e-4  # far below the largest of the block: subnormal, or 0
    numbers, scales = quantised(matrix)
    expected, expected_scales = reference(matrix.double().numpy())
    assert (numbers.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert np.allclose(scales.numpy(), expected_scales, rtol=1e-6)
    found = restored(numbers, scales).double().numpy()
    steps = np.spacing(np.float32(1)) + np.abs(expected) * 1e-6
    same = np.abs(found - expected) <= steps
    assert same.mean() > 0.999  # ties, which are rounded to even
    most = np.abs(expected) / 16 + 2.0**-10 * scales.max().item()  # half a step: of 3 bits, or of the smallest numbers
    assert (np.abs(found - matrix.double().numpy()) <= most * 1.001).all()


def test_zeros_and_stacked_experts():
    numbers, scales = quantised(torch.zeros(3, 130, 128))
    assert scales.shape == (3, 2, 1) and (restored(numbers, scales) == 0).all()
    experts = torch.randn(3, 130, 128)
    for whole, one in zip(zip(*quantised(experts), strict=True), experts, strict=True):
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(whole, quantised(one), strict=True))


def test_which_parameters():
    network = network_of("qwen3_moe", experts=4, active_experts=2)
    chosen = {name.split(".", 3)[-1] for name, p in network.named_parameters() if is_quantised(name, p)}
    attention = {f"self_attn.{part}_proj.weight" for part in "qkvo"}
    assert chosen == attention | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    for name in ("visual.blocks.0.attn.qkv.weight", "vision_tower.encoder.layers.0.self_attn.q_proj.weight"):
        assert not is_quantised(name, torch.zeros(2, 2))


def test_an_update_in_fp8_is_checked_and_gives_the_rounded_network():
    old, new, rounded = network_of(seed=1), network_of(seed=2), network_of(seed=2)
    round_parameters(rounded)
    parameters = dict(new.named_parameters())
    sent = WeightPublisher(0, "host_memory", torch.float32, fp8=True).bucket(parameters, 0, ENGINES)
    whole = WeightPublisher(0, "host_memory", torch.float32).bucket(parameters, 0, ENGINES)
    bucket: Bucket = sent[PACKED]
    assert bucket.payload.nbytes < 0.3 * whole[PACKED].payload.nbytes
    tensors = unpack_bucket(sent)
    name = "model.layers.1.mlp.up_proj.weight"
    assert tensors[name].dtype == torch.float8_e4m3fn and tensors[name + SCALE].shape == (1, 1)
    to_critics = WeightPublisher(0, "host_memory", fp8=True).bucket(parameters, 0, Receivers((), are_critics=True))
    assert torch.equal(unpack_bucket(to_critics)[name], parameters[name])

    requests = [ask(prompt(n, n), 12, key=n) for n in (3, 9, 20)]
    engine, expected = embedded(old), embedded(rounded)
    damaged = bucket.payload.copy()
    damaged[100] ^= 1
    with pytest.raises(Exception, match="damaged"):
        asyncio.run(engine.load_weights(1, {PACKED: Bucket(bucket.table, damaged, bucket.checksum)}))
    asyncio.run(engine.load_weights(1, sent))
    assert [bits(c) for c in run(engine, *requests)] == [bits(c) for c in run(expected, *requests)]
    for each in (engine, expected):
        each.close()


def test_an_engine_that_cannot_take_it_is_refused():
    with pytest.raises(ValueError, match="precision=fp8 needs engine=embedded or vllm, got sglang; expected"):
        Serving(engine="sglang", precision="fp8")
