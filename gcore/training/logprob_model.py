"""The StepModel of language models: a packed micro-batch -> logprobs and entropies of the selected steps.

Each row holds whole samples one after another. Positions restart at every sample and attention stays inside it, so a
packed row gives exactly the results of its samples alone. Siblings may share their prefixes (prefixes.py). Logits are
computed only where a response step is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from gcore.content.media import on_device
from gcore.content.tokens import SamplingMask, Tokens, tokens_of
from gcore.models.decoders import (
    CHUNKED,
    FULL,
    MASKED_LOGIT,
    SLIDING,
    decoder_of,
    expert_routers_of,
    implementation,
    layers_of,
    traits_of,
)
from gcore.models.recurrent import Recurrence, Samples
from gcore.training import attention, context, varlen
from gcore.training.context import Sharing
from gcore.training.fused_head import Candidates, Head, Scaling, allowed_tokens, token_logprobs
from gcore.training.prefixes import Level, Tree, levels_of, tree_of
from gcore.training.step_model import ON_CPU, Compute
from gcore.training.varlen import rounded
from gcore.types import Key, MicroBatch, Sample


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
    starts: Tensor | None = None  # varlen: where each node of the one row begins (prefixes.py), and the end; int32
    longest: int = 0  # varlen: of the nodes, rounded up
    levels: tuple[Level, ...] = ()  # varlen: of nodes that are shared
    sampling_mask: Candidates | None = None
    is_padding: bool = False  # dummy batch so that this rank joins the collectives
    sharing: Sharing | None = None  # varlen: the ranks that have the other parts of the row
    paths: tuple[np.ndarray, ...] = ()  # flat positions of each sample's tokens
    experts_RWLK: Tensor | None = None  # of each token and router, as in content.tokens.Tokens; -1: not recorded

    def joined(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs of all steps, from those of LogprobModel.forward."""
        return outputs if self.sharing is None else self.sharing.join(*outputs)


# As the only sample of a micro-batch without samples, so that this rank joins the collectives of the others.
PADDING = Sample(-1, -1, Tokens(*np.zeros((2, 1), np.int32)), np.ones(1, np.bool_), np.zeros(1, np.float32))


def to_tensors(
    batch: MicroBatch,
    samples: Mapping[tuple[int, int], Sample],
    device: torch.device,
    varlen: bool = False,
    multiple: int = 1,
) -> Packed:
    """`varlen`: all samples in one row as long as they are, for attention that needs no mask (varlen.py). `multiple`:
    then, each sample is padded to a multiple of it, at its end."""

    rows, width, is_padding = batch.rows, batch.width, not any(batch.rows)
    if is_padding:
        rows, samples, width = ((PADDING.key,),), {PADDING.key: PADDING}, max(width, PADDING.content.size)
    if varlen:
        rows = (tuple(key for row in rows for key in row),)
    ordered = [[samples[key] for key in row] for row in rows]
    contents = [[tokens_of(sample.content) for sample in row] for row in ordered]
    trees = [tree_of(row, batch.shares, multiple) for row in contents]
    width = trees[0].size if varlen else max(width, *(tree.size for tree in trees))
    tokens, positions = np.zeros((2, len(rows), width), np.int64)
    paths, found = list[np.ndarray](), list[tuple[Sample, Tokens]]()
    for r, tree in enumerate(trees):
        for sample, content, path in zip(ordered[r], contents[r], tree.paths, strict=True):
            tokens[r, path], positions[r, path] = content.tokens_T, np.arange(content.size)
            paths.append(r * width + path)
            found.append((sample, content))
    mask = starts = None
    longest, levels = 0, tuple[Level, ...]()
    if varlen:
        bounds = [node.first for node in trees[0].nodes] + [trees[0].size]
        starts, levels = on_device(np.array(bounds, np.int32), device), levels_of(trees[0], device)
        longest = rounded(int(np.diff(bounds).max()))
    elif any(len(tree.nodes) > 1 for tree in trees):
        mask = torch.stack([_mask(tree, width, device) for tree in trees])[:, None]

    def steps(arrays: list[np.ndarray], dtype: type[np.generic]) -> Tensor:
        return on_device(np.concatenate(arrays, dtype=dtype, casting="unsafe"), device)

    return Packed(
        tokens_RW=on_device(tokens, device),
        positions_RW=on_device(positions, device),
        mask_R1WW=mask,
        select_S=steps([path[len(c.tokens_P) - 1 : -1] for path, (_, c) in zip(paths, found, strict=True)], np.int64),
        targets_S=steps([content.tokens_S for _, content in found], np.int64),
        temperature_S=steps([np.full(s.num_steps, s.temperature) for s, _ in found], np.float32),
        sample_S=steps([np.full(s.num_steps, i) for i, (s, _) in enumerate(found)], np.int64),
        keys=tuple(s.key for s, _ in found),
        sampling_mask=_sampling_mask([content for _, content in found], device),
        starts=starts,
        longest=longest,
        levels=levels,
        is_padding=is_padding,
        paths=tuple(paths),
        experts_RWLK=_experts(paths, [content for _, content in found], tokens.shape, device),
    )


