"""Everything at once, in short: recipes/panel.yaml under Ray, with a panel that examples/panel.py trained before.

Rules, a scalar model and two judges who write their verdicts; groups without spread are replaced; four controllers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.helpers import gcore, rows, steps
from tests.e2e.test_dynamic import assert_counts_add_up

ROOT = Path(__file__).parents[2]
SUMS = {"min": 11, "max": 49, "zeros": False, "eval_size": 100}
SMALL = (
    *("model.build.hidden_size=64", "model.build.intermediate_size=256", "training.lr=1e-3", "run.steps=10"),
    *("training.warm_start.steps=500", "training.warm_start.batch_size=64", "training.warm_start.lr=3e-3"),
    *("sampling.prompts_per_step=24", "observe.progress=plain", "observe.eval_every=0", "checkpoint.every=0"),
)


def train_with_panel(folder: Path, seed: int) -> tuple[dict[str, float], Path]:
    """How often each member of the panel is right, and the folder of the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import panel
    settings = panel.Settings(
        sums=SUMS,
        held_out=300,
        layers={"checker": 2, "referee": 2},
        steps={"checker": 400, "referee": 450, "scorer": 300},
        batch_size=64,
        seed=seed,
    )
    right = panel.prepare(folder / "panel", settings)
    data = {"task": "arithmetic", "args": {**SUMS, "sloppy": 0.8}}
    held_out = {**data, "args": {**data["args"], "split": "eval"}}
    done = gcore(
        *("train", str(ROOT / "recipes" / "panel.yaml"), f"run.dir={folder}", f"run.seed={seed}", *SMALL),
        *(f"data.train={json.dumps(data)}", f"data.eval={json.dumps(held_out)}"),
        *(f"rewards.judges.{i}.model.path={folder}/panel/{name}" for i, name in enumerate(("checker", "referee"))),
        f"rewards.models.0.model.path={folder}/panel/scorer",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 controller(s)" in done.stdout
    return right, folder / "panel-run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_with_panel(tmp_path_factory.mktemp("panel"), seed=0)


def test_the_judges_know_their_trade(trained):
    right, _ = trained
    assert right.keys() == {"checker", "referee", "scorer"} and min(right.values()) > 0.6, right


def test_policy_learns_from_the_panel(trained):
    _, run = trained
    accuracy = [row["eval/accuracy"] for row in rows(run) if "eval/accuracy" in row]
    rewards = [row["reward/mean_drawn"] for row in steps(rows(run))]
    assert accuracy[-1] >= accuracy[0] + 0.2, accuracy
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards


def test_every_part_is_heard(trained):
    """The referee gives one what it takes from the other: half a point on average, whoever is compared."""
    found = steps(rows(trained[1]))
    assert len(found) == 10
    for row in found:
        assert {"reward/exact", "reward/scorer", "reward/checker", "reward/checker/spread"} <= row.keys()
        assert row["reward/referee"] == pytest.approx(0.5) and row["reward/errors"] == 0
        assert row["reward/verdicts"] >= row["sampling/drawn"] * (8 * 2 + 8 * 2)  # and those of prompts given up
        assert abs(row["reward/checker"] - row["reward/exact"]) < 0.2


def test_groups_without_spread_are_replaced(trained):
    found = steps(rows(trained[1]))
    totals = assert_counts_add_up(found)
    assert totals["trained"] == 10 * 24 and all(row["sampling/trained"] == 24 for row in found)
    assert all(row["reward/zero_spread_frac"] == 0 and row["sampling/pending"] == 0 for row in found)


def test_judges_work_while_the_policy_does(trained):
    trace = json.loads((trained[1] / "trace.json").read_text())["traceEvents"]
    policy, checker, referee = (busy(trace, role) for role in ("engine-", "judge-checker-", "judge-referee-"))
    assert overlap_s(policy, checker) > 0 and overlap_s(policy, referee) > 0 and overlap_s(checker, referee) > 0


def busy(trace: list[dict], role: str) -> list[tuple[int, int]]:
    """When any engine of that role generated, in microseconds: spans in order that do not touch."""
    names = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in trace
        if event["name"] == "generate" and names[event["pid"]].startswith(role)
    )
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            start, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((start, end))
    return merged


def overlap_s(ones: list[tuple[int, int]], others: list[tuple[int, int]]) -> float:
    """Seconds in which both were busy."""
    meetings = ((max(a, c), min(b, d)) for a, b in ones for c, d in others)
    return sum(max(0, end - start) for start, end in meetings) / 1e6


def test_overlap():
    """[0, 4] and [6, 9] meet [3, 7] for 1 + 1."""
    span = {"name": "generate", "ph": "X"}
    trace = [{"name": "process_name", "pid": i, "args": {"name": f"engine-{i}"}} for i in range(3)]
    trace += [{**span, "pid": 0, "ts": 0, "dur": 3}, {**span, "pid": 1, "ts": 2, "dur": 2}]
    trace += [{**span, "pid": 1, "ts": 6, "dur": 3}, {**span, "pid": 2, "ts": 3, "dur": 4}]
    assert busy(trace, "engine-") == [(0, 9)]
    trace = [event for event in trace if event["pid"] < 2]
    assert busy(trace, "engine-") == [(0, 4), (6, 9)]
    assert overlap_s(busy(trace, "engine-"), [(3_000_000, 7_000_000)]) == 0
    assert overlap_s([(0, 4_000_000), (6_000_000, 9_000_000)], [(3_000_000, 7_000_000)]) == 2.0
