"""Layouts that others use, to compare with (balance.py, docs/balance.md). Pure functions: Items -> Grid.

naive             samples in their order: an equal number for each rank, micro-batches filled one after another
sort              as in the paper: sorted by simulated workload; sample i goes to rank i modulo the number of ranks
karmarkar_karp    largest differencing over the ranks, and then over the micro-batches of each rank, the most expensive
                  micro-batches first
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gcore.preparation.assignment import Bin, Grid, Items, by_rank, pack, to_grid


def naive(items: Items) -> Grid:
    bounds = [len(items.arrival) * rank // items.ranks for rank in range(items.ranks + 1)]
    shares = [items.arrival[a:b] for a, b in itertools.pairwise(bounds)]
    return to_grid(items, [_in_order(items, share) for share in shares])


def _in_order(items: Items, share: Sequence[int]) -> list[Bin]:
    """Fill a bin until the next item does not fit."""
    bins, current = list[Bin](), list[int]()
    for item in share:
        if current and len(_by_length(items, [*current, item])) > 1:
            bins += _by_length(items, current)
            current = []
        current.append(item)
    return bins + _by_length(items, current)


def _by_length(items: Items, share: Iterable[int]) -> list[Bin]:
    return pack(items, sorted(share, key=lambda i: (-items.lengths[i], i)))


def sort(items: Items) -> Grid:
    """Samples of similar cost are at the same place in the order of each rank."""
    dealt = [range(rank, len(items.costs), items.ranks) for rank in range(items.ranks)]
    return to_grid(items, [_in_order(items, share) for share in dealt])


def karmarkar_karp(items: Items) -> Grid:
    shares = differencing(items.costs, items.ranks)
    positions = max(-(-sum(items.lengths[i] for i in share) // items.budget) for share in shares)
    longest = len(by_rank(items, shares))  # it fits into these
    for number in range(max(1, positions), longest + 1):
        packed = [_in_parts(items, share, number) for share in shares]
        if all(len(bins) <= number for bins in packed):
            return to_grid(items, packed)
    return by_rank(items, shares)


def _in_parts(items: Items, share: Sequence[int], number: int) -> list[Bin]:
    """More than `number` bins: it does not fit."""
    parts = differencing([items.costs[i] for i in share], number)
    bins = [b for part in parts for b in _by_length(items, [share[i] for i in part])]
    return sorted(bins, key=lambda b: -b.load)


def differencing(costs: Sequence[int], number: int) -> list[list[int]]:
    """Largest differencing method of Karmarkar and Karp: indices of `costs` in `number` parts of similar sums.

    Every entry of the heap is a solution for some of the costs. The two solutions with the largest differences between
    their parts are joined, the most expensive part of one with the cheapest of the other.
    """
    heap: list[tuple[int, int, np.ndarray, list[list[int]]]] = []
    for index, cost in enumerate(costs):
        sums = np.zeros(number, np.int64)
        sums[0] = cost
        heap.append((-cost, index, sums, [[index], *([] for _ in range(number - 1))]))
    heapq.heapify(heap)
    serial = len(costs)
    while len(heap) > 1:
        _, _, sums, parts = heapq.heappop(heap)
        _, _, others, other_parts = heapq.heappop(heap)
        sums = sums + others[::-1]
        order = np.argsort(-sums, kind="stable")
        joined = [a + b for a, b in zip(parts, reversed(other_parts), strict=True)]
        sums = sums[order]
        heapq.heappush(heap, (int(sums[-1] - sums[0]), serial, sums, [joined[i] for i in order]))
        serial += 1
    return heap[0][3] if heap else [[] for _ in range(number)]


if __name__ == "__main__":  # a part of other benches
    print(__doc__)
