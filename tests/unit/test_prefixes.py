"""Samples that share prefixes in a row: the same logprobs, entropies and gradients as those of whole samples."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from gcore.content.tokens import Tokens
from gcore.models.networks import unify_passes
from gcore.training.logprob_model import LogprobModel, to_tensors
from gcore.training.prefixes import SHORTEST, levels_of, tree_of
from gcore.types import MicroBatch, Sample
from tests.contract.test_families import FAMILIES
from tests.unit.test_training import RECIPE, config_of, network_of

CPU = torch.device("cpu")
VOCABULARY = 12


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
    pairs = sum(len(level.queries.starts_N) - 1 for level in levels_of(tree, CPU))
    assert pairs == len({node.parent for node in tree.nodes} - {-1})


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


def check(network: Any, samples: list[Sample], in_one_row: bool, seed: int) -> None:
    *whole, many = computed(network, samples, False, in_one_row, seed)
    *shared, few = computed(network, samples, True, in_one_row, seed)
    assert few < 0.8 * many
    assert torch.allclose(whole[0], shared[0], atol=1e-5) and torch.allclose(whole[1], shared[1], atol=1e-5)
    assert whole[2].keys() == shared[2].keys()
    for name, gradient in whole[2].items():
        assert (gradient - shared[2][name]).abs().max() <= 1e-6 + 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("in_one_row", [False, True], ids=["masked", "varlen"])
def test_logprobs_and_gradients_are_those_of_whole_samples(architecture, in_one_row, seed):
    build = {**RECIPE["model"]["build"], "architecture": architecture, "max_length": 256}
    check(network_of(config_of(model={"build": build})), samples_of(seed), in_one_row, seed)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4", "qwen3_moe"])
def test_windows_and_chunks_count_positions(name):
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(FAMILIES[name](), attn_implementation="sdpa")
    unify_passes(network)
    check(network, samples_of(4), False, 1)


def test_recorded_experts_that_differ_are_not_shared():
    a, b = (np.zeros((6, 2, 2), np.int8) for _ in range(2))
    b[3] = 1
    contents = [Tokens(np.arange(5), np.arange(3), experts=experts) for experts in (a, b)]
    assert tree_of(contents, share=True).size == 8 + 8 - 3
    assert tree_of([contents[0], contents[0]], share=True).size == 5 + 3 + 3  # short answers are not
