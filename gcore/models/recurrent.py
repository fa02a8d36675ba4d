"""Layers that carry a state along the sequence: linear attention, state-space models, short convolutions.

In a packed row the state must begin anew at every sample. The layers are causal, so a batch of samples that are padded
at their ends gives each sample what it has alone:

    packed rows [R, W] ──before──> samples [N, longest] ──the layer, as in transformers──> ──after──> packed rows [R, W]

Only these layers compute that batch; attention, norms and experts keep the packed rows. It costs the padding, so
memory and time grow with N x longest, and never with the square of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gcore.models.decoders import KINDS, decoder_of, traits_of

PACKED = ("cu_seq_lens_q", "seq_idx")  # arguments that describe packed rows
MIXERS = ("linear_attn", "mamba", "mixer", "conv", "self_attn")  # names in a layer of what carries the state


def mixers_of(network: Any) -> list[nn.Module]:
    """The modules that carry a state, in the order of the layers."""
    kinds = traits_of(network.config).kinds
    layers = [layer for kind, layer in zip(kinds, decoder_of(network).layers, strict=True) if KINDS[kind].state]
    return [next(m for name in MIXERS if (m := getattr(layer, name, None)) is not None) for layer in layers]


class Samples:
    """Where the samples of packed rows are: the flat positions of their first tokens, and their lengths.
    Samples((1, 8), [0, 3], [3, 2])"""

    def __init__(self, shape: Sequence[int], starts: Sequence[int], lengths: Sequence[int], device: Any) -> None:
        self._shape = shape  # rows and their width
        at_L, lengths_N1 = torch.arange(max(lengths)), torch.tensor(lengths)[:, None]
        index_NL = torch.tensor(starts)[:, None] + torch.minimum(at_L, lengths_N1 - 1)
        inside = (at_L < lengths_N1).flatten().nonzero()[:, 0]
        self._index_NL, self._inside = index_NL.to(device), inside.to(device)
        self._tokens = index_NL.flatten()[inside].to(device)

    def batch(self, rows_RWD: Tensor) -> Tensor:
        """[samples, longest, D]. A shorter sample is padded with its last token."""
        return rows_RWD.flatten(0, 1)[self._index_NL]

    def rows(self, batch_NLD: Tensor) -> Tensor:
        flat = batch_NLD.flatten(0, 1)
        rows = flat.new_zeros(self._shape[0] * self._shape[1], flat.shape[1])
        return rows.index_copy(0, self._tokens, flat[self._inside]).view(*self._shape, -1)


class Recurrence:
    """Makes the recurrent layers of a network compute `samples`. None: each row is one sequence."""

    def __init__(self, network: Any) -> None:
        self.samples: Samples | None = None
        self.mixers = mixers_of(network)
        for mixer in self.mixers:
            # compiled, the loops of transformers' own PyTorch path would be unrolled
            mixer.forward = torch.compiler.disable(mixer.forward)  # type: ignore[method-assign]
            mixer.register_forward_pre_hook(self._before, with_kwargs=True)
            mixer.register_forward_hook(self._after)

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.samples is None:
            return None
        kwargs = {name: value for name, value in kwargs.items() if name not in PACKED}
        if args:
            return (self.samples.batch(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.samples.batch(kwargs["hidden_states"])}

    def _after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.samples is None:
            return None
        if isinstance(output, tuple):
            return (self.samples.rows(output[0]), *output[1:])
        return self.samples.rows(output)
