"""RoleSpeeds of samples by hand and against the model's FLOPs; the fit to measured times; metrics of an update."""

import json

import numpy as np
import pytest

from gcore.cost.shapes import SHAPES, Shape, shape_of
from gcore.cost.workload import CostModel, Observation, fit
from gcore.preparation.balance import make_layout
from gcore.preparation.step_times import StepTimes, observe
from gcore.protocols import TrainerInfo, UpdateStats
from gcore.types import SampleMeta, SampleWork

TINY = Shape("tiny", layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocab=10)
COST = CostModel(crossover=100.0, head=0.5)


def sample(work: SampleWork, steps: int = 0) -> SampleMeta:
    return SampleMeta(0, 0, work, 1, steps=steps)


def test_costs_by_hand():
    assert COST.of(100) == 200.0 and COST.of_sample(sample(SampleWork(100), steps=40)) == 220.0
    assert COST.of_sample(sample(SampleWork(100, passes=3))) == 600.0  # denoising steps
    assert CostModel(100.0, causal=False).of(100) == 300.0
    vision = CostModel(50.0, causal=False, flops=3.0, patch=100)
    seeing = CostModel(100.0, flops=2.0, towers=(("image", vision),))
    assert seeing.of_sample(sample(SampleWork(100, media=(("image", 950),)))) == 200.0 + 1.5 * (10 + 4)  # ten patches
    assert COST.of_sample(sample(SampleWork(100, media=(("image", 950),)))) == 200.0  # no vision tower is known
    assert COST.of_row(100) == 300.0  # no pair is skipped
    assert COST.recomputed().head == 0.375 and COST.recomputed().of(100) == 200.0
    assert COST.of_sample(sample(SampleWork(100, passes=2, media=(("image", 7),)), steps=40)) == 420.0


def test_the_cost_model_counts_the_flops_of_the_model():
    """Layers: q and o 8 x 8, k and v 8 x 4, three 8 x 16 of the MLP, two norms of 8. Head: 10 x 8. Final norm: 8."""
    layers, head = 2 * (2 * 64 + 2 * 32 + 3 * 128 + 16) + 8, 80
    assert TINY.cost.flops == 2 * layers and TINY.cost.head == pytest.approx(head / layers)
    n = 30
    pairs = 4 * 2 * 2 * 4 * n * n / 2  # scores and values: layers x heads x head_dim
    flops = TINY.cost.flops * TINY.cost.of_sample(sample(SampleWork(n), steps=n))
    assert flops == pytest.approx(2 * n * (layers + head) + pairs)
    assert n * TINY.forward_flops(n / 2) == pytest.approx(flops)  # what the planner uses


def test_the_cost_of_a_mixture_counts_active_experts():
    mixture, dense = SHAPES["30B-A3B"].cost, SHAPES["32B"].cost
    assert mixture.flops == pytest.approx(2 * 3.0e9, rel=0.1) and dense.flops == pytest.approx(2 * 31e9, rel=0.05)
    assert mixture.crossover < dense.crossover / 3  # attention weighs more


def test_vision_towers_are_read_from_config_json(tmp_path):
    text = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4}
    tower = {"depth": 3, "embed_dim": 32, "mlp_ratio": 4, "num_heads": 4, "patch_size": 16, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**text, "vocab_size": 100, "vision_config": tower}))
    vision = shape_of(str(tmp_path)).cost.tower("image")
    assert vision is not None and vision.patch == 256 and not vision.causal
    assert vision.flops == 2 * 3 * (4 * 32 * 32 + 2 * 32 * 128)
    (tmp_path / "config.json").write_text(json.dumps({**text, "vocab_size": 100, "vision_config": {"other": 1}}))
    assert shape_of(str(tmp_path)).cost.tower("image") is None


# --- fit


