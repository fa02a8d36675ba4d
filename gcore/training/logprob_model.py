"""The StepModel of language models: tokens -> logprobs and entropies of the selected steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gcore.models.decoders import MASKED_LOGIT, as_argument, implementation, routers_of, traits_of
from gcore.training import attention, context, varlen
from gcore.training.context import Sharing
from gcore.training.fused_head import Scaling, token_logprobs
from gcore.training.micro import Packed, to_tensors
from gcore.training.step_model import ON_CPU, Compute
from gcore.types import Key, MicroBatch, Sample

LOGITS_AT_ONCE = 1 << 27  # elements; above this the vocabulary projection is recomputed in the backward pass, in chunks


class LogprobModel(nn.Module):
    """Implements step_model.StepModel. A causal language model that computes logits only at positions that predict a
    step. `replays`: a mixture of experts uses the experts that the engine has recorded."""

    replays = True

    def __init__(self, network: Any, compute: Compute = ON_CPU) -> None:
        super().__init__()
        self.network, self.compute, self.compiled = network, compute, compute.compiled
        self.varlen = varlen.usable(network, compute.device, compute.dtype)
        self.traits = traits_of(network.config)
        self.routers = routers_of(network) if self.replays else None
        self.attention = implementation(network.config)  # of rows with a mask
        attention.register()

    @property
    def layers(self) -> Sequence[nn.Module]:
        return cast(Sequence[nn.Module], self.network.get_decoder().layers)

    @property
    def hidden_size(self) -> int:
        return int(self.network.config.get_text_config().hidden_size)

    @property
    def padded(self) -> bool:
        return not self.varlen

    def checkpoint_activations(self) -> None:
        self.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def check_sharing(self, num_ranks: int) -> None:
        self._context_method(num_ranks)

    def pack(self, micro: MicroBatch, samples: Mapping[Key, Sample], ranks: context.Ranks) -> Packed:
        if ranks.size == 1 or not micro.rows:
            return to_tensors(micro, samples, self.compute.device, self.varlen)
        method = self._context_method(ranks.size)
        multiple = context.padding_of(ranks.size, method)
        packed = to_tensors(micro, samples, torch.device("cpu"), varlen=True, multiple=multiple)
        return context.split(packed, ranks, method, self.compute.device)

    def _context_method(self, size: int) -> context.Method:
        compute = self.compute
        return context.choose_method(self.network.config, size, compute.tensor_size, compute.context_attention)

    def forward(
        self,
        tokens_RW: Tensor,
        positions_RW: Tensor,
        mask: Tensor | None,
        select_S: Tensor,
        targets_S: Tensor,
        temperature_S: Tensor,
        candidate_ids_K: Tensor | None = None,
        candidate_counts_S: Tensor | None = None,
        starts: Tensor | None = None,
        longest: int = 0,
        sharing: Sharing | None = None,
        experts_RWLK: Tensor | None = None,
        *more: Any,
    ) -> tuple[Tensor, ...]:
        """`candidate_*`: the tokens that could be sampled per step, as in content.tokens.SamplingMask; None: all.
        `starts`, `longest`: of the samples, where all are in one row and the attention needs no mask (varlen.py).
        `sharing`: this rank has a part of that row (context.py). `more`: inputs of subclasses."""
        decoder = self.network.get_decoder()
        # Layers that are computed again in the backward pass read these then: they stay until the next forward pass.
        if self.routers is not None:
            given = experts_RWLK if self.replays else None
            self.routers.given = None if given is None else given.flatten(0, 1)
        decoder.config._attn_implementation = self.attention if starts is None else attention.NAME
        options: dict[str, Any] = {}  # one sample per row: transformers makes positions and mask
        if starts is not None:
            options = {"position_ids": positions_RW, "cu_seq_lens_q": starts, "max_length_q": longest}
            options |= {} if sharing is None else {"sharing": sharing}
        elif mask is not None:
            options = {"position_ids": positions_RW, "attention_mask": self._masks(mask)}
        options |= self._inputs(tokens_RW, positions_RW, mask, *more)
        hidden = decoder(use_cache=False, **options).last_hidden_state
        hidden_SD = hidden.flatten(0, 1)[select_S]
        return self._outputs(hidden_SD, targets_S, temperature_S, candidate_ids_K, candidate_counts_S)

    def _outputs(
        self,
        hidden_SD: Tensor,
        targets_S: Tensor,
        temperature_S: Tensor,
        candidate_ids_K: Tensor | None,
        candidate_counts_S: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """From the hidden states before each step to what the model computes for the step."""
        head = self.network.get_output_embeddings()
        chunk = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
        if len(hidden_SD) <= chunk and not self.compiled:
            return self._score(hidden_SD, targets_S, temperature_S, candidate_ids_K, candidate_counts_S)
        if candidate_ids_K is None and head.bias is None:
            scaling = Scaling(self.traits.scale, self.traits.cap, self.traits.forbidden)
            size = 4 * chunk if self.compiled else chunk  # one copy in half precision instead of four in float32
            inputs = hidden_SD, head.weight, targets_S, temperature_S
            return token_logprobs(*inputs, scaling, size, self.compiled)
        columns = [tensor.split(chunk) for tensor in (hidden_SD, targets_S, temperature_S)]
        columns += _split_candidates(candidate_ids_K, candidate_counts_S, chunk, len(columns[0]))
        parts = [checkpoint(self._score, *row, use_reentrant=False) for row in zip(*columns, strict=True)]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _inputs(self, tokens_RW: Tensor, positions_RW: Tensor, mask: Tensor | None, *more: Any) -> dict[str, Any]:
        """The arguments of the decoder, in addition to the positions and masks of packed rows, or instead of them."""
        return {"input_ids": tokens_RW}

    def _masks(self, mask_R1WW: Tensor, blocks_R1WW: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """The mask of each kind of layer, from that of full attention within samples. Without a mask (one sample per
        row), transformers makes them."""
        at_W1 = torch.arange(mask_R1WW.shape[-1], device=mask_R1WW.device)[:, None]
        dtype = self.network.get_input_embeddings().weight.dtype  # under FSDP, the dtype of this forward pass
        return as_argument(self.traits.masks(mask_R1WW, at_W1, dtype, blocks_R1WW))

    def _score(
        self,
        hidden_SD: Tensor,
        targets_S: Tensor,
        temperature_S: Tensor,
        candidate_ids_K: Tensor | None,
        candidate_counts_S: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        logits_SV = self.traits.scaled(self.network.get_output_embeddings()(hidden_SD).float())
        logits_SV = logits_SV / temperature_S[:, None]
        if candidate_ids_K is not None and candidate_counts_S is not None:
            logits_SV = _mask_others(logits_SV, candidate_ids_K, candidate_counts_S)
        logprobs_SV = torch.log_softmax(logits_SV, -1)
        # a sum, not [:, 0]: FSDP2 warns of outputs that are views
        chosen_S = logprobs_SV.gather(-1, targets_S[:, None]).sum(-1)
        return chosen_S, -(logprobs_SV.exp() * logprobs_SV).sum(-1)


@contextmanager
def own_experts(model: Any) -> Iterator[Any]:
    """In this block a mixture of experts chooses its experts itself."""
    replays, model.replays = getattr(model, "replays", False), False
    try:
        yield model
    finally:
        model.replays = replays


def _mask_others(logits_SV: Tensor, candidate_ids_K: Tensor, candidate_counts_S: Tensor) -> Tensor:
    """Mask the logits of all tokens that are no candidates. A step with a count of 0 had all tokens."""
    allowed_SV = (candidate_counts_S == 0)[:, None].repeat(1, logits_SV.shape[1])
    steps_S = torch.arange(len(candidate_counts_S), device=candidate_ids_K.device)
    step_K = torch.repeat_interleave(steps_S, candidate_counts_S)
    allowed_SV[step_K, candidate_ids_K] = True
    return logits_SV.masked_fill(~allowed_SV, MASKED_LOGIT)


def _split_candidates(
    candidate_ids_K: Tensor | None, candidate_counts_S: Tensor | None, chunk: int, num_chunks: int
) -> list[Sequence[Tensor | None]]:
    if candidate_ids_K is None or candidate_counts_S is None:
        return [[None] * num_chunks, [None] * num_chunks]
    counts = candidate_counts_S.split(chunk)
    return [candidate_ids_K.split([int(part.sum()) for part in counts]), counts]
