"""Shapes and costs: hand-computed numbers, and those measured on an H200."""

import json

import pytest

from gcore.cost import costs
from gcore.cost.costs import ENGINE, GPUS, REACH, SHAPES, Shape, gpu_of, shape_of
from gcore.cost.replica_speed import ReplicaSpeed
from gcore.types import UserError

H200 = GPUS["h200"]
TINY = Shape("tiny", layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocab=10)


# ---- speed ----


def test_a_step_is_linear_and_waiting_requests_do_not_slow_it():
    speed = ReplicaSpeed(0.01, 0.001, 0.0001, max_concurrent=10, sleep_s=0.1, wake_s=0.2, weights_s=0.3)
    assert [speed.step_s(n) for n in (0, 1, 10, 99)] == pytest.approx([0.011, 0.011, 0.02, 0.02])


def test_the_published_rate_of_a_gpu_by_the_name_that_its_driver_gives_it():
    names = (
        "NVIDIA H200",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 PCIe",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA B200",
        "NVIDIA L40S",
    )
    assert [costs.peak_flops(name) for name in names] == [989e12, 989e12, 756e12, 312e12, 2250e12, 362e12]
    assert costs.peak_flops("NVIDIA GeForce GTX 1080") is None and costs.peak_flops("") is None


# ---- shapes ----

PUBLISHED = {  # billions, from the model cards
    "0.5B": 0.49,
    "1.5B": 1.54,
    "3B": 3.09,
    "7B": 7.61,
    "14B": 14.7,
    "32B": 32.5,
    "72B": 72.7,
    "30B-A3B": 30.5,
    "235B-A22B": 235.0,
}


def test_parameters_are_those_published():
    assert set(PUBLISHED) == set(SHAPES)
    for name, billions in PUBLISHED.items():
        assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=0.03), name
    assert SHAPES["30B-A3B"].active_parameters / 1e9 == pytest.approx(3.3, rel=0.03)
    assert SHAPES["235B-A22B"].active_parameters / 1e9 == pytest.approx(22, rel=0.03)


def test_a_tiny_shape_by_hand():
    # attention: q and o 8x8 each, k and v 8x4 each = 192; mlp 3 x 8 x 16 = 384; two norms of 8
    assert TINY.layer_parameters == 192 + 384 + 16
    assert TINY.parameters == 2 * 592 + 2 * 80 + 8
    assert TINY.weight_bytes == 2 * TINY.parameters
    assert TINY.kv_bytes_per_token == 2 * 2 * 1 * 4 * 2  # keys and values, layers, heads, dimensions, bytes
    assert TINY.product_parameters == TINY.parameters - 80  # the embedding is looked up
    assert TINY.forward_flops(5) == 2 * TINY.product_parameters + 4 * 2 * 8 * 5
    assert TINY.read_bytes(7) == 2 * TINY.product_parameters


def test_a_mixture_by_hand():
    mixture = Shape("m", 2, 8, 16, 2, 1, 4, 10, tied=True, experts=4, active_experts=1)
    assert mixture.parameters == 2 * (192 + 4 * 384 + 8 * 4 + 16) + 80 + 8
    assert mixture.active_parameters == mixture.parameters - 2 * 3 * 384
    one, many = mixture.read_bytes(1), mixture.read_bytes(1000)
    assert one == pytest.approx(2 * mixture.product_parameters)  # one token, one expert per layer
    assert many == pytest.approx(2 * mixture.parameters)  # in the end all are read
    assert mixture.read_bytes(2) == pytest.approx(
        one + 2 * 2 * 384 * 0.75
    )  # the second token uses another expert in 3 of 4 cases


def test_known_caches():
    """Bytes of KV cache per token in bfloat16, as engines report them."""
    assert [SHAPES[n].kv_bytes_per_token for n in ("1.5B", "32B", "72B")] == [28_672, 262_144, 327_680]


@pytest.mark.parametrize("size, billions", [("8B", 8), ("70B", 70), ("405B", 405), ("1.1b", 1.1), ("360M", 0.36)])
def test_other_sizes_are_scaled(size, billions):
    shape = shape_of(size)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.06)
    assert "scaled from" in shape.source
    assert shape.heads % shape.kv_heads == 0 and shape.hidden == shape.heads * shape.head_dim


def config(**other):
    return {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 10,
    } | other