def _mask(tree: Tree, width: int, device: torch.device) -> Tensor:
    """[width, width]: tokens before this one, in its node and those above it."""
    node_W = np.full(width, len(tree.nodes))  # of padding: one more
    for i, node in enumerate(tree.nodes):
        node_W[node.first : node.end] = i
    seen_NN = np.zeros((len(tree.nodes) + 1,) * 2, bool)
    seen_NN[:-1, :-1], seen_NN[-1, -1] = tree.ancestors(), True
    at = on_device(node_W, device)
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    return on_device(seen_NN, device)[at[:, None], at] & causal


def _sampling_mask(contents: list[Tokens], device: torch.device) -> Candidates | None:
    mask = SamplingMask.joined(*((content.sampling_mask, content.num_steps) for content in contents))
    if mask is None:
        return None
    return on_device(mask.ids_K.astype(np.int64), device), on_device(mask.counts_S.astype(np.int64), device)


def _experts(
    paths: Sequence[np.ndarray], contents: Sequence[Tokens], shape: tuple[int, ...], device: torch.device
) -> Tensor | None:
    """Of the first tokens of samples."""
    pairs = zip(paths, (content.experts for content in contents), strict=True)
    known = [(path[: len(experts)], experts) for path, experts in pairs if experts is not None]
    if not known:
        return None
    experts_TLK = np.full((shape[0] * shape[1], *known[0][1].shape[1:]), -1, np.int16)
    for path, experts in known:
        experts_TLK[path] = experts
    return on_device(experts_TLK.reshape(*shape, *experts_TLK.shape[1:]), device)


LOGITS_AT_ONCE = 1 << 27  # elements; above this the vocabulary projection is recomputed in the backward pass, in chunks


