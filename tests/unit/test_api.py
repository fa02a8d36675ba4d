"""The Python interface without runs: objects in the configuration, their way through pickle, errors, interrupts."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml

import gcore
from gcore import Config, UserError
from gcore.api import make_config
from gcore.config.load import dump_config, parse_yaml
from gcore.config.objects import PythonObject
from gcore.driver.interrupt import end_at_signals, outside_of_loops
from gcore.launch.user_code import load_filter, load_workflow
from gcore.prompts.rows import load_rows
from gcore.rewarding.signatures import load_reward
from tests.e2e.helpers import RECIPE

ROWS = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(5)]


def right(prompts, completions, answer, **columns):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


async def flow(ctx, prompt):
    return await ctx.reward(await ctx.generate(prompt))


def test_import_is_light():
    code = "import sys, gcore; print(sorted({'torch', 'ray', 'pydantic', 'numpy', 'aiohttp'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
    assert {"train", "evaluate", "Config"} <= set(dir(gcore))
    with pytest.raises(AttributeError, match="has no attribute 'tran'"):
        _ = gcore.tran


def test_functions_and_rows_stand_in_the_place_of_paths():
    bonus = 0.25
    config = make_config(
        RECIPE,
        "run.steps=2",
        reward={"right": right, "bonus": lambda completions, **_: [bonus for _ in completions]},
        objects={
            "workflow": flow,
            "sampling.filter": lambda group: len(group) > 1,
            "data.train": ROWS,
            "data.eval": ROWS[:2],
        },
    )
    assert config.rewards.names == ["right", "bonus"] and config.run.steps == 2
    there = pickle.loads(pickle.dumps(config))  # in a process of the run
    assert there == config
    assert load_reward(there.rewards.functions[1].path, {}).function(completions=["x"]) == [0.25]
    assert load_workflow(there.workflow) is flow  # of a module: sent by name
    assert load_filter(there.sampling.filter)([1, 2]) == (True, "filter")  # type: ignore[list-item]
    assert list(load_rows(there.data.train)) == ROWS and len(load_rows(there.data.eval_sets[""])) == 2
    again = pickle.loads(pickle.dumps(there))  # from that process to a reward worker
    assert load_reward(again.rewards.functions[1].path, {}).function(completions=["x", "y"]) == [0.25, 0.25]


def test_a_configuration_file_has_the_names_and_says_that_objects_are_missing():
    text = dump_config(make_config(RECIPE, reward=right, objects={"workflow": flow, "data.train": ROWS}))
    tree = yaml.safe_load(text)
    assert (tree["workflow"], tree["data"]["train"]["path"]) == ("python:flow", "python:rows")
    config = make_config(parse_yaml(text))
    with pytest.raises(UserError, match=r"workflow=python:flow: the run was started from Python"):
        load_workflow(config.workflow)
    with pytest.raises(UserError, match=r"data\.train\.path=python:rows"):
        load_rows(config.data.train)


def test_a_config_takes_functions_directly():
    tree = {**RECIPE, "rewards": right, "workflow": flow}
    config = Config(**tree)
    assert config.rewards.functions[0].name == "right" and isinstance(config.workflow, PythonObject)
    changed = make_config(config, "training.lr=0.5", reward=[right, "gcore.rewarding.rules:exact_answer"][:1])
    assert changed.training.lr == 0.5 and changed.workflow.object is flow
    assert config.training.lr == RECIPE["training"]["lr"]  # the caller's configuration is unchanged
    assert make_config({**RECIPE, "rewards": lambda completions: [0]}).rewards.names == ["reward"]


def test_errors_are_exceptions_with_the_key():
    with pytest.raises(UserError, match=r"recipe: training\.learning_rate: unknown key; did you mean training\.lr"):
        make_config({**RECIPE, "training": {"learning_rate": 1}})
    with pytest.raises(UserError, match="no such recipe"):
        gcore.train("nowhere.yaml")
    with pytest.raises(UserError, match="cannot be sent to the processes"):
        pickle.dumps(make_config(RECIPE, objects={"workflow": _with_lock()}))
    with pytest.raises(UserError, match="expected `async def"):
        load_workflow(make_config(RECIPE, objects={"workflow": right}).workflow)
    with pytest.raises(UserError, match="the first row is 1; expected a mapping"):
        load_rows(make_config(RECIPE, objects={"data.train": [1, 2]}).data.train)


def _with_lock():
    lock = threading.Lock()

    async def locked(ctx, prompt):
        with lock:
            return []

    return locked


def test_a_run_inside_of_an_event_loop_has_a_thread():
    async def notebook():
        return outside_of_loops(lambda: asyncio.run(asyncio.sleep(0, threading.current_thread().name)))

    assert asyncio.run(notebook()) == "gcore-run"
    assert outside_of_loops(lambda: threading.current_thread().name) == "MainThread"

    async def failing():
        return outside_of_loops(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(failing())


def interrupted(function):
    """Call it in a thread, as in a notebook, and expect the interrupt that it causes."""

    async def notebook():
        return outside_of_loops(function)

    loop = asyncio.new_event_loop()  # without asyncio.run, which has its own handler of SIGINT, as in a kernel
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(notebook())
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()


def test_an_interrupt_before_the_run_has_an_event_loop_ends_it_too():
    """The checks before a run may download a model. The cell is interrupted; its run must not start afterwards."""
    seen, over = threading.Event(), threading.Event()
    started: list[str] = []

    async def run():
        end_at_signals()
        await asyncio.sleep(0)
        started.append("processes")

    def checks_and_run():
        os.kill(os.getpid(), signal.SIGINT)
        assert seen.wait(60)
        try:
            asyncio.run(run())
        finally:
            over.set()

    interrupted(checks_and_run)
    seen.set()
    assert over.wait(60) and not started


def test_an_interrupt_ends_the_run_of_a_thread():
    ended = threading.Event()

    async def run():
        end_at_signals()
        try:
            threading.Thread(target=interrupt).start()
            await asyncio.Event().wait()
        finally:
            ended.set()

    def interrupt():
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)  # as a terminal or a kernel does

    interrupted(lambda: asyncio.run(run()))
    assert ended.is_set()
