"""run.on_step: which functions are accepted, what their answers and their errors become."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from gcore.api import make_config
from gcore.controller.status import StepGate
from gcore.driver.on_step import call, call_after_steps, open_on_step
from gcore.launch.user_code import load_on_step, load_policy_loss
from gcore.types import UserError
from tests.e2e.helpers import RECIPE

FILE = """def two(metrics):
    helper(metrics)

def helper(metrics):
    return 1 / 0

async def later(metrics):
    pass

def none():
    pass

def leaves(metrics):
    raise SystemExit(0)
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize(
    ("answer", "stop"), [(None, False), (False, False), (True, True), (np.True_, True), (np.False_, False)]
)
def test_true_ends_the_run(answer: object, stop: bool) -> None:
    assert call(lambda metrics: answer, {"step": 3}) is stop


@pytest.mark.parametrize("answer", ["yes", 1, [], np.float32(1)])
def test_any_other_answer_is_refused(answer: object) -> None:
    with pytest.raises(UserError, match=r"^run\.on_step returned .* after step 3; expected True to end the run"):
        call(lambda metrics: answer, {"step": 3})


def test_an_error_names_the_line_of_the_user(mine: str) -> None:
    expected = "run.on_step: mine.py:5 in helper: ZeroDivisionError: division by zero (after step 7)"
    with pytest.raises(UserError) as error:
        call(load_on_step(f"{mine}:two"), {"step": 7})
    assert str(error.value) == expected and isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(UserError, match=r"mine\.py:14 in leaves: SystemExit: 0"):
        call(load_on_step(f"{mine}:leaves"), {"step": 7})
    with pytest.raises(UserError, match=r"^run\.on_step: pop: KeyError: "):  # it has no line
        call({}.pop, {"step": 7})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["later", "none"])
def test_a_function_has_one_argument_and_is_not_async(mine: str, name: str) -> None:
    with pytest.raises(UserError, match=rf"expected `def {name}\(metrics\)`"):
        load_on_step(f"{mine}:{name}")


def test_a_loss_has_two_arguments_and_is_not_async(tmp_path: Path) -> None:
    """Further ones need a default. A coroutine would only fail in the first update."""
    file = tmp_path / "losses.py"
    file.write_text(
        "def fits(steps, algorithm, scale=1.0): ...\nasync def later(steps, algorithm): ...\ndef one(steps): ...\n"
    )
    loss = load_policy_loss(f"{file}:fits")
    assert loss is not None and loss.__name__ == "fits"
    for name in ("later", "one"):
        with pytest.raises(UserError, match=rf"algorithm\.policy_loss=.*expected `def {name}\(steps, algorithm\)`"):
            load_policy_loss(f"{file}:{name}")


def test_the_function_stays_in_the_process_of_the_driver() -> None:
    """It may hold what cannot be pickled. Other processes and config.yaml get its name."""
    lock = threading.Lock()

    def watch(metrics: object) -> bool:
        return lock.locked()

    config, on_step = open_on_step(make_config(RECIPE, objects={"run.on_step": watch}))
    assert on_step is watch and type(config.run.on_step) is str and config.run.on_step == "python:watch"
    assert open_on_step(make_config(RECIPE)) == (make_config(RECIPE), None)


def test_all_controllers_get_the_answer_of_one_call() -> None:
    gates, seen = [StepGate(), StepGate()], []

    def on_step(metrics: dict[str, object]) -> bool:
        seen.append((metrics, threading.current_thread().name))
        return metrics["step"] == 2

    async def controller(rank: int) -> list[bool]:
        found = []
        for step in (1, 2):
            await asyncio.sleep(0.02 * rank)
            found.append(await gates[rank].wait({"step": step, "x": np.float32(0.5)} if rank == 0 else None))
        return found

    async def main() -> list[list[bool]]:
        driver = asyncio.ensure_future(call_after_steps(gates, on_step))  # type: ignore[arg-type]
        try:
            return await asyncio.wait_for(asyncio.gather(controller(0), controller(1)), 30)
        finally:
            driver.cancel()

    assert asyncio.run(main()) == [[False, True], [False, True]]
    assert seen == [({"step": 1, "x": 0.5}, "on_step"), ({"step": 2, "x": 0.5}, "on_step")]
