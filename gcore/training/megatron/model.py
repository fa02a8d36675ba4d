"""A language model of Megatron-Core: the chunks of layers that this rank holds.

Hugging Face configuration ──mbridge──> TransformerConfig ──> GPTModel with Megatron's own layers, except
    attention:  gcore's, over packed samples; ranks may share a row (training/attention.py)
    positions:  those of the samples, with the frequencies of the Hugging Face model
    output:     hidden states; fused_head.py computes logprobs from them, without holding all logits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from gcore.config.megatron import check_family, is_uneven
from gcore.models.decoders import traits_of
from gcore.training import attention
from gcore.training.logprob_model import Packed
from gcore.types import Topology, UserError


@dataclass
class Row(PackedSeqParams):
    """The samples of a micro-batch, for attention and positions. Megatron hands it to every layer as it is."""

    packed: Packed | None = None


class PackedAttention(nn.Module):
    """Causal attention within samples. Megatron's own one needs Transformer Engine for packed samples."""

    def __init__(self, **options: Any) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Row, **rest: Any
    ) -> Tensor:
        """Tensors are tokens x rows x heads x size."""
        row = packed_seq_params.packed
        assert row is not None
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if row.starts is not None:
            given = {"cu_seq_lens_q": row.starts, "max_length_q": row.longest, "sharing": row.sharing}
            output_RWHD, _ = attention.attend(None, query, key, value, None, **given)  # type: ignore[arg-type]
        else:
            causal = row.mask_R1WW is None
            output = scaled_dot_product_attention(query, key, value, row.mask_R1WW, is_causal=causal, enable_gqa=True)
            output_RWHD = output.transpose(1, 2)
        return output_RWHD.transpose(0, 1).flatten(2)


class Positions(nn.Module):
    """Rotary angles of the positions of a micro-batch: they restart at each sample."""

    def __init__(self, rotary: Any, device: torch.device) -> None:
        """`rotary`: of the Hugging Face model."""
        super().__init__()
        self.frequencies = rotary.inv_freq.to(device, torch.float32)

    def get_rotary_seq_len(self, context: Any, decoder: Any, hidden: Any, config: Any, row: Row) -> Tensor:
        """Megatron asks for a length, and passes the answer to `forward`."""
        assert row.packed is not None
        return row.packed.positions_RW

    def forward(self, positions_RW: Tensor, **rest: Any) -> Tensor:
        angles_WRF = positions_RW.t()[:, :, None].float() * self.frequencies
        return torch.cat([angles_WRF, angles_WRF], -1)[:, :, None]


def check(network: Any) -> None:
    """Raises UserError if a model cannot be trained here. `network`: of Hugging Face, without weights."""
    config = network.config
    check_family(config.model_type)
    reasons = {
        "has biases outside of queries, keys and values": config.model_type == "llama"
        and (config.mlp_bias or config.attention_bias),
        "has layers without experts": config.model_type == "qwen3_moe"
        and bool(config.mlp_only_layers or config.decoder_sparse_step != 1),
        "has a sliding window": traits_of(config).window is not None,
        "scales the attention of long sequences": network.get_decoder().rotary_emb.attention_scaling != 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"training.backend=megatron: the model {reason}; expected training.backend=fsdp")


def bridge_of(network: Any, topology: Topology, dtype: torch.dtype, recompute: bool, on_cpu: bool) -> Any:
    """The bridge of mbridge for this model, with the TransformerConfig that Megatron's own layers need."""
    from mbridge import AutoBridge

    bridge = AutoBridge.from_config(network.config, dtype=dtype)
    options: dict[str, Any] = {
        "sequence_parallel": False,  # not with Megatron's own norms
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "moe_grouped_gemm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "perform_initialization": False,  # weights are read
        "use_cpu_initialization": on_cpu,
        "deallocate_pipeline_outputs": True,
        "overlap_p2p_comm": False,
    }
    if network.config.model_type == "qwen3_moe":
        options["moe_router_dtype"] = "fp32"
        options["moe_aux_loss_coeff"] = 0.0
        if not network.config.norm_topk_prob:
            options["moe_router_pre_softmax"] = True
    if is_uneven(network.config.num_hidden_layers, topology):
        options |= {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    if recompute:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    bridge.set_extra_args(**options)
    return bridge


def build(
    bridge: Any, network: Any, padded_vocab: int, virtual: int, device: torch.device, critic: bool = False
) -> list[Any]:
    """This rank's chunks of the model, one per virtual stage, without meaningful weights. `critic`: with a value head
    instead of the output matrix."""
    config, tied = bridge.config, bool(network.config.tie_word_embeddings) and not critic
    chunks = []
    for stage in range(virtual):
        number = stage if virtual > 1 else None
        spec = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm", vp_stage=number)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
        where = {"ignore_virtual": False, "vp_stage": number}
        chunk = GPTModel(
            config,
            spec,
            padded_vocab,
            network.config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            vp_stage=number,
        )
        chunk.rotary_pos_emb = Positions(network.get_decoder().rotary_emb, device)
        if chunk.post_process:
            if critic:
                chunk.output_layer = nn.Module()
                chunk.score = nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
            chunk.output_layer.forward = _unchanged
        chunks.append(chunk.to(device))
    return chunks


def _unchanged(hidden: Tensor, **options: Any) -> tuple[Tensor, None]:
    return hidden, None
