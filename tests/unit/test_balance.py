"""The layout's invariants, over many random batches; and numbers worked out by hand."""

import itertools

import numpy as np
import pytest

from gcore.preparation.balance import WIDTH_BLOCK, assign, imbalance, make_layout, pack, split
from gcore.preparation.workload import CostModel
from gcore.types import MicroBatch, SampleMeta

COST = CostModel(crossover=100.0)


def draw(seed: int) -> tuple[list[SampleMeta], dict]:
    """A random batch and a random layout request; the shapes run from nothing to do to more than fits at once."""
    rng = np.random.default_rng(seed)
    longest = int(rng.choice([5, 40, 400]))
    metas = [
        SampleMeta(int(prompt), sibling, length := int(rng.integers(2, longest + 1)), int(rng.integers(0, length)))
        for prompt in rng.choice(10_000, int(rng.integers(1, 30)), replace=False)
        for sibling in range(int(rng.integers(1, 9)))
    ]
    budget = int(rng.choice([longest, longest + 3, 2 * longest, 10 * longest, 16384]))
    request = {"step": seed, "num_ranks": int(rng.integers(1, 9)), "mini_batches": int(rng.integers(1, 7))}
    return metas, {**request, "max_tokens": budget, "cost": COST}


def minis(batches):
    """The mini-batches, each as the list of what every rank has of it."""
    return list(zip(*(batch.mini_batches for batch in batches), strict=True))


def keys(micro_batches) -> list[tuple[int, int]]:
    return [key for micro in micro_batches for row in micro.rows for key in row]


SEEDS = range(300)


def test_every_sample_stands_in_exactly_one_row_of_one_rank():
    for seed in SEEDS:
        metas, request = draw(seed)
        found = [
            key for mini in minis(make_layout(metas, **request)) for rank in mini for key in keys(rank.micro_batches)
        ]
        assert len(found) == len(metas) and sorted(found) == sorted(m.key for m in metas), seed


def test_rows_fit_their_width_and_micro_batches_their_budget():
    for seed in SEEDS:
        metas, request = draw(seed)
        length = {m.key: m.length for m in metas}
        for mini in minis(make_layout(metas, **request)):
            for micro in itertools.chain.from_iterable(rank.micro_batches for rank in mini):
                assert all(sum(length[key] for key in row) <= micro.width for row in micro.rows), seed
                if micro.rows:
                    assert len(micro.rows) * micro.width <= request["max_tokens"], seed
                    widest = max(length[key] for row in micro.rows for key in row)
                    assert micro.width < widest + WIDTH_BLOCK, seed  # no wider than the longest sample asks for


def test_a_sample_over_the_budget_stands_alone():
    long = SampleMeta(0, 0, 50, 1)
    assert pack([long, SampleMeta(1, 0, 8, 1)], 20)[0] == MicroBatch((((0, 0),),), 50)
    assert [len(micro.rows) for micro in pack([long, SampleMeta(0, 1, 50, 1)], 20)] == [1, 1]


def test_ranks_have_equally_many_micro_batches():
    for seed in SEEDS:
        metas, request = draw(seed)
        batches = make_layout(metas, **request)
        assert len(batches) == request["num_ranks"]
        for mini in minis(batches):
            assert len({len(rank.micro_batches) for rank in mini}) == 1, seed
            assert any(all(micro.rows for micro in rank.micro_batches) for rank in mini), seed  # one rank is never idle
            for rank in mini:  # padding stands at the end and costs next to nothing
                real = [bool(micro.rows) for micro in rank.micro_batches]
                assert real == sorted(real, reverse=True), seed
                assert all(micro.width == WIDTH_BLOCK for micro in rank.micro_batches if not micro.rows), seed


def test_layout_does_not_depend_on_the_order_of_metas():
    for seed in SEEDS:
        metas, request = draw(seed)
        shuffled = [metas[i] for i in np.random.default_rng(seed + 1).permutation(len(metas))]
        assert make_layout(shuffled, **request) == make_layout(metas, **request), seed


def test_layout_does_not_depend_on_the_number_of_controllers():
    for seed in SEEDS:
        metas, request = draw(seed)
        expected = make_layout(metas, **request)
        for controllers in (2, 3, 7):  # controller r gathers the prompts with id = r modulo N
            order = sorted(metas, key=lambda m, n=controllers: m.prompt_id % n)
            assert make_layout(order, **request) == expected, seed


def test_denominators_are_global_and_add_up():
    for seed in SEEDS:
        metas, request = draw(seed)
        by_key = {m.key: m for m in metas}
        for mini in minis(make_layout(metas, **request)):
            here = [by_key[key] for rank in mini for key in keys(rank.micro_batches)]
            for rank in mini:
                assert (rank.num_actions, rank.num_samples) == (sum(m.actions for m in here), len(here)), seed


def test_mini_batches_hold_whole_prompts_evenly():
    for seed in SEEDS:
        metas, request = draw(seed)
        ordered = sorted(metas, key=lambda m: m.key)
        parts = split(ordered, request["mini_batches"])
        assert [m for part in parts for m in part] == ordered, seed
        prompts = [{m.prompt_id for m in part} for part in parts]
        assert sum(map(len, prompts)) == len(set.union(*prompts)), seed  # siblings stay together
        assert max(map(len, prompts)) - min(map(len, prompts)) <= 1, seed
        assert len(parts) == min(request["mini_batches"], len(set.union(*prompts))), seed


