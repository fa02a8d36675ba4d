"""A process group whose collectives go through the memory of the host: several ranks on one GPU.

    tensors on the GPU ──copy──> host ──gloo──> host ──copy──> GPU

NCCL wants a device per rank, and gloo has no reduce-scatter, all-gather into one tensor or all-to-all for CUDA tensors.
For measurements of what ranks compute, not of how fast they communicate: every call waits until it is done. After
`register`, `gcore.runtime.gloo.join(rendezvous, NAME)` makes such a group, and so do `dist.new_group` and meshes.
Tensors on a CPU take the same way, so that a rehearsal runs the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

NAME = "staged"


def register() -> None:
    """Once per process."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return StagedGroup(store, rank, size, timeout)


Base: Any = dist.ProcessGroup  # its stubs have the names of one version of PyTorch


class StagedGroup(Base):  # type: ignore[misc]
    """The methods have the names that PyTorch 2.11 and 2.13 call them by."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._own, self._count = rank, size

    def size(self) -> int:
        return self._count

    def rank(self) -> int:
        return self._own

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    # ---- everybody gets the same ----------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        given: Any = c10d.BroadcastOptions()
        given.rootRank, given.rootTensor = options.rootRank, options.rootTensor
        staged = _on_host(tensors)
        self._gloo.broadcast(staged, given).wait()
        return _done(_back(tensors, staged))

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        operation = options.reduceOp if options is not None else dist.ReduceOp.SUM
        for tensor in tensors:
            tensor.copy_(self._reduced(tensor, operation))
        return _done(tensors)

    allreduce_coalesced = allreduce

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        """On the host. gloo has no average."""
        (staged,) = _on_host([tensor])
        averaged = operation == dist.ReduceOp.AVG
        given: Any = c10d.AllreduceOptions()
        given.reduceOp = dist.ReduceOp.SUM if averaged else operation
        self._gloo.allreduce([staged], given).wait()
        return staged / self._count if averaged else staged

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.allreduce([torch.ones(1)], c10d.AllreduceOptions()).wait()
        return _done([])

    # ---- parts ----------------------------------------------------------------------------------------------------

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        for parts, own in zip(outputs, inputs, strict=True):
            _back(parts, self._gathered(own))
        return _done(outputs)

    def _gathered(self, own: Tensor) -> list[Tensor]:
        (staged,) = _on_host([own])
        found = [torch.empty_like(staged) for _ in range(self._count)]
        self._gloo.allgather([found], [staged]).wait()
        return found

    def _allgather_base(self, output: Tensor, own: Tensor, options: Any = None) -> Any:
        output.copy_(torch.cat([part.flatten() for part in self._gathered(own)]).view(output.shape))
        return _done([output])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            self._allgather_base(output, own)
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, options: Any = None) -> Any:
        operation = options.reduceOp if options is not None else dist.ReduceOp.SUM
        parts = self._reduced(whole, operation).flatten().chunk(self._count)
        output.copy_(parts[self._own].view(output.shape))
        return _done([output])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any = None) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, torch.cat([part.flatten() for part in parts]), options)
        return _done(outputs)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> Any:
        for output, whole in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, whole, options)
        return _done(outputs)

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], options: Any = None
    ) -> Any:
        received, sent = _on_host([output, given])
        self._gloo.alltoall_base(received, sent, output_sizes, input_sizes, c10d.AllToAllOptions()).wait()
        return _done(_back([output], [received]))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> Any:
        received, sent = (torch.cat([t.flatten() for t in _on_host(tensors)]) for tensors in (outputs, inputs))
        sizes = [[tensor.numel() for tensor in tensors] for tensors in (outputs, inputs)]
        self._gloo.alltoall_base(received, sent, *sizes, c10d.AllToAllOptions()).wait()
        parts = zip(outputs, received.split(sizes[0]), strict=True)
        return _done(_back(outputs, [part.view(output.shape) for output, part in parts]))

    # PyTorch 2.13 has other names for some of them
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # ---- from rank to rank ----------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        staged = _on_host(tensors)
        return Passing(self._gloo.send(staged, rank, tag), staged, [])

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        staged = _on_host(tensors)
        return Passing(self._gloo.recv(staged, rank, tag), staged, tensors)


class Passing(dist.Work):
    """On its way, with the memory that it needs. `into`: where it arrives."""

    def __init__(self, work: Any, staged: list[Tensor], into: list[Tensor]) -> None:
        super().__init__()
        self._work, self._staged, self._into = work, staged, into

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        if self._into:
            _back(self._into, self._staged)
        return True


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().contiguous().to("cpu", copy=True) for tensor in tensors]


def _back(tensors: list[Tensor], staged: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        for tensor, values in zip(tensors, staged, strict=True):
            tensor.copy_(values.view(tensor.shape))
    return tensors


def _done(result: Any) -> Any:
    """A finished operation, as PyTorch's C++ code takes it."""
    future: Future[Any] = Future()
    future.set_result(result)
    create: Any = c10d.__dict__["_create_work_from_future"]
    return create(future)


if __name__ == "__main__":  # a part of other benches
    print(__doc__)
