"""The interface of a kind of policy: what the rest of a run asks where language models and diffusion models differ.

    config ──kind_of (table.py)──> PolicyKind ──> checks and memory before the run (launch)
                                              ├──> prompts, sampling parameters, cost of samples (controllers)
                                              ├──> an engine, the backend of a trainer rank (their processes)
                                              └──> the exported model (checkpoint)

Each process makes its own. Packages that only some kinds need are imported inside the methods.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gcore.content.base import Modality
from gcore.types import Topology

if TYPE_CHECKING:
    import torch

    from gcore.cost.workload import CostModel
    from gcore.generation.spec import EngineSpec
    from gcore.protocols import Engine, TrainerInfo
    from gcore.training.backend import Backend


class PolicyKind(Protocol):
    """A policy of one kind, for one configuration. Methods that say "light" import no torch."""

    # ---- before the run ----

    @property
    def unscored(self) -> str:
        """Why --dry-run cannot call rewards. Empty: it can, with answers that it makes up."""
        ...

    @property
    def media(self) -> tuple[str, ...]:
        """The kinds of media that prompts may have. Light."""
        ...

    def check(self, topology: Topology, trains: bool) -> list[str]:
        """Light checks of which keys fit. Raises UserError; returns warnings. `trains`: the run has trainer ranks."""
        ...

    def check_network(self) -> None:
        """Checks of the network without its weights. Raises UserError."""
        ...

    def unshared(self) -> str:
        """Why trainer ranks cannot compute once what samples have in common; empty: they can."""
        ...

    @property
    def activation_bytes(self) -> float | None:
        """Of one sample, if they alone decide about the memory of trainer ranks. None: the shape of a language model
        does (launch/gpu_memory.py). Light."""
        ...

    # ---- prompts and samples ----

    @property
    def tokenizer(self) -> Any:
        """None: prompts have no tokens."""
        ...

    def templater(self, split: Literal["train", "eval"], eval_set: str = "") -> Any:
        """What makes prompts of the rows of a dataset: prompts.source.Templater, or an object with its methods."""
        ...

    def modalities(self) -> tuple[Modality, Modality]:
        """For training, and with other sampling parameters for evaluations."""
        ...

    def take_media_bytes(self) -> int:
        """Of the media that prompts had since the last call."""
        ...

    def cost_model(self, info: TrainerInfo) -> CostModel:
        """Of a sample, for the layout over trainer ranks."""
        ...

    # ---- roles ----

    @property
    def engines_sleep(self) -> bool:
        """Whether engines can free the memory of their device."""
        ...

    def engine(self, spec: EngineSpec) -> Engine:
        """A replica of the policy, in its own process."""
        ...

    def backend(self, topology: Topology, shard: int, device: torch.device, dtype: torch.dtype) -> Backend:
        """Of a trainer rank, in its compute thread. `shard`: data-parallel ranks that share one copy of the weights."""
        ...

    # ---- after the run ----

    def export(self, checkpoint: Path, folder: Path, adapters: Path) -> int:
        """Writes the policy, with adapters merged, to `folder`, and the adapters alone to `adapters`. Returns the
        number of tensors, which were read again and compared."""
        ...
