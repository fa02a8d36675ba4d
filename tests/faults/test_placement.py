"""Slots change hands and replicas die, and no sample is lost, doubled or changed: they do not show who had what."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.helpers import RECIPE, steps, train
from tests.faults.test_revive import BUILD, PROMPTS, Held

STEPS = 4
JUDGE = {
    "name": "grader",
    "model": {"build": BUILD},
    "template": "{{ prompt }}{{ response }}?",
    "verdict": r"^\D*(\d?)",  # an untrained judge may say anything, also nothing
    "values": {"": 0, **{f"{digit}": digit / 9 for digit in range(10)}},
    "repeats": 4,
    "max_prompt_length": 24,
    "max_response_length": 4,
    "max_concurrent": 8,
}


def overrides(mode: str, step_s: float) -> list[str]:
    """A judge whose verdicts weigh enough for one of them, lost or changed, to change what is sampled next. It has
    four questions for each response, so that it needs most of the slots once these are there."""
    rewards = {**RECIPE["rewards"], "judges": [{**JUDGE, "min_step_s": step_s}]}
    return [
        f"rewards={json.dumps(rewards)}",
        f"run.steps={STEPS}",
        f"placement.mode={mode}",
        *(["placement.slots=4"] if mode != "shared" else []),
        "generation.max_concurrent=8",
        f"generation.min_step_s={step_s}",
    ]


def same(found: list[dict[str, Any]], calm: list[dict[str, Any]]) -> None:
    for name in ("samples_digest", "reward/mean", "reward/grader"):
        assert [row[name] for row in found] == [row[name] for row in calm], name
    assert all(row["sampling/drawn"] == row["sampling/trained"] == PROMPTS for row in found)
    assert all(row["reward/errors"] == 0 for row in found)
    assert all(row["rollout/logprob_diff_mean"] < 1e-5 for row in found)  # never with stale weights


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> list[dict[str, Any]]:
    """Every role has its own replicas, awake all the time."""
    return steps(train(tmp_path_factory.mktemp("calm"), "calm", "runtime=local", *overrides("shared", 0.0)))


@pytest.mark.parametrize("mode", [pytest.param("static", marks=pytest.mark.release), "colocated", "dynamic"])
def test_placement_changes_no_sample(tmp_path, calm, mode):
    found = steps(train(tmp_path, mode, "runtime=local", "controllers=1", *overrides(mode, 0.05)))
    same(found, calm)
    moves = [row["placement/moves"] for row in found]
    # `colocated` moves all blocks in every step; whether `dynamic` moves any depends on times that it measures.
    assert {"static": max(moves) == 0, "colocated": min(moves) >= 4, "dynamic": True}[mode], moves
    for row in found:
        assert row["placement/split/policy"] + row["placement/split/grader"] <= 4 + 1e-6


def check_ahead(found: list[dict[str, Any]], staleness: int) -> None:
    """No group is lost or doubled, and none is too old: all that were drawn are trained, or continue in later steps."""
    trained = list(itertools.accumulate(row["sampling/trained"] for row in found))
    drawn = list(itertools.accumulate(row["sampling/drawn"] for row in found))
    assert trained == [PROMPTS * step for step in range(1, STEPS + 1)]
    assert [row["sampling/pending"] for row in found] == [a - b for a, b in zip(drawn, trained, strict=True)]
    assert 0 < max(row["staleness/max"] for row in found) <= staleness
    assert all(row["reward/errors"] == 0 for row in found)


@pytest.mark.parametrize("mode", ["dynamic", pytest.param("static", marks=pytest.mark.release)])
def test_responses_continue_after_the_trainer_had_the_slots(tmp_path, mode):
    keys = "runtime=local", "controllers=1", *overrides(mode, 0.05), "sampling.max_staleness=1"
    found = steps(train(tmp_path, mode, *keys))
    check_ahead(found, 1)
    assert all(row["placement/split/policy"] + row["placement/split/grader"] <= 4 + 1e-6 for row in found)
    # the next groups are in progress when a rollout begins, so no slot is without work
    assert sum(row["placement/idle"] for row in found[1:]) < 0.15 * len(found) or mode == "static"


@pytest.mark.release
def test_kill_a_judge_and_an_engine_while_responses_of_several_steps_are_in_progress(tmp_path):
    with Patient(tmp_path, 3, *overrides("dynamic", 0.1), "sampling.max_staleness=1") as running:
        running.wait_for_steps()
        for role in ("judge-grader-3", "engine-0"):
            running.find(role).send_signal(signal.SIGKILL)
        for role in ("judge-grader-3", "engine-0"):
            running.wait_for(f"{role} died")
            running.wait_for(f"{role} is restarted")
        running.go.touch()
        check_ahead(running.steps(), 1)


@pytest.mark.release
@pytest.mark.parametrize("slots", [4, 2])
def test_a_resumed_run_keeps_what_placement_has_learned(tmp_path, slots):
    """The rule counts its steps. With other devices only lengths and speeds are kept, and the rule starts again."""
    base = (
        "runtime=local",
        "controllers=1",
        *overrides("dynamic", 0.02),
        "checkpoint.every=2",
        "checkpoint.keep_last=9",
    )
    train(tmp_path, "learned", *base)
    run = tmp_path / "runs" / "learned"
    whole = json.loads((run / f"step_{STEPS}" / "state.json").read_text())["placement"]
    train(tmp_path, "learned", *base, f"run.resume={run / 'step_2'}", f"placement.slots={slots}")
    resumed = json.loads((run / f"step_{STEPS}" / "state.json").read_text())["placement"]
    assert whole["rule"]["step"] == STEPS and resumed["rule"]["step"] == (STEPS if slots == 4 else STEPS - 2)
    lengths = [len(found["monitor"]["lengths"]["policy"]) for found in (whole, resumed)]
    assert lengths[0] == lengths[1]
    pieces = [json.loads(line) for line in (run / "placement.jsonl").read_text().splitlines()]
    found = [(piece["step"], piece["start"]) for piece in pieces if piece["kind"] == "timeline" and piece["slot"] == 0]
    assert sorted(found) == sorted(found, key=lambda piece: piece[1])  # one after another
    trained = [piece["step"] for piece in pieces if piece.get("role") == "trainer" and piece["slot"] == 0]
    assert trained == [1, 2, 3, 4]  # without the lost ones


class Patient(Held):
    """Eight replicas take their time to start on a busy machine."""

    def wait_for(self, words: str) -> None:
        self._wait(lambda line: words in line)

    def wait_for_steps(self) -> None:
        self._wait(lambda line: line.startswith("step ") and "reward" in line and "eval" not in line)
        super().wait_for_steps()

    def _wait(self, found: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + 200
        while not any(map(found, self.lines)):
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.05)


@pytest.mark.release
@pytest.mark.parametrize("mode", ["colocated", "dynamic"])
def test_kill_a_judge_and_an_engine_while_slots_change_hands(tmp_path, calm, mode):
    """Of the blocks at the two ends: `dynamic` gives one to each role when a rollout begins, `colocated` both to the
    policy. Whether `dynamic` moves a block depends on times that it measures; `colocated` moves all in every step."""
    with Patient(tmp_path, 3, *overrides(mode, 0.1)) as running:
        running.wait_for_steps()
        for role in ("judge-grader-3", "engine-0"):
            running.find(role).send_signal(signal.SIGKILL)
        for role in ("judge-grader-3", "engine-0"):
            running.wait_for(f"{role} died")
            running.wait_for(f"{role} is restarted")
        running.go.touch()
        found = running.steps()
        same(found, calm)
        assert mode == "dynamic" or min(row["placement/moves"] for row in found) >= 4
        pieces = [json.loads(line) for line in (running.run / "placement.jsonl").read_text().splitlines()]
        assert {piece["slot"] for piece in pieces if piece["kind"] == "timeline"} == {0, 1, 2, 3}
