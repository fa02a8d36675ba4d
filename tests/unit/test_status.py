"""What the progress view gets from a controller, and the seconds of its stages."""

from __future__ import annotations

import asyncio

from gcore.controller.status import MAX_ROWS, LiveStatus
from gcore.observe.trace import Tracer


def shown(status: LiveStatus) -> tuple[str, str, str, int]:
    taken = asyncio.run(status.take())
    return taken.role, taken.stage, taken.detail, taken.step


def test_stages_of_a_step():
    status = LiveStatus(1, Tracer(None, "controller-1"))
    assert shown(status) == ("controller-1", "starting", "", 0)
    with status.timed("step", 3):
        with status.timed("rollout", 3):
            status.report("31/64 prompts")
            assert shown(status) == ("controller-1", "rollout", "31/64 prompts", 0)
        with status.timed("training", 3):
            assert shown(status) == ("controller-1", "training", "", 0)
    status.finished(3)
    assert shown(status) == ("controller-1", "training", "", 3)


def test_seconds_are_taken_once():
    status = LiveStatus(0, Tracer(None, "controller-0"))
    for name in ("eval", "rollout", "checkpoint"):
        with status.timed(name, 1):
            pass
    assert status.take_seconds("eval") >= 0.0
    assert list(status.take_all_seconds()) == ["rollout", "checkpoint"]
    assert status.take_all_seconds() == {}


def test_rows_and_notes_are_shown_once_and_by_controller_0():
    for rank in range(2):
        status = LiveStatus(rank, Tracer(None, f"controller-{rank}"))
        for step in range(MAX_ROWS + 9):
            status.add_row({"step": step})
        status.note("resumed")
        taken = asyncio.run(status.take())
        assert [row["step"] for row in taken.rows] == ([] if rank else list(range(9, MAX_ROWS + 9)))
        assert taken.notes == ([] if rank else ["resumed"])
        again = asyncio.run(status.take())
        assert (again.rows, again.notes) == ([], [])