class LogprobModel(nn.Module):
    """Implements step_model.StepModel. A causal language model that computes logits only at positions that predict a
    step. `replays`: a mixture of experts uses the experts that the engine has recorded."""

    replays = True

    def __init__(self, network: Any, compute: Compute = ON_CPU) -> None:
        super().__init__()
        self.network, self.compute = network, compute
        self.varlen = varlen.usable(network, compute.device, compute.dtype)
        self.traits = traits_of(network.config)
        self.routers = expert_routers_of(network) if self.replays else None
        self.recurrence = Recurrence(network, self.varlen, compute.dtype) if self.traits.recurrent else None
        self.attention = implementation(network.config)  # of rows with a mask
        attention.register()
        for power in range(1, compute.context.bit_length()):
            self._context_method(2**power)  # can so many ranks share a row?

    @property
    def layers(self) -> Sequence[nn.Module]:
        return cast(Sequence[nn.Module], layers_of(self.network)[1])

    @property
    def hidden_size(self) -> int:
        return int(self.network.config.get_text_config().hidden_size)

    @property
    def padded(self) -> bool:
        return not self.varlen

    @property
    def can_share(self) -> bool:
        allowed = {FULL, "mlp", "moe"} if self.varlen else {FULL, SLIDING, CHUNKED, "mlp", "moe"}
        plain = not self.traits.media_blocks and self.compute.context == 1
        return plain and set(self.traits.kinds) <= allowed

    def checkpoint_activations(self) -> None:
        self.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def pack(self, micro: MicroBatch, samples: Mapping[Key, Sample], ranks: context.RowGroup) -> Packed:
        if ranks.size == 1 or not micro.rows:
            return to_tensors(micro, samples, self.compute.device, self.varlen)
        method = self._context_method(ranks.size)
        multiple = context.padding_of(ranks.size, method)
        packed = to_tensors(micro, samples, torch.device("cpu"), varlen=True, multiple=multiple)
        return context.split(packed, ranks, method, self.compute.device)

    def _context_method(self, size: int) -> context.Method:
        compute = self.compute
        return context.choose_method(self.network.config, size, compute.tensor_size, compute.context_attention)

    def forward(self, packed: Packed) -> tuple[Tensor, ...]:
        decoder = decoder_of(self.network)
        # Layers that are computed again in the backward pass read these then: they stay until the next forward pass.
        if self.routers is not None:
            given = packed.experts_RWLK if self.replays else None
            self.routers.given = None if given is None else given.flatten(0, 1)
        if self.recurrence is not None:
            alone = packed.mask_R1WW is None and packed.starts is None
            as_it_is = alone or (self.recurrence.takes_lengths and packed.starts is not None)
            shape, device = packed.tokens_RW.shape, packed.tokens_RW.device
            self.recurrence.samples = None if as_it_is else Samples(shape, packed.paths, device)
        decoder.config._attn_implementation = self.attention if packed.starts is None else attention.NAME
        hidden = decoder(use_cache=False, **self._inputs(packed)).last_hidden_state
        return self._outputs(hidden.flatten(0, 1)[packed.select_S], packed)

    def _inputs(self, packed: Packed) -> dict[str, Any]:
        """The arguments of the decoder."""
        inputs: dict[str, Any] = {"input_ids": packed.tokens_RW}
        if packed.starts is not None:
            inputs |= {"cu_seq_lens_q": packed.starts, "max_length_q": packed.longest}
            inputs |= {"sharing": packed.sharing, "levels": packed.levels}
        elif packed.mask_R1WW is not None:
            inputs["attention_mask"] = self._masks(packed.mask_R1WW, positions_RW=packed.positions_RW)
        else:  # one sample per row: transformers makes positions and mask
            return inputs
        return {**inputs, "position_ids": packed.positions_RW}

    def _outputs(self, hidden_SD: Tensor, packed: Packed) -> tuple[Tensor, ...]:
        """From the hidden states before each step to what the model computes for the step."""
        head = self.network.get_output_embeddings()
        weight_VD = head.weight
        chunk = max(1, LOGITS_AT_ONCE // len(weight_VD))
        if len(hidden_SD) <= chunk and not self.compute.compiled:
            return self._score(head(hidden_SD), packed)
        if head.bias is not None:  # as the weights of one more feature
            hidden_SD, weight_VD = pad(hidden_SD, (0, 1), value=1.0), torch.cat([weight_VD, head.bias[:, None]], 1)
        scaling = Scaling(self.traits.scale, self.traits.cap, self.traits.forbidden)
        # compiled: one copy in half precision instead of four in float32
        in_chunks = Head(4 * chunk if self.compute.compiled else chunk, scaling, self.compute.compiled)
        asked = packed.targets_S, packed.temperature_S, packed.sampling_mask
        return token_logprobs(in_chunks, hidden_SD, weight_VD, *asked)

    def _masks(self, mask_R1WW: Tensor, blocks_R1WW: Tensor | None = None, positions_RW: Tensor | None = None) -> Any:
        """The mask of each kind of layer, from that of full attention within samples. Without a mask (one sample per
        row), transformers makes them."""
        at_W1 = torch.arange(mask_R1WW.shape[-1], device=mask_R1WW.device)[:, None]
        dtype = self.network.get_input_embeddings().weight.dtype  # under FSDP, the dtype of this forward pass
        at = None if positions_RW is None else (positions_RW[:, None, :, None], positions_RW[:, None, None, :])
        return self.traits.as_argument(self.traits.masks(mask_R1WW, at_W1, dtype, blocks_R1WW, at))

    def _score(self, logits_SV: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        logits_SV = self.traits.scaled(logits_SV.float()) / packed.temperature_S[:, None]
        if packed.sampling_mask is not None:
            allowed_SV = allowed_tokens(*packed.sampling_mask, 0, logits_SV.shape[1])
            logits_SV = logits_SV.masked_fill(~allowed_SV, MASKED_LOGIT)
        logprobs_SV = torch.log_softmax(logits_SV, -1)
        # a sum, not [:, 0]: FSDP2 warns of outputs that are views
        chosen_S = logprobs_SV.gather(-1, packed.targets_S[:, None]).sum(-1)
        return chosen_S, -(logprobs_SV.exp() * logprobs_SV).sum(-1)


class ScoreModel(LogprobModel):
    """The StepModel of scalar reward models, sequence-classification networks of one label: a conversation -> one
    number. The only step of a sample is its last token (content.tokens.Tokens.split(tokens, 1)). Its output takes the
    place of the logprob in objective.StepOutputs, so pairs of scores are trained like pairs of logprobs: preference.py.
    """

    replays = False

    def pack(self, micro: MicroBatch, samples: Mapping[Key, Sample], ranks: context.RowGroup) -> Packed:
        packed = super().pack(micro, samples, ranks)
        # the state after the last token, not the one that predicts it
        ends = on_device(np.array([path[-1] for path in packed.paths]), self.compute.device)
        return packed if packed.is_padding else replace(packed, select_S=ends)

    def _outputs(self, hidden_SD: Tensor, packed: Packed) -> tuple[Tensor, ...]:
        scores_S = self.network.score(hidden_SD).float().sum(-1)  # of one label
        return scores_S, torch.zeros_like(scores_S)


@contextmanager
def own_experts(model: Any) -> Iterator[Any]:
    """In this block a mixture of experts chooses its experts itself."""
    replays, model.replays = getattr(model, "replays", False), False
    try:
        yield model
    finally:
        model.replays = replays