# --- balance


def loads(shares, cost=COST):
    return [sum(cost.of(m.length) for m in share) for share in shares]


def test_no_rank_is_above_the_mean_by_more_than_a_sample():
    """Greedy assignment: when the fullest rank took its last sample it was the least loaded."""
    for seed in SEEDS:
        metas, request = draw(seed)
        found = loads(assign(metas, request["num_ranks"], COST))
        mean, dearest = sum(found) / len(found), max(COST.of(m.length) for m in metas)
        assert max(found) <= mean + dearest * (1 - 1 / len(found)) + 1e-6, seed


def test_at_most_four_thirds_of_the_best_possible():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        ranks = int(rng.integers(2, 4))
        metas = [SampleMeta(i, 0, int(n), 1) for i, n in enumerate(rng.integers(1, 60, 8))]
        best = min(
            max(loads([[m for m, r in zip(metas, choice, strict=True) if r == rank] for rank in range(ranks)]))
            for choice in itertools.product(range(ranks), repeat=len(metas))
            if choice[0] == 0
        )
        assert max(loads(assign(metas, ranks, COST))) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9, seed


def test_a_real_batch_is_balanced_to_a_percent():
    rng = np.random.default_rng(0)
    metas = [SampleMeta(i, 0, int(n), 1) for i, n in enumerate(rng.lognormal(5, 0.8, 1024).clip(10, 4096))]
    assert imbalance(assign(metas, 8, COST), COST) < 1.01
    in_order = [metas[r::8] for r in range(8)]
    assert imbalance(in_order, COST) > 1.1  # what the same batch costs when dealt out blindly


def test_attention_counts_not_tokens_alone():
    # costs 200, 75, 75, 56: the 40 joins the two 50s (150 < 200); by tokens alone it would join the 100
    metas = [SampleMeta(i, 0, n, 1) for i, n in enumerate([100, 50, 50, 40])]
    assert [[m.length for m in share] for share in assign(metas, 2, COST)] == [[100], [50, 50, 40]]
    assert [COST.of(100), COST.of(50), COST.of(40)] == [200.0, 75.0, 56.0]
    assert imbalance([metas[:1], metas[1:]], COST) == pytest.approx(206 * 2 / 406)


def test_imbalance_of_nothing():
    assert imbalance([[], []], COST) == 1.0


# --- by hand


def test_pack_by_hand():
    # three rows of 16 leave room for 0, 4 and 6: the 6 and the 4 fill them exactly, the 3 needs a row of its own
    lengths = [16, 12, 10, 6, 4, 3]
    metas = [SampleMeta(i, 0, n, 1) for i, n in enumerate(lengths)]
    rows = (((0, 0),), ((1, 0), (4, 0)), ((2, 0), (3, 0)))
    assert pack(metas, 48) == [MicroBatch(rows, 16), MicroBatch((((5, 0),),), 8)]
    assert pack(metas, 64) == [MicroBatch((*rows, ((5, 0),)), 16)]


def test_pack_prefers_the_tightest_room_then_the_first_row():
    metas = [SampleMeta(i, 0, n, 1) for i, n in enumerate([16, 11, 13, 13, 3, 3])]
    assert pack(metas, 64)[0].rows == (((0, 0),), ((1, 0),), ((2, 0), (4, 0)), ((3, 0), (5, 0)))


def test_lay_out_pads_with_empty_micro_batches():
    metas = [SampleMeta(0, 0, 16, 3), SampleMeta(0, 1, 8, 2)]
    batches = make_layout(metas, step=1, num_ranks=3, mini_batches=1, max_tokens=16, cost=COST)
    assert [b.mini_batches[0].micro_batches for b in batches] == [
        (MicroBatch((((0, 0),),), 16),),
        (MicroBatch((((0, 1),),), 8),),
        (MicroBatch((), 8),),
    ]
    assert {(b.mini_batches[0].num_actions, b.mini_batches[0].num_samples) for b in batches} == {(5, 2)}


def test_a_large_batch_is_packed_as_the_slow_definition_says():
    """20,000 samples of few tokens: thousands of rows are open at once. The definition, applied row by row, agrees."""
    rng = np.random.default_rng(0)
    metas = [SampleMeta(i, 0, int(n), 1) for i, n in enumerate(rng.integers(4, 16, 20_000))]
    metas.sort(key=lambda m: (-m.length, m.key))
    fast = pack(metas, 1 << 17)
    assert sum(len(row) for micro in fast for row in micro.rows) == 20_000
    assert pack(metas[:3000], 4096) == slow_pack(metas[:3000], 4096)


def slow_pack(metas, max_tokens):
    batches, rows, width = [], [], 0
    for meta in metas:
        free = [(width - sum(m.length for m in row), i) for i, row in enumerate(rows)]
        fitting = [entry for entry in free if entry[0] >= meta.length]
        if fitting:
            rows[min(fitting)[1]].append(meta)
            continue
        if rows and (len(rows) + 1) * width > max_tokens:
            batches.append((rows, width))
            rows = []
        if not rows:
            width = -(-meta.length // WIDTH_BLOCK) * WIDTH_BLOCK
        rows.append([meta])
    return [MicroBatch(tuple(tuple(m.key for m in row) for row in r), w) for r, w in [*batches, (rows, width)]]
