"""Small models of transformers, built from the configuration with random weights (model.build)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gcore.config.base import BuildModel, BuildVision

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Qwen3VLConfig


def build_network(build: BuildModel, tokenizer: Any, seed: int, scorer: bool) -> PreTrainedModel:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        LlamaConfig,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
        Qwen3VLForConditionalGeneration,
    )

    families = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig, "qwen3_moe": Qwen3MoeConfig}
    experts: dict[str, Any] = {}
    if build.architecture == "qwen3_moe":
        experts = {"num_experts": build.experts, "num_experts_per_tok": build.active_experts, "norm_topk_prob": True}
        experts |= {"moe_intermediate_size": build.intermediate_size, "decoder_sparse_step": 1}
    make: Any
    if build.vision is not None and not scorer:
        config, make = _vision_config(build, build.vision, tokenizer), Qwen3VLForConditionalGeneration
    else:
        sizes = _decoder_sizes(build, tokenizer)
        config = families[build.architecture](**sizes, attn_implementation="sdpa", **experts)
        make = (AutoModelForSequenceClassification if scorer else AutoModelForCausalLM).from_config
    if scorer:
        config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: PreTrainedModel = make(config)
        return network


def _decoder_sizes(build: BuildModel, tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": build.hidden_size,
        "intermediate_size": build.intermediate_size,
        "num_hidden_layers": build.layers,
        "num_attention_heads": build.heads,
        "num_key_value_heads": build.kv_heads,
        "head_dim": build.hidden_size // build.heads,
        "max_position_embeddings": build.max_length,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _vision_config(build: BuildModel, vision: BuildVision, tokenizer: Any) -> Qwen3VLConfig:
    """Of a small Qwen3-VL. Its vision tower also feeds the first decoder layer directly, as in the large ones."""
    from transformers import Qwen3VLConfig

    token, pairs = tokenizer.convert_tokens_to_ids, build.hidden_size // build.heads // 2
    across = pairs // 3
    text = _decoder_sizes(build, tokenizer)
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [pairs - 2 * across, across, across],
        "mrope_interleaved": True,
    }
    tower = {
        "depth": vision.layers,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.intermediate_size,
        "num_heads": vision.heads,
        "patch_size": vision.patch_size,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": build.hidden_size,
        "num_position_embeddings": (vision.image_size // vision.patch_size) ** 2,
        "deepstack_visual_indexes": [0],
    }
    attention: dict[str, Any] = {"attn_implementation": "sdpa"}
    return Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
        **attention,
    )
