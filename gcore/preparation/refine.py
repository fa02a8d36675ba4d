"""Improves a grid of bins by exchanges of single items, so that each position ends earlier. Pure; no padding.

The most expensive bin of a position gives an item to another bin, and gets a cheaper one, or none, in return. The other
bin may be at any position: it needs room, and must not become the most expensive one of its position. Each exchange
shortens the position or leaves fewer bins at its maximum, so the sum over positions of the maximum never grows.
"""

from __future__ import annotations

import numpy as np

from gcore.preparation.assignment import Grid, Items

EXCHANGES = 4  # at most, per bin
PARTNERS, MOVES = 128, 16  # that are tried for each item of the most expensive bin
ENOUGH = 0.0003  # a position whose maximum is this close to its mean is left alone


class _Exchange:
    """Arrays over bins (position x rank, flat) and over items. Each bin also has a virtual item without length and
    cost: an exchange with it is a move."""

    def __init__(self, items: Items, grid: Grid) -> None:
        self.positions, self.ranks = len(grid), items.ranks
        number, count = self.positions * self.ranks, len(items.costs)
        self.bin_of = np.empty(count + number, np.int64)
        for at, each in enumerate(b for bins in grid for b in bins):
            self.bin_of[[i for row in each.rows for i in row]] = at
        self.bin_of[count:] = np.arange(number)
        self.costs = np.array(items.costs + [0] * number, np.int64)
        self.lengths = np.array(items.lengths + [0] * number, np.int64)
        self.count, self._ascending = count, -self.costs[:count]  # items are numbered, most expensive first
        self.loads = np.array([b.load for bins in grid for b in bins], np.int64)
        self.rooms = items.budget - np.array([b.width for bins in grid for b in bins], np.int64)

    def improve(self, position: int, most: np.ndarray) -> bool:
        """One exchange for the most expensive bin of the position. False: there is none. `most`: the highest load of
        each position."""
        first = position * self.ranks
        loads = self.loads[first : first + self.ranks]
        source = first + int(loads.argmax())
        wanted = int(self.loads[source]) - int(loads.sum()) // self.ranks  # to end at the mean of the position
        slack = np.repeat(most, self.ranks) - self.loads
        slack[first : first + self.ranks] -= 1  # at the same position, only strictly less than now is better
        given = np.flatnonzero(self.bin_of[: self.count] == source)
        taken = self._partners(given, wanted, slack)
        target = self.bin_of[taken]
        gain = self.costs[given][:, None] - self.costs[taken]
        longer = self.lengths[given][:, None] - self.lengths[taken]
        allowed = (gain > 0) & (gain <= slack[target]) & (target != source)
        allowed &= (longer <= self.rooms[target]) & (-longer <= self.rooms[source])
        far = np.where(allowed, np.abs(gain - wanted), np.iinfo(np.int64).max)
        row, column = divmod(int(far.argmin()), far.shape[1])
        if not allowed[row, column]:
            return False
        self._swap(int(given[row]), int(taken[row, column]), source)
        return True

    def _partners(self, given: np.ndarray, wanted: int, slack: np.ndarray) -> np.ndarray:
        """Items to exchange each given one for: those whose cost is nearest to what is wanted, and moves to the bins
        that have the most time."""
        start = np.searchsorted(self._ascending, wanted - self.costs[given]) - PARTNERS // 2
        near = (start[:, None] + np.arange(PARTNERS)).clip(0, self.count - 1)
        freest = self.count + np.argsort(-slack, kind="stable")[:MOVES]
        return np.concatenate([near, np.broadcast_to(freest, (len(given), len(freest)))], axis=1)

    def _swap(self, given: int, taken: int, source: int) -> None:
        target = int(self.bin_of[taken])
        cost = int(self.costs[given] - self.costs[taken])
        length = int(self.lengths[given] - self.lengths[taken])
        self.loads[source] -= cost
        self.loads[target] += cost
        self.rooms[source] += length
        self.rooms[target] -= length
        self.bin_of[given] = target
        if taken < self.count:
            self.bin_of[taken] = source


def refine(items: Items, grid: Grid) -> Grid:
    """A new grid; `grid` is not changed."""
    state = _Exchange(items, grid)
    stuck = np.zeros(state.positions, bool)
    for _ in range(EXCHANGES * state.positions * state.ranks):
        loads = state.loads.reshape(state.positions, state.ranks)
        most, means = loads.max(1), loads.mean(1)
        waiting = np.where(stuck | (most - means <= ENOUGH * most), 0, most - means)
        position = int(waiting.argmax())
        if not waiting[position]:
            break
        changed = state.improve(position, most)
        stuck[position] = not changed
    return _to_grid(items, state)


def _to_grid(items: Items, state: _Exchange) -> Grid:
    flat = [items.new_bin() for _ in range(state.positions * state.ranks)]
    for item in sorted(range(state.count), key=lambda i: (-items.lengths[i], i)):
        flat[state.bin_of[item]].add(item, items.lengths[item], items.costs[item])
    grid = [flat[at : at + state.ranks] for at in range(0, len(flat), state.ranks)]
    return sorted(grid, key=lambda bins: -max(b.load for b in bins))
