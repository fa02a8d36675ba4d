"""A user's function by its path: `package.module:NAME`, `file.py:NAME`, or an object of a Python program."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from gcore import user_files
from gcore.config.objects import is_object, object_of
from gcore.types import UserError

Function = Callable[..., Any]


def load_function(path: str, key: str = "rewards.functions.path") -> Function:
    """`package.module:function` or `file.py:function`. `key` is the config key of the path, for messages."""
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"{key}: expected package.module:function or file.py:function, got {path!r}")
    if is_object(path):
        return _callable(object_of(path, key), path, key)
    module = _import_file(place, key) if place.endswith(".py") else _import_module(place, key)
    try:
        function: Any = getattr(module, name)
    except AttributeError:
        close = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("__")], 1)
        raise UserError(f"{key}: {place} has no {name!r}" + (f"; did you mean {close[0]}?" if close else "")) from None
    return _callable(function, path, key)


def _callable(value: Any, path: str, key: str) -> Function:
    if not callable(value):
        raise UserError(f"{key}: {path} is of type {type(value).__name__}; expected a function")
    function: Function = value
    return function


def _import_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserError(f"{key}: {name} does not import: {one_line(error)}") from error


def _import_file(name: str, key: str) -> ModuleType:
    """Imports a file under a unique name and registers the module, so that its classes pickle and its dataclasses
    resolve."""
    file = user_files.find(name).resolve()
    if not file.is_file():
        where = "" if Path(name).is_absolute() else f" in the current folder, {Path.cwd()}"
        raise UserError(f"{key}: no such file: {name}{where}")
    unique = f"gcore_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[unique]
        if isinstance(error, Exception | SystemExit):
            raise UserError(f"{key}: {name} does not import: {one_line(error)}") from error
        raise
    return module


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
