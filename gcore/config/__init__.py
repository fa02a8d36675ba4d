"""Configuration: a typed tree, read from YAML. Imports neither torch nor ray.

The tree is built when one of these names is first used: a reward worker needs only a part of this package, and starts
in half of the time without the tree.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore.config.load import dump_config, load_config
    from gcore.config.tree import Config

__all__ = ["Config", "dump_config", "load_config"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("gcore.config.tree" if name == "Config" else "gcore.config.load"), name)
