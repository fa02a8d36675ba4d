"""A packed micro-batch as tensors: the inputs of the network (Packed) and those of the objective (StepColumns).

Each row holds whole samples one after another. Positions restart at every sample and attention stays inside it, so a
packed row gives exactly the results of its samples alone. Logits are computed only where a response step is predicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from gcore.content.tokens import SamplingMask, Tokens, tokens_of
from gcore.training.varlen import rounded
from gcore.types import Key, MicroBatch, Sample

if TYPE_CHECKING:
    from gcore.training.context import Sharing
    from gcore.training.step_model import StepBatch

ColumnName = Literal["old_logprobs", "ref_logprobs", "ref_location", "values", "advantages", "returns"]


@dataclass(frozen=True, slots=True)
class Packed:
    """Implements step_model.StepBatch. R rows of W tokens; S response steps in all. The logits at flat positions
    `select_S` predict `targets_S`.

    With `sharing`, the inputs of the network are those of this rank: a part of the tokens and of the steps. `sample_S`
    and `keys` are of all steps.
    """

    tokens_RW: Tensor
    positions_RW: Tensor
    mask_R1WW: Tensor | None  # None: one sample per row, plain causal attention
    select_S: Tensor
    targets_S: Tensor
    temperature_S: Tensor
    sample_S: Tensor
    keys: tuple[tuple[int, int], ...]  # samples in the order of sample_S
    starts: Tensor | None = None  # varlen: where each sample of the one row begins, and the end; int32
    longest: int = 0  # varlen: of the samples, rounded up
    sampling_mask: tuple[Tensor, Tensor] | None = None  # ids_K, counts_S, as in content.tokens.SamplingMask
    is_padding: bool = False  # dummy batch so that this rank joins the collectives
    sharing: Sharing | None = None  # varlen: the ranks that have the other parts of the row
    experts_RWLK: Tensor | None = None  # of each token and router, as in content.tokens.Tokens; -1: not recorded

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """The arguments of LogprobModel.forward."""
        return (
            self.tokens_RW,
            self.positions_RW,
            self.mask_R1WW,
            self.select_S,
            self.targets_S,
            self.temperature_S,
            *(self.sampling_mask or (None, None)),
            self.starts,
            self.longest,
            self.sharing,
            self.experts_RWLK,
        )

    def joined(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of all steps, from those of LogprobModel.forward."""
        return outputs if self.sharing is None else self.sharing.join(*outputs)


