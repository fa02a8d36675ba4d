"""Layers that carry a state along the sequence: linear attention, state-space models, short convolutions, and attention
to entries that each stand for several tokens.

In a packed row the state must begin anew at every sample. The layers are causal, so a batch of samples that are padded
at their ends gives each sample what it has alone:

    packed rows [R, W] ──before──> samples [N, longest] ──the layer, as in transformers──> ──after──> packed rows [R, W]

Only these layers compute that batch; attention, norms and experts keep the packed rows. It costs the padding, so
memory and time grow with N x longest, and never with the square of the row.

On GPUs, layers with the gated delta rule read a row as it is, with the kernels of flash-linear-attention, which take
the cumulative lengths of its samples.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gcore.models.decoders import KINDS, Traits, layers_of, traits_of
from gcore.types import UserError

PACKED = ("cu_seq_lens_q", "seq_idx")  # arguments that describe packed rows
MIXERS = ("linear_attn", "mamba", "mixer", "conv", "self_attn")  # names in a layer of what carries the state
N_GRAMS = "ple"  # in a layer: features of a token and those before it, beside the state
ROWS = ("hidden_states", "position_ids", "position_embeddings")  # arguments with one value per token


def mixers_of(network: Any) -> list[nn.Module]:
    """The modules that carry a state, in the order of the layers."""
    kinds = traits_of(network.config).kinds
    layers = [layer for kind, layer in zip(kinds, layers_of(network)[1], strict=True) if KINDS[kind].state]
    mixers = [next(m for name in MIXERS if (m := getattr(layer, name, None)) is not None) for layer in layers]
    return mixers + [m for layer in layers if (m := getattr(layer, N_GRAMS, None)) is not None]


class Samples:
    """Where the samples of packed rows are: the flat positions of their tokens.
    Samples((1, 8), [array([0, 1, 2]), array([3, 4])])"""

    def __init__(self, shape: Sequence[int], paths: Sequence[np.ndarray], device: Any) -> None:
        self._shape = shape  # rows and their width
        longest = max(map(len, paths))
        index_NL = torch.from_numpy(np.stack([np.pad(path, (0, longest - len(path)), "edge") for path in paths]))
        lengths_N1 = torch.tensor([len(path) for path in paths])[:, None]
        inside = (torch.arange(longest) < lengths_N1).flatten().nonzero()[:, 0]
        self._index_NL, self._inside = index_NL.to(device), inside.to(device)
        self._tokens = index_NL.flatten()[inside].to(device)

    def batch(self, rows: Any) -> Any:
        """[samples, longest, ...] of a tensor, or of all tensors in a tuple or a dict. A shorter sample is padded with
        its last token."""
        if isinstance(rows, dict):
            return {name: self.batch(part) for name, part in rows.items()}
        if isinstance(rows, tuple):
            return tuple(self.batch(part) for part in rows)
        return rows.flatten(0, 1)[self._index_NL] if isinstance(rows, Tensor) else rows

    def masks(self, traits: Traits, dtype: torch.dtype) -> dict[str, Tensor]:
        """Of attention in this batch."""
        num_samples, longest = self._index_NL.shape
        at_L = torch.arange(longest, device=self._index_NL.device)
        masks = traits.masks(at_L <= at_L[:, None], at_L[:, None], dtype)
        return {kind: mask.expand(num_samples, 1, longest, longest) for kind, mask in masks.items()}

    def rows(self, batch_NLD: Tensor) -> Tensor:
        flat = batch_NLD.flatten(0, 1)
        rows = flat.new_zeros(self._shape[0] * self._shape[1], flat.shape[1])
        return rows.index_copy(0, self._tokens, flat[self._inside]).view(*self._shape, -1)


def takes_lengths(mixer: nn.Module) -> bool:
    """Whether this layer computes a packed row exactly when it is called with `cu_seq_lens_q`. Two functions of its
    module are replaced: transformers' own convolution ignores them, and in compiled layers its delta rule is the loop
    in PyTorch, because torch 2.11 compiles `is_exporting()` as True."""
    module: Any = sys.modules[type(mixer).__module__]
    if not hasattr(module, "torch_chunk_gated_delta_rule") or find_spec("fla") is None:
        return False
    _check_triton()
    if not hasattr(module.causal_conv1d_fn, "for_rows"):
        from fla.modules.norm.l2norm import l2norm_bwd_kernel, l2norm_fwd_kernel
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        for kernel in (l2norm_fwd_kernel, l2norm_bwd_kernel):
            kernel.keys = ["D"]  # not the number of tokens, for which its variants would be measured again and again
        module.torch_chunk_gated_delta_rule = torch.compiler.disable(chunk_gated_delta_rule)
        module.causal_conv1d_fn = _convolution(module.causal_conv1d_fn)
    return True


def choose_variants(mixer: nn.Module, hidden: int, device: str, dtype: torch.dtype, width: int = 4096) -> None:
    """Triton compiles and measures all variants of the kernels of a layer when it is first computed, which takes two
    minutes on a new host. Here engines start in the meantime; in the first update all would wait for it."""
    generator = torch.Generator(device).manual_seed(0)  # the global one stays as it is
    layer = copy.deepcopy(mixer).to_empty(device=device).to(dtype)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.02, generator=generator)
    rows = torch.randn(1, width, hidden, generator=generator, device=device, dtype=dtype).requires_grad_()
    starts = torch.arange(0, width + 1, width // 4, device=device, dtype=torch.int32)
    output = layer(rows, cu_seq_lens_q=starts)
    (output[0] if isinstance(output, tuple) else output).sum().backward()


def _convolution(of_rows: Callable[..., Tensor]) -> Callable[..., Tensor]:
    from fla.modules.causal_conv1d import causal_conv1d

    @torch.compiler.disable
    def of_samples(values_RDW: Tensor, weight: Tensor, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        if (starts := kwargs.get("cu_seq_lens_q")) is None:
            return of_rows(values_RDW, weight, bias, **kwargs)
        activation, rows_RWD = kwargs.get("activation"), values_RDW.transpose(1, 2)
        output: Tensor = causal_conv1d(rows_RWD, weight, bias, activation=activation, cu_seqlens=starts)[0]
        return output.transpose(1, 2)

    of_samples.for_rows = of_rows
    return of_samples


def _check_triton() -> None:
    """flash-linear-attention refuses its backward pass here, minutes after the start of a run."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9 or find_spec("tilelang") is not None:
        return
    import triton

    found = triton.__version__
    if Version("3.4") <= Version(found) < Version("3.7.1"):
        raise UserError(
            f"the layers with linear attention of this model cannot be trained on this GPU with Triton {found}: it "
            "compiles the kernels of flash-linear-attention wrongly; expected triton>=3.7.1 (torch>=2.13 has it), or "
            "the package tilelang"
        )


