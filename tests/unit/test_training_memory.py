"""Memory of a trainer rank: by hand, against counted and measured bytes; what `auto` chooses."""

import random
from dataclasses import replace

import pytest

from gcore.cost.costs import GPUS, SHAPES
from gcore.cost.shapes import Shape
from gcore.cost.training_memory import (
    OFFLOADS,
    Engines,
    TrainingRank,
    adapter_parameters,
    choose,
    kept_per_token,
    training_memory,
)
from gcore.planner.inputs import Constraints, Workload
from gcore.planner.plan import memory_by_width

GIB = 2**30
# a layer: 2 * 8 * 4 * (2 + 1) + 3 * 8 * 16 + 2 * 8 = 592 parameters; tables: 2 * 800; all: 2 * 592 + 1600 + 8 = 2792
SMALL = Shape("small", layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocab=100)
H200 = 139 * GIB


def peak(rank: TrainingRank) -> float:
    return max(sum(parts.values()) for parts in training_memory(rank).gpu.values())


def test_one_rank_by_hand():
    memory = training_memory(TrainingRank(SMALL, max_tokens=10, kl=True))
    kept = 2 * (4 * 8 + 2 * 8 + 2 * 4 + 3 * 16) + 4 * 2 + 8  # bytes per token and layer
    head = 2 * 10 * 100 * 2 + (4 + 2) * 800  # logits and their gradient, the head's gradient in both dtypes
    state = {"weights": 4 * 2792, "moments": 8 * 2792, "reference": 2 * 2792}
    assert memory.host == {phase: {} for phase in memory.gpu}
    assert memory.gpu["start"] == {"weights": 4 * 2792, "reference": 2 * 2792, "buckets": 3 * 2 * 2792}
    assert memory.gpu["rollout"] == state
    activations = 10 * (2 * kept + 14 * 8)
    reduced = 4 * 592 * (2 + 4) - 4 * 10 * kept  # of a group of layers, less the activations that are gone by then
    layer = 10 * 2 * (3 * 16 + 4 * 8) + 2 * 800 + reduced
    assert (kept, head, layer) == (224, 8800, 8448)
    assert memory.gpu["backward"] == {
        **state,
        "gradients": 4 * 2792,
        "copies": 2 * 2792,
        "activations": activations,
        "work": head,
    }
    assert memory.gpu["optimizer step"] == {**state, "gradients": 4 * 2792}
    assert memory.gpu["weight update"] == {**state, "buckets": 3 * 2 * 2792}
    recomputed = training_memory(TrainingRank(replace(SMALL, vocab=10), max_tokens=10, checkpointing=True))
    reduced = 4 * 592 * (2 + 4) - 4 * 10 * 16
    assert recomputed.gpu["backward"]["work"] == 10 * 2 * 80 + 2 * 80 + 10 * 224 + reduced


def test_a_critic_by_hand():
    """The same shape as the policy, but without a table for the output: 2792 - 800 parameters."""
    rank = TrainingRank(SMALL, max_tokens=10, critic=SMALL)
    memory, without = training_memory(rank), training_memory(replace(rank, critic=None))
    state = {"weights": 4 * 2792, "moments": 8 * 2792, "critic": 4 * 1992, "critic moments": 8 * 1992}
    assert memory.gpu["rollout"] == state
    assert memory.gpu["critic step"] == {**state, "gradients": 4 * 1992}
    backward = memory.gpu["critic backward"]
    activations = without.gpu["backward"]["activations"]
    assert {name: backward[name] for name in ("gradients", "copies")} == {"gradients": 4 * 1992, "copies": 2 * 1992}
    assert backward["activations"] == activations and backward["work"] == 10 * 2 * (3 * 16 + 4 * 8) + 6 * 592
    for phase, parts in without.gpu.items():
        beside = {"critic": 4 * 1992.0} | ({} if phase == "start" else {"critic moments": 8 * 1992.0})
        assert memory.gpu[phase] == {**parts, **beside}
    moved = training_memory(replace(rank, offload="all"))
    assert not moved.gpu["rollout"] and moved.host["rollout"] == state
    assert {"critic", "critic moments"} <= moved.gpu["critic step"].keys() and "critic" not in moved.gpu["backward"]
    halves = training_memory(replace(rank, shard=2)).gpu["rollout"]
    assert halves["critic"] == 2 * 1992


