"""AdamW over sharded parameters, and the norm of their gradients.

    gradients ──norm over all ranks──> clipped ──> AdamW, one part after another ──> weights
                                                    └──moments: on the device, or in host memory between their steps

Parameters that are split over different groups of ranks (tensor parallel or not) cannot be updated by one kernel, so a
part holds parameters of one kind. With `offload`, the moments of a part are on the device only while it is updated:

    stream `up`                host ──moments of part k + 1──> slot
    compute                              AdamW of part k, in another slot
    stream `down`                        host <──moments of part k - 1── a third slot

The link to the host carries both directions at the same time, so a step takes as long as one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from gcore.checkpoint.tensors import Hold
from gcore.config.training import Training
from gcore.training.shards import local_of

MOMENTS = ("exp_avg", "exp_avg_sq")
PART_BYTES = 2**30  # of the two moments of a part that is off-loaded; a larger parameter is a part of its own
SLOTS = 3  # memory on the device for a part each; a larger parameter takes the first
BLOCK_BYTES = 2**32  # of pinned host memory: PyTorch rounds every pinned allocation up to a power of 2
ALIGN = 64  # elements: moments begin at multiples of it, for kernels that read several at a time


class Optimizer:
    """`offload`: keep the moments in host memory, all but about `keep_bytes`. `scales`: of the learning rates of some
    parameters."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        training: Training,
        device: torch.device,
        offload: bool = False,
        scales: Mapping[Tensor, float] | None = None,
        keep_bytes: float = 0.0,
    ) -> None:
        self._scales = dict(scales or {})
        self._parameters, self._max_norm, self._device = list(parameters), training.max_grad_norm, device
        self._fused = device.type == "cuda"
        parts = list(_parts(self._parameters, PART_BYTES if offload else None))
        self._parts = [
            torch.optim.AdamW(
                self._groups(part, training),
                lr=training.lr,
                betas=training.betas,
                eps=training.eps,
                fused=self._fused,
            )
            for part in parts
        ]
        self._host = HostMoments(_beyond(parts, keep_bytes), device) if offload else None

    @property
    def holds(self) -> Mapping[Tensor, Hold]:
        """By parameter: of off-loaded moments, which checkpoints may read where they are."""
        return self._host.holds if self._host is not None else {}

    def _groups(self, part: Sequence[Tensor], training: Training) -> list[dict[str, Any]]:
        """Groups of one weight decay and one scale of the learning rate. Parameters with fewer than two dimensions
        (norms, biases) decay only with weight_decay_norms."""
        groups: dict[tuple[float, bool], list[Tensor]] = {}
        for p in part:
            decays = p.ndim >= 2 or training.weight_decay_norms
            groups.setdefault((self._scales.get(p, 1.0), not decays), []).append(p)
        return [
            {"params": params, "weight_decay": 0.0 if fixed else training.weight_decay, "scale": scale}
            for (scale, fixed), params in sorted(groups.items(), key=lambda item: item[0])
        ]

    def step(self, lr: float) -> float:
        """Clip the gradients, update, drop the gradients. Returns the norm; if it is not finite, nothing changes."""
        norm = grad_norm(self._parameters)
        gradients = [local_of(p.grad) for p in self._parameters if p.grad is not None]
        torch._foreach_mul_(gradients, (self._max_norm / (norm + 1e-6)).clamp(max=1.0))
        finite = torch.isfinite(norm)
        # With fused kernels the host does not wait for the norm: the kernel skips gradients that are not finite.
        if self._fused or bool(finite):
            for part in self._parts:
                for group in part.param_groups:
                    group["lr"] = lr * group["scale"]
                if self._fused:
                    cast(Any, part).found_inf = (~finite).float()
            if self._host is None:
                for part in self._parts:
                    part.step()
            else:
                self._update_off_loaded(self._host)
        self.drop_gradients()
        return float(norm)

    def _update_off_loaded(self, host: HostMoments) -> None:
        kept = len(self._parts) - host.num_parts  # the first ones, whose moments stay on the device
        for part in self._parts[:kept]:
            part.step()
        with host.passing() as carry:
            for number, part in enumerate(self._parts[kept:]):
                updated = [p for p in _parameters_of(part) if p.grad is not None]
                new = {parameter for parameter in updated if parameter not in part.state}
                for parameter in new:
                    part.state[parameter] = self._entry(parameter)
                with carry(number, {parameter: part.state[parameter] for parameter in updated}, new):
                    part.step()

    def is_finite(self) -> bool:
        return is_finite(self._parameters)

    def drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Moments and step count of each parameter that was updated."""
        return {parameter: entry for part in self._parts for parameter, entry in part.state.items()}

    @property
    def num_moments(self) -> int:
        """The same on all ranks."""
        return len(MOMENTS) * len(self.state)

    def clear(self) -> None:
        for part in self._parts:
            part.state.clear()

    def add_state(self, parameter: Tensor) -> None:
        """Moments of zero and a step count of 0, as those of a parameter that was never updated; to be overwritten."""
        part = next(part for part in self._parts if any(parameter is each for each in _parameters_of(part)))
        entry = part.state[parameter] = self._entry(parameter)
        if self._host is not None and parameter in self._host.holds:
            for name, home in self._host.of(parameter).items():
                _set_local(entry[name], home.zero_())

    def _entry(self, parameter: Tensor) -> dict[str, Any]:
        step = torch.zeros((), device=self._device if self._fused else "cpu")
        return {"step": step, **{name: torch.zeros_like(parameter) for name in MOMENTS}}


class HostMoments:
    """Host memory of the moments of all parts, and their way over the device."""

    def __init__(self, parts: Sequence[Sequence[Tensor]], device: torch.device) -> None:
        self._device, self._sizes = device, [sum(2 * _room(local_of(p)) for p in part) for part in parts]
        self._blocks, self._sized = list[Tensor | None](), list[int]()  # memory is allocated when it is first used
        self._places: dict[Tensor, list[tuple[int, int]]] = {}  # block and offset of each moment
        self.holds: dict[Tensor, Hold] = {}
        for part in parts:
            self.holds |= dict.fromkeys(part, Hold())
            for parameter in part:
                self._places[parameter] = [self._place(_room(local_of(parameter))) for _ in MOMENTS]

    @property
    def num_parts(self) -> int:
        return len(self._sizes)

    def _place(self, size: int) -> tuple[int, int]:
        """In the first block that has room."""
        for number, used in enumerate(self._sized):
            if 4 * (used + size) <= BLOCK_BYTES:
                self._sized[number] += size
                return number, used
        self._blocks.append(None)
        self._sized.append(size)
        return len(self._sized) - 1, 0

    def of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Where its moments are, as this rank holds them."""
        shape, found = local_of(parameter).shape, {}
        for name, (number, start) in zip(MOMENTS, self._places[parameter], strict=True):
            block = self._blocks[number]
            if block is None:
                pinned = self._device.type == "cuda"
                block = torch.empty(self._sized[number], dtype=torch.float32, pin_memory=pinned)
                self._blocks[number] = block
            found[name] = block[start : start + shape.numel()].view(shape)
        return found

    @contextmanager
    def passing(self) -> Iterator[Callable[..., AbstractContextManager[None]]]:
        """Yields `carry`, for one part after another. At the end all moments are in host memory."""
        device, (compute, up, down) = self._device, _streams(self._device)
        most = max(self._sizes, default=0)
        largest = [min(most, PART_BYTES // 4) if i else most for i in range(min(SLOTS, len(self._sizes)))]
        slots = [torch.empty(size, dtype=torch.float32, device=device) for size in largest]
        # When the last part has left a slot: the memory is that of tensors which the compute stream may still use.
        free: list[Any] = [compute.record_event() if compute is not None else None] * len(slots)

        @contextmanager
        def carry(number: int, entries: Mapping[Tensor, Mapping[str, Any]], new: Set[Tensor]) -> Iterator[None]:
            """The moments of part `number` are on the device in this context. `new`: parameters whose moments are 0."""
            turn = number % len(slots) if self._sizes[number] <= PART_BYTES // 4 else 0
            homes = {parameter: self.of(parameter) for parameter in entries}
            pairs, start = list[tuple[Tensor, Tensor, Any, bool]](), 0  # slot, host, moment, is it new
            for parameter, entry in entries.items():
                for name, home in homes[parameter].items():
                    view = slots[turn][start : start + home.numel()].view(home.shape)
                    pairs.append((view, home, entry[name], parameter in new))
                    start += _room(home)
            with _on(up, free[turn]):
                for view, home, _, is_new in pairs:
                    if not is_new:
                        view.copy_(home, non_blocking=True)
            _follow(compute, up)
            for view, _, moment, is_new in pairs:
                _set_local(moment, view.zero_() if is_new else view)
            yield
            for parameter in list(entries)[:1]:
                self.holds[parameter].wait()  # a checkpoint may still be written from there
            with _on(down, compute.record_event() if compute is not None else None):
                for view, home, moment, _ in pairs:
                    _set_local(moment, home.copy_(view, non_blocking=True))
            free[turn] = down.record_event() if down is not None else None

        yield carry
        if down is not None:
            down.synchronize()


def grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Of the gradients of all ranks together; the same number on every rank. A collective."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch._foreach_norm([local_of(gradient) for gradient in gradients])
    copies = torch.tensor([_num_copies(gradient) for gradient in gradients], device=norms[0].device)
    total = (torch.stack(norms).double() ** 2 / copies).sum()
    dist.all_reduce(total)
    return total.sqrt().float()


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """What this rank holds of them. The largest element of a tensor tells, and needs no memory."""
    held = [local for tensor in tensors if (local := local_of(tensor)).numel()]
    return not held or bool(torch.stack(torch._foreach_norm(held, torch.inf)).isfinite().all())


def _num_copies(tensor: Tensor) -> int:
    """Number of ranks that hold the same elements."""
    world = dist.get_world_size()
    if not isinstance(tensor, DTensor):
        return world
    mesh, copies = tensor.device_mesh, world // tensor.device_mesh.size()
    for dim, placement in enumerate(tensor.placements):
        copies *= mesh.size(dim) if isinstance(placement, Replicate) else 1
    return copies


def _parts(parameters: Sequence[Tensor], max_bytes: int | None) -> Iterator[list[Tensor]]:
    """Parameters of one mesh, in order; with `max_bytes`, in parts whose moments are at most so large."""

    def mesh_of(parameter: Tensor) -> str:
        return str(parameter.device_mesh) if isinstance(parameter, DTensor) else ""

    for mesh in dict.fromkeys(map(mesh_of, parameters)):
        part, size = list[Tensor](), 0
        for parameter in (parameter for parameter in parameters if mesh_of(parameter) == mesh):
            own = 8 * local_of(parameter).numel()
            if part and max_bytes is not None and size + own > max_bytes:
                yield part
                part, size = [], 0
            part.append(parameter)
            size += own
        yield part


def _beyond(parts: Sequence[Sequence[Tensor]], num_bytes: float) -> Sequence[Sequence[Tensor]]:
    """The parts whose moments leave the GPU: all but the first ones, which fit into these bytes."""
    for number, part in enumerate(parts):
        num_bytes -= sum(8 * local_of(parameter).numel() for parameter in part)
        if num_bytes < 0:
            return parts[number:]
    return []


def _room(tensor: Tensor) -> int:
    """Elements that its moment takes in a block."""
    return -(-tensor.numel() // ALIGN) * ALIGN


def _parameters_of(part: torch.optim.AdamW) -> Iterator[Tensor]:
    return (parameter for group in part.param_groups for parameter in group["params"])


def _streams(device: torch.device) -> tuple[Any, Any, Any]:
    """That of the computation, and two more. None: the device has no streams."""
    if device.type != "cuda":
        return None, None, None
    return torch.cuda.current_stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device)


@contextmanager
def _on(stream: Any, after: Any) -> Iterator[None]:
    """On a stream of a GPU, after an event; None: there are no streams."""
    if stream is None:
        yield
    else:
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield


def _follow(stream: Any, other: Any) -> None:
    if stream is not None:
        stream.wait_stream(other)


def _set_local(tensor: Tensor, values: Tensor) -> None:
    """Replace the memory of a tensor. The sharding of a DTensor stays."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = values
    else:
        tensor.data = values
