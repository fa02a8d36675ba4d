"""The common knowledge of the rollout phase: rules by hand, and what must hold whatever the news and their order."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gcore.controller.step_ledger import ProgressReport, StepLedger

SEEDS = range(60)


def strict(target: int, base: int = 0, window: int = 100) -> StepLedger:
    board = StepLedger(target, strict=True)
    board.begin(base, window)
    return board


def free(target: int) -> StepLedger:
    board = StepLedger(target, strict=False)
    board.begin(0, 100)
    return board


def kept(*cursors: int, version: int = 0) -> ProgressReport:
    return ProgressReport(kept=[(cursor, version) for cursor in cursors])


def dropped(*cursors: int, why: str = "no_spread") -> ProgressReport:
    return ProgressReport(dropped=[(cursor, why) for cursor in cursors])


# --- strict


def test_strict_waits_for_the_first_in_line():
    board = strict(2, base=10)
    board.add([kept(11, 12, 13, 14)])
    assert board.chosen() is None  # 10 may still turn out well
    board.add([dropped(10)])
    assert board.chosen() == [11, 12]


def test_strict_ends_at_the_end_of_the_window():
    board = strict(3, base=10, window=4)
    board.add([kept(11), dropped(10, 12)])
    assert board.chosen() is None
    board.add([kept(13)])
    assert board.chosen() == [11, 13]
    nothing = strict(3, window=2)
    nothing.add([dropped(0, 1)])
    assert nothing.chosen() == []


def test_strict_takes_no_notice_of_who_is_idle():
    board = strict(1)
    board.add([ProgressReport(idle=True), ProgressReport(idle=True)])
    assert board.chosen() is None


def test_frontier():
    board = strict(2, base=10)
    assert board.frontier() == 9
    board.add([kept(14)])
    assert board.frontier() == 14  # all before it must be drawn, and nothing beyond
    board.add([dropped(16)])
    assert board.frontier() == 16
    board.add([kept(12, 20)])
    assert board.frontier() == 14  # two are there: what comes after the second cannot count


def decide(dice: random.Random, window: int) -> dict[int, bool]:
    return {cursor: dice.random() < 0.5 for cursor in range(window)}


def deal(
    dice: random.Random, fate: dict[int, bool], base: int, size: int, send: Callable[[list[ProgressReport]], bool]
) -> None:
    """The fates as news of `size` controllers, in random order, in ticks of random size, until `send` says enough."""
    left = list(fate)
    dice.shuffle(left)
    while left:
        parts = [ProgressReport() for _ in range(size)]
        for _ in range(dice.randint(0, 4)):
            if left:
                cursor = left.pop()
                part = parts[cursor % size]
                if fate[cursor]:
                    part.kept.append((base + cursor, 0))
                else:
                    part.dropped.append((base + cursor, "no_spread"))
        if send(parts):
            return


@pytest.mark.parametrize("seed", SEEDS)
def test_strict_is_the_same_prefix_however_the_news_come(seed):
    dice = random.Random(seed)
    target, window, base = dice.randint(1, 6), dice.randint(6, 20), dice.randint(0, 50)
    fate = decide(dice, window)
    good = [base + cursor for cursor in range(window) if fate[cursor]]
    expected = good[:target]
    last = expected[-1] if len(expected) == target else base + window - 1
    for size in (1, 2, 3, 4):
        board, known = strict(target, base, window), set[int]()

        def send(parts: list[ProgressReport], board: StepLedger = board, known: set[int] = known) -> bool:
            board.add(parts)
            known |= {cursor for part in parts for cursor, _ in (*part.kept, *part.dropped)}
            certain = set(range(base, last + 1)) <= known
            assert board.chosen() == (expected if certain else None)  # neither too early, nor later than it could be
            if certain and len(expected) == target:
                assert board.frontier() == last
            return False  # what comes later changes nothing

        deal(dice, fate, base, size, send)
        assert board.chosen() == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_drawing_up_to_the_frontier_is_enough(seed):
    """Whoever draws all prompts up to the frontier, and one more each time it stands still, comes to the end."""
    dice = random.Random(seed)
    target, window = dice.randint(1, 6), dice.randint(6, 20)
    fate = decide(dice, window)
    board, drawn, running = strict(target, 0, window), 0, list[int]()
    for _ in range(200):
        if board.chosen() is not None:
            break
        while drawn < window and (drawn <= board.frontier() or not running):
            running.append(drawn)
            drawn += 1
        cursor = running.pop(dice.randrange(len(running)))
        board.add([kept(cursor) if fate[cursor] else dropped(cursor)])
    assert board.chosen() == [cursor for cursor in range(window) if fate[cursor]][:target]


# --- free


def test_free_ends_when_enough_have_come_and_takes_them_in_prompt_order():
    """In order of arrival the last to come would be left behind, and those are the long ones."""
    board = free(2)
    board.add([kept(7), ProgressReport()])
    assert board.chosen() is None
    board.add([kept(9), kept(3)])
    assert board.chosen() == [3, 7]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_parts_of_what_is_missing_add_up(size):
    """10 wanted, 4 there, half of the groups pass: 12 must be under way, and 7 are."""
    board = free(10)
    board.add([ProgressReport(kept=[(i, 0) for i in range(4)], running=7), *[ProgressReport()] * (size - 1)])
    for _ in range(4):
        parts = [board.missing(10, 0.5, rank, size) for rank in range(size)]
        assert sum(parts) == 5 and max(parts) - min(parts) <= 1
        assert sum(board.missing(5, 0.5, rank, size) for rank in range(size)) == 2 - 7  # too many
        board.add([ProgressReport(running=7)])
    assert len({board.missing(10, 0.5, 0, 3) for board.ticks in range(3)}) == 2  # each controller has its turn
    assert [board.missing(4, 0.5, rank, size) for rank in range(size)] == [-7] * size  # none in place of a dropped one


def test_free_takes_the_oldest_policy_first():
    board = free(2)
    board.add([kept(1, version=3)])
    board.add([kept(2, version=2), kept(5, version=3)])
    board.add([kept(9, version=2)])
    assert board.chosen() == [2, 9]


def test_free_waits_for_what_the_next_step_could_not_use():
    board = free(1)
    board.add([kept(1), ProgressReport(due=2)])
    assert board.chosen() is None
    board.add([ProgressReport(due=1), ProgressReport()])
    assert board.chosen() is None
    board.add([ProgressReport(), ProgressReport()])
    assert board.chosen() == [1]


def test_free_ends_when_all_are_idle():
    board = free(3)
    board.add([ProgressReport(kept=[(1, 0)], idle=True), ProgressReport(idle=False)])
    assert board.chosen() is None
    board.add([ProgressReport(idle=True), ProgressReport(idle=True)])
    assert board.chosen() == [1]


def test_who_is_withdrawn_may_come_back_in_the_same_breath():
    board = free(2)
    board.add([kept(1, 2, version=0)])
    board.add([ProgressReport(withdrawn=[1, 2], kept=[(2, 5)])])
    assert board.kept == {2: 5}
    board.add([ProgressReport(withdrawn=[8])])  # nobody told of it yet
    assert board.kept == {2: 5}


def test_a_new_step_keeps_the_groups_and_forgets_the_drops():
    board = free(5)
    board.add([ProgressReport(kept=[(1, 0), (2, 0)], dropped=[(3, "no_spread")], idle=True, due=1)])
    assert (board.seen, len(board.dropped)) == (2, 1)
    board.begin(0, 100)
    assert (board.kept, board.dropped, board.seen) == ({1: 0, 2: 0}, {}, 0)
    assert board.chosen() is None  # idle was yesterday
    board.target = 2
    assert board.chosen() == [1, 2]  # and so were those due


@pytest.mark.parametrize("seed", SEEDS)
def test_free_whatever_the_news(seed):
    """The end comes exactly when there are enough and none is due, or nobody can do more; then the oldest go first."""
    dice = random.Random(seed)
    target, size, boards = dice.randint(1, 6), dice.randint(1, 4), (free(1), free(1))
    for board in boards:
        board.target = target
    shadow: dict[int, tuple[int, int]] = {}  # prompt -> version, prompt: the order they are taken in
    fresh, chosen = 0, None
    for _ in range(12):
        parts = []
        for _ in range(size):
            found = [(fresh := fresh + 1, dice.randint(0, 2)) for _ in range(dice.randint(0, 2))]
            gone = [cursor for cursor in shadow if dice.random() < 0.1]
            for cursor in gone:
                del shadow[cursor]
            bad = [(fresh := fresh + 1, "no_spread") for _ in range(dice.randint(0, 1))]
            parts.append(ProgressReport(found, bad, gone, dice.random() < 0.3, int(dice.random() < 0.3)))
        shadow |= {cursor: (version, cursor) for part in parts for cursor, version in part.kept}
        together = ProgressReport(
            *([entry for part in parts for entry in getattr(part, name)] for name in ("kept", "dropped", "withdrawn")),
            all(part.idle for part in parts),
            sum(part.due for part in parts),
        )
        boards[0].add(parts)
        boards[1].add([together])  # one controller that saw it all
        enough = len(shadow) >= target and not together.due
        expected = sorted(shadow, key=shadow.__getitem__)[:target] if enough or together.idle else None
        for board in boards:
            chosen = board.chosen()
            assert chosen == expected
            assert board.chosen() == expected  # to ask changes nothing
            for cursor in chosen or []:
                board.kept.pop(cursor)
        for cursor in expected or []:
            del shadow[cursor]
    decided = boards[0].seen + len(boards[0].dropped)
    assert decided == fresh and decided == boards[1].seen + len(boards[1].dropped)
