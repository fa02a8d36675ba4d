"""Sandboxes: places for programs that nobody has read, with limits and without network."""
