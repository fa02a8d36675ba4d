"""What `make docs` writes: docs/configuration.md, the reference in Markdown, and recipes/schema.json.

The recipe that docs/configuration.md opens with is START.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gcore.config.foreign_names import TABLES, key_of
from gcore.config.load import items_of, sections_of
from gcore.config.tree import Config

HEAD = """# Configuration

A run is configured by one YAML file; `key=value` on the command line overrides a key (`gcore train recipe.yaml
training.lr=1e-5`). Unknown keys and values of a wrong type are errors. They are reported before the run starts, all at
once, each with the nearest valid key. Relative paths start from the folder in which `gcore` is started.
This page is generated from `gcore/config/tree.py` by `make docs`.
"""
FOREIGN = """The key that a message suggests for a name of another trainer, see [migration](migration.md). Of a nested
name the longest ending counts: `actor_rollout_ref.actor.optim.lr` ends with `optim.lr`; `critic.optim.lr` is longer.
"""
TITLES = ("| key | type | default | meaning |", "|---|---|---|---|")
MIN_REPEATED = 4  # keys of a section that is not written a second time


def reference() -> str:
    top = [(name, info) for name, info in Config.model_fields.items() if not sections_of(info.annotation)]
    sections = [(name, i, s) for name, i in Config.model_fields.items() for s in sections_of(i.annotation)]
    lines = [HEAD, "Sections: " + " · ".join(f"[`{name}`](#{name})" for name, _, _ in sections), ""]
    lines += ["## Top level\n", *TITLES, *(_row(name, info) for name, info in top)]
    written: dict[str, set[str]] = {}
    for name, info, section in sections:
        lines += [f"\n## `{name}`\n", _text(info.description), "", *TITLES, *_rows(section, f"{name}.", written)]
    lines += ["\n## Names in other trainers\n", FOREIGN]
    for trainer, names in TABLES.items():
        lines += [f"| {trainer} | key |", "|---|---|"]
        lines += [
            f"| `{name}` | `{(key := key_of(answer))}`{answer.removeprefix(key)} |" for name, answer in names.items()
        ]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _rows(section: type[BaseModel], prefix: str, written: dict[str, set[str]]) -> list[str]:
    """`written`: the rows of each section so far, without its prefix. A section with the rows of another one is a
    single row, which refers to it."""
    own = set(_plain_rows(section, ""))
    for other, rows in written.items():
        if len(own) >= MIN_REPEATED and own <= rows:
            names = ", ".join(f"`{name}`" for name in section.model_fields)
            return [f"| `{prefix}*` | | | The keys {names}, as in `{other}*`. |"]
    written[prefix] = own
    lines = []
    for name, info in section.model_fields.items():
        if info.annotation is type(None):  # a key of the same section elsewhere, not of this one
            continue
        inner = sections_of(info.annotation) or items_of(info.annotation)
        if not inner or info.default is not PydanticUndefined:
            lines.append(_row(prefix + name, info))
        mark = "[]." if items_of(info.annotation) else "."
        for part in inner:  # the kinds of a judge have keys in common
            lines += [row for row in _rows(part, prefix + name + mark, written) if row not in lines]
    return lines


def _plain_rows(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, info in section.model_fields.items():
        if info.annotation is not type(None):
            yield _row(prefix + name, info)
        for part in sections_of(info.annotation) or items_of(info.annotation):
            yield from _plain_rows(part, f"{prefix}{name}.")


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
    """In one line, for a cell of a table. Pages of the documentation become links."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", " ".join((text or "").split()).replace("|", "\\|"))


def schema() -> str:
    """The JSON schema of a recipe. It does not know the rules that join several keys."""
    tree = Config.model_json_schema()
    for section in (tree, *tree["$defs"].values()):
        for key in section.get("properties", {}).values():
            if isinstance(key.get("default"), dict):  # of a section: its keys have theirs
                del key["default"]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A recipe of G-Core"}
    return json.dumps(head | {key: value for key, value in tree.items() if key != "title"}, indent=1) + "\n"


if __name__ == "__main__":
    Path("docs/configuration.md").write_text(reference())
    Path("recipes/schema.json").write_text(schema())
