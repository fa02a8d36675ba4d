"""Checkpoints on disk: folders (store), sharded tensors (tensors, writer), groups that no step has trained on yet."""
