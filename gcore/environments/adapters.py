"""Which adapter an environment has: by the prefix of its source, or by what its path names.

gym:ID, mcp:COMMAND, ...          the module of the row in ADAPTERS
file.py:NAME, package:NAME        a class, a factory or an object; one with a rubric is in the style of verifiers
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gcore.environments.base import Environment
from gcore.environments.own import OwnEnvironment
from gcore.environments.verifiers import VerifiersEnvironment
from gcore.types import UserError
from gcore.user_files import load_function, one_line

KEY = "environment.source"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A row: the module, whose `load(name, args)` makes the environment, and what to install."""

    module: str
    package: str
    install: str


ADAPTERS = {
    "gym": Adapter("gcore.environments.gym", "gymnasium", "pip install gymnasium"),
    "verifiers": Adapter("gcore.environments.verifiers", "verifiers", "pip install verifiers"),
    "openenv": Adapter("gcore.environments.openenv", "openenv", "pip install openenv"),
    "mcp": Adapter("gcore.environments.mcp", "mcp", "pip install mcp"),
}


def load(source: str, args: Mapping[str, Any]) -> Environment:
    prefix, _, name = source.partition(":")
    try:
        if prefix in ADAPTERS:
            environment: Environment = importlib.import_module(ADAPTERS[prefix].module).load(name, dict(args))
            return environment
        return _of_path(source, args)
    except ModuleNotFoundError as error:
        row = ADAPTERS.get(prefix)
        if row is None or (error.name or "").partition(".")[0] != row.package:
            raise
        raise UserError(f"{KEY}={source}: {row.package} is not installed ({row.install})") from error


def _of_path(source: str, args: Mapping[str, Any]) -> Environment:
    made = load_function(source, KEY)
    make = partial(made, **args)
    try:
        first = make()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{KEY}: {source} raised {one_line(error)} (got environment.args={dict(args)})") from error
    return VerifiersEnvironment(first) if hasattr(first, "rubric") else OwnEnvironment(make, first)