def observed(seed: int, number: int, noise: float = 0.0) -> list[Observation]:
    """Times of a machine whose attention takes three times as long as its FLOPs say, with 0.1 s per micro-batch."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(number):
        tokens, mean, micro = rng.uniform(1e3, 2e4), rng.uniform(5, 100), int(rng.integers(1, 20))
        seconds = 1e-4 * tokens + 3e-6 * tokens * mean + 0.1 * micro
        found.append(Observation(tokens, tokens * mean, micro, seconds * (1 + noise * rng.normal())))
    return found


def seconds(fitted, tokens, pairs, micro_batches):
    return fitted.token_s * tokens + fitted.pair_s * pairs + fitted.micro_batch_s * micro_batches


def test_the_fit_finds_the_times_of_a_machine():
    true = (1e-4, 3e-6, 0.1)
    for number, rel in ((200, 0.1), (4000, 0.01)):  # the prior counts less and less
        found = fit(observed(0, number), COST)
        assert (found.token_s, found.pair_s, found.micro_batch_s) == pytest.approx(true, rel=rel)
        assert found.error < rel / 5
    assert found.crossover == pytest.approx(100 / 3, rel=0.01)
    noisy = fit(observed(1, 200, noise=0.1), COST)
    assert noisy.pair_s == pytest.approx(3e-6, rel=0.1) and 0.05 < noisy.error < 0.15
    assert seconds(found, 5000, 2e5, 4) == pytest.approx(0.5 + 0.6 + 0.4, rel=0.03)


def test_no_time_is_negative():
    """Steps with more tokens were faster: only a constant explains them, as far as the prior allows."""
    found = fit([Observation(n, n * 10, 1, 1 - n / 2000) for n in range(100, 1000, 20)], COST)
    assert min(found.token_s, found.pair_s) >= 0 and found.micro_batch_s > 0.3


def test_the_fit_keeps_the_ratios_of_the_model_where_nothing_was_measured():
    found = fit([Observation(1000, 4e5, 1, 2.0)] * 5, COST)  # always the same mixture
    assert found.crossover == pytest.approx(100.0, rel=1e-3) and seconds(found, 1000, 4e5, 1) == pytest.approx(2.0)
    assert fit([], COST) is None and fit([Observation(1000, 1e5, 1, 0.0)], COST) is None


# --- metrics


def test_the_row_of_an_update():
    metas = [SampleMeta(i, 0, SampleWork(n), 1) for i, n in enumerate([100, 50, 50])]  # costs 200, 75, 75
    cost = CostModel(100.0)
    batches = make_layout(metas, step=1, num_ranks=2, mini_batches=1, max_tokens=104, cost=cost, padded=False)
    stats = [UpdateStats(1, wall_s=2.0, busy_s=1.9), UpdateStats(1, wall_s=2.0, busy_s=1.5)]
    times = StepTimes(cost, TrainerInfo(1, 8))
    assert "perf/fit_error" not in times.row(batches, metas, stats)  # the first update warms up
    row = times.row(batches, metas, stats)
    assert row["perf/idle_predicted"] == pytest.approx(1 - 175 / 200) and row["perf/micro_batches"] == 1
    assert row["perf/idle_measured"] == pytest.approx(1 - 3.4 / 4.0)
    assert row["perf/fit_us_per_token"] > 0 and row["perf/fit_error"] >= 0
    own = observe(batches, metas, stats, cost)
    assert sorted((o.tokens, o.pairs, o.seconds) for o in own) == [(100, 5000, 1.5), (100, 10000, 1.9)]
    # on GPUs a rank does not know how long it waited: the slowest micro-batch of each position counts
    unknown = [UpdateStats(1, wall_s=2.0), UpdateStats(1, wall_s=2.1)]
    assert observe(batches, metas, unknown, cost) == [Observation(100, 10000, 1, 2.1)]
    assert "perf/idle_measured" not in times.row(batches, metas, unknown)
    emulated = StepTimes(cost, TrainerInfo(1, 8)).row(batches, metas, [UpdateStats(1)] * 2)
    assert set(emulated) == {"perf/idle_predicted", "perf/micro_batches"}


def test_the_share_of_the_published_rate():
    metas = [SampleMeta(i, 0, SampleWork(n), 1) for i, n in enumerate([100, 50, 50])]  # costs 200, 75, 75
    cost = CostModel(100.0, flops=1e6)
    batches = make_layout(metas, step=1, num_ranks=2, mini_batches=1, max_tokens=104, cost=cost, padded=False)
    stats = [UpdateStats(2, wall_s=2.0, mini_batches=2)] * 2  # two epochs
    times = StepTimes(cost, TrainerInfo(1, 8), peak=3e9)
    assert "perf/mfu" not in times.row(batches, metas, stats)  # the first update warms up
    assert times.row(batches, metas, stats)["perf/mfu"] == pytest.approx(3 * 2 * 350 * 1e6 / 2.0 / 3e9)
    for other in (StepTimes(cost, TrainerInfo(1, 8)), StepTimes(CostModel(100.0), TrainerInfo(1, 8), peak=3e9)):
        other.row(batches, metas, stats)
        assert "perf/mfu" not in other.row(batches, metas, stats)  # unknown GPU; unknown shape


def test_one_rank_waits_for_nobody():
    metas = [SampleMeta(0, 0, SampleWork(100), 1)]
    batches = make_layout(metas, step=1, num_ranks=1, mini_batches=1, max_tokens=104, cost=COST)
    times = StepTimes(COST, TrainerInfo(1, 8))
    row = [times.row(batches, metas, [UpdateStats(1, wall_s=2.0, busy_s=1.9)]) for _ in range(2)][1]
    assert not any("idle" in name for name in row) and row["perf/fit_us_per_token"] > 0
