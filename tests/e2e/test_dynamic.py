"""Dynamic sampling and asynchronous rollout in whole runs: what is sampled and counted, what survives a restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.e2e.helpers import environment, gcore, held, rows, steps, train, untimed, write_recipe
from tests.e2e.test_invariance import assert_same_run

DYNAMIC = ("sampling.filter=spread", "training.warm_start.steps=40")


def assert_counts_add_up(found):
    """After every step, since the beginning: drawn = trained + dropped by reason + pending."""
    total = Counter()
    for row in found:
        total["drawn"] += row["sampling/drawn"]
        total["trained"] += row["sampling/trained"]
        total["dropped"] += sum(count for name, count in row.items() if name.startswith("sampling/dropped_"))
        assert total["drawn"] == total["trained"] + total["dropped"] + row["sampling/pending"], row["step"]
    assert total["dropped"] > 0
    return total


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return steps(train(tmp_path_factory.mktemp("one"), "one", "runtime=local", "controllers=1", *DYNAMIC))


def test_equal_groups_are_replaced(one):
    totals = assert_counts_add_up(one)
    assert all(row["sampling/trained"] == 12 and row["reward/zero_spread_frac"] == 0 for row in one)
    assert totals["trained"] == 60 and all(row["sampling/pending"] == 0 for row in one)


@pytest.mark.parametrize("controllers", [2, 4])
def test_strict_order_does_not_depend_on_controllers(tmp_path, one, controllers):
    found = steps(train(tmp_path, "many", "runtime=local", f"controllers={controllers}", *DYNAMIC))
    assert [untimed(row) for row in found] == [untimed(row) for row in one]  # to the last bit


@pytest.mark.release
def test_strict_order_under_ray(tmp_path, one):
    extra = ("controllers=4", "placement.policy.replicas=2", "rewards.workers=1")
    found = steps(train(tmp_path, "ray", *extra, *DYNAMIC))
    assert_same_run(found, one)
    drawn = [(row["sampling/drawn"], row["sampling/dropped_no_spread"]) for row in found]
    assert drawn == [(row["sampling/drawn"], row["sampling/dropped_no_spread"]) for row in one]


@pytest.mark.parametrize(
    ("mode", "oldest"),
    [
        (("sampling.deterministic=false", "sampling.surplus=abort"), 0),
        (("sampling.surplus=keep",), 1),
        (("sampling.max_staleness=2",), 2),
    ],
)
def test_free_order_loses_nothing_also_across_a_restart(tmp_path, mode, oldest):
    """The restart takes another number of controllers."""
    common = ("runtime=local", *DYNAMIC, *mode)
    train(tmp_path, "free", *common, "run.steps=3", "controllers=4")
    found = steps(train(tmp_path, "free", *common, "run.steps=7", "controllers=3", "run.resume=auto"))
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6, 7]
    assert_counts_add_up(found)
    assert all(row["sampling/trained"] == 12 and row["staleness/max"] <= oldest for row in found)
    if oldest:
        assert max(row["staleness/max"] for row in found) > 0
        late = max(found, key=lambda row: row["staleness/mean"])
        assert late["rollout/logprob_diff_mean"] > 1e-4 and late["rollout/importance_mean"] != 1


def test_kill_and_resume_with_strict_order(tmp_path, one):
    command = ["train", str(write_recipe(tmp_path)), "run.name=part", "runtime=local", "controllers=2", *DYNAMIC]
    hold, go = held(tmp_path, first=sum(row["sampling/drawn"] for row in one[:3]))  # step 4: step_2 is not deleted yet
    command += ["checkpoint.every=1", "observe.trace=false", hold]
    process = subprocess.Popen(
        [sys.executable, "-m", "gcore.cli", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    run = tmp_path / "runs" / "part"
    deadline = time.monotonic() + 300
    while not (run / "step_2").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    go.touch()
    resumed = gcore(*command, "run.resume=auto", "controllers=3")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [untimed(row) for row in steps(rows(run))] == [untimed(row) for row in one]


def test_when_nothing_is_worth_training_on(tmp_path):
    """Equal rewards everywhere: the run says so and goes on, or ends, as asked."""
    reward = tmp_path / "equal.py"
    reward.write_text("def f(completions, **_):\n    return [1.0] * len(completions)\n")
    path = write_recipe(tmp_path, rewards={"functions": [{"name": "equal", "path": f"{reward}:f"}]})
    common = (str(path), "runtime=local", "sampling.filter=spread", "sampling.max_draws=2", "run.steps=2")
    going = gcore("train", *common, "run.name=going")
    assert going.returncode == 0 and "trains on 0 of 12 groups" in going.stdout, going.stdout + going.stderr
    found = steps(rows(tmp_path / "runs" / "going"))
    assert [(row["sampling/drawn"], row["sampling/dropped_no_spread"]) for row in found] == [(24, 24)] * 2
    ended = gcore("train", *common, "run.name=ended", "sampling.on_exhausted=stop")
    assert ended.returncode == 2 and "0 of 12 groups from 24 prompts (no_spread 24)" in ended.stderr, ended.stderr
