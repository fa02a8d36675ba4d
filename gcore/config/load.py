"""YAML file + `key=value` overrides -> a typed tree. All problems are reported at once, with the nearest valid key."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from gcore import shipped
from gcore.config.names import FORMER, key_of, leaves, own_name
from gcore.config.secrets import redacted
from gcore.config.tree import Config
from gcore.types import UserError

Tree = TypeVar("Tree", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Reads `1e-6` as a number and `no` as a string, such as a judge's word. YAML 1.1 has a string and false."""


_BOOL = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_FLOAT = re.compile(r"^[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads, overrides, validates. Raises UserError with one line per problem."""
    return load_tree(path, overrides, Config, "recipe")


def load_tree(path: str | Path, overrides: Sequence[str], into: type[Tree], what: str) -> Tree:
    """`into`: the tree of a command; `what`: the name of its files, for messages."""
    tree = read_tree(path, what)
    for word in overrides:
        override(tree, word)
    return validate(tree, str(path), into)


def read_tree(path: str | Path, what: str = "recipe") -> dict[str, Any]:
    """The parsed YAML file, or the shipped one of this name, not validated."""
    file = shipped.named(path, f"{what}s")
    if file.is_dir():
        raise UserError(f"{file}: got a folder; expected a {what}, a YAML file (see {what}s/)")
    if not file.is_file():
        near = difflib.get_close_matches(str(path), shipped.names(f"{what}s"), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{file}: no such {what}; expected a YAML file (see {what}s/){hint}")
    try:
        tree = parse_yaml(file.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not a text file: {error}") from None
    except OSError as error:  # that of a run belongs to its user
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    if not isinstance(tree, dict):
        got = "an empty file" if tree is None else type(tree).__name__
        raise UserError(f"{file}: got {got}; expected keys and values at the top level")
    return tree


def parse_yaml(text: str) -> Any:
    """Parses one document. Raises yaml.YAMLError also for a repeated key, of which PyYAML would keep the last."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if repeated := list(_repeated_keys(node, "", set())):
            raise yaml.YAMLError("; ".join(repeated))
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _repeated_keys(node: yaml.Node, path: str, seen: set[int]) -> Iterator[str]:
    """Reads the nodes before `<<` merges them: a key may override a merged key of the same name."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated_keys(item, f"{path}{index}.", seen)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[tuple[str, str], int] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines and key.value != "<<":
                yield f"{path}{key.value} is set twice, in lines {lines[name]} and {line}"
            lines.setdefault(name, line)
            yield from _repeated_keys(value, f"{path}{key.value}.", seen)


def validate(tree: dict[str, Any], source: str, into: type[Tree]) -> Tree:
    try:
        return into.model_validate(tree)
    except ValidationError as error:
        lines = _explain_all(error, list(all_keys(into)))
        head = f"{source}: " if len(lines) == 1 else f"{source}: {len(lines)} problems\n  "
        raise UserError(head + "\n  ".join(lines)) from None


def dump_config(config: BaseModel) -> str:
    """The resolved tree as YAML, without secrets."""
    return yaml.safe_dump(redacted(config.model_dump(mode="json")), sort_keys=False)


def override(tree: dict[str, Any], word: str) -> None:
    """Replaces a key of the tree. `word`: training.lr=1e-5"""
    key, sign, text = word.partition("=")
    if not sign or not key:
        raise UserError(f"override {word!r}: expected key=value, such as training.lr=1e-5")
    try:
        value = parse_yaml(text) if text else None
    except yaml.YAMLError:
        raise UserError(f"override {word!r}: the value is not valid YAML") from None
    *parents, last = key.split(".")
    node: Any = tree
    for depth, name in enumerate(parents, 1):
        place = _place(node, name, word)
        if isinstance(node, dict) and node.get(place) is None:
            node[place] = {}
        node = node[place]
        if not isinstance(node, dict | list):
            raise UserError(f"override {word!r}: {'.'.join(parents[:depth])} is a value, not a section")
    node[_place(node, last, word)] = value


def _place(node: dict[str, Any] | list[Any], name: str, word: str) -> Any:
    """A key of a section, or the index of an item that a list has."""
    if isinstance(node, dict):
        return name
    if not name.isdigit() or int(name) >= len(node):
        raise UserError(f"override {word!r}: expected an index below {len(node)}, got {name!r}")
    return int(name)


def _explain_all(error: ValidationError, keys: list[str]) -> list[str]:
    """One line per key. A value that fits no branch of a union has one error per branch."""
    lines: dict[str, list[str]] = {}
    for number, entry in enumerate(error.errors()):
        where = ".".join(str(part) for part in entry["loc"] if not _is_union_tag(part))
        foreign = _explain_section(where, entry["input"], keys) if entry["type"] == "extra_forbidden" else {}
        for place, line in (foreign or {where or str(number): _explain(where, entry, keys)}).items():
            lines.setdefault(place, []).append(line)
    return ["; or ".join([first, *(o.removeprefix(f"{w}: ") for o in others)]) for w, (first, *others) in lines.items()]


def _explain_section(where: str, section: Any, keys: list[str]) -> dict[str, str]:
    """Of a section of another trainer, such as `actor_rollout_ref`: one line per key that has a counterpart, and one
    for the others. Empty: it is none."""
    paths = list(leaves(section, where)) if isinstance(section, dict) else []
    known = [path for path in paths if own_name(path, keys)]
    others = [path.removeprefix(f"{where}.") for path in paths if path not in known]
    ours = {key.partition(".")[0] for key in keys} - {where}
    if not known or difflib.get_close_matches(where, ours, 1, cutoff=0.8):  # `generations` is a slip
        return {}
    more = f", and {len(others) - 5} more" if len(others) > 5 else ""
    rest = {where: f"{where}: no key for {', '.join(others[:5])}{more}"} if others else {}
    return {path: _unknown(path, own_name(path, keys)) for path in known} | rest


def _unknown(where: str, nearest: str | None) -> str:
    if (advice := FORMER.get(_without_indices(where), "")).startswith("remove it"):
        return f"{where}: unknown key; {advice}"
    if nearest is None:
        return f"{where}: unknown key"
    return f"{where}: unknown key; did you mean {key_of(nearest)}?{nearest.removeprefix(key_of(nearest))}"


def _without_indices(path: str) -> str:
    """rewards.functions.0.name -> rewards.functions.name"""
    return ".".join(part for part in path.split(".") if not part.isdigit())


def _explain(where: str, error: Any, keys: list[str]) -> str:
    match error["type"]:
        case "extra_forbidden":
            return _unknown(where, _nearest_key(where, keys))
        case "missing":
            return f"{where}: not set; expected a value (this key is required)"
        case "value_error":
            message = str(error["ctx"]["error"])
            return f"{where}: {message}" if where else message
        case "model_type" | "model_attributes_type":
            inside = [key.removeprefix(f"{where}.") for key in keys if key.startswith(f"{where}.")]
            expected = f"a section with keys such as {', '.join(inside[:4])}" if inside else "a section"
            return f"{where}: got {error['input']!r}; expected {expected}"
        case _:
            return f"{where}: {error['msg'][0].lower() + error['msg'][1:]}, got {error['input']!r}"


def _is_union_tag(part: Any) -> bool:
    return isinstance(part, str) and (
        part in ("int", "str", "float", "constrained-int", "constrained-float") or "[" in part
    )


def _nearest_key(where: str, keys: list[str]) -> str | None:
    """The first of: a former name, a similar name in the same section (a very similar one, if another section or
    another trainer has this name), a name of another trainer, the same name in another section, a similar name there,
    a similar path."""
    section, _, name = where.rpartition(".")
    if key_of(former := FORMER.get(_without_indices(where), "")) in keys:
        return former
    siblings = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == _without_indices(section)]
    same, foreign = [key for key in keys if key.rpartition(".")[2] == name], own_name(where, keys)
    close = difflib.get_close_matches(name, siblings, 1, cutoff=0.8 if same or foreign else 0.6)
    if close and (section or not foreign):  # TRL's `num_generations` is similar to our section `generation`
        return f"{section}.{close[0]}" if section else close[0]
    if foreign:
        return foreign
    if same:
        return same[0]
    leaves = {key.rpartition(".")[2]: key for key in reversed(keys)}
    if close := difflib.get_close_matches(name, leaves, 1, cutoff=0.75):
        return leaves[close[0]]
    close = difflib.get_close_matches(where, keys, 1, cutoff=0.6)
    return close[0] if close else None


def all_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        for section in sections_of(info.annotation):
            yield from all_keys(section, f"{prefix}{name}.")


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """The sections inside an annotation such as `WarmStart | None` or `list[RewardFunction]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Annotated, list):
        return sections_of(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [s for arg in typing.get_args(annotation) for s in sections_of(arg)]
    return []
