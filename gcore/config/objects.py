"""Objects of a Python program in the place of a path: functions, classes, rows.

    Config(workflow=flow) ──> config.workflow == "python:flow", with the function ──pickle──> the processes of a run

Such a path is a string that also holds its object. It crosses processes by cloudpickle: functions of a script or a
notebook, lambdas and closures are sent by value, those of modules by name. A configuration file has only the name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import PlainSerializer, WrapValidator

from gcore.types import UserError

PREFIX = "python:"


class PythonObject(str):
    """PythonObject("reward", right) == "python:right". The object is unpickled when it is first used: an engine has no
    need of the user's modules."""

    _object: Any
    _packed: tuple[bytes, list[str]] | None

    def __new__(cls, default: str, value: Any) -> PythonObject:
        name = str(getattr(value, "__name__", default))
        made = super().__new__(cls, PREFIX + (name if name.isidentifier() else default))
        made._object, made._packed = value, None
        return made

    @property
    def object(self) -> Any:
        if self._packed is not None:
            import cloudpickle

            data, path = self._packed
            sys.path += [place for place in path if place not in sys.path]  # for objects that are sent by name
            self._object, self._packed = cloudpickle.loads(data), None
        return self._object

    def __reduce__(self) -> tuple[Callable[..., PythonObject], tuple[str, bytes, list[str]]]:
        return _unpack, (str(self), *(self._packed or _pack(self)))


def _pack(item: PythonObject) -> tuple[bytes, list[str]]:
    import cloudpickle

    try:
        return cloudpickle.dumps(item._object), list(sys.path)
    except Exception as error:  # a lock, an open file, a client of a server, ...
        raise UserError(
            f"{item}: it cannot be sent to the processes of the run ({type(error).__name__}: {error}); open files and "
            "connections inside of the function, or use runtime=local with rewards.workers=0"
        ) from error


def _unpack(name: str, data: bytes, path: list[str]) -> PythonObject:
    made = PythonObject.__new__(PythonObject, name.removeprefix(PREFIX), None)
    made._packed = data, path
    return made


def object_of(path: str, key: str) -> Any:
    """The object of a path that starts with `python:`."""
    if isinstance(path, PythonObject):
        return path.object
    raise UserError(
        f"{key}={path}: the run was started from Python with an object of that name, which a file cannot hold; pass "
        "the object again (gcore.train, gcore.evaluate), or set the path of a function"
    )


def is_object(path: str | None) -> bool:
    return path is not None and path.startswith(PREFIX)


def _function(value: Any, check: Callable[[Any], Any]) -> Any:
    if isinstance(value, PythonObject):
        return value
    return PythonObject("function", value) if callable(value) else check(value)


def _path(value: Any, check: Callable[[Any], Any]) -> Any:
    return value if isinstance(value, PythonObject) else check(value)


def is_rows(value: Any) -> bool:
    """A list of rows, or a table such as a datasets.Dataset."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return True
    return all(hasattr(value, name) for name in ("__len__", "__getitem__", "column_names"))


FunctionPath = Annotated[str, WrapValidator(_function), PlainSerializer(str.__str__, when_used="json")]
"""`package.module:NAME`, `file.py:NAME`, or in Python the function itself."""
RowsPath = Annotated[str, WrapValidator(_path), PlainSerializer(str.__str__, when_used="json")]
