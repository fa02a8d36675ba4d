"""The pure parts of the Megatron backend: the layout of weights, degrees that do not fit, the split output layer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from gcore.config.load import load_config
from gcore.config.megatron import check_family, check_shape
from gcore.cost.backends import Work, compare, megatron_memory, parameters_of_rank
from gcore.cost.costs import gpu_of
from gcore.cost.shapes import shape_of
from gcore.launch.gpu_memory import plan_memory
from gcore.launch.machines import Machine
from gcore.launch.plan import make_plan
from gcore.training.megatron.layout import Block, Dimensions, blocks_of, boxes
from gcore.types import Topology, UserError
from tests.e2e.helpers import RECIPE

LAYER = "model.layers.0"
TENSORS = {
    f"{LAYER}.q_proj.weight": (32, 6),
    f"{LAYER}.k_proj.weight": (16, 6),
    f"{LAYER}.v_proj.weight": (16, 6),
    f"{LAYER}.gate.weight": (8, 6),
    f"{LAYER}.up.weight": (8, 6),
    f"{LAYER}.down.weight": (6, 8),
    f"{LAYER}.experts.gate_up_proj": (4, 10, 6),
    f"{LAYER}.experts.down_proj": (4, 6, 5),
    "embed": (5, 6),
}
QKV = [f"{LAYER}.{name}_proj.weight" for name in "qkv"]
SECOND = Dimensions(TENSORS, heads=4, groups=2, head_size=8, rank=1, size=2)


def test_queries_keys_and_values_alternate_by_group():
    found = blocks_of("decoder.layers.0.self_attention.linear_qkv.weight", QKV, (32, 6), SECOND)
    assert found == [
        Block(QKV[0], (32, 6), (16, 0), first=0, count=16),
        Block(QKV[1], (16, 6), (8, 0), first=16, count=8),
        Block(QKV[2], (16, 6), (8, 0), first=24, count=8),
    ]


def test_rows_columns_experts_and_padding():
    names = [f"{LAYER}.gate.weight", f"{LAYER}.up.weight"]
    gate, up = blocks_of("decoder.layers.0.mlp.linear_fc1.weight", names, (8, 6), SECOND)
    assert (gate.offset, gate.first, up.offset, up.first) == ((4, 0), 0, (4, 0), 4)
    (down,) = blocks_of("decoder.layers.0.mlp.linear_fc2.weight", [f"{LAYER}.down.weight"], (6, 4), SECOND)
    assert (down.offset, down.count) == ((0, 4), 6)
    names = [f"{LAYER}.experts.2.{name}_proj.weight" for name in ("gate", "up")]
    gate, up = blocks_of("decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight", names, (10, 6), SECOND)
    assert (gate.name, gate.offset, up.offset) == (f"{LAYER}.experts.gate_up_proj", (2, 0, 0), (2, 5, 0))
    (table,) = blocks_of("embedding.word_embeddings.weight", ["embed"], (3, 6), SECOND)
    assert (table.offset, table.count) == ((3, 0), 2)  # the third row only pads


@pytest.mark.parametrize("seed", range(3))
def test_any_division_of_a_flat_parameter_covers_it_once(seed: int):
    """Distributed optimizers divide parameters anywhere, also within rows."""
    rng = np.random.default_rng(seed)
    blocks = blocks_of("decoder.layers.0.self_attention.linear_qkv.weight", QKV, (32, 6), SECOND)
    wholes = {name: np.zeros(TENSORS[name]) for name in QKV}
    values, cuts = rng.normal(size=32 * 6), [0, *sorted(rng.integers(0, 32 * 6, 5)), 32 * 6]
    for start, end in itertools.pairwise(cuts):
        for box in boxes(blocks, (32, 6), int(start), int(end)):
            part = tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
            wholes[box.name][part] += values[box.start : box.end].reshape(box.shape)
    rows = values.reshape(32, 6)
    for name, part, at in zip(QKV, (rows[:16], rows[16:24], rows[24:]), (16, 8, 8), strict=True):
        assert np.array_equal(wholes[name][at : at + len(part)], part)
        assert not wholes[name][:at].any()


def test_boxes_are_what_mbridge_converts():
    """An independent implementation: it converts whole parameters."""
    bridges = pytest.importorskip("mbridge")
    from mbridge.core.parallel_states import ParallelStates
    from transformers import Qwen3Config

    sizes = {"hidden_size": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, intermediate_size=8, num_hidden_layers=1, vocab_size=5)
    bridge = bridges.AutoBridge.from_config(config, dtype=torch.float32, parallel_states=ParallelStates(vpp_size=None))
    for parameter, rows in (("self_attention.linear_qkv.weight", 64), ("mlp.linear_fc1.weight", 16)):
        name, whole = f"decoder.layers.0.{parameter}", torch.randn(rows, 6)
        names, expected = bridge._weight_to_hf_format(name, whole)
        shapes = {n: tuple(tensor.shape) for n, tensor in zip(names, expected, strict=True)}
        blocks = blocks_of(name, names, (rows, 6), Dimensions(shapes, heads=4, groups=2, head_size=8))
        found = {n: torch.zeros(shape) for n, shape in shapes.items()}
        for box in boxes(blocks, (rows, 6), 0, whole.numel()):
            part = tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
            found[box.name][part] = whole.view(-1)[box.start : box.end].view(box.shape)
        assert all(torch.equal(found[n], tensor) for n, tensor in zip(names, expected, strict=True))


@pytest.fixture
def config(tmp_path: Path) -> Any:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "runtime": "ray"}))
    return lambda *overrides: load_config(path, list(overrides))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("ranks=6", "tensor_parallel=2", "pipeline_parallel=2"), "tensor_parallel=2 x pipeline_parallel=2 = 4 must"),
        (("ranks=4", "expert_parallel=3"), "expert_parallel=3 must divide the number of data-parallel ranks, 4"),
        (("pipeline_parallel=2", "virtual_pipeline=2"), "virtual_pipeline=2; expected 1, or pipeline_parallel of at"),
        (("ranks=4", "shard=2"), "shard=2; expected auto: all data-parallel ranks share the optimizer"),
        (("pipeline_parallel=2", "backend=fsdp"), "pipeline_parallel=2; expected 1, or training.backend=megatron"),
        (("lora={rank: 4}",), "got model.lora; expected none, or training.backend=fsdp"),
        (("offload=all",), "training.offload=all; expected auto or none: its state is on the device"),
    ],
)
def test_degrees_that_contradict_other_keys(config, changes: tuple[str, ...], message: str):
    sections = {"lora": "model", "offload": "training", "backend": "training"}
    keys = [f"{sections.get(change.partition('=')[0], 'placement.trainer')}.{change}" for change in changes]
    with pytest.raises(UserError) as raised:
        make_plan(config("training.backend=megatron", *keys), Machine(cores=8, gpus=0))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("model", "topology", "message"),
    [
        ("32B", Topology(48, tensor=3), "tensor_parallel=3 must divide the 40 attention heads of 32B"),
        ("32B", Topology(64, tensor=16), "tensor_parallel=16 must divide the 40 attention heads of 32B"),
        ("7B", Topology(8, tensor=8), "tensor_parallel=8 must divide the 28 attention heads of 7B"),
        ("32B", Topology(48, pipeline=12), "pipeline_parallel=12 must divide the 64 layers of 32B, or 64 + 2"),
        (
            "32B",
            Topology(64, pipeline=4, virtual=3),
            "x virtual_pipeline=12 must divide the 64 layers",
        ),
        ("32B", Topology(8, expert=2), "expert_parallel=2: 32B has no experts; expected 1"),
        ("235B-A22B", Topology(96, expert=48), "expert_parallel=48 must divide the 128 experts of 235B-A22B"),
        ("235B-A22B", Topology(8, tensor=2), "tensor_parallel=2: Megatron splits matrices of a mixture of experts"),
    ],
)
def test_degrees_that_do_not_divide_the_model(model: str, topology: Topology, message: str):
    with pytest.raises(UserError, match=r"placement\.trainer\.") as raised:
        check_shape(topology, shape_of(model, "model"))
    assert message in str(raised.value)
    check_shape(Topology(64, tensor=4, pipeline=4, virtual=4), shape_of("32B", "model"))
    check_shape(Topology(64, pipeline=16, expert=4), shape_of("235B-A22B", "model"))  # 94 + 2 layers


def test_other_families_are_refused():
    with pytest.raises(
        UserError, match=r"type gemma2: mbridge .* no mapping .*; expected one of qwen2, qwen3, llama, qw"
    ):
        check_family("gemma2")
    with pytest.raises(UserError, match=r"type qwen3_5_moe: mbridge .* no delta rule over packed samples; expected"):
        check_family("qwen3_5_moe")


def test_the_ranks_of_a_topology(config):
    topology = Topology(8, tensor=2, pipeline=2)
    assert [topology.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert topology.ranks_of(1) == [2, 3, 6, 7]
    degrees = "placement.trainer={ranks: auto, tensor_parallel: 2, pipeline_parallel: 2}"
    chosen = config("training.backend=megatron", "controllers=auto", degrees)
    plan = make_plan(chosen, Machine(cores=8, gpus=0))
    assert plan.topology == Topology(4, tensor=2, pipeline=2) and plan.controllers == 1
    assert "in tensor-parallel groups of 2, pipeline of 2 stages" in "\n".join(plan.lines(chosen))


# ---- `gcore plan --backends`: sources of the published numbers are in docs/megatron.md


@pytest.mark.parametrize(("data", "expected"), [(1, 18.0), (2, 12.0), (8, 7.5), (64, 6.1875)])
def test_bytes_per_parameter_are_those_of_megatrons_documentation(data: int, expected: float):
    """6 + 12 / d, with weights in bfloat16 and gradients in float32."""
    shape = shape_of("32B", "model")
    parts = megatron_memory(shape, Topology(data), 1024, checkpointing=True)
    dense, experts = parameters_of_rank(shape, Topology(data))
    assert experts == 0 and dense == pytest.approx(shape.parameters, rel=1e-6)
    assert sum(parts[name] for name in ("weights", "gradients", "optimizer")) / dense == pytest.approx(expected)


def test_weights_and_optimizer_of_a_published_estimate():
    """4.1055e9 parameters in the fullest shard, two data-parallel ranks: 46983 MiB."""
    parts = megatron_memory(shape_of("32B", "model"), Topology(2), 1024, checkpointing=True)
    dense, _ = parameters_of_rank(shape_of("32B", "model"), Topology(2))
    state = sum(parts[name] for name in ("weights", "gradients", "optimizer")) / dense * 4.1055e9
    assert state / 2**20 == pytest.approx(46983.28, rel=1e-4)


def test_a_published_layout_of_a_large_mixture_fits():
    """235B-A22B on 64 B200: pipeline 8, experts divided by 8. It does not fit on 64 H100 without more stages."""
    shape, topology = shape_of("235B-A22B", "model"), Topology(64, pipeline=8, expert=8)
    check_shape(topology, shape)
    total = sum(megatron_memory(shape, topology, 4096, checkpointing=False).values()) / 1e9
    assert gpu_of("h100").memory_gb < total < gpu_of("b200").memory_gb


def test_both_backends_are_compared():
    gpu, work = gpu_of("h100"), Work(tokens=1e7, context=1280, micro_tokens=16384)
    for model in ("32B", "235B-A22B"):
        fsdp, megatron = compare(shape_of(model, "model"), gpu, 256, work)
        assert (fsdp.backend, megatron.backend) == ("fsdp", "megatron")
        assert fsdp.total < 72e9 and megatron.total < 72e9
        assert megatron.parts["gradients"] == 2 * megatron.parts["weights"]  # whole on every rank of a copy
        assert fsdp.parts["gradients"] < megatron.parts["gradients"]


def test_recomputation_is_chosen_by_memory(config):
    """A GPU of 80 GB has a small model; one that is too small is named before anything starts."""
    chosen = config("training.backend=megatron", "training.max_tokens_per_gpu=1000000", "training.device=auto")
    plan = make_plan(chosen, Machine(cores=8, gpus=1))
    by_memory = {gb: plan_memory(chosen, plan, gb * 1e9).config.training for gb in (80, 3)}
    assert [by_memory[gb].activation_checkpointing for gb in (80, 3)] == [False, True]
    assert by_memory[3].offload == "none"
    with pytest.raises(UserError, match=r"training\.backend=megatron and the engines need .* of 0\.1 GB of a GPU"):
        plan_memory(chosen, plan, 1e8)
