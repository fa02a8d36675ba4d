"""run.epochs: how many steps a run has, which rows count, and what --dry-run says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gcore.api import make_config
from gcore.config.load import dump_config, load_config, parse_yaml
from gcore.config.resume import changes
from gcore.launch.dry_run import dry_run
from gcore.launch.epochs import count_prompts, steps_of, with_steps
from gcore.types import UserError
from tests.e2e.helpers import RECIPE, write_recipe

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(10)]  # 50 that fit
LONG = [{"prompt": "1" * 13, "answer": "1"}] * 6  # data.max_prompt_length is 12


def config_of(*overrides: str, rows: Any = ROWS, **run: Any) -> Any:
    tree = {name: section for name, section in RECIPE.items() if name != "run"}
    return make_config({**tree, "run": {"name": "tiny", "seed": 3, **run}}, *overrides, objects={"data.train": rows})


@pytest.mark.parametrize(
    ("epochs", "prompts", "per_step", "steps"),
    [(1, 48, 12, 4), (1, 50, 12, 5), (2, 50, 12, 9), (3, 100, 100, 3), (0.07, 100, 1, 7), (0.5, 3, 12, 1)],
)
def test_every_prompt_is_trained_on_in_every_epoch(epochs: float, prompts: int, per_step: int, steps: int) -> None:
    assert steps_of(epochs, prompts, per_step) == steps


def test_rows_that_are_dropped_do_not_count() -> None:
    run, notes = with_steps(config_of(epochs=2, rows=[*LONG, *ROWS]))
    assert (run.total_steps, run.epochs) == (9, 2.0)
    assert notes == ["2 epoch(s) of 50 prompts that fit = 9 steps of 12"]


def test_answers_that_are_too_long_do_not_count() -> None:
    rows = [*ROWS, {"prompt": "1+1=", "answer": "2" * 30}]
    config = config_of("objective=sft", "data.eval=null", "rewards={}", "training.warm_start=null", rows=rows, epochs=1)
    assert count_prompts(config) == 50
    assert with_steps(config)[1] == ["1 epoch(s) of 50 rows that fit = 5 steps of 12"]


def test_steps_and_epochs_together() -> None:
    run, notes = with_steps(config_of(epochs=2, steps=3))
    assert run.total_steps == 3 and notes[0].endswith("= 9 steps of 12, but run.steps=3 ends it before")
    run, notes = with_steps(config_of(epochs=2, steps=300))
    assert run.total_steps == 9 and notes[0].endswith("= 9 steps of 12")
    assert config_of().run.total_steps == with_steps(config_of())[0].steps == 100
    assert with_steps(config_of(epochs=2, steps=0))[0].steps == 0  # `gcore sft` of a warm start


def test_a_filter_draws_in_addition() -> None:
    _, notes = with_steps(config_of("sampling.filter=spread", epochs=1))
    assert notes == ["1 epoch(s) of 50 prompts that fit = 5 steps of 12; prompts that sampling.filter drops are drawn "
                     "in addition"]  # fmt: skip


@pytest.mark.parametrize("value", ["0", "-1", ".inf", ".nan"])
def test_epochs_are_above_0(tmp_path: Path, value: str) -> None:
    with pytest.raises(UserError, match=r"run\.epochs: input should be "):
        load_config(write_recipe(tmp_path), [f"run.epochs={value}"])


def test_a_dry_run_prints_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(config_of(epochs=3, dir=str(tmp_path)))
    lines = capsys.readouterr().out.splitlines()
    assert "run          13 steps = 156 prompts, 624 samples" in lines
    assert "epochs       3 epoch(s) of 50 prompts that fit = 13 steps of 12" in lines


def test_more_epochs_may_be_resumed_unless_the_schedule_ends_with_the_run() -> None:
    def saved(*overrides: str, epochs: float) -> Any:
        config = config_of(*overrides, epochs=epochs)
        return parse_yaml(dump_config(config.model_copy(update={"run": with_steps(config)[0]})))

    assert changes(saved(epochs=1), saved(epochs=2)) == []
    linear = "training.schedule=linear"
    assert changes(saved(linear, epochs=1), saved(linear, epochs=2)) == ["run.steps: 5 -> 9"]
    not_counted = parse_yaml(dump_config(config_of(linear, epochs=1)))  # before a run starts
    assert changes(saved(linear, epochs=1), not_counted) == []
