"""The network a trainer rank trains: tokens in, logprobs and entropies of the wanted steps out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gcore.decoders import as_argument, traits_of
from gcore.training.fused_head import Scaling, token_logprobs

NEVER = -1e9  # a logit whose probability is 0, and so is its gradient; infinity would make NaN of 0 times it
LOGITS_AT_ONCE = 1 << 27  # elements; above this the vocabulary projection is recomputed in the backward pass, in chunks


class LogprobModel(nn.Module):
    """A causal language model whose logits are computed only where a step is predicted."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.traits = traits_of(network.config)

    def forward(
        self,
        tokens_RW: Tensor,
        positions_RW: Tensor,
        mask: Tensor | None,
        select_S: Tensor,
        targets_S: Tensor,
        temperature_S: Tensor,
        kept_ids_K: Tensor | None = None,
        kept_counts_S: Tensor | None = None,
        starts: Tensor | None = None,
        longest: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """`kept`: the tokens that could be sampled at each step, as in content.tokens.SamplingMask; default: all."""
        if starts is not None:  # samples stand in one row; the attention needs no mask
            hidden = self.network.get_decoder()(
                input_ids=tokens_RW,
                position_ids=positions_RW,
                use_cache=False,
                cu_seq_lens_q=starts,
                max_length_q=longest,
            ).last_hidden_state
        else:
            hidden = self.network.get_decoder()(
                input_ids=tokens_RW,
                position_ids=None if mask is None else positions_RW,
                attention_mask=None if mask is None else self._masks(mask),
                use_cache=False,
            ).last_hidden_state
        hidden_SD = hidden.flatten(0, 1)[select_S]
        head = self.network.get_output_embeddings()
        chunk = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
        on_gpu = hidden_SD.device.type == "cuda"
        if len(hidden_SD) <= chunk and not on_gpu:
            return self._score(hidden_SD, targets_S, temperature_S, kept_ids_K, kept_counts_S)
        if kept_ids_K is None and head.bias is None:
            scaling = Scaling(self.traits.scale, self.traits.cap)
            fused_chunk = 4 * chunk if on_gpu else chunk  # one copy in half precision instead of four in float32
            return token_logprobs(hidden_SD, head.weight, targets_S, temperature_S, scaling, fused_chunk)
        columns = [tensor.split(chunk) for tensor in (hidden_SD, targets_S, temperature_S)]
        columns += _split_kept(kept_ids_K, kept_counts_S, chunk, len(columns[0]))
        parts = [checkpoint(self._score, *row, use_reentrant=False) for row in zip(*columns, strict=True)]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _masks(self, mask_R1WW: Tensor) -> Tensor | dict[str, Tensor]:
        """From the mask of full attention, within samples, to those of the layers. Without a mask (one sample per row)
        the library makes them."""
        at_W1 = torch.arange(mask_R1WW.shape[-1], device=mask_R1WW.device)[:, None]
        dtype = self.network.get_input_embeddings().weight.dtype  # under FSDP, that of this pass
        return as_argument(self.traits.masks(mask_R1WW, at_W1, dtype))

    def _score(
        self,
        hidden_SD: Tensor,
        targets_S: Tensor,
        temperature_S: Tensor,
        kept_ids_K: Tensor | None,
        kept_counts_S: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        logits_SV = self.traits.scaled(self.network.get_output_embeddings()(hidden_SD).float())
        logits_SV = logits_SV / temperature_S[:, None]
        if kept_ids_K is not None and kept_counts_S is not None:
            logits_SV = _among(logits_SV, kept_ids_K, kept_counts_S)
        logprobs_SV = torch.log_softmax(logits_SV, -1)
        chosen_S = logprobs_SV.gather(-1, targets_S[:, None])[:, 0]
        return chosen_S, -(logprobs_SV.exp() * logprobs_SV).sum(-1)


def _among(logits_SV: Tensor, kept_ids_K: Tensor, kept_counts_S: Tensor) -> Tensor:
    """Logits of the kept tokens; the others can never be sampled. A step without any keeps all."""
    allowed_SV = (kept_counts_S == 0)[:, None].repeat(1, logits_SV.shape[1])
    step_K = torch.repeat_interleave(torch.arange(len(kept_counts_S), device=kept_ids_K.device), kept_counts_S)
    allowed_SV[step_K, kept_ids_K] = True
    return logits_SV.masked_fill(~allowed_SV, NEVER)


def _split_kept(
    kept_ids_K: Tensor | None, kept_counts_S: Tensor | None, chunk: int, num_chunks: int
) -> list[Sequence[Tensor | None]]:
    if kept_ids_K is None or kept_counts_S is None:
        return [[None] * num_chunks, [None] * num_chunks]
    counts = kept_counts_S.split(chunk)
    return [kept_ids_K.split([int(part.sum()) for part in counts]), counts]
