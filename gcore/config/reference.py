"""Prints the configuration reference in Markdown: `python -m gcore.config.reference > docs/configuration.md`."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gcore.config.load import items_of, sections_of
from gcore.config.tree import Config

HEAD = """# Configuration

A run is configured by one YAML file; `key=value` on the command line overrides a key (`gcore train recipe.yaml
training.lr=1e-5`). Unknown keys and values of a wrong type are errors. They are reported before the run starts, all at
once, each with the nearest valid key.
This page is generated from `gcore/config/tree.py` by `make docs`.
"""


def reference() -> str:
    lines = [HEAD]
    top = [(n, f) for n, f in Config.model_fields.items() if not sections_of(f.annotation)]
    lines += ["## Top level\n", "| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [_row(name, info) for name, info in top]
    for name, info in Config.model_fields.items():
        for section in sections_of(info.annotation):
            lines += [
                f"\n## `{name}`\n",
                _text(info.description),
                "",
                "| key | type | default | meaning |",
                "|---|---|---|---|",
            ]
            lines += _rows(section, f"{name}.")
    return "\n".join(lines) + "\n"


def _rows(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        inner = sections_of(info.annotation) or items_of(info.annotation)
        if not inner or info.default is not PydanticUndefined:
            yield _row(prefix + name, info)
        mark = "[].".join if items_of(info.annotation) else ".".join
        for part in inner:
            yield from _rows(part, mark([prefix + name, ""]))


def _row(key: str, info: Any) -> str:
    default = "**required**" if info.default is PydanticUndefined else f"`{_value(info.default)}`"
    return f"| `{key}` | {_type(info.annotation)} | {default} | {_text(info.description)} |"


def _value(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return "{...}"
    return value if isinstance(value, str) else json.dumps(value)


def _type(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " \\| ".join(f"`{a}`" for a in args)
    if origin in (typing.Union, types.UnionType):
        return " \\| ".join(_type(a) for a in args)
    if origin is typing.Annotated:
        return _type(args[0])
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return getattr(annotation, "__name__", str(annotation))


def _text(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
