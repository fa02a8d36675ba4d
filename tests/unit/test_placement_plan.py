"""Ground, Split and shares: every slot has one role, replicas fit their blocks, and what cannot be is said."""

import random

import pytest

from gcore.placement.plan import POLICY, Ground, Move, Split, all_splits, shares, split_by
from gcore.types import UserError

GROUNDS = [
    Ground(blocks * max(widths), dict(zip((POLICY, "judge", "critic"), widths, strict=False)))
    for widths in ((1, 1), (1, 4), (2, 4), (4, 2), (8, 8), (1, 2, 4), (2, 8, 1))
    for blocks in (1, 2, 3, 7, 16)
]


def slots_of_replicas(ground: Ground, split: Split) -> list[int]:
    """The slots of all replicas that are awake, one by one."""
    found = []
    for block, role in enumerate(split.owners):
        first, width = ground.slots_of(block).start, ground.widths[role]
        for place in range(len(ground.replicas(role, block))):
            found += range(first + place * width, first + (place + 1) * width)
    return found


@pytest.mark.parametrize("ground", GROUNDS, ids=str)
def test_every_split_uses_every_slot_once(ground):
    rng = random.Random(0)
    splits = [shares(ground, {role: rng.random() for role in ground.roles}) for _ in range(20)]
    splits += [Split(tuple(rng.choice(ground.roles) for _ in range(ground.num_blocks))) for _ in range(20)]
    if len(ground.roles) == 2:
        splits += all_splits(ground)
    for split in splits:
        assert split.check(ground) is split
        assert sorted(slots_of_replicas(ground, split)) == list(range(ground.slots))
        assert sum(split.counts().values()) == ground.num_blocks


@pytest.mark.parametrize("ground", GROUNDS, ids=str)
def test_a_replica_has_its_place_for_good(ground):
    """Numbers do not overlap between blocks, and count without gaps."""
    for role, width in ground.widths.items():
        numbers = [i for block in range(ground.num_blocks) for i in ground.replicas(role, block)]
        assert numbers == list(range(ground.slots // width))


def test_random_moves_keep_a_split_whole():
    rng, ground = random.Random(1), Ground(32, {POLICY: 1, "judge": 4})
    split = shares(ground, {POLICY: 1.0, "judge": 1.0})
    for _ in range(200):
        block = rng.randrange(ground.num_blocks)
        source = split[block]
        target = "judge" if source == POLICY else POLICY
        after = split.after([Move(block, source, target)])
        assert [b for b in range(ground.num_blocks) if after[b] != split[b]] == [block]
        split = after.check(ground)


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
        (12, {POLICY: 0}, "at least one slot"),
        (12, {}, "at least one slot"),
    ],
)
def test_grounds_that_cannot_be(slots, widths, words):
    with pytest.raises(UserError, match=words):
        Ground(slots, widths)


def test_splits_that_cannot_be():
    ground = Ground(8, {POLICY: 1, "judge": 4})
    for split in (Split((POLICY,)), Split((POLICY, "critic")), Split((POLICY, "judge", "judge"))):
        with pytest.raises(UserError, match="expected 2 blocks"):
            split.check(ground)
    for counts in ({POLICY: 1, "judge": 2}, {POLICY: 3, "judge": -1}, {POLICY: 1, "judge": 0}):
        with pytest.raises(UserError, match="do not make the 2"):
            split_by(ground, counts)


def test_all_splits_of_two_roles():
    ground = Ground(4, {POLICY: 1, "judge": 1})
    assert [split.counts() for split in all_splits(ground)] == [
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
    ground = Ground(10, {POLICY: 1, "judge": 1})
    counts = shares(ground, dict(zip((POLICY, "judge"), weights, strict=True))).counts()
    assert (counts[POLICY], counts["judge"]) == expected


def test_shares_with_too_few_blocks_for_all():
    ground = Ground(2, {POLICY: 1, "judge": 1, "critic": 1})
    split = shares(ground, {POLICY: 5.0, "judge": 3.0, "critic": 0.1})
    assert split.counts() == {POLICY: 1, "judge": 1}