def test_the_plan_counts_a_critic():
    inputs = SHAPES["7B"], [], 8, GPUS["h200"], Workload()
    plain, ppo = (memory_by_width(*inputs, Constraints(offload="none", critic=critic))[0] for critic in (False, True))
    own = ppo.trainer.gpu["rollout"]["critic"]  # float32, in eighths
    assert 3e9 < own < plain.trainer.gpu["rollout"]["weights"] < 4e9 and "critic backward" in ppo.trainer.gpu
    assert ppo.best is not None and plain.best is not None and ppo.best.step_s > plain.best.step_s


def test_sharded_ranks_hold_a_part_of_the_state_and_gather_two_layers():
    memory = training_memory(TrainingRank(SMALL, shard=4, max_tokens=10, checkpointing=True)).gpu
    assert memory["optimizer step"] == {"weights": 2792, "gradients": 2792, "moments": 2 * 2792}
    assert memory["backward"]["copies"] == 2 * (2 * 592 + 1600)
    assert memory["backward"]["activations"] == 10 * (2 * 2 * 8 + 14 * 8)
    assert memory["weight update"]["buckets"] == 3 * 2 * 2792 + 4 * 800
    wide = TrainingRank(SMALL, shard=2, tensor_parallel=2, max_tokens=10)
    assert wide.own_parameters == (2 * 592 / 2 + 1600 + 8) / 2
    assert kept_per_token(wide) == 2 * (4 * 8 + 2 * 8 / 2 + 2 * 4 + 3 * 16 / 2) + 4 + 8  # one key head: not divided
    assert training_memory(wide).gpu["backward"]["copies"] == 2 * (2 * 592 / 2 + 1600)


def test_what_is_moved_to_host_memory():
    base = TrainingRank(SMALL, max_tokens=10, kl=True)
    optimizer, everything = (training_memory(replace(base, offload=level)) for level in ("optimizer", "all"))
    for phase, parts in optimizer.gpu.items():
        assert ("moments" in parts) == (phase == "optimizer step")
        assert "weights" in parts and "reference" in parts
    assert optimizer.host["backward"] == {"moments": 8 * 2792} and optimizer.host["start"] == {}
    on_gpu = {phase: {"weights", "reference"} & set(parts) for phase, parts in everything.gpu.items()}
    both, weights = {"weights", "reference"}, {"weights"}
    expected = {"start": both, "rollout": set(), "logprobs": both, "backward": weights}
    assert on_gpu == {**expected, "optimizer step": weights, "weight update": weights}
    assert sum(everything.host["rollout"].values()) == (4 + 8 + 2) * 2792
    assert "logprobs" not in training_memory(replace(base, kl=False)).gpu


def test_adapters_by_hand():
    """Rank 2 on q (8 -> 8) and down (16 -> 8), two layers; frozen weights in bfloat16, no gradient of the head."""
    adapters = adapter_parameters(SMALL, 2, ["q_proj", "down_proj"])
    assert adapters == 2 * 2 * ((8 + 8) + (16 + 8))
    assert adapter_parameters(SMALL, 2) == 2 * 2 * (16 + 12 + 12 + 16 + 3 * 24)
    memory = training_memory(TrainingRank(SMALL, max_tokens=10, adapters=adapters, kl=True)).gpu
    state = {"weights": 2 * 2792 + 4 * adapters, "moments": 8 * adapters, "reference": 4 * adapters}
    assert memory["optimizer step"] == {**state, "gradients": 4 * adapters}
    assert memory["backward"]["work"] == 4 * 10 * 100 and "logprobs" not in memory
    assert memory["weight update"]["buckets"] == 3 * 4 * adapters


