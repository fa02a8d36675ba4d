"""Checkpoints on disk: the folders (store.py), and groups that no step has trained on yet (pending_groups.py)."""
