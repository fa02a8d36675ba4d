"""The interface between a backend and what a network computes: a micro-batch of samples -> values for each step.

    samples ──StepModel.pack──> StepBatch ──StepModel(batch)──> outputs ──StepBatch.joined──> of all steps

A backend shards, compiles and optimizes networks. It does not know whether a step is a token or a denoising step: it
calls a StepModel, which wraps the network. Implementation for language models: logprob_model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from gcore.types import Key, MicroBatch, Sample

if TYPE_CHECKING:
    from gcore.training.context import RowGroup


@dataclass(frozen=True, slots=True)
class Compute:
    """How a rank computes its networks. Compute(torch.device("cuda", 0), torch.bfloat16, compiled=True)"""

    device: torch.device
    dtype: torch.dtype
    compiled: bool = False
    tensor_size: int = 1  # ranks that split each matrix
    context_attention: Literal["auto", "ulysses", "ring"] = "auto"
    context: int = 1  # the largest number of ranks that will share a micro-batch, a power of two


ON_CPU = Compute(torch.device("cpu"), torch.float32)


class StepBatch(Protocol):
    """A micro-batch as tensors: the input of its StepModel, and which step belongs to which sample."""

    @property
    def sample_S(self) -> Tensor:
        """Of each step, the index of its sample in `keys`."""

    @property
    def keys(self) -> tuple[Key, ...]: ...

    @property
    def is_padding(self) -> bool:
        """A dummy batch of one step, so that a rank without samples joins the collectives."""

    def joined(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of all steps, from those of this rank's part of the micro-batch."""


class StepModel(Protocol):
    """A torch module around a network. Called with a StepBatch, it returns the fields of objective.StepOutputs, such
    as the logprob of each step."""

    network: Any  # its parameters have the names under which engines know them

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers that are sharded and compiled, in order."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def padded(self) -> bool:
        """Micro-batches are computed as rows of equal width; False: samples as long as they are."""

    @property
    def unshared(self) -> str:
        """Why samples that are neighbours in a row cannot share their prefixes; empty: they can."""

    def checkpoint_activations(self) -> None:
        """Recompute the layers in the backward pass."""

    def pack(self, micro: MicroBatch, samples: Mapping[Key, Sample], ranks: RowGroup) -> StepBatch:
        """`ranks`: those that compute the micro-batch together."""


Wrap = Callable[[Any, Compute], Any]  # network -> StepModel, as a torch module
