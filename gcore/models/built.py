"""Small models of transformers, built from the configuration with random weights (model.build)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from gcore.config.base import BuildModel
from gcore.content.families import built_family, module_of
from gcore.models.decoders import implementation, traits_of
from gcore.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_network(build: BuildModel, tokenizer: Any, seed: int, scorer: bool) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    sizes, family = _decoder_sizes(build, tokenizer), None if scorer else built_family(build)
    if build.architecture == "qwen3_moe":
        sizes |= {"num_experts": build.experts, "num_experts_per_tok": build.active_experts, "norm_topk_prob": True}
        sizes |= {"moe_intermediate_size": build.intermediate_size, "decoder_sparse_step": 1}
    sizes |= build.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: PreTrainedModel
        if family is not None:
            network = module_of(family).build_network(build, tokenizer, sizes)
            return network
        config = _config_of(build, sizes)
        if scorer:
            config.num_labels = 1
        network = (AutoModelForSequenceClassification if scorer else AutoModelForCausalLM).from_config(config)
        return network


def _config_of(build: BuildModel, sizes: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    if build.architecture not in CONFIG_MAPPING:
        near = difflib.get_close_matches(build.architecture, CONFIG_MAPPING.keys(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"model.build.architecture={build.architecture}; expected a model_type of transformers, such as qwen3{hint}"
        )
    default = CONFIG_MAPPING[build.architecture]()  # `config` below keeps any attribute that it is given
    for name in build.config:
        if not hasattr(default, name):
            raise UserError(f"model.build.config: {build.architecture} has no key {name}")
    try:
        config = CONFIG_MAPPING[build.architecture](**sizes)
    except Exception as error:  # of the library's own checks
        first = " ".join(str(error).split())[:300]
        raise UserError(f"model.build: no configuration of {build.architecture} with these sizes: {first}") from error
    traits_of(config)
    config._attn_implementation = implementation(config)
    return config


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
