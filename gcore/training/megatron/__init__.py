"""Megatron-Core as the backend of a trainer rank: backend.py. Optional: only this package imports `megatron.core`."""
