"""How the bytes of a weight update get from the trainer to the engines.

in_process    the tensors themselves: trainer and engines share one process (runtime: local)
cuda_ipc      a handle to GPU memory: rank i and engine i share GPU i (launch/gpu_assignment.py)
broadcast     one collective from rank 0 to the engines: they are on different GPUs, or placement.weights=broadcast
host_memory   an array in the shared memory of the machine, which Ray copies to other nodes: all other cases
"""

from __future__ import annotations

from typing import Literal

from gcore.config.placement import Placement

TransferMethod = Literal["in_process", "cuda_ipc", "broadcast", "host_memory"]


class BroadcastError(RuntimeError):
    """A member of the group of a broadcast died or is late."""


def choose_method(placement: Placement, one_process: bool, on_gpu: bool, same_gpu: bool = True) -> TransferMethod:
    """`one_process`: trainer and engines share it. `on_gpu`: all of them compute on GPUs. `same_gpu`: in modes where
    roles share GPUs, every engine has the GPU of the rank that it reads from, and no other one."""
    if one_process:
        return "in_process"
    if placement.weights != "auto":
        return "broadcast" if placement.weights == "broadcast" else "host_memory"
    if not on_gpu:
        return "host_memory"
    if placement.mode == "disaggregated":
        return "broadcast"
    return "cuda_ipc" if same_gpu else "host_memory"
