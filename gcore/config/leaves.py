"""The values of a parsed tree, with their keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """("training.lr", 1e-6), ("rewards.functions.0.name", "exact"), ..."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield path, tree
        return
    for name, value in items:
        yield from leaves_of(value, f"{path}.{name}" if path else str(name))
