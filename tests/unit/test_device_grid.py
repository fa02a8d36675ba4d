"""DeviceGrid, Split and shares: every slot has one role, replicas fit their blocks, invalid values are rejected."""

import random
from collections import Counter

import pytest

from gcore.placement.grid import POLICY, DeviceGrid, Move, Split, all_splits, shares, split_by
from gcore.types import UserError

GRIDS = [
    DeviceGrid(blocks * max(widths), dict(zip((POLICY, "judge", "critic"), widths, strict=False)))
    for widths in ((1, 1), (1, 4), (2, 4), (4, 2), (8, 8), (1, 2, 4), (2, 8, 1))
    for blocks in (1, 2, 3, 7, 16)
]


def slots_of_replicas(grid: DeviceGrid, split: Split) -> list[int]:
    """The slots of all awake replicas."""
    found = []
    for block, role in enumerate(split.owners):
        first, width = grid.slots_of(block).start, grid.widths[role]
        for place in range(len(grid.replicas(role, block))):
            found += range(first + place * width, first + (place + 1) * width)
    return found


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_split_uses_every_slot_once(grid):
    rng = random.Random(0)
    splits = [shares(grid, {role: rng.random() for role in grid.roles}) for _ in range(20)]
    splits += [Split(tuple(rng.choice(grid.roles) for _ in range(grid.num_blocks))) for _ in range(20)]
    if len(grid.roles) == 2:
        splits += all_splits(grid)
    for split in splits:
        assert split.check(grid) is split
        assert sorted(slots_of_replicas(grid, split)) == list(range(grid.slots))
        assert len(split.owners) == grid.num_blocks


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_replica_has_a_fixed_block(grid):
    """Indices do not overlap between blocks and have no gaps."""
    for role, width in grid.widths.items():
        numbers = [i for block in range(grid.num_blocks) for i in grid.replicas(role, block)]
        assert numbers == list(range(grid.slots // width))


def test_random_moves_keep_a_split_whole():
    rng, grid = random.Random(1), DeviceGrid(32, {POLICY: 1, "judge": 4})
    split = shares(grid, {POLICY: 1.0, "judge": 1.0})
    for _ in range(200):
        block = rng.randrange(grid.num_blocks)
        source = split[block]
        target = "judge" if source == POLICY else POLICY
        after = split.after([Move(block, source, target)])
        assert [b for b in range(grid.num_blocks) if after[b] != split[b]] == [block]
        split = after.check(grid)


def test_a_move_that_does_not_fit_is_refused():
    split = Split((POLICY, "judge"))
    with pytest.raises(AssertionError, match="does not fit"):
        split.after([Move(1, POLICY, "judge")])
    with pytest.raises(AssertionError, match="does not fit"):
        split.after([Move(0, POLICY, POLICY)])


@pytest.mark.parametrize(
    ("slots", "widths", "words"),
    [
        (10, {POLICY: 1, "judge": 4}, "placement.slots=10 is not a multiple of 4"),
        (2, {POLICY: 1, "judge": 4}, "placement.slots=2"),
        (12, {POLICY: 2, "judge": 3}, "do not fill a block of 3"),
        (12, {POLICY: 0}, "slots per replica"),
        (12, {}, "slots per replica"),
    ],
)
def test_invalid_grids(slots, widths, words):
    with pytest.raises(UserError, match=words):
        DeviceGrid(slots, widths)


def test_invalid_splits():
    grid = DeviceGrid(8, {POLICY: 1, "judge": 4})
    for split in (Split((POLICY,)), Split((POLICY, "critic")), Split((POLICY, "judge", "judge"))):
        with pytest.raises(UserError, match="expected 2 blocks"):
            split.check(grid)
    for counts in ({POLICY: 1, "judge": 2}, {POLICY: 3, "judge": -1}, {POLICY: 1, "judge": 0}):
        with pytest.raises(UserError, match="expected a sum of 2"):
            split_by(grid, counts)


def test_all_splits_of_two_roles():
    grid = DeviceGrid(4, {POLICY: 1, "judge": 1})
    assert [Counter(split.owners) for split in all_splits(grid)] == [
        {POLICY: 1, "judge": 3},
        {POLICY: 2, "judge": 2},
        {POLICY: 3, "judge": 1},
    ]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1.0, 1.0), (5, 5)),
        ((3.0, 1.0), (7, 3)),  # one each, and of the other eight six and two
        ((1.0, 0.0), (9, 1)),
        ((0.0, 0.0), (5, 5)),
        ((2.1, 1.0), (6, 4)),  # 5.42 and 2.58 of eight: the larger remainder gets the last
    ],
)
def test_shares_by_largest_remainder(weights, expected):
    grid = DeviceGrid(10, {POLICY: 1, "judge": 1})
    counts = Counter(shares(grid, dict(zip((POLICY, "judge"), weights, strict=True))).owners)
    assert (counts[POLICY], counts["judge"]) == expected


def test_shares_with_too_few_blocks_for_all():
    grid = DeviceGrid(2, {POLICY: 1, "judge": 1, "critic": 1})
    split = shares(grid, {POLICY: 5.0, "judge": 3.0, "critic": 0.1})
    assert Counter(split.owners) == {POLICY: 1, "judge": 1}
