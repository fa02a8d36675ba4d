"""The prompts of one controller: every transition by hand, and drawn = trained + dropped + pending for any sequence."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from gcore.controller.prompt_ledger import (
    TRANSITIONS,
    Dropped,
    ProgressReport,
    PromptLedger,
    Ready,
    Returned,
    Running,
    Taken,
    merge_places,
)
from tests.seeds import seeds
from tests.unit.rollouts import group_of, number_of


def ledger_of(rank: int = 0, size: int = 1, draws: int = 100) -> PromptLedger:
    ledger = PromptLedger(rank, size)
    ledger.begin_step(draws * size, strict=False)
    return ledger


def drawn(ledger: PromptLedger, count: int, version: int = 0) -> list[int]:
    return [ledger.draw(version) for _ in range(count)]


# --- transitions


def test_a_controller_draws_every_nth_prompt():
    assert drawn(ledger_of(1, 3), 4) == [1, 4, 7, 10]
    assert drawn(ledger_of(), 3) == [0, 1, 2]


@pytest.mark.parametrize(("rank", "expected"), [(0, 3), (1, 3), (2, 2)])
def test_draws_of_a_step(rank, expected):
    """Strict: those among the 8 prompts from the start of the step on. Otherwise an equal part, rounded up."""
    ledger = PromptLedger(rank, 3)
    ledger.begin_step(8, strict=True)
    assert ledger.draws_left == expected
    ledger.begin_step(8, strict=False)
    assert ledger.draws_left == 3
    ledger.draw(0)
    assert ledger.draws_left == 2


def test_from_drawn_to_trained():
    ledger = ledger_of()
    drawn(ledger, 3)
    ledger.keep(2, group_of(2))
    ledger.keep(0, group_of(0))
    ledger.drop(1, group_of(1, good=False), "no_spread")
    assert list(ledger.ready) == [2, 0] and (ledger.num_ready, ledger.num_running, ledger.num_decided) == (2, 0, 3)
    ledger.take([0, 2, 5])  # prompt 5 is another controller's
    assert ledger.numbers(Taken) == [2, 0] and ledger.numbers(Dropped) == [1]
    summary = ledger.end_step()
    assert [number_of(group) for group in summary.groups] == [0, 2]
    assert (summary.drawn, summary.dropped, summary.pending) == (3, {"no_spread": 1}, 0)
    assert sorted(summary.rewards) == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    assert (summary.tokens_passed, summary.samples_passed) == (4, 4)
    assert (ledger.drawn, ledger.dropped, ledger.num_decided, ledger.numbers(Taken, Dropped)) == (0, {}, 0, [])


def test_other_transitions_are_refused():
    ledger = ledger_of()
    drawn(ledger, 3)
    ledger.drop(0, [], "reward_error")
    ledger.keep(1, group_of(1))
    for number in (0, 1, 7):  # dropped, ready, undrawn
        with pytest.raises(AssertionError, match=f"prompt {number}: "):
            ledger.keep(number, group_of(number))
    assert TRANSITIONS[Taken] == ()


def test_forgotten_prompts_were_never_drawn():
    """The step ends at prompt 2. Prompt 4 runs, 5 is ready, 6 was dropped: the next step draws them again."""
    ledger = PromptLedger(0, 1)
    ledger.begin_step(10, strict=True)
    drawn(ledger, 7)
    for number in (0, 2, 5):
        ledger.keep(number, group_of(number))
    ledger.drop(6, [], "reward_error", "too far ahead")
    ledger.drop(3, [], "reward_error", "also after the end")
    ledger.drop(1, [], "reward_error", "no 1")
    ledger.take([0, 2])
    ledger.forget_after(2)
    summary = ledger.end_step()
    assert (summary.drawn, len(summary.groups), summary.dropped, summary.pending) == (3, 2, {"reward_error": 1}, 0)
    assert summary.cause == "no 1" and summary.samples_passed == 4 and len(summary.rewards) == 4
    assert ledger.report(None) == ProgressReport()
    ledger.begin_step(10, strict=True)
    assert ledger.step_start == 3 and ledger.draws_left == 10 and drawn(ledger, 3) == [3, 4, 5]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_after_forgetting_each_share_goes_on_behind_the_last_prompt(rank):
    ledger = PromptLedger(rank, 3)
    ledger.begin_step(12, strict=True)
    drawn(ledger, 4)
    for number in list(ledger.numbers(Running)):
        if number <= 4:
            ledger.drop(number, [], "no_spread")
    ledger.forget_after(4)
    assert ledger.head == {0: 6, 1: 7, 2: 5}[rank]


def test_returned_prompts_run_again_first_and_are_drawn_once():
    ledger = ledger_of()
    drawn(ledger, 5)
    for number in (3, 0, 1):
        ledger.keep(number, group_of(number))
    ledger.take([0])
    ledger.return_rest()
    assert ledger.numbers(Returned) == [1, 2, 3, 4]
    summary = ledger.end_step()
    assert (summary.drawn, len(summary.groups), summary.pending) == (5, 1, 4)
    assert len(summary.rewards) == 2  # those of prompts 1 and 3 count when they are decided again
    assert summary.samples_passed == 6  # but the groups could have been trained on
    assert ledger.report(None).kept == []
    assert drawn(ledger, 5) == [1, 2, 3, 4, 5] and ledger.drawn == 1


def test_expired_groups_are_withdrawn_and_run_again():
    ledger = ledger_of()
    drawn(ledger, 3)
    ledger.keep(1, group_of(1, versions=(1, 3)))
    assert ledger.report(None).kept == [(1, 1)]
    ledger.keep(0, group_of(0, versions=(0,)))
    ledger.keep(2, group_of(2, versions=(2,)))
    ledger.expire(oldest=2)
    assert list(ledger.ready) == [2] and ledger.numbers(Returned) == [1, 0]
    report = ledger.report(None)
    assert (report.kept, report.withdrawn) == ([(2, 2)], [1, 0])
    assert drawn(ledger, 3) == [1, 0, 3]


# --- reports


def test_a_report_says_what_is_new_what_is_due_and_what_runs():
    ledger = ledger_of(draws=5)
    drawn(ledger, 2, version=3)
    drawn(ledger, 2, version=4)
    ledger.keep(0, group_of(0, versions=(3,)))
    ledger.drop(2, [], "reward_error")
    assert ledger.unreported.kept == [(0, 3)] and ledger.unreported.dropped == [(2, "reward_error")]
    assert ledger.report(3) == ProgressReport([(0, 3)], [(2, "reward_error")], [], idle=False, due=1, running=2)
    assert not ledger.unreported.kept and not ledger.unreported.dropped and ledger.reported_running == 2
    for number in (1, 3, ledger.draw(4)):
        ledger.drop(number, [], "reward_error")
    report = ledger.report(4)
    assert report.idle and report.due == report.running == 0


def test_the_cause_of_a_failure_belongs_to_the_step_that_reports_it():
    ledger = ledger_of()
    drawn(ledger, 2)
    ledger.drop(1, [], "reward_error", "early")
    ledger.report(None)
    ledger.drop(0, [], "reward_error", "late")
    summary = ledger.end_step()
    assert summary.cause == "early" and summary.dropped == {"reward_error": 2}
    assert ledger.report(None).dropped == [(0, "reward_error")]
    summary = ledger.end_step()
    assert summary.cause == "late" and summary.dropped == {}
    assert ledger.end_step().cause is None


# --- checkpoints


def test_a_checkpoint_is_shared_out_among_any_number_of_controllers():
    state = {"cursor": 20, "pending": [3, 5, 9], "undrawn": [11, 14], "drawn": 2, "dropped": {"no_spread": 1}}
    groups = [group_of(2), group_of(4), group_of(6)]
    ledgers = [PromptLedger(rank, 2) for rank in range(2)]
    for ledger in ledgers:
        ledger.restore(state, groups)
        ledger.check()
    assert [list(ledger.ready) for ledger in ledgers] == [[2, 6], [4]]
    assert [ledger.pending for ledger in ledgers] == [4, 2]
    assert [ledger.drawn for ledger in ledgers] == [2, 0]
    assert merge_places([ledger.place(0.5) for ledger in ledgers], strict=False) == {
        **state,
        "cursor": 21,
        "undrawn": [11, 14, 20],  # controller 0 has not come to prompt 20
        "rate": 0.5,
    }
    for ledger in ledgers:
        ledger.begin_step(20, strict=False)
    assert [drawn(ledger, 4) for ledger in ledgers] == [[3, 9, 11, 20], [5, 14, 21, 23]]
    assert [ledger.drawn for ledger in ledgers] == [2 + 2, 3]  # prompts 3, 5 and 9 had been drawn before


# --- the invariant


@seeds(40, 400)
def test_drawn_is_trained_dropped_and_pending(seed):
    """Random transitions in the three modes, with checkpoints; a copy in plain sets knows where each prompt is."""
    dice = random.Random(seed)
    mode = dice.choice(["forget", "return", "continue"])
    rank, size = dice.choice([(0, 1), (1, 3)])
    ledger, total = PromptLedger(rank, size), Counter[str]()
    finished = set[int]()  # in the steps before
    for version in range(8):
        ledger.begin_step(20 * size, strict=mode == "forget")
        if mode == "continue":
            ledger.expire(oldest=version - 1)
        for _ in range(dice.randint(0, 40)):
            running = ledger.numbers(Running)
            match dice.choice(["draw", "draw", "keep", "drop", "report"]):
                case "draw" if ledger.draws_left:
                    number = ledger.draw(version)
                    assert number % size == rank and number not in finished | set(running) | set(ledger.ready)
                case "keep" if running:
                    number = dice.choice(running)
                    ledger.keep(number, group_of(number, versions=(version,)))
                case "drop" if running:
                    ledger.drop(dice.choice(running), [], dice.choice(["no_spread", "reward_error"]), "why")
                case "report":
                    ledger.report(version - 1)
            ledger.check()
        chosen = dice.sample(sorted(ledger.ready), dice.randint(0, ledger.num_ready))
        last = -1
        if mode == "forget":  # all before the end are decided, and those ready are taken
            undecided = min(ledger.numbers(Running), default=ledger.head)
            last = dice.randrange(ledger.step_start, undecided + 1) - 1
            chosen = [number for number in ledger.ready if number <= last]
        ledger.take(chosen)
        if mode == "forget":
            ledger.forget_after(last)
        elif mode == "return":
            ledger.return_rest()
        finished |= set(ledger.numbers(Taken, Dropped))
        pending = ledger.numbers(Running, Ready, Returned)
        assert sorted(finished | set(pending)) == list(range(rank, ledger.head, size))  # each is in one place
        summary = ledger.end_step()
        total += Counter(drawn=summary.drawn, trained=len(summary.groups), dropped=summary.dropped.total())
        assert total["drawn"] == total["trained"] + total["dropped"] + summary.pending
        assert summary.pending == len(pending)
        assert [number_of(group) for group in summary.groups] == sorted(chosen)
        if mode != "forget" and dice.random() < 0.3:  # a checkpoint: what runs is started again
            place, groups = ledger.place(1.0), [ledger.ready[number] for number in sorted(ledger.ready)]
            assert sorted([*place["pending"], *ledger.ready]) == sorted(pending) and place["undrawn"] == []
            if size == 1:
                ledger = PromptLedger(rank, size)
                ledger.restore(merge_places([place], strict=False), groups)
                assert ledger.pending == summary.pending