def test_on_a_cpu_all_is_in_host_memory_in_float32():
    memory = training_memory(TrainingRank(SMALL, max_tokens=10, kl=True, cpu=True))
    assert set(memory.gpu) == set(memory.host) and not any(memory.gpu.values())
    state = {"weights": 4 * 2792, "moments": 8 * 2792, "reference": 4 * 2792}
    assert memory.host["optimizer step"] == {**state, "gradients": 4 * 2792}
    assert "copies" not in memory.host["backward"]


@pytest.mark.parametrize("compiled", [True, False])
def test_kept_bytes_are_those_that_autograd_keeps(compiled):
    """Counted on a decoder layer of transformers; the partitioner is the one that compiled layers have on a GPU."""
    import torch
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

    tokens = 64
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    layer = Qwen2DecoderLayer(config, 0).to(torch.bfloat16)
    entering = torch.randn(1, tokens, 64, dtype=torch.bfloat16, requires_grad=True) * 1
    positions = Qwen2RotaryEmbedding(config)(entering, torch.arange(tokens)[None])
    if compiled:
        torch._dynamo.reset()
        layer.compile(backend="aot_eager_decomp_partition")
    shared = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *positions)}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(entering, position_embeddings=positions)
    shape = Shape("one", layers=1, hidden=64, intermediate=256, heads=4, kv_heads=2, head_dim=16, vocab=10)
    assert sum(kept.values()) == tokens * kept_per_token(TrainingRank(shape, compiled=compiled))


@pytest.mark.parametrize(
    ("measured", "keys"),
    [
        (65, {}),
        (32, {"checkpointing": True}),
        (60, {"micro_batches": 1}),
        (26, {"micro_batches": 1, "checkpointing": True}),
        (74, {"micro_batches": 1, "compiled": False}),
        (26, {"micro_batches": 1, "compiled": False, "checkpointing": True}),
    ],
)
def test_measured_on_an_h200(measured, keys):
    """bench/gpu_train.py --model 1.5B: GiB of the highest peak with micro-batches of 18,432 tokens."""
    assert peak(TrainingRank(SHAPES["1.5B"], max_tokens=18432, **keys)) / GIB == pytest.approx(measured, rel=0.03)


def test_more_work_never_needs_less_and_more_gpus_never_more():
    rng = random.Random(0)
    for _ in range(300):
        rank = TrainingRank(
            rng.choice(list(SHAPES.values())),
            shard=rng.choice([1, 2, 8, 64]),
            tensor_parallel=rng.choice([1, 2, 4]),
            max_tokens=rng.randint(1, 100_000),
            checkpointing=rng.random() < 0.5,
            kl=rng.random() < 0.5,
            offload=rng.choice(OFFLOADS),
            compiled=rng.random() < 0.5,
        )
        larger = [
            replace(rank, max_tokens=rank.max_tokens + 1000),
            replace(rank, kl=True),
            replace(rank, micro_batches=2),
            replace(rank, shape=replace(rank.shape, layers=rank.shape.layers + 1)),
            replace(rank, shape=replace(rank.shape, hidden=rank.shape.hidden + 128)),
        ]
        smaller = [
            replace(rank, shard=2 * rank.shard) if rank.shard > 1 else rank,
            replace(rank, tensor_parallel=2 * rank.tensor_parallel),
            replace(rank, offload=OFFLOADS[min(2, OFFLOADS.index(rank.offload) + 1)]),
            replace(rank, micro_batches=1),
        ]
        assert all(peak(other) >= peak(rank) for other in larger)
        assert all(peak(other) <= peak(rank) for other in smaller)
        with_both = [replace(rank, checkpointing=on) for on in (True, False)]
        on, off = (training_memory(each).gpu["backward"]["activations"] for each in with_both)
        assert on < off


# ---- choices ----


def beside(size: str, share: float = 0.4) -> Engines:
    return Engines(share * H200, 5.7e9, 5.7e9 + SHAPES[size].weight_bytes)


