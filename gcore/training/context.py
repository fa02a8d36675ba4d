"""Context parallelism: the ranks of a group compute one row together; each has a part of every sample.

    row of T tokens ──split──> L = T / k tokens per rank ──network, whose attention exchanges within the group──>
        outputs of this rank's steps ──join──> outputs of all steps, on every rank of the group ──> objective

The size k of the group comes with each micro-batch (MicroBatch.context): neighbouring data-parallel ranks form groups.
Weights are sharded as for k = 1. Every rank has all samples of its group and computes the same loss over all steps;
`join` passes only the gradients of a rank's own steps back. So the gradients of parameters add up over the ranks of a
group as they add up over groups.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gcore.models.decoders import FULL, SLIDING, implementation, traits_of
from gcore.training.varlen import Spans
from gcore.types import UserError

if TYPE_CHECKING:
    from gcore.training.logprob_model import Packed

Method = Literal["ulysses", "ring"]
KEY = "training.context_attention"


class RowGroup(NamedTuple):
    """The ranks that share a row. Of the last two ranks of four, on the first: RowGroup(..., (2, 3), 0)"""

    group: Any
    members: tuple[int, ...]  # their global ranks
    position: int  # of this rank among them

    @property
    def size(self) -> int:
        return len(self.members)


class ContextGroups:
    """Makes the process groups of each size when a micro-batch first needs them. A collective: at one position all
    ranks have micro-batches of the same size. RowGroup with different shares of the matrices (`tensor_size`) are in
    different groups, as are those of different stages of a pipeline (`stages`)."""

    def __init__(self, data_size: int, tensor_size: int, stages: int = 1) -> None:
        self._data_size, self._tensor_size, self._stages = data_size, tensor_size, stages
        self._found = {1: RowGroup(None, (dist.get_rank(),), 0)}

    def of(self, size: int) -> RowGroup:
        assert self._data_size % size == 0, f"groups of {size} ranks do not divide {self._data_size}"
        if size not in self._found:
            me = dist.get_rank()
            copies = self._data_size * self._stages
            for first, tensor in itertools.product(range(0, copies, size), range(self._tensor_size)):
                members = tuple((first + i) * self._tensor_size + tensor for i in range(size))
                group = dist.new_group(list(members))
                if me in members:
                    self._found[size] = RowGroup(group, members, members.index(me))
        return self._found[size]


def choose_method(config: Any, size: int, tensor_size: int, wanted: Literal["auto", "ulysses", "ring"]) -> Method:
    """How `size` ranks compute the attention of a model together. `config`: of the network. `wanted`: the key. Raises
    UserError if they cannot."""
    model = f"a model of type {config.model_type}"
    traits = traits_of(config)
    if config.get_text_config() is not config:
        raise UserError(f"{model} has a tower; expected 1 rank per sequence, got {size} ({KEY})")
    if others := sorted(set(traits.kinds) - {FULL, SLIDING}):
        raise UserError(
            f"{model} has layers of kind {', '.join(others)}; expected 1 rank per sequence, got {size} ({KEY})"
        )
    if implementation(config) != "sdpa":
        what = "attention sinks or capped scores, or no sdpa"
        raise UserError(f"{model} has {what}; expected 1 rank per sequence, got {size}")
    heads, window = config.num_attention_heads // tensor_size, traits.window
    if wanted == "ulysses" and heads % size:
        raise UserError(f"{KEY}=ulysses: {size} ranks must divide the {heads} heads of {model}; expected auto or ring")
    method: Method = "ring" if wanted == "ring" or heads % size else "ulysses"
    if method == "ring" and window is not None:
        raise UserError(
            f"{model} has a sliding window ({window} tokens), which ring attention does not support; expected a number "
            f"of ranks per sequence that divides the {heads} heads, got {size} (key: {KEY})"
        )
    return method


def padding_of(size: int, method: Method) -> int:
    """Samples of a shared row are padded to a multiple of this."""
    return 2 * size if method == "ring" else size


@dataclasses.dataclass(frozen=True, eq=False)
class Sharing:
    """How a row is shared, for the attention and for `join`."""

    ranks: RowGroup
    method: Method
    spans: Spans  # of the samples in the whole row
    own_s: Tensor  # which of all steps this rank has
    place_S: Tensor  # where `join` finds each step: rank * most + number among the rank's steps
    most: int  # steps on a rank

    @cached_property
    def halves(self) -> tuple[Tensor, Tensor]:
        """Ring: the tokens of this rank in the front and in the back half of each sample."""
        half = (self.spans.starts_N // (2 * self.ranks.size)).long()
        size = int(half[-1])
        at = torch.arange(size, device=half.device)
        sample = torch.searchsorted(half, at, right=True) - 1
        return at + half[sample], at + half[sample + 1]

    def join(self, *outputs_s: Tensor) -> tuple[Tensor, ...]:
        """Outputs of all steps, from those of each rank."""
        joined: Tensor = _Join.apply(torch.stack(outputs_s), self)
        return joined.unbind()


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_Os: Tensor, sharing: Sharing) -> Tensor:
        ctx.sharing = sharing
        size, most = sharing.ranks.size, sharing.most
        sent = torch.nn.functional.pad(own_Os, (0, most - own_Os.shape[1])).contiguous()
        received = [torch.empty_like(sent) for _ in range(size)]
        dist.all_gather(received, sent, group=sharing.ranks.group)
        return torch.cat(received, 1)[:, sharing.place_S]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Every rank has the gradients of all steps, the same ones: they are not summed."""
        return gradients[0][:, ctx.sharing.own_s], None


