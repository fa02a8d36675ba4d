"""Configuration: a typed tree (tree.py), read from YAML (load.py). Imports neither torch nor ray."""
