"""What the samples of a row have in common: the tree of their prefixes, and attention over it.

A row holds each node once, depth first, so the descendants of a node are the tokens after it:

    prompt ─┬─ answer 0             prompt | answer 0 | turn | answer 1 | answer 2
            └─ turn ─┬─ answer 1
                     └─ answer 2

A token attends to the tokens before it in its node and to all tokens of the node's ancestors: what it would see alone.
With a mask this is one more condition. Without one, the nodes attend to themselves as if they were samples; then, level
by level, all descendants of a node attend to it, and the results are merged by the log-sum-exp of their scores, as in
ring.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcore.content.media import on_device
from gcore.content.tokens import Tokens
from gcore.training.ring import merge
from gcore.training.varlen import Spans, attend_block, attend_block_backward, rounded


@dataclass(slots=True)
class TreeNode:
    """Tokens of a row."""

    first: int
    end: int
    depth: int  # the position of the first token in its samples
    parent: int  # -1: none


@dataclass(frozen=True, slots=True)
class Tree:
    """Of the samples of a row, in their order."""

    paths: list[np.ndarray]  # where each sample's tokens are
    nodes: list[TreeNode]  # by `first`
    size: int  # tokens of the row

    def ancestors(self) -> np.ndarray:
        """[nodes, nodes]: whether a node sees another: itself and those above it."""
        seen = np.eye(len(self.nodes), dtype=bool)
        for i, node in enumerate(self.nodes):  # parents come first
            if node.parent >= 0:
                seen[i] |= seen[node.parent]
        return seen


def tree_of(contents: Sequence[Tokens], share: bool, multiple: int = 1) -> Tree:
    """`share`: a sample has the prefix that it has in common with the one before it. `multiple`: each sample begins at
    a multiple of it."""
    paths, nodes, size = list[np.ndarray](), list[TreeNode](), 0
    branch = list[int]()  # the nodes of the last sample
    for i, content in enumerate(contents):
        common, _ = content.common(contents[i - 1]) if share and i else (0, 0)
        while branch and nodes[branch[-1]].depth >= common:
            branch.pop()
        if branch:
            _cut(nodes, branch[-1], common)
        before = paths[-1][:common] if common else np.zeros(0, np.int64)
        if content.size > common:
            end = size + content.size - common
            branch.append(len(nodes))
            nodes.append(TreeNode(size, end, common, branch[-2] if len(branch) > 1 else -1))
            paths.append(np.concatenate([before, np.arange(size, end)]))
            size = -(-end // multiple) * multiple
        else:
            paths.append(before)
    order = sorted(range(len(nodes)), key=lambda n: nodes[n].first)
    number = {old: new for new, old in enumerate(order)} | {-1: -1}
    return Tree(paths, [dataclasses.replace(nodes[n], parent=number[nodes[n].parent]) for n in order], size)


def _cut(nodes: list[TreeNode], number: int, depth: int) -> None:
    """The node ends at this position; the rest of it becomes its child."""
    node = nodes[number]
    at = node.first + depth - node.depth
    if at == node.end:
        return
    for other in nodes:
        if other.parent == number:
            other.parent = len(nodes)
    nodes.append(TreeNode(at, node.end, depth, number))
    node.end = at


# ---- attention without a mask ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Nodes of one depth that have descendants. Their tokens are keys, all tokens below them are queries."""

    query_index: Tensor  # of the tokens in the row
    key_index: Tensor
    queries: Spans
    keys: Spans


def levels_of(tree: Tree, device: torch.device) -> tuple[Level, ...]:
    nodes, levels = tree.nodes, dict[int, list[tuple[range, range]]]()
    depths, ends = [0] * len(nodes), [node.end for node in nodes]
    for i, node in enumerate(nodes):
        depths[i] = depths[node.parent] + 1 if node.parent >= 0 else 0
    for i in reversed(range(len(nodes))):
        if nodes[i].parent >= 0:
            ends[nodes[i].parent] = max(ends[nodes[i].parent], ends[i])
    for i, node in enumerate(nodes):
        if ends[i] > node.end:
            levels.setdefault(depths[i], []).append((range(node.end, ends[i]), range(node.first, node.end)))

    def joined(ranges: list[range]) -> tuple[Tensor, Spans]:
        starts = np.cumsum([0, *map(len, ranges)], dtype=np.int32)
        index = on_device(np.concatenate([np.arange(r.start, r.stop) for r in ranges]), device)
        return index, Spans(on_device(starts, device), rounded(max(map(len, ranges))))

    found = []
    for pairs in levels.values():
        query_index, queries = joined([below for below, _ in pairs])
        key_index, keys = joined([own for _, own in pairs])
        found.append(Level(query_index, key_index, queries, keys))
    return tuple(found)


@torch.compiler.disable
def attend(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, nodes: Spans, levels: tuple[Level, ...], scale: float
) -> Tensor:
    output: Tensor = _Attention.apply(query_THD, key_TGD, value_TGD, nodes, levels, scale)
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Tensor:
        nodes, levels, scale = given
        query, key, value = (tensor.contiguous() for tensor in (query, key, value))
        exact = torch.promote_types(query.dtype, torch.float32)
        first, lse_HT = attend_block(query, key, value, nodes, nodes, True, scale)
        output, lse_HT = first.to(exact), lse_HT.to(exact)
        for level in levels:
            queries, (keys, values) = query[level.query_index], (t[level.key_index] for t in (key, value))
            part = attend_block(queries, keys, values, level.queries, level.keys, False, scale)
            merge(output, lse_HT, part, level.query_index)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse_HT)
        ctx.given = given
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse_HT = ctx.saved_tensors
        nodes, levels, scale = ctx.given
        grad = gradients[0].contiguous()
        exact = torch.promote_types(query.dtype, torch.float32)
        found = attend_block_backward(grad, query, key, value, output, lse_HT, nodes, nodes, True, scale)
        totals = [part.to(exact) for part in found]
        for level in levels:
            of_queries, of_keys = level.query_index, level.key_index
            found = attend_block_backward(
                grad[of_queries],
                query[of_queries],
                key[of_keys],
                value[of_keys],
                output[of_queries],
                lse_HT[:, of_queries].contiguous(),
                level.queries,
                level.keys,
                False,
                scale,
            )
            for total, part, index in zip(totals, found, (of_queries, of_keys, of_keys), strict=True):
                total.index_add_(0, index, part.to(exact))
        dq, dk, dv = (total.to(query.dtype) for total in totals)
        return dq, dk, dv, None, None, None
