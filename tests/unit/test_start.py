"""What the driver prints while processes start: counts by kind, and at the end the seconds of each kind."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gcore.driver import start
from gcore.driver.start import ready_kinds, reporting_start

WANTED = {"engine": 2, "trainer": 1, "judge-critic": 1, "scorer-nice": 0, "controller": 1}


def test_a_kind_is_ready_when_all_of_it_are():
    assert ready_kinds(WANTED, ["engine-0", "trainer-0"]) == ["trainer"]
    assert ready_kinds(WANTED, ["engine-0", "engine-1", "judge-critic-0"]) == ["engine", "judge-critic"]
    assert ready_kinds(WANTED, []) == []


class Starting:
    """A runtime whose roles become ready one per call of `ready`."""

    def __init__(self, *order: str) -> None:
        self.order, self.built, self.all_ready = list(order), set[str](), asyncio.Event()

    def ready(self) -> set[str]:
        if self.order:
            self.built.add(self.order.pop(0))
        else:
            self.all_ready.set()
        return set(self.built)

    def processes(self) -> dict[str, int]:
        return dict.fromkeys(self.built, 1)


def notes_of(runtime: Any, result: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(start, "START_POLL_S", 0.001)
    notes: list[str] = []

    async def starting() -> Any:
        await runtime.all_ready.wait()
        if isinstance(result, Exception):
            raise result
        return result

    progress: Any = SimpleNamespace(mode="plain", note=notes.append)

    async def main() -> None:
        assert await asyncio.wait_for(reporting_start(starting(), runtime, WANTED, progress), 60) == result

    try:
        asyncio.run(main())
    except RuntimeError as error:
        notes.append(f"raised {error}")
    return notes


def test_the_slowest_kind_comes_first(monkeypatch):
    order = ["trainer-0", "engine-0", "judge-critic-0", "engine-1", "controller-0"]
    last = notes_of(Starting(*order), "controllers", monkeypatch)[-1]
    head, _, listed = last.partition(": ")
    assert head == "seconds until ready"
    assert [part.split()[0] for part in listed.split(", ")] == ["controller", "engine", "judge-critic", "trainer"]


def test_a_start_that_fails_says_no_seconds(monkeypatch):
    found = notes_of(Starting("trainer-0"), RuntimeError("no GPU"), monkeypatch)
    assert found[-1] == "raised no GPU" and not any("seconds until ready" in note for note in found)


def test_without_processes_there_are_no_seconds(monkeypatch):
    """runtime=local"""
    assert not any("seconds until ready" in note for note in notes_of(Starting(), "controllers", monkeypatch))
