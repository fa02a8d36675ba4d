"""Calls between processes that fail for a while: a reward that is out of order, and a connection that is cut."""

from __future__ import annotations

import json

import pytest

from gcore.config.load import load_config
from gcore.observe.events import read_events
from gcore.types import UserError
from tests.e2e.helpers import gcore_process, rows, steps, train, untimed, write_recipe
from tests.faults.test_kill import EMULATED

SHAPE = ("controllers=2", "placement.trainer.ranks=2", "checkpoint.every=2", *EMULATED)
COUNTS = ("reward/retries", "reward/timeouts")


def plan(**fault):
    return f"faults.plan={json.dumps([fault])}"


def compared(found):
    """Everything but clocks, the number of retries, and the sleep of engines."""
    rows = [untimed(row) for row in steps(found)]
    return [{k: v for k, v in row.items() if k not in COUNTS and not k.startswith("placement/")} for row in rows]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return compared(train(tmp_path_factory.mktemp("plain"), "plain", *SHAPE))


def events_of(tmp_path):
    return read_events(tmp_path / "runs" / "healed")


@pytest.mark.release
@pytest.mark.parametrize("seconds", [0.01, 2.0])
def test_a_short_outage_of_a_reward_changes_nothing(tmp_path, expected, seconds):
    """5 calls fail, at once or after a time limit. Each is made again, and no reward is lost."""
    fault = plan(kind="outage", role="controller-0", at="reward:exact", nth=4, calls=5, seconds=seconds)
    found = train(tmp_path, "healed", *SHAPE, fault, "rewards.attempts=6")
    assert [(event["event"], event["kind"]) for event in events_of(tmp_path)] == [("fault", "outage")]
    assert compared(found) == expected
    assert sum(row.get("reward/retries", 0) for row in steps(found)) == 5


@pytest.mark.release
def test_a_long_outage_ends_the_run_and_a_resume_continues_it(tmp_path, expected):
    """Prompts of a controller fail in step 4, also at the second attempt. No reward becomes a 0, and nothing is trained
    in their place."""
    fault = plan(kind="outage", role="controller-0", at="reward:exact", nth=20, calls=30, seconds=0.01)
    command = ("train", str(write_recipe(tmp_path)), "run.name=healed", *SHAPE)
    ended = gcore_process(*command, fault, "rewards.max_error_frac=0.1")
    assert ended.returncode == 2 and "injected outage of reward:exact') (tried 2" in ended.stderr, ended.stderr
    resumed = gcore_process(*command, fault, "run.resume=auto", "rewards.max_error_frac=0.1")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [event["event"] for event in events_of(tmp_path)] == ["fault"]
    assert compared(rows(tmp_path / "runs" / "healed")) == expected


CUTS = {  # to -> what heals it
    "engine-0:generate": ["fault", "unreachable", "died", "restarted"],
    "engine-0:load_weights": ["fault", "unreachable", "died", "restarted"],
    "engine-0:sleep": ["fault", "unreachable", "died", "restarted"],
    "engine-0:wake": ["fault", "unreachable", "died", "restarted"],
    "trainer-1:push": ["fault", "rollback"],
}


@pytest.mark.release
@pytest.mark.parametrize("to", CUTS)
def test_a_connection_that_is_cut(tmp_path, expected, to):
    """Both processes are alive. There is one engine: without it the run cannot go on, so it must be used again. One
    that missed weights must not serve before it has them."""
    fault = plan(kind="cut", role="controller-0", at=f"to:{to}", nth=3, seconds=0.5)
    found = train(tmp_path, "healed", *SHAPE, "placement.policy.replicas=1", "generation.sleep=2", fault)
    assert [event["event"] for event in events_of(tmp_path)] == CUTS[to]
    assert compared(found) == expected


@pytest.mark.release
def test_slow_calls_change_nothing(tmp_path, expected):
    fault = plan(kind="slow", role="controller-1", at="to:engine-0", nth=5, calls=8, seconds=0.5)
    found = train(tmp_path, "healed", *SHAPE, "placement.policy.replicas=1", fault)
    assert [event["event"] for event in events_of(tmp_path)] == ["fault"]
    assert compared(found) == expected


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("{kind: outage, role: controller-0, at: rollout}", "expected at=reward:"),
        ("{kind: outage, role: engine-0, at: 'reward:exact'}", "expected role=controller-N"),
        ("{kind: outage, role: controller-0, at: 'reward:exakt'}", "expected one of .*exact"),
        ("{kind: cut, role: controller-0, at: generate}", "expected at=to:"),
        ("{kind: kill, role: controller-0, at: 'to:engine-0'}", "expected outage, cut or slow"),
    ],
)
def test_faults_of_calls_that_could_not_occur_are_refused(tmp_path, fault, message):
    with pytest.raises(UserError, match=message):
        load_config(write_recipe(tmp_path), [f"faults.plan=[{fault}]"])
