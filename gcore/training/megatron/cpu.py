"""What Megatron-Core 0.16 needs to run on a CPU with gloo: `patch` and `building`. Neither is used on a GPU.

Each change replaces a call that names CUDA although its result does not depend on it. `without_transformer_engine` is
for both: it defines a name that the router of experts tests for None and that is missing if the package is. So is
`without_warnings`: compiled layers would break where Megatron warns that a group was not given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


class _Torch:
    """The name `torch` in a module of Megatron that writes device="cuda" for small flags and counters."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("tensor", "zeros"):
            return found
        return lambda *args, **options: found(*args, **(options | ({"device": "cpu"} if "device" in options else {})))


def patch() -> None:
    """For the whole process, once. A process without a GPU has no use for what is replaced: it raises there."""
    import megatron.core.distributed.param_and_grad_buffer as buffers
    import megatron.core.optimizer.optimizer as optimizer
    import megatron.core.pipeline_parallel.schedules as schedules
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    cpu = torch.device("cpu")
    # Megatron allocates its buffers with `device=torch.cuda.current_device()`.
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]
    # The pipeline waits for CUDA after it has received a tensor; gloo has waited already.
    torch.cuda.synchronize = lambda device=None: None
    # Recomputation restores the random state of CUDA. There is no dropout, and no CUDA.
    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **options: None
    # gloo cannot coalesce collectives: they run one after another.
    buffers._coalescing_manager = lambda *args, **options: nullcontext()
    # A counter of tokens and a flag for overflows are made on "cuda".
    schedules.torch = optimizer.torch = _Torch()
    # The dispatcher of experts makes a stream, in which it copies counts to the host: they are there.
    dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
    dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _to_lists


def without_transformer_engine() -> None:
    import megatron.core.transformer.moe.moe_utils as moe

    if not hasattr(moe, "te_general_gemm"):
        moe.te_general_gemm = None


def without_warnings() -> None:
    import megatron.core.tensor_parallel.layers as layers
    from megatron.core import parallel_state

    def group_of(given: Any, is_expert: bool = False, check_initialized: bool = True) -> Any:
        if given is not None or not parallel_state.is_initialized():
            return given
        kind = "expert_tensor_parallel" if is_expert else "tensor_model_parallel"
        return getattr(parallel_state, f"get_{kind}_group")(check_initialized=check_initialized)

    layers.get_tensor_model_parallel_group_if_none = group_of


def _to_lists(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """The counts of an all-to-all, as numbers, at the point where they are known."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(counts := getattr(dispatcher, name), torch.Tensor):
                setattr(dispatcher, name, counts.numpy())
    return tokens_per_expert


@contextmanager
def building() -> Iterator[None]:
    """While models and optimizers are made: tied weights of a pipeline are moved by `.cuda()`, and an optimizer
    recognises float32 by the name of the CUDA type."""
    before: tuple[Any, Any] = torch.Tensor.type, torch.Tensor.cuda

    def type_of(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = before[0](tensor, *args, **options)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    def unmoved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    torch.Tensor.type, torch.Tensor.cuda = type_of, unmoved  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type, torch.Tensor.cuda = before  # type: ignore[method-assign]
