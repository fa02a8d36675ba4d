"""The planner's shapes of models with states, latent attention or experts: parameters are those of the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gcore.cost.shapes import shape_of
from tests.contract.test_families import MLA, family

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 64, "num_hidden_layers": 4}
DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
TURNS = {"layer_types": ["linear_attention", "full_attention"] * 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_expand": 2}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "qwen3_5": ("Qwen3_5TextConfig", {"head_dim": 64, **DELTA, **TURNS}),
    "qwen3_next": ("Qwen3NextConfig", {"head_dim": 64, **DELTA, **TURNS, "num_experts": 4, "num_experts_per_tok": 2}),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **MLA,
            **TURNS,
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "linear_head_dim": 32,
            "linear_num_heads": 8,
            "num_experts": 4,
        },
    ),
    "falcon_h1": ("FalconH1Config", {"head_dim": 64, "mamba_d_ssm": 512, **MAMBA}),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1], **MAMBA}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
    "deepseek_v3": ("DeepseekV3Config", {**MLA, "first_k_dense_replace": 0, "num_key_value_heads": 4}),
}
UNCOUNTED = {"qwen3_5": 0.08, "qwen3_next": 0.2, "kimi_linear": 0.12}  # gates of attention, shared experts


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_the_network(name, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    kind, options = CASES[name]
    config = family(kind, **{**SIZES, "tie_word_embeddings": True, **options})()
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    shape = shape_of(str(tmp_path), "model.path")
    assert shape.parameters == pytest.approx(
        sum(p.numel() for p in network.parameters()), rel=UNCOUNTED.get(name, 0.02)
    )


def shape_from(tmp_path: Path, **config: Any) -> Any:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "num_hidden_layers": 4, "vocab_size": 10, **config}))
    return shape_of(str(tmp_path), "model.path")


def test_caches_and_states_by_hand(tmp_path: Path):
    delta = {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 1,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 3,
    }
    shape = shape_from(tmp_path, full_attention_interval=4, **delta)
    assert shape.kv_bytes_per_token == 1 * 2 * 1 * 4 * 2  # one of four layers, keys and values, in bfloat16
    assert shape.state_bytes == 3 * (2 * 4 * 3 + 4 * (2 * 4 + 6)) * 4  # states and convolutions of four inputs
    assert shape.cost.crossover < float("inf")
    latent = {"kv_lora_rank": 6, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4}
    assert shape_from(tmp_path, **latent).kv_bytes_per_token == 4 * (6 + 2) * 2
    alone = shape_from(tmp_path, layer_types=["linear_attention"] * 4, mamba_d_state=2, mamba_n_heads=2, mamba_d_head=8)
    assert alone.kv_bytes_per_token == 0 and alone.cost.crossover == float("inf")
    pattern = shape_from(
        tmp_path, hybrid_override_pattern="M-*-", ssm_state_size=2, mamba_num_heads=2, mamba_head_dim=8
    )
    assert (pattern.attention_layers, pattern.mlp_layers) == (1, 2)
