"""A replica that dies comes back, with current weights; the step goes on, and no sample is lost, doubled or changed."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.helpers import rows, steps, train
from tests.faults.test_kill import Running, alive

STEPS = 40


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    found = steps(train(tmp_path_factory.mktemp("calm"), "calm", "runtime=local", f"run.steps={STEPS}"))
    return [row["samples_digest"] for row in found]


@pytest.mark.parametrize("replicas", [1, 2])
def test_kill_an_engine(tmp_path, undisturbed, replicas):
    """With one replica everybody waits for it; with two the other takes over. Both runs sample what a calm one does."""
    extra = ("controllers=2", f"placement.policy.replicas={replicas}", f"run.steps={STEPS}")
    running = Running(tmp_path, *extra)
    try:
        running.wait_for_steps()
        running.find("engine-0").send_signal(signal.SIGKILL)
        output, _ = running.end()
        assert running.process.returncode == 0, output
        assert "engine-0 died" in output and "engine-0 is back, with current weights" in output, output
        found = steps(rows(tmp_path / "runs" / "tiny"))
        assert [row["samples_digest"] for row in found] == undisturbed
        assert all(row["sampling/drawn"] == row["sampling/trained"] == 12 for row in found)
        assert all(row["rollout/logprob_diff_mean"] < 1e-5 for row in found)  # never with stale weights
        assert running.survivors(within_s=5) == []
    finally:
        for process in running.family.values():
            if alive(process):
                process.kill()
