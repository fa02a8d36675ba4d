"""Typed clients: they offer the methods of their role with the same parameters, and travel as their handle does."""

from __future__ import annotations

import ast
import asyncio
import inspect
import pickle
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import gcore
from gcore.clients import (
    Client,
    ControllerClient,
    EngineClient,
    RemoteMethod,
    ScorerClient,
    TrainerClient,
)
from gcore.controller.loop import TrainingLoop
from gcore.launch.build import Roles
from gcore.protocols import Controller, Engine, Scorer, Trainer
from gcore.runtime.local import LocalHandle

PACKAGE = Path(gcore.__file__).parent


def methods(kind: type) -> dict[str, list[str]]:
    remote = {name: value.method if isinstance(value, RemoteMethod) else value for name, value in vars(kind).items()}
    functions = {name: value for name, value in remote.items() if inspect.isfunction(value) and name[0] != "_"}
    assert all(value.__name__ == name for name, value in functions.items())
    return {name: list(inspect.signature(value).parameters) for name, value in functions.items()}


PAIRS = [
    (EngineClient, Engine),
    (ScorerClient, Scorer),
    (TrainerClient, Trainer),
    (ControllerClient, Controller),
]


@pytest.mark.parametrize(("client", "role"), PAIRS)
def test_a_client_has_the_methods_of_its_role(client, role):
    assert methods(client) == methods(role)


def test_the_controller_has_what_its_client_calls():
    loop, called = TrainingLoop(MagicMock()), methods(ControllerClient)
    assert {"run", "evaluate", "status", "finished_step", "go_on"} <= called.keys()
    assert {"mark_dead", "begin_restart", "restore", "mark_alive"} <= called.keys()
    assert all(callable(vars(loop).get(name) or getattr(TrainingLoop, name)) for name in called)


def test_a_call_has_the_name_of_its_method_and_the_given_arguments():
    calls = []

    class Recording:
        name = "engine-0"

        async def call(self, *args):
            calls.append(args)
            return 7

    assert asyncio.run(EngineClient(Recording()).generate([], "ticket")) == 7
    assert asyncio.run(TrainerClient(Recording()).load("folder", False)) == 7
    assert calls == [("generate", [], "ticket"), ("load", "folder", False)]


def test_clients_travel_to_other_processes():
    roles = Roles([EngineClient(LocalHandle("engine-0", None))], scorers={"s": [ScorerClient(LocalHandle("s-0", 7))]})
    sent = pickle.loads(pickle.dumps(roles))
    (engine,), (scorer,) = sent.engines, sent.scorers["s"]
    assert type(engine) is EngineClient and engine.name == "engine-0"
    assert type(scorer) is ScorerClient and scorer.handle.role == 7
    with pytest.raises(AttributeError):
        engine.handle = None
    assert issubclass(TrainerClient, Client) and not hasattr(engine, "__dict__")


def test_methods_of_roles_are_named_by_strings_in_clients_alone():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                named = isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
                if named and node.func.attr in ("call", "submit"):
                    found.add(str(path.relative_to(PACKAGE)))
    assert found == {"clients.py"}
