"""Slots, blocks and splits: which role owns which devices in the rollout phase. Pure.

    slots   0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15        a slot is one accelerator
    blocks     0         1          2            3             the unit that changes its owner
    split   policy    policy     policy        judge           tensor parallel 2 and 4: 2 engines or 1 judge per block

A block is as wide as a replica of the widest role, so that every role can use all of it. Each replica of each role has
a fixed block. On a block, the replicas of its owner are awake; the replicas of the other roles sleep.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from gcore.types import UserError

POLICY = "policy"
TRAINER = "trainer"  # owns blocks only under asynchronous rollout; otherwise all of them between rollouts


@dataclass(frozen=True, slots=True)
class DeviceGrid:
    """The slots, and the slots per replica of each role. DeviceGrid(slots=16, widths={"policy": 2, "judge": 4})"""

    slots: int
    widths: Mapping[str, int]

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths.values()) < 1:
            raise UserError(
                f"slots per replica: got {dict(self.widths)}; expected at least 1 for every role (tensor_parallel)"
            )
        not_dividing = {role: width for role, width in self.widths.items() if self.slots_per_block % width}
        if not_dividing:
            raise UserError(
                f"replicas of {not_dividing} slots do not fill a block of {self.slots_per_block}: the widest role's "
                "tensor_parallel must be a multiple of the others'"
            )
        if self.slots < self.slots_per_block or self.slots % self.slots_per_block:
            raise UserError(
                f"placement.slots={self.slots} is not a multiple of {self.slots_per_block}, the largest tensor_parallel"
            )

    @property
    def slots_per_block(self) -> int:
        return max(self.widths.values())

    @property
    def num_blocks(self) -> int:
        return self.slots // self.slots_per_block

    @property
    def roles(self) -> list[str]:
        return list(self.widths)

    def with_trainer(self) -> DeviceGrid:
        """The trainer as a role, one rank per slot."""
        return DeviceGrid(self.slots, {**self.widths, TRAINER: 1})

    def per_block(self, role: str) -> int:
        return self.slots_per_block // self.widths[role]

    def replicas(self, role: str, block: int) -> range:
        """The indices of the role's replicas on a block."""
        count = self.per_block(role)
        return range(block * count, (block + 1) * count)

    def slots_of(self, block: int) -> range:
        return range(block * self.slots_per_block, (block + 1) * self.slots_per_block)


@dataclass(frozen=True, slots=True)
class Move:
    """Move(block=3, source="policy", target="judge", reason="judge 12.1 s behind"): one block changes its owner"""

    block: int
    source: str
    target: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Split:
    """Split(("policy", "policy", "judge")): the owner of each block"""

    owners: tuple[str, ...]

    def __getitem__(self, block: int) -> str:
        return self.owners[block]

    def blocks(self, role: str) -> list[int]:
        return [block for block, owner in enumerate(self.owners) if owner == role]

    def after(self, moves: Iterable[Move]) -> Split:
        owners = list(self.owners)
        for move in moves:
            assert owners[move.block] == move.source != move.target, f"{move} does not fit {self}"
            owners[move.block] = move.target
        return Split(tuple(owners))

    def check(self, grid: DeviceGrid) -> Split:
        """Raises UserError unless every block of the grid has one of its roles as owner."""
        unknown = sorted(set(self.owners) - set(grid.widths))
        if unknown or len(self.owners) != grid.num_blocks:
            raise UserError(
                f"a split over {len(self.owners)} blocks with roles {sorted(set(self.owners))}; expected "
                f"{grid.num_blocks} blocks of {grid.roles}"
            )
        return self


def split_by(grid: DeviceGrid, blocks: Mapping[str, int]) -> Split:
    """A split with this number of blocks per role, in the given order. The sum must be the grid's number of blocks."""
    if sum(blocks.values()) != grid.num_blocks or min(blocks.values()) < 0:
        raise UserError(f"blocks per role: got {dict(blocks)}; expected a sum of {grid.num_blocks}, none negative")
    return Split(tuple(role for role, count in blocks.items() for _ in range(count))).check(grid)


def all_splits(grid: DeviceGrid) -> Iterator[Split]:
    """Every split with at least one block per role; those with the fewest for the first role come first."""
    total, roles = grid.num_blocks, grid.roles
    for cut in itertools.combinations(range(1, total), len(roles) - 1):
        counts = [end - start for start, end in itertools.pairwise((0, *cut, total))]
        yield split_by(grid, dict(zip(roles, counts, strict=True)))


def neighbours(split: Split, grid: DeviceGrid, stride: int) -> list[Split]:
    """Splits in which one role has `stride` blocks more and another `stride` fewer. Every role keeps at least one."""
    counts = {role: split.owners.count(role) for role in grid.roles}
    return [
        split_by(grid, counts | {source: counts[source] - stride, target: counts[target] + stride})
        for source, target in itertools.permutations(grid.roles, 2)
        if counts[source] > stride
    ]


def best_split(near: Split, grid: DeviceGrid, stride: int, seconds: Callable[[Split], float]) -> Split:
    """The split that takes the fewest seconds. Local search from `near`: `stride` blocks change their role, then
    fewer."""
    best, cost = near, functools.cache(seconds)
    while stride:
        last, best = best, min((best, *neighbours(best, grid, stride)), key=cost)
        if best == last:
            stride //= 2
    return best


def shares(grid: DeviceGrid, weights: Mapping[str, float] | None = None) -> Split:
    """Blocks in proportion to the weights (largest remainders), at least one per role if there are enough. Without
    weights, or if all are 0: the same number for every role."""
    roles = grid.roles
    least = 1 if grid.num_blocks >= len(roles) else 0
    free = grid.num_blocks - least * len(roles)
    if weights is None or not any(weights[role] for role in roles):
        weights = dict.fromkeys(roles, 1.0)
    total = sum(weights[role] for role in roles)
    exact = {role: free * weights[role] / total for role in roles}
    counts = {role: least + int(exact[role]) for role in roles}
    missing = grid.num_blocks - sum(counts.values())
    by_remainder = sorted(roles, key=lambda role: int(exact[role]) - exact[role])
    for role in by_remainder[:missing]:
        counts[role] += 1
    return split_by(grid, counts)
