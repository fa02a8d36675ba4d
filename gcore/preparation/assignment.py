"""Puts items into a grid of bins, positions x ranks, so that the bins of each position cost the same. Pure functions.

    position 0: | rank 0 | rank 1 | rank 2 | ...      a bin is a micro-batch: its items fit the token budget
    position 1: | rank 0 | rank 1 | rank 2 | ...      a row of the grid takes as long as its most expensive bin

An item has a length (tokens of the budget) and a cost. Costs are integers, so that sums do not depend on the order of
additions: every controller, on any machine, must get the same grid. Items are numbered, most expensive first.

`by_level` fills the positions one after another: every rank gets one of the most expensive items that are left, then
the bins are filled up to the cost of the most expensive of them. It is good if many samples are long. `by_bin` fills
all bins at once, the cheapest first, and then puts bins of similar cost at the same position. It is good if samples are
short or have few different lengths. `by_rank` balances the sums of the ranks and ignores positions.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

WIDTH_BLOCK = 8  # widths of rows are multiples of it
FULL = (1.0, 0.95, 0.88)  # shares of the budget that `by_level` aims at: what fits depends on the lengths
EMPTY = 1 << 60  # the room of an empty bin


@dataclass(frozen=True, slots=True)
class Items:
    """Items([900, 500], [1020, 560], ranks=2, budget=1024, padded=False): lengths and costs, most expensive first."""

    lengths: list[int]
    costs: list[int]
    ranks: int
    budget: int  # tokens of a bin
    padded: bool  # a bin has rows as wide as its longest item; otherwise the budget counts the tokens themselves
    arrival: tuple[int, ...] = ()  # the items in the order of their keys

    @property
    def least_positions(self) -> int:
        return max(1, -(-sum(self.lengths) // (self.ranks * self.budget)))

    def new_bin(self) -> Bin:
        return Bin(self.budget, self.padded)


class Bin:
    """The items of one micro-batch, in rows. `room`: an item up to this length fits. Padded: the first item must be the
    longest, and rows are as wide as it; otherwise there is one row."""

    __slots__ = ("_budget", "_free", "load", "padded", "room", "rows", "width")

    def __init__(self, budget: int, padded: bool) -> None:
        self._budget, self.padded = budget, padded
        self.rows: list[list[int]] = []
        self.load = self.width = 0
        self.room = EMPTY  # a sample that exceeds the budget gets a bin of its own
        self._free: list[tuple[int, int]] = []  # (free tokens, row), sorted

    def add(self, item: int, length: int, cost: int) -> None:
        self.load += cost
        if not self.padded:
            self.width += length
            self.room = self._budget - self.width
            self.rows = self.rows or [[]]
            self.rows[0].append(item)
            return
        if not self.rows:
            self.width = row_width(length, self._budget)
        at = bisect.bisect_left(self._free, (length, -1))
        if at < len(self._free):  # the fullest row in which it fits
            free, row = self._free.pop(at)
        else:
            free, row = self.width, len(self.rows)
            self.rows.append([])
        self.rows[row].append(item)
        bisect.insort(self._free, (free - length, row))
        self.room = self.width if (len(self.rows) + 1) * self.width <= self._budget else self._free[-1][0]


def row_width(length: int, budget: int) -> int:
    return min(-(-length // WIDTH_BLOCK) * WIDTH_BLOCK, max(budget, length))


class Unpacked:
    """The items that are left. `take` and the searches are almost constant in time: taken items are skipped at once."""

    def __init__(self, items: Items) -> None:
        self._items, self._next = items, list(range(len(items.costs) + 1))
        self._negative = [-cost for cost in items.costs]  # ascending, for bisect
        longest = np.maximum.accumulate(np.array([0, *reversed(items.lengths)]))[::-1]
        self._negative_longest = (-longest).tolist()  # of the items from here on; ascending
        self.size, self.cost, self.length = len(items.costs), sum(items.costs), sum(items.lengths)

    def first(self, start: int = 0) -> int | None:
        """The most expensive item that is left, from `start` on."""
        root, steps = start, self._next
        while steps[root] != root:
            root = steps[root]
        while steps[start] != root:
            steps[start], start = root, steps[start]
        return root if root < len(self._items.costs) else None

    def fitting(self, cost: int, length: int) -> int | None:
        """The most expensive item that is left with at most this cost, such that it and all cheaper ones fit."""
        start = max(bisect.bisect_left(self._negative, -cost), bisect.bisect_left(self._negative_longest, -length))
        return self.first(min(start, len(self._items.costs)))

    def take(self, item: int, into: Bin) -> None:
        length, cost = self._items.lengths[item], self._items.costs[item]
        into.add(item, length, cost)
        self._next[item] = item + 1
        self.size, self.cost, self.length = self.size - 1, self.cost - cost, self.length - length


Grid = list[list[Bin]]  # position -> rank


def by_level(items: Items, full: float) -> Grid:
    """The fill level of a position: the most expensive item, or what the bins must take on average for all to end
    together, if they are filled to `full`."""
    pool, grid = Unpacked(items), Grid()
    while pool.size:
        positions = max(1, -(-pool.length // max(1, int(items.ranks * items.budget * full))))
        level = -(-pool.cost // (items.ranks * positions))
        bins = fill(pool, items, level, first_items(pool, items.ranks))
        if positions == 1:
            _add_rest(pool, items, bins)
        grid.append(bins)
    return grid


def first_items(pool: Unpacked, number: int) -> list[int]:
    """The most expensive items that are left, one for each bin of a position."""
    first = list[int]()
    while len(first) < number and (item := pool.first(first[-1] + 1 if first else 0)) is not None:
        first.append(item)
    return first


def fill(pool: Unpacked, items: Items, level: int, first: Sequence[int]) -> list[Bin]:
    """One position: bins that start with the items `first`, each filled up to `level` with the largest that fit."""
    bins = [items.new_bin() for _ in range(items.ranks)]
    for start, into in zip(first, bins, strict=False):
        level = max(level, items.costs[start])
        pool.take(start, into)
    for into in reversed(bins):  # the cheapest first: it has to take the most
        while (item := pool.fitting(level - into.load, into.room)) is not None:
            pool.take(item, into)
    return bins


def _add_rest(pool: Unpacked, items: Items, bins: Sequence[Bin]) -> None:
    """Items for which no gap is left: each to the cheapest bin with room. What fits nowhere stays in the pool."""
    heap = [(into.load, number) for number, into in enumerate(bins)]
    heapq.heapify(heap)
    item = pool.first()
    while item is not None and heap:
        aside = list[tuple[int, int]]()
        while heap:
            load, number = heapq.heappop(heap)
            if bins[number].room >= items.lengths[item]:
                pool.take(item, bins[number])
                aside.append((bins[number].load, number))
                break
            aside.append((load, number))
        for entry in aside:
            heapq.heappush(heap, entry)
        item = pool.first(item + 1)


def by_bin(items: Items, positions: int) -> Grid | None:
    """All bins of `positions`: each item, longest first, goes to the cheapest bin with room. Bins of similar cost are
    then at the same position. None: the items do not fit."""
    number = positions * items.ranks
    bins = [items.new_bin() for _ in range(number)]
    loads, rooms = np.zeros(number, np.int64), np.full(number, bins[0].room)
    order = sorted(range(len(items.costs)), key=lambda i: -items.lengths[i])
    none = np.iinfo(np.int64).max
    for item in order:
        length = items.lengths[item]
        free = np.where(rooms >= length, loads, none)
        best = int(free.argmin())
        if free[best] == none:
            return None
        bins[best].add(item, length, items.costs[item])
        loads[best], rooms[best] = bins[best].load, bins[best].room
    bins.sort(key=lambda b: -b.load)
    return [bins[at : at + items.ranks] for at in range(0, number, items.ranks)]


def by_rank(items: Items, shares: Sequence[Sequence[int]]) -> Grid:
    """`shares`: the items of each rank. Each rank packs its own, longest first, into as few bins as they need."""
    return to_grid(items, [pack(items, sorted(share, key=lambda i: (-items.lengths[i], i))) for share in shares])


def to_grid(items: Items, packed: Sequence[list[Bin]]) -> Grid:
    """`packed`: the bins of each rank. All ranks get equally many: they meet in collectives."""
    most = max(len(bins) for bins in packed)
    padded = [bins + [items.new_bin() for _ in range(most - len(bins))] for bins in packed]
    return [[bins[position] for bins in padded] for position in range(most)]


def pack(items: Items, share: Iterable[int]) -> list[Bin]:
    """Rows have similar lengths and little padding if each bin is filled before the next begins. Without padding, each
    item goes to the first bin with room."""
    bins = list[Bin]()
    for item in share:
        length = items.lengths[item]
        open_bins = bins[-1:] if items.padded else bins
        into = next((b for b in open_bins if b.room >= length), None)
        if into is None:
            into = items.new_bin()
            bins.append(into)
        into.add(item, length, items.costs[item])
    return bins


def greedy(items: Items) -> list[list[int]]:
    """Each item, most expensive first, to the rank with the lowest cost so far: at most 4/3 of the optimum."""
    shares: list[list[int]] = [[] for _ in range(items.ranks)]
    loads = [(0, rank) for rank in range(items.ranks)]
    for item, cost in enumerate(items.costs):
        load, rank = heapq.heappop(loads)
        shares[rank].append(item)
        heapq.heappush(loads, (load + cost, rank))
    return shares


def even_ranks(grid: Grid) -> Grid:
    """Order the bins of each position: the most expensive one goes to the rank with the lowest cost so far."""
    totals, ordered = [0] * len(grid[0]), Grid()
    for bins in grid:
        ranks = sorted(range(len(bins)), key=lambda rank: (totals[rank], rank))
        row = list(bins)
        for rank, into in zip(ranks, sorted(bins, key=lambda b: -b.load), strict=True):
            row[rank] = into
            totals[rank] += into.load
        ordered.append(row)
    return ordered


def even_positions(items: Items) -> Grid | None:
    """As few positions as possible, all of nearly the same cost. None: the items fit only in twice as many."""
    grid = next(_fitting(items, 2 * items.least_positions), None)
    return None if grid is None else even_ranks(grid)


def candidates(items: Items) -> list[Grid]:
    """Grids to choose from. Each is good for some lengths."""
    grids = [by_level(items, full) for full in FULL]
    grids += itertools.islice(_fitting(items, max(map(len, grids))), 2)
    return [even_ranks(grid) for grid in grids]


def _fitting(items: Items, most: int) -> Iterator[Grid]:
    """Of up to `most` positions, the fewest first."""
    for positions in range(items.least_positions, most + 1):
        if (grid := by_bin(items, positions)) is not None:
            yield grid