def test_the_least_that_fits_is_chosen():
    small = choose(TrainingRank(SHAPES["1.5B"]), beside("1.5B"), H200)
    assert (small.rank.checkpointing, small.rank.offload) == (False, "none") and not small.is_tight
    seven = choose(TrainingRank(SHAPES["7B"]), beside("7B"), H200)
    assert (seven.rank.checkpointing, seven.rank.offload, seven.worst) == (True, "optimizer", "backward")
    assert seven.host_peak == 8 * SHAPES["7B"].parameters and not seven.is_tight
    keeping, moments = training_memory(replace(seven.rank, keep=20e9)), 8 * SHAPES["7B"].parameters
    assert keeping.gpu["rollout"]["moments"] == keeping.gpu["backward"]["moments"] == 20e9
    assert keeping.host["rollout"]["moments"] == moments - 20e9
    part = 8 * SHAPES["7B"].table_parameters  # of the embedding: more than 1 GiB, as the other two slots have
    assert seven.gpu["optimizer step"]["moments"] == part + 2 * GIB
    assert keeping.gpu["optimizer step"]["moments"] == part + 2 * GIB + 20e9
    assert seven.reasons == (
        "activation_checkpointing=true: without it, the phase `backward` needs 161 of 149 GB",
        "offload=optimizer: with none, the phase `backward` needs 158 of 149 GB",
    )
    reference = choose(TrainingRank(SHAPES["7B"], kl=True), beside("7B", 0.1), 115e9)
    assert (reference.rank.offload, reference.fits, reference.is_tight) == ("all", True, False)
    assert reference.reasons[1] == "offload=all: with optimizer, the phase `backward` needs 112 of 115 GB"
    short = choose(TrainingRank(SHAPES["7B"], max_tokens=4096), beside("7B"), H200)
    assert (short.rank.checkpointing, short.rank.offload) == (False, "optimizer")
    full = choose(TrainingRank(SHAPES["1.5B"]), beside("1.5B", 0.8), H200)
    assert (full.rank.checkpointing, full.rank.offload) == (False, "optimizer")  # less would leave under a tenth


def test_given_values_are_kept_and_the_other_follows():
    off = choose(TrainingRank(SHAPES["7B"]), beside("7B"), H200, checkpointing=False)
    assert not off.rank.checkpointing and not off.fits
    none = choose(TrainingRank(SHAPES["7B"]), beside("7B"), H200, offload="none")
    assert (none.rank.offload, none.rank.checkpointing, none.fits) == ("none", True, False)
    assert none.reasons == ("activation_checkpointing=true: without it, the phase `backward` needs 222 of 149 GB",)
    cpu = choose(TrainingRank(SHAPES["7B"], cpu=True), beside("7B"), 0.0, offload="all")
    assert (cpu.rank.offload, cpu.rank.checkpointing) == ("none", False)


def test_close_calls_and_misses():
    need = choose(TrainingRank(SHAPES["1.5B"]), Engines(), 1e15, checkpointing=True, offload="all").peak
    tight, missed = (choose(TrainingRank(SHAPES["1.5B"]), Engines(), factor * need) for factor in (1.01, 0.99))
    assert tight.fits and tight.is_tight and not missed.fits
    assert missed.rank.checkpointing and missed.rank.offload != "none"


def test_32b_by_tensor_parallel_size():
    results = memory_by_width(SHAPES["32B"], [], 8, GPUS["h200"], Workload(), Constraints())
    found = {(r.trainer.rank.tensor_parallel, r.trainer.rank.max_tokens): r for r in results}
    assert set(found) == {(tp, tokens) for tp in (1, 2, 4, 8) for tokens in (16384, 32768)}
    assert not any(result.problems for result in results)
    first = found[1, 16384].trainer
    assert (first.rank.shard, first.rank.checkpointing, first.rank.offload) == (8, True, "none")
    assert sum(first.gpu["backward"].values()) == pytest.approx(101.7e9, rel=0.001)
    assert found[8, 32768].trainer.rank.offload == "optimizer"
    longer = Constraints(max_tokens_per_gpu=10_000, checkpointing=False)
    fits, too_long = memory_by_width(SHAPES["7B"], [], 1, GPUS["h200"], Workload(), longer)
    assert not fits.problems and too_long.trainer.rank.max_tokens == 20_000 and "needs 177 GB" in too_long.problems[0]
    assert memory_by_width(SHAPES["32B"], [], 1, GPUS["h200"], Workload(), Constraints())[0].problems
