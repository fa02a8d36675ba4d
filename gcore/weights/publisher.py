"""Trainer side of a weight update: one publisher per rank.

    named parameters ──bucket i: gather (collective)──> whole tensors ──engines' dtype──> pack_bucket ──> weights
                                                        by the transfer method: array, CUDA handle, ticket, or tensors

The trainer passes its named parameters with every call: FSDP may have replaced the tensors since the last one. With
adapters (model.lora) these are only the factors. How the bytes of an update get to the engines (TransferMethod):

in_process    the tensors themselves: trainer and engines share one process (runtime: local)
cuda_ipc      a handle to GPU memory: rank i and engine i share GPU i (launch/gpu_assignment.py)
broadcast     one collective from rank 0 to the engines: they are on different GPUs, or placement.weights=broadcast
host_memory   an array in the shared memory of the machine, which Ray copies to other nodes: all other cases
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gcore.config.placement import Placement
from gcore.models.networks import LORA_A, LORA_B
from gcore.protocols import Receivers, WeightPlan, Weights
from gcore.weights.broadcast import BroadcastSender
from gcore.weights.bucket import CudaHandle, Parameter, bucket_names, pack_bucket, to_host_memory
from gcore.weights.fp8 import in_fp8

TransferMethod = Literal["in_process", "cuda_ipc", "broadcast", "host_memory"]


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


class WeightPublisher:
    """`dtype`: precision of the engines' weights. `sender`: of rank 0, if the method is broadcast. `fp8`: the matrices
    of layers are sent in FP8 (fp8.py)."""

    def __init__(
        self,
        rank: int,
        method: TransferMethod = "host_memory",
        dtype: torch.dtype = torch.float32,
        sender: BroadcastSender | None = None,
        fp8: bool = False,
    ) -> None:
        self._rank, self._method, self._dtype, self._sender = rank, method, dtype, sender
        self._fp8 = fp8
        self._exported: dict[int, Tensor] = {}  # cuda_ipc: blocks that engines may still read, by bucket

    def plan(self, parameters: Mapping[str, Parameter]) -> WeightPlan:
        to_engines, to_critics = (
            len(bucket_names(parameters, dtype)) for dtype in (self._dtype_of(parameters), torch.float32)
        )
        return WeightPlan(to_engines, every_rank=self._method == "cuda_ipc", critic_buckets=to_critics)

    def bucket(self, parameters: Mapping[str, Parameter], index: int, receivers: Receivers) -> Weights:
        """Collective: all ranks gather bucket `index`. Empty on ranks from which no receiver reads."""
        method, dtype = self._method, self._dtype_of(parameters)
        if receivers.are_critics:  # they have another device, and train in float32
            method, dtype = "in_process" if method == "in_process" else "host_memory", torch.float32
        sender = self._sender if method == "broadcast" else None
        if sender is not None and index == 0:
            sender.connect(receivers.names, receivers.restarted)
        tensors = dict[str, Tensor]()
        for name in bucket_names(parameters, dtype)[index]:
            whole = parameters[name]
            if isinstance(whole, DTensor) or not isinstance(whole, Tensor):
                whole = whole.full_tensor()
            if method == "cuda_ipc" or self._rank == 0:
                if self._fp8 and not receivers.are_critics:
                    tensors |= in_fp8(name, whole.detach(), dtype)
                else:
                    tensors[name] = whole.detach().to(dtype)
        if method == "in_process" or not tensors:
            return tensors
        if sender is not None:
            return pack_bucket(tensors, sender.send)
        if method != "cuda_ipc":
            return pack_bucket(tensors, to_host_memory)

        def to_handle(block: Tensor) -> CudaHandle:
            self._exported.pop(index - 2, None)  # engines may still read the bucket before this one
            self._exported[index] = block
            return CudaHandle(block)

        return pack_bucket(tensors, to_handle)

    def release(self) -> None:
        """Free the memory of the last update. Call it before the parameters change again."""
        self._exported.clear()
        if self._sender is not None:
            self._sender.wait_sent()

    def _dtype_of(self, parameters: Mapping[str, Parameter]) -> torch.dtype:
        """Factors of adapters are sent in float32: engines merge them in float32."""
        return torch.float32 if any(name.endswith((LORA_A, LORA_B)) for name in parameters) else self._dtype
