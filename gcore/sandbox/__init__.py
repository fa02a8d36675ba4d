"""Sandboxes: places for untrusted programs, with limits and without network."""
