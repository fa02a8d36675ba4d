"""AdamW over sharded parameters, and the norm of their gradients.

    gradients ──norm over all ranks──> clipped ──> AdamW, one part after another ──> weights
                                                    └──moments: on the device, or in host memory between their steps

Parameters that are split over different groups of ranks (tensor parallel or not) cannot be updated by one kernel, so a
part holds parameters of one kind. With `offload`, the moments of a part are on the device only while it is updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from gcore.checkpoint.tensors import Hold
from gcore.config.training import Training
from gcore.training.shards import local_of

MOMENTS = ("exp_avg", "exp_avg_sq")
PART_BYTES = 2**32  # of the two moments of a part that is off-loaded; a larger parameter is a part of its own


class Optimizer:
    """`offload`: keep the moments in host memory. `scales`: of the learning rates of some parameters."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        training: Training,
        device: torch.device,
        offload: bool = False,
        scales: Mapping[Tensor, float] | None = None,
    ) -> None:
        self._scales = dict(scales or {})
        self._parameters, self._max_norm, self._device = list(parameters), training.max_grad_norm, device
        self._fused, self._offload = device.type == "cuda", offload
        self._host: dict[torch.optim.AdamW, Tensor] = {}  # memory of off-loaded moments
        self.holds: dict[Tensor, Hold] = {}  # by parameter: of off-loaded moments, which checkpoints do not copy
        self._parts = [
            torch.optim.AdamW(
                self._groups(part, training),
                lr=training.lr,
                betas=training.betas,
                eps=training.eps,
                fused=self._fused,
            )
            for part in _parts(self._parameters, PART_BYTES if offload else None)
        ]
        for part in self._parts if offload else ():
            self.holds |= dict.fromkeys(_parameters_of(part), Hold())

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
                self._update(part)
        self.drop_gradients()
        return float(norm)

    def is_finite(self) -> bool:
        return is_finite(self._parameters)

    def drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _update(self, part: torch.optim.AdamW) -> None:
        if self._offload:
            self.holds[next(_parameters_of(part))].wait()
            for moment in _moments(part):
                _set_local(moment, local_of(moment).to(self._device, non_blocking=True))
        part.step()
        if self._offload:
            self._to_host(part)

    def _to_host(self, part: torch.optim.AdamW) -> None:
        """Into one pinned buffer per part, which is kept: PyTorch rounds every pinned allocation up to a power of 2."""
        moments = list(_moments(part))
        sizes = [local_of(moment).numel() for moment in moments]
        if self._device.type == "cpu" or not moments:
            return
        if part not in self._host or len(self._host[part]) < sum(sizes):
            self._host[part] = torch.empty(sum(sizes), pin_memory=True)
        for moment, buffer in zip(moments, self._host[part][: sum(sizes)].split(sizes), strict=True):
            _set_local(moment, buffer.view(local_of(moment).shape).copy_(local_of(moment), non_blocking=True))
        torch.cuda.current_stream(self._device).synchronize()

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
        step = torch.zeros((), device=self._device if self._fused else "cpu")
        entry: dict[str, Any] = {"step": step, **{name: torch.zeros_like(parameter) for name in MOMENTS}}
        if self._offload:
            for name in MOMENTS:
                _set_local(entry[name], local_of(entry[name]).cpu())
        part.state[parameter] = entry


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
    """Parameters of one mesh, in order; with `max_bytes`, in parts whose moments are at most so large. Most parts are
    just below that power of 2, to which PyTorch rounds up their pinned memory."""

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


def _parameters_of(part: torch.optim.AdamW) -> Iterator[Tensor]:
    return (parameter for group in part.param_groups for parameter in group["params"])


def _moments(part: torch.optim.AdamW) -> Iterator[Tensor]:
    for entry in part.state.values():
        for name in MOMENTS:
            yield entry[name]


def _set_local(tensor: Tensor, values: Tensor) -> None:
    """Replace the memory of a tensor. The sharding of a DTensor stays."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = values
    else:
        tensor.data = values