def test_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config()))
    shape = shape_of(str(tmp_path))
    assert shape.parameters == TINY.parameters and shape.head_dim == 4 and not shape.tied
    assert shape_of(str(tmp_path / "config.json")) == shape
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config(head_dim=6, tie_word_embeddings=True)}))
    assert (shape_of(str(tmp_path)).head_dim, shape_of(str(tmp_path)).tied) == (6, True)
    mixed = config(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=5, n_shared_experts=1)
    (tmp_path / "config.json").write_text(json.dumps(mixed))
    shape = shape_of(str(tmp_path))
    assert (shape.experts, shape.active_experts, shape.intermediate) == (5, 3, 5)


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "cannot be read as JSON"),
        ("[]", "got list"),
        (json.dumps(config(hidden_size="8")), "hidden_size is '8'"),
        (json.dumps({"hidden_size": 8}), "num_attention_heads is None"),
        (json.dumps(config(kv_lora_rank=512)), "kv_lora_rank=512"),
    ],
)
def test_a_wrong_config_is_rejected(tmp_path, content, said):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=said):
        shape_of(str(tmp_path))


@pytest.mark.parametrize("text", ["32", "big", "0B", "9000B", "no/such/folder"])
def test_a_wrong_size_is_rejected(text):
    with pytest.raises(UserError, match=f"--judge {text}: .*expected a size"):
        shape_of(text, "--judge")


# ---- costs ----


def test_every_number_has_a_source():
    data = costs.hardware()
    assert {"h100", "h200", "h20", "a100"} <= set(data["gpus"])
    assert all(gpu["source"] for gpu in data["gpus"].values())
    assert all(entry["source"] for part in ("reach", "engine") for entry in data[part].values())


def test_an_unknown_gpu_is_rejected_with_a_suggestion():
    with pytest.raises(UserError, match=r"--gpu h10: unknown \(did you mean h100\?\).*a100, h100, h200, h20"):
        gpu_of("h10")
    assert gpu_of("H100") is GPUS["h100"]


def test_a_decoding_step_by_hand():
    """32B on two H100, 100 sequences of 2000 tokens: bandwidth is the bottleneck."""
    shape, gpu = SHAPES["32B"], GPUS["h100"]
    read = (2 * shape.product_parameters / 2 + 100 * 2000 * 262_144 / 2) / (3350e9 * 0.8)
    reduces = 2 * 64 * 1.2e-5 + 100 * 2 * 64 * 5120 * 2 * 2 * 0.5 / (450e9 * 0.7)
    assert costs.decode_step_s(shape, gpu, 2, 100, 2000) == pytest.approx(read + reduces + 0.002 + 100 * 1.8e-5)


def test_compute_is_the_bottleneck_of_a_gpu_with_little_compute():
    shape, gpu = SHAPES["72B"], GPUS["h20"]
    compute = 256 * shape.forward_flops(500) / 4 / (148e12 * 0.5)
    assert costs.decode_step_s(shape, gpu, 4, 256, 500) > compute > 0.5 * costs.decode_step_s(shape, gpu, 4, 256, 500)
    assert compute > shape.weight_bytes / 4 / (4000e9 * 0.8)


def test_more_gpus_than_key_heads_hold_copies():
    shape, gpu = SHAPES["7B"], GPUS["h100"]  # 4 key heads
    room = 72e9 - shape.weight_bytes / 8
    assert costs.kv_tokens(shape, gpu, 8) == int(room * 4 / shape.kv_bytes_per_token)
    assert costs.kv_tokens(SHAPES["72B"], gpu, 1) == 0
    step = [costs.decode_step_s(shape, gpu, 8, 100, context) for context in (1000, 2000)]
    assert step[1] - step[0] == pytest.approx(100 * 1000 * shape.kv_bytes_per_token / 4 / (3350e9 * 0.8))


def test_sleep_wake_and_weights_by_hand():
    shape, gpu = SHAPES["72B"], GPUS["h100"]
    share = shape.weight_bytes / 4
    assert costs.wake_s(shape, gpu, 4) == pytest.approx(0.1 + share / 32e9)
    speed = costs.serving(shape, gpu, 4, 2000)
    assert speed.sleep_s + speed.wake_s == pytest.approx(0.06 + 0.1 + share / 32e9)
    gathered = shape.weight_bytes * 63 / 64 / (400e9 * 0.7)  # eight adapters of 50 GB/s per machine
    assert costs.weight_sync_s(shape, gpu, 4, 64) == pytest.approx(0.03 + gathered + share / 200e9)
    assert gpu.host_s(2 * 32e9) == pytest.approx(2.0)