@dataclass(frozen=True, slots=True)
class StepColumns:
    """What the objective knows about the steps of a micro-batch. `mask_S`: 1.0 where the step is an action."""

    mask_S: Tensor
    sample_S: Tensor  # index of each step's sample
    num_samples: int  # of this micro-batch
    rollout_logprobs_S: Tensor  # of the engine
    advantages_S: Tensor
    old_logprobs_S: Tensor | None = None  # of the policy before the update
    ref_logprobs_S: Tensor | None = None  # of the reference model
    ref_location_SD: Tensor | None = None  # of the reference model, see objective.StepOutputs
    rewards_B: Tensor | None = None  # of each sample: of a pair, the chosen answer has the higher one
    values_S: Tensor | None = None  # of the critic before the update
    returns_S: Tensor | None = None  # what the critic should predict

    def at_actions(self, values_S: Tensor) -> Tensor:
        """0 at all other steps, whatever is there. A product with the mask would leave NaN: NaN x 0 is NaN."""
        return torch.where(self.mask_S > 0, values_S, 0.0)

    def masked(self) -> StepColumns:
        """All columns at the actions."""
        names = ("rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "values", "returns")
        columns = {f"{name}_S": getattr(self, f"{name}_S") for name in names}
        masked: dict[str, Any] = {name: self.at_actions(each) for name, each in columns.items() if each is not None}
        return replace(self, **masked)


@dataclass(slots=True)
class StepData:
    """The samples of a rank in one training step, and the columns that the rank has computed: values per step."""

    samples: dict[Key, Sample] = field(default_factory=dict)
    columns: dict[ColumnName, dict[Key, Tensor]] = field(default_factory=dict)

    def clear(self) -> None:
        self.samples.clear()
        self.columns.clear()


def to_tensors(
    batch: MicroBatch,
    samples: Mapping[tuple[int, int], Sample],
    device: torch.device,
    varlen: bool = False,
    multiple: int = 1,
) -> Packed:
    """`varlen`: all samples in one row as long as they are, for attention that needs no mask (varlen.py). `multiple`:
    then, each sample is padded to a multiple of it, at its end."""

    def padded(length: int) -> int:
        return -(-length // multiple) * multiple

    if varlen:
        keys = tuple(key for row in batch.rows for key in row)
        total = sum(padded(samples[key].content.size) for key in keys)
        batch = MicroBatch((keys,) if keys else (), max(total, batch.width if not keys else 0))
    num_rows, width = max(len(batch.rows), 1), batch.width
    tokens = np.zeros((num_rows, width), np.int64)
    positions = np.zeros((num_rows, width), np.int64)
    segments = np.full((num_rows, width), -1, np.int64)
    select, ordered, contents, experts = [], list[Sample](), list[Tokens](), dict[tuple[int, int], np.ndarray]()
    for r, row in enumerate(batch.rows):
        start = 0
        for i, key in enumerate(row):
            sample, content = samples[key], tokens_of(samples[key].content)
            length, first = content.size, len(content.tokens_P)
            tokens[r, start : start + length] = content.tokens_T
            positions[r, start : start + length] = np.arange(length)
            segments[r, start : start + length] = i
            select.append(r * width + start + np.arange(first - 1, length - 1))
            ordered.append(sample)
            contents.append(content)
            if content.experts is not None:
                experts[r, start] = content.experts
            start += padded(length)
    if not ordered:
        return _padding(tokens, positions, device, varlen)
    segment_RW = torch.from_numpy(segments)
    mask = starts = None
    longest = 0
    if varlen:
        lengths = [padded(content.size) for content in contents]
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        longest = rounded(max(lengths))
    elif any(len(row) > 1 for row in batch.rows):
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        mask = ((segment_RW[:, :, None] == segment_RW[:, None, :]) & causal)[:, None].to(device)

    def steps(arrays: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device=device, dtype=dtype)

    return Packed(
        tokens_RW=torch.from_numpy(tokens).to(device),
        positions_RW=torch.from_numpy(positions).to(device),
        mask_R1WW=mask,
        select_S=steps(select, torch.int64),
        targets_S=steps([content.tokens_S for content in contents], torch.int64),
        temperature_S=steps([np.full(s.num_steps, s.temperature) for s in ordered], torch.float32),
        sample_S=steps([np.full(s.num_steps, i) for i, s in enumerate(ordered)], torch.int64),
        keys=tuple(s.key for s in ordered),
        sampling_mask=_sampling_mask(contents, device),
        starts=starts,
        longest=longest,
        experts_RWLK=_experts(experts, num_rows, width, device),
    )


def step_columns(packed: StepBatch, data: StepData, device: torch.device) -> StepColumns:
    """The columns of a packed micro-batch, in the order of its steps."""

    def column(name: ColumnName) -> Tensor | None:
        values = data.columns.get(name)
        if values is None:
            return None
        if packed.is_padding:  # also of a rank without any samples, whose columns are empty
            return torch.zeros(1, device=device)
        return torch.cat([values[key] for key in packed.keys]).to(device, torch.float32)

    def stored(arrays: list[np.ndarray]) -> Tensor:
        joined = np.concatenate(arrays).astype(np.float32) if arrays else np.zeros(1, np.float32)
        return torch.from_numpy(joined).to(device)

    samples = [] if packed.is_padding else [data.samples[key] for key in packed.keys]
    mask_S = stored([s.mask_S for s in samples])
    advantages_S = column("advantages")
    return StepColumns(
        mask_S=mask_S,
        sample_S=packed.sample_S,
        num_samples=len(packed.keys),
        rollout_logprobs_S=stored([s.rollout_logprobs_S for s in samples]),
        advantages_S=torch.zeros_like(mask_S) if advantages_S is None else advantages_S,
        rewards_B=torch.tensor([sample.reward or 0.0 for sample in samples], device=device),
        old_logprobs_S=column("old_logprobs"),
        ref_logprobs_S=column("ref_logprobs"),
        ref_location_SD=column("ref_location"),
        values_S=column("values"),
        returns_S=column("returns"),
    )


def _sampling_mask(contents: list[Tokens], device: torch.device) -> tuple[Tensor, Tensor] | None:
    mask = SamplingMask.joined(*((content.sampling_mask, content.num_steps) for content in contents))
    if mask is None:
        return None
    return torch.from_numpy(mask.ids_K).to(device, torch.int64), torch.from_numpy(mask.counts_S).to(device, torch.int64)


def _experts(
    found: Mapping[tuple[int, int], np.ndarray], num_rows: int, width: int, device: torch.device
) -> Tensor | None:
    """`found`: by the row and the place of a sample's first token."""
    if not found:
        return None
    shape = next(iter(found.values())).shape[1:]
    experts_RWLK = np.full((num_rows, width, *shape), -1, np.int16)
    for (row, start), experts in found.items():
        experts_RWLK[row, start : start + len(experts)] = experts
    return torch.from_numpy(experts_RWLK).to(device)


def _padding(tokens: np.ndarray, positions: np.ndarray, device: torch.device, varlen: bool) -> Packed:
    index = torch.zeros(1, dtype=torch.int64, device=device)
    return Packed(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(positions).to(device),
        None,
        index,
        index,
        torch.ones(1, device=device),
        index,
        ((-1, -1),),
        starts=torch.tensor([0, tokens.size], dtype=torch.int32, device=device) if varlen else None,
        longest=rounded(tokens.size) if varlen else 0,
        is_padding=True,
    )
