"""A replica that dies comes back, with current weights; the step goes on, and no sample is lost, doubled or changed."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gcore.config.base import BuildModel, Model
from gcore.models.networks import load_scorer
from gcore.observe.metrics import read_rows
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.protocols import Rendezvous, RoleDied
from gcore.runtime.ray_process import Process
from tests.e2e.helpers import RECIPE, held, rows, steps, train
from tests.faults.test_kill import LIMIT_S, Running, alive

STEPS, PROMPTS = 8, RECIPE["sampling"]["prompts_per_step"]
BUILD = {**RECIPE["model"]["build"], "max_length": 32, "alphabet": "0123456789+=?"}


class Held(Running):
    """A run that does not get beyond the samples of step `step` before it is let go: it is not over too soon."""

    def __init__(self, folder: Path, step: int, *overrides: str) -> None:
        self.run = folder / "runs" / "tiny"
        hold, self.go = held(folder, first=(step - 1) * PROMPTS)
        super().__init__(folder, "controllers=2", f"run.steps={STEPS}", hold, *overrides)

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not any(words in line for line in self.lines):
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.05)

    def wait_until_it_stands_still(self) -> None:
        """Each step needs the role that was stopped. When no step has ended for a second, all wait for it, and what
        they asked is under way."""
        deadline, seen = time.monotonic() + LIMIT_S, -1
        while (done := len(steps(read_rows(self.run)))) != seen:
            assert time.monotonic() < deadline
            seen = done
            time.sleep(1)

    def steps(self) -> list[dict[str, Any]]:
        """Of a run that finished."""
        output = self.end()
        assert self.process.returncode == 0, output
        assert self.survivors() == []
        return steps(rows(self.run))

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.family.values():
            if alive(process):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    found = steps(train(tmp_path_factory.mktemp("calm"), "calm", "runtime=local", f"run.steps={STEPS}"))
    return [row["samples_digest"] for row in found]


@pytest.mark.parametrize(
    "replicas",
    [("2", "placement.weights=broadcast"), pytest.param(("1",), marks=pytest.mark.release)],
    ids=["two", "one"],
)
def test_kill_an_engine(tmp_path, undisturbed, replicas):
    """With one replica all requests wait for it; with two the other takes over, and both join a new broadcast group
    when it is back. Both runs sample the same as an undisturbed run."""
    num, *more = replicas
    with Held(tmp_path, 5, f"placement.policy.replicas={num}", *more) as running:
        running.wait_for_steps()
        running.find("engine-0").send_signal(signal.SIGKILL)
        running.wait_for("engine-0 died")
        running.wait_for("engine-0 is restarted, with current weights")
        running.go.touch()
        found = running.steps()
        assert [row["samples_digest"] for row in found] == undisturbed
        assert all(row["sampling/drawn"] == row["sampling/trained"] == PROMPTS for row in found)
        assert all(row["rollout/logprob_diff_mean"] < 1e-5 for row in found)  # never with stale weights


def test_who_calls_before_the_role_is_built_again_finds_it_dead():
    """Ray restarts the process and sends it the calls that were made in between: the pool must use another replica."""
    with pytest.raises(RoleDied, match="engine-0"):
        asyncio.run(Process("engine-0").call("generate", []))


def test_a_role_is_built_once_if_a_rollback_interrupts_its_restart(monkeypatch):
    """The rollback starts the replica again while the process still builds it: two engines would not fit on a GPU, and
    calls would go to the one that is ready last."""
    monkeypatch.setattr("gcore.runtime.ray_process.node_address", lambda: "127.0.0.1")
    started, go, made = threading.Event(), threading.Event(), list[object]()

    def factory(rendezvous: Rendezvous) -> object:
        started.set()
        assert go.wait(LIMIT_S)
        made.append(object())
        return made[-1]

    async def main() -> None:
        process, arguments = Process("engine-0"), (factory, (), Rendezvous(0, 1, None))
        first = asyncio.ensure_future(process.build(*arguments))
        await asyncio.to_thread(started.wait, LIMIT_S)
        second = asyncio.ensure_future(process.build(*arguments))
        await asyncio.sleep(0.1)
        go.set()
        await asyncio.gather(first, second)
        await process.build(*arguments)
        assert made == [process.role]

    asyncio.run(main())


@pytest.fixture(scope="module")
def panel(tmp_path_factory) -> str:
    """A rule, a scalar model and a judge, as an override. The two models were never trained; they weigh enough for one
    answer of theirs, lost or changed, to change what is learned, and so what is sampled."""
    folder = tmp_path_factory.mktemp("scorer")
    model, tokenizer = Model(build=BuildModel(**BUILD)), build_char_tokenizer(BUILD["alphabet"])
    network = load_scorer(model, 0, torch.float32, torch.device("cpu"), tokenizer=tokenizer, new_head=True)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    judge = {
        "name": "grader",
        "model": {"build": BUILD},
        "template": "{{ prompt }}{{ response }}?",
        "verdict": r"^\D*(\d?)",  # an untrained judge may say anything, also nothing
        "values": {"": 0, **{f"{digit}": digit / 9 for digit in range(10)}},
        "max_prompt_length": 24,
        "max_response_length": 4,
    }
    scorer = {"name": "scorer", "model": {"path": str(folder)}, "max_length": 32}
    return f"rewards={json.dumps({**RECIPE['rewards'], 'models': [scorer], 'judges': [judge]})}"


@pytest.fixture(scope="module")
def calm(tmp_path_factory, panel):
    return steps(train(tmp_path_factory.mktemp("calm"), "calm", "runtime=local", f"run.steps={STEPS}", panel))


@pytest.mark.parametrize(
    "roles",
    [
        pytest.param(("judge-grader-0", "scorer-scorer-0"), marks=pytest.mark.release),
        pytest.param(("judge-grader-0",), marks=pytest.mark.release),
        pytest.param(("scorer-scorer-0",), marks=pytest.mark.release),
    ],
    ids=["both", "judge", "scorer"],
)
def test_kill_who_scores(tmp_path, panel, calm, roles):
    """They are stopped in mid-step, and killed when questions to them are under way, which are asked again later."""
    with Held(tmp_path, 3, "placement.policy.replicas=1", panel) as running:
        running.wait_for_steps()
        victims = [running.find(role) for role in roles]
        for victim in victims:
            victim.suspend()
        running.go.touch()
        running.wait_until_it_stands_still()
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        for role in roles:
            running.wait_for(f"{role} died")
            running.wait_for(f"{role} is restarted")
        found = running.steps()
        for name in ("samples_digest", "reward/mean", "reward/grader", "reward/scorer"):
            assert [row[name] for row in found] == [row[name] for row in calm], name
        assert all(row["sampling/drawn"] == row["sampling/trained"] == PROMPTS for row in found)
        assert all(row["reward/errors"] == 0 for row in found)