def order_of(starts: list[int], size: int, method: Method) -> Tensor:
    """The tokens of each rank, k x L. Ulysses: every k-th token, so that the steps are spread evenly. Ring: pieces i
    and 2k - 1 - i of each sample (ring.py)."""
    if method == "ulysses":
        return torch.arange(starts[-1]).view(-1, size).t()
    pieces = [torch.arange(first, end).view(2 * size, -1) for first, end in itertools.pairwise(starts)]
    return torch.cat([torch.cat([piece[:size], piece[size:].flip(0)], 1) for piece in pieces], 1)


def split(packed: Packed, ranks: RowGroup, method: Method, device: torch.device) -> Packed:
    """The inputs of this rank. `packed`: one row on the host, of samples that are padded (`padding_of`)."""
    assert packed.starts is not None
    order_kL = order_of(packed.starts.tolist(), ranks.size, method)
    own_L, length = order_kL[ranks.position], order_kL.shape[1]
    place_T = torch.empty_like(order_kL.flatten())
    place_T[order_kL.flatten()] = torch.arange(order_kL.numel())
    at_S = place_T[packed.select_S]
    rank_S, counts_k = at_S // length, torch.bincount(at_S // length, minlength=ranks.size)
    number_S = torch.empty_like(rank_S)
    for rank, count in enumerate(counts_k.tolist()):
        number_S[rank_S == rank] = torch.arange(count)
    most, own_s = int(counts_k.max()), (rank_S == ranks.position).nonzero()[:, 0]
    spans = Spans(packed.starts.to(device), packed.longest)
    masked = packed.sampling_mask
    if masked is not None:
        ids_K, counts_S = masked
        own_K = torch.repeat_interleave(rank_S == ranks.position, counts_S)
        masked = ids_K[own_K].to(device), counts_S[own_s].to(device)
    return dataclasses.replace(
        packed,
        tokens_RW=packed.tokens_RW[:, own_L].to(device),
        positions_RW=packed.positions_RW[:, own_L].to(device),
        select_S=(at_S % length)[own_s].to(device),
        targets_S=packed.targets_S[own_s].to(device),
        temperature_S=packed.temperature_S[own_s].to(device),
        sample_S=packed.sample_S.to(device),
        starts=spans.starts_N,
        sampling_mask=masked,
        experts_RWLK=None if packed.experts_RWLK is None else packed.experts_RWLK[:, own_L].to(device),
        sharing=Sharing(ranks, method, spans, own_s.to(device), (rank_S * most + number_S).to(device), most),
    )
