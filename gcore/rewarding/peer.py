"""Values and calls between the process of the tests and that of the program, as lines of JSON. See remote_tests.py.

It imports only the standard library, because it also runs in sandboxes.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import json
import os
import sys
import types

TYPE_CHECKING = False  # as in sandboxed.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MESSAGE_BYTES = 8 << 20  # longest message between the two processes
DEPTH = 200  # nesting of values
# standard types that are sent as the arguments that make them again
MADE: dict[tuple[str, str], Callable[[Any], list[Any]]] = {
    ("collections", "deque"): lambda v: [list(v), v.maxlen],
    ("collections", "OrderedDict"): lambda v: [dict(v)],
    ("collections", "Counter"): lambda v: [dict(v)],
    ("decimal", "Decimal"): lambda v: [str(v)],
    ("fractions", "Fraction"): lambda v: [v.numerator, v.denominator],
    ("datetime", "date"): lambda v: [v.year, v.month, v.day],
    ("datetime", "time"): lambda v: [v.hour, v.minute, v.second, v.microsecond, v.tzinfo],
    ("datetime", "datetime"): lambda v: [*v.timetuple()[:6], v.microsecond, v.tzinfo],
    ("datetime", "timedelta"): lambda v: [v.days, v.seconds, v.microseconds],
    ("datetime", "timezone"): lambda v: [v.utcoffset(None)],
    ("builtins", "range"): lambda v: [v.start, v.stop, v.step],
}


class Unsupported(TypeError):
    """A value that cannot be sent."""


class Peer:
    """One end of the connection. Messages are lines of JSON; a request may be answered by requests before its reply."""

    def __init__(self, socket: int):
        self.incoming, self.outgoing = os.fdopen(socket, "rb"), os.fdopen(os.dup(socket), "wb")
        self.objects: dict[int, Any] = {}  # what the other side may name

    def send(self, message: Any) -> None:
        try:
            data = json.dumps(message).encode() + b"\n"
        except RecursionError:
            raise Unsupported("a value that is nested too deeply") from None
        if len(data) > MESSAGE_BYTES:
            raise Unsupported("a value that is too large")
        try:
            self.outgoing.write(data)
            self.outgoing.flush()
        except OSError:
            os._exit(0)

    def receive(self) -> list[Any]:
        """The next message. The process ends with the other side, or if that sends what is no message: tests must not
        catch this as an exception of the program."""
        try:
            data = self.incoming.readline(MESSAGE_BYTES + 1)
            message = json.loads(data) if data.endswith(b"\n") else None
            if isinstance(message, list) and len(message) > 1:
                return message
        except Exception:
            pass
        os._exit(0)

    def request(self, *message: Any) -> list[Any]:
        self.send(["request", *message])
        while True:
            kind, *rest = self.receive()
            if kind == "request":
                self.answer(*rest)
            elif kind == "raise":
                raise self.exception(*rest)
            else:
                return rest

    def answer(self, *request: Any) -> None:
        try:
            reply = ["reply", *self.handle(*request)]
        except BaseException as error:
            reply = self.raised(error)
        try:
            self.send(reply)
        except Unsupported as error:
            self.send(self.raised(error))

    def raised(self, error: BaseException) -> list[Any]:
        try:
            args = [self.encode(arg) for arg in error.args]
        except Exception:
            args = []
        return ["raise", [kind.__name__ for kind in type(error).__mro__], args]

    def exception(self, names: list[str], args: list[Any]) -> BaseException:
        kind: Any = next((known for name in names if (known := self.exception_type(name)) is not None), Exception)
        try:
            error: BaseException = kind(*[self.decode(arg) for arg in args])
            return error
        except Exception:
            return Exception(names[0])

    def exception_type(self, name: str) -> type[BaseException] | None:
        kind = vars(builtins).get(name)
        return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None

    def handle(self, *request: Any) -> list[Any]:
        raise NotImplementedError

    # --- values: JSON with a letter in front of each container

    def encode(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if abs(value) < 1 << 53 else ["int", hex(value)]
        if depth > DEPTH:
            raise Unsupported("a value that is nested too deeply")
        deeper = depth + 1
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, *[self.encode(item, deeper) for item in value]]
        if kind is dict:
            return ["dict", *[[self.encode(k, deeper), self.encode(v, deeper)] for k, v in value.items()]]
        if kind in (bytes, bytearray):
            return [kind.__name__, value.decode("latin-1")]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is collections.defaultdict:
            return ["defaultdict", *[self.encode(v, deeper) for v in (value.default_factory, dict(value))]]
        place = (kind.__module__, kind.__qualname__)
        if place in MADE and getattr(sys.modules[place[0]], place[1], None) is kind:
            return ["made", *place, *[self.encode(arg, deeper) for arg in MADE[place](value)]]
        return self.encode_object(value, deeper)

    def decode(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        match data[0], data[1:]:
            case "int", [text]:
                return int(text, 16)
            case "list" | "tuple" | "set" | "frozenset" as name, items:
                kind = getattr(builtins, name)
                return kind([self.decode(item) for item in items])
            case "dict", items:
                return {self.decode(key): self.decode(value) for key, value in items}
            case "bytes" | "bytearray" as name, [text]:
                return getattr(builtins, name)(text.encode("latin-1"))
            case "complex", [real, imaginary]:
                return complex(real, imaginary)
            case "defaultdict", [factory, items]:
                return collections.defaultdict(self.decode(factory), self.decode(items))
            case "made", [module, name, *args] if (module, name) in MADE:
                return getattr(importlib.import_module(module), name)(*map(self.decode, args))
        return self.decode_object(*data)

    def encode_object(self, value: Any, depth: int) -> Any:
        raise NotImplementedError

    def decode_object(self, *data: Any) -> Any:
        raise NotImplementedError

    def keep(self, value: Any) -> int:
        self.objects[id(value)] = value
        return id(value)


def find_standard(module: str, name: str) -> Any:
    """A module of the standard library, or what has this name in it."""
    if module.partition(".")[0] not in sys.stdlib_module_names:
        raise Unsupported(module)
    imported = importlib.import_module(module)
    return getattr(imported, name) if name else imported


def standard(value: Any, name: str) -> list[str] | None:
    """Where the other side finds this object by itself, if the standard library has it under this name."""
    if isinstance(value, types.ModuleType):
        module = getattr(value, "__name__", "")
        known = module == name and module in sys.stdlib_module_names and sys.modules.get(module) is value
        return ["standard", module, ""] if known else None
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module.partition(".")[0] not in sys.stdlib_module_names or module == "__main__":
        return None
    return ["standard", module, name] if getattr(sys.modules.get(module), name, None) is value else None
