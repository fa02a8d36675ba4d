"""G-Core: a reinforcement-learning trainer with parallel controllers.

`from gcore import Config, evaluate, load_config, train` is the Python interface (docs/api.md). These names are imported
when they are first used: `import gcore` alone is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcore.api import Result as Result
    from gcore.api import evaluate as evaluate
    from gcore.api import train as train
    from gcore.config.load import load_config as load_config
    from gcore.config.tree import Config as Config
    from gcore.types import UserError as UserError

__version__ = "0.1.0"
_PLACES = {
    "Config": "gcore.config.tree",
    "Result": "gcore.api",
    "UserError": "gcore.types",
    "evaluate": "gcore.api",
    "load_config": "gcore.config.load",
    "train": "gcore.api",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
