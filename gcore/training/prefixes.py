"""What the samples of a row have in common: the tree of their prefixes, and attention over it.

A row holds each node once, depth first, so the descendants of a node are the tokens after it:

    prompt ─┬─ answer 0             prompt | answer 0 | turn | answer 1 | answer 2
            └─ turn ─┬─ answer 1
                     └─ answer 2

A token attends to the tokens before it in its node and to all tokens of the node's ancestors: what it would see alone.
With a mask this is one more condition. Without one, the keys of a node are those of its ancestors and its own, and its
queries are the last tokens of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gcore.content.media import on_device
from gcore.content.tokens import Tokens
from gcore.training.varlen import Spans, attend_row, rounded


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
class Seen:
    """What the nodes of a row see, one after the other: the tokens of their ancestors, then their own."""

    index: Tensor  # of the tokens in the row
    spans: Spans


def seen_by_nodes(tree: Tree, device: torch.device) -> Seen | None:
    """None: no node has a parent."""
    nodes, seen = tree.nodes, list[np.ndarray]()
    if all(node.parent < 0 for node in nodes):
        return None
    above = list[np.ndarray]()  # each node's tokens and those of its ancestors, without the padding at its end
    for node, end in zip(nodes, [*(node.first for node in nodes[1:]), tree.size], strict=True):
        before = above[node.parent] if node.parent >= 0 else np.zeros(0, np.int64)
        above.append(np.concatenate([before, np.arange(node.first, node.end)]))
        seen.append(np.concatenate([before, np.arange(node.first, end)]))
    starts = np.cumsum([0, *map(len, seen)], dtype=np.int32)
    return Seen(on_device(np.concatenate(seen), device), Spans(on_device(starts, device), rounded(max(map(len, seen)))))


def attend(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, nodes: Spans, seen: Seen, scale: float, window: int | None
) -> Tensor:
    """Keys and values are small where query heads share them: here each node gets its own copy. Their gradients are
    added in float32."""
    exact = torch.promote_types(key_TGD.dtype, torch.float32)
    keys, values = (t.to(exact).index_select(0, seen.index).to(t.dtype) for t in (key_TGD, value_TGD))
    return attend_row(query_THD, keys, values, nodes, scale, window, keys=seen.spans)
