"""What all controllers know of a step: rules by hand, and what must hold for any reports in any order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import reduce

import pytest

from gcore.controller.collect import StepLedger
from gcore.controller.prompt_ledger import ProgressReport

SEEDS = range(60)


def add(ledger: StepLedger, parts: Sequence[ProgressReport]) -> None:
    """One exchange: reports are merged in a tree, so in any order."""
    assert _as_sets(reduce(ProgressReport.merged, parts)) == _as_sets(reduce(ProgressReport.merged, reversed(parts)))
    ledger.add(reduce(ProgressReport.merged, parts))


def _as_sets(report: ProgressReport) -> tuple[object, ...]:
    lists = set(report.kept), set(report.dropped), set(report.withdrawn)
    return *lists, report.idle, report.due, report.running


def strict(target: int, base: int = 0, window: int = 100) -> StepLedger:
    ledger = StepLedger(target, strict=True)
    ledger.begin(base, window)
    return ledger


def free(target: int) -> StepLedger:
    ledger = StepLedger(target, strict=False)
    ledger.begin(0, 100)
    return ledger


def kept(*numbers: int, version: int = 0) -> ProgressReport:
    return ProgressReport(kept=[(number, version) for number in numbers])


def dropped(*numbers: int, why: str = "no_spread") -> ProgressReport:
    return ProgressReport(dropped=[(number, why) for number in numbers])


# --- strict


def test_strict_waits_for_the_first_in_line():
    ledger = strict(2, base=10)
    add(ledger, [kept(11, 12, 13, 14)])
    assert ledger.chosen() is None  # 10 may still turn out well
    add(ledger, [dropped(10)])
    assert ledger.chosen() == [11, 12]


def test_strict_ends_at_the_end_of_the_window():
    ledger = strict(3, base=10, window=4)
    add(ledger, [kept(11), dropped(10, 12)])
    assert ledger.chosen() is None
    add(ledger, [kept(13)])
    assert ledger.chosen() == [11, 13]
    nothing = strict(3, window=2)
    add(nothing, [dropped(0, 1)])
    assert nothing.chosen() == []


def test_strict_takes_no_notice_of_who_is_idle():
    ledger = strict(1)
    add(ledger, [ProgressReport(idle=True), ProgressReport(idle=True)])
    assert ledger.chosen() is None


def test_frontier():
    ledger = strict(2, base=10)
    assert ledger.frontier() == 9
    add(ledger, [kept(14)])
    assert ledger.frontier() == 14  # all before it must be drawn, and nothing beyond
    add(ledger, [dropped(16)])
    assert ledger.frontier() == 16
    add(ledger, [kept(12, 20)])
    assert ledger.frontier() == 14  # two are there: what comes after the second cannot count


def decide(dice: random.Random, window: int) -> dict[int, bool]:
    return {number: dice.random() < 0.5 for number in range(window)}


def deal(
    dice: random.Random, fate: dict[int, bool], base: int, size: int, send: Callable[[list[ProgressReport]], bool]
) -> None:
    """Fates as reports of `size` controllers, in random order and exchanges of random size, until `send` is True."""
    left = list(fate)
    dice.shuffle(left)
    while left:
        parts = [ProgressReport() for _ in range(size)]
        for _ in range(dice.randint(0, 4)):
            if left:
                number = left.pop()
                part = parts[number % size]
                if fate[number]:
                    part.kept.append((base + number, 0))
                else:
                    part.dropped.append((base + number, "no_spread"))
        if send(parts):
            return


@pytest.mark.parametrize("seed", SEEDS)
def test_strict_is_the_same_prefix_in_whatever_order_reports_come(seed):
    dice = random.Random(seed)
    target, window, base = dice.randint(1, 6), dice.randint(6, 20), dice.randint(0, 50)
    fate = decide(dice, window)
    good = [base + number for number in range(window) if fate[number]]
    expected = good[:target]
    last = expected[-1] if len(expected) == target else base + window - 1
    for size in (1, 2, 3, 4):
        ledger, known = strict(target, base, window), set[int]()

        def send(parts: list[ProgressReport], ledger: StepLedger = ledger, known: set[int] = known) -> bool:
            add(ledger, parts)
            known |= {number for part in parts for number, _ in (*part.kept, *part.dropped)}
            certain = set(range(base, last + 1)) <= known
            assert ledger.chosen() == (expected if certain else None)  # neither too early, nor later than it could be
            if certain and len(expected) == target:
                assert ledger.frontier() == last
            return False  # what comes later changes nothing

        deal(dice, fate, base, size, send)
        assert ledger.chosen() == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_drawing_up_to_the_frontier_is_enough(seed):
    """Drawing all prompts up to the frontier, and one more each time it does not advance, reaches the end."""
    dice = random.Random(seed)
    target, window = dice.randint(1, 6), dice.randint(6, 20)
    fate = decide(dice, window)
    ledger, drawn, running = strict(target, 0, window), 0, list[int]()
    for _ in range(200):
        if ledger.chosen() is not None:
            break
        while drawn < window and (drawn <= ledger.frontier() or not running):
            running.append(drawn)
            drawn += 1
        number = running.pop(dice.randrange(len(running)))
        add(ledger, [kept(number) if fate[number] else dropped(number)])
    assert ledger.chosen() == [number for number in range(window) if fate[number]][:target]


# --- free


def test_free_ends_when_enough_have_come_and_takes_them_in_prompt_order():
    """In order of arrival the last to come would be left behind, and those are the long ones."""
    ledger = free(2)
    add(ledger, [kept(7), ProgressReport()])
    assert ledger.chosen() is None
    add(ledger, [kept(9), kept(3)])
    assert ledger.chosen() == [3, 7]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_parts_of_what_is_missing_add_up(size):
    """10 wanted, 4 there, half of the groups pass: 12 must be under way, and 7 are."""
    ledger = free(10)
    add(ledger, [ProgressReport(kept=[(i, 0) for i in range(4)], running=7), *[ProgressReport()] * (size - 1)])
    for _ in range(4):
        parts = [ledger.missing(10, 0.5, rank, size) for rank in range(size)]
        assert sum(parts) == 5 and max(parts) - min(parts) <= 1
        assert sum(ledger.missing(5, 0.5, rank, size) for rank in range(size)) == 2 - 7  # too many
        add(ledger, [ProgressReport(running=7)])
    assert [ledger.missing(4, 0.5, rank, size) for rank in range(size)] == [-7] * size  # none in place of a dropped one


def test_what_does_not_divide_evenly_goes_to_each_controller_in_turn():
    ledger, parts = free(10), []
    for _ in range(3):
        add(ledger, [ProgressReport()])
        parts.append([ledger.missing(10, 1.0, rank, 3) for rank in range(3)])
    assert sorted(parts) == [[3, 3, 4], [3, 4, 3], [4, 3, 3]]


def test_a_step_that_keeps_nothing_else_leaves_no_group():
    ledger = free(1)
    add(ledger, [ProgressReport(kept=[(1, 0), (2, 0)], running=3)])
    ledger.clear()
    assert ledger.kept == {} and ledger.missing(5, 1.0, 0, 1) == 5
    ledger.kept = {4: 1}
    assert ledger.kept == {4: 1} and ledger.missing(5, 1.0, 0, 1) == 4


def test_free_takes_the_oldest_policy_first():
    ledger = free(2)
    add(ledger, [kept(1, version=3)])
    add(ledger, [kept(2, version=2), kept(5, version=3)])
    add(ledger, [kept(9, version=2)])
    assert ledger.chosen() == [2, 9]


def test_free_waits_for_what_the_next_step_could_not_use():
    ledger = free(1)
    add(ledger, [kept(1), ProgressReport(due=2)])
    assert ledger.chosen() is None
    add(ledger, [ProgressReport(due=1), ProgressReport()])
    assert ledger.chosen() is None
    add(ledger, [ProgressReport(), ProgressReport()])
    assert ledger.chosen() == [1]


def test_free_ends_when_all_are_idle():
    ledger = free(3)
    add(ledger, [ProgressReport(kept=[(1, 0)], idle=True), ProgressReport(idle=False)])
    assert ledger.chosen() is None
    add(ledger, [ProgressReport(idle=True), ProgressReport(idle=True)])
    assert ledger.chosen() == [1]


def test_a_withdrawn_group_may_be_kept_again_in_the_same_report():
    ledger = free(2)
    add(ledger, [kept(1, 2, version=0)])
    add(ledger, [ProgressReport(withdrawn=[1, 2], kept=[(2, 5)])])
    assert ledger.kept == {2: 5}
    add(ledger, [ProgressReport(withdrawn=[8])])  # it was not reported yet
    assert ledger.kept == {2: 5}


def test_a_new_step_keeps_the_groups_and_forgets_the_drops():
    ledger = free(5)
    add(ledger, [ProgressReport(kept=[(1, 0), (2, 0)], dropped=[(3, "no_spread")], idle=True, due=1)])
    assert (ledger.num_passed, len(ledger.dropped)) == (2, 1)
    ledger.begin(0, 100)
    assert (ledger.kept, ledger.dropped, ledger.num_passed) == ({1: 0, 2: 0}, {}, 0)
    assert ledger.chosen() is None  # idle was reported in the step before
    ledger.target = 2
    assert ledger.chosen() == [1, 2]  # and so were those due


@pytest.mark.parametrize("seed", SEEDS)
def test_free_for_any_reports(seed):
    """The end comes exactly when there are enough and none is due, or all are idle; then the oldest go first."""
    dice = random.Random(seed)
    target, size, ledgers = dice.randint(1, 6), dice.randint(1, 4), (free(1), free(1))
    for ledger in ledgers:
        ledger.target = target
    shadow: dict[int, tuple[int, int]] = {}  # prompt -> version, prompt: the order they are taken in
    fresh, chosen = 0, None
    for _ in range(12):
        parts = []
        for _ in range(size):
            found = [(fresh := fresh + 1, dice.randint(0, 2)) for _ in range(dice.randint(0, 2))]
            gone = [number for number in shadow if dice.random() < 0.1]
            for number in gone:
                del shadow[number]
            bad = [(fresh := fresh + 1, "no_spread") for _ in range(dice.randint(0, 1))]
            parts.append(ProgressReport(found, bad, gone, dice.random() < 0.3, int(dice.random() < 0.3)))
        shadow |= {number: (version, number) for part in parts for number, version in part.kept}
        together = ProgressReport(
            *([entry for part in parts for entry in getattr(part, name)] for name in ("kept", "dropped", "withdrawn")),
            all(part.idle for part in parts),
            sum(part.due for part in parts),
        )
        add(ledgers[0], parts)
        add(ledgers[1], [together])  # one controller that saw it all
        enough = len(shadow) >= target and not together.due
        expected = sorted(shadow, key=shadow.__getitem__)[:target] if enough or together.idle else None
        for ledger in ledgers:
            chosen = ledger.chosen()
            assert chosen == expected
            assert ledger.chosen() == expected  # to ask changes nothing
            ledger.take(chosen or [])
        for number in expected or []:
            del shadow[number]
    decided = ledgers[0].num_passed + len(ledgers[0].dropped)
    assert decided == fresh and decided == ledgers[1].num_passed + len(ledgers[1].dropped)