def test_training_by_hand():
    """32B on 64 H100: arithmetic. The same on few tokens: moving weights and gradients."""
    shape, gpu = SHAPES["32B"], GPUS["h100"]
    optimizer = 2 * 12 * shape.parameters / 64 / (3350e9 * 0.8)
    compute = 3 * 1e7 * shape.forward_flops(1000) / (64 * 989e12 * 0.39)
    assert costs.training_s(shape, gpu, 64, 1e7, 1000) == pytest.approx(compute + optimizer)
    moved = 8 * shape.parameters * 63 / 64 / (400e9 * 0.7)
    assert costs.training_s(shape, gpu, 64, 6400, 50) == pytest.approx(moved + optimizer)
    assert costs.logprob_s(shape, gpu, 64, 1e7, 1000) == pytest.approx(compute / 3 * 0.39 / 0.45)
    kept = costs.training_s(shape, gpu, 64, 1e7, 1000, checkpointing=False)
    assert kept == pytest.approx(compute * 0.39 / 0.49 + optimizer)


def test_measured_on_an_h200():
    """256 sequences of 64 + 512 tokens; training; weights from a trainer on the same GPU."""
    for size, measured in {"1.5B": 62_380, "7B": 24_352}.items():
        decoded = 256 / costs.decode_step_s(SHAPES[size], H200, 1, 256, 64 + 256)
        assert measured / 1.35 < decoded < measured * 1.35
    shape = SHAPES["1.5B"]
    for checkpointing, measured in ((False, 51_747), (True, 41_272)):
        trained = 256 * 576 / costs.training_s(shape, H200, 1, 256 * 576, 288, checkpointing=checkpointing)
        assert trained == pytest.approx(measured, rel=0.03)
    assert costs.weight_sync_s(shape, H200, 1, 1) == pytest.approx(0.046, rel=0.1)
    assert costs.weight_sync_s(SHAPES["7B"], H200, 1, 1) == pytest.approx(0.107, rel=0.1)


def test_more_of_anything_takes_longer_and_more_gpus_less():
    shape, gpu = SHAPES["32B"], GPUS["h100"]
    step = [costs.decode_step_s(shape, gpu, 4, running, 2000) for running in (1, 2, 8, 64, 256)]
    assert step == sorted(set(step))
    context = [costs.decode_step_s(shape, gpu, 4, 64, context) for context in (10, 1000, 10_000)]
    assert context == sorted(set(context))
    width = [costs.decode_step_s(shape, gpu, tp, 64, 2000) for tp in (2, 4, 8)]
    assert width == sorted(set(width), reverse=True)
    gpus = [costs.training_s(shape, gpu, n, 1e7, 1000) for n in (8, 16, 64, 512)]
    assert gpus == sorted(set(gpus), reverse=True)


@pytest.mark.parametrize(
    "model, gpu, tp, context, off",
    [("32B", "h100", 2, 2000, 0.01), ("1.5B", "h200", 1, 320, 0.04), ("72B", "h20", 4, 3000, 0.3)],
)
def test_the_linear_fit_is_close_to_the_steps(model, gpu, tp, context, off):
    shape = SHAPES[model]
    speed = costs.serving(shape, GPUS[gpu], tp, context)
    for running in range(1, speed.max_concurrent + 1):
        exact = costs.decode_step_s(shape, GPUS[gpu], tp, running, context)
        assert speed.step_s(running) == pytest.approx(exact, rel=off), running


def test_serving():
    shape, gpu = SHAPES["32B"], GPUS["h100"]
    speed = costs.serving(shape, gpu, 2, 2000)
    assert speed.max_concurrent == costs.kv_tokens(shape, gpu, 2) // 2000 == 149
    assert costs.serving(SHAPES["1.5B"], H200, 1, 320).max_concurrent == ENGINE.max_sequences
    assert speed.prefill_s_per_token == pytest.approx(costs.prefill_s(shape, gpu, 2, 1, 1000))
    assert speed.wake_s == costs.wake_s(shape, gpu, 2)
    assert costs.serving(shape, gpu, 2, 2000, is_policy=True).wake_s == ENGINE.wake_s, "the trainer sends the weights"
    with pytest.raises(
        UserError, match=r"72B on 1 x h100: the KV cache cannot hold .* 145 GB of weights per GPU; expected a higher"
    ):
        costs.serving(SHAPES["72B"], gpu, 1, 2000)


def test_prefill_by_hand():
    shape, gpu = SHAPES["7B"], GPUS["a100"]
    assert costs.prefill_s(shape, gpu, 1, 1000, 500) == pytest.approx(
        1000 * shape.forward_flops(500) / (312e12 * REACH.prefill)
    )
