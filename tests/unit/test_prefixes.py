"""Samples that share prefixes in a row: the same logprobs, entropies and gradients as those of whole samples."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from gcore.content.tokens import SHORTEST, Tokens
from gcore.cost.shapes import SHAPES
from gcore.cost.workload import CostModel, shared_prefixes
from gcore.models.networks import auto_class, unify_passes
from gcore.preparation.assignment import WIDTH_BLOCK
from gcore.preparation.balance import make_layout
from gcore.preparation.samples import metas_of
from gcore.preparation.step_times import shared_tokens
from gcore.training.logprob_model import LogprobModel, to_tensors
from gcore.training.prefixes import seen_by_nodes, tree_of
from gcore.types import MicroBatch, Sample, SampleMeta, SampleWork, SharedPrefix
from tests.contract.test_families import FAMILIES
from tests.unit.test_training import RECIPE, config_of, network_of

CPU = torch.device("cpu")
VOCABULARY = 12
COST = CostModel(crossover=100.0)


def tokens(rng: Any, length: int) -> list[int]:
    return list(rng.integers(3, VOCABULARY, length))


def group(rng: Any, depth: int, prefix: list[int] | None = None) -> list[list[int]]:
    """Sequences that branch `depth` times, the first time after the prompt."""
    prefix = prefix if prefix is not None else tokens(rng, int(rng.integers(1, 20)))
    if depth == 0:
        return [prefix + tokens(rng, int(rng.integers(1, 9)))]
    longer = tokens(rng, SHORTEST + int(rng.integers(0, 5))) if depth > 1 else []
    branches = int(rng.integers(1, 4))
    found = [each for _ in range(branches) for each in group(rng, depth - 1, prefix + longer)]
    return found + group(rng, 0, prefix)


def samples_of(seed: int, depths: tuple[int, ...] = (1, 2, 3)) -> list[Sample]:
    rng, found = np.random.default_rng(seed), list[Sample]()
    for prompt, depth in enumerate(depths):
        start = tokens(rng, int(rng.integers(1, 20)))
        for sibling, whole in enumerate(group(rng, depth, start)):
            steps = len(whole) - len(start)
            content = Tokens.split(np.array(whole, np.int32), steps)
            zeros = np.zeros(steps, np.float32)
            found.append(
                Sample(prompt, sibling, content, np.ones(steps, bool), zeros, temperature=(0.7, 1.3)[sibling % 2])
            )
    return found


@pytest.mark.parametrize("seed", range(30))
def test_a_row_holds_each_node_once(seed):
    contents = [sample.content for sample in samples_of(seed)]
    tree = tree_of(contents, share=True)
    row = np.full(tree.size, -1)
    for content, path in zip(contents, tree.paths, strict=True):
        assert ((row[path] == -1) | (row[path] == content.tokens_T)).all()
        row[path] = content.tokens_T
    assert (row >= 0).all()
    seen, node_of = tree.ancestors(), np.zeros(tree.size, int)
    ends = [tree.nodes[0].first]
    for i, node in enumerate(tree.nodes):
        assert node.first == ends[-1] and node.end > node.first and node.parent < i
        ends.append(node.end)
        node_of[node.first : node.end] = i
        if node.parent >= 0:
            above = tree.nodes[node.parent]
            assert node.depth == above.depth + above.end - above.first
    for path in tree.paths:  # a token sees its path up to itself, and nothing else
        for at in {0, len(path) // 2, len(path) - 1}:
            visible = np.flatnonzero(seen[node_of[path[at]], node_of] & (np.arange(tree.size) <= path[at]))
            assert visible.tolist() == path[: at + 1].tolist()
    assert tree.size < tree_of(contents, share=False).size
    keys = seen_by_nodes(tree, CPU)
    assert keys is not None
    for i, part in enumerate(keys.index.tensor_split(keys.spans.starts_N[1:-1].long())):
        assert part.tolist() == np.flatnonzero(seen[i, node_of]).tolist()


def computed(network: Any, samples: list[Sample], shares: bool, in_one_row: bool, seed: int) -> tuple[Any, ...]:
    """Logprobs and entropies by sample, gradients, and the tokens that were computed."""
    policy, by_key = LogprobModel(copy.deepcopy(network)).train(), {s.key: s for s in samples}
    rows = (tuple(by_key),) if seed % 2 else (tuple(by_key)[:5], tuple(by_key)[5:])
    packed = to_tensors(MicroBatch(rows, 16, shares=shares), by_key, CPU, in_one_row)
    logprobs, entropies = policy(packed)
    weights = torch.from_numpy(np.random.default_rng(seed).normal(size=len(logprobs))).float()
    (logprobs * weights + 0.3 * entropies * weights.abs()).sum().backward()
    gradients = {name: p.grad for name, p in policy.network.named_parameters() if p.grad is not None}
    return logprobs.detach(), entropies.detach(), gradients, packed.tokens_RW.numel()


def check(network: Any, samples: list[Sample], in_one_row: bool, seed: int, close: float, relative: float) -> None:
    """`relative`: to the largest entry of a gradient."""
    *whole, many = computed(network, samples, False, in_one_row, seed)
    *shared, few = computed(network, samples, True, in_one_row, seed)
    assert few < 0.8 * many
    assert torch.allclose(whole[0], shared[0], atol=close) and torch.allclose(whole[1], shared[1], atol=close)
    assert whole[2].keys() == shared[2].keys()
    for name, gradient in whole[2].items():
        assert (gradient - shared[2][name]).abs().max() <= 1e-6 + relative * gradient.abs().max(), name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("in_one_row", [False, True], ids=["masked", "varlen"])
def test_logprobs_and_gradients_are_those_of_whole_samples(architecture, in_one_row, seed):
    """In float64, up to the head and the norms, which are in float32; in float32 too."""
    build = {**RECIPE["model"]["build"], "architecture": architecture, "max_length": 256}
    network = network_of(config_of(model={"build": build}))
    check(network.double(), samples_of(seed), in_one_row, seed, close=1e-6, relative=1e-6)
    check(network.float(), samples_of(seed), in_one_row, seed, close=2e-6, relative=1e-5)


WINDOWS = ["mistral", "gemma3", "llama4", "qwen3_moe", "deepseek_v32"]
STATES = ["qwen3_5", "nemotron_h", "falcon_h1", "lfm2", "mamba2", "minimax", "kimi_linear", "glm5_next", "qwen4_exp"]


ROWS = [(name, False) for name in (*WINDOWS, *STATES)] + [("mistral", True), ("qwen3_moe", True)]


@pytest.mark.parametrize(("name", "in_one_row"), ROWS)
def test_layers_of_all_kinds_follow_the_sample_and_not_the_row(name, in_one_row):
    """Windows and chunks count positions; a state goes from a prefix to each of its children."""
    torch.manual_seed(0)
    network = auto_class(FAMILIES[name]()).from_config(FAMILIES[name]())
    unify_passes(network)
    check(network, samples_of(4, (1, 2)), in_one_row, 1, close=1e-5, relative=1e-4 if name in STATES else 1e-5)


def test_recorded_experts_that_differ_are_not_shared():
    a, b = (np.zeros((46, 2, 2), np.int8) for _ in range(2))
    b[40] = 1
    contents = [Tokens(np.arange(45), np.arange(3), experts=experts) for experts in (a, b, None)]
    assert tree_of(contents[:2], share=True).size == 48 + 48 - 40
    assert tree_of([contents[0], contents[0]], share=True).size == 45 + 3 + 3  # short answers are not
    assert tree_of(contents[1:], share=True).size == 48 + 48  # the trainer chooses those of the other


@pytest.mark.parametrize("seed", range(30))
def test_controllers_know_the_tree(seed):
    """What metadata says of a group in any order is what the trainer finds in its rows."""
    samples = samples_of(seed)
    metas = metas_of([samples[i] for i in np.random.default_rng(seed).permutation(len(samples))])
    ordered = sorted(metas, key=lambda meta: meta.place)
    by_key = {sample.key: sample.content for sample in samples}
    for _, group in itertools.groupby(ordered, key=lambda meta: meta.prompt_id):
        siblings = list(group)
        tree = tree_of([by_key[meta.key] for meta in siblings], share=True)
        shared = shared_prefixes(siblings)
        assert sum(meta.length for meta in siblings) - sum(each.tokens for each in shared) == tree.size
        best = tree.size
        for number, meta in enumerate(siblings):  # of any two, not only of neighbours
            for other in siblings[:number]:
                pair = by_key[meta.key].common(by_key[other.key])
                assert shared_prefixes([other, meta])[1][1:] == pair
        shuffled = [siblings[i] for i in np.random.default_rng(seed).permutation(len(siblings))]
        assert best <= tree_of([by_key[meta.key] for meta in shuffled], share=True).size


@pytest.mark.parametrize("seed", range(20))
def test_layouts_count_distinct_tokens(seed):
    rng = np.random.default_rng(seed)
    samples = samples_of(seed, tuple(rng.integers(1, 4, 6)))
    metas, contents = metas_of(samples), {sample.key: sample.content for sample in samples}
    longest = max(meta.length for meta in metas)
    budget, ranks, padded = int(rng.integers(longest, 4 * longest)), int(rng.integers(1, 4)), bool(seed % 2)
    given = {"step": 1, "num_ranks": ranks, "mini_batches": 1, "max_tokens": budget, "cost": COST, "padded": padded}
    batches = make_layout(metas, shares=True, **given)
    assert sorted(key for batch in batches for key in batch.keys) == sorted(contents)
    computed = 0
    for micro in (micro for batch in batches for micro in batch.mini_batches[0].micro_batches):
        assert len(micro.rows) * micro.width < budget + WIDTH_BLOCK
        for row in micro.rows:
            groups = [list(keys) for _, keys in itertools.groupby(row, key=lambda key: key[0])]
            sizes = [tree_of([contents[key] for key in keys], micro.shares).size for keys in groups]
            assert sum(sizes) <= micro.width
            computed += sum(sizes)
    assert computed == pytest.approx((1 - shared_tokens(batches, metas)) * sum(m.length for m in metas))
    plain = make_layout(metas, **given)
    assert not any(micro.shares for batch in plain for micro in batch.mini_batches[0].micro_batches)


def test_an_agent_whose_turns_are_samples():
    """Ten turns of 8 siblings. Each turn is a sample whose context is the whole history: what is computed is about one
    conversation per sibling, and its prompt once."""
    rng, found = np.random.default_rng(0), list[Sample]()
    prompt = rng.integers(3, 99, 200).astype(np.int32)
    for sibling in range(8):
        history = prompt
        for turn in range(10):
            answer = rng.integers(3, 99, 60).astype(np.int32)
            content = Tokens(history, answer, own_context=True)
            ones = np.ones(60, np.float32)
            found.append(Sample(0, 10 * sibling + turn, content, ones > 0, -ones))
            history = np.concatenate([history, answer, rng.integers(3, 99, 40).astype(np.int32)])
    metas = sorted(metas_of(found), key=lambda meta: meta.place)
    computed = sum(m.length for m in metas) - sum(prefix.tokens for prefix in shared_prefixes(metas))
    assert computed == 200 + 8 * (10 * 60 + 9 * 40)
    assert sum(m.length for m in metas) == 8 * sum(200 + 100 * turn + 60 for turn in range(10)) > 7 * computed
    contents = {sample.key: sample.content for sample in found}
    assert tree_of([contents[meta.key] for meta in metas], share=True).size == computed


def group_of(prompt: int, responses: list[int], number: int = 0) -> list[SampleMeta]:
    shared = (SharedPrefix(0, prompt),) if len(responses) > 1 else ()
    return [
        SampleMeta(number, i, SampleWork(prompt + length), length, steps=length, shared=shared)
        for i, length in enumerate(responses)
    ]


@pytest.mark.parametrize(
    ("prompt", "siblings", "shares"), [(2048, 8, True), (512, 8, True), (8, 8, False), (100, 8, True), (2048, 1, False)]
)
def test_auto_shares_where_it_saves_time(prompt, siblings, shares):
    metas = [meta for number in range(32) for meta in group_of(prompt, [512] * siblings, number)]
    given = {"step": 1, "num_ranks": 2, "mini_batches": 1, "max_tokens": 16384, "cost": SHAPES["1.5B"].cost}
    batches = make_layout(metas, shares="auto", padded=False, **given)
    assert {micro.shares for batch in batches for micro in batch.mini_batches[0].micro_batches} == {shares}
    forced = make_layout(metas, shares=True, padded=False, **given)
    assert any(micro.shares for batch in forced for micro in batch.mini_batches[0].micro_batches) == (siblings > 1)


def test_most_of_what_can_be_saved_is_saved():
    """Groups are cut only where the budget asks for it, and into parts of the same size."""
    metas = [meta for number in range(8) for meta in group_of(2048, [1024] * 8, number)]
    for budget, parts in ((16384, 1), (8192, 2), (7000, 2)):
        (batch,) = make_layout(
            metas, step=1, num_ranks=1, mini_batches=1, max_tokens=budget, cost=SHAPES["1.5B"].cost, padded=False,
            shares="auto",
        )  # fmt: skip
        assert shared_tokens([batch], metas) * 8 * 3072 == 2048 * (8 - parts), budget
        rows = [row for micro in batch.mini_batches[0].micro_batches for row in micro.rows]
        assert {len(row) for row in rows} == {8 // parts}, budget
