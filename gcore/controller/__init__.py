"""The controllers of a run: the training loop and the objects that it uses. Start with loop.py."""
