"""The number of CPU threads that the kernels of PyTorch use, for each thread of the process."""

from __future__ import annotations

import torch


def use_threads(number: int) -> None:
    """For kernels that the calling thread starts. PyTorch sets up a thread at its first kernel, and then gives it the
    number that any thread of the process has set last. That must have happened before ours is set: with
    runtime=local, an engine would otherwise decode with the threads of the trainer."""
    torch.get_num_threads()  # sets up this thread
    torch.set_num_threads(number)