class Recurrence:
    """Makes the recurrent layers of a network compute `samples`. None: each row is one sequence, or the layers take
    the lengths of its samples (`takes_lengths`)."""

    def __init__(self, network: Any, on_gpu: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        self.samples: Samples | None = None
        self.mixers, self._traits = mixers_of(network), traits_of(network.config)
        self.takes_lengths = on_gpu and all(takes_lengths(mixer) for mixer in self.mixers)
        if self.takes_lengths and not any(isinstance(p, DTensor) for p in self.mixers[0].parameters()):
            choose_variants(self.mixers[0], network.config.get_text_config().hidden_size, "cuda", dtype)
        for mixer in self.mixers if not self.takes_lengths else ():
            # compiled, the loops of transformers' own PyTorch path would be unrolled
            mixer.forward = torch.compiler.disable(mixer.forward)  # type: ignore[method-assign]
            mixer.register_forward_pre_hook(self._before, with_kwargs=True)
            mixer.register_forward_hook(self._after)

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.samples is None:
            return None
        batched = {name: self.samples.batch(kwargs[name]) for name in ROWS if name in kwargs}
        if (mask := kwargs.get("attention_mask")) is not None and mask.dim() == 2:
            batched["attention_mask"] = self.samples.batch(mask)
        elif mask is not None:
            (batched["attention_mask"],) = self.samples.masks(self._traits, mask.dtype).values()
        kwargs = {name: value for name, value in kwargs.items() if name not in PACKED}
        return self.samples.batch(args), {**kwargs, **batched}

    def _after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.samples is None:
            return None
        if isinstance(output, tuple):
            return (self.samples.rows(output[0]), *output[1:])
        return self.samples.rows(output)
