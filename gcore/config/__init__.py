"""Configuration: a typed tree, read from YAML. Imports neither torch nor ray."""

from gcore.config.load import dump_config, load_config
from gcore.config.tree import Config

__all__ = ["Config", "dump_config", "load_config"]
